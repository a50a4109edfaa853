"""Optimisers, what they decay, and the learning rate of every step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Embeddings are looked up, not multiplied; like biases and norms they are not decayed.
_EMBEDDINGS = ("pos_embed", "cls_token", "reg_token", "mask_embedding")


def lr_at(step: int, *, base: float, steps: int, warmup_steps: int, schedule: str, end: float = 0.0) -> float:
    """Learning rate of the update after `step` finished ones.

    Args:
        base: peak value.
        steps: length of the run; the warm-up counts inside it.
        schedule: cosine (to 0), linear (to `end`) or constant, each times the linear warm-up.

    Source: the ViT paper's code; its first update has learning rate 0 where there is a warm-up.
    """
    progress = min(max((step - warmup_steps) / (steps - warmup_steps), 0.0), 1.0)
    decayed = {
        "cosine": base * 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": end + (base - end) * (1.0 - progress),
        "constant": base,
    }[schedule]
    return decayed * (min(1.0, step / warmup_steps) if warmup_steps else 1.0)


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a kernel; biases, norms and embeddings are not decayed."""
    return parameter.dim() > 1 and name.split(".")[-1] not in _EMBEDDINGS


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    name: str,
    weight_decay: float,
    betas: tuple[float, float],
    momentum: float,
) -> torch.optim.Optimizer:
    """AdamW or SGD over named parameters, in a group that decays and one that does not.

    AdamW's decay is multiplied by the learning rate, as in the paper's code. The loop sets `lr`.
    """
    trained = [(key, value) for key, value in parameters if value.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [value for key, value in trained if is_decayed(key, value)], "weight_decay": weight_decay},
        {"params": [value for key, value in trained if not is_decayed(key, value)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas)
