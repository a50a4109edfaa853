"""Encoders, built on timm: Vision Transformers, hybrids with a ResNet before them, and BiT ResNets.

FAMILIES at the foot says how each is built; a name of timm's belongs to the family of the module that makes it.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import Attention, HybridEmbed, StdConv2d, StdConv2dSame, lecun_normal_
from timm.models import ResNetV2, VisionTransformer, model_entrypoint
from timm.models.vision_transformer import Block
from torch import nn

from mpp.errors import UserError
from mpp.patches import grid_size
from mpp.positions import STANDARD_DEVIATION, PositionedBlock, Positions, RelativeAttention, sincos_table

Encoder = VisionTransformer | ResNetV2

# The paper's code scales pixels to [-1, 1].
PIXEL_MEAN, PIXEL_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

# Units in each stage of a ResNet, by depth (BiT); a hybrid of ratio 16 has those of stage 4 in stage 3.
_UNITS: dict[int, tuple[int, ...]] = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
_SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
_HYBRID = re.compile(r"vit_(tiny|small|base|large)_r(26|50)_s(16|32)_(\d+)")
_BIT = re.compile(r"resnetv2_(\d+)x(\d+)_bit")


@dataclass(frozen=True)
class Shape:
    """What an encoder is beside its name; None keeps what the name says. See `model` in `mpp/config.py`."""

    patch_size: int | None = None
    embed_dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    mlp_dim: int | None = None
    layers: tuple[int, ...] | None = None
    width_factor: float | None = None
    pool: str | None = None
    position: str = "learned_1d"
    position_at: str = "stem"
    gelu: str = "erf"
    dropout: float = 0.0
    drop_path: float = 0.0
    drop_border: bool = False

    def refuse(self, name: str, family: str, *keys: str) -> None:
        """Raises UserError where one of these keys is not as it is by default."""
        for key in keys:
            value, usual = getattr(self, key), getattr(Shape, key)
            if value != usual:
                raise UserError(f"model.{key}={value}: {name} is {family} and has no such thing; leave it at {usual}")


def build_encoder(
    name: str, *, image_size: int, classes: int = 0, head_bias: float = 0.0, **shape: Any
) -> VisionTransformer | ResNetV2:
    """An encoder with the initialisation of the paper's code and a zero head.

    Args:
        name: a timm name, vit_SIZE_rDEPTH_sRATIO_224 (hybrid) or resnetv2_DEPTHxWIDTH_bit.
        image_size: side in pixels.
        classes: outputs of the head; 0 for no head.
        head_bias: value of the head's bias.
        shape: fields of `Shape`.

    Raises:
        UserError: unknown name, a model of another family, or keys that it does not have or that do not fit.
    """
    wanted = Shape(**shape)
    family = _family(name)
    try:
        encoder = FAMILIES[family](name, image_size, classes, wanted)
    except (TypeError, AssertionError, ValueError) as error:
        reason = str(error) or f"timm's {name} can't be built with them"
        raise UserError(f"model.name={name} does not go with the other keys of `model`: {reason}") from None
    reason = _misfit(encoder)
    if reason:
        raise UserError(f"model.name={name} can't be trained here: {reason}")
    assert isinstance(encoder, Encoder)
    initialize(encoder)
    if isinstance(encoder, VisionTransformer):
        _place_positions(encoder, wanted)
        if not wanted.drop_border or image_size < patch_of(encoder):
            grid_size(image_size, patch_of(encoder))
    reset_head(encoder, head_bias)
    return encoder


def _family(name: str) -> str:
    if _BIT.fullmatch(name):
        return "resnetv2"
    if _HYBRID.fullmatch(name):
        return "vision_transformer_hybrid"
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, [*timm.list_models("vit_*"), *MORE_NAMES], 3, cutoff=0.3)
        raise UserError(f"model.name={name}: no such model; nearest are {', '.join(near)}")
    module = model_entrypoint(name).__module__.removeprefix("timm.models.")
    if module not in FAMILIES or module == "resnetv2":
        raise UserError(
            f"model.name={name} can't be trained here: timm makes it in `{module}`, and what is built here are its "
            "plain Vision Transformers (vit_*_patch*), hybrids (vit_*_r*_s*) and BiT ResNets (resnetv2_*x*_bit)"
        )
    return module


def _misfit(encoder: nn.Module) -> str:
    if not isinstance(encoder, VisionTransformer):
        return ""
    if encoder.global_pool in ("map", "prr"):
        return f"its head pools with attention ({encoder.global_pool}); give model.pool"
    if encoder.dynamic_img_size:
        return "its image size is not fixed"
    return ""


def _pretrained_cfg(name: str, image_size: int, classes: int, first_conv: str, classifier: str) -> dict[str, Any]:
    """What a checkpoint's config.json says of the pixels and of the parts that other users replace."""
    return {
        "architecture": name,
        "tag": "",
        "input_size": (3, image_size, image_size),
        "mean": PIXEL_MEAN,
        "std": PIXEL_STD,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "squash",
        "num_classes": classes,
        "first_conv": first_conv,
        "classifier": classifier,
    }


