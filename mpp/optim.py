"""Optimisers, what they decay, the learning rate of every step, and the running average of weights."""

import copy
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

# Embeddings are looked up, not multiplied; like biases and norms they are not decayed.
_EMBEDDINGS = (
    *("pos_embed", "cls_token", "reg_token", "mask_embedding"),
    *("prefix", "patches", "rows", "columns", "relative"),  # of mpp/positions.py
)
_STEM = ("cls_token", "reg_token", "pos_embed", "patch_embed", "norm_pre", "positions", "mask_embedding")


def lr_at(
    step: int,
    *,
    base: float,
    steps: int,
    warmup_steps: int,
    schedule: str,
    end: float = 0.0,
    milestones: Sequence[int] = (),
) -> float:
    """Learning rate of the update after `step` finished ones.

    Args:
        base: peak value.
        steps: length of the run; the warm-up counts inside it.
        schedule: cosine (to 0), linear (to `end`), constant, or staircase (a tenth from each of `milestones` on),
            each times the linear warm-up.

    Source: the ViT paper's code; its first update has learning rate 0 where there is a warm-up. The staircase: BiT.
    """
    progress = min(max((step - warmup_steps) / (steps - warmup_steps), 0.0), 1.0)
    decayed = {
        "cosine": base * 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": end + (base - end) * (1.0 - progress),
        "constant": base,
        "staircase": base * 0.1 ** sum(step >= milestone for milestone in milestones),
    }[schedule]
    return decayed * (min(1.0, step / warmup_steps) if warmup_steps else 1.0)


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a kernel; biases, norms and embeddings are not decayed."""
    return parameter.dim() > 1 and name.split(".")[-1] not in _EMBEDDINGS


def layer_of(name: str, depth: int) -> int:
    """Layer of a Vision Transformer's parameter: 0 for what precedes the blocks, then the blocks, then the rest.

    Args:
        name: of a parameter, of the encoder or of what is trained around it.
        depth: number of blocks.
    """
    parts = name.removeprefix("encoder.").split(".")
    if parts[0] in _STEM:
        return 0
    return int(parts[1]) + 1 if parts[0] == "blocks" else depth + 1


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    name: str,
    weight_decay: float,
    betas: tuple[float, float],
    momentum: float,
    decay_on: str = "kernels",
    layer_decay: float = 1.0,
    depth: int = 0,
) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD over named parameters, in groups of equal decay and equal learning rate.

    AdamW's decay is multiplied by the learning rate and applied to the weights, as in the paper's code; Adam
    and SGD, as PyTorch has them, add it to the gradient. The loop sets each group's `lr` to the step's
    learning rate times the group's `lr_scale`: `layer_decay` to the power of the layers above it.

    Args:
        decay_on: kernels, or all.
        depth: number of blocks, for `layer_decay`.

    Source of the layers' rates: BEiT and MAE, fine-tuning.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for key, value in parameters:
        if value.requires_grad:
            layer = layer_of(key, depth) if layer_decay < 1 else depth + 1
            groups.setdefault((layer, decay_on == "all" or is_decayed(key, value)), []).append(value)
    described = [
        {
            "params": members,
            "weight_decay": weight_decay if decayed else 0.0,
            "lr_scale": layer_decay ** (depth + 1 - layer),
        }
        for (layer, decayed), members in sorted(groups.items(), key=lambda item: (item[0][0], not item[0][1]))
    ]
    if name == "sgd":
        return torch.optim.SGD(described, lr=0.0, momentum=momentum)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    return kind(described, lr=0.0, betas=betas)


class RunningAverage:
    """A model whose weights are the exponential moving average of another's (Polyak averaging).

    It starts at the other's first weights; an update makes it `keep * average + (1 - keep) * weights`.

    Source: ViT paper, section 4.1 (factor 0.9999).
    """

    def __init__(self, model: nn.Module, keep: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.keep = keep
        self.pairs = [
            (ours, theirs)
            for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True)
            if theirs.requires_grad
        ]
        self.buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self) -> None:
        ours, theirs = zip(*self.pairs, strict=True)
        torch._foreach_lerp_(ours, theirs, 1.0 - self.keep)
        for mine, other in self.buffers:
            mine.copy_(other)
