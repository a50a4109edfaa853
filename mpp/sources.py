"""Collections of images in a fixed order, addressed by row."""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from mpp import decoding, draws, shards
from mpp.disk_cache import DiskCache, default_folder
from mpp.errors import ImageError, UserError
from mpp.shards import SPLITS, Columns

SUFFIXES = decoding.SUFFIXES
ANY_COLUMNS = Columns()
_MOST_CLASSES = 10**6


class Source(Protocol):
    """A collection of images in a fixed order."""

    @property
    def classes(self) -> list[str] | None:
        """Names in the order of the labels; None where the source has no labels."""

    @property
    def labels(self) -> np.ndarray | None:
        """Whole numbers, or None; read when first asked for.

        [rows] where an image has one label; [rows, most], each of an image once and then -1, where it can have several.
        """

    @property
    def fingerprint(self) -> str:
        """Equal where the same rows stand in the same order."""

    @property
    def starts(self) -> np.ndarray:
        """First row of each shard, and the number of rows last; shuffling keeps shards together."""

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """Of the file, or the place in it, for messages."""

    def picture(self, row: int) -> decoding.Picture:
        """Raises ImageError naming what can't be read."""


@dataclass(frozen=True)
class Pictures:
    """A source that lies in memory, uint8 [row, height, width, channel]."""

    pixels: np.ndarray
    classes: list[str] | None
    labels: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()[:12]

    @property
    def starts(self) -> np.ndarray:
        return np.array([0, len(self)])

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, row: int) -> str:
        return f"image {row}"

    def picture(self, row: int) -> decoding.Picture:
        return decoding.Pixels(self.pixels[row])


class Names(Sequence[str]):
    """Texts in two arrays: workers that are forked share them, as they can't share millions of objects."""

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self.ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:  # type: ignore[override]
        start = self.ends[row - 1] if row else 0
        return os.fsdecode(self.bytes[start : self.ends[row]].tobytes())


@dataclass(frozen=True)
class Folder:
    """Image files below a folder; their paths give the fingerprint, where no other is given."""

    root: Path
    files: Sequence[str]
    classes: list[str] | None
    labels: np.ndarray | None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", self.fingerprint or _digest(self.files))
        object.__setattr__(self, "files", Names(self.files))

    @property
    def starts(self) -> np.ndarray:
        return np.array([0, len(self)])

    def __len__(self) -> int:
        return len(self.files)

    def name(self, row: int) -> str:
        return f"{self.root}{os.sep}{self.files[row]}"

    def version(self, rows: np.ndarray) -> str:
        """Changes with the bytes of some rows' files, as far as their sizes and times tell; raises ImageError."""
        found = hashlib.sha256(os.path.abspath(self.root).encode(errors="surrogateescape"))
        for row in rows.tolist():
            try:
                status = os.stat(self.name(row))
            except OSError as error:
                raise _unreadable(self.name(row), error) from None
            stamp = (self.files[row], status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            found.update(repr(stamp).encode())
        return found.hexdigest()

    def encoded(self, row: int) -> bytes:
        name = self.name(row)
        try:
            with open(name, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise _unreadable(name, error) from None

    def picture(self, row: int) -> decoding.Picture:
        return decoding.open_picture(self.encoded(row), self.name(row))


@dataclass(frozen=True)
class Joined:
    """Two sources, one after the other.

    Raises ValueError where the second has other classes; it may have fewer, if they are the first ones.
    """

    first: Source
    second: Source

    def __post_init__(self) -> None:
        classes, others = self.first.classes or [], self.second.classes or []
        if others != classes[: len(others)]:
            raise ValueError(f"sources of other classes can't be joined: {classes[:5]} ... and {others[:5]} ...")

    @property
    def classes(self) -> list[str] | None:
        return self.first.classes

    @cached_property
    def labels(self) -> np.ndarray | None:
        first, second = self.first.labels, self.second.labels
        if first is None or second is None:
            return None
        if first.ndim == second.ndim == 1:
            return np.concatenate([first, second])
        wide = [table.reshape(len(table), -1) for table in (first, second)]
        labels = np.full((len(self), max(table.shape[1] for table in wide)), -1, dtype=np.int32)
        labels[: len(first), : wide[0].shape[1]] = wide[0]
        labels[len(first) :, : wide[1].shape[1]] = wide[1]
        return labels

    @property
    def fingerprint(self) -> str:
        return _digest([self.first.fingerprint, self.second.fingerprint])

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([self.first.starts, len(self.first) + self.second.starts[1:]])

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def name(self, row: int) -> str:
        part, inside = self._part(row)
        return part.name(inside)

    def picture(self, row: int) -> decoding.Picture:
        part, inside = self._part(row)
        return part.picture(inside)

    @property
    def encoded(self) -> Callable[[int], bytes]:
        """Bytes of a row's image; AttributeError where one of the two has none."""
        first, second = self.first.encoded, self.second.encoded  # type: ignore[attr-defined]
        return lambda row: first(row) if row < len(self.first) else second(row - len(self.first))

    def _part(self, row: int) -> tuple[Source, int]:
        return (self.first, row) if row < len(self.first) else (self.second, row - len(self.first))


@dataclass(frozen=True)
class _Inside:
    """A picture without a border of some pixels."""

    whole: decoding.Picture
    border: int

    @property
    def width(self) -> int:
        return self.whole.width - 2 * self.border

    @property
    def height(self) -> int:
        return self.whole.height - 2 * self.border

    def region(self, box: decoding.Box) -> np.ndarray:
        left, top, right, bottom = (side + self.border for side in box)
        return self.whole.region((left, top, right, bottom))


@dataclass(frozen=True)
class Bordered:
    """A source whose pictures have a border that is not to be seen."""

    whole: Source
    border: int

    @property
    def classes(self) -> list[str] | None:
        return self.whole.classes

    @property
    def labels(self) -> np.ndarray | None:
        return self.whole.labels

    @property
    def fingerprint(self) -> str:
        return self.whole.fingerprint

    @property
    def starts(self) -> np.ndarray:
        return self.whole.starts

    def __len__(self) -> int:
        return len(self.whole)

    def name(self, row: int) -> str:
        return self.whole.name(row)

    def picture(self, row: int) -> decoding.Picture:
        return _Inside(self.whole.picture(row), self.border)


def _unreadable(name: str, error: OSError) -> ImageError:
    return ImageError(f"{name} can't be read: {error.strerror}; repair or remove it")


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="surrogateescape")).hexdigest()[:12]


