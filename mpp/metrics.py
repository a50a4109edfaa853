"""Sums over data that weigh every example once, whatever the batches and processes."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

BEST = 5  # classes that are kept of each prediction
Labels = TypeVar("Labels", Tensor, np.ndarray)


def sum_and_count(values: Tensor) -> Tensor:
    """Sum and number of some values as one [2] tensor, in double precision where the device has it."""
    values = values.detach()
    total = values.to(exact_type(values.device)).sum()
    return torch.stack([total, torch.full_like(total, values.numel())])


def exact_type(device: torch.device) -> torch.dtype:
    """The type that sums are kept in; Apple's GPU has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def means(pairs: Mapping[str, Tensor]) -> dict[str, float]:
    """Means from [2] tensors of sum and count, without the names under which nothing was counted."""
    found = {name: pair.tolist() for name, pair in pairs.items()}
    return {name: total / count for name, (total, count) in found.items() if count}


def entropy(histogram: Tensor) -> float:
    """Entropy of a histogram of counts, in nats."""
    counts = histogram.double().cpu()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())


def most_likely(logits: Tensor) -> Tensor:
    """The classes of the largest logits [batch, class], the largest first: int64 [batch, up to 5]."""
    return logits.topk(min(BEST, logits.shape[-1]), dim=-1).indices


def top_k_hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Whether a label is among the k largest logits, bool [batch].

    Args:
        logits: [batch, class].
        labels: int64 [batch], or [batch, most] of which any will do, padded with -1.
        k: up to 5.
    """
    best = most_likely(logits)[:, :k]  # of equal logits those that are kept, whatever k
    return (best[:, :, None] == sets(labels)[:, None]).any(2).any(1)


def sets(labels: Labels) -> Labels:
    """Labels [image, most], of labels [image] or such; unlike `reshape` also where there is no image."""
    return labels[:, None] if labels.ndim == 1 else labels


def hits(best: np.ndarray, labels: np.ndarray, k: int = 1) -> np.ndarray:
    """Whether a label is among the k most likely classes, bool [image].

    Args:
        best: int [image, class], most likely first.
        labels: int [image], or [image, most] of which any will do, padded with -1.
    """
    return np.any(best[:, :k, None] == sets(labels)[:, None], axis=(1, 2))


def labelled(labels: np.ndarray) -> np.ndarray:
    """Whether an image has a label, bool [image], by labels as those of `hits`."""
    return np.any(sets(labels) >= 0, axis=1)


def accuracies(best: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float]:
    """Accuracy, and top-5 accuracy where there are more than 5 classes, over the images that have a label.

    Args:
        best, labels: as those of `hits`.

    Returns:
        Nothing where no image has a label.
    """
    counted = labelled(labels)
    if not counted.any():
        return {}
    found = {"accuracy": float(hits(best, labels)[counted].mean())}
    if classes > BEST:
        found["top_5_accuracy"] = float(hits(best, labels, BEST)[counted].mean())
    return found


class Tally:
    """Named sums that stay on the device until they are read.

    A name holds a tensor of any fixed shape: a pair of sum and count, or a histogram.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, counts: Mapping[str, Tensor]) -> None:
        for name, value in counts.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def total(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Sums over all processes, on the CPU, by one reduction of one flat vector.

        All processes must have added counts of the same names, or none of them any.
        """
        if not self.sums:
            return {}
        flat = reduce(torch.cat([value.flatten() for value in self.sums.values()])).cpu()
        parts = flat.split([value.numel() for value in self.sums.values()])
        return {name: part.reshape(value.shape) for (name, value), part in zip(self.sums.items(), parts, strict=True)}
