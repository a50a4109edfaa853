"""Collections of images in a fixed order, and decoding: from a row to a picture in RGB."""

import hashlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageOps

from mpp import draws
from mpp.errors import ImageError, UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
SPLITS = ("train", "validation", "val", "test")


class Source(Protocol):
    """A collection of images in a fixed order."""

    @property
    def classes(self) -> list[str] | None:
        """Names in the order of the labels; None where the source has no labels."""

    @property
    def labels(self) -> np.ndarray | None:
        """int64 [rows], or None."""

    @property
    def fingerprint(self) -> str:
        """Equal where the same rows stand in the same order."""

    def __len__(self) -> int: ...

    def image(self, row: int) -> Image.Image:
        """The row's picture in RGB; raises ImageError naming the file or row that can't be read."""


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
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, row: int) -> Image.Image:
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
    if kind not in SOURCES or (argument == "") != (kind == "demo"):
        raise UserError(f"data.source={source}: no source of that form; there are {', '.join(SOURCE_FORMS)}")
    opened = SOURCES[kind](argument, split)
    if len(opened) == 0:
        raise UserError(f"data.source={source}: split {split} holds no image ({', '.join(SUFFIXES)})")
    return opened


def has_held_out_split(source: str, train_split: str, eval_split: str) -> bool:
    """Whether the source has any split beside the training split; a folder may hold training images alone."""
    kind, _, argument = source.partition(":")
    names = {*SPLITS, eval_split} - {train_split}
    return kind != "folder" or any((Path(argument).expanduser() / name).is_dir() for name in names)


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
    for label, file in enumerate(DEMO_PICTURES.values()):
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
    if split not in SPLITS:
        raise UserError(f"data.source=synthetic:{argument} has the splits {', '.join(SPLITS)}, not {split}")
    count, classes = int(argument), 10
    pixels = np.empty((count, 64, 64, 3), dtype=np.uint8)
    for index in range(count):
        raw = draws.words(0, "synthetic", SPLITS.index(split), index, 48)
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
        for folder, names in _walk(root)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )
    if not files or not all(os.sep in file for file in files):
        return Folder(root, files, None, None)
    tops = [file.split(os.sep, 1)[0] for file in files]
    classes = sorted(set(tops))
    numbers = {name: number for number, name in enumerate(classes)}
    return Folder(root, files, classes, np.array([numbers[top] for top in tops]))


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders and their files, through links, each real folder once; raises UserError on an unreadable one."""

    def refuse(error: OSError) -> None:
        raise UserError(f"data.source: {error.filename} can't be listed ({error.strerror}); allow it, or move it out")

    seen = set()
    for folder, below, names in os.walk(root, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        yield folder, names


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
    if len(images) > 1 or len(named) > 1:
        raise UserError(
            f"data.source=hub:{argument}: which columns are meant is not clear (images: {images}, labels: {named}); "
            "make a copy with one of each"
        )
    classes = rows.features[named[0]].names if named else None
    labels = np.asarray(rows[named[0]][:]) if named else None
    if labels is not None and (labels < 0).any():  # a test split whose labels are withheld
        classes = labels = None
    fingerprint = rows._fingerprint
    rows = rows.select_columns(images[:1]).cast_column(images[0], datasets.Image(decode=False))
    return HubRows(rows, f"hub:{argument} {split}", images[0], classes, labels, fingerprint)


SOURCES: dict[str, Callable[[str, str], Source]] = {
    "demo": _demo,
    "folder": _folder,
    "hub": _hub,
    "synthetic": _synthetic,
}
SOURCE_FORMS = ("demo", "folder:PATH", "hub:NAME[@REVISION]", "synthetic:N")


# ---------------------------------------------------------------- decoding


def _read_image(file: Any, name: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # malformed metadata that the pixels do not need
            with Image.open(file) as picture:
                picture.load()
                return to_rgb(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ImageError(f"{name} can't be read as an image: {error}; repair or remove it") from None


def to_rgb(picture: Image.Image) -> Image.Image:
    """The picture as it is meant to be seen, in 8-bit RGB.

    EXIF orientation is applied, unless the metadata is malformed; 16-bit grey keeps its upper byte;
    transparency is laid over white. Raises ValueError where the range of the pixels is not known.
    """
    try:
        picture = ImageOps.exif_transpose(picture)
    except Exception:  # Pillow raises many kinds on malformed metadata, none of which spoils the pixels
        pass
    if picture.mode in ("I", "F"):
        raise ValueError("its 32-bit pixels have no known range; save it with 8 or 16 bits")
    if picture.mode.startswith("I;16"):
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture.convert("RGB")
