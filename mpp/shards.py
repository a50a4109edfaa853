"""Sources in shards, addressed by row: Parquet files, tar files (WebDataset), and Hugging Face data sets.

A row is found by an index of offsets, made once and kept in the disk cache. What can't be read in place
(rows inside a compressed Parquet row group, files that lie elsewhere) is fetched a cell at a time, a cell
being a row group or a stretch of a tar file, and kept unpacked in the cache as long as there is room.
"""

import glob
import hashlib
import json
import os
import re
import tarfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from mpp import decoding
from mpp.disk_cache import DiskCache, default_folder
from mpp.errors import ImageError, UserError

_OPEN_FILES = 128  # of one process
_TRIES = 3  # at a file that lies elsewhere
_MOST_CLASSES = 10**6
_TAR_END = 2**20  # bytes after the last member in which nothing may stand
_LIST = "\x1f"  # before a JSON list of labels in the index of a tar file; stripped texts don't begin with it
_NO_LABEL = f"{_LIST}[]"
_CELL_BYTES = 16 * 2**20  # of a tar file that lies elsewhere


@dataclass(frozen=True)
class Columns:
    """Which columns hold the images and the labels; None for the only ones that can."""

    image: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Shard:
    """One file of a source.

    Attributes:
        url: a path, or an address that fsspec knows.
        size: in bytes.
        version: changes with the content.
    """

    url: str
    size: int
    version: str

    @property
    def local(self) -> bool:
        return "://" not in self.url

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def key(self) -> str:
        return _digest(self.url, self.size, self.version)

    def open(self, from_start_to_end: bool = False) -> BinaryIO:
        """The file, to be read anywhere in it, or mostly forward."""
        if self.local:
            return Path(self.url).open("rb")
        filesystem, path = _filesystem(self.url)
        return filesystem.open(path, "rb", cache_type="readahead" if from_start_to_end else "none")

    def read(self, start: int, length: int) -> bytes:
        """Some bytes of it; raises UserError where it can't be reached."""

        def read() -> bytes:
            with self.open() as file:
                file.seek(start)
                found = file.read(length)
            if len(found) != length:
                raise OSError(f"{len(found)} bytes came of {length}")
            return found

        return self.patiently(read)

    def patiently(self, action: Callable[[], Any]) -> Any:
        """What the action returns, tried again where the file lies elsewhere; raises UserError."""
        tries = 1 if self.local else _TRIES
        for number in range(tries):
            try:
                return action()
            except UserError:
                raise
            except Exception as error:  # each file system has its own kinds
                if number + 1 < tries:
                    time.sleep(2.0**number)
                    continue
                times = f" in {tries} tries" if tries > 1 else ""
                raise UserError(
                    f"{self.url} can't be read{times}: {_reason(error)}; repair it, or leave it out of data.source"
                ) from None


class _OpenFiles:
    """The files that one process has open, each with something that belongs to it; the least recently used go."""

    def __init__(self) -> None:
        self.files: OrderedDict[Any, tuple[BinaryIO, Any]] = OrderedDict()
        self.process = os.getpid()

    def get(self, key: Any, make: Callable[[], tuple[BinaryIO, Any]]) -> tuple[BinaryIO, Any]:
        if self.process != os.getpid():  # a forked worker would share the place in a file with its parent
            self.close()
            self.process = os.getpid()
        if key not in self.files:
            for old in [old for old, (file, _) in self.files.items() if _is_dropped(file)]:
                self.files.pop(old)[0].close()  # the disk has its room back only then
            self.files[key] = make()
            if len(self.files) > _OPEN_FILES:
                self.files.popitem(last=False)[1][0].close()
        self.files.move_to_end(key)
        return self.files[key]

    def close(self) -> None:
        while self.files:
            self.files.popitem()[1][0].close()

    __del__ = close

    def __reduce__(self) -> tuple[Any, ...]:
        return _OpenFiles, ()


def _is_dropped(file: BinaryIO) -> bool:
    """Whether an open file stands in no folder any more."""
    try:
        return os.fstat(file.fileno()).st_nlink == 0
    except (OSError, AttributeError):  # a file elsewhere has no number here
        return False


class _Rows:
    """What sources in shards have in common; a subclass says how a row is read and what its labels are."""

    columns: Columns

    def __init__(self, shards: Sequence[Shard], rows: Sequence[int]) -> None:
        self.shards = tuple(shards)
        self.starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._open = _OpenFiles()

    def __len__(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def _labels(self) -> tuple[list[str] | None, np.ndarray | None]:
        return self._read_labels()

    def _read_labels(self) -> tuple[list[str] | None, np.ndarray | None]:
        raise NotImplementedError

    @property
    def classes(self) -> list[str] | None:
        return self._labels[0]

    @property
    def labels(self) -> np.ndarray | None:
        return self._labels[1]

    def name(self, row: int) -> str:
        shard = self._shard(row)
        return f"{self.shards[shard].url} row {row - int(self.starts[shard])}"

    def version(self, rows: np.ndarray) -> str | None:
        """Changes with the encoded bytes of some rows, as far as their files tell; None where they don't."""
        return _digest(self.columns.image, *[shard.key for shard in self.shards])

    def encoded(self, row: int) -> bytes:
        raise NotImplementedError

    def picture(self, row: int) -> decoding.Picture:
        return decoding.open_picture(self.encoded(row), self.name(row))

    def _shard(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, side="right")) - 1


