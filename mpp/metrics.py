"""Sums over data that weigh every example once, whatever the batches and processes."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

BEST = 5  # classes that are kept of each prediction


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


def top_k_hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Whether a label is among the k largest logits, bool [batch].

    Args:
        logits: [batch, class].
        labels: int64 [batch], or [batch, most] of which any will do, padded with -1.
    """
    best = logits.topk(k, dim=-1).indices
    return (best[:, :, None] == labels.reshape(len(labels), 1, -1)).flatten(1).any(dim=-1)


def hits(best: np.ndarray, labels: np.ndarray, k: int = 1) -> np.ndarray:
    """Whether a label is among the k most likely classes, bool [image].

    Args:
        best: int [image, class], most likely first.
        labels: int [image], or [image, most] of which any will do, padded with -1.
    """
    return (best[:, :k, None] == labels.reshape(len(labels), 1, -1)).any(axis=(1, 2))


def accuracies(best: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Top-1 and top-5 accuracy over the images that have a label, by `hits`; none where no image has one."""
    labelled = (labels.reshape(len(labels), -1) >= 0).any(1)
    if not labelled.any():
        return {}
    found = {"accuracy": float(hits(best, labels)[labelled].mean())}
    if best.shape[1] == BEST:
        found["top_5_accuracy"] = float(hits(best, labels, BEST)[labelled].mean())
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
