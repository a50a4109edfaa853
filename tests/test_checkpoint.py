"""mpp/checkpoint.py: folders that are whole or absent, and refuse what does not fit."""

import json
import math
import resource
import signal
import subprocess

import pytest
import timm
import torch
from conftest import flip
from safetensors.torch import load_file, save_file

from mpp import checkpoint
from mpp.encoders import build_encoder
from mpp.errors import UserError
from mpp.model import MaskedPatchModel
from mpp.optim import RunningAverage, build_optimizer


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
    assert meta == {"step": 1, "layout": "whole", "note": 1.5, "measured": {}}
    assert all(torch.equal(weights[name], value) for name, value in other.state_dict().items())
    for before, parameter in zip(moments, other.parameters(), strict=True):
        assert set(before) == set(fresh.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(before[key], fresh.state[parameter][key]) for key in before)


def test_files_are_what_the_interface_says_and_timm_opens_them(made):
    model, _, write = made
    path = write(5000)
    assert path.name == "step_00005000"
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {
        "SHA256SUMS",
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
        measured={},
        classes=None,
        description={},
        retention=checkpoint.Retention(1),
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


def test_other_programs_check_the_sums(made):
    _, _, write = made
    path = write(1)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == 5, done.stderr


@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "objective.safetensors", "config.json", "state/optimizer.safetensors", "state/meta.json"],
)
def test_a_damaged_newest_checkpoint_is_passed_over(made, tmp_path, file):
    _, _, write = made
    write(3), write(4)
    folder = tmp_path / "checkpoints"
    assert checkpoint.newest_intact(folder) == (4, folder / "step_00000004", [])
    flip(folder / "step_00000004" / file)
    step, path, damaged = checkpoint.newest_intact(folder)
    assert (step, path.name, [broken.name for broken, _ in damaged]) == (3, "step_00000003", ["step_00000004"])
    assert f"step_00000004/{file} is damaged" in damaged[0][1]
    (folder / "step_00000004" / file).unlink()
    assert f"{file} is missing" in checkpoint.newest_intact(folder)[2][0][1]
    aside = checkpoint.set_aside(folder / "step_00000004")
    assert aside.is_dir() and [number for number, _ in checkpoint.complete(folder)] == [3]


def test_what_is_wrong_with_each_is_told_where_all_are_damaged(made, tmp_path):
    _, _, write = made
    assert checkpoint.newest_intact(tmp_path / "checkpoints") is None
    flip(write(3) / "config.json")
    (write(4) / "SHA256SUMS").write_text("no sums")
    with pytest.raises(UserError, match="every checkpoint in .* is damaged") as error:
        checkpoint.newest_intact(tmp_path / "checkpoints")
    assert "step_00000003/config.json is damaged" in str(error.value)
    assert "step_00000004/SHA256SUMS is damaged" in str(error.value)
    (tmp_path / "checkpoints" / "step_00000004" / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="step_00000004/SHA256SUMS is missing"):
        checkpoint.newest_intact(tmp_path / "checkpoints")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "state/../../outside"])
def test_sums_of_files_elsewhere_are_refused(made, tmp_path, name):
    _, _, write = made
    path = write(1)
    (tmp_path / "checkpoints" / "outside").write_text("x")
    with (path / "SHA256SUMS").open("a") as file:
        file.write("0" * 64 + f"  {name}\n")
    with pytest.raises(UserError, match="which is not in that folder"):
        checkpoint.require_intact(path)


def test_only_the_files_that_are_read_need_to_be_whole(made):
    _, _, write = made
    path = write(1)
    flip(path / "state" / "optimizer.safetensors")
    checkpoint.require_intact(path, ["model.safetensors", "no such file"])
    with pytest.raises(UserError, match="optimizer"):
        checkpoint.require_intact(path)


def test_certain_steps_and_the_best_stay_beside_the_newest(made, tmp_path):
    _, _, write = made
    losses = {2: 5.0, 4: 3.0, 6: 3.0, 8: math.nan, 10: 3.5, 12: 4.0, 14: 4.5}
    for step, loss in losses.items():
        write(step, keep=1, every=6, best="held_out_loss", measured={"held_out_loss": loss})
    folder = tmp_path / "checkpoints"
    assert [step for step, _ in checkpoint.complete(folder)] == [4, 6, 12, 14]
    found = checkpoint.best(folder, "held_out_loss")
    assert (found.step, found.value, found.path.name) == (4, 3.0, "step_00000004")  # the earlier of two equal ones
    assert checkpoint.best(folder, "held_out_accuracy") is None


def test_of_an_accuracy_the_highest_is_the_best(made, tmp_path):
    _, _, write = made
    for step, accuracy in [(1, 0.2), (2, 0.7), (3, 0.5), (4, 0.6)]:
        write(step, keep=1, best="probe_5_shot_accuracy", measured={"probe_5_shot_accuracy": accuracy})
    assert [step for step, _ in checkpoint.complete(tmp_path / "checkpoints")] == [2, 4]


def test_what_kills_left_is_swept_away(made, tmp_path):
    _, _, write = made
    write(1)
    for name in (".step_00000002.writing", ".step_00000000.removing"):
        (tmp_path / "checkpoints" / name / "state").mkdir(parents=True)
    write(3)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_00000001", "step_00000003"}


def test_a_full_disk_leaves_what_there_was(made, tmp_path):
    _, _, write = made
    write(1)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    largest = max(len(content) for content in before.values())
    for limit in (0, 100, largest // 2):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(
                UserError, match="step 2 can't be written .*; the checkpoint of step 1 is whole. Make room"
            ):
                write(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert write(2).name == "step_00000002"


def test_a_folder_that_may_not_be_written_is_named(made, tmp_path):
    _, _, write = made
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="there is no earlier one"):
        write(1, folder=tmp_path / "file")


def test_every_misfit_is_listed_and_nothing_is_loaded(made):
    model, optimizer, write = made
    path = write(1)
    weights = load_file(path / "model.safetensors")
    weights["surplus"] = weights.pop("cls_token")
    weights["norm.bias"] = torch.zeros(3)
    save_file(weights, path / "model.safetensors")
    moments = load_file(path / "state" / "optimizer.safetensors")
    del moments["exp_avg_sq/head.bias"]
    save_file(moments, path / "state" / "optimizer.safetensors")
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match="does not fit this recipe's model; nothing was loaded") as error:
        checkpoint.restore(path, model=model, encoder=model.encoder, trained=None, optimizer=optimizer)
    assert str(error.value).splitlines()[1:] == [
        "  model.safetensors: missing: cls_token",
        "  model.safetensors: unexpected: surplus",
        "  model.safetensors: shape of norm.bias: [3] there, [16] in the model",
        "  state/optimizer.safetensors: missing: exp_avg_sq/head.bias",
    ]
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())


def test_another_layout_of_the_state_is_refused(made):
    model, optimizer, write = made
    path = write(1)
    meta = json.loads((path / "state" / "meta.json").read_text())
    (path / "state" / "meta.json").write_text(json.dumps(meta | {"layout": "sharded"}))
    with pytest.raises(UserError, match="laid out as sharded"):
        checkpoint.restore(path, model=model, encoder=model.encoder, trained=None, optimizer=optimizer)


def test_no_file_is_a_pickle(made):
    _, _, write = made
    for file in write(1).rglob("*"):
        if file.suffix == ".safetensors":
            load_file(file)
        elif file.is_file():
            file.read_text(encoding="utf-8")
