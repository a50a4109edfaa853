"""Real processes: two against one, kills and signals, and what was actually read."""

import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, command, noise_photos
from safetensors.torch import load_file

from mpp import checkpoint, config, run, wiring
from mpp.console import Console

PRETRAIN = ROOT / "mpp" / "pretrain.py"


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def read(output):
    """What each step read over all processes: {step: {(row, crc of pixels, positions, actions, donors)}}."""
    found = {}
    for file in (output / "inputs").glob("process_*.jsonl"):
        for line in lines(file):
            samples = zip(*(line[key] for key in ("index", "images", "positions", "actions", "donors")), strict=True)
            found.setdefault(line["step"], set()).update(samples)
    return found


def last_weights(output):
    folder = max((output / "checkpoints").iterdir())
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same recipe with one process and with two, and with accumulation."""
    import yaml
    from conftest import TINY

    root = tmp_path_factory.mktemp("runs")
    recipe = {**TINY, "runtime": {"micro_batch": 4, "workers": 1, "log_every": 1, "eval_every": 4, "log_inputs": True}}
    # Held-out images in an odd number: the last batches of the two processes are uneven.
    recipe["data"] = {**TINY["data"], "source": "synthetic:21"}
    recipe["optim"] = {**TINY["optim"], "steps": 8, "learning_rate": 3e-3}
    (root / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    finished = {}
    for name, processes, micro in [("one", 1, 8), ("two", 2, 4), ("two_parts", 2, 2)]:
        done = command(
            PRETRAIN,
            "--recipe",
            root / "tiny.yaml",
            "--output",
            root / name,
            f"runtime.micro_batch={micro}",
            processes=processes,
        )
        assert done.returncode == 0, done.stderr
        assert "find_unused" not in done.stderr and "unused parameters" not in done.stderr
        assert json.loads((root / name / "summary.json").read_text())["processes"] == processes
        finished[name] = root / name, done
    return finished


def test_two_processes_read_the_same_images_crops_and_masks_in_every_step(runs):
    one, two, parts = (read(runs[name][0]) for name in ("one", "two", "two_parts"))
    assert len(one) == 8 and all(len(samples) == 8 for samples in one.values())
    assert one == two == parts
    shares = [lines(runs["two"][0] / "inputs" / f"process_{process}.jsonl")[:2] for process in (0, 1)]
    read_in_first_epoch = [index for share in shares for line in share for index in line["index"]]
    assert len(read_in_first_epoch) == len(set(read_in_first_epoch)) == 16


def test_epochs_are_whole_and_differently_ordered_over_both_processes(runs):
    read_by_step = read(runs["two"][0])
    order = [row for step in sorted(read_by_step) for row in sorted(sample[0] for sample in read_by_step[step])]
    assert len(order) == 64  # 3 epochs of 21 and one more
    counts = [order.count(row) for row in range(21)]
    assert sorted(set(counts)) in ([3], [3, 4])
    assert [s[0] for s in sorted(read_by_step[1])] != [s[0] for s in sorted(read_by_step[4])]


@pytest.mark.parametrize("name", ["two", "two_parts"])
def test_two_processes_have_the_same_losses_to_1e_5(runs, name):
    one, two = lines(runs["one"][0] / "metrics.jsonl"), lines(runs[name][0] / "metrics.jsonl")
    assert [record["step"] for record in one] == [record["step"] for record in two] == list(range(1, 9))
    for first, second in zip(one, two, strict=True):
        assert abs(first["loss"] - second["loss"]) < 1e-5
        assert math.isclose(first["grad_norm"], second["grad_norm"], rel_tol=1e-4)
        for key in ("learning_rate", "images", "epoch", "target_entropy"):
            assert first[key] == second[key]


def test_held_out_figures_count_every_image_once_over_uneven_batches(runs):
    one, two = (lines(runs[name][0] / "metrics.jsonl")[3] for name in ("one", "two"))
    for key in ("held_out_target_entropy", "held_out_nearest_patch_accuracy", "held_out_target_classes"):
        assert math.isclose(one[key], two[key], rel_tol=1e-12)
    assert abs(one["held_out_loss"] - two["held_out_loss"]) < 1e-5


def test_exported_names_do_not_depend_on_the_number_of_processes(runs):
    one, two = last_weights(runs["one"][0]), last_weights(runs["two"][0])
    assert one.keys() == two.keys() and not any(name.startswith(("module.", "_orig_mod.")) for name in one)
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


def test_only_the_first_process_speaks(runs):
    assert runs["two"][1].stdout.count("pre-training 8/8") == 1


def test_supervised_and_finetuning_on_two_processes(tmp_path, tiny):
    path = tiny(
        objective__name="supervised", data__source="synthetic:21", objective__mixup=0.5, objective__cutmix=1.0,
        data__rand_augment="rand-m5-n1", data__erasing=0.3, optim__average=0.5, optim__layer_decay=0.8, model__head="mlp",
    )  # fmt: skip
    accuracies = []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        done = command(
            ROOT / "eval" / "finetune.py", "--recipe", path, "--output", output, "optim.learning_rate=[0.001, 0.01]",
            f"runtime.micro_batch={8 // processes}", "data.holdout=0.3", processes=processes,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        accuracies.append(
            {record["metric"]: record["value"] for record in json.loads((output / "results.json").read_text())}
        )
    assert accuracies[0]["accuracy"] == accuracies[1]["accuracy"]
    assert abs(accuracies[0]["loss"] - accuracies[1]["loss"]) < 1e-4


def test_a_batch_that_processes_do_not_divide_is_refused(tiny, tmp_path):
    done = command(PRETRAIN, "--recipe", tiny(), "--output", tmp_path / "run", processes=2)
    assert (
        "optim.batch_size=8 is not a multiple of runtime.micro_batch=8 x 2 processes; use runtime.micro_batch=4"
        in done.stderr
    )
    assert done.stderr.count("is not a multiple of") == 1  # one message, not one a process
    assert not (tmp_path / "run").exists()


def test_fewer_held_out_images_than_processes(tmp_path, tiny):
    from PIL import Image

    for split, count in (("train", 8), ("validation", 1)):
        (tmp_path / "set" / split).mkdir(parents=True)
        for number in range(count):
            Image.effect_noise((40, 40), 90).convert("RGB").save(tmp_path / "set" / split / f"{number}.png")
    found = []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        done = command(
            PRETRAIN, "--recipe", tiny(optim__steps=2), "--output", output, f"data.source=folder:{tmp_path}/set",
            f"runtime.micro_batch={8 // processes}", processes=processes,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"{processes} process" in done.stdout and "8 images\n" in done.stdout
        found.append(lines(output / "metrics.jsonl")[-1])
    assert abs(found[0]["held_out_loss"] - found[1]["held_out_loss"]) < 1e-5
    assert found[0]["held_out_target_classes"] == found[1]["held_out_target_classes"]


def start(path, output):
    return subprocess.Popen(
        [sys.executable, str(PRETRAIN), "--recipe", path, "--output", str(output)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(output, steps):
    """Until so many steps are logged; a file may be read while it is written."""
    file, until = Path(output) / "metrics.jsonl", time.monotonic() + 60
    while not file.is_file() or file.read_text().count("\n") < steps:
        assert time.monotonic() < until
        time.sleep(0.01)


def figures(output):
    """What metrics.jsonl says but for times."""
    leave_out = ("seconds", "images_per_second")
    return [
        {key: value for key, value in record.items() if key not in leave_out}
        for record in lines(output / "metrics.jsonl")
    ]


def run_to_its_end(path, output):
    run.pretrain(config.load_run(str(path))[0], output, Console())  # without the time of a start


def drive(*arguments):
    """What tests/kills.py tells."""
    done = command(ROOT / "tests" / "kills.py", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_stopped_run_continues_to_the_same_weights(tiny, tmp_path, number, capsys):
    path = tiny(
        model__dropout=0.1, optim__steps=120, runtime__save_every=6, runtime__log_every=2, runtime__workers=1,
        runtime__micro_batch=4, optim__average=0.9,
    )  # fmt: skip
    run_to_its_end(path, tmp_path / "straight")
    process = start(path, tmp_path / "broken")
    wait_for_steps(tmp_path / "broken", 5)
    os.killpg(process.pid, number)  # to the loader's workers too, as a terminal and most schedulers do
    _, errors = process.communicate(timeout=60)
    assert not (tmp_path / "broken" / "summary.json").exists(), "the run was over before it was stopped"
    assert "stopping: the step is finished and saved first" in errors
    assert "the same command continues" in errors
    assert process.returncode == 130 and "Traceback" not in errors
    run_to_its_end(path, tmp_path / "broken")
    assert "continues from step" in capsys.readouterr().out
    one, other = last_weights(tmp_path / "straight"), last_weights(tmp_path / "broken")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert figures(tmp_path / "straight") == figures(tmp_path / "broken")
    assert len(figures(tmp_path / "broken")) == 60


def test_two_processes_that_are_killed_and_stopped_are_continued_by_two_and_by_one(tiny, tmp_path):
    path = tiny(
        model__dropout=0.1, optim__steps=120, runtime__save_every=2, runtime__log_every=2, runtime__workers=1,
        runtime__micro_batch=4, runtime__log_inputs=True, data__source="synthetic:21",
    )  # fmt: skip
    assert drive("pairs", path, tmp_path) == {"stopped": [130, 130]}
    assert figures(tmp_path / "straight") == figures(tmp_path / "two")
    first, other = last_weights(tmp_path / "straight"), last_weights(tmp_path / "two")
    assert all(torch.equal(first[name], other[name]) for name in first)
    straight, one = read(tmp_path / "straight"), read(tmp_path / "one")
    assert len(one) == 120 and all(len(samples) == 8 for samples in one.values())
    assert one == straight
    losses = [[record["loss"] for record in figures(tmp_path / name)] for name in ("straight", "one")]
    assert np.abs(np.subtract(*losses)).max() < 0.01  # the masks of dropout differ between one process and two


def test_twenty_kills_change_nothing(tiny, tmp_path):
    path = tiny(
        model__dropout=0.1, optim__steps=400, runtime__save_every=5, runtime__log_every=5, optim__average=0.9
    )  # fmt: skip
    run_to_its_end(path, tmp_path / "straight")
    kills = drive("kills", path, tmp_path / "killed", 20, 0)
    assert kills["random"] == kills["saving"] == 10 and kills["left_a_draft"] >= 5
    assert figures(tmp_path / "straight") == figures(tmp_path / "killed")
    folders = [checkpoint.complete(tmp_path / name / "checkpoints")[-1][1] for name in ("straight", "killed")]
    for file in ("model", "objective", "state/trained", "state/optimizer"):
        first, other = ((folder / f"{file}.safetensors").read_bytes() for folder in folders)
        assert hashlib.sha256(first).digest() == hashlib.sha256(other).digest(), file
    assert [path.name for path in folders[1].parent.iterdir() if path.name.startswith(".")] == []


def test_two_processes_replace_and_count_broken_images_as_one_does(tiny, tmp_path):
    photos = noise_photos(tmp_path / "photos", 16, broken=(3, 12))
    recipe = tiny(data__source=f"folder:{photos}", data__on_error="replace", optim__steps=6)
    said = {}
    for processes in (1, 2):
        output = tmp_path / str(processes)
        changes = ["runtime.micro_batch=4", "runtime.log_inputs=true", "runtime.log_every=2", "runtime.workers=1"]
        done = command(PRETRAIN, "--recipe", recipe, "--output", output, *changes, processes=processes)
        assert done.returncode == 0, done.stderr
        said[processes] = (
            read(output),
            sorted((line["row"], line["name"]) for line in lines(output / "broken.jsonl")),
            [line["replaced"] for line in lines(output / "metrics.jsonl")],
        )
    assert said[1] == said[2]
    assert [row for row, _ in said[1][1]] == [3, 12] and said[1][2][-1] == 6  # three epochs
    done = command(
        PRETRAIN, "--recipe", recipe, "--output", tmp_path / "limit", "data.max_broken=1", "runtime.micro_batch=4",
        "runtime.workers=0", processes=2,
    )  # fmt: skip
    assert done.returncode != 0 and done.stderr.count("error: 2 images can't be read, more than data.max_broken=1") == 1


def script(folder, text, *arguments, processes=1):
    """Runs a program with the repository's modules; raises where it fails."""
    file = folder / "script.py"
    file.write_text("import sys\n" + text)
    done = command(file, *arguments, processes=processes, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done


CLASSIFY = """
import json
from pathlib import Path
import numpy as np
import torch
from mpp import config, job, sources, wiring
from mpp.console import Console

recipe, output, quiet = config.load_run(sys.argv[1])[0], Path(sys.argv[2]), Console(quiet=True)
accelerator = wiring.start_processes(recipe, quiet)
assert accelerator.num_processes == int(sys.argv[3])
for count in (21, 1):
    source = sources.open_source(f"synthetic:{count}", "validation")
    encoder, mean, std = wiring.initial_encoder(recipe, source.classes, quiet)
    objective = wiring.build_objective(recipe, encoder, source.classes, mean, std)
    model = objective.build(encoder)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    parts = (recipe, accelerator, quiet, output, objective, model, source, range(count), None, source.classes, {})
    one = job.Job(*parts)
    figures, best = job.classify_source(one, source, source.labels)
    rows = job.measure_rows(one, (source, range(count)))
    nothing, again = job.classify_source(one, source, None)
    assert nothing == {} and np.array_equal(best, again) and rows == figures
    name = f"{count}_of_{accelerator.num_processes}_in_{accelerator.process_index}"
    np.savez(output / f"{name}.npz", best=best, labels=source.labels)
    (output / f"{name}.json").write_text(json.dumps(figures))
"""


def test_two_processes_classify_every_image_as_one_does(tmp_path, tiny):
    # 21 images are 11 and 10, in batches of 4 that end with 3 and 2; of one image, the second process has none.
    path = tiny(objective__name="supervised", runtime__micro_batch=4, runtime__workers=1)
    for processes in (1, 2):
        script(tmp_path, CLASSIFY, path, tmp_path, processes, processes=processes)
    for count in (21, 1):
        names = [f"{count}_of_1_in_0", f"{count}_of_2_in_0", f"{count}_of_2_in_1"]
        first, *others = [np.load(tmp_path / f"{name}.npz") for name in names]
        figures, *more = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
        assert first["best"].shape == (count, 5) and first["best"].dtype == np.int32
        assert all(np.array_equal(first["best"], other["best"]) for other in others)
        assert more[0] == more[1] and more[0].keys() == figures.keys()
        assert more[0]["loss"] == pytest.approx(figures["loss"], rel=1e-6)  # logits may round apart in other batches
        assert all(more[0][name] == figures[name] for name in ("accuracy", "top_5_accuracy"))
        right = first["best"] == first["labels"][:, None]
        assert figures["accuracy"] == right[:, 0].sum() / count
        assert figures["top_5_accuracy"] == right.any(1).sum() / count
        assert all(len(set(row)) == 5 for row in first["best"].tolist())


PROBE = """
from pathlib import Path
from mpp import config, run
from mpp.console import Console

for name, probes in (("plain", []), ("probed", ["probe.every=2", "probe.shots=[1, 2]", "probe.neighbors=[3]"])):
    recipe = config.load_run(sys.argv[1], ["runtime.micro_batch=2", "probe.source=synthetic:35", *probes])[0]
    run.pretrain(recipe, Path(sys.argv[2]) / name, Console(quiet=True))
"""


def test_probes_do_not_disturb_two_processes(tmp_path, tiny):
    path = tiny(model__dropout=0.2, optim__steps=4, optim__learning_rate=0.01, runtime__workers=1)
    script(tmp_path, PROBE, path, tmp_path, processes=2)
    plain, probed = (lines(tmp_path / name / "metrics.jsonl") for name in ("plain", "probed"))
    names = ("probe_1_shot_accuracy", "probe_2_shot_accuracy", "probe_3_nn_accuracy")
    assert [[name in line for name in names] for line in probed] == [[False] * 3, [True] * 3, [False] * 3, [True] * 3]
    one, other = last_weights(tmp_path / "plain"), last_weights(tmp_path / "probed")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert [line["loss"] for line in plain] == [line["loss"] for line in probed]
    # One process finds the same in the weights that two have left.
    finished = max((tmp_path / "probed" / "checkpoints").iterdir())
    recipe = config.load_run(path, ["probe.every=1", "probe.source=synthetic:35", "probe.shots=[1, 2]"])[0]
    recipe = dataclasses.replace(recipe, init=str(finished), probe=dataclasses.replace(recipe.probe, neighbors=(3,)))
    encoder, mean, std = wiring.initial_encoder(recipe, None, Console(quiet=True))
    own = wiring.probes_of(
        dataclasses.replace(recipe, probe=dataclasses.replace(recipe.probe, features="patches")), mean, std, 1
    )
    assert own.measure(encoder, Accelerator(cpu=True)) == {name: probed[-1][name] for name in names}


def test_a_tracker_gets_the_numbers_of_the_metrics(tmp_path, tiny):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = ["runtime.tracker=tensorboard", "runtime.log_every=2", "runtime.eval_every=4"]
    done = command(PRETRAIN, "--recipe", tiny(), "--output", tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr
    logged = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in logged] == [2, 4] and "held_out_loss" in logged[1]
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard" / "mpp"))
    found.Reload()
    for name in {name for line in logged for name in line}:
        sent = [(event.step, event.value) for event in found.Scalars(name)]
        expected = [(line["step"], line[name]) for line in logged if name in line]
        assert [step for step, _ in sent] == [step for step, _ in expected]
        assert [value for _, value in sent] == pytest.approx([value for _, value in expected], rel=1e-6)  # 32 bits


def test_a_tracker_is_off_by_default_and_refused_where_its_package_is_missing(tmp_path, tiny):
    missing = next((name for name in ("wandb", "trackio") if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        done = command(PRETRAIN, "--recipe", tiny(), "--output", tmp_path / "run", f"runtime.tracker={missing}")
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert (
            f"runtime.tracker={missing}: the package {missing} is not installed; `pip install {missing}`" in done.stderr
        )
        assert not (tmp_path / "run").exists()
    done = command(PRETRAIN, "--recipe", tiny(), "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert not [file for file in (tmp_path / "run").rglob("*") if "tensorboard" in file.name or "events" in file.name]
