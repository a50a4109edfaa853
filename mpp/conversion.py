"""From any REF to a folder in another library's layout."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timm.models import ResNetV2
from torch import Tensor

from mpp import checkpoint, config, export, official, references, wiring
from mpp.config import ModelConfig
from mpp.console import Console
from mpp.encoders import PIXEL_MEAN, PIXEL_STD, Encoder, build_encoder, set_pixel_statistics
from mpp.errors import UserError
from mpp.model import load_encoder

_USUAL_IMAGE_SIZE = 224
_LARGEST_IMAGE_SIZE = 10_000  # in pixels; what lies above is no picture, but a fault in the file
# What a config.json of timm's may say of a model, in the words of `model`; other arguments are refused.
_OF_TIMM = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "embed_dim": "embed_dim",
    "depth": "depth",
    "num_heads": "num_heads",
}
_DULL = (
    "num_classes",
    "in_chans",
    "global_pool",
    "class_token",
    "fc_norm",
    "drop_rate",
    "proj_drop_rate",
    "pos_drop_rate",
)


def convert(ref: str, output: Path, *, to: str, model: str | None, image_size: int | None, console: Console) -> None:
    """Writes the encoder of a REF, with the linear head that it has, into a new folder; whole or not at all.

    Args:
        to: a key of LAYOUTS.
        model: a name as `model.name`, for weights that do not say what they are of.
        image_size: side in pixels; None for that of the weights. Position embeddings are brought to another.

    Raises:
        UserError: the weights can't be had, or the layout can't express the model.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} holds something already; name another folder")
    found = references.find_weights(ref, console.say)
    encoder, classes, description, notes = _build(ref, found, model, image_size)
    found = dataclasses.replace(found, config=found.config | {"mpp": description})
    draft = output.absolute().with_name(f".{output.absolute().name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        notes += [LAYOUTS[to](encoder, draft, classes, found)]
        if output.exists():
            output.rmdir()
        draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    console.say("; ".join([f"{output}: from {found.path}", *notes]))


def _build(
    ref: str, found: references.Weights, name: str | None, image_size: int | None
) -> tuple[Encoder, list[str] | None, dict[str, Any], list[str]]:
    """The encoder with its weights and its head, the head's classes, its description, and what to say of them."""
    about, where, notes = found.config, str(found.path.with_name("config.json")), list[str]()
    own_size: Any
    own = about.get("mpp")
    if name is not None or not about:
        if name is None:
            raise UserError(f"{ref} does not say of which model it is; name it, such as --model vit_base_patch16_224")
        shape, own_size = ModelConfig(name), _USUAL_IMAGE_SIZE  # the image size of most names
    elif isinstance(own, dict):
        shape, own_size = config.model_from(own.get("model"), where), own.get("image_size")
    else:
        shape, own_size = _of_timm(about, where)
    if not isinstance(own_size, int) or not 0 < own_size <= _LARGEST_IMAGE_SIZE:
        raise UserError(f"{where}: image_size={own_size} must be a number from 1 to {_LARGEST_IMAGE_SIZE}")
    size = image_size or own_size
    tensors = dict(found.tensors)
    arguments = wiring.shape_of(shape)
    if found.path.suffix == ".npz":
        arrays = official.read(found.path)
        tensors = official.to_timm(arrays, build_encoder(image_size=size, **arguments), ref)
    head = {key: value for key, value in tensors.items() if key.startswith("head.")}
    if any(key.startswith("pre_logits.") for key in tensors):
        head = {}
        notes.append("the head is left out, for a layer that no encoder has (pre_logits) stands before it")
    classes = len(next(iter(head.values()))) if head else 0
    encoder = build_encoder(image_size=size, classes=classes, **arguments)
    loaded = load_encoder(encoder, tensors, ref, shape.position_resize)
    _put_head(encoder, head, ref)
    if loaded.resized:
        notes.append(f"position embeddings resized from {loaded.resized[0]} to {loaded.resized[1]} patches a side")
    pixels = about.get("pretrained_cfg") or {}
    set_pixel_statistics(encoder, pixels.get("mean", PIXEL_MEAN), pixels.get("std", PIXEL_STD))
    names = about.get("label_names")
    description = {"model": dataclasses.asdict(shape), "image_size": size}
    return encoder.eval(), names if names and len(names) == classes else None, description, notes


def _put_head(encoder: Encoder, head: dict[str, Tensor], ref: str) -> None:
    if isinstance(encoder, ResNetV2):  # whose head is a convolution, by another name
        head = {key.replace("head.fc.", "head.").replace("head.", "head.fc."): value for key, value in head.items()}
    own = {key: value for key, value in encoder.state_dict().items() if key.startswith("head.")}
    problems = checkpoint.misfits(own, head)
    if problems:
        raise UserError(f"{ref}: the head does not fit:\n  " + "\n  ".join(problems))
    encoder.load_state_dict(head, strict=False)


def _of_timm(about: dict[str, Any], where: str) -> tuple[ModelConfig, int]:
    """What a config.json of timm's own says, in the words of `model`, and the image size."""
    arguments = about.get("model_args") or {}
    pixels = about.get("pretrained_cfg", {})
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: model_args is no object")
    strange = [key for key in arguments if key not in _OF_TIMM and key not in _DULL]
    if strange:
        raise UserError(f"{where}: model_args {', '.join(strange)} can't be taken over; name the model with --model")
    values = {_OF_TIMM[key]: value for key, value in arguments.items() if key in _OF_TIMM}
    size = values.pop("image_size", None) or pixels.get("input_size", [3, _USUAL_IMAGE_SIZE, _USUAL_IMAGE_SIZE])[1:]
    if isinstance(size, list) and len(size) == 2 and size[0] == size[1]:
        size = size[0]
    if about.get("global_pool") == "avg":
        values["pool"] = "gap" if arguments.get("class_token") is False else "patches"
    architecture = str(about.get("architecture", "")).partition(".")[0]
    return config.model_from({"name": architecture, **values}, where), size


def _to_timm(encoder: Encoder, folder: Path, classes: list[str] | None, found: references.Weights) -> str:
    about = {"mpp": found.config["mpp"], **({"label_names": classes} if classes else {})}
    checkpoint.save_encoder(folder, encoder, about)
    beside = found.path.with_name(references.OBJECTIVE)
    if beside.is_file():
        shutil.copyfile(beside, folder / beside.name)
    weights = {name: folder / name for name in references.WEIGHTS if (folder / name).is_file()}
    (folder / checkpoint.SUMS).write_text(checkpoint.sums(weights))
    return "in timm's layout"


def _checked_by(
    write: Callable[..., float], library: str
) -> Callable[[Encoder, Path, list[str] | None, references.Weights], str]:
    def written(encoder: Encoder, folder: Path, classes: list[str] | None, found: references.Weights) -> str:
        pixels: Any = encoder.pretrained_cfg
        difference = write(encoder, folder, mean=pixels["mean"], std=pixels["std"], classes=classes)
        return f"{library} gives the same features (largest difference {difference:.1e})"

    return written


LAYOUTS: dict[str, Callable[[Encoder, Path, list[str] | None, references.Weights], str]] = {
    "timm": _to_timm,
    "transformers": _checked_by(export.to_transformers, "transformers"),
    "onnx": _checked_by(export.to_onnx, "onnxruntime"),
}
