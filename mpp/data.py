"""Images in, batches out: sources, augmentation, the order of a run, and what the device gets.

A source is addressed by index. Everything random about a sample is a function of (seed, epoch,
index), so neither workers nor processes nor a resume can change what a step reads.
"""

import hashlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpp import draws
from mpp.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
SPLITS = ("train", "validation", "val", "test")
CROP_RATIO = (3 / 4, 4 / 3)  # Inception-style crop, as in the ViT paper's code
_CROP_ATTEMPTS = 10

PerSample = Callable[[int, int], Mapping[str, np.ndarray]]


class Source(Protocol):
    """A collection of images in a fixed order.

    Attributes:
        classes: names in the order of the labels; None where the source has no labels.
        labels: int64 [rows], or None.
        fingerprint: equal where the same rows stand in the same order.
    """

    classes: list[str] | None
    labels: np.ndarray | None
    fingerprint: str

    def __len__(self) -> int: ...

    def image(self, row: int) -> Image.Image:
        """The row's picture in RGB; raises UserError naming the file or row that can't be read."""
        ...


@dataclass(frozen=True)
class Pictures:
    """A source that lies in memory, uint8 [row, height, width, channel]."""

    pixels: np.ndarray
    classes: list[str] | None
    labels: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self.pixels)

    def image(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row])


@dataclass(frozen=True)
class Folder:
    """Image files below a folder, sorted by path."""

    root: Path
    files: list[str]
    classes: list[str] | None
    labels: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self.files).encode()).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self.files)

    def image(self, row: int) -> Image.Image:
        return _read_image(self.root / self.files[row], str(self.root / self.files[row]))


@dataclass(frozen=True)
class HubRows:
    """Rows of a Hugging Face data set; images stay encoded until they are asked for."""

    rows: Any
    name: str
    image_column: str
    classes: list[str] | None
    labels: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        return str(self.rows._fingerprint)

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, row: int) -> Image.Image:
        import io

        cell = self.rows[row][self.image_column]
        encoded = io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"]
        return _read_image(encoded, f"{self.name} row {row}")


def open_source(source: str, split: str) -> Source:
    """One split of a source.

    Args:
        source: demo, folder:PATH, hub:NAME[@REVISION] or synthetic:N.
        split: its name in the source.

    Raises:
        UserError: no such kind of source, path or split, or no image in it.
    """
    kind, _, argument = source.partition(":")
    if kind not in SOURCES:
        raise UserError(f"data.source={source}: no source of that kind; there are {', '.join(SOURCE_FORMS)}")
    opened = SOURCES[kind](argument, split)
    if len(opened) == 0:
        raise UserError(f"data.source={source}: split {split} holds no image ({', '.join(SUFFIXES)})")
    return opened


def has_split(source: str, split: str) -> bool:
    """Whether the source has such a split; a folder without split folders has only what it holds."""
    kind, _, argument = source.partition(":")
    return kind != "folder" or (Path(argument).expanduser() / split).is_dir()


# ---------------------------------------------------------------- the sources


DEMO_PICTURES = {
    "astronaut": "skimage/data/astronaut.png",
    "chelsea": "skimage/data/chelsea.png",
    "coffee": "skimage/data/coffee.png",
    "hubble_deep_field": "skimage/data/hubble_deep_field.jpg",
    "retina": "skimage/data/retina.jpg",
    "rocket": "skimage/data/rocket.jpg",
    "motorcycle": "skimage/data/motorcycle_left.png",
    "tissue": "skimage/data/ihc.png",
    "temple": "sklearn/datasets/images/china.jpg",
    "dahlia": "sklearn/datasets/images/flower.jpg",
}
_DEMO_FIT, _DEMO_CELL, _DEMO_CROP, _DEMO_CROPS = 640, 64, 32, 600


@lru_cache(maxsize=2)
def _demo(_: str, split: str) -> Source:
    """Crops of ten photographs that scikit-image and scikit-learn carry; the label is the photograph.

    Each picture is shrunk to fit 640 x 640 and divided into cells of 64 x 64; the cell in row i and
    column j is held out when (i + 2 j) mod 4 = 0. A crop of 32 x 32 lies wholly inside its cell, so
    that the two splits share no pixel.
    """
    if split not in ("train", "validation"):
        raise UserError(f"data.source=demo has the splits train and validation, not {split}")
    crops, labels = [], []
    for label, (name, file) in enumerate(DEMO_PICTURES.items()):
        picture = _read_image(_installed(file), file)
        picture.thumbnail((_DEMO_FIT, _DEMO_FIT), Image.Resampling.LANCZOS)
        pixels = np.asarray(picture)
        rows, columns = pixels.shape[0] // _DEMO_CELL, pixels.shape[1] // _DEMO_CELL
        count = _DEMO_CROPS // (rows * columns) + 1
        for cell in range(rows * columns):
            i, j = divmod(cell, columns)
            if ((i + 2 * j) % 4 == 0) != (split == "validation"):
                continue
            raw = draws.words(0, "demo", label, cell, 2 * count)
            offsets = draws.below(raw, _DEMO_CELL - _DEMO_CROP + 1).reshape(count, 2)
            for top, left in offsets + np.array([i, j]) * _DEMO_CELL:
                crops.append(pixels[top : top + _DEMO_CROP, left : left + _DEMO_CROP])
                labels.append(label)
    return Pictures(np.stack(crops), list(DEMO_PICTURES), np.array(labels))


def _installed(file: str) -> Path:
    package, _, inside = file.partition("/")
    spec = importlib.util.find_spec(package)
    path = Path(spec.submodule_search_locations[0], inside) if spec and spec.submodule_search_locations else None
    if path is None or not path.is_file():
        raise UserError(f"data.source=demo: {file} is missing from the installed packages; run `make demo`")
    return path