def _transformer_arguments(image_size: int, classes: int, shape: Shape) -> dict[str, Any]:
    """What timm's VisionTransformer takes, in its words."""
    given = {"embed_dim": shape.embed_dim, "depth": shape.depth, "num_heads": shape.num_heads}
    arguments: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    pools: dict[str | None, dict[str, Any]] = {
        None: {},
        "token": {"global_pool": "token"},
        "gap": {"global_pool": "avg", "class_token": False, "fc_norm": False},
        "patches": {"global_pool": "avg", "fc_norm": False},
    }
    arguments |= pools[shape.pool]
    if shape.position not in ("learned_1d", "sincos_2d") or shape.position_at != "stem":
        arguments["pos_embed"] = "none"
    if shape.gelu == "tanh":
        arguments["act_layer"] = "gelu_tanh"
    return arguments | {
        "img_size": image_size,
        "num_classes": classes,
        "drop_rate": 0.0,
        "proj_drop_rate": shape.dropout,
        "pos_drop_rate": shape.dropout,
        "drop_path_rate": shape.drop_path,
    }


def _plain(name: str, image_size: int, classes: int, shape: Shape) -> nn.Module:
    """A Vision Transformer that timm has a name for."""
    shape.refuse(name, "a plain Vision Transformer", "layers", "width_factor")
    arguments = _transformer_arguments(image_size, classes, shape)
    if shape.patch_size is not None:
        arguments["patch_size"] = shape.patch_size
    if shape.mlp_dim is not None:
        width = shape.embed_dim or _shapeless(name).embed_dim
        arguments["mlp_ratio"] = (shape.mlp_dim + 0.5) / width  # timm cuts the product to a whole number
    own: dict[str, Any] = {}
    if shape.position == "relative":
        own["attn_layer"] = RelativeAttention
    elif shape.position == "learned_2d" or shape.position_at != "stem":
        own["block_fn"] = PositionedBlock
    if own:
        _require_usual_blocks(name)
    config = _pretrained_cfg(name, image_size, classes, "patch_embed.proj", "head")
    encoder: Any = timm.create_model(name, pretrained_cfg=config, **arguments, **own)
    for key in own:  # a checkpoint's config.json is for timm's own classes
        encoder._model_args.pop(key)
    return encoder


def _shapeless(name: str) -> Any:
    with torch.device("meta"):
        return timm.create_model(name)


def _require_usual_blocks(name: str) -> None:
    """Raises UserError where a name means other blocks or attention than those that positions are built into."""
    for block in _shapeless(name).blocks:
        attention = block.attn if type(block) is Block else None
        if (
            type(attention) is not Attention
            or not isinstance(attention.q_norm, nn.Identity)
            or (not isinstance(attention.norm, nn.Identity) or attention.gate is not None)
        ):
            raise UserError(
                f"model.position: {name} has blocks of its own, into which only learned_1d at the stem goes"
            )