# ---------------------------------------------------------------- Parquet


class ParquetRows(_Rows):
    """Rows of Parquet files with a column of encoded images.

    Args:
        shards: the files, in the order of their rows.
        columns: resolved, with an image.
        class_names: of the labels, where the files say them.
        cache: for row groups, unpacked.
    """

    def __init__(self, shards: Sequence[Shard], columns: Columns, class_names: list[str] | None, cache: DiskCache):
        footers = [
            json.loads(_kept(shard, "footer and lists", _footer).tobytes())
            for shard in _listed(shards, "reading the index")
        ]
        for shard, footer in zip(shards, footers, strict=True):
            _require_same_columns(shards[0], footers[0], shard, footer, columns)
        index = [np.array(footer["groups"], dtype=np.int64).reshape(-1, 2) for footer in footers]
        super().__init__(shards, [int(groups[:, 0].sum()) for groups in index])
        self.columns, self.class_names, self.cache = columns, class_names, cache
        self.in_lists = columns.label in footers[0]["lists"]  # so that an image can have several labels
        self.cell_shard = np.repeat(np.arange(len(index)), [len(groups) for groups in index])
        self.cell_group = np.concatenate([np.arange(len(groups)) for groups in index])
        rows, sizes = np.concatenate(index).T
        self.cell_starts = np.concatenate([[0], np.cumsum(rows)])
        self.cell_bytes = sizes
        self.fingerprint = _digest(
            *[(shard.name, shard.size) for shard in shards], rows.tolist(), sizes.tolist(), columns.image, columns.label
        )

    def _read_labels(self) -> tuple[list[str] | None, np.ndarray | None]:
        name = self.columns.label
        if name is None:
            return None, None

        def read(shard: Shard) -> np.ndarray:
            import pyarrow.parquet as parquet

            with shard.open() as file:
                column = parquet.read_table(file, columns=[name]).column(0)
                return _out_of_lists(column, name) if self.in_lists else _plain(column.to_numpy(), name)

        what = f"label lists {name}" if self.in_lists else f"labels {name}"
        parts = [_kept(shard, what, read) for shard in _listed(self.shards, "reading the labels")]
        if self.in_lists:
            return _as_class_lists(parts, np.diff(self.starts).tolist(), self.class_names, name)
        return _as_classes(parts, self.class_names, name)

    def file_names(self) -> list[str] | None:
        """The names that images had as files, which stand beside their bytes; None where one has none."""
        import pyarrow.parquet as parquet

        def read(shard: Shard) -> np.ndarray:
            with shard.open() as file:
                opened = parquet.ParquetFile(file)
                if f"{self.columns.image}.path" not in [column.path for column in opened.schema]:
                    return np.array([], dtype=str)
                cells = opened.read([f"{self.columns.image}.path"]).column(0).to_pylist()
            return np.array([(cell and cell["path"]) or "" for cell in cells], dtype=str)

        what = f"file names {self.columns.image}"
        names = np.concatenate([_kept(shard, what, read) for shard in _listed(self.shards, "reading the file names")])
        return names.tolist() if len(names) == len(self) and (names != "").all() else None

    @property
    def unpacked_bytes(self) -> np.ndarray:
        """Room in the cache that each shard takes, int64 [shards]."""
        return np.bincount(self.cell_shard, self.cell_bytes, len(self.shards)).astype(np.int64)

    def encoded(self, row: int) -> bytes:
        cell = int(np.searchsorted(self.cell_starts, row, side="right")) - 1
        file, offsets = self._open.get(cell, lambda: self._open_cell(cell))
        place = row - int(self.cell_starts[cell])
        file.seek(int(offsets[place]))
        found = file.read(int(offsets[place + 1] - offsets[place]))
        if not found:
            raise ImageError(f"{self.name(row)} holds no bytes of an image; fill it in, or remove the row")
        return found

    def _open_cell(self, cell: int) -> tuple[BinaryIO, np.ndarray]:
        shard, group = self.shards[self.cell_shard[cell]], int(self.cell_group[cell])
        name = f"{_digest(shard.key, self.columns.image)}_{group}"
        count = int(self.cell_starts[cell + 1] - self.cell_starts[cell])

        def offsets(file: BinaryIO) -> np.ndarray:
            return np.frombuffer(file.read(8 * (count + 1)), dtype=np.int64)

        def sound(file: BinaryIO) -> bool:
            size = os.fstat(file.fileno()).st_size
            return size >= 8 * (count + 1) and int(offsets(file)[-1]) == size

        file = self.cache.open(name, lambda out: shard.patiently(lambda: self._unpack(shard, group, out)), sound)
        return file, offsets(file)

    def _unpack(self, shard: Shard, group: int, out: BinaryIO) -> None:
        """Writes a row group's images: where each starts, int64 [rows + 1], and one after another."""
        import pyarrow.parquet as parquet

        out.seek(0)
        out.truncate()  # what a try before this one has written
        with shard.open() as file:
            table = parquet.ParquetFile(file)
            starts = [8 * (table.metadata.row_group(group).num_rows + 1)]
            out.seek(starts[0])
            for batch in table.iter_batches(64, row_groups=[group], columns=[self.columns.image]):
                for cell in batch.column(0).to_pylist():
                    image = (cell["bytes"] if isinstance(cell, dict) else cell) or b""
                    out.write(image)
                    starts.append(starts[-1] + len(image))
            out.seek(0)
            out.write(np.array(starts, dtype=np.int64).tobytes())


