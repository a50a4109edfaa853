"""The order in which a run reads its samples: a pure function of (seed, epoch), in constant memory."""

from dataclasses import dataclass, field

import numpy as np

from mpp import draws

_ROUNDS = 8  # of the Feistel network; tests/test_order.py measures how well it shuffles


class Order:
    """An endless stream of samples: epoch after epoch, each in its own shuffled order.

    Samples lie in shards. An epoch permutes the shards, takes them `window` at a time, and permutes
    the samples of a window among themselves, so that reading stays within a few shards. A source
    without shards is one shard, whose samples are permuted freely.

    Args:
        seed: of the run.
        starts: int64 [shards + 1], the first sample of each shard, and their number last.
        window: shards that are shuffled together.
    """

    def __init__(self, seed: int, starts: np.ndarray, window: int) -> None:
        self.seed, self.starts, self.window = seed, np.asarray(starts, dtype=np.int64), window
        self.count = int(self.starts[-1])
        self._epochs: dict[int, _Epoch] = {}

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and sample at some places of the stream, two int64 arrays like `places`."""
        epochs, inside = np.divmod(places, self.count)
        samples = np.empty_like(inside)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            samples[chosen] = self._epoch(int(epoch)).samples(inside[chosen])
        return epochs, samples

    def _epoch(self, epoch: int) -> "_Epoch":
        if epoch not in self._epochs:
            newest = sorted(self._epochs)[-1:]  # a batch may lie across two epochs
            self._epochs = {old: self._epochs[old] for old in newest}
            sizes = np.diff(self.starts)
            shards = np.argsort(draws.words(self.seed, "shards", epoch, 0, len(sizes)), kind="stable")
            self._epochs[epoch] = _Epoch(self.seed, epoch, self.starts, shards, self.window)
        return self._epochs[epoch]


@dataclass(frozen=True)
class _Epoch:
    seed: int
    epoch: int
    starts: np.ndarray
    shards: np.ndarray
    window: int
    ends: np.ndarray = field(init=False)  # of each shard, in the order of the epoch

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", np.cumsum(np.diff(self.starts)[self.shards]))

    def samples(self, places: np.ndarray) -> np.ndarray:
        windows = np.searchsorted(self.ends, places, side="right") // self.window
        mixed = np.empty_like(places)
        for window in np.unique(windows):
            chosen = windows == window
            first, end = self._span(int(window))
            keys = draws.words(self.seed, "order", self.epoch, int(window), _ROUNDS)
            mixed[chosen] = first + draws.permuted(keys, end - first, places[chosen] - first)
        turn = np.searchsorted(self.ends, mixed, side="right")
        shard = self.shards[turn]
        before = np.where(turn > 0, self.ends[turn - 1], 0)
        return self.starts[shard] + mixed - before

    def _span(self, window: int) -> tuple[int, int]:
        first = window * self.window
        last = min(first + self.window, len(self.shards)) - 1
        return int(self.ends[first - 1]) if first else 0, int(self.ends[last])
