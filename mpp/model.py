"""What is trained around an encoder, and putting weights into it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from timm.layers import lecun_normal_
from timm.models import VisionTransformer
from torch import Tensor, nn

from mpp.checkpoint import misfits
from mpp.corruption import corrupt, take
from mpp.encoders import Encoder
from mpp.errors import UserError
from mpp.positions import resize_line, resize_table, sincos_table

Kind = Literal["token", "patches"]


class MaskedPatchModel(nn.Module):
    """An encoder that sees corrupted patch embeddings, and a linear head on the corrupted patches."""

    def __init__(self, encoder: VisionTransformer, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.mask_embedding = nn.Parameter(torch.empty(encoder.embed_dim).normal_(std=0.02))
        self.head = nn.Linear(encoder.embed_dim, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, positions: Tensor, actions: Tensor, donors: Tensor) -> Tensor:
        """Predictions at the corrupted positions only.

        Args:
            images: float [batch, channel, height, width], normalised.
            positions, actions, donors: int64 [batch, corrupted], a plan of `mpp.corruption`.

        Returns:
            [batch, corrupted, outputs].

        Source: ViT paper, B.1.2: the embeddings of patches are corrupted, before position embeddings.
        """
        tokens = self.encode(images, positions, actions, donors)
        return self.head(take(tokens[:, self.encoder.num_prefix_tokens :], positions))

    def encode(self, images: Tensor, positions: Tensor, actions: Tensor, donors: Tensor) -> Tensor:
        """All tokens after the final norm, [batch, prefix + patch, width].

        These are the lines of timm's `forward_features` with the corruption after the first.
        """
        encoder = self.encoder
        tokens = encoder.patch_embed(images)
        tokens = corrupt(tokens, self.mask_embedding, positions, actions, donors)
        tokens = encoder._pos_embed(tokens)
        tokens = encoder.patch_drop(tokens)
        tokens = encoder.norm_pre(tokens)
        tokens = encoder.blocks(tokens)
        return encoder.norm(tokens)


class Classifier(nn.Module):
    """An encoder and the paper's pre-training head, an MLP with one hidden tanh layer of the encoder's width.

    Source: ViT paper, section 3.1 and D.3.
    """

    def __init__(self, encoder: Encoder, classes: int, bias: float = 0.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.pre_logits = nn.Linear(encoder.num_features, encoder.num_features)
        self.head = nn.Linear(encoder.num_features, classes)
        lecun_normal_(self.pre_logits.weight)
        nn.init.zeros_(self.pre_logits.bias)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, bias)

    def hidden(self, pooled: Tensor) -> Tensor:
        """What the last layer reads, [batch, width], from what the encoder gives, of the same shape."""
        return torch.tanh(self.pre_logits(pooled))

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [batch, class]."""
        return self.head(self.hidden(self.encoder(images)))


def encoder_of(model: nn.Module) -> Encoder:
    """The timm model inside what is trained."""
    encoder = model.encoder if isinstance(model, MaskedPatchModel | Classifier) else model
    assert isinstance(encoder, Encoder)
    return encoder


def represent(model: nn.Module, images: Tensor, kind: Kind | None = None, block: int | None = None) -> Tensor:
    """What a model knows of an image, [batch, width], as frozen features for other tasks.

    Args:
        images: float [batch, channel, height, width], normalised.
        kind: token: the class token. patches: the mean of the patch tokens, or of a ResNet's map. None: what the
            last layer of a classifier reads; of masked patch prediction, which has no such vector, as patches.
        block: of the encoder, from 1 on, whose tokens are taken, as if it were the last; None for the last.

    Raises:
        UserError: the encoder has no class token, no blocks, or fewer of them.

    Source: tokens of any block get the final norm, as in DINOv2's linear evaluation (2304.07193).
    """
    encoder = encoder_of(model)
    if kind == "token" and getattr(encoder, "cls_token", None) is None:
        raise UserError("probe.features=token: this encoder has no class token; use patches, or null")
    if kind is None and isinstance(model, MaskedPatchModel):
        kind = "patches"
    if isinstance(encoder, VisionTransformer):
        tokens = _tokens(encoder, images, block)
        if kind is not None:
            chosen = tokens[:, 0] if kind == "token" else tokens[:, encoder.num_prefix_tokens :].mean(1)
            return encoder.fc_norm(chosen)  # the final norm of models that have it after pooling
    elif block is not None:
        raise UserError(f"probe.block={block}: a ResNet has no such blocks; use null")
    else:
        tokens = encoder.forward_features(images)
    pooled = encoder.forward_head(tokens, pre_logits=True)
    return model.hidden(pooled) if kind is None and isinstance(model, Classifier) else pooled