def _footer(shard: Shard) -> np.ndarray:
    """What a file says of itself, as JSON in uint8.

    Rows and unpacked bytes of each row group, a digest of each column's class names, and which columns hold lists.
    """
    import pyarrow.parquet as parquet

    with shard.open() as file:
        opened = parquet.ParquetFile(file)
        groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
        schema = opened.schema_arrow
    found = {
        "groups": [(group.num_rows, group.total_byte_size) for group in groups],
        "columns": {name: _digest(_class_names(kind)) for name, kind in _features(schema).items()},
        "lists": [column.name for column in schema if _is_list(column.type)],
    }
    return np.frombuffer(json.dumps(found).encode(), dtype=np.uint8)


def _require_same_columns(first: Shard, there: Any, shard: Shard, here: Any, columns: Columns) -> None:
    for name in (columns.image, columns.label):
        if name is not None and name not in here["columns"]:
            raise UserError(f"{shard.url} has no column {name}, which {first.url} has; leave it out of data.source")
        if (name in here["lists"]) != (name in there["lists"]):
            lists, single = (shard, first) if name in here["lists"] else (first, shard)
            raise UserError(f"{lists.url} holds lists in {name}, and {single.url} one value an image; write them alike")
        if name is not None and here["columns"][name] != there["columns"][name]:
            raise UserError(
                f"{shard.url} and {first.url} have other class names in {name}, or another order, so that their labels "
                "mean different things; write them anew"
            )


def _features(schema: Any) -> dict[str, Any]:
    """The columns that the datasets library knows to read, by name."""
    import datasets
    import pyarrow

    try:
        return dict(datasets.Features.from_arrow_schema(schema))
    except ValueError:  # of a column of a kind that it does not know, and that nobody may have asked for
        known: dict[str, Any] = {}
        for column in schema:
            try:
                known |= datasets.Features.from_arrow_schema(pyarrow.schema([column]))
            except ValueError:
                continue
        return known


def _class_names(kind: Any) -> list[str] | None:
    """Of a column of class labels, or of lists of them; None for any other."""
    import datasets

    kind = getattr(kind, "feature", kind)
    return kind.names if isinstance(kind, datasets.ClassLabel) else None


def _is_list(kind: Any) -> bool:
    """Whether cells of an Arrow type are lists."""
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def open_parquet(argument: str, split: str, columns: Columns, cache: DiskCache) -> ParquetRows:
    """parquet:GLOB."""
    return _parquet(f"parquet:{argument}", _found("parquet", argument, split), columns, cache, None)


def _parquet(source: str, shards: Sequence[Shard], columns: Columns, cache: DiskCache, features: Any) -> ParquetRows:
    import pyarrow.parquet as parquet

    first = shards[0]

    def schema() -> Any:
        with first.open() as file:
            return parquet.ParquetFile(file).schema_arrow

    features = features or _features(first.patiently(schema))
    chosen = _choose(source, features, columns)
    names = _class_names(features[chosen.label]) if chosen.label else None
    return ParquetRows(shards, chosen, names, cache)


