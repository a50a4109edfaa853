"""What was measured of several arms, as tables and sentences: intervals, paired differences, chosen rates, cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from mpp import intervals
from mpp.intervals import Interval
from mpp.metrics import hits, labelled

PARTS = ("pre-training", "choice of the learning rate", "fine-tuning")  # of an arm's cost
Sweep = Mapping[str, Mapping[str, Any]]  # by learning rate


@dataclass
class Outcome:
    """Predictions of one arm on one test set, seed by seed.

    Attributes:
        best: of each seed, int [image, class], the most likely class first.
        labels: int [image], or [image, most] padded with -1; images without a label are left out.
        inputs: of each seed, what was read, by content: the test images, and the training images.
        task: whose fine-tunings these are.
    """

    best: dict[int, np.ndarray]
    labels: np.ndarray
    inputs: dict[int, tuple[str, str]] = field(default_factory=dict)
    task: str = ""

    def hits(self, seeds: Sequence[int] | None = None) -> np.ndarray:
        """Whether the most likely class is right, bool [seed, image], over the images with a label."""
        counted = labelled(self.labels)
        return np.stack([hits(self.best[seed], self.labels)[counted] for seed in seeds or self.best])

    @cached_property
    def accuracy(self) -> Interval:
        return intervals.bootstrap(self.hits())

    def of_seeds(self) -> dict[int, float]:
        return dict(zip(self.best, self.hits().mean(axis=1).tolist(), strict=True))


@dataclass(frozen=True)
class Spending:
    """What a part of an arm cost.

    Attributes:
        device_hours: over all processes.
    """

    images: int = 0
    exaflops: float = 0.0
    device_hours: float = 0.0

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(
            self.images + other.images, self.exaflops + other.exaflops, self.device_hours + other.device_hours
        )


@dataclass
class Arm:
    """All that is known of one arm.

    Attributes:
        seen: what it was pre-trained on, in words.
        outcomes: by test set.
        sweeps: by task and seed, the learning rates tried.
        rates: by task, the learning rate chosen.
        frozen: by task and measure, a figure for each seed, of classifiers on the frozen encoder.
        cost: by part.
        failures: task -> why it did not finish there.
        differs: what its protocol has other than the plan's, as `key: there, here`.
        beside: whether it stands beside the arms: a baseline or a control, which is not compared.
    """

    name: str
    seen: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    sweeps: dict[str, dict[int, Sweep]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    frozen: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    cost: dict[str, Spending] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    beside: bool = False


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def ends(interval: Interval) -> str:
    """Of an interval, in percent."""
    return f"{percent(interval.low)} to {percent(interval.high)}"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, in percent."""
    if not len(values):
        return ""
    if len(values) == 1:
        return percent(values[0])
    return f"{percent(float(np.mean(values)))} ± {percent(float(np.std(values, ddof=1)))}"


def accuracy_rows(arms: Sequence[Arm], test_set: str, measures: Sequence[str]) -> list[list[str]]:
    """A row for each arm: name, what it saw, accuracy, its interval, each seed, and measures of the frozen encoder.

    Args:
        measures: names in `frozen`.
    """
    rows = []
    for arm in arms:
        outcome = arm.outcomes.get(test_set)
        if outcome is not None:
            found = outcome.accuracy
            cells = [percent(found.estimate), ends(found)]
            cells.append(" ".join(percent(value) for value in outcome.of_seeds().values()))
        else:
            most = arm.frozen.get((test_set, "most_frequent_accuracy"), [])
            cells = [spread(most) if arm.beside else "failed" if arm.failures else "not measured", "", ""]
        marks = (" †" if arm.differs and not arm.beside else "") + (
            " ‡" if outcome and outcome.task in arm.failures else ""
        )
        rows.append([arm.name + marks, arm.seen, *cells])
        rows[-1] += [spread(arm.frozen.get((test_set, measure), [])) for measure in measures]
    return rows


