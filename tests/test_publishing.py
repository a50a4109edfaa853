"""mpp/publishing.py and mpp/hub.py: to the Hub and back, against a server that speaks its interface."""

import hashlib
import json
import subprocess

import pytest
import timm
import torch
import yaml
from conftest import ROOT, command, flip
from hub_server import HubServer
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from mpp import checkpoint, command_line, config, publishing, references, run, sharing
from mpp import hub as door
from mpp.console import Console
from mpp.errors import UserError

HUB = ROOT / "mpp" / "hub.py"
QUIET = Console(quiet=True)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer() as server:
        server.patch(monkeypatch, tmp_path / "hf", HubServer.WRITER)
        yield server


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of a few steps with two checkpoints."""
    from conftest import TINY

    root = tmp_path_factory.mktemp("finished")
    recipe = {**TINY, "runtime": {**TINY["runtime"], "save_every": 2, "eval_every": 2}}
    (root / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    run.pretrain(config.load_run(str(root / "tiny.yaml"))[0], root / "tiny_run", QUIET)
    return root / "tiny_run"


def push(path, name="anna/vit", license_name=None, **more):
    return publishing.push(path, sharing.parse(name, **more), private=False, license_name=license_name, console=QUIET)


def hashes(folder):
    return {file: hashlib.sha256(file.read_bytes()).digest() for file in folder.rglob("*") if file.is_file()}


def test_a_push_holds_what_it_says_and_leaves_the_run_as_it_is(hub, finished):
    before = hashes(finished)
    where = push(finished, license_name="cc-by-4.0")
    assert where == f"{hub.url}/anna/vit" and hub.commits("anna/vit")[-1] == "tiny_run, step 4"
    there = hub.files("anna/vit")
    assert set(there) - {".gitattributes"} == {
        "README.md", "SHA256SUMS", "config.json", "model.safetensors", "objective.safetensors", "recipe.yaml",
        "summary.json", "figures/curves.png", "figures/mosaic.png",
    }  # fmt: skip
    newest = finished / "checkpoints" / "step_00000004"
    for name in ("model.safetensors", "objective.safetensors"):
        assert there[name] == (newest / name).read_bytes()
        assert f"{hashlib.sha256(there[name]).hexdigest()}  {name}\n".encode() in there["SHA256SUMS"]
    settings = json.loads(there["config.json"])
    assert settings["pretrained_cfg"]["license"] == "cc-by-4.0" and settings["pretrained_cfg"]["tag"] == "vit"
    assert settings["pretrained_cfg"]["mean"] == [0.5, 0.5, 0.5] and settings["mpp"]["image_size"] == 32
    card = ModelCard(there["README.md"].decode())
    assert card.data.license == "cc-by-4.0" and card.data.library_name == "timm"
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert measured["held-out loss"] == last["held_out_loss"]
    assert config.model_from(yaml.safe_load(there["recipe.yaml"])["model"], "recipe.yaml").depth == 2
    assert hashes(finished) == before


def test_an_earlier_checkpoint_is_pushed_as_what_it_is(hub, finished):
    push(finished / "checkpoints" / "step_00000002")
    there = hub.files("anna/vit")
    assert there["model.safetensors"] == (finished / "checkpoints" / "step_00000002" / "model.safetensors").read_bytes()
    assert "summary.json" not in there and "figures/mosaic.png" not in there  # they are of the end
    text = there["README.md"].decode()
    assert "step 2 of 4" in text and "license: unknown" in text
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert f"{records[1]['held_out_loss']:.4f}" in text and f"{records[3]['held_out_loss']:.4f}" not in text


def test_the_round_trip_gives_the_same_features_bit_for_bit(hub, finished, tmp_path):
    push(finished)
    publishing.pull(sharing.parse("anna/vit"), tmp_path / "pulled", False, QUIET)
    images = torch.rand(3, 3, 32, 32)
    first = timm.create_model(f"local-dir:{finished / 'checkpoints' / 'step_00000004'}", pretrained=True).eval()
    expected = first.forward_features(images)
    for ref in (f"local-dir:{tmp_path / 'pulled'}", "hf-hub:anna/vit"):
        opened = timm.create_model(ref, pretrained=True).eval()
        assert torch.equal(opened.forward_features(images), expected)
        assert opened.pretrained_cfg["mean"] == (0.5, 0.5, 0.5) or opened.pretrained_cfg["mean"] == [0.5, 0.5, 0.5]
    for ref in (str(tmp_path / "pulled"), "hf-hub:anna/vit"):
        found = references.find_weights(ref)
        first.load_state_dict(found.tensors)
        assert torch.equal(first.forward_features(images), expected)
        assert references.is_remote(ref) == ref.startswith("hf-hub:")
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "pulled", capture_output=True)
    assert done.returncode == 0


def test_a_fine_tuning_starts_from_the_hub_as_from_the_run(hub, finished, tmp_path):
    push(finished)
    tuned = []
    changes = [
        "objective.name=supervised", "data.source=synthetic:40", "optim.steps=2", "optim.learning_rate=0.01"
    ]  # fmt: skip
    for number, init in enumerate((finished, "hf-hub:anna/vit")):
        recipe, _ = config.load_run(str(finished / "config.yaml"), [*changes, f"init={init}"])
        output = tmp_path / f"tuned_{number}"
        run.finetune(recipe, output, QUIET)
        tuned.append((checkpoint.complete(output / "checkpoints")[-1][1] / "model.safetensors").read_bytes())
    assert tuned[0] == tuned[1]
    where = push(tmp_path / "tuned_1", "anna/tuned")
    assert where.endswith("anna/tuned")
    card = ModelCard(hub.files("anna/tuned")["README.md"].decode())
    assert card.data.pipeline_tag == "image-classification" and card.data.base_model == "anna/vit"
    assert [result.metric_type for result in card.data.eval_results if result.metric_type == "accuracy"]
    opened = timm.create_model("hf-hub:anna/tuned", pretrained=True)
    assert opened.num_classes == 10


@pytest.mark.parametrize("ref", ["run", "hub"])
def test_a_pre_training_goes_on_with_the_head_and_the_mask_embedding(hub, finished, tmp_path, ref, capsys):
    push(finished)
    init = finished if ref == "run" else "hf-hub:anna/vit"
    recipe, _ = config.load_run(
        str(finished / "config.yaml"),
        [f"init={init}", "optim.steps=2", "optim.warmup_steps=1", "optim.learning_rate=1e-30"],
    )
    run.pretrain(recipe, tmp_path / "more", Console())
    assert "prediction head and mask embedding from" in capsys.readouterr().out
    before = load_file(finished / "checkpoints" / "step_00000004" / "objective.safetensors")
    after = load_file(tmp_path / "more" / "checkpoints" / "step_00000002" / "objective.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    other, _ = config.load_run(str(finished / "config.yaml"), [f"init={init}", "objective.target=pixels"])
    run.pretrain(other, tmp_path / "pixels", Console())
    assert "objective.safetensors (prediction head, mask embedding) left out" in capsys.readouterr().out


def test_what_changes_on_the_hub_is_noticed_when_a_run_goes_on(hub, finished, tmp_path):
    push(finished)
    recipe, _ = config.load_run(str(finished / "config.yaml"), ["init=hf-hub:anna/vit"])
    run.pretrain(recipe, tmp_path / "more", QUIET)
    (tmp_path / "more" / "summary.json").unlink()
    other = load_file(finished / "checkpoints" / "step_00000004" / "objective.safetensors")
    save_file(
        {key: value + 1 for key, value in other.items()},
        tmp_path / "objective.safetensors",
        {"objective": json.dumps({"target": "mean_color"})},
    )
    weights = hub.files("anna/vit")["model.safetensors"]
    hub.put("anna/vit", {
        "objective.safetensors": (tmp_path / "objective.safetensors").read_bytes(),
        "SHA256SUMS": checkpoint.sums({"model.safetensors": weights, "objective.safetensors": (tmp_path / "objective.safetensors").read_bytes()}).encode(),
    })  # fmt: skip
    with pytest.raises(UserError, match=r"what it read has changed since \(init, objective\)"):
        run.pretrain(recipe, tmp_path / "more", QUIET)


def test_damage_on_the_way_is_noticed(hub, finished, tmp_path):
    push(finished)
    content = bytearray(hub.files("anna/vit")["objective.safetensors"])
    content[-1] ^= 1
    hub.put("anna/vit", {"objective.safetensors": bytes(content)})
    with pytest.raises(UserError, match="objective.safetensors is damaged"):
        references.find_weights("hf-hub:anna/vit")
    with pytest.raises(UserError, match=r"anna/vit on the Hub.*objective.safetensors is damaged"):
        publishing.pull(sharing.parse("anna/vit"), tmp_path / "pulled", False, QUIET)
    assert not any(path.name.endswith(".pulling") or path.name == "pulled" for path in tmp_path.iterdir())


def test_a_damaged_run_is_not_pushed(hub, finished, tmp_path):
    import shutil

    shutil.copytree(finished, tmp_path / "run")
    flip(tmp_path / "run" / "checkpoints" / "step_00000004" / "model.safetensors")
    with pytest.raises(UserError, match="model.safetensors is damaged"):
        push(tmp_path / "run" / "checkpoints" / "step_00000004")
    push(tmp_path / "run")
    assert hub.commits("anna/vit")[-1] == "run, step 2"


def test_what_is_pulled_does_not_take_the_place_of_anything(hub, finished, tmp_path):
    push(finished)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds something already"):
            publishing.pull(sharing.parse("anna/vit"), tmp_path / "mine", overwrite, QUIET)
    publishing.pull(sharing.parse("anna/vit"), tmp_path / "pulled", False, QUIET)
    with pytest.raises(UserError, match="give --overwrite"):
        publishing.pull(sharing.parse("anna/vit"), tmp_path / "pulled", False, QUIET)
    publishing.pull(sharing.parse("anna/vit"), tmp_path / "pulled", True, QUIET)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_only_known_names_are_pulled_and_none_escapes(hub, finished, tmp_path):
    push(finished)
    hub.put("anna/vit", {
        "../escape.png": b"x", "figures/../../escape.png": b"x", "/etc/escape.png": b"x", "pytorch_model.bin": b"x",
        "figures/more.png": b"x", "config.yaml": b"x", "model.py": b"x",
    })  # fmt: skip
    publishing.pull(sharing.parse("anna/vit"), tmp_path / "deep" / "pulled", False, QUIET)
    names = {str(file.relative_to(tmp_path / "deep")) for file in (tmp_path / "deep").rglob("*") if file.is_file()}
    assert names == {
        f"pulled/{name}"
        for name in (
            *("README.md", "SHA256SUMS", "config.json", "model.safetensors", "objective.safetensors", "recipe.yaml"),
            *("summary.json", "figures/curves.png", "figures/mosaic.png", "figures/more.png"),
        )
    }
    assert not list(tmp_path.rglob("*escape*"))


def test_timm_names_are_fetched_with_their_statistics(hub, finished, tmp_path):
    weights = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    save_file(weights.state_dict(), tmp_path / "model.safetensors")
    settings = {
        "architecture": "vit_tiny_patch16_224", "num_classes": 3,
        "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]},
    }  # fmt: skip
    hub.put("timm/vit_tiny_patch16_224.augreg_in21k", {
        "model.safetensors": (tmp_path / "model.safetensors").read_bytes(), "config.json": json.dumps(settings).encode(),
        "pytorch_model.bin": b"never read",
    })  # fmt: skip
    found = references.find_weights("timm:vit_tiny_patch16_224.augreg_in21k")
    assert torch.equal(found.tensors["cls_token"], weights.cls_token)
    assert found.config["pretrained_cfg"]["std"] == [0.4, 0.5, 0.6]
    assert not hub.count("GET", "pytorch_model.bin")


def test_a_model_that_timm_cannot_express_says_so(hub, tmp_path):
    from conftest import TINY

    (tmp_path / "odd.yaml").write_text(yaml.safe_dump({**TINY, "model": {**TINY["model"], "position": "learned_2d"}}))
    run.pretrain(config.load_run(str(tmp_path / "odd.yaml"))[0], tmp_path / "odd", QUIET)
    push(tmp_path / "odd", "anna/odd")
    text = hub.files("anna/odd")["README.md"].decode()
    assert "timm.create_model" not in text and ModelCard(text).data.library_name != "timm"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["push", "RUN", "no-owner"], "no-owner' is no repository of the Hub"),
        (["push", "RUN", "museum/vit"], "may not write in museum"),
        (["push", "nowhere", "anna/vit"], "nowhere is neither a run folder nor a checkpoint folder"),
        (["pull", "anna/nothing"], "the Hub has no such repository"),
        (["pull", "anna/there@nowhere"], "has no revision nowhere"),
    ],
)
def test_the_door_tells_what_is_wrong_in_one_message(hub, finished, tmp_path, arguments, words, monkeypatch, capsys):
    hub.put("anna/there", {"model.safetensors": b"x"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        door.main([str(finished) if word == "RUN" else word for word in arguments])
    said = capsys.readouterr()
    assert left.value.code == 2 and said.err.startswith("error: ") and words in said.err
    assert said.err.count("\n") == 1 and hub.WRITER not in said.err + said.out
    assert [path.name for path in tmp_path.iterdir()] in ([], ["hf"])


def test_the_door_pushes_and_pulls(finished, tmp_path):
    with HubServer() as server:
        env = server.environment(server.WRITER, tmp_path / "hf")
        done = command(HUB, "push", finished, "anna/vit", "--private", "--revision", "v1", cwd=tmp_path, env=env)
        assert done.returncode == 0 and done.stdout == f"done: {server.url}/anna/vit/tree/v1\n", done.stderr
        assert server.repositories["anna/vit"].private and "README.md" not in server.files("anna/vit", "main")
        done = command(HUB, "pull", "anna/vit@v1", cwd=tmp_path, env=env)
        assert done.returncode == 0 and done.stdout == "done: hub/anna/vit\n", done.stderr
    assert (tmp_path / "hub" / "anna" / "vit" / "model.safetensors").is_file()