def _choose(source: str, features: Any, columns: Columns) -> Columns:
    """The columns that are named, or the only ones that can be meant; raises UserError otherwise."""
    import datasets

    for key, name in (("data.image_column", columns.image), ("data.label_column", columns.label)):
        if name is not None and name not in features:
            raise UserError(f"{key}={name}: {source} has no such column; there are {', '.join(features)}")

    def encoded(kind: Any) -> bool:
        return (
            isinstance(kind, datasets.Image)
            or getattr(kind, "dtype", "") in ("binary", "large_binary")
            or (isinstance(kind, dict) and "bytes" in kind)
        )

    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    images = images or [name for name, kind in features.items() if encoded(kind)]
    labels = [name for name, kind in features.items() if _class_names(kind) is not None]
    labels = labels or [name for name in features if name.lower() in ("label", "labels", "class", "cls")]
    image = columns.image or (images[0] if len(images) == 1 else None)
    if image is None:
        which = f"which is meant of {', '.join(images)}" if images else f"which of {', '.join(features)}"
        raise UserError(f"{source}: the column of images is not clear; say {which} by data.image_column=NAME")
    if not encoded(features[image]):
        raise UserError(f"data.image_column={image}: {source} holds no encoded images there, but {features[image]}")
    label = columns.label or (labels[0] if len(labels) == 1 else None)
    if label is None and labels:
        raise UserError(
            f"{source}: the column of labels is not clear; say which is meant of {', '.join(labels)} by "
            "data.label_column=NAME"
        )
    return Columns(image, label)


# ---------------------------------------------------------------- tar


class TarRows(_Rows):
    """Samples of WebDataset tar files: the members that share a name up to its first dot.

    Args:
        shards: the files, in the order of their rows.
        columns: suffixes of the members that hold the image and the label; None for the image's only
            one, and `cls`.
        cache: for stretches of tar files that lie elsewhere.
    """

    def __init__(self, shards: Sequence[Shard], columns: Columns, cache: DiskCache) -> None:
        what = f"samples {columns.image} {columns.label}"

        def read(shard: Shard) -> np.ndarray:
            return _tar_members(shard, columns)

        index = [_kept(shard, what, read) for shard in _listed(shards, "reading the index")]
        super().__init__(shards, [len(table) for table in index])
        self.columns, self.cache = columns, cache
        self.offsets = np.concatenate([table["offset"] for table in index])
        self.sizes = np.concatenate([table["size"] for table in index])
        self._raw_labels = [table["label"] for table in index]
        self.fingerprint = _digest(
            *[shard.name for shard in shards], *[hashlib.sha256(table.tobytes()).hexdigest() for table in index]
        )

    def _read_labels(self) -> tuple[list[str] | None, np.ndarray | None]:
        texts = np.concatenate([np.char.decode(labels, "utf-8") for labels in self._raw_labels])
        column = self.columns.label or "cls"
        distinct, which = np.unique(texts, return_inverse=True)
        several = any(_says_several(text, column) for text in distinct.tolist())
        given = (texts != "") if several else (texts != "") & (texts != _NO_LABEL)
        if not given.any():
            return None, None
        if not given.all():
            raise UserError(
                f"{self.name(int(np.flatnonzero(~given)[0]))} has no label, but others have; data.label_column names "
                "the suffix that all have"
            )
        if not several:
            return _as_classes([_as_numbers(distinct)[which]], None, column)
        part = _out_of_texts(distinct.tolist(), column)
        classes, labels = _as_class_lists([part], [len(distinct)], None, column)
        return classes, None if labels is None else labels[which]

    @property
    def unpacked_bytes(self) -> np.ndarray:
        """Room in the cache that each shard takes, int64 [shards]; none where it is read in place."""
        return np.array([0 if shard.local else shard.size for shard in self.shards], dtype=np.int64)

    def encoded(self, row: int) -> bytes:
        shard = self._shard(row)
        offset, size = int(self.offsets[row]), int(self.sizes[row])
        if not self.shards[shard].local:
            return self._from_cells(shard, offset, size)
        file, _ = self._open.get(shard, lambda: (self.shards[shard].open(), None))
        file.seek(offset)
        return file.read(size)

    def _from_cells(self, number: int, offset: int, size: int) -> bytes:
        found = b""
        for cell in range(offset // _CELL_BYTES, (offset + size - 1) // _CELL_BYTES + 1):
            file, start = self._stretch(number, cell), cell * _CELL_BYTES
            file.seek(max(offset - start, 0))
            found += file.read(min(offset + size, start + _CELL_BYTES) - max(offset, start))
        return found

    def _stretch(self, number: int, cell: int) -> BinaryIO:
        shard, start = self.shards[number], cell * _CELL_BYTES

        length = min(_CELL_BYTES, shard.size - start)

        def fetch(out: BinaryIO) -> None:
            out.write(shard.read(start, length))

        def sound(file: BinaryIO) -> bool:
            return os.fstat(file.fileno()).st_size == length

        name = f"{_digest(shard.key, 'stretch', _CELL_BYTES)}_{cell}"
        return self._open.get((number, cell), lambda: (self.cache.open(name, fetch, sound), None))[0]


def _tar_members(shard: Shard, columns: Columns) -> np.ndarray:
    """Offset, size and label of each sample's image; the members of a sample follow one another."""

    def read() -> np.ndarray:
        rows: list[tuple[int, int, bytes]] = []
        members: dict[str, tarfile.TarInfo] = {}
        sample = ""
        with shard.open(from_start_to_end=True) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                key, dot, suffix = base.lower().partition(".")
                if member.isdir() or not key or not dot or base.startswith("__"):
                    continue
                key = base.partition(".")[0]
                if not member.isreg() or member.issparse():
                    raise UserError(f"{shard.url}: {member.name} is a link or a sparse file; pack it as a plain one")
                if members and f"{folder}/{key}" != sample:
                    rows.append(_tar_sample(shard, sample, members, archive, columns))
                    members = {}
                sample = f"{folder}/{key}"
                if suffix in members:
                    raise UserError(f"{shard.url}: sample {sample} has {suffix} twice; give each a name of its own")
                members[suffix] = member
            if members:
                rows.append(_tar_sample(shard, sample, members, archive, columns))
            file.seek(archive.offset)
            end = file.read(_TAR_END)
            if len(end) < 512 or end.strip(b"\0"):
                raise UserError(
                    f"{shard.url}: what follows byte {archive.offset} is not the end of a tar file: it is cut, "
                    "damaged, or several in one; pack it anew"
                )
        width = max([len(label) for _, _, label in rows], default=0) or 1
        return np.array(rows, dtype=[("offset", np.int64), ("size", np.int64), ("label", f"S{width}")])

    return shard.patiently(read)


def _tar_sample(
    shard: Shard, sample: str, members: dict[str, tarfile.TarInfo], archive: tarfile.TarFile, columns: Columns
) -> tuple[int, int, bytes]:
    there = f"{shard.url}: sample {sample.strip('/')} has {', '.join(members)}"
    images = [suffix for suffix in members if f".{suffix.rsplit('.', 1)[-1]}" in decoding.SUFFIXES]
    if columns.image is not None:
        images = [suffix for suffix in members if suffix == columns.image]
    if len(images) != 1:
        raise UserError(f"{there}: which is its image is not clear; say it by data.image_column=SUFFIX")
    suffix, _, key = (columns.label or "cls").partition(".")
    label = b""
    if suffix in members:
        text = archive.extractfile(members[suffix]).read()  # type: ignore[union-attr]
        try:
            found = json.loads(text)[key] if key else text.strip().decode() or []
            label = _label_text(found).encode()
        except UnicodeDecodeError:
            raise UserError(f"{there}, and its {suffix} is no text in UTF-8") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{there}, but no {key} in the JSON of {suffix}: data.label_column={columns.label}"
            ) from None
        if isinstance(found, list) and not all(type(one) in (int, str) for one in found):
            raise UserError(
                f"{there}, and {key} in the JSON of {suffix} is {json.dumps(found)}; labels must be whole numbers or "
                "texts, or lists of them"
            )
    elif columns.label is not None:
        raise UserError(f"{there}, but nothing of data.label_column={columns.label}")
    return members[images[0]].offset_data, members[images[0]].size, label