def _hybrid(name: str, image_size: int, classes: int, shape: Shape) -> nn.Module:
    """A Vision Transformer over the feature map of a ResNet (ViT paper, section 3.1)."""
    shape.refuse(name, "a hybrid", "patch_size", "mlp_dim", "drop_border", "position_at")
    if shape.position in ("learned_2d", "relative"):
        shape.refuse(name, "a hybrid", "position")
    arguments = _transformer_arguments(image_size, classes, shape)
    config = _pretrained_cfg(name, image_size, classes, "patch_embed.backbone.stem.conv", "head")
    if timm.is_model(name) and shape.layers is None and shape.width_factor is None:
        return timm.create_model(name, pretrained_cfg=config, **arguments)
    found = _HYBRID.fullmatch(name)
    if found is None:
        raise UserError(f"model.layers and model.width_factor are not for {name}; leave them out")
    size, units, ratio = found[1], _UNITS[int(found[2])], found[3]
    width, depth, heads = _SIZES[size]
    if ratio == "16":
        units = (units[0], units[1], units[2] + units[3])
    backbone = ResNetV2(
        **_convolutions(shape, units, 1),
        num_classes=0,
        global_pool="",
        preact=False,
        stem_type="same",
        conv_layer=partial(StdConv2dSame, eps=1e-8),
    )
    named = {"embed_dim": width, "depth": depth, "num_heads": heads, "patch_size": 1}
    encoder: Any = VisionTransformer(embed_layer=partial(HybridEmbed, backbone=backbone), **{**named, **arguments})
    encoder.pretrained_cfg = config
    return encoder


def _convolutions(shape: Shape, units: tuple[int, ...], width: int) -> dict[str, Any]:
    if shape.layers is not None and len(shape.layers) != len(units):
        raise UserError(
            f"model.layers={list(shape.layers)}: this model has {len(units)} stages; give one number for each"
        )
    return {"layers": list(shape.layers or units), "width_factor": shape.width_factor or width}


def _bit(name: str, image_size: int, classes: int, shape: Shape) -> nn.Module:
    """A ResNet with group normalisation and standardised kernels, activation before them (BiT)."""
    shape.refuse(name, "a ResNet", "patch_size", "embed_dim", "depth", "num_heads", "mlp_dim", "pool", "position")
    shape.refuse(name, "a ResNet", "position_at", "gelu", "dropout", "drop_border")
    found = _BIT.fullmatch(name)
    assert found is not None
    depth, width = int(found[1]), int(found[2])
    if depth not in _UNITS:
        raise UserError(f"model.name={name}: no ResNet of that depth; there are {', '.join(map(str, _UNITS))}")
    encoder: Any = ResNetV2(
        **_convolutions(shape, _UNITS[depth], width),
        num_classes=classes,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=1e-8),
        drop_path_rate=shape.drop_path,
    )
    encoder.pretrained_cfg = _pretrained_cfg(name, image_size, classes, "stem.conv", "head.fc")
    return encoder


def _place_positions(encoder: Any, shape: Shape) -> None:
    """Puts in the position embeddings that timm does not have (ViT paper, D.4)."""
    grid, prefix, width = encoder.patch_embed.grid_size, encoder.num_prefix_tokens, encoder.embed_dim
    if shape.position_at != "stem" and shape.position not in ("learned_1d", "learned_2d"):
        raise UserError(
            f"model.position_at={shape.position_at} is for learned_1d and learned_2d, not for "
            f"model.position={shape.position}; use stem"
        )
    if shape.position == "learned_2d" and width % 2:
        raise UserError(f"model.position=learned_2d needs an even width, not {width}")
    if shape.position == "sincos_2d" and (width % 4 or width < 8):
        raise UserError(f"model.position=sincos_2d needs a width from 8 on that 4 divides, not {width}")
    if shape.position == "sincos_2d":
        entries = sincos_table(grid, width)
        if encoder.pos_embed is None or encoder.pos_embed.shape[1] != entries.shape[1]:
            entries = torch.cat([torch.zeros(1, prefix, width), entries], dim=1)
        with torch.no_grad():
            encoder.pos_embed.copy_(entries)
        encoder.pos_embed.requires_grad_(False)
    elif shape.position == "relative":
        for block in encoder.blocks:
            block.attn.use(encoder.patch_embed.num_patches + prefix)
    elif shape.position == "learned_2d" or shape.position_at != "stem":
        made = partial(Positions, grid, prefix, width, shape.position == "learned_2d", shape.dropout)
        if shape.position_at == "every_layer":
            for block in encoder.blocks:
                block.use(made(), own=True)
        else:
            encoder.positions = made()
            for block in encoder.blocks[:1] if shape.position_at == "stem" else encoder.blocks:
                block.use(encoder.positions, own=False)


