"""mpp/references.py: weights are found under every REF, and what is not there is named."""

import json

import pytest
import torch
from conftest import flip
from safetensors.torch import save_file

from mpp import references
from mpp.errors import UserError


def test_weights_are_found_under_every_ref_that_a_run_makes(made, tmp_path):
    model, _, write = made
    write(9)
    path = write(10)
    for ref in (tmp_path, path, path / "model.safetensors"):
        found = references.find_weights(str(ref))
        assert found.path == path / "model.safetensors"
        assert torch.equal(found.tensors["cls_token"], model.encoder.cls_token)
        assert found.config["architecture"] == "vit_tiny_patch16_224"
    save_file({"a": torch.zeros(1)}, tmp_path / "alone.safetensors")
    assert references.find_weights(str(tmp_path / "alone.safetensors")).config == {}


def test_refs_that_hold_nothing(tmp_path):
    with pytest.raises(UserError, match="neither a checkpoint nor a run with a complete checkpoint"):
        references.find_weights(str(tmp_path))
    for name in ("nothing", "nothing.safetensors", "nothing.npz"):
        with pytest.raises(UserError, match="not found. It can be a run folder, a checkpoint folder"):
            references.find_weights(str(tmp_path / name))
    (tmp_path / "weights.pth").write_bytes(b"PK")
    with pytest.raises(UserError, match="weights.pth: is no file that can be read here"):
        references.find_weights(str(tmp_path / "weights.pth"))


def test_a_broken_config_is_named(made):
    _, _, write = made
    path = write(1)
    for content in ("{", "[1]"):
        (path / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"config.json (is damaged|holds no JSON object)"):
            references.find_weights(str(path))


def test_a_damaged_newest_checkpoint_of_a_run_is_passed_over_with_a_warning(made, tmp_path):
    _, _, write = made
    write(9)
    flip(write(10) / "model.safetensors")
    said = []
    assert references.weights_file(str(tmp_path), said.append).parent.name == "step_00000009"
    assert len(said) == 1 and "step_00000010 of init=" in said[0] and "model.safetensors is damaged" in said[0]
    with pytest.raises(UserError, match="step_00000010/model.safetensors is damaged"):
        references.find_weights(str(tmp_path / "checkpoints" / "step_00000010"))
    with pytest.raises(UserError, match="step_00000010/model.safetensors is damaged"):
        references.find_weights(str(tmp_path / "checkpoints" / "step_00000010" / "model.safetensors"))


def test_a_damaged_optimizer_does_not_matter_to_those_who_do_not_continue(made, tmp_path):
    _, _, write = made
    flip(write(10) / "state" / "optimizer.safetensors")
    assert references.weights_file(str(tmp_path)).parent.name == "step_00000010"


def test_a_checkpoint_without_its_weights_says_so(made):
    _, _, write = made
    path = write(1)
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model.safetensors is missing"):
        references.find_weights(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pretrained_cfg": {"mean": ["a", 0, 0]}}, "mean=.* must be three numbers"),
        ({"pretrained_cfg": {"mean": [0.5, 0.5]}}, "mean=.* must be three numbers"),
        ({"pretrained_cfg": {"std": [0.5, 0.5, float("nan")]}}, "std=.* must be three numbers"),
        ({"pretrained_cfg": {"std": [0.5, 0.5, 0]}}, "std=.* must be positive"),
        ({"pretrained_cfg": "x"}, "pretrained_cfg is no object"),
        ({"label_names": [1, 2]}, "label_names must be a list of names"),
        ({"label_names": "cat"}, "label_names must be a list of names"),
    ],
)
def test_a_config_that_came_from_elsewhere_is_checked(made, changes, words):
    _, _, write = made
    path = write(1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=words):
        references.find_weights(str(path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "vit_tiny_patch16_224.nope",
            "timm has no weights of that name on the Hub; it has .*vit_tiny_patch16_224.augreg",
        ),
        ("vit_tinny_patch16_224", "timm has no such model; nearest are .*vit_tiny_patch16_224"),
    ],
)
def test_names_that_timm_does_not_know(name, words):
    with pytest.raises(UserError, match=words):
        references.find_weights(f"timm:{name}")
