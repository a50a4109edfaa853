"""Every random number that touches data: a pure function of (seed, purpose, epoch, index).

Only the raw 64-bit words of Philox are used. NumPy keeps the raw stream of a seed for ever, but not
what its `Generator` methods make of it.
"""

import math

import numpy as np

# A purpose keeps streams apart that share seed, epoch and index. Numbers are for ever: changing one
# changes every run.
PURPOSES = {
    "order": 0,
    "augment": 1,
    "corruption": 2,
    "held-out corruption": 3,
    "subset": 4,
    "step": 6,
    "demo": 7,
    "synthetic": 8,
    "shards": 9,
    "replacement": 10,
    "part": 11,
    "mixing": 12,
    "shuffled labels": 13,
    "resampling": 14,
}
_LIMIT = 2**32


def words(seed: int, purpose: str, epoch: int, index: int, count: int) -> np.ndarray:
    """The first `count` raw random words of one (seed, purpose, epoch, index).

    Returns:
        uint64 [count].

    Raises:
        ValueError: a number is negative or does not fit 32 bits (longer ones could collide).
    """
    key = (seed, PURPOSES[purpose], epoch, index)
    if not all(0 <= part < _LIMIT for part in key):
        raise ValueError(f"seed={seed}, epoch={epoch} and index={index} must lie in 0 .. 2**32 - 1")
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


def uniforms(raw: np.ndarray) -> np.ndarray:
    """Words as numbers in [0, 1), float64 of the same shape."""
    return (raw >> np.uint64(11)) * 2.0**-53


def below(raw: np.ndarray, limit: int) -> np.ndarray:
    """Words as integers in 0 .. limit - 1, int64 of the same shape."""
    return (uniforms(raw) * limit).astype(np.int64)


def permuted(keys: np.ndarray, count: int, places: np.ndarray) -> np.ndarray:
    """Where a shuffle of 0 .. count - 1 puts some places, without making the shuffle.

    A Feistel network over a grid of rows and columns that is hardly larger than `count`, repeated for
    the few places that fall outside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        keys: uint64 words, one a round; an even number of them.
        places: int64, each in 0 .. count - 1.

    Returns:
        int64 of the same shape; different places go to different ones.
    """
    columns = math.isqrt(count - 1) + 1
    rows = -(-count // columns)

    def encipher(cells: np.ndarray) -> np.ndarray:
        row, column = np.divmod(cells, np.uint64(columns))
        for number, key in enumerate(keys):
            if number % 2 == 0:
                row = (row + _mixed(column, key) % np.uint64(rows)) % np.uint64(rows)
            else:
                column = (column + _mixed(row, key) % np.uint64(columns)) % np.uint64(columns)
        return row * np.uint64(columns) + column

    found = encipher(places.astype(np.uint64))
    while (outside := found >= count).any():
        found[outside] = encipher(found[outside])
    return found.astype(np.int64)


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """64 random-looking bits of each value (the finalizer of SplitMix64)."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def ranked_within_class(seed: int, purpose: str, labels: np.ndarray) -> np.ndarray:
    """A random rank of every row among the rows of its class, int64 [rows], starting at 0.

    Taking the rows of rank below k gives k rows of each class; a larger k keeps the smaller set.
    """
    shuffled = np.argsort(words(seed, purpose, 0, 0, len(labels)), kind="stable")
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.searchsorted(labels[by_class], labels[by_class], side="left")
    ranks = np.empty(len(labels), dtype=np.int64)
    ranks[by_class] = np.arange(len(labels)) - starts
    return ranks


def step_seed(seed: int, step: int, process: int) -> int:
    """Seed of torch's own generator (dropout, drop path) for one optimiser step on one process."""
    return int(words(seed, "step", step, process, 1)[0] >> np.uint64(1))