def open_source(source: str, split: str, columns: Columns = ANY_COLUMNS, cache_gb: float = 20.0) -> Source:
    """One split of a source.

    Args:
        source: one of SOURCE_FORMS.
        split: its name in the source.
        columns: where images and labels stand, for sources that have columns.
        cache_gb: room on disk for what has to be fetched or unpacked, in GB.

    Raises:
        UserError: no such kind of source, path or split, or no image in it.
    """
    require_form(source)
    kind, _, argument = source.partition(":")
    cache = DiskCache(default_folder() / "cells", int(cache_gb * 1e9))
    opened = SOURCES[kind](argument, split, columns, cache)
    if len(opened) == 0:
        raise UserError(f"data.source={source}: split {split} holds no image ({', '.join(SUFFIXES)})")
    return opened


def require_form(source: str) -> None:
    """Raises UserError where this is not the name of a source."""
    kind, _, argument = source.partition(":")
    if kind not in SOURCES or (argument == "") != (kind == "demo"):
        raise UserError(f"data.source={source}: no source of that form; there are {', '.join(SOURCE_FORMS)}")


def split_names(source: str, usual: Sequence[str] = SPLITS) -> list[str]:
    """The splits of a source, of those with a usual name; none where it is one set without splits."""
    kind, _, argument = source.partition(":")
    if kind == "demo":
        return ["train", "validation"]
    if kind == "folder":
        return [name for name in usual if (Path(argument).expanduser() / name).is_dir()]
    if kind == "list":
        return _list_names(Path(argument).expanduser())
    if kind in ("parquet", "wds"):
        return [name for name in usual if shards.names_a_split(argument, name)]
    if kind == "hub":
        return shards.hub_splits(argument)
    return list(usual)


def has_held_out_split(source: str, train_split: str, eval_split: str) -> bool:
    """Whether the source has any split beside the training split."""
    return any(name != train_split for name in split_names(source, list(dict.fromkeys([*SPLITS, eval_split]))))


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


def _demo(_: str, split: str, __: Columns, ___: DiskCache) -> Source:
    return demo(split)


@lru_cache(maxsize=2)
def demo(split: str) -> Pictures:
    """Crops of ten photographs that scikit-image and scikit-learn carry; the label is the photograph.

    Each picture is shrunk to fit 640 x 640 and divided into cells of 64 x 64; the cell in row i and
    column j is held out when (i + 2 j) mod 4 = 0. A crop of 32 x 32 lies wholly inside its cell, so
    that the two splits share no pixel.
    """
    if split not in ("train", "validation"):
        raise UserError(f"data.source=demo has the splits train and validation, not {split}")
    crops, labels = [], []
    for label, file in enumerate(DEMO_PICTURES.values()):
        picture = decoding.read_rgb(_installed(file), file)
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


def _synthetic(argument: str, split: str, _: Columns, __: DiskCache) -> Source:
    """Smooth colour fields of 64 x 64 in ten classes that differ in the colour of the upper left."""
    if not argument.isdigit() or int(argument) == 0:
        raise UserError(f"data.source=synthetic:{argument}: give a positive number of images, as in synthetic:64")
    if split not in SPLITS:
        raise UserError(f"data.source=synthetic:{argument} has the splits {', '.join(SPLITS)}, not {split}")
    count, classes = int(argument), 10
    pixels = np.empty((count, 64, 64, 3), dtype=np.uint8)
    for index in range(count):
        raw = draws.words(0, "synthetic", SPLITS.index(split), index, 48)
        colors = draws.below(raw, 256).astype(np.uint8).reshape(4, 4, 3)
        colors[:2, :2] = np.array([25 * (index % classes), 250 - 25 * (index % classes), 128])
        pixels[index] = np.asarray(Image.fromarray(colors).resize((64, 64), Image.Resampling.BICUBIC))
    return Pictures(pixels, [f"class {label}" for label in range(classes)], np.arange(count) % classes)


