"""An encoder as files of other libraries, which are opened again there and compared with it."""

import copy
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from timm.layers import GELU, Attention, GELUTanh, Mlp
from timm.models import VisionTransformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpp.encoders import Encoder, is_hybrid, patch_of
from mpp.errors import UserError

# How far another library may be from the encoder: so many times as far as the encoder's own float32 is from float64,
# and at least this share of an output's largest value. ViTs round by 1e-6 of it and a ResNet of 152 layers by 1e-4,
# whatever the library, so that no one share both passes the one and checks the other.
_ROUNDINGS = 10
_LEAST_SHARE = 1e-5
_OPSET = 18  # the one that torch's exporter writes without converting
_ACTIVATIONS: dict[type, str] = {nn.GELU: "gelu", GELU: "gelu", GELUTanh: "gelu_pytorch_tanh"}
# From timm's names to those in published files of transformers' ViT, which newer versions of it still read and write.
_NAMES = {
    r"cls_token": r"vit.embeddings.cls_token",
    r"pos_embed": r"vit.embeddings.position_embeddings",
    r"patch_embed\.proj\.(\w+)": r"vit.embeddings.patch_embeddings.projection.\1",
    r"blocks\.(\d+)\.norm1\.(\w+)": r"vit.encoder.layer.\1.layernorm_before.\2",
    r"blocks\.(\d+)\.attn\.qkv\.(\w+)": r"vit.encoder.layer.\1.attention.attention.QKV.\2",
    r"blocks\.(\d+)\.attn\.proj\.(\w+)": r"vit.encoder.layer.\1.attention.output.dense.\2",
    r"blocks\.(\d+)\.norm2\.(\w+)": r"vit.encoder.layer.\1.layernorm_after.\2",
    r"blocks\.(\d+)\.mlp\.fc1\.(\w+)": r"vit.encoder.layer.\1.intermediate.dense.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(\w+)": r"vit.encoder.layer.\1.output.dense.\2",
    r"norm\.(\w+)": r"vit.layernorm.\1",
    r"head\.(\w+)": r"classifier.\1",
}


@torch.no_grad()
def to_transformers(
    encoder: Encoder, folder: Path, *, mean: Sequence[float], std: Sequence[float], classes: list[str] | None
) -> float:
    """Writes transformers' ViT layout: the model, with a head where the encoder has one, and its image processor.

    Args:
        encoder: stays as it is; float32 is written, without dropout.
        folder: an empty one.
        mean, std: of each channel on the scale [0, 1].
        classes: a name for each output of the head; None for numbers.

    Returns:
        The largest absolute difference from the encoder in what transformers then makes of two images: tokens, and
        of a model with a head features and logits.

    Raises:
        UserError: the layout can't express this encoder, or transformers is missing.
        RuntimeError: the difference is more than rounding.
    """
    with _undisturbed():
        try:
            from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, ViTModel
        except ModuleNotFoundError as error:
            raise _missing("transformers' layout", error) from None
        _require_names_of_outputs(encoder, classes)
        _require_plain(encoder)
        encoder = _exact_copy(encoder)
        assert isinstance(encoder, VisionTransformer)
        size = _image_size(encoder)
        images = _made_images(2, size)
        expected = _expected(encoder, images)
        kind: Any = ViTForImageClassification if _has_head(encoder) else ViTModel
        options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
        if not _has_head(encoder):
            options["add_pooling_layer"] = False
        config = ViTConfig(**_transformers_config(encoder, classes))
        weights = _transformers_weights(encoder)
        model, report = kind.from_pretrained(None, config=config, state_dict=weights, **options)
        homeless = sorted({*report["missing_keys"], *report["unexpected_keys"]})
        if homeless:
            raise _inexpressible([f"weights are on one side only ({', '.join(homeless)})"])
        model.save_pretrained(folder)
        sides = {"height": size, "width": size}
        ViTImageProcessor(
            size=sides,
            resample=2,  # Pillow's bilinear
            do_rescale=True,
            image_mean=list(mean),
            image_std=list(std),
        ).save_pretrained(folder)
        model, _ = kind.from_pretrained(folder, local_files_only=True, **options)
        tokens = getattr(model, "vit", model)(images).last_hidden_state
        found = {"tokens": tokens}
        if _has_head(encoder):
            found |= {"features": tokens[:, 0], "logits": model(images).logits}
        return _largest_difference("transformers", {name: expected[name] for name in found}, found)


