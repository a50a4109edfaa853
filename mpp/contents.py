"""What images are by their bytes: keys that change with them, and images that stand in two splits."""

import hashlib
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mpp.data import outlive_signals, start_method
from mpp.disk_cache import DiskCache, default_folder
from mpp.errors import ImageError, UserError
from mpp.sources import Joined, Pictures, Source

Rows = Sequence[int] | np.ndarray
_BATCH = 32
_LIMIT_BYTES = 2 * 10**9  # of what is kept, 8 bytes an image
_SHOWN = 3  # images in a message


def hash_of(content: bytes | np.ndarray) -> int:
    """The first 8 bytes of the SHA-256 of some bytes, or of the shape of an array and what is in it."""
    shape = b"" if isinstance(content, bytes) else str(content.shape).encode()
    return int.from_bytes(hashlib.sha256(shape + bytes(content)).digest()[:8], "little")


def hashes(source: Source, rows: Rows, *, workers: int = 0) -> np.ndarray:
    """Hashes of images: of their encoded bytes, or of their pixels where a source has nothing encoded.

    They are kept on disk under the `version` of the rows, where the source tells one: the next call reads no image.
    Processes that ask for the same wait for the one that reads.

    Args:
        workers: loader processes.

    Returns:
        uint64 [row], in the order of `rows`.

    Raises:
        ImageError: an image can't be read; encoded ones are not decoded.
        UserError: the disk is full, or the folder can't be written.
    """
    rows = np.asarray(rows, dtype=np.int64)
    if isinstance(source, Joined):
        found, late = np.empty(len(rows), dtype=np.uint64), rows >= len(source.first)
        found[~late] = hashes(source.first, rows[~late], workers=workers)
        found[late] = hashes(source.second, rows[late] - len(source.first), workers=workers)
        return found
    version = source.version(rows) if hasattr(source, "version") else None
    if version is None:
        return _read(source, rows, workers)
    kept: np.ndarray | None = None

    def sound(file: BinaryIO) -> bool:
        nonlocal kept
        kept = _load(file, len(rows))
        return kept is not None

    name = f"{hashlib.sha256(version.encode() + rows.tobytes()).hexdigest()[:32]}.npy"
    cache = DiskCache(default_folder() / "contents", _LIMIT_BYTES)
    cache.open(name, lambda file: np.save(file, _read(source, rows, workers)), sound).close()
    assert kept is not None
    return kept


def _load(file: BinaryIO, count: int) -> np.ndarray | None:
    """What is in a file of hashes; None where it is damaged."""
    try:
        found = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return None
    return found if found.shape == (count,) and found.dtype == np.uint64 else None


def _read(source: Source, rows: np.ndarray, workers: int) -> np.ndarray:
    found: list[int] = []
    workers = 0 if isinstance(source, Pictures) else workers  # there is nothing to wait for
    with (
        closing(in_batches(_Hashes(source), rows, workers)) as batches,
        tqdm(total=len(rows), desc="hashing images", unit="img", unit_scale=True, delay=2, disable=None) as bar,
    ):
        for batch in batches:
            found += batch
            bar.update(len(batch))
    return np.array(found, dtype=np.uint64)


@dataclass(frozen=True)
class _Hashes(Dataset):
    source: Source

    def __getitem__(self, row: int) -> int | UserError:
        try:
            if hasattr(self.source, "encoded"):
                return hash_of(self.source.encoded(row))
            picture = self.source.picture(row)
            return hash_of(picture.region((0, 0, picture.width, picture.height)))
        except UserError as error:
            return error
        except OSError as error:  # which the cache would take for one of its own
            return ImageError(f"{self.source.name(row)} can't be read: {error.strerror}; repair or remove it")


def in_batches(samples: Dataset, rows: Rows, workers: int) -> Generator[list[Any], None, None]:
    """What a dataset gives for some rows, in their order, a list a batch; raises a UserError that it gives.

    Args:
        workers: loader processes.
    """
    places = range(0, len(rows), _BATCH)
    workers = min(workers, len(places))
    loader = DataLoader(
        samples,
        batch_sampler=(np.asarray(rows[place : place + _BATCH]).tolist() for place in places),
        num_workers=workers,
        collate_fn=list,
        worker_init_fn=outlive_signals,
        generator=torch.Generator(),  # the loader would else draw from the one that dropout uses
        multiprocessing_context=start_method(workers),
    )
    for batch in loader:
        for found in batch:
            if isinstance(found, UserError):
                raise found
        yield batch


def digest(source: Source, rows: Rows, *, workers: int = 0) -> str:
    """32 hexadecimal digits of the images of some rows in this order, labels left out; raises as `hashes`."""
    return hashlib.sha256(hashes(source, rows, workers=workers).tobytes()).hexdigest()[:32]


def shared(
    train: Source, train_rows: Rows, test: Source, test_rows: Rows, *, workers: int = 0
) -> list[tuple[int, int]]:
    """Test images that are training images, too: (row of `train`, row of `test`) with equal bytes.

    One pair a test image, rising by its row, with the first of equal training images; raises as `hashes`.
    """
    train_rows, test_rows = np.asarray(train_rows, dtype=np.int64), np.sort(np.asarray(test_rows, dtype=np.int64))
    values, first = np.unique(hashes(train, train_rows, workers=workers), return_index=True)
    there = hashes(test, test_rows, workers=workers)
    known = np.isin(there, values)
    copies = train_rows[first[np.searchsorted(values, there[known])]]
    return list(zip(copies.tolist(), test_rows[known].tolist(), strict=True))


def require_disjoint(
    train: Source, train_rows: Rows, test: Source, test_rows: Rows, *, allowed: int, where: str, workers: int = 0
) -> int:
    """How many test images are training images, too, byte for byte.

    Args:
        allowed: how many may be.
        where: the data, for the message.

    Raises:
        UserError: there are more than that, or as `hashes`.
    """
    pairs = shared(train, train_rows, test, test_rows, workers=workers)
    if len(pairs) > allowed:
        some = ", ".join(f"{test.name(copy)} = {train.name(row)}" for row, copy in pairs[:_SHOWN])
        raise UserError(
            f"{where}: {len(pairs):,} test images are training images, too, byte for byte ({some}"
            f"{', ...' if len(pairs) > _SHOWN else ''}), so that what is measured on them would be too good; remove "
            f"them from one of the splits, or say that so many are known with data.max_overlap={len(pairs)}"
        )
    return len(pairs)
