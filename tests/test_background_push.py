"""mpp/background_push.py: what is sent while a run goes on, and what is said of it; real processes, a stand-in hub."""

import json
import time

import pytest
from conftest import TINY
from hub_server import HubServer

from mpp import background_push, checkpoint, config, run
from mpp.background_push import BackgroundPush
from mpp.console import Console
from mpp.errors import UserError

# Writes down how it was called, waits for a file named "go", and ends as the file "end" says.
DOOR = """
import os, pathlib, sys, time
run = pathlib.Path(sys.argv[2])
with (run / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + f" niceness={os.getpriority(os.PRIO_PROCESS, 0) > 0} rank={os.environ.get('RANK')}\\n")
while not (run / "go").exists():
    time.sleep(0.01)
end = (run / "end").read_text()
print(end)
sys.exit(2 if "error" in end else 0)
"""


@pytest.fixture
def push(tmp_path, monkeypatch):
    (tmp_path / "door.py").write_text(DOOR)
    monkeypatch.setattr(background_push, "_DOOR", tmp_path / "door.py")
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "end").write_text("noise\ndone: https://hub/anna/vit")
    said = []
    made = BackgroundPush(tmp_path, ["anna/vit", "--private"], said.append)
    yield made, said
    if made.child is not None and made.child.poll() is None:
        made.child.kill()


def calls(folder):
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def wait_for_calls(folder, count):
    until = time.monotonic() + 30
    while len(calls(folder)) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_one_push_at_a_time_and_the_last_one_is_waited_for(push, tmp_path):
    made, said = push
    for _ in range(3):
        made.offer()
    wait_for_calls(tmp_path, 1)
    (tmp_path / "go").touch()
    made.finish()
    assert calls(tmp_path)[0] == f"push {tmp_path} anna/vit --private niceness=True rank=None"
    assert len(calls(tmp_path)) == 2
    assert said == ["sending the finished run to anna/vit (Ctrl-C leaves that out)", "done: https://hub/anna/vit"]


def test_what_fails_is_told_and_the_next_one_is_sent(push, tmp_path):
    made, said = push
    (tmp_path / "go").touch()
    (tmp_path / "end").write_text("error: the hub is away\n")
    made.offer()
    made.child.wait()
    made.offer()
    assert said == ["the last checkpoint did not reach the Hub (the hub is away); a newer one is sent now"]
    made.finish()
    command = f"python mpp/hub.py push {tmp_path} anna/vit --private"
    assert said[-1] == (f"not sent to the Hub: the hub is away. The run is whole in {tmp_path}; `{command}` sends it")


def test_a_run_that_stops_does_not_wait(push, tmp_path):
    made, said = push
    made.offer()
    wait_for_calls(tmp_path, 1)
    made.stop()
    assert made.child.poll() is not None
    assert len(said) == 1 and "the newest checkpoint is not on the Hub" in said[0] and made.command in said[0]


def test_a_run_that_stops_after_all_was_sent_says_nothing(push, tmp_path):
    made, said = push
    made.stop()
    (tmp_path / "go").touch()
    made.offer()
    made.child.wait()
    made.stop()
    assert said == []


def test_ctrl_c_leaves_the_last_one_out(push, tmp_path, monkeypatch):
    made, said = push

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_start", interrupted)
    made.waiting = True
    made.finish()
    assert "the newest checkpoint is not on the Hub" in said[-1]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer() as server:
        server.patch(monkeypatch, tmp_path / "hf", HubServer.WRITER)
        for name, value in server.environment(HubServer.WRITER, tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        yield server


def recipe(tmp_path, *overrides):
    import yaml

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return config.load_run(str(tmp_path / "tiny.yaml"), ["runtime.save_every=1", *overrides])[0]


def test_a_run_sends_itself_and_is_the_same_run(hub, tmp_path, capsys):
    run.pretrain(recipe(tmp_path), tmp_path / "alone", Console())
    run.pretrain(
        recipe(tmp_path, "runtime.push_to_hub=anna/vit", "runtime.license=mit"), tmp_path / "pushed", Console()
    )
    assert f"done: {hub.url}/anna/vit" in capsys.readouterr().out
    newest = checkpoint.complete(tmp_path / "pushed" / "checkpoints")[-1][1] / "model.safetensors"
    assert hub.files("anna/vit")["model.safetensors"] == newest.read_bytes()
    assert newest.read_bytes() == (tmp_path / "alone" / newest.relative_to(tmp_path / "pushed")).read_bytes()
    assert hub.commits("anna/vit")[-1] == "pushed, step 4" and "summary.json" in hub.files("anna/vit")
    card = hub.files("anna/vit")["README.md"].decode()
    assert "license: mit" in card and "push_to_hub: null" in card
    written = "".join(
        file.read_text(errors="replace")
        for file in (tmp_path / "pushed").rglob("*")
        if file.suffix != ".safetensors" and file.is_file()
    )
    assert HubServer.WRITER not in written + card
    summary = json.loads((tmp_path / "pushed" / "summary.json").read_text())
    assert summary["steps"] == 4


def test_a_hub_that_refuses_does_not_cost_the_run(hub, tmp_path, capsys):
    hub.fail("POST", "/commit/", status=403, times=99)
    chosen = recipe(tmp_path, "runtime.push_to_hub=anna/vit", "runtime.save_every=0")
    run.pretrain(chosen, tmp_path / "run", Console())
    assert (tmp_path / "run" / "summary.json").is_file()
    said = capsys.readouterr().out
    assert (
        "not sent to the Hub: anna/vit" in said
        and f"`python mpp/hub.py push {tmp_path / 'run'} anna/vit` sends it" in said
    )


@pytest.mark.parametrize(
    ("name", "token", "words"),
    [
        ("anna/vit", None, "HF_TOKEN"),
        ("anna/vit", HubServer.READER, "may only read"),
        ("museum/vit", HubServer.WRITER, "may not write in museum"),
    ],
)
def test_what_cannot_be_pushed_is_known_before_the_first_step(hub, tmp_path, monkeypatch, name, token, words):
    hub.patch(monkeypatch, tmp_path / "hf", token)
    with pytest.raises(UserError, match=words):
        run.pretrain(recipe(tmp_path, f"runtime.push_to_hub={name}"), tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_offline_is_known_before_the_first_step(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        run.pretrain(recipe(tmp_path, "runtime.push_to_hub=anna/vit"), tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run").exists() and hub.requests == []


def test_a_fine_tuning_is_sent_when_it_was_tested(hub, tmp_path, capsys):
    chosen = recipe(
        tmp_path, "runtime.push_to_hub=anna/tuned", "objective.name=supervised", "data.source=synthetic:40",
        "optim.learning_rate=0.01",
    )  # fmt: skip
    results = run.finetune(chosen, tmp_path / "run", Console())
    assert len([title for title in hub.commits("anna/tuned") if title.startswith("run, step")]) == 1
    accuracy = next(record["value"] for record in results if record["metric"] == "accuracy")
    assert f"{accuracy:.4f}" in hub.files("anna/tuned")["README.md"].decode()