@torch.no_grad()
def to_onnx(
    encoder: Encoder, folder: Path, *, mean: Sequence[float], std: Sequence[float], classes: list[str] | None
) -> float:
    """Writes `model.onnx`, beside it its weights where they are above 2 GB, and `preprocessor.json`.

    Its input is `pixels`, float32 [batch, channel, height, width], normalised. Its outputs are `tokens`
    [batch, token, width], which a ResNet has none of, `features` [batch, width], which a head reads, and `logits`
    [batch, class] where there is a head. What `preprocessor.json` says is in the metadata of the model too.

    Args:
        encoder: stays as it is; float32 is written, without dropout.
        folder: an empty one.
        mean, std: of each channel on the scale [0, 1].
        classes: a name for each output of the head, or None.

    Returns:
        The largest absolute difference from the encoder in what onnxruntime then makes of a batch of one and one
        of three images, over all outputs.

    Raises:
        UserError: torch can't express this encoder in ONNX, or a package for it is missing.
        RuntimeError: the difference is more than rounding.
    """
    with _undisturbed():
        try:
            import onnx
            import onnxruntime
            import onnxscript  # noqa: F401  torch's exporter is built on it
        except ModuleNotFoundError as error:
            raise _missing("ONNX", error) from None
        _require_names_of_outputs(encoder, classes)
        encoder = _exact_copy(encoder)
        size = _image_size(encoder)
        batches = [_made_images(count, size) for count in (1, 3)]
        expected = [_expected(encoder, images) for images in batches]
        names = list(expected[0])
        if not isinstance(encoder, VisionTransformer):
            stem: Any = encoder.stem
            assert stem.pad.padding == (1, 1, 1, 1)
            stem.pad = _ZeroBorder()
        try:
            # Other kernels of the attention give strides that the exporter can't follow (RelativeAttention).
            with sdpa_kernel(SDPBackend.MATH):
                program: Any = torch.onnx.export(
                    _Outputs(encoder).eval(),
                    (_made_images(2, size),),
                    input_names=["pixels"],
                    output_names=names,
                    opset_version=_OPSET,
                    dynamo=True,
                    dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}},
                    verbose=False,
                )
        except torch.onnx.OnnxExporterError as error:
            raise UserError(f"torch can't write this encoder as ONNX; use timm's layout: {error}") from error
        about = _preprocessor(size, mean, std, classes)
        _clear_metadata(program.model)
        program.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
        file = folder / "model.onnx"
        program.save(file)
        (folder / "preprocessor.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        onnx.checker.check_model(file, full_check=True)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        largest = 0.0
        for images, wanted in zip(batches, expected, strict=True):
            arrays = session.run(names, {"pixels": images.numpy()})
            found = {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}
            largest = max(largest, _largest_difference("onnxruntime", wanted, found))
        return largest


class _Outputs(nn.Module):
    """An encoder that gives all its outputs, for the exporter takes nothing but modules."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return tuple(_outputs(self.encoder, pixels).values())


class _ZeroBorder(nn.Module):
    """A border of zeros, one wide, as nn.ConstantPad2d puts it before the first pooling of a BiT ResNet.

    onnxruntime (1.20 to 1.31) and other optimisers join a Pad with the MaxPool after it, whose own border is
    -inf; features are then wrong by some percent. A Concat is left alone.
    """

    def forward(self, maps: Tensor) -> Tensor:
        for dimension in (2, 3):
            zeros = torch.zeros_like(maps.narrow(dimension, 0, 1))
            maps = torch.cat([zeros, maps, zeros], dimension)
        return maps


def _outputs(encoder: Encoder, pixels: Tensor) -> dict[str, Tensor]:
    """Tokens (not of a ResNet), features and logits (of an encoder with a head), in this order."""
    last = encoder.forward_features(pixels)
    outputs = {"tokens": last} if isinstance(encoder, VisionTransformer) else {}
    outputs["features"] = encoder.forward_head(last, pre_logits=True)
    if _has_head(encoder):
        outputs["logits"] = encoder.forward_head(last)
    return outputs


def _has_head(encoder: Encoder) -> bool:
    return not isinstance(encoder.get_classifier(), nn.Identity)


def _exact_copy(encoder: Encoder) -> Encoder:
    """The same encoder as it is compared and written, so that the caller's keeps its mode, type and device."""
    return copy.deepcopy(encoder).cpu().float().eval()


def _image_size(encoder: Encoder) -> int:
    config: Any = encoder.pretrained_cfg
    return config["input_size"][-1]


def _made_images(count: int, size: int) -> Tensor:
    """Normalised noise, float32 [image, 3, size, size]."""
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps what libraries say, warn of and draw at random from the caller."""
    level = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            with torch.random.fork_rng(devices=[]):
                yield
    finally:
        logging.disable(level)


def _missing(layout: str, error: ModuleNotFoundError) -> UserError:
    return UserError(f"{layout} needs {error.name}: pip install 'mpp-vit[export]'")


def _require_names_of_outputs(encoder: Encoder, classes: list[str] | None) -> None:
    outputs = encoder.num_classes if _has_head(encoder) else 0
    if classes is not None and len(classes) != outputs:
        raise UserError(f"classes: {len(classes)} names for {outputs} outputs of the head; give one for each, or none")


def _expected(encoder: Encoder, pixels: Tensor) -> dict[str, tuple[Tensor, float]]:
    """The outputs of `_exact_copy`, each with the largest difference that rounding explains.

    Raises:
        UserError: an output is not finite.
    """
    outputs = _outputs(encoder, pixels)
    exact = _outputs(encoder.double(), pixels.double())
    encoder.float()  # float64 gives back every float32
    allowed = {}
    for name, values in outputs.items():
        if not values.isfinite().all():
            raise UserError(f"this encoder gives {name} that are not finite; take weights from before it diverged")
        rounding = (values - exact[name]).abs().max().item()
        allowed[name] = max(_ROUNDINGS * rounding, _LEAST_SHARE * values.abs().max().item())
    return {name: (values, allowed[name]) for name, values in outputs.items()}


def _largest_difference(
    library: str, expected: Mapping[str, tuple[Tensor, float]], found: Mapping[str, Tensor]
) -> float:
    """Over outputs of the same names; raises RuntimeError where one has another shape or is beyond rounding."""
    largest = 0.0
    for name, (wanted, allowed) in expected.items():
        if found[name].shape != wanted.shape:
            raise RuntimeError(f"{library} gives {name} of shape {[*found[name].shape]}, not {[*wanted.shape]}")
        difference = (found[name] - wanted).abs().max().item()
        if not difference <= allowed:  # NaN is not
            raise RuntimeError(
                f"{library} gives other {name} than the encoder: {difference:.1e} apart, and rounding explains "
                f"{allowed:.1e}"
            )
        largest = max(largest, difference)
    return largest


def _inexpressible(traits: list[str]) -> UserError:
    return UserError(
        f"transformers' ViT layout can't express this encoder: {'; '.join(traits)}. Use timm's layout or ONNX"
    )


def _require_plain(encoder: Encoder) -> None:
    """Raises UserError where an encoder has what transformers' ViT has not, naming all of it."""
    if not isinstance(encoder, VisionTransformer):
        raise _inexpressible(["it is a ResNet"])
    if is_hybrid(encoder):
        raise _inexpressible(["it is a hybrid, whose patches come from a ResNet"])
    blocks: Any = encoder.blocks
    if not all(isinstance(block, Block) for block in blocks):
        raise _inexpressible([f"it has blocks of another kind ({type(blocks[0]).__name__})"])
    inner: Any = [(block.attn, block.mlp) for block in blocks]
    identity = nn.Identity
    norms: Any = [encoder.norm, *(norm for block in blocks for norm in (block.norm1, block.norm2))]
    traits = {
        "it has no class token (model.pool=gap)": encoder.cls_token is None,
        "its head reads the mean of the patches (model.pool)": _has_head(encoder) and encoder.global_pool != "token",
        "it has a norm after pooling (fc_norm)": not isinstance(encoder.fc_norm, identity),
        "its positions are no table at the stem (model.position, model.position_at)": encoder.pos_embed is None,
        "it has register tokens": encoder.reg_token is not None,
        "its patches do not cover the image (model.drop_border)": _image_size(encoder) % patch_of(encoder) != 0,
        "it has a norm before its blocks": not isinstance(encoder.norm_pre, identity),
        "it has a norm in its patch embedding": not isinstance(encoder.patch_embed.norm, identity),
        "it has layer scale": not all(isinstance(block.ls1, identity) for block in blocks),
        "it normalises queries and keys": not all(isinstance(attention.q_norm, identity) for attention, _ in inner),
        "its attention is of another kind": not all(
            isinstance(attention, Attention) and isinstance(attention.norm, identity) and attention.gate is None
            for attention, _ in inner
        ),
        "its MLPs are of another kind (gated or normalised)": not all(
            type(mlp) is Mlp and isinstance(mlp.norm, identity) for _, mlp in inner
        ),
        "its activation is no GELU": not all(type(mlp.act) in _ACTIVATIONS for _, mlp in inner),
        "its norms are not LayerNorms of one epsilon": not all(
            isinstance(norm, nn.LayerNorm) and norm.eps == norms[0].eps for norm in norms
        ),
    }
    if any(traits.values()):
        raise _inexpressible([words for words, has in traits.items() if has])


def _transformers_config(encoder: Any, classes: list[str] | None) -> dict[str, Any]:
    """What ViTConfig takes, in its words."""
    block, patch = encoder.blocks[0], patch_of(encoder)
    config = {
        "hidden_size": encoder.embed_dim,
        "num_hidden_layers": len(encoder.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc1.out_features,
        "hidden_act": _ACTIVATIONS[type(block.mlp.act)],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": encoder.norm.eps,
        "image_size": _image_size(encoder),
        "patch_size": patch,
        "encoder_stride": patch,
        "qkv_bias": block.attn.qkv.bias is not None,
    }
    if _has_head(encoder):
        names = classes or [f"LABEL_{number}" for number in range(encoder.num_classes)]
        config["id2label"] = dict(enumerate(names))
        config["label2id"] = {name: number for number, name in enumerate(names)}
    return config


def _transformers_weights(encoder: VisionTransformer) -> dict[str, Tensor]:
    """Copies of the encoder's tensors by the names in transformers' files; raises UserError where one has none."""
    placed: dict[str, Tensor] = {}
    homeless = []
    for name, tensor in encoder.state_dict().items():
        target = next((re.sub(old, new, name) for old, new in _NAMES.items() if re.fullmatch(old, name)), None)
        if target is None:
            homeless.append(name)
        elif "QKV" in target:
            for part, values in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                placed[target.replace("QKV", part)] = values.clone()  # tensors that share memory are not saved
        else:
            placed[target] = tensor.clone()
    if homeless:
        raise _inexpressible([f"it has weights that find no place there ({', '.join(homeless)})"])
    table = "vit.embeddings.position_embeddings"
    if encoder.no_embed_class:  # the table has no entry for the class token
        placed[table] = nn.functional.pad(placed[table], (0, 0, 1, 0))
    return placed if _has_head(encoder) else {name.removeprefix("vit."): value for name, value in placed.items()}


def _preprocessor(size: int, mean: Sequence[float], std: Sequence[float], classes: list[str] | None) -> dict[str, Any]:
    """How the model's pixels are made of a picture."""
    return {
        "image_size": size,
        "resize": "squash",  # timm's word: the whole picture, whatever its shape
        "interpolation": "bilinear",
        "antialias": True,
        "scale": 1 / 255,
        "mean": list(mean),
        "std": list(std),
        "classes": classes,
    }


def _clear_metadata(model: Any) -> None:
    """Takes out what the exporter notes of every operation, which names this machine's folders."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    for part in (graph, *graph, *values):
        part.metadata_props.clear()
