"""The official `.npz` weights of ViT, of its hybrids and of BiT ResNets, in timm's names.

Source: `google-research/vision_transformer`, `google-research/big_vision`, and timm's own importers.
"""

import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpp.errors import UserError

Array = np.ndarray
Shape = tuple[int, ...]

_PREFIXES = ("opt/target/", "params/img/", "params/", "")  # the first that occurs is the file's


class Layout(NamedTuple):
    """How the file holds one parameter.

    Attributes:
        leaf: the end of the array's name.
        shape: the array's, from timm's shape and the number of heads.
        restore: the array as timm holds it.
        parts: more of the name, where several arrays stand along the first axis of one parameter.
    """

    leaf: str
    shape: Callable[[Shape, int], Shape] = lambda shape, heads: shape
    restore: Callable[[Array], Array] = lambda array: array
    parts: tuple[str, ...] = ("",)


_BIAS = Layout("bias")
_QKV = ("query/", "key/", "value/")

# A module's parameters, by timm's names of these.
_TABLES = ("Transformer/posembed_input/pos_embedding", "pos_embedding")  # usual, and big_vision's
_TOP = {"cls_token": Layout("cls"), "pos_embed": Layout(_TABLES[0])}
_NORM = {"weight": Layout("scale"), "bias": _BIAS}
_DENSE = {"weight": Layout("kernel", lambda s, heads: s[::-1], lambda a: a.T), "bias": _BIAS}
_CONV = {
    "weight": Layout("kernel", lambda s, heads: (s[2], s[3], s[1], s[0]), lambda a: a.transpose(3, 2, 0, 1)),
    "bias": _BIAS,
}
_INTO_HEADS = {
    "weight": Layout("kernel", lambda s, heads: (s[1], heads, s[0] // heads), lambda a: a.reshape(len(a), -1).T, _QKV),
    "bias": Layout("bias", lambda s, heads: (heads, s[0] // heads), lambda a: a.reshape(-1), _QKV),
}
_OUT_OF_HEADS = {
    "weight": Layout("kernel", lambda s, heads: (heads, s[1] // heads, s[0]), lambda a: a.reshape(-1, a.shape[-1]).T),
    "bias": _BIAS,
}
_BIT_NORM = {"weight": Layout("gamma"), "bias": Layout("beta")}

# Official names of modules by timm's, with # for timm's numbers. Two tables, for both families have a `norm`.
_BLOCK, _SCANNED = "Transformer/encoderblock_{block}/", "Transformer/encoderblock/"
_STAGE, _UNIT = "patch_embed.backbone.stages.#.blocks.#.", "block{stage}/unit{unit}/"
_BIT_UNIT = "resnet/block{stage}/unit{unit:02d}/"
_TRANSFORMER = {
    "": ("", _TOP),
    "patch_embed.proj": ("embedding/", _CONV),
    "blocks.#.norm1": (f"{_BLOCK}LayerNorm_0/", _NORM),
    "blocks.#.attn.qkv": (f"{_BLOCK}MultiHeadDotProductAttention_1/", _INTO_HEADS),
    "blocks.#.attn.proj": (f"{_BLOCK}MultiHeadDotProductAttention_1/out/", _OUT_OF_HEADS),
    "blocks.#.norm2": (f"{_BLOCK}LayerNorm_2/", _NORM),
    "blocks.#.mlp.fc1": (f"{_BLOCK}MlpBlock_3/Dense_0/", _DENSE),
    "blocks.#.mlp.fc2": (f"{_BLOCK}MlpBlock_3/Dense_1/", _DENSE),
    "norm": ("Transformer/encoder_norm/", _NORM),
    "patch_embed.backbone.stem.conv": ("conv_root/", _CONV),
    "patch_embed.backbone.stem.norm": ("gn_root/", _NORM),
    "patch_embed.backbone.conv": ("conv_root/", _CONV),  # of a ResNet that is a stem alone
    "patch_embed.backbone.norm": ("gn_root/", _NORM),
    **{f"{_STAGE}conv{i}": (f"{_UNIT}conv{i}/", _CONV) for i in (1, 2, 3)},
    **{f"{_STAGE}norm{i}": (f"{_UNIT}gn{i}/", _NORM) for i in (1, 2, 3)},
    f"{_STAGE}downsample.conv": (f"{_UNIT}conv_proj/", _CONV),
    f"{_STAGE}downsample.norm": (f"{_UNIT}gn_proj/", _NORM),
}
_BIT = {
    "stem.conv": ("resnet/root_block/standardized_conv2d/", _CONV),
    **{f"stages.#.blocks.#.conv{i}": (f"{_BIT_UNIT}{c}/standardized_conv2d/", _CONV) for i, c in enumerate("abc", 1)},
    **{f"stages.#.blocks.#.norm{i}": (f"{_BIT_UNIT}{c}/group_norm/", _BIT_NORM) for i, c in enumerate("abc", 1)},
    "stages.#.blocks.#.downsample.conv": (f"{_BIT_UNIT}a/proj/standardized_conv2d/", _CONV),
    "norm": ("resnet/group_norm/", _BIT_NORM),
}

# What no encoder takes: its name for the caller, and the axes in torch's order.
_HEADS = {
    "head/kernel": ("head.weight", (1, 0)),
    "head/bias": ("head.bias", (0,)),
    "pre_logits/kernel": ("pre_logits.weight", (1, 0)),
    "pre_logits/bias": ("pre_logits.bias", (0,)),
    "resnet/head/conv2d/kernel": ("head.weight", (3, 2, 0, 1)),
    "resnet/head/conv2d/bias": ("head.bias", (0,)),
}

# Flax once counted all modules of a block together, and now counts each kind for itself.
_NEW_NUMBERS = {
    "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
    "LayerNorm_2": "LayerNorm_1",
    "MlpBlock_3": "MlpBlock_0",
}


def read(path: Path) -> dict[str, Array]:
    """The arrays of an official file by their names, without pickle.

    One prefix, of "opt/target/", "params/img/", "params/" and none, holds for the file and is taken off; what is
    not under it (an optimiser's state, a text tower) is not read. Blocks that are stacked along a leading axis
    (`Transformer/encoderblock/...`) become numbered ones, and bfloat16 becomes float32.

    Raises:
        UserError: the file is missing, damaged or no `.npz`, or an array holds something else than floats.
    """
    arrays: dict[str, Array] = {}
    try:
        with path.open("rb") as stream:  # NumPy leaves a damaged file open
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            prefix = next(prefix for prefix in _PREFIXES if not prefix or any(n.startswith(prefix) for n in file.files))
            for name in file.files:
                if name.startswith(prefix):
                    arrays[name.removeprefix(prefix)] = _floats(file[name], name)
    except FileNotFoundError:
        raise UserError(f"init={path}: there is no such file") from None
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"init={path}: no official .npz file, or damaged ({error}); fetch it again") from None
    for name in [name for name, array in arrays.items() if name.startswith(_SCANNED) and array.ndim]:
        for block, array in enumerate(arrays.pop(name)):
            arrays[_BLOCK.format(block=block) + name.removeprefix(_SCANNED)] = np.asarray(array)
    return arrays


def _floats(found: Any, name: str) -> Array:
    if not isinstance(found, np.ndarray):  # any other file inside the archive
        raise ValueError(f"{name} is no array")
    if found.dtype == np.dtype("V2"):  # bfloat16, which NumPy does not know: the upper half of a float32
        return np.left_shift(found.view("<u2"), 16, dtype=np.uint32).view(np.float32)
    if found.dtype.kind != "f":
        raise ValueError(f"{name} holds {found.dtype}, not floats")
    return found


def to_timm(arrays: Mapping[str, Array], encoder: nn.Module, where: str) -> dict[str, Tensor]:
    """Float32 tensors by the names of the encoder's state dict, and the file's head.

    Position embeddings may be those of another square grid. Where the file has a head or `pre_logits`, of any
    number of classes, they are there as `head.weight`, `head.bias`, `pre_logits.weight` and `pre_logits.bias`.

    Args:
        arrays: as `read` gives them.
        encoder: timm's VisionTransformer, plain or hybrid, or its BiT ResNetV2; only names and shapes matter.
        where: the REF, for messages.

    Raises:
        UserError: listing every missing, mis-shaped and unexpected array.
    """
    model: Any = encoder
    own = {name: tuple(v.shape) for name, v in encoder.state_dict().items() if not name.startswith("head.")}
    modules = _BIT if "stem.conv.weight" in own else _TRANSFORMER
    heads = next((module.num_heads for module in model.modules() if hasattr(module, "num_heads")), 1)
    class_entries = own["pos_embed"][1] - model.patch_embed.num_patches if "pos_embed" in own else 0
    if "pos_embed" in own and not model.pos_embed.requires_grad and not any(name in arrays for name in _TABLES):
        del own["pos_embed"]  # a fixed table is computed, and need not stand in the file
    left, spelling = dict(arrays), _spelling(arrays)
    tensors, problems = {}, []
    for name, shape in own.items():
        layout, stored = _rule(name, modules, spelling)
        if layout is None:
            problems.append(f"missing: {name} (no official array)")
            continue
        expected = layout.shape((shape[0] // len(stored), *shape[1:]), heads)
        found = []
        for official in stored:
            array = left.pop(official, None)
            fitted = None if array is None else _fit(array, expected, class_entries if name == "pos_embed" else None)
            if array is None:
                problems.append(f"missing: {official} ({name})")
            elif fitted is None:
                problems.append(f"shape of {official}: {list(array.shape)} there, {list(expected)} in the model")
            else:
                found.append(layout.restore(fitted))
        if len(found) == len(stored):
            tensors[name] = _tensor(np.concatenate(found))
    for official, (name, axes) in _HEADS.items():
        if official in left and left[official].ndim == len(axes):
            tensors[name] = _tensor(left.pop(official).transpose(axes))
    problems += [f"unexpected: {official}" for official in left]
    if "pos_embed" in encoder.state_dict() and "pos_embed" not in own:
        tensors["pos_embed"] = model.pos_embed.detach().clone()
    if problems:
        listed = "\n  ".join(problems)
        raise UserError(
            f"init={where} does not fit the model of this recipe; nothing was loaded. Use the `model` section "
            f"that it was trained with, or another init:\n  {listed}"
        )
    return tensors


def _spelling(arrays: Mapping[str, Array]) -> dict[str, str]:
    """What this file calls otherwise than the tables."""
    new = any(re.match(r"Transformer/encoderblock_\d+/MultiHeadDotProductAttention_0/", name) for name in arrays)
    top = {_TABLES[0]: _TABLES[1]} if _TABLES[1] in arrays else {}
    return top | (_NEW_NUMBERS if new else {})


def _rule(
    name: str, modules: Mapping[str, tuple[str, Mapping[str, Layout]]], spelling: Mapping[str, str]
) -> tuple[Layout | None, list[str]]:
    """How the file holds a parameter, and in which arrays; None where it has no place for it."""
    numbers = [int(number) for number in re.findall(r"\.(\d+)\.", name)] or [0]
    module, _, leaf = re.sub(r"\.\d+\.", ".#.", name).rpartition(".")
    start, layouts = modules.get(module, ("", {}))
    layout = layouts.get(leaf)
    if layout is None:
        return None, []
    stored = start.format(block=numbers[0], stage=numbers[0] + 1, unit=numbers[-1] + 1) + "{part}" + layout.leaf
    for usual, here in spelling.items():
        stored = stored.replace(usual, here)
    return layout, [stored.format(part=part) for part in layout.parts]


def _fit(array: Array, shape: Shape, class_entries: int | None) -> Array | None:
    """The array, if it is of this shape or means the same; None if not.

    Args:
        class_entries: for position embeddings, whose grid may be another: entries ahead of the patches.
    """
    if array.shape == shape:
        return array
    if array.shape == (1, 1, 1, *shape):  # vectors of group norms
        return array.reshape(shape)
    if class_entries is None or array.ndim != 3 or array.shape[::2] != shape[::2]:
        return None
    if _is_square(array.shape[1] - class_entries):
        return array
    if class_entries == 1 and _is_square(array.shape[1]):  # big_vision adds nothing to the class token
        return np.concatenate([np.zeros_like(array[:, :1]), array], axis=1)
    return None


def _is_square(count: int) -> bool:
    return count > 0 and isqrt(count) ** 2 == count


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