@dataclass(frozen=True)
class Difference:
    """The first arm's accuracy less the second's, paired on seeds and images.

    Attributes:
        of_seeds: seed by seed, for the seeds that both have.
    """

    first: str
    second: str
    interval: Interval
    of_seeds: dict[int, float]

    @property
    def verdict(self) -> str:
        """In plain words, what the interval allows to say."""
        if not any(self.of_seeds.values()) and self.interval.low == self.interval.high == 0:
            return "no difference in any image"
        if self.interval.low > 0:
            return "better"
        if self.interval.high < 0:
            return "worse"
        return "not told apart: the interval holds 0"


def differences(arms: Sequence[Arm], test_set: str) -> list[Difference]:
    """Every pair of arms that finished under one protocol, on the same images, in the order of the arms."""
    able = [
        arm
        for arm in arms
        if test_set in arm.outcomes and not (arm.differs or arm.beside or arm.outcomes[test_set].task in arm.failures)
    ]
    found = []
    for first, second in combinations(able, 2):
        one, other = first.outcomes[test_set], second.outcomes[test_set]
        seeds = [seed for seed in one.best if seed in other.best]
        same = all(one.inputs.get(seed) == other.inputs.get(seed) for seed in seeds)
        if not seeds or not same or not np.array_equal(one.labels, other.labels):
            continue
        gain = one.hits(seeds).astype(np.int8) - other.hits(seeds)
        of_seeds = dict(zip(seeds, gain.mean(axis=1).tolist(), strict=True))
        found.append(Difference(first.name, second.name, intervals.bootstrap(gain), of_seeds))
    return found


def difference_rows(found: Sequence[Difference]) -> list[list[str]]:
    """A row for each pair: arms, points, interval, each seed, verdict."""
    return [
        [
            f"{one.first} − {one.second}",
            f"{100 * one.interval.estimate:+.1f}",
            f"{100 * one.interval.low:+.1f} to {100 * one.interval.high:+.1f}",
            " ".join(f"{100 * value:+.1f}" for value in one.of_seeds.values()),
            one.verdict,
        ]
        for one in found
    ]


def mean_curve(sweeps: Mapping[int, Sweep]) -> dict[float, float | None]:
    """Mean held-out accuracy by learning rate, of rates that every seed tried; None where it diverged in one."""
    rates = [rate for rate in next(iter(sweeps.values())) if all(rate in tried for tried in sweeps.values())]
    return {
        float(rate): None
        if any(tried[rate]["diverged"] for tried in sweeps.values())
        else float(np.mean([tried[rate].get("accuracy", 0.0) for tried in sweeps.values()]))
        for rate in rates
    }


def edge_warnings(arms: Sequence[Arm]) -> list[str]:
    """Where the best learning rate lies at the edge of the grid, so that a better one may lie beyond it."""
    found = []
    for arm in arms:
        for task, sweeps in arm.sweeps.items():
            curve, chosen = mean_curve(sweeps), arm.rates.get(task)
            if chosen is None or len(curve) < 2 or chosen not in (min(curve), max(curve)):
                continue
            edge, beyond = ("smallest", "smaller") if chosen == min(curve) else ("largest", "larger")
            found.append(
                f"**Warning:** the best learning rate of {arm.name} on {task}, {chosen:g}, is the {edge} that was "
                f"tried; a {beyond} one may be better, and its accuracy underestimated. Widen optim.learning_rate."
            )
    return found


def cost_rows(arms: Sequence[Arm]) -> list[list[str]]:
    """A row for each arm and part of it, and one for its whole."""
    rows = []
    for arm in arms:
        parts = [(name, arm.cost[name]) for name in PARTS if name in arm.cost]
        total = sum((one for _, one in parts), Spending())
        for name, one in [*parts, ("all", total)] if parts else []:
            rows.append([arm.name, name, f"{one.images:,}", f"{one.exaflops:.3g}", f"{one.device_hours:.3g}"])
    return rows
