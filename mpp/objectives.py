"""What is learned: what a sample carries, what a batch costs, and what is measured beside it.

An objective has
    per_sample(epoch, index)          arrays of fixed shape that a training sample carries
    per_held_out_sample(epoch, index) the same for held-out samples, in every epoch alike
    build(encoder)                    the model that is trained
    predict(model, batch)             what the model says of a batch
    loss(model, batch)                scalar to minimise, and counts for a `Tally`
    measure(model, batch)             counts on held-out images
    summary(totals)                   the numbers that counts add up to
    note                              what its own weights mean, for their file
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn

from mpp import metrics, mixing
from mpp.corruption import ACTIONS, Plan, plan, take
from mpp.data import normalize
from mpp.encoders import Encoder
from mpp.model import Classifier, MaskedPatchModel
from mpp.targets import COLORS, TARGETS, color_bins, nearest_color_bins

Batch = Mapping[str, Tensor]
Counts = dict[str, Tensor]


class Objective(Protocol):
    def per_sample(self, epoch: int, index: int) -> Mapping[str, np.ndarray]: ...
    def per_held_out_sample(self, epoch: int, index: int) -> Mapping[str, np.ndarray]: ...
    def build(self, encoder: Encoder) -> nn.Module: ...
    def predict(self, model: nn.Module, batch: Batch) -> Tensor: ...
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Counts]: ...
    def measure(self, model: nn.Module, batch: Batch) -> Counts: ...
    def summary(self, totals: Mapping[str, Tensor]) -> dict[str, float]: ...
    @property
    def note(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class MaskedPatchPrediction:
    """Predict the colours of corrupted patches (ViT paper, B.1.2)."""

    seed: int
    patch_size: int
    patch_count: int
    corruption: float
    target: str
    mean: Sequence[float]
    std: Sequence[float]

    def per_sample(self, epoch: int, index: int) -> Plan:
        return plan(self.seed, epoch, index, self.patch_count, self.corruption)

    def per_held_out_sample(self, epoch: int, index: int) -> Plan:
        # Seed 0 whatever the run's: held-out losses of different runs then compare.
        return plan(0, 0, index, self.patch_count, self.corruption, "held-out corruption")

    def build(self, encoder: Encoder) -> MaskedPatchModel:
        assert isinstance(encoder, VisionTransformer)
        return MaskedPatchModel(encoder, TARGETS[self.target].outputs(self.patch_size))

    @property
    def note(self) -> dict[str, str]:
        colors = "class = 64 R + 8 G + B, each the top 3 bits of the mean"
        outputs = colors if TARGETS[self.target].colors else "row, column, channel"
        return {"target": self.target, "outputs": outputs, "corruption": str(self.corruption)}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        images = normalize(batch["images"], self.mean, self.std)
        return model(images, batch["positions"], batch["actions"], batch["donors"])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Counts]:
        kind = TARGETS[self.target]
        targets = take(kind.of_patches(batch["images"], self.patch_size), batch["positions"])
        prediction = self.predict(model, batch)
        cost = kind.cost(prediction, targets)
        counts = {"loss": metrics.sum_and_count(cost)}
        if kind.colors:
            hits = kind.decide(prediction.detach()) == targets
            counts |= _by_action("accuracy", hits.float().mean(-1), batch["actions"])
            counts["colors"] = _histogram(targets, COLORS)
        return cost.mean(), counts

    def measure(self, model: nn.Module, batch: Batch) -> Counts:
        _, counts = self.loss(model, batch)
        if self.target == "mean_color":
            truth = take(color_bins(batch["images"], self.patch_size), batch["positions"])[..., 0]
            guess = nearest_color_bins(batch["images"], batch["positions"], self.patch_size)
            counts |= _by_action("nearest_patch_accuracy", (guess == truth).float(), batch["actions"])
        return counts

    def summary(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        result = metrics.means({name: pair for name, pair in totals.items() if name != "colors"})
        if "colors" in totals:
            histogram = totals["colors"]
            result["target_entropy"] = metrics.entropy(histogram)
            result["target_classes"] = int((histogram > 0).sum())
            result["most_frequent_accuracy"] = float(histogram.max() / histogram.sum())
        return result


def _histogram(bins: Tensor, size: int) -> Tensor:
    """Counts of each bin; `bincount` would make the host wait for the device."""
    flat = bins.flatten()
    counts = torch.zeros(size, dtype=metrics.exact_type(bins.device), device=bins.device)
    return counts.scatter_add(0, flat, torch.ones_like(flat, dtype=counts.dtype))


def _by_action(name: str, values: Tensor, actions: Tensor) -> Counts:
    """Counts over all corrupted patches, and apart for masked, random and kept ones."""
    counts = {name: metrics.sum_and_count(values)}
    for action, number in ACTIONS.items():
        chosen = (actions == number).to(metrics.exact_type(values.device))
        counts[f"{name}_{action}"] = torch.stack([(values * chosen).sum(), chosen.sum()])
    return counts


@dataclass(frozen=True)
class Supervised:
    """Predict the label of an image, or its labels.

    Attributes:
        classes: number of them.
        kind: softmax (one label an image), or sigmoid (any number): binary cross-entropies, summed over classes.
        label_smoothing: softmax: share of the target that is spread over all classes; sigmoid: what the target
            of a class is away from 0 and 1.
        head, head_bias: linear or mlp, and the value of its bias at the start.
        mixup, cutmix: their alphas; 0 for none.
        image_size: side in pixels, which cutmix needs.

    Source: ViT paper, B.1; the sigmoid loss: authors' answer in google-research/vision_transformer, issue 34.
    """

    classes: int
    mean: Sequence[float]
    std: Sequence[float]
    kind: str = "softmax"
    label_smoothing: float = 0.0
    head: str = "linear"
    head_bias: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    seed: int = 0
    image_size: int = 0

    def per_sample(self, epoch: int, index: int) -> Mapping[str, np.ndarray]:
        if not (self.mixup or self.cutmix):
            return {}
        return mixing.draw(self.seed, epoch, index, mixup=self.mixup, cutmix=self.cutmix, image_size=self.image_size)

    def per_held_out_sample(self, epoch: int, index: int) -> Mapping[str, np.ndarray]:
        return {}

    @property
    def note(self) -> dict[str, str]:
        return {"outputs": "classes of classes.json", "loss": self.kind}

    def build(self, encoder: Encoder) -> nn.Module:
        return Classifier(encoder, self.classes, self.head_bias) if self.head == "mlp" else encoder

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        images = normalize(batch["images"], self.mean, self.std)
        if "mix_share" in batch:
            images = mixing.blend_images(images, batch["mix_share"], batch["mix_box"])
        return model(images).float()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Counts]:
        return self.judge(self.predict(model, batch), batch)

    def judge(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Counts]:
        """Loss and counts of what the model says of a batch, logits [batch, class]."""
        cost = self._cost(logits, batch)
        counts = {"loss": metrics.sum_and_count(cost)}
        if "mix_share" not in batch:  # a blend has no one label that a prediction could hit
            counts |= self._hits(logits.detach(), batch["labels"])
        return cost.mean(), counts

    def _cost(self, logits: Tensor, batch: Batch) -> Tensor:
        """Loss of each image, [batch]."""
        labels, smoothing = batch["labels"], self.label_smoothing
        if self.kind == "softmax" and "mix_share" not in batch:
            return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        targets = _many_hot(labels, self.classes)
        if "mix_share" in batch:
            targets = mixing.blend_targets(targets, batch["mix_share"])
        if self.kind == "softmax":
            return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        targets = targets * (1 - 2 * smoothing) + smoothing
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)

    def _hits(self, logits: Tensor, labels: Tensor) -> Counts:
        """Whether the largest logits belong to a label of the image; images without any are left out."""
        counts = {}
        labelled = (metrics.sets(labels) >= 0).any(1).to(metrics.exact_type(labels.device))
        for k in (1, 5):
            if k < self.classes:
                hits = metrics.top_k_hits(logits, labels, k).to(labelled.dtype)
                counts["accuracy" if k == 1 else f"top_{k}_accuracy"] = torch.stack([hits.sum(), labelled.sum()])
        return counts

    def measure(self, model: nn.Module, batch: Batch) -> Counts:
        return self.loss(model, batch)[1]

    def summary(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return metrics.means(totals)


def _many_hot(labels: Tensor, classes: int) -> Tensor:
    """1 for each label of an image, else 0, float32 [batch, class].

    Args:
        labels: int64 [batch], or [batch, most] padded with -1.
    """
    several = metrics.sets(labels)
    hot = torch.zeros(len(labels), classes + 1, device=labels.device)  # the last column is the padding's
    return hot.scatter_(1, several.where(several >= 0, classes), 1.0)[:, :classes]


OBJECTIVES: dict[str, type[Any]] = {"mpp": MaskedPatchPrediction, "supervised": Supervised}