def _label_text(found: Any) -> str:
    """A label, or a list of them, as it stands in the index; nothing where the member holds none."""
    if isinstance(found, list):
        return _LIST + json.dumps([str(one) for one in found])
    return "" if found is None else str(found)


def _says_several(text: str, column: str) -> bool:
    """Whether a label of the index is a list, in JSON or, outside of JSON, by commas."""
    return text != _NO_LABEL if text.startswith(_LIST) else "," in text and "." not in column


def _out_of_texts(texts: Sequence[str], column: str) -> np.ndarray:
    """Labels of some texts of the index, as `_out_of_lists`."""
    lists = []
    for text in texts:
        if text.startswith(_LIST):
            lists.append(json.loads(text.removeprefix(_LIST)))
        else:
            lists.append([label.strip() for label in text.split(",")] if "." not in column else [text])
        if "" in lists[-1]:
            raise UserError(
                f"data.label_column={column}: {text.removeprefix(_LIST)} holds an empty label; leave it out"
            )
    rows = np.repeat(np.arange(len(lists)), [len(labels) for labels in lists])
    labels = np.array([label for labels in lists for label in labels])
    return _with_rows(rows, _as_numbers(labels), column)


def _as_numbers(texts: np.ndarray) -> np.ndarray:
    """Whole numbers, where all texts are."""
    whole = all(re.fullmatch(r"-?\d{1,18}", text) for text in texts.tolist())
    return texts.astype(np.int64) if whole else texts


def open_tar(argument: str, split: str, columns: Columns, cache: DiskCache) -> TarRows:
    """wds:GLOB."""
    return TarRows(_found("wds", argument, split), columns, cache)


# ---------------------------------------------------------------- Hugging Face data sets


