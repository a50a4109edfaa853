"""mpp/export.py: the files, opened by transformers and onnxruntime, against the encoder."""

import copy
import json
import logging
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import skimage
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import AutoImageProcessor, ViTForImageClassification, ViTModel

from mpp import decoding, export
from mpp.encoders import build_encoder
from mpp.errors import UserError
from mpp.export import to_onnx, to_transformers

TINY = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
OWN = {
    "resnetv2_26x1_bit": {"layers": (1, 1, 1, 1), "width_factor": 0.5},
    "vit_tiny_r26_s16_224": {"layers": (1, 1, 1), "width_factor": 0.5, "embed_dim": 32, "depth": 1, "num_heads": 2},
}
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def make(name="vit_tiny_patch16_224", image_size=32, classes=3, **shape):
    """A small encoder in which nothing is zero or one by chance, in training mode as a run leaves it."""
    torch.manual_seed(0)
    own = OWN.get(name, TINY)
    encoder = build_encoder(name, image_size=image_size, classes=classes, **{**own, **shape})
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder.train()


def write(function, encoder, folder, classes=None):
    folder.mkdir(exist_ok=True)
    return function(encoder, folder, mean=MEAN, std=STD, classes=classes)


def noise(count, image_size=32):
    return torch.randn(count, 3, image_size, image_size, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def outputs_of(encoder, images):
    """By timm's own calls, on a copy."""
    encoder = copy.deepcopy(encoder).eval()
    last = encoder.forward_features(images)
    found = {"features": encoder.forward_head(last, pre_logits=True), "logits": encoder(images)}
    return found | ({"tokens": last} if last.dim() == 3 else {})


def close(found, expected, share=1e-5):
    """To a share of the largest value, some ten roundings of float32 in a network this small."""
    torch.testing.assert_close(found, expected, rtol=0, atol=share * expected.abs().max().item())


# transformers


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"gelu": "tanh"}),
        ("vit_tiny_patch16_224", {"position": "sincos_2d"}),
        ("vit_tiny_patch16_224", {"mlp_dim": 40, "num_heads": 4, "patch_size": 16}),
        ("vit_tiny_patch16_224", {"dropout": 0.5, "drop_path": 0.5}),
        ("flexivit_small", {}),  # no position for the class token
        ("flexivit_small", {"position": "sincos_2d"}),
    ],
)
def test_transformers_gives_the_encoders_tokens_and_logits(name, shape, tmp_path):
    encoder = make(name, **shape)
    difference = write(to_transformers, encoder, tmp_path)
    model = ViTForImageClassification.from_pretrained(tmp_path)
    images = noise(5)
    expected = outputs_of(encoder, images)
    with torch.no_grad():
        close(model.vit(images).last_hidden_state, expected["tokens"])
        close(model(images).logits, expected["logits"])
    assert 0 <= difference < 1e-4
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }


