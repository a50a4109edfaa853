"""Encoders from timm, the model of masked patch prediction, and putting weights into them."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import PatchEmbed
from timm.models import VisionTransformer
from torch import Tensor, nn

from mpp.corruption import corrupt, take
from mpp.errors import UserError
from mpp.patches import grid_size


def build_encoder(
    name: str,
    *,
    image_size: int,
    classes: int = 0,
    patch_size: int | None = None,
    embed_dim: int | None = None,
    depth: int | None = None,
    num_heads: int | None = None,
    dropout: float = 0.0,
) -> VisionTransformer:
    """A timm Vision Transformer with the initialisation of the paper's code and a zero head.

    Args:
        name: a timm name; None in the other arguments keeps what it says.
        image_size, patch_size: sides in pixels.
        classes: outputs of the head; 0 for no head.
        dropout: after the position embeddings, the attention output and both layers of the MLP.

    Raises:
        UserError: unknown name, a model of another family, or sizes that do not fit.
    """
    shape = {"patch_size": patch_size, "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
    arguments: dict[str, Any] = {key: value for key, value in shape.items() if value is not None}
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models("vit_*"), 3, cutoff=0.3)
        raise UserError(f"model.name={name}: timm knows no such model; nearest are {', '.join(near)}")
    try:
        encoder = timm.create_model(
            name,
            img_size=image_size,
            num_classes=classes,
            drop_rate=0.0,
            proj_drop_rate=dropout,
            pos_drop_rate=dropout,
            weight_init="jax",
            pretrained_cfg={
                "architecture": name,
                "tag": "",
                "input_size": (3, image_size, image_size),
                "mean": PIXEL_MEAN,
                "std": PIXEL_STD,
                "interpolation": "bilinear",
                "crop_pct": 1.0,
                "crop_mode": "squash",
                "num_classes": classes,
                "first_conv": "patch_embed.proj",
                "classifier": "head",
            },
            **arguments,
        )
    except (TypeError, AssertionError) as error:
        raise UserError(f"model.name={name} does not go with the other keys of `model`: {error}") from None
    if (
        not isinstance(encoder, VisionTransformer)
        or not isinstance(encoder.patch_embed, PatchEmbed)
        or encoder.global_pool != "token"
    ):
        raise UserError(
            f"model.name={name} is not a plain Vision Transformer with a class token, which is what is built here"
        )
    grid_size(image_size, patch_of(encoder))
    reset_head(encoder)
    return encoder


# The paper's code scales pixels to [-1, 1].
PIXEL_MEAN, PIXEL_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


def patch_of(encoder: VisionTransformer) -> int:
    """Side of a patch in pixels."""
    return encoder.patch_embed.patch_size[0]


def set_pixel_statistics(encoder: VisionTransformer, mean: Sequence[float], std: Sequence[float]) -> None:
    """Notes mean and standard deviation of the pixels, which a checkpoint's `config.json` then carries."""
    config: Any = encoder.pretrained_cfg
    config.update(mean=tuple(mean), std=tuple(std))


def reset_head(encoder: VisionTransformer) -> None:
    """Zero weight and bias of the last layer, as the paper starts every head (B.1.1)."""
    if isinstance(encoder.head, nn.Linear):
        nn.init.zeros_(encoder.head.weight)
        nn.init.zeros_(encoder.head.bias)


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


def encoder_of(model: nn.Module) -> VisionTransformer:
    """The timm model inside what is trained."""
    encoder = model.encoder if isinstance(model, MaskedPatchModel) else model
    assert isinstance(encoder, VisionTransformer)
    return encoder


def resize_position_embedding(embedding: Tensor, prefix: int, grid: tuple[int, int]) -> Tensor:
    """Position embeddings for another grid, as the paper's code resizes them.

    Linear in both directions with corner on corner; the entries of class tokens are kept.

    Args:
        embedding: [1, prefix + old patches, width], the old grid a square.
        prefix: entries that belong to no patch.
        grid: new rows and columns.

    Returns:
        [1, prefix + rows * columns, width].

    Source: ViT paper, section 3.2; `scipy.ndimage.zoom(order=1)` in its code.
    """
    tokens, patches = embedding[:, :prefix], embedding[:, prefix:]
    side = round(patches.shape[1] ** 0.5)
    if (side, side) == tuple(grid):
        return embedding
    square = rearrange(patches, "1 (h w) d -> 1 d h w", h=side)
    resized = F.interpolate(square.float(), size=grid, mode="bilinear", align_corners=True).to(embedding.dtype)
    return torch.cat([tokens, rearrange(resized, "1 d h w -> 1 (h w) d")], dim=1)


@dataclass(frozen=True)
class Loaded:
    """What putting weights into an encoder did.

    Attributes:
        dropped: names in the file that the encoder was not to take (the old head).
        resized: old and new side of the grid, if position embeddings were resized.
    """

    dropped: list[str]
    resized: tuple[int, int] | None


def load_encoder(encoder: VisionTransformer, weights: Mapping[str, Tensor], where: str) -> Loaded:
    """Puts weights into an encoder, except the head, which stays new.

    Args:
        weights: in timm's names.
        where: the REF, for messages.

    Raises:
        UserError: listing every missing, unexpected and mis-shaped name; nothing is loaded then.
    """
    weights = dict(weights)
    own = encoder.state_dict()
    dropped = [name for name in weights if name.startswith(("head.", "fc_norm.", "pre_logits."))]
    for name in dropped:
        del weights[name]
    expected = {name: value for name, value in own.items() if not name.startswith("head.")}
    resized = None
    if "pos_embed" in weights and "pos_embed" in expected:
        old, prefix = weights["pos_embed"], encoder.num_prefix_tokens
        side = (old.shape[1] - prefix) ** 0.5
        if side == int(side) and old.shape[2] == encoder.embed_dim and old.shape != expected["pos_embed"].shape:
            weights["pos_embed"] = resize_position_embedding(old, prefix, encoder.patch_embed.grid_size)
            resized = int(side), encoder.patch_embed.grid_size[0]
    problems = [f"missing: {name}" for name in expected if name not in weights]
    problems += [f"unexpected: {name}" for name in weights if name not in expected]
    problems += [
        f"shape of {name}: {list(weights[name].shape)} there, {list(value.shape)} in the model"
        for name, value in expected.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if problems:
        listed = "\n  ".join(problems)
        raise UserError(
            f"init={where} does not fit the model of this recipe; nothing was loaded. Use the `model` section "
            f"that it was trained with, or another init:\n  {listed}"
        )
    encoder.load_state_dict({**weights, **{k: v for k, v in own.items() if k.startswith("head.")}})
    return Loaded(dropped, resized)