class ArrowRows(_Rows):
    """Rows of a Hugging Face data set in Arrow files; images stay encoded until they are asked for."""

    def __init__(self, rows: Any, source: str, columns: Columns) -> None:
        import datasets

        super().__init__([], [len(rows)])
        self.source, self.columns, self.fingerprint = source, columns, rows._fingerprint
        self._label_rows = rows.select_columns([columns.label]) if columns.label else None
        self.rows = rows.select_columns([columns.image]).cast_column(columns.image, datasets.Image(decode=False))
        self._files = _described(sorted({entry["filename"] for entry in self.rows.cache_files}))

    def _read_labels(self) -> tuple[list[str] | None, np.ndarray | None]:
        if self._label_rows is None:
            return None, None
        name = self.columns.label
        names = _class_names(self._label_rows.features[name])
        # Not `.data`, which would leave out the order of rows that were shuffled or selected.
        column = self._label_rows.with_format("arrow")[:].column(0)
        if _is_list(column.type):
            return _as_class_lists([_out_of_lists(column, name)], [len(self)], names, name)
        return _as_classes([_plain(column.to_numpy(), name)], names, name)

    def name(self, row: int) -> str:
        return f"{self.source} row {row}"

    def version(self, rows: np.ndarray) -> str | None:
        cells = self.rows.data.column(self.columns.image)
        lie_elsewhere = any(chunk.field("bytes").null_count for chunk in cells.chunks)
        if lie_elsewhere or not self._files:
            return None
        return _digest(self.fingerprint, self.columns.image, *[file.key for file in self._files])

    def encoded(self, row: int) -> bytes:
        cell = self.rows[row][self.columns.image]
        if not cell or (cell["bytes"] is None and cell["path"] is None):
            raise ImageError(f"{self.name(row)} holds no image; fill it in, or remove the row")
        if cell["bytes"] is not None:
            return cell["bytes"]
        try:
            return Path(cell["path"]).read_bytes()
        except OSError as error:
            raise ImageError(f"{self.name(row)} can't be read: {error}; repair it or remove the row") from None


def open_hub(argument: str, split: str, columns: Columns, cache: DiskCache) -> ParquetRows | TarRows | ArrowRows:
    """hub:NAME[@REVISION]: a data set of the Hugging Face hub, or a local copy of one.

    Data sets of Parquet or tar files are read where they lie, all others through the library's own copy.
    """
    import datasets

    name, _, revision = argument.partition("@")
    source = f"hub:{argument}"
    with _hub_errors(source, f"split {split} can't be loaded"):
        saved = _saved(name)
        if saved is not None:
            there = _saved_splits(saved)
            if split not in there:
                raise UserError(f"data.source={source}: no split {split}, but {', '.join(there)}")
            return _arrow(f"{source} {split}", columns, saved[split] if isinstance(saved, dict) else saved)
        builder = _builder(name, revision)
        files = builder.config.data_files or {}
        kind = type(builder).__module__.rsplit(".", 1)[-1]
        if kind in ("parquet", "webdataset") and split in files:
            shards = _described(str(file) for file in files[split])
            if kind == "parquet":
                return _parquet(source, shards, columns, cache, builder.info.features)
            return TarRows(shards, columns, cache)
        rows = datasets.load_dataset(name, split=split, revision=revision or None)
    return _arrow(f"{source} {split}", columns, rows)


def hub_splits(argument: str) -> list[str]:
    """The splits that a Hugging Face data set says to have; raises UserError where it can't be asked."""
    name, _, revision = argument.partition("@")
    with _hub_errors(f"hub:{argument}", "its splits can't be listed"):
        saved = _saved(name)
        if saved is not None:
            return _saved_splits(saved)
        builder = _builder(name, revision)
        return [str(split) for split in builder.config.data_files or builder.info.splits or ()]


@lru_cache(maxsize=4)
def _builder(name: str, revision: str) -> Any:
    import datasets

    return datasets.load_dataset_builder(name, revision=revision or None)


@lru_cache(maxsize=4)
def _saved(name: str) -> Any:
    """What `save_to_disk` left in a folder; None where it is another kind of folder."""
    import datasets

    marks = ("dataset_dict.json", "state.json")
    return datasets.load_from_disk(name) if any((Path(name) / mark).is_file() for mark in marks) else None


def _saved_splits(saved: Any) -> list[str]:
    """Of several, their names; of a single one the split that it was, or train."""
    return list(saved) if isinstance(saved, dict) else [str(saved.split or "train")]