@pytest.mark.parametrize("pool", ["token", "patches"])
def test_transformers_gives_the_tokens_of_an_encoder_without_a_head(pool, tmp_path):
    encoder = make(classes=0, pool=pool)
    write(to_transformers, encoder, tmp_path)
    model, report = ViTModel.from_pretrained(tmp_path, add_pooling_layer=False, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        close(model(noise(2)).last_hidden_state, outputs_of(encoder, noise(2))["tokens"])
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["ViTModel"]


def test_the_config_says_what_the_model_is(tmp_path):
    write(to_transformers, make(gelu="tanh"), tmp_path, ["cat", "dog", "ox"])
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {
        "architectures": ["ViTForImageClassification"],
        "dtype": "float32",
        "model_type": "vit",
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "image_size": 32,
        "patch_size": 8,
        "encoder_stride": 8,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "id2label": {"0": "cat", "1": "dog", "2": "ox"},
        "label2id": {"cat": 0, "dog": 1, "ox": 2},
    }
    assert {key: config[key] for key in wanted} == wanted


def test_classes_without_names_are_numbered(tmp_path):
    write(to_transformers, make(classes=4), tmp_path)
    model = ViTForImageClassification.from_pretrained(tmp_path)
    assert model.config.id2label == {number: f"LABEL_{number}" for number in range(4)}
    assert model.config.label2id == {f"LABEL_{number}": number for number in range(4)}


def test_weights_are_those_of_the_encoder_as_float32_by_published_names(tmp_path):
    encoder = make().bfloat16()
    write(to_transformers, encoder, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    layer, block = "vit.encoder.layer.1.", encoder.blocks[1]
    for number, part in enumerate(("query", "key", "value")):
        own = block.attn.qkv.weight[32 * number : 32 * (number + 1)].float()
        assert torch.equal(weights[f"{layer}attention.attention.{part}.weight"], own)
    assert torch.equal(weights[f"{layer}attention.output.dense.bias"], block.attn.proj.bias.float())
    assert torch.equal(weights["vit.embeddings.position_embeddings"], encoder.pos_embed.float())
    assert torch.equal(weights["vit.embeddings.cls_token"], encoder.cls_token.float())
    assert sum(value.numel() for value in weights.values()) == sum(p.numel() for p in encoder.parameters())
    assert encoder.cls_token.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("vit_tiny_r26_s16_224", {}, "hybrid"),
        ("resnetv2_26x1_bit", {"image_size": 64}, "ResNet"),
        ("vit_tiny_patch16_224", {"pool": "gap"}, "no class token"),
        ("vit_tiny_patch16_224", {"pool": "gap", "classes": 0}, "no class token"),
        ("vit_tiny_patch16_224", {"pool": "patches"}, "mean of the patches"),
        ("vit_tiny_patch16_224", {"position": "learned_2d"}, "model.position"),
        ("vit_tiny_patch16_224", {"position": "relative"}, "model.position"),
        ("vit_tiny_patch16_224", {"position": "none"}, "model.position"),
        ("vit_tiny_patch16_224", {"position_at": "every_layer"}, "model.position_at"),
        ("vit_tiny_patch16_224", {"position_at": "every_layer_shared"}, "model.position_at"),
        ("vit_tiny_patch16_224", {"drop_border": True, "image_size": 36}, "drop_border"),
        ("vit_little_patch16_reg1_gap_256", {}, "fc_norm"),
        ("vit_small_patch14_reg4_dinov2", {}, "register tokens"),
        ("vit_small_patch14_dinov2", {}, "layer scale"),
        ("vit_base_patch16_clip_224", {}, "norm before its blocks"),
        ("vit_giant_patch14_dinov2", {}, "gated"),
        ("vit_base_patch16_clip_quickgelu_224", {}, "no GELU"),
        ("vit_base_patch16_rpn_224", {}, "ResPostBlock"),
        ("vit_dlittle_patch16_reg1_gap_256", {}, "attention is of another kind"),
    ],
)
def test_traits_that_transformers_lacks_are_named_and_nothing_is_written(name, shape, words, tmp_path):
    with pytest.raises(UserError, match=f"{words}.*Use timm's layout or ONNX"):
        write(to_transformers, make(name, **shape), tmp_path)
    assert not any(tmp_path.iterdir())


def _normalise_queries(encoder):
    encoder.blocks[1].attn.q_norm = nn.LayerNorm(16)


def _mix_epsilons(encoder):
    encoder.blocks[1].norm2.eps = 1e-3


