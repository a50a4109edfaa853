"""From a source's rows to batches: augmentation, the order of a run, and what the device gets.

Everything random about a sample is a function of (seed, epoch, index), so neither workers nor
processes nor a resume can change what a step reads.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpp import draws
from mpp.errors import ImageError, UserError
from mpp.sources import Source

CROP_RATIO = (3 / 4, 4 / 3)  # Inception-style crop, as in the ViT paper's code
_CROP_ATTEMPTS = 10

PerSample = Callable[[int, int], Mapping[str, np.ndarray]]


def training_crop(
    picture: Image.Image, size: int, area: tuple[float, float], flip: bool, raw: np.ndarray
) -> np.ndarray:
    """An Inception-style random crop, resized once by a bilinear filter, and mirrored half of the time.

    Args:
        picture: RGB.
        size: side of the result in pixels.
        area: smallest and largest share of the picture's area.
        raw: the sample's random words, `crop_words()` of them.

    Returns:
        uint8 [size, size, 3].

    Source: ViT paper's code; area 5 % to 100 %, aspect 3/4 to 4/3.
    """
    chance = draws.uniforms(raw)
    box = _crop_box(picture.width, picture.height, area, chance[1:])
    pixels = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return np.ascontiguousarray(pixels[:, ::-1]) if flip and chance[0] < 0.5 else pixels


def crop_words() -> int:
    """Random words that `training_crop` needs."""
    return 1 + 4 * _CROP_ATTEMPTS


def _crop_box(width: int, height: int, area: tuple[float, float], chance: np.ndarray) -> tuple[int, int, int, int]:
    low, high = np.log(CROP_RATIO)
    for u in chance.reshape(_CROP_ATTEMPTS, 4):
        pixels = width * height * (area[0] + (area[1] - area[0]) * u[0])
        ratio = np.exp(low + (high - low) * u[1])
        w, h = round((pixels * ratio) ** 0.5), round((pixels / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, top = int(u[2] * (width - w + 1)), int(u[3] * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, round(height * CROP_RATIO[1]))  # the largest centred crop of a permitted aspect
    h = min(height, round(width / CROP_RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def whole_image(picture: Image.Image, size: int) -> np.ndarray:
    """The whole picture resized to a square, bilinear, as the ViT paper's code evaluates; uint8 [size, size, 3]."""
    return np.array(picture.resize((size, size), Image.Resampling.BILINEAR))


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