def _tokens(encoder: VisionTransformer, images: Tensor, block: int | None) -> Tensor:
    """Tokens after some blocks and the final norm, [batch, prefix + patch, width]: timm's `forward_features`."""
    count = len(encoder.blocks)
    if block is not None and not 1 <= block <= count:
        raise UserError(
            f"probe.block={block}: the encoder has blocks 1 to {count}; use one of them, or null for the last"
        )
    tokens = encoder.norm_pre(encoder.patch_drop(encoder._pos_embed(encoder.patch_embed(images))))
    return encoder.norm(encoder.blocks[:block](tokens))


@dataclass(frozen=True)
class Loaded:
    """What putting weights into an encoder did.

    Attributes:
        dropped: names in the file that the encoder was not to take (the old head).
        resized: old and new side of the grid, if position embeddings were resized.
    """

    dropped: list[str]
    resized: tuple[int, int] | None


def load_encoder(
    encoder: Encoder, weights: Mapping[str, Tensor], where: str, position_resize: str = "bilinear_corners"
) -> Loaded:
    """Puts weights into an encoder, except the head, which stays new.

    Args:
        weights: in timm's names.
        where: the REF, for messages.
        position_resize: a way of `resize_table`.

    Raises:
        UserError: listing every missing, unexpected and mis-shaped name; nothing is loaded then.
    """
    weights = dict(weights)
    own = encoder.state_dict()
    expected = {name: value for name, value in own.items() if not name.startswith("head.")}
    old_head = ("head.", "pre_logits.") if "fc_norm.weight" in own else ("head.", "pre_logits.", "fc_norm.")
    dropped = [name for name in weights if name.startswith(old_head)]
    for name in dropped:
        del weights[name]
    resized = _fit_positions(encoder, weights, expected, position_resize)
    problems = misfits(expected, weights)
    if _has_fixed_positions(encoder) and "pos_embed" in weights and not own["pos_embed"].is_meta:
        there, here = weights["pos_embed"], own["pos_embed"]
        if there.shape == here.shape and not torch.equal(there.to(here.device), here):
            problems.append("pos_embed: learned there, and fixed in the model (model.position=sincos_2d)")
    if problems:
        listed = "\n  ".join([*problems, *_hints(weights, expected)])
        raise UserError(
            f"init={where} does not fit the model of this recipe; nothing was loaded. Use the `model` section "
            f"that it was trained with, or another init:\n  {listed}"
        )
    if not any(value.is_meta for value in own.values()):  # else it is a rehearsal
        encoder.load_state_dict({**weights, **{k: v for k, v in own.items() if k.startswith("head.")}})
    return Loaded(dropped, resized)


def _has_fixed_positions(encoder: Encoder) -> bool:
    table = encoder.pos_embed if isinstance(encoder, VisionTransformer) else None
    return table is not None and not table.requires_grad


def _fit_positions(
    encoder: Encoder, weights: dict[str, Tensor], expected: Mapping[str, Tensor], way: str
) -> tuple[int, int] | None:
    """Brings position embeddings of another grid to the encoder's; says from which side to which."""
    if not isinstance(encoder, VisionTransformer):
        return None
    grid, resized = encoder.patch_embed.grid_size, None
    for name, new in expected.items():
        old, kind = weights.get(name), name.rpartition("positions.")[2]
        if old is None or kind not in ("pos_embed", "patches", "rows", "columns") or old.shape == new.shape:
            continue
        if old.dim() != 3 or old.shape[::2] != new.shape[::2]:
            continue
        if kind in ("rows", "columns"):
            weights[name], side = resize_line(old, new.shape[1]), old.shape[1]
        else:
            prefix = new.shape[1] - grid[0] * grid[1]
            side = round((old.shape[1] - prefix) ** 0.5)
            if side**2 + prefix != old.shape[1]:
                continue
            fixed = kind == "pos_embed" and _has_fixed_positions(encoder)
            if (
                fixed
                and not old.is_meta
                and not torch.equal(old[:, old.shape[1] - side**2 :], sincos_table((side, side), old.shape[2]))
            ):
                continue  # learned ones, which are no table for this model
            weights[name] = new if fixed else resize_table(old, prefix, grid, way)
        resized = side, grid[0]
    return resized


def _hints(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """What some misfits mean."""
    found = []
    if "cls_token" in weights and "cls_token" not in expected:
        found.append("(the weights have a class token: use model.pool=token, or patches for the mean of the patches)")
    if "cls_token" in expected and "cls_token" not in weights:
        found.append("(the weights have no class token: use model.pool=gap)")
    if any(
        name.endswith("attn.relative") and name in expected and value.shape != expected[name].shape
        for name, value in weights.items()
    ):
        found.append("(relative positions are for one length of sequence: keep image size, patch size and pool)")
    return found