def _normalise_patches(encoder):
    encoder.patch_embed.norm = nn.LayerNorm(32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_normalise_queries, "normalises queries"),
        (_mix_epsilons, "one epsilon"),
        (_normalise_patches, "norm in its patch embedding"),
    ],
)
def test_traits_of_single_layers_are_seen(change, words, tmp_path):
    encoder = make()
    change(encoder)
    with pytest.raises(UserError, match=words):
        write(to_transformers, encoder, tmp_path)


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "vit_base_patch16_clip_224"])
def test_a_weight_that_finds_no_place_is_refused_whatever_the_list_of_traits_says(name, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_require_plain", lambda encoder: None)
    with pytest.raises(UserError, match="find no place there .*(reg_token|norm_pre.weight)"):
        write(to_transformers, make(name), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_place_without_a_weight_is_refused(tmp_path):
    encoder = make()
    encoder.blocks[1].mlp.fc2.bias = None
    with pytest.raises(UserError, match=r"on one side only \(vit.*layer.*1.*bias\)"):
        write(to_transformers, encoder, tmp_path)
    assert not any(tmp_path.iterdir())


def _exchange_norms(monkeypatch):
    exchanged = {"layernorm_before": "layernorm_after", "layernorm_after": "layernorm_before"}
    names = dict(export._NAMES)
    for old, new in names.items():
        word = new.split(".")[-2]
        names[old] = new.replace(word, exchanged.get(word, word))
    monkeypatch.setattr(export, "_NAMES", names)


def _change_one_number(monkeypatch):
    place = export._transformers_weights

    def placed(encoder):
        weights = place(encoder)
        weights["vit.encoder.layer.0.attention.output.dense.bias"][5] += 0.01
        return weights

    monkeypatch.setattr(export, "_transformers_weights", placed)


def _take_another_gelu(monkeypatch):
    monkeypatch.setattr(export, "_ACTIVATIONS", dict.fromkeys(export._ACTIVATIONS, "gelu_pytorch_tanh"))


def _lose_the_position_of_the_class(monkeypatch):
    place = export._transformers_weights

    def placed(encoder):
        weights = place(encoder)
        weights["vit.embeddings.position_embeddings"][:, 0] = 0
        return weights

    monkeypatch.setattr(export, "_transformers_weights", placed)


@pytest.mark.parametrize(
    "damage", [_exchange_norms, _change_one_number, _take_another_gelu, _lose_the_position_of_the_class]
)
def test_a_defect_of_the_mapping_is_caught(damage, tmp_path, monkeypatch):
    damage(monkeypatch)
    with pytest.raises(RuntimeError, match="transformers gives other tokens"):
        write(to_transformers, make(), tmp_path)


def test_a_defect_of_the_head_is_caught(tmp_path, monkeypatch):
    place = export._transformers_weights
    monkeypatch.setattr(
        export,
        "_transformers_weights",
        lambda encoder: {key: -value if key == "classifier.bias" else value for key, value in place(encoder).items()},
    )
    with pytest.raises(RuntimeError, match="transformers gives other logits"):
        write(to_transformers, make(), tmp_path)


def test_the_image_processor_makes_our_pixels(tmp_path):
    write(to_transformers, make(), tmp_path)
    photograph = Image.open(Path(skimage.__file__).parent / "data" / "coffee.png").convert("RGB")
    found = AutoImageProcessor.from_pretrained(tmp_path)(photograph, return_tensors="np")["pixel_values"][0]
    resized = decoding.resize(np.array(photograph), 32, 32)
    expected = (resized / 255 - np.array(MEAN)) / np.array(STD)
    # Rounding of float32. Resizing makes whole levels of 1/255, of which one would be 0.013 and more.
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1), rtol=0, atol=1e-5)


# ONNX

ONNX_MODELS = {
    "plain": {"drop_path": 0.5, "dropout": 0.5},
    "without a head": {"classes": 0, "pool": "gap", "gelu": "tanh", "depth": 1},
    "relative": {"position": "relative", "depth": 1},
    "every layer, large": {
        "position": "learned_2d",
        "position_at": "every_layer",
        "drop_border": True,
        "image_size": 36,
    },
    "hybrid without a head": {"name": "vit_tiny_r26_s16_224", "image_size": 32, "classes": 0},
    "BiT": {"name": "resnetv2_26x1_bit", "image_size": 33},
}


