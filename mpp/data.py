"""From a source's rows to batches: augmentation, the order of a run, and what the device gets.

Everything random about a sample is a function of (seed, epoch, index), so neither workers nor
processes nor a resume can change what a step reads.

python mpp/data.py check SOURCE  reads a source once and reports what is in it.
"""

import ctypes
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__" and not __package__:  # run as a file: the repository's root takes this folder's place
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpp import augmentation, draws
from mpp.decoding import Box, Picture, mirror, resize
from mpp.errors import ImageError, UserError
from mpp.order import Order
from mpp.sources import Source

CROP_RATIO = (3 / 4, 4 / 3)  # Inception-style crop, as in the ViT paper's code
_CROP_ATTEMPTS = 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as mallopt(3) calls them
_REPLACEMENTS = 20  # samples that are tried in the place of a broken one
_PART_ROUNDS = 8  # of the Feistel network that ranks rows for `subset_rows`, as in an epoch's order
_PART_CHUNK = 2**16  # rows that are ranked together; larger ones leave the processor's cache

Batches = Generator[dict[str, Tensor], None, None]
PerSample = Callable[[int, int], Mapping[str, np.ndarray]]
Broken = list[tuple[int, str]]  # rows that a sample was to be read from, each with what is wrong with it


@dataclass(frozen=True)
class View:
    """How a picture becomes the square that the model sees; always uint8, resized by one filter.

    Attributes:
        image_size: side of the square in pixels.
        crop: how training cuts it. inception: a random part of the area, stretched to the square (the ViT
            paper's code); square: the whole resized to a square of `resize`, and a random place in it
            (BiT); short_side: the same with the short side resized (big_vision).
        area: smallest and largest share of the picture's area, of inception.
        flip: whether training mirrors half of the samples.
        eval_crop: how evaluation does. whole: the whole picture stretched to the square (the ViT paper's
            code); center: the short side resized to `resize`, and the middle of it (big_vision).
        resize: side in pixels before the cut, for all but inception and whole.
        rand_augment: timm's string of a RandAugment of what training has cut; None for none.
        erasing: probability with which training then fills a random rectangle with noise.

    Raises:
        UserError: timm would not do what `rand_augment` says.
    """

    image_size: int
    crop: Literal["inception", "square", "short_side"] = "inception"
    area: tuple[float, float] = (0.05, 1.0)
    flip: bool = True
    eval_crop: Literal["whole", "center"] = "whole"
    resize: int | None = None
    rand_augment: str | None = None
    erasing: float = 0.0

    def __post_init__(self) -> None:
        if self.rand_augment is not None:
            augmentation.rand_augment_transform(self.rand_augment)

    def words(self) -> int:
        """Random words that a training sample needs; those of its crop come first, whatever follows."""
        return crop_words() + (2 if self.rand_augment is not None or self.erasing else 0)

    def train(self, picture: Picture, raw: np.ndarray) -> np.ndarray:
        """One random crop, augmented; uint8 [image_size, image_size, 3], from `words()` random words."""
        chance = draws.uniforms(raw).tolist()
        if self.crop == "inception":
            box = _crop_box(picture.width, picture.height, self.area, chance[1:])
            pixels = resize(picture.region(box), self.image_size, self.image_size)
        else:
            pixels = _cut(self._before_cut(picture, self.crop == "square"), self.image_size, chance[1], chance[2])
        pixels = mirror(pixels) if self.flip and chance[0] < 0.5 else pixels
        if self.rand_augment is not None:
            pixels = augmentation.rand_augment(pixels, self.rand_augment, raw[crop_words()])
        if self.erasing:
            pixels = augmentation.erase(pixels, self.erasing, raw[crop_words() + 1])
        return pixels

    def evaluate(self, picture: Picture) -> np.ndarray:
        """The crop that evaluation takes, uint8 [image_size, image_size, 3]."""
        if self.eval_crop == "whole":
            return whole_image(picture, self.image_size)
        return _cut(self._before_cut(picture, False), self.image_size, 0.5, 0.5)

    def _before_cut(self, picture: Picture, square: bool) -> np.ndarray:
        assert self.resize is not None and self.resize >= self.image_size
        scale = self.resize / min(picture.width, picture.height)
        height = self.resize if square else max(round(picture.height * scale), self.resize)
        width = self.resize if square else max(round(picture.width * scale), self.resize)
        return resize(picture.region((0, 0, picture.width, picture.height)), height, width)