def _synthetic(argument: str, split: str) -> Source:
    """Smooth colour fields of 64 x 64 in ten classes that differ in the colour of the upper left."""
    if not argument.isdigit() or int(argument) == 0:
        raise UserError(f"data.source=synthetic:{argument}: give a positive number of images, as in synthetic:64")
    count, classes = int(argument), 10
    pixels = np.empty((count, 64, 64, 3), dtype=np.uint8)
    for index in range(count):
        raw = draws.words(0, "synthetic", SPLITS.index(split) if split in SPLITS else 0, index, 48)
        field = draws.below(raw, 256).astype(np.uint8).reshape(4, 4, 3)
        field[:2, :2] = np.array([25 * (index % classes), 250 - 25 * (index % classes), 128])
        pixels[index] = np.asarray(Image.fromarray(field).resize((64, 64), Image.Resampling.BICUBIC))
    return Pictures(pixels, [f"class {label}" for label in range(classes)], np.arange(count) % classes)


def _folder(argument: str, split: str) -> Source:
    """Files below PATH/SPLIT, or below PATH where it has no folder of a split's name.

    The folders directly below give the classes, if every image lies in one.
    """
    path = Path(argument).expanduser()
    if not path.is_dir():
        raise UserError(f"data.source=folder:{argument}: no such folder (looked in {path.absolute()})")
    root = path / split
    if not root.is_dir():
        splits = [name for name in SPLITS if (path / name).is_dir()]
        if splits:
            raise UserError(
                f"data.source=folder:{argument}: no folder {split} in it, but {', '.join(splits)}; "
                f"name the split (data.train_split, data.eval_split) or make {root}/CLASS/*.jpg"
            )
        root = path
    files = sorted(
        str(Path(folder, name).relative_to(root))
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )
    if not files or not all(len(Path(file).parts) > 1 for file in files):
        return Folder(root, files, None, None)
    classes = sorted({Path(file).parts[0] for file in files})
    labels = np.array([classes.index(Path(file).parts[0]) for file in files])
    return Folder(root, files, classes, labels)


def _hub(argument: str, split: str) -> Source:
    """A data set of the Hugging Face hub, or a local copy of one, with random access."""
    import datasets

    name, _, revision = argument.partition("@")
    try:
        rows = datasets.load_dataset(name, split=split, revision=revision or None)
    except Exception as error:  # the library raises many kinds, all of which mean: not to be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"data.source=hub:{argument}: split {split} can't be loaded: {reason}") from None
    images = [column for column, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if not images:
        raise UserError(f"data.source=hub:{argument}: no column of images; the columns are {list(rows.features)}")
    named = [column for column, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)]
    classes = rows.features[named[0]].names if named else None
    labels = np.asarray(rows[named[0]][:]) if named else None
    rows = rows.select_columns(images[:1]).cast_column(images[0], datasets.Image(decode=False))
    return HubRows(rows, f"hub:{argument} {split}", images[0], classes, labels)


SOURCES: dict[str, Callable[[str, str], Source]] = {
    "demo": _demo,
    "folder": _folder,
    "hub": _hub,
    "synthetic": _synthetic,
}
SOURCE_FORMS = ("demo", "folder:PATH", "hub:NAME[@REVISION]", "synthetic:N")


# ---------------------------------------------------------------- pixels


def _read_image(file: Any, name: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # malformed metadata that the pixels do not need
            with Image.open(file) as picture:
                picture.load()
                return to_rgb(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{name} can't be read as an image: {error}; repair or remove it") from None


def to_rgb(picture: Image.Image) -> Image.Image:
    """The picture as it is meant to be seen, in 8-bit RGB.

    EXIF orientation is applied, unless the metadata is malformed; 16-bit grey keeps its upper byte;
    transparency is laid over white.
    """
    try:
        picture = ImageOps.exif_transpose(picture)
    except Exception:  # Pillow raises many kinds on malformed metadata, none of which spoils the pixels
        pass
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture.convert("RGB")


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

    def __getitem__(self, place: int) -> dict[str, Any] | UserError:
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

    def __getitem__(self, place: int) -> dict[str, Any] | UserError:
        index = int(self.rows[place])
        return _sample(
            self.source, index, lambda picture: whole_image(picture, self.image_size), self.per_sample(0, index)
        )


def _sample(
    source: Source, index: int, pixels: Callable[[Image.Image], np.ndarray], extra: Mapping[str, np.ndarray]
) -> dict[str, Any] | UserError:
    """One sample, or the error about it: torch would wrap an exception of a worker in its traceback."""
    try:
        image = pixels(source.image(index))
    except UserError as error:
        return error
    label = -1 if source.labels is None else int(source.labels[index])
    return {"index": index, "images": image, "labels": label, **extra}


def _collate(samples: list[dict[str, Any] | UserError]) -> dict[str, Tensor] | UserError:
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


class _ReadOrder:
    """A batch sampler: the lists of places that one process reads, from a step on."""

    def __init__(self, batches: Callable[[], Iterator[list[int]]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches()


def load(
    samples: Dataset, batches: Callable[[], Iterator[list[int]]], workers: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Batches on the device: images uint8 [batch, height, width, channel], labels, index, and the objective's.

    Raises:
        UserError: an image can't be read.
    """
    loader = DataLoader(
        samples,
        batch_sampler=_ReadOrder(batches),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        if isinstance(batch, UserError):
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
    """Every sample once over all processes; the last batch of a process may be short, or missing."""

    def places() -> Iterator[list[int]]:
        mine = range(process, len(samples), processes)
        for start in range(0, len(mine), micro_batch):
            yield list(mine[start : start + micro_batch])

    return load(samples, places, workers, device)