NAMES = ["cat", "dog", "ox"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The encoder of a kind, its folder and what the export returned; every kind is exported once."""
    made = {}

    def of(kind):
        if kind not in made:
            encoder, folder = make(**ONNX_MODELS[kind]), tmp_path_factory.mktemp("onnx")
            with pytest.MonkeyPatch.context() as patch:
                if "large" in kind:  # to torch, which lays weights beside a model of 2 GB
                    patch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1000)
                made[kind] = encoder, folder, write(to_onnx, encoder, folder, NAMES if kind == "plain" else None)
        return made[kind]

    return of


@pytest.mark.parametrize("kind", ONNX_MODELS)
def test_onnxruntime_gives_the_encoders_outputs_for_any_batch(kind, exported):
    encoder, folder, difference = exported(kind)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wanted = (["tokens"] if "BiT" not in kind else []) + ["features"] + (["logits"] if "without" not in kind else [])
    assert names == wanted
    size = ONNX_MODELS[kind].get("image_size", 32)
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("pixels", "tensor(float)", ["batch", 3, size, size])
    ]
    for count in (1, 2, 5):
        images = noise(count, size)
        expected = outputs_of(encoder, images)
        for name, found in zip(names, session.run(None, {"pixels": images.numpy()}), strict=True):
            close(torch.from_numpy(found), expected[name], share=2e-5)
    assert 0 < difference < 1e-4
    beside = {"model.onnx.data"} if "large" in kind else set()
    assert {file.name for file in folder.iterdir()} == {"model.onnx", "preprocessor.json", *beside}


def test_shapes_of_outputs_are_declared(exported):
    def shapes(kind):
        graph = onnx.load(exported(kind)[1] / "model.onnx").graph
        return {o.name: [d.dim_param or d.dim_value for d in o.type.tensor_type.shape.dim] for o in graph.output}

    assert shapes("plain") == {"tokens": ["batch", 17, 32], "features": ["batch", 32], "logits": ["batch", 3]}
    assert shapes("without a head") == {"tokens": ["batch", 16, 32], "features": ["batch", 32]}
    assert shapes("BiT") == {"features": ["batch", 1024], "logits": ["batch", 3]}


def test_no_padding_of_bit_stands_where_onnxruntime_takes_it_for_another(exported):
    # Up to 1.31 it joins a Pad of zeros with the MaxPool after it, whose border is -inf.
    nodes = onnx.load(exported("BiT")[1] / "model.onnx").graph.node
    kinds = {output: node.op_type for node in nodes for output in node.output}
    assert [kinds[node.input[0]] for node in nodes if node.op_type == "MaxPool"] == ["Concat"]


def test_the_model_says_how_pixels_are_made(exported):
    _, folder, _ = exported("plain")
    beside = json.loads((folder / "preprocessor.json").read_text())
    assert beside == {
        "image_size": 32,
        "resize": "squash",
        "interpolation": "bilinear",
        "antialias": True,
        "scale": 1 / 255,
        "mean": list(MEAN),
        "std": list(STD),
        "classes": NAMES,
    }
    model = onnx.load(folder / "model.onnx")
    assert {entry.key: json.loads(entry.value) for entry in model.metadata_props} == beside
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    assert json.loads((exported("BiT")[1] / "preprocessor.json").read_text())["classes"] is None


@pytest.mark.parametrize("kind", ["plain", "relative", "hybrid without a head", "BiT"])
def test_the_model_names_no_folder_of_the_machine_that_wrote_it(kind, exported):
    content = (exported(kind)[1] / "model.onnx").read_bytes()
    assert b"site-packages" not in content and str(Path(export.__file__).parents[1]).encode() not in content
    assert b"stack_trace" not in content


def test_a_defect_of_the_exporter_is_caught(tmp_path, monkeypatch):
    export_by_torch = torch.onnx.export

    def damaged(module, *arguments, **more):
        module.encoder.blocks[0].attn.proj.bias[3] += 0.01
        return export_by_torch(module, *arguments, **more)

    monkeypatch.setattr(torch.onnx, "export", damaged)
    with pytest.raises(RuntimeError, match="onnxruntime gives other tokens"):
        write(to_onnx, make(depth=1), tmp_path)


class _Unwritable(nn.Module):
    def forward(self, tokens):
        return tokens + torch.linalg.eigvals(tokens[:, :4, :4]).abs().mean()


def test_what_torch_cannot_write_is_a_fault_that_a_user_can_mend(tmp_path):
    encoder = make(depth=1)
    encoder.norm_pre = _Unwritable()
    with pytest.raises(UserError, match="can't write this encoder as ONNX; use timm's layout"):
        write(to_onnx, encoder, tmp_path)


# both


@pytest.mark.parametrize("function", [to_transformers, to_onnx])
def test_nothing_else_is_changed_written_or_said(function, tmp_path, monkeypatch, capfd):
    encoder = make(depth=1, dropout=0.5, drop_path=0.5, position="sincos_2d")  # a table that is not trained
    encoder.blocks[0].mlp.eval()
    encoder.patch_embed.requires_grad_(False)
    before = copy.deepcopy(encoder)
    working, folder = tmp_path / "working", tmp_path / "out"
    working.mkdir()
    monkeypatch.chdir(working)
    random.seed(3)
    np.random.seed(3)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    level = logging.root.manager.disable
    write(function, encoder, folder)
    assert capfd.readouterr() == ("", "")
    assert random.getstate() == states[0] and (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert logging.root.manager.disable == level
    assert [m.training for m in encoder.modules()] == [m.training for m in before.modules()]
    assert [p.requires_grad for p in encoder.parameters()] == [p.requires_grad for p in before.parameters()]
    for old, new in zip(before.state_dict().values(), encoder.state_dict().values(), strict=True):
        assert torch.equal(old, new)
    assert {file.name for file in tmp_path.iterdir()} == {"working", "out"} and not any(working.iterdir())


def test_what_libraries_say_and_draw_stays_from_the_caller(capfd, caplog):
    state = torch.get_rng_state()
    with pytest.raises(KeyError), export._undisturbed():
        print("said")
        print("said", file=sys.stderr)
        warnings.warn("said", stacklevel=1)
        logging.getLogger("transformers").error("said")
        torch.rand(3)
        raise KeyError  # whose way out restores as much
    assert capfd.readouterr() == ("", "") and not caplog.records
    assert torch.equal(torch.get_rng_state(), state)
    logging.getLogger("transformers").error("heard")
    assert [record.getMessage() for record in caplog.records] == ["heard"]


@pytest.mark.parametrize(
    ("function", "package"),
    [(to_transformers, "transformers"), (to_onnx, "onnx"), (to_onnx, "onnxruntime"), (to_onnx, "onnxscript")],
)
def test_a_missing_package_is_named_with_what_to_install(function, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs {package}: pip install 'mpp-vit\[export\]'"):
        write(function, make(), tmp_path)


@pytest.mark.parametrize("function", [to_transformers, to_onnx])
@pytest.mark.parametrize(("classes", "outputs"), [(4, 4), (0, 0)])
def test_names_must_be_as_many_as_outputs(function, classes, outputs, tmp_path):
    with pytest.raises(UserError, match=f"3 names for {outputs} outputs"):
        write(function, make(classes=classes), tmp_path, NAMES)


@pytest.mark.parametrize("function", [to_transformers, to_onnx])
def test_weights_that_diverged_are_refused_before_anything_is_written(function, tmp_path):
    encoder = make()
    with torch.no_grad():
        encoder.blocks[0].norm1.weight[3] = float("nan")
    with pytest.raises(UserError, match="tokens that are not finite"):
        write(function, encoder, tmp_path)
    assert not any(tmp_path.iterdir())


def test_what_rounding_explains_is_measured_against_float64():
    encoder, images = make().eval(), noise(2)
    weights = {name: value.clone() for name, value in encoder.state_dict().items()}
    with torch.no_grad():
        expected = export._expected(encoder, images)
        tokens = encoder.forward_features(images)
        exact = copy.deepcopy(encoder).double().forward_features(images.double())
    assert all(torch.equal(weights[name], value) for name, value in encoder.state_dict().items())
    assert torch.equal(expected["tokens"][0], tokens)
    rounding = (tokens - exact).abs().max().item()
    assert 0 < rounding < 1e-5
    assert expected["tokens"][1] == pytest.approx(max(10 * rounding, 1e-5 * tokens.abs().max().item()))


def test_a_network_that_rounds_more_is_allowed_more():
    encoder, images = make().eval(), noise(2)
    with torch.no_grad():
        encoder.patch_embed.proj.bias.add_(3e4)  # float32 keeps few digits of what differs between tokens
        tokens, allowed = export._expected(encoder, images)["tokens"]
        exact = copy.deepcopy(encoder).double().forward_features(images.double())
    rounding = (tokens - exact).abs().max().item()
    assert 10 * rounding > 1e-5 * tokens.abs().max().item()
    assert allowed == pytest.approx(10 * rounding)


def test_the_largest_difference_is_over_all_outputs_and_refuses_shapes_and_nan():
    wanted = {"tokens": (torch.zeros(2, 3), 0.5), "logits": (torch.ones(2), 0.5)}
    found = {"tokens": torch.full((2, 3), 0.25), "logits": torch.tensor([1.0, 0.625])}
    assert export._largest_difference("it", wanted, found) == 0.375
    with pytest.raises(RuntimeError, match=r"it gives logits of shape \[1\], not \[2\]"):
        export._largest_difference("it", wanted, {**found, "logits": torch.ones(1)})
    for bad in (float("nan"), 0.4, 1.6):
        with pytest.raises(RuntimeError, match="it gives other logits"):
            export._largest_difference("it", wanted, {**found, "logits": torch.tensor([1.0, bad])})
