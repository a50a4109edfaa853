"""Every random number that touches data: a pure function of (seed, purpose, epoch, index).

Only the raw 64-bit words of Philox are used. NumPy keeps the raw stream of a seed for ever, but not
what its `Generator` methods make of it.
"""

from functools import lru_cache

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


@lru_cache(maxsize=2)  # a batch may lie across two epochs
def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The shuffled order of `count` samples in one epoch, int64 [count], each index once."""
    return np.argsort(words(seed, "order", epoch, 0, count), kind="stable")


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