def _cut(pixels: np.ndarray, size: int, down: float, right: float) -> np.ndarray:
    """A square at a share of the free way down and to the right, each in [0, 1)."""
    top, left = int(down * (pixels.shape[0] - size + 1)), int(right * (pixels.shape[1] - size + 1))
    return np.ascontiguousarray(pixels[top : top + size, left : left + size])


def crop_words() -> int:
    """Random words that a training crop needs."""
    return 1 + 4 * _CROP_ATTEMPTS


def _crop_box(width: int, height: int, area: tuple[float, float], chance: list[float]) -> Box:
    """An Inception-style box from four numbers an attempt, each in [0, 1): area, aspect, left, top."""
    low, high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    for attempt in range(_CROP_ATTEMPTS):
        size, aspect, right, down = chance[4 * attempt : 4 * attempt + 4]
        pixels = width * height * (area[0] + (area[1] - area[0]) * size)
        ratio = math.exp(low + (high - low) * aspect)
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(right * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, round(height * CROP_RATIO[1]))  # the largest centred crop of a permitted aspect
    h = min(height, round(width / CROP_RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def whole_image(picture: Picture, size: int) -> np.ndarray:
    """The whole picture resized to a square, bilinear, as the ViT paper's code evaluates; uint8 [size, size, 3]."""
    return resize(picture.region((0, 0, picture.width, picture.height)), size, size)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels as the network takes them.

    Args:
        images: uint8 [batch, height, width, channel].
        mean, std: of each channel on the scale [0, 1].

    Returns:
        float32 [batch, channel, height, width].
    """
    scale = images.new_tensor(std, dtype=torch.float32) * 255
    shift = images.new_tensor(mean, dtype=torch.float32) * 255
    return ((images.float() - shift) / scale).permute(0, 3, 1, 2)


# ---------------------------------------------------------------- from rows to batches


def subset_rows(count: int, subset: int | float | None) -> range | np.ndarray:
    """Rows of a fixed random part of a split; a smaller part lies within every larger one.

    Args:
        count: rows of the split.
        subset: a share (float), a number of rows (int), or None for all.

    Returns:
        Rising; a range where it is all of them, else int32, or int64 where rows don't fit that.

    Raises:
        UserError: there are fewer rows than that.
    """
    if subset is None:
        return range(count)
    size = max(round(subset * count), 1) if isinstance(subset, float) else subset
    if size > count:
        raise UserError(f"data.subset={subset}: the split has {count} images; use at most that many, or null for all")
    if size == count:
        return range(count)
    rows = np.empty(size, dtype=np.int32 if count < 2**31 else np.int64)
    keys = draws.words(0, "part", 0, 0, _PART_ROUNDS)
    filled = 0
    for start in range(0, count, _PART_CHUNK):
        chunk = np.arange(start, min(start + _PART_CHUNK, count))
        chosen = chunk[draws.permuted(keys, count, chunk) < size]
        rows[filled : filled + len(chosen)] = chosen
        filled += len(chosen)
    return rows


def labelled_rows(
    source: Source, seed: int, per_class: int | None, holdout: float, rows: range | np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to choose the learning rate on, drawn by the seed.

    They are drawn within each class, and from all images alike where an image can have several labels.

    Args:
        per_class: rows of each class to use in all; None for every row.
        holdout: share of these that is held out, at least one row of each class unless it is 0.
        rows: to draw from, rising; None for all of the source.

    Returns:
        Two ascending arrays without a common row, int64 or of the type of `rows`.

    Raises:
        UserError: no labels, a class with too few images, or nothing left to train on; or rows of each class are
            asked for where an image can have several.
    """
    if source.labels is None or source.classes is None:
        raise UserError("the source has no classes: put the images in class folders, SPLIT/CLASS/*.jpg")
    rows = range(len(source)) if rows is None else rows
    rows = np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows
    if source.labels.ndim == 2:
        if per_class is not None:
            raise UserError(
                f"data.per_class={per_class}: images of this source can have several labels, so that they can't be "
                "counted out by class; use null, and data.subset for fewer images"
            )
        held_out = max(round(holdout * len(rows)), 1) if holdout else 0
        if held_out and held_out >= len(rows):
            raise UserError(f"data.holdout={holdout}: {len(rows)} images are too few to hold one out")
        rank = draws.ranked_within_class(seed, "subset", np.zeros(len(rows), dtype=np.int8))  # as one class
        return rows[rank >= held_out], rows[rank < held_out]
    labels = source.labels[rows]
    counts = np.bincount(labels, minlength=len(source.classes))
    if per_class is not None and counts.min() < per_class:
        short = source.classes[int(counts.argmin())]
        raise UserError(f"data.per_class={per_class}: class {short} has {counts.min()} images; use at most that many")
    used = np.minimum(counts, per_class) if per_class is not None else counts
    held = np.maximum(np.round(used * holdout), 1).astype(int) if holdout else np.zeros_like(used)
    if holdout and (held >= used).any():
        short = source.classes[int((used - held).argmin())]
        raise UserError(f"data.holdout={holdout}: class {short} has too few images to hold one out")
    rank = draws.ranked_within_class(seed, "subset", labels)
    return rows[(rank < used[labels]) & (rank >= held[labels])], rows[rank < held[labels]]


def read_order(step: int, batch_size: int, micro_batch: int, processes: int, process: int) -> Iterator[np.ndarray]:
    """Places in the endless stream of samples that one process reads in one step, an array a micro-batch.

    Step s of the run reads places s * batch_size and on, whatever the number of processes.
    """
    for start in range(0, batch_size, micro_batch * processes):
        first = step * batch_size + start + process * micro_batch
        yield np.arange(first, first + micro_batch)


def held_out_order(count: int, micro_batch: int, processes: int, process: int) -> Iterator[list[int]]:
    """Which of `count` samples one process reads, a list a batch: each sample once over all processes."""
    mine = range(process, count, processes)
    for start in range(0, len(mine), micro_batch):
        yield list(mine[start : start + micro_batch])


@dataclass(frozen=True)
class TrainingSamples(Dataset):
    """Augmented samples by (epoch, place among the rows).

    Attributes:
        rows: the rows of the source that are trained on, rising; a range where they are all.
        labels: of the source's rows; None where they are not needed.
        per_sample: (epoch, index) -> what the objective adds to a sample.
        replace: whether a broken image is replaced by another, which the seed draws.
        window: shards that are shuffled together.
    """

    source: Source
    rows: Sequence[int] | np.ndarray
    seed: int
    view: View
    per_sample: PerSample
    labels: np.ndarray | None = None
    replace: bool = False
    window: int = 1

    def order(self) -> Order:
        starts = self.source.starts
        if not isinstance(self.rows, range):  # of the rows that are used, by shard
            starts = np.searchsorted(np.asarray(self.rows), starts)
        return Order(self.seed, starts, self.window)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any] | UserError:
        epoch, place = key
        index = int(self.rows[place])
        raw = draws.words(self.seed, "augment", epoch, index, self.view.words())
        extra = self.per_sample(epoch, index)
        broken: Broken = []
        for row in (index, *self._replacements(epoch, index)):
            sample = _sample(self.source, row, lambda picture: self.view.train(picture, raw), self.labels, extra)
            if not isinstance(sample, UserError):
                return {**sample, "broken": broken} if broken else sample
            if not isinstance(sample, ImageError):
                return sample
            if not self.replace:
                return ImageError(f"{sample}. With data.on_error=replace the run continues with another in its place")
            broken.append((row, str(sample)))
        return UserError(f"{broken[0][1]}. {_REPLACEMENTS} samples drawn in its place are broken, too")

    def _replacements(self, epoch: int, index: int) -> Iterator[int]:
        if self.replace:
            raw = draws.words(self.seed, "replacement", epoch, index, _REPLACEMENTS)
            yield from (int(self.rows[place]) for place in draws.below(raw, len(self.rows)))


@dataclass(frozen=True)
class HeldOutSamples(Dataset):
    """Samples without augmentation, by their place among `rows`; the same in every epoch."""

    source: Source
    rows: Sequence[int] | np.ndarray
    view: View
    per_sample: PerSample
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Any] | UserError:
        index = int(self.rows[place])
        return _sample(self.source, index, self.view.evaluate, self.labels, self.per_sample(0, index))


