"""mpp/checkpoint.py: folders that are whole or absent, and refuse what does not fit."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from mpp import checkpoint
from mpp.encoders import build_encoder
from mpp.errors import UserError
from mpp.model import MaskedPatchModel
from mpp.optim import RunningAverage, build_optimizer


@pytest.fixture
def made(tmp_path):
    """A model after one step, and a function that writes it."""
    torch.manual_seed(0)
    encoder = build_encoder("vit_tiny_patch16_224", image_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    model = MaskedPatchModel(encoder, 8)
    optimizer = build_optimizer(model.named_parameters(), name="adamw", weight_decay=0.1, betas=(0.9, 0.9), momentum=0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.01
    optimizer.step()

    def write(step, keep=2):
        return checkpoint.write(
            tmp_path / "checkpoints",
            step,
            model=model,
            encoder=encoder,
            trained=None,
            objective_note={"target": "mean_color"},
            optimizer=optimizer,
            names={value: name for name, value in model.named_parameters()},
            meta={"note": 1.5},
            classes=None,
            keep=keep,
        )

    return model, optimizer, write


def test_a_checkpoint_restores_every_weight_and_moment(made):
    model, optimizer, write = made
    path = write(1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in model.parameters()]
    other = MaskedPatchModel(
        build_encoder("vit_tiny_patch16_224", image_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2), 8
    )
    fresh = build_optimizer(other.named_parameters(), name="adamw", weight_decay=0.1, betas=(0.9, 0.9), momentum=0)
    meta = checkpoint.restore(path, model=other, encoder=other.encoder, trained=None, optimizer=fresh)
    assert meta == {"step": 1, "note": 1.5}
    assert all(torch.equal(weights[name], value) for name, value in other.state_dict().items())
    for before, parameter in zip(moments, other.parameters(), strict=True):
        assert set(before) == set(fresh.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(before[key], fresh.state[parameter][key]) for key in before)


def test_files_are_what_the_interface_says_and_timm_opens_them(made):
    model, _, write = made
    path = write(5000)
    assert path.name == "step_00005000"
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {
        "config.json",
        "model.safetensors",
        "objective.safetensors",
        "state/optimizer.safetensors",
        "state/meta.json",
    }
    assert set(load_file(path / "objective.safetensors")) == {"mask_embedding", "head.weight", "head.bias"}
    opened = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(opened.forward_features(images), model.encoder.eval().forward_features(images))
    assert torch.equal(
        timm.create_model(f"local-dir:{path}", pretrained=True, num_classes=3, img_size=24).blocks[0].attn.qkv.weight,
        model.encoder.blocks[0].attn.qkv.weight,
    )


def test_the_config_is_this_runs_own(made):
    _, _, write = made
    found = json.loads((write(1) / "config.json").read_text())
    assert found["pretrained_cfg"]["mean"] == found["pretrained_cfg"]["std"] == [0.5, 0.5, 0.5]
    assert found["pretrained_cfg"]["input_size"] == [3, 16, 16]
    assert "license" not in found["pretrained_cfg"] and not found["pretrained_cfg"].get("tag")
    assert found["model_args"]["patch_size"] == 8 and found["num_classes"] == 0


def test_the_newest_by_number_are_kept(made, tmp_path):
    _, _, write = made
    for step in (8, 9, 10, 11, 98, 99, 100, 101, 99999998, 100000001):
        write(step)
    assert [step for step, _ in checkpoint.complete(tmp_path / "checkpoints")] == [99999998, 100000001]


def test_a_draft_is_not_a_checkpoint_and_is_written_over(made, tmp_path):
    _, _, write = made
    draft = tmp_path / "checkpoints" / ".step_00000007.writing"
    draft.mkdir(parents=True)
    (draft / "junk").write_text("half")
    (tmp_path / "checkpoints" / "step_other").mkdir()
    assert checkpoint.complete(tmp_path / "checkpoints") == []
    assert not (write(7) / "junk").exists()
    assert not draft.exists()


@pytest.mark.parametrize("file", ["model.safetensors", "objective.safetensors", "state/optimizer.safetensors"])
def test_missing_and_cut_files_are_named(made, file):
    model, optimizer, write = made
    path = write(1)
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{file} is damaged"):
        checkpoint.restore(path, model=model, encoder=model.encoder, trained=None, optimizer=optimizer)
    (path / file).unlink()
    with pytest.raises(UserError, match=f"{file} is missing"):
        checkpoint.restore(path, model=model, encoder=model.encoder, trained=None, optimizer=optimizer)


def test_weights_are_found_under_every_ref_that_a_run_makes(made, tmp_path):
    model, _, write = made
    write(9)
    path = write(10)
    for ref in (tmp_path, path, path / "model.safetensors"):
        found = checkpoint.find_weights(str(ref))
        assert found.path == path / "model.safetensors"
        assert torch.equal(found.tensors["cls_token"], model.encoder.cls_token)
        assert found.config["architecture"] == "vit_tiny_patch16_224"
    save_file({"a": torch.zeros(1)}, tmp_path / "alone.safetensors")
    assert checkpoint.find_weights(str(tmp_path / "alone.safetensors")).config == {}


def test_an_average_is_exported_and_what_is_trained_is_kept_beside_it(made, tmp_path):
    model, optimizer, _ = made
    average = RunningAverage(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update()
    path = checkpoint.write(
        tmp_path / "averaged",
        3,
        model=average.model,
        encoder=average.model.encoder,
        trained=model,
        objective_note={},
        optimizer=optimizer,
        names={value: name for name, value in model.named_parameters()},
        meta={},
        classes=None,
        keep=1,
    )
    exported = load_file(path / "model.safetensors")
    torch.testing.assert_close(exported["norm.bias"], model.encoder.norm.bias - 0.5)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    averaged = {name: value.clone() for name, value in average.model.state_dict().items()}
    with torch.no_grad():
        for parameter in [*model.parameters(), *average.model.parameters()]:
            parameter.zero_()
    checkpoint.restore(path, model=average.model, encoder=average.model.encoder, trained=model, optimizer=optimizer)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(averaged[name], value) for name, value in average.model.state_dict().items())


def test_refs_that_hold_nothing(tmp_path):
    with pytest.raises(UserError, match="neither a checkpoint nor a run with a complete checkpoint"):
        checkpoint.find_weights(str(tmp_path))
    for name in ("nothing", "nothing.safetensors", "nothing.npz"):
        with pytest.raises(UserError, match="not found. It can be a run folder, a checkpoint folder"):
            checkpoint.find_weights(str(tmp_path / name))
    (tmp_path / "weights.pth").write_bytes(b"PK")
    with pytest.raises(UserError, match="weights.pth: is no file that can be read here"):
        checkpoint.find_weights(str(tmp_path / "weights.pth"))


def test_a_broken_config_is_named(made):
    _, _, write = made
    path = write(1)
    for content in ("{", "[1]"):
        (path / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"config.json (is damaged|holds no JSON object)"):
            checkpoint.find_weights(str(path))