@contextmanager
def _hub_errors(source: str, what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds, all of which mean: not to be had
        raise UserError(f"data.source={source}: {what}: {_reason(error)}") from None


def _arrow(source: str, columns: Columns, rows: Any) -> ArrowRows:
    return ArrowRows(rows, source, _choose(source, rows.features, columns))


# ---------------------------------------------------------------- files, and what is kept about them


def _found(kind: str, pattern: str, split: str) -> list[Shard]:
    """The files of one split: where `{split}` stands for its name, or a part of the file's name is it."""
    source = f"data.source={kind}:{pattern}"
    files = _matching(pattern.replace("{split}", split))
    if not files:
        raise UserError(f"{source}: no file matches{f' for split {split}' if '{split}' in pattern else ''}")
    if "{split}" not in pattern:
        named = {file: _words(file) for file in files}
        others = sorted({word for words in named.values() for word in words} & {*SPLITS, split})
        if others:
            files = [file for file in files if split in named[file]]
        elif split != "train":
            raise UserError(f"{source}: no file is named after a split, so all of them are the training split")
        if not files:
            raise UserError(f"{source}: no file of split {split}, but of {', '.join(others)}")
    return _described(files)


SPLITS = ("train", "validation", "val", "test")


def names_a_split(pattern: str, split: str) -> bool:
    """Whether any file of a glob belongs to a split of that name."""
    if "{split}" in pattern:
        return bool(_matching(pattern.replace("{split}", split)))
    return any(split in _words(file) for file in _matching(pattern))


def _words(file: str) -> set[str]:
    """The words of a file's name, and the name of the folder that it lies in."""
    *folders, name = file.lower().split("/")
    return {*re.split(r"[^a-z0-9]+", name), *folders[-1:]}


def _matching(pattern: str) -> list[str]:
    """Files of a glob, sorted; `{0..9}` is written out as in WebDataset."""
    numbered = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if numbered:
        first, last = numbered.groups()
        files: dict[str, None] = {}
        for number in range(int(first), int(last) + 1):
            one = pattern.replace(numbered.group(), str(number).zfill(len(first)), 1)
            matched = _matching(one)
            if not matched:
                raise UserError(f"{one} is missing, which {numbered.group()} names; fetch it, or name fewer")
            files |= dict.fromkeys(matched)  # 1* and 10* may match the same
        return list(files)
    if "://" not in pattern:
        path = os.path.expanduser(pattern)
        return [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    filesystem, path = _filesystem(pattern)
    protocol = pattern.partition("://")[0]
    try:
        found = filesystem.glob(path) if any(sign in path for sign in "*?[") else [path]
    except Exception as error:
        raise UserError(f"{pattern} can't be listed: {error}") from None
    return sorted(file if "://" in file else f"{protocol}://{file.lstrip('/')}" for file in found)


def _described(files: Iterable[str]) -> list[Shard]:
    described = []
    for file in files:
        if "://" not in file:
            try:
                status = os.stat(file)
            except OSError as error:
                raise UserError(f"{file} can't be read: {error.strerror}; remove it, or what it points to") from None
            version = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
            described.append(Shard(os.path.abspath(file), status.st_size, version))
            continue
        filesystem, path = _filesystem(file)
        try:
            known = filesystem.info(path)
            stamps = [str(known.get(key)) for key in ("ETag", "etag", "Last-Modified", "mtime")]
            described.append(Shard(file, int(known["size"]), f"{filesystem.ukey(path)} {stamps}"))
        except Exception as error:
            raise UserError(f"{file} can't be reached: {error}") from None
    return described


def _filesystem(url: str) -> tuple[Any, str]:
    """A file system of this process, for fsspec's are not to be shared with a forked worker."""
    import fsspec.core

    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"{url}: {error}") from None


def _kept(shard: Shard, what: str, make: Callable[[Shard], np.ndarray]) -> np.ndarray:
    """An array about a shard that is made once, for all later runs."""

    def write(out: BinaryIO) -> None:
        np.save(out, shard.patiently(lambda: make(shard)), allow_pickle=False)

    def sound(file: BinaryIO) -> bool:
        try:
            np.load(file, allow_pickle=False)
        except (ValueError, EOFError, OSError):
            return False
        return True

    with DiskCache(default_folder() / "index").open(f"{_digest(shard.key, what)}.npy", write, sound) as file:
        return np.load(file, allow_pickle=False)


def _listed(shards: Sequence[Shard], title: str) -> Iterable[Shard]:
    """The shards, behind a progress bar where it takes a while."""
    return tqdm(shards, desc=title, unit="file", delay=2, leave=False, disable=None)


def _plain(values: np.ndarray, column: str | None) -> np.ndarray:
    """Labels as whole numbers or as texts; raises UserError where they are something else."""
    if values.dtype.kind in "iu":
        return values
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        return values.astype(str)
    odd = [value for value in values if not isinstance(value, str)]
    raise _no_classes(column, type(odd[0]).__name__ if odd else "nothing")


def _no_classes(column: str | None, example: str) -> UserError:
    return UserError(
        f"data.label_column={column}: labels must be whole numbers or texts, or lists of them, not {example}"
    )


def _out_of_lists(column: Any, name: str | None) -> np.ndarray:
    """Labels of an Arrow column of lists, one after another, each with its row.

    Returns:
        Structured [labels]: `row`, int64, and `label`, int32 or text; unlike an array of single labels.

    Raises:
        UserError: a list is missing, or holds something that is no class.
    """
    import pyarrow.compute as compute
    import pyarrow.types as types

    values = compute.list_flatten(column)
    if column.null_count:
        raise _no_classes(name, "null; write an empty list where an image has no label")
    if values.null_count:
        raise _no_classes(name, "null in a list")
    if types.is_nested(values.type):
        raise _no_classes(name, f"lists of {values.type}")
    rows = compute.list_parent_indices(column).to_numpy()
    return _with_rows(rows, _plain(values.to_numpy(), name) if len(values) else np.empty(0, np.int32), name)


def _with_rows(rows: np.ndarray, labels: np.ndarray, column: str | None) -> np.ndarray:
    """What `_out_of_lists` returns; raises UserError where a number can't be a class."""
    if labels.dtype.kind in "iu":
        if labels.min(initial=0) < 0:
            raise UserError(
                f"data.label_column={column}: {labels.min()} in a list; labels count from 0, and the list of an image "
                "without a label is empty"
            )
        labels = _as_class_numbers(labels, column)
    table = np.empty(len(rows), dtype=[("row", np.int64), ("label", labels.dtype)])
    table["row"], table["label"] = rows, labels
    return table


def _as_classes(
    columns: Sequence[np.ndarray], names: list[str] | None, column: str | None
) -> tuple[list[str] | None, np.ndarray | None]:
    """Class names and labels, int32, from what stands in a column; neither where labels are withheld."""
    values = np.concatenate(columns)
    if values.dtype.kind not in "iu":
        classes, labels = np.unique(values, return_inverse=True)
        return classes.tolist(), labels.astype(np.int32)
    if (values < 0).any():  # a test split whose labels are withheld
        return None, None
    labels = _as_class_numbers(values, column)
    names = names or [str(number) for number in range(int(labels.max(initial=-1)) + 1)]
    if labels.max(initial=0) >= len(names):
        raise UserError(f"data.label_column={column}: label {labels.max()}, but there are {len(names)} class names")
    return names, labels


def _as_class_numbers(values: np.ndarray, column: str | None) -> np.ndarray:
    if values.max(initial=0) >= _MOST_CLASSES:
        raise UserError(
            f"data.label_column={column}: {values.max()} can't be the number of a class; labels count from 0"
        )
    return values.astype(np.int32)


def _as_class_lists(
    parts: Sequence[np.ndarray], counts: Sequence[int], names: list[str] | None, column: str | None
) -> tuple[list[str] | None, np.ndarray | None]:
    """Class names and labels of images that can have several; neither where no image has any.

    Args:
        parts: of each shard, as `_out_of_lists` returns them.
        counts: rows of each shard.

    Returns:
        Labels int32 [rows, most], each of an image once, rising, and then -1.
    """
    if not any(len(part) for part in parts):  # as a test split whose labels are withheld
        return None, None
    classes, numbers = _as_classes([part["label"] for part in parts if len(part)], names, column)
    assert classes is not None and numbers is not None
    _require_no_flags(parts, counts, numbers, column)
    ends = np.cumsum([len(part) for part in parts])
    tables = [
        _padded(part["row"], mine, count, len(classes))
        for part, mine, count in zip(parts, np.split(numbers, ends[:-1]), counts, strict=True)
    ]
    labels = np.full((sum(counts), max(table.shape[1] for table in tables)), -1, dtype=np.int32)
    start = 0
    for table in tables:
        labels[start : start + len(table), : table.shape[1]] = table
        start += len(table)
    return classes, labels


def _padded(rows: np.ndarray, numbers: np.ndarray, count: int, classes: int) -> np.ndarray:
    """Class numbers of each row, int32 [count, most], from pairs of row and number."""
    pairs = np.sort(rows * classes + numbers)
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # each once; `np.unique` would take far longer
    rows, numbers = np.divmod(pairs, classes)
    sizes = np.bincount(rows, minlength=count)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    padded = np.full((count, sizes.max(initial=0)), -1, dtype=np.int32)
    padded[rows, places] = numbers
    return padded


def _require_no_flags(
    parts: Sequence[np.ndarray], counts: Sequence[int], numbers: np.ndarray, column: str | None
) -> None:
    """Raises UserError at lists of a zero or one for each class, which would be read as classes 0 and 1."""
    if numbers.max() > 1 or any(part["label"].dtype.kind == "U" for part in parts):
        return
    sizes = np.concatenate([np.bincount(part["row"], minlength=n) for part, n in zip(parts, counts, strict=True)])
    if sizes.min() == sizes.max() > 2:
        raise UserError(
            f"data.label_column={column}: each list holds {sizes[0]} zeros and ones, which looks like one a class; "
            "write the numbers of an image's classes, as in [0, 7]"
        )


def _reason(error: Exception) -> str:
    """The first line of what an error says, or its kind."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
