"""What frozen features are worth by classifiers that need no training: few shots, and nearest neighbours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from accelerate import Accelerator
from torch import nn

from mpp import draws, probe
from mpp.data import View
from mpp.errors import UserError
from mpp.features import features
from mpp.sources import Source

Rows = Sequence[int] | np.ndarray
Read = Callable[[Source, Rows], np.ndarray]  # features, float32 [row, width]


def shot_rows(source: Source, seed: int, shots: int, allow_fewer: bool = False) -> np.ndarray:
    """So many rows of each class, drawn by the seed, rising; fewer shots lie within more.

    Args:
        allow_fewer: take what there is of a class with fewer images.

    Raises:
        UserError: the source has no classes, or several labels an image; or a class has fewer images, by name.
    """
    labels, classes = source.labels, source.classes
    if labels is None or classes is None or labels.ndim == 2:
        raise UserError(
            "few-shot classifiers need images with one label each: SPLIT/CLASS/*.jpg, or a column of labels"
        )
    counts = np.bincount(labels, minlength=len(classes))
    if counts.min() < shots and not allow_fewer:
        short = [f"{classes[label]} ({counts[label]})" for label in np.flatnonzero(counts < shots)]
        more = f" and {len(short) - 5} more" if len(short) > 5 else ""
        raise UserError(
            f"{shots} images of each class are asked for, but there are fewer of {', '.join(short[:5])}{more}; ask for "
            "fewer (probe.shots), or take what there is (--allow-fewer of eval/few_shot.py)"
        )
    return np.flatnonzero(draws.ranked_within_class(seed, "subset", labels) < shots)


def few_shot(
    read: Read,
    train: Source,
    test: Source,
    test_rows: Rows,
    *,
    shots: Sequence[int],
    seeds: Sequence[int],
    form: Literal["whitened", "plain"],
    strength: float,
    allow_fewer: bool = False,
) -> dict[tuple[int, int], np.ndarray]:
    """Hits of a regularised least-squares classifier, bool [test row], by (shots, seed).

    Source: ViT paper, section 4.1.
    """
    tested, labels = read(test, test_rows), _labels(test, test_rows)
    chosen = {seed: shot_rows(train, seed, max(shots), allow_fewer) for seed in seeds}
    rows = np.unique(np.concatenate(list(chosen.values())))
    known, classes = read(train, rows), len(train.classes or [])
    found = {}
    for seed in seeds:
        for count in shots:
            some = shot_rows(train, seed, count, allow_fewer)
            scores = probe.ridge(
                known[np.searchsorted(rows, some)], _labels(train, some), tested, classes, form=form, strength=strength
            )
            found[count, seed] = scores.argmax(1) == labels
    return found


def nearest(
    read: Read,
    train: Source,
    test: Source,
    test_rows: Rows,
    *,
    shots: int,
    seeds: Sequence[int],
    neighbors: Sequence[int],
    temperature: float,
) -> dict[tuple[int, int], np.ndarray]:
    """Hits of a weighted k-nearest-neighbour classifier among so many images a class, by (neighbours, seed)."""
    tested, labels = read(test, test_rows), _labels(test, test_rows)
    found = {}
    for seed in seeds:
        rows = shot_rows(train, seed, shots)
        scores = probe.nearest(
            read(train, rows),
            _labels(train, rows),
            tested,
            len(train.classes or []),
            neighbors=neighbors,
            temperature=temperature,
        )
        for count in neighbors:
            found[count, seed] = scores[count].argmax(1) == labels
    return found


def _labels(source: Source, rows: Rows) -> np.ndarray:
    return np.asarray(source.labels)[np.asarray(rows)]


@dataclass(frozen=True)
class Probes:
    """Few-shot and nearest-neighbour accuracy of a model while it trains, on a small labelled set.

    Attributes:
        train, test: labelled images; of the first each seed draws its shots, of the second `test_rows` are tested.
        view: how images are cut; mean, std: pixel statistics of the model.
        shots, seeds, form, strength: of `few_shot`.
        neighbors, temperature: of `probe.nearest`, among the images of the most shots.
        kind, block: of `features`.
    """

    train: Source
    test: Source
    test_rows: np.ndarray
    view: View
    mean: Sequence[float]
    std: Sequence[float]
    shots: Sequence[int]
    seeds: Sequence[int]
    form: Literal["whitened", "plain"]
    strength: float
    neighbors: Sequence[int]
    temperature: float
    kind: Any
    block: int | None
    micro_batch: int
    workers: int

    def __post_init__(self) -> None:
        rows = shot_rows(self.train, self.seeds[0], max(self.shots))
        if max(self.neighbors) > len(rows):
            raise UserError(
                f"probe.neighbors={list(self.neighbors)}: {max(self.shots)} images of each class are {len(rows)} in "
                "all; use fewer neighbors, or more shots"
            )

    @property
    def names(self) -> list[str]:
        """What `measure` tells of."""
        return [
            f"probe_{count}_{kind}_accuracy"
            for kind, counts in (("shot", self.shots), ("nn", self.neighbors))
            for count in counts
        ]

    def measure(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Means over the seeds, the same in every process."""
        drawn = [shot_rows(self.train, seed, max(self.shots)) for seed in self.seeds]
        parts = [(self.train, np.unique(np.concatenate(drawn))), (self.test, self.test_rows)]
        known = {id(source): (rows, self._features(model, accelerator, source, rows)) for source, rows in parts}

        def read(source: Source, rows: Rows) -> np.ndarray:
            there, values = known[id(source)]
            return values[np.searchsorted(there, rows)]

        parts_of = (read, self.train, self.test, self.test_rows)
        by_shots = few_shot(*parts_of, shots=self.shots, seeds=self.seeds, form=self.form, strength=self.strength)
        by_neighbors = nearest(
            *parts_of,
            shots=max(self.shots),
            seeds=self.seeds,
            neighbors=self.neighbors,
            temperature=self.temperature,
        )
        found = [by_shots[count, seed].mean() for count in self.shots for seed in self.seeds]
        found += [by_neighbors[count, seed].mean() for count in self.neighbors for seed in self.seeds]
        means = np.reshape(found, (-1, len(self.seeds))).mean(axis=1)
        return dict(zip(self.names, means.tolist(), strict=True))

    def _features(self, model: nn.Module, accelerator: Accelerator, source: Source, rows: Rows) -> np.ndarray:
        return features(
            model,
            source,
            rows,
            self.view,
            self.mean,
            self.std,
            kind=self.kind,
            block=self.block,
            micro_batch=self.micro_batch,
            workers=self.workers,
            accelerator=accelerator,
        )
