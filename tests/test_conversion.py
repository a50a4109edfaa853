"""mpp/conversion.py: from every REF to other libraries' layouts, and their own loaders give the same features."""

import json

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import yaml
from conftest import TINY
from hub_server import HubServer
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ViTForImageClassification, ViTModel, pipeline

from mpp import checkpoint, command_line, config, publishing, references, run, sharing
from mpp import hub as door
from mpp.console import Console
from mpp.conversion import convert
from mpp.encoders import build_encoder
from mpp.errors import UserError

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs: by masked patch prediction, supervised, and with positions that timm has not."""
    root = tmp_path_factory.mktemp("runs")
    (root / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    for name, changes in [
        ("mpp", []),
        ("supervised", ["objective.name=supervised", "optim.learning_rate=0.01"]),
        ("learned_2d", ["model.position=learned_2d"]),
        ("averaged_pool", ["model.pool=gap", "model.gelu=tanh"]),
    ]:
        run.pretrain(config.load_run(str(root / "tiny.yaml"), changes)[0], root / name, QUIET)
    return root


def to(ref, output, layout, model=None, image_size=None):
    convert(str(ref), output, to=layout, model=model, image_size=image_size, console=QUIET)
    return output


def encoder_of(folder):
    path = checkpoint.complete(folder / "checkpoints")[-1][1]
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


@torch.no_grad()
def test_a_pre_trained_encoder_gives_the_same_features_everywhere(runs, tmp_path):
    expected = encoder_of(runs / "mpp").forward_features(IMAGES)
    again = timm.create_model(f"local-dir:{to(runs / 'mpp', tmp_path / 'timm', 'timm')}", pretrained=True).eval()
    assert torch.equal(again.forward_features(IMAGES), expected)
    model = ViTModel.from_pretrained(
        to(runs / "mpp", tmp_path / "transformers", "transformers"), add_pooling_layer=False
    )
    torch.testing.assert_close(model.eval()(IMAGES).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    session = onnxruntime.InferenceSession(to(runs / "mpp", tmp_path / "onnx", "onnx") / "model.onnx")
    (tokens,) = session.run(["tokens"], {"pixels": IMAGES.numpy()})
    np.testing.assert_allclose(tokens, expected, atol=1e-5, rtol=1e-5)
    # What was converted is a REF like any other, with the prediction head.
    found = references.find_weights(str(tmp_path / "timm"))
    assert found.path.with_name("objective.safetensors").is_file() and found.config["mpp"]["image_size"] == 32
    assert torch.equal(found.tensors["cls_token"], again.cls_token)


@torch.no_grad()
def test_a_head_goes_along_with_its_classes(runs, tmp_path):
    expected = encoder_of(runs / "supervised")(IMAGES)
    assert expected.abs().max() > 0
    model = ViTForImageClassification.from_pretrained(
        to(runs / "supervised", tmp_path / "transformers", "transformers")
    )
    torch.testing.assert_close(model.eval()(IMAGES).logits, expected, atol=1e-5, rtol=1e-5)
    assert model.config.id2label[3] == "class 3"
    folder = to(runs / "supervised", tmp_path / "timm", "timm")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(again(IMAGES), expected)
    assert json.loads((folder / "config.json").read_text())["label_names"][3] == "class 3"


@torch.no_grad()
def test_what_transformers_has_not_goes_to_onnx(runs, tmp_path):
    with pytest.raises(UserError, match="transformers' ViT layout can't express this encoder: .*positions"):
        to(runs / "learned_2d", tmp_path / "transformers", "transformers")
    with pytest.raises(UserError, match="can't express this encoder: it has no class token"):
        to(runs / "averaged_pool", tmp_path / "transformers", "transformers")
    assert [path.name for path in tmp_path.iterdir()] == []
    session = onnxruntime.InferenceSession(to(runs / "learned_2d", tmp_path / "onnx", "onnx") / "model.onnx")
    shape = {**TINY["model"], "position": "learned_2d"}
    encoder = build_encoder(image_size=32, **shape).eval()
    encoder.load_state_dict(references.find_weights(str(runs / "learned_2d")).tensors)
    (tokens,) = session.run(["tokens"], {"pixels": IMAGES.numpy()})
    np.testing.assert_allclose(tokens, encoder.forward_features(IMAGES), atol=1e-5, rtol=1e-5)


def test_another_image_size_is_told_and_has_more_positions(runs, tmp_path, capsys):
    convert(str(runs / "mpp"), tmp_path / "large", to="timm", model=None, image_size=48, console=Console())
    assert "position embeddings resized from 4 to 6 patches a side" in capsys.readouterr().out
    assert timm.create_model(f"local-dir:{tmp_path / 'large'}", pretrained=True).pos_embed.shape[1] == 37


def test_official_files_and_bare_weights_need_the_name_of_their_model(tmp_path):
    encoder = timm.create_model("vit_tiny_patch16_224", num_classes=5).eval()
    with torch.no_grad():
        encoder.head.weight.normal_()
    save_file(encoder.state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(UserError, match="does not say of which model it is; name it, such as --model"):
        to(tmp_path / "bare.safetensors", tmp_path / "out", "timm")
    folder = to(tmp_path / "bare.safetensors", tmp_path / "out", "timm", model="vit_tiny_patch16_224")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(again(images), encoder(images))
    with pytest.raises(UserError, match=r"missing: blocks\.11|unexpected: blocks|shape of"):
        to(tmp_path / "bare.safetensors", tmp_path / "other", "timm", model="vit_small_patch16_224")


def test_a_config_from_elsewhere_runs_nothing(runs, tmp_path):
    folder = to(runs / "mpp", tmp_path / "mine", "timm")
    settings = json.loads((folder / "config.json").read_text())
    own = settings.pop("mpp")
    for changes, words in [
        ({"model_args": {"checkpoint_path": "/etc/passwd"}}, "model_args checkpoint_path can't be taken over"),
        ({"model_args": ["x"]}, "model_args is no object"),
        ({"architecture": "../../x"}, "no such model"),
        ({"architecture": "resnet50"}, "can't be trained here"),
        ({"mpp": {**own, "model": {"name": "vit_tiny_patch16_224", "weights": "x"}}}, "unknown key model.weights"),
        ({"mpp": {**own, "image_size": "32"}}, "image_size=32 must be a number from 1"),
        ({"mpp": {**own, "image_size": 10**9}}, "image_size=1000000000 must be a number from 1 to 10000"),
    ]:
        (folder / "config.json").write_text(json.dumps({**settings, **changes}))
        with pytest.raises(UserError, match=words):
            to(folder, tmp_path / "out", "timm")
        assert not (tmp_path / "out").exists()
    (folder / "config.json").write_text(json.dumps(settings))  # as timm's own
    assert (to(folder, tmp_path / "out", "timm") / "model.safetensors").is_file()


def test_a_folder_that_holds_something_stays(runs, tmp_path):
    (tmp_path / "out").mkdir()
    to(runs / "mpp", tmp_path / "out", "timm")  # an empty one is taken
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match="holds something already"):
        to(runs / "mpp", tmp_path / "out", "onnx")
    assert {file: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_the_door_converts(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        door.main(["convert", str(runs / "mpp"), str(tmp_path / "out")])
    assert left.value.code == 0 and "in timm's layout" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        door.main(["convert", str(runs / "averaged_pool"), str(tmp_path / "other"), "--to", "transformers"])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("error: transformers' ViT layout") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "task"), [("mpp", "image-feature-extraction"), ("supervised", "image-classification")]
)
@torch.no_grad()
def test_pipelines_of_transformers_open_what_was_pushed(runs, tmp_path, monkeypatch, name, task):
    with HubServer() as hub:
        hub.patch(monkeypatch, tmp_path / "hf", HubServer.WRITER)
        publishing.push(runs / name, sharing.parse(f"anna/{name}"), private=False, license_name=None, console=QUIET)
        card = hub.files(f"anna/{name}")["README.md"].decode()
        assert f'pipeline("{task}", model="anna/{name}")' in card
        found = pipeline(task, model=f"anna/{name}", device="cpu")
        noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        told = found(Image.fromarray(noise))
    pixels = (torch.from_numpy(noise).permute(2, 0, 1)[None].float() / 255 - 0.5) / 0.5
    encoder = encoder_of(runs / name)
    if name == "mpp":
        np.testing.assert_allclose(told[0], encoder.forward_features(pixels)[0], atol=1e-5)
    else:
        shares = encoder(pixels)[0].softmax(0)
        best = max(told, key=lambda one: one["score"])
        assert best["label"] in (f"class {int(shares.argmax())}", f"LABEL_{int(shares.argmax())}")
        assert abs(best["score"] - shares.max().item()) < 1e-5
    weights = checkpoint.complete(runs / name / "checkpoints")[-1][1] / "model.safetensors"
    assert hub.files(f"anna/{name}")["model.safetensors"] == weights.read_bytes() and load_file(weights)