@torch.no_grad()
def initialize(encoder: nn.Module) -> None:
    """First values of an encoder's weights as in the paper's code; norms and biases not named here stay as they are.

    Kernels of the attention and of the MLP are Xavier uniform, query, key and value each for itself; biases of the
    MLP are normal (1e-6); convolutions are LeCun normal; position embeddings normal (0.02); the class token zero;
    the last norm of each unit of a hybrid's ResNet has scale 0.

    Source: `google-research/vision_transformer`, vit_jax/models.
    """
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("attn.qkv"):
            for part in module.weight.chunk(3):
                nn.init.xavier_uniform_(part)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=1e-6 if ".mlp." in name else 0.0)
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif "backbone" in name and name.endswith(".norm3"):
            nn.init.zeros_(module.weight)
    if isinstance(encoder, VisionTransformer):
        if encoder.pos_embed is not None:
            nn.init.normal_(encoder.pos_embed, std=STANDARD_DEVIATION)
        if encoder.cls_token is not None:
            nn.init.zeros_(encoder.cls_token)


def reset_head(encoder: Encoder, bias: float = 0.0) -> None:
    """Zero kernel of the last layer, as the paper starts every head (B.1.1), and a constant bias."""
    layer: Any = encoder.get_classifier()
    if not isinstance(layer, nn.Identity):
        nn.init.zeros_(layer.weight)
        nn.init.constant_(layer.bias, bias)


def patch_of(encoder: VisionTransformer) -> int:
    """Side in pixels of what becomes one token: a patch, or a cell of a hybrid's feature map."""
    embedding: Any = encoder.patch_embed
    if is_hybrid(encoder):  # by the strides: timm's own ratio is rounded for sizes that do not fit
        stages = getattr(embedding.backbone, "feature_info", None)
        return stages[-1]["reduction"] if isinstance(stages, list) else embedding.feat_ratio(as_scalar=True)
    return embedding.patch_size[0]


def is_hybrid(encoder: nn.Module) -> bool:
    """Whether the tokens come from a ResNet, whose cells see more than their own square of the image."""
    return isinstance(encoder, VisionTransformer) and isinstance(encoder.patch_embed, HybridEmbed)


def set_pixel_statistics(encoder: Encoder, mean: Sequence[float], std: Sequence[float]) -> None:
    """Notes mean and standard deviation of the pixels, which a checkpoint's `config.json` then carries."""
    config: Any = encoder.pretrained_cfg
    config.update(mean=tuple(mean), std=tuple(std))


# By timm's module. A function takes the name, image_size, classes and the shape.
FAMILIES: dict[str, Callable[[str, int, int, Shape], nn.Module]] = {
    "vision_transformer": _plain,
    "vision_transformer_hybrid": _hybrid,
    "resnetv2": _bit,
}

# Of the paper's models, those that timm has no name for.
MORE_NAMES = (
    "vit_base_r50_s32_224",
    "vit_large_r50_s16_224",
    "resnetv2_50x2_bit",
    "resnetv2_152x1_bit",
    "resnetv2_200x3_bit",
)