def labelled_rows(source: Source, seed: int, per_class: int | None, holdout: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to choose the learning rate on, drawn within each class by the seed.

    Args:
        per_class: rows of each class to use in all; None for every row.
        holdout: share of these that is held out, at least one row of each class unless it is 0.

    Returns:
        Two ascending int64 arrays without a common row.

    Raises:
        UserError: no labels, a class with too few images, or nothing left to train on.
    """
    if source.labels is None or source.classes is None:
        raise UserError("the source has no classes: put the images in class folders, SPLIT/CLASS/*.jpg")
    counts = np.bincount(source.labels, minlength=len(source.classes))
    if per_class is not None and counts.min() < per_class:
        short = source.classes[int(counts.argmin())]
        raise UserError(f"data.per_class={per_class}: class {short} has {counts.min()} images; use at most that many")
    used = np.minimum(counts, per_class) if per_class is not None else counts
    held = np.maximum(np.round(used * holdout), 1).astype(int) if holdout else np.zeros_like(used)
    if holdout and (held >= used).any():
        short = source.classes[int((used - held).argmin())]
        raise UserError(f"data.holdout={holdout}: class {short} has too few images to hold one out")
    rank = draws.ranked_within_class(seed, "subset", source.labels)
    return (
        np.flatnonzero((rank < used[source.labels]) & (rank >= held[source.labels])),
        np.flatnonzero(rank < held[source.labels]),
    )


def read_order(step: int, batch_size: int, micro_batch: int, processes: int, process: int) -> Iterator[list[int]]:
    """Places in the endless stream of samples that one process reads in one step, a list a micro-batch.

    Step s of the run reads places s * batch_size and on, whatever the number of processes.
    """
    for start in range(0, batch_size, micro_batch * processes):
        first = step * batch_size + start + process * micro_batch
        yield list(range(first, first + micro_batch))


@dataclass(frozen=True)
class TrainingSamples(Dataset):
    """Augmented samples by their place in the endless stream of a run.

    Attributes:
        rows: int64, the rows of the source that are trained on.
        per_sample: (epoch, index) -> what the objective adds to a sample.
    """

    source: Source
    rows: np.ndarray
    seed: int
    image_size: int
    crop_area: tuple[float, float]
    flip: bool
    per_sample: PerSample

    def __getitem__(self, place: int) -> dict[str, Any] | ImageError:
        epoch, place_in_epoch = divmod(place, len(self.rows))
        index = int(self.rows[draws.order(self.seed, epoch, len(self.rows))[place_in_epoch]])
        raw = draws.words(self.seed, "augment", epoch, index, crop_words())

        def crop(picture: Image.Image) -> np.ndarray:
            return training_crop(picture, self.image_size, self.crop_area, self.flip, raw)

        return _sample(self.source, index, crop, self.per_sample(epoch, index))


@dataclass(frozen=True)
class HeldOutSamples(Dataset):
    """Samples without augmentation, by their place among `rows`; the same in every epoch."""

    source: Source
    rows: np.ndarray
    image_size: int
    per_sample: PerSample

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Any] | ImageError:
        index = int(self.rows[place])
        return _sample(
            self.source, index, lambda picture: whole_image(picture, self.image_size), self.per_sample(0, index)
        )


def _sample(
    source: Source, index: int, pixels: Callable[[Image.Image], np.ndarray], extra: Mapping[str, np.ndarray]
) -> dict[str, Any] | ImageError:
    """One sample, or the error about it: torch would wrap an exception of a worker in its traceback."""
    try:
        image = pixels(source.image(index))
    except ImageError as error:
        return error
    label = -1 if source.labels is None else int(source.labels[index])
    return {"index": index, "images": image, "labels": label, **extra}


def _collate(samples: list[dict[str, Any] | ImageError]) -> dict[str, Tensor] | ImageError:
    whole: list[dict[str, Any]] = []
    for sample in samples:
        if isinstance(sample, ImageError):
            return sample
        whole.append(sample)
    return {key: torch.from_numpy(np.stack([sample[key] for sample in whole])) for key in whole[0]}


class _ReadOrder:
    """A batch sampler: the lists of places that one process reads, from a step on."""

    def __init__(self, batches: Callable[[], Iterator[list[int]]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches()


def _first() -> Iterator[list[int]]:
    yield [0]


def _outlive_signals(_: int) -> None:
    """A worker leaves when its process does; a signal to all of them is that process's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def load(
    samples: Dataset, batches: Callable[[], Iterator[list[int]]], workers: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Batches on the device: images uint8 [batch, height, width, channel], labels, index, and the objective's.

    Raises:
        ImageError: an image can't be read.
    """
    loader = DataLoader(
        samples,
        batch_sampler=_ReadOrder(batches),
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=_outlive_signals,
        generator=torch.Generator(),  # the loader would else draw from the one that dropout uses
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        if isinstance(batch, ImageError):
            raise batch
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
) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of one process, from a step to the end of the run."""

    def places() -> Iterator[list[int]]:
        for step in range(first_step, steps):
            yield from read_order(step, batch_size, micro_batch, processes, process)

    return load(samples, places, workers, device)


def held_out_batches(
    samples: HeldOutSamples, *, micro_batch: int, processes: int, process: int, workers: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Every sample once over all processes; the last batch of a process may be short.

    A process that is left without samples gets one empty batch, so that it has counts to reduce.
    """
    if process >= len(samples):
        return ({key: value[:0] for key, value in batch.items()} for batch in load(samples, _first, 0, device))

    def places() -> Iterator[list[int]]:
        mine = range(process, len(samples), processes)
        for start in range(0, len(mine), micro_batch):
            yield list(mine[start : start + micro_batch])

    return load(samples, places, workers, device)