def _folder(argument: str, split: str, _: Columns, __: DiskCache) -> Source:
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
        os.path.join(folder[len(str(root)) + 1 :], name)
        for folder, names in _walk(root)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )
    if not files or not all(os.sep in file for file in files):
        return Folder(root, files, None, None)
    tops = [file.split(os.sep, 1)[0] for file in files]
    classes = sorted(set(tops))
    numbers = {name: number for number, name in enumerate(classes)}
    return Folder(root, files, classes, np.array([numbers[top] for top in tops], dtype=np.int32))


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders and their files, through links but not in circles; raises UserError on an unreadable one.

    What begins with a dot is hidden, and no data.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"data.source: {error.filename} can't be listed ({error.strerror}); allow it, or move it out")

    above: dict[str, tuple[str, ...]] = {}  # of each folder, the real places of those that it lies in
    for folder, below, names in os.walk(root, followlinks=True, onerror=refuse):
        real, around = os.path.realpath(folder), above.get(os.path.dirname(folder), ())
        below[:] = sorted(name for name in below if not name.startswith("."))
        if real in around:  # a link back to where we came from
            below.clear()
            continue
        above[folder] = (*around, real)
        yield folder, names


def _list(argument: str, split: str, _: Columns, __: DiskCache) -> Source:
    """Files that the lines of FOLDER/SPLIT.txt name, in their order; the last word of a line is the label.

    Labels count from 0 to the largest in any list of the folder.
    """
    root, source = Path(argument).expanduser(), f"data.source=list:{argument}"
    layout = f"it needs {root / split}.txt, with lines such as `images/cat 1.jpg 0` (path in the folder, and label)"
    if not root.is_dir():
        raise UserError(f"{source}: no such folder (looked in {root.absolute()}); {layout}")
    names = _list_names(root)
    if split not in names:
        raise UserError(f"{source}: no list {split}.txt in it, but {', '.join(names) or 'none at all'}; {layout}")
    lists = {name: _read_list(root / f"{name}.txt") for name in names}
    files, labels = lists[split]
    _require_files(root, split, files)
    classes = [str(label) for label in range(max((max(found, default=-1) for _, found in lists.values())) + 1)]
    fingerprint = _digest(f"{file} {label}" for file, label in zip(files, labels, strict=True))
    return Folder(root, files, classes, np.array(labels, dtype=np.int32), fingerprint)


def _list_names(root: Path) -> list[str]:
    """Splits of which a folder has a list; what begins with a dot is hidden."""
    return sorted(file.stem for file in root.glob("*.txt") if not file.name.startswith("."))


def _read_list(path: Path) -> tuple[list[str], list[int]]:
    """Paths and labels of a list; raises UserError with the line that can't be read."""
    files, labels = [], []
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; allow it, or move it out") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file, label = line.rsplit(maxsplit=1) if len(line.split()) > 1 else ("", line.strip())
        if not (file.strip() and label.isascii() and label.isdigit() and int(label) < _MOST_CLASSES):
            raise UserError(
                f"{path}:{number}: {line.strip()!r} is no path and label: a label is a whole number from 0 on, after a "
                "space at the end of the line; repair it, or move the file out of the folder if it is no list of images"
            )
        files.append(file.strip())
        labels.append(int(label))
    return files, labels


def _require_files(root: Path, split: str, files: Sequence[str]) -> None:
    """Raises UserError where a list names a file that is not there; each folder is listed once."""
    listed: dict[str, set[str]] = {}
    for file in files:
        folder, name = os.path.split(file)
        if folder not in listed:
            try:
                listed[folder] = set(os.listdir(root / folder))
            except OSError:  # not there, or it may be entered but not listed
                listed[folder] = set()
        if name not in listed[folder] and not (root / file).is_file():
            raise UserError(
                f"{root / file} is missing, which {root / split}.txt names; paths are relative to {root}: unpack the "
                "images there, or take the line out"
            )


# Each takes what follows the colon, the split, the columns, and a cache for what can't be read in place.
SOURCES: dict[str, Callable[[str, str, Columns, DiskCache], Source]] = {
    "demo": _demo,
    "folder": _folder,
    "list": _list,
    "hub": shards.open_hub,
    "parquet": shards.open_parquet,
    "wds": shards.open_tar,
    "synthetic": _synthetic,
}
SOURCE_FORMS = ("demo", "folder:PATH", "list:FOLDER", "hub:NAME[@REVISION]", "parquet:GLOB", "wds:GLOB", "synthetic:N")