def _sample(
    source: Source,
    index: int,
    pixels: Callable[[Picture], np.ndarray],
    labels: np.ndarray | None,
    extra: Mapping[str, np.ndarray],
) -> dict[str, Any] | UserError:
    """One sample, or the error about it: torch would wrap an exception of a worker in its traceback."""
    try:
        image = pixels(source.picture(index))
    except UserError as error:
        return error
    label = np.int64(-1) if labels is None else labels[index].astype(np.int64)
    return {"index": index, "images": image, "labels": label, **extra}


def _collate(samples: list[dict[str, Any] | UserError]) -> dict[str, Any] | UserError:
    whole: list[dict[str, Any]] = []
    broken: list[Broken] = []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        broken += [sample.pop("broken")] if "broken" in sample else []
        whole.append(sample)
    return {"broken": broken} | {key: torch.from_numpy(np.stack([sample[key] for sample in whole])) for key in whole[0]}


class _Batches:
    """A batch sampler: the lists of keys that one process reads."""

    def __init__(self, batches: Callable[[], Iterator[list[Any]]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self.batches()


def _first() -> Iterator[list[int]]:
    yield [0]


def outlive_signals(_: int) -> None:
    """A worker leaves when its process does; a signal to all of them is that process's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_method(workers: int) -> str | None:
    """How loader processes begin: by a fork where that is possible, so that they share the source's index."""
    return "fork" if workers and "fork" in multiprocessing.get_all_start_methods() else None


def _keep_freed_memory() -> None:
    """Has glibc give out freed memory again: by default it fetches new pages for every image, and clears them."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            library = ctypes.CDLL(None)
            library.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
            library.mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)


def load(
    samples: Dataset,
    batches: Callable[[], Iterator[list[Any]]],
    workers: int,
    device: torch.device,
    found_broken: Callable[[list[Broken]], None] = lambda broken: None,
) -> Batches:
    """Batches on the device: images uint8 [batch, height, width, channel], labels, index, and the objective's.

    Labels are int64: [batch], or [batch, most] padded with -1 where an image can have several; -1 where there are none.

    Args:
        batches: the keys of the samples of each batch.
        found_broken: told of every sample of a batch that was replaced, before the batch is used.

    Raises:
        ImageError: an image can't be read.
    """
    _keep_freed_memory()
    loader = DataLoader(
        samples,
        batch_sampler=_Batches(batches),
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=outlive_signals,
        generator=torch.Generator(),  # the loader would else draw from the one that dropout uses
        pin_memory=device.type == "cuda",
        multiprocessing_context=start_method(workers),
    )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        if broken := batch.pop("broken"):
            found_broken(broken)
        yield {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def training_batches(
    samples: TrainingSamples,
    *,
    first_step: int,
    steps: int,
    batch_size: int,
    micro_batch: int,
    processes: int,
    process: int,
    workers: int,
    device: torch.device,
    found_broken: Callable[[list[Broken]], None] = lambda broken: None,
) -> Batches:
    """The micro-batches of one process, from a step to the end of the run; raises as `load`."""
    order = samples.order()

    def keys() -> Iterator[list[tuple[int, int]]]:
        for step in range(first_step, steps):
            for places in read_order(step, batch_size, micro_batch, processes, process):
                epochs, chosen = order.at(places)
                yield list(zip(epochs.tolist(), chosen.tolist(), strict=True))

    return load(samples, keys, workers, device, found_broken)


def held_out_batches(
    samples: HeldOutSamples, *, micro_batch: int, processes: int, process: int, workers: int, device: torch.device
) -> Batches:
    """Every sample once over all processes; the last batch of a process may be short.

    A process that is left without samples gets one empty batch, so that it has counts to reduce.
    """
    if process >= len(samples):
        return ({key: value[:0] for key, value in batch.items()} for batch in load(samples, _first, 0, device))
    return load(samples, lambda: held_out_order(len(samples), micro_batch, processes, process), workers, device)


if __name__ == "__main__":
    from mpp.check import main

    main()
