"""mpp/run.py and mpp/train.py: whole small runs, in this process."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import noise_photos
from PIL import Image
from safetensors.torch import load_file
from test_shards import NAMES, write_parquet

from mpp import checkpoint, config, data, errors, job, run, run_folder, sources, wiring
from mpp.console import Console
from mpp.encoders import build_encoder
from mpp.errors import UserError
from mpp.model import MaskedPatchModel
from mpp.objectives import MaskedPatchPrediction
from mpp.optim import lr_at
from mpp.train import Diverged


def pretrain(path, output, *overrides, **flags):
    return run.pretrain(config.load_run(path, overrides)[0], output, Console(), **flags)


def finetune(path, output, *overrides, **flags):
    changes = [
        "objective.name=supervised",
        "optim.name=sgd",
        "optim.weight_decay=0",
        "data.source=synthetic:40",
        *overrides,
    ]
    return run.finetune(config.load_run(path, changes)[0], output, Console(), **flags)


def records(output, *leave_out):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in leave_out} for line in lines]


TIMES = ("seconds", "images_per_second")


def newest(output):
    return checkpoint.complete(output / "checkpoints")[-1][1]


def weights(output):
    files = (newest(output) / name for name in ("model.safetensors", "objective.safetensors"))
    return {name: value for file in files if file.exists() for name, value in load_file(file).items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def hashes(folder):
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_leaves_what_the_interface_says(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "run", "runtime.eval_every=2")
    files = {str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    step = "checkpoints/step_00000004"
    assert files == {
        "config.yaml", "metrics.jsonl", "summary.json", "figures/curves.png", "figures/mosaic.png",
        f"{step}/config.json", f"{step}/model.safetensors", f"{step}/objective.safetensors",
        f"{step}/state/optimizer.safetensors", f"{step}/state/meta.json", f"{step}/SHA256SUMS",
    }  # fmt: skip
    assert (
        config.load_run(str(tmp_path / "run" / "config.yaml"))[0]
        == config.load_run(tiny(), ["runtime.eval_every=2"])[0]
    )
    logged = records(tmp_path / "run")
    assert [record["step"] for record in logged] == [1, 2, 3, 4]
    assert all(key in record for record in logged for key in ("loss", "learning_rate", "images_per_second", "images"))
    assert ["held_out_loss" in record for record in logged] == [False, True, False, True]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["images"] == 32 and summary["steps"] == 4 and summary["processes"] == 1
    assert math.isclose(logged[0]["loss"], math.log(512), rel_tol=1e-6)


def test_a_tiny_run_learns_what_the_entropy_cannot_explain(tiny, tmp_path):
    found = pretrain(
        tiny(), tmp_path / "run", "data.source=demo", "optim.steps=120", "optim.batch_size=64", "runtime.micro_batch=64",
        "runtime.log_every=60", "optim.learning_rate=4e-3", "optim.warmup_steps=10", "model.patch_size=16",
    )["figures"]  # fmt: skip
    assert found["held_out_loss"] < found["held_out_target_entropy"] - 0.3
    assert found["held_out_accuracy_masked"] > found["held_out_most_frequent_accuracy"]


def test_one_step_is_what_torch_does_by_hand(tiny, tmp_path):
    # Two micro-batches, SGD, clipping: the update of one step worked out without the loop.
    path = tiny(
        optim__name="sgd", optim__steps=2, optim__warmup_steps=0, optim__clip_norm=0.05, optim__weight_decay=0.1
    )
    pretrain(
        path,
        tmp_path / "run",
        "runtime.micro_batch=4",
        "runtime.save_every=1",
        "optim.learning_rate=0.5",
        "runtime.keep=9",
    )
    recipe = config.load_run(path)[0]
    torch.manual_seed(0)
    encoder = build_encoder("vit_tiny_patch16_224", image_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    objective = MaskedPatchPrediction(0, 8, 16, 0.5, "mean_color", (0.5,) * 3, (0.5,) * 3)
    model = objective.build(encoder)
    assert isinstance(model, MaskedPatchModel)
    source = sources.open_source("synthetic:24", "train")
    samples = data.TrainingSamples(
        source, range(24), 0, data.View(32, area=recipe.data.crop_area), objective.per_sample
    )
    epochs, places = samples.order().at(np.arange(8))
    batch = data._collate([samples[key] for key in zip(epochs, places, strict=True)])
    loss, _ = objective.loss(model, batch)  # all eight at once: the mean of two equal halves
    loss.backward()
    norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
    logged = records(tmp_path / "run")[0]
    assert math.isclose(logged["grad_norm"], norm, rel_tol=1e-5) and norm > 0.05  # the norm before clipping
    assert math.isclose(logged["loss"], loss.item(), rel_tol=1e-6)
    saved = checkpoint.complete(tmp_path / "run" / "checkpoints")[0][1]
    after = {
        **{f"encoder.{k}": v for k, v in load_file(saved / "model.safetensors").items()},
        **load_file(saved / "objective.safetensors"),
    }
    moved = 0.0
    for name, parameter in model.named_parameters():
        kernel = parameter.dim() > 1 and name.split(".")[-1] not in ("pos_embed", "cls_token")
        gradient = parameter.grad * (0.05 / (norm + 1e-6))
        moved += gradient.square().sum().item()
        expected = parameter - 0.5 * (gradient + (0.1 * parameter if kernel else 0))
        assert torch.allclose(after[name], expected, atol=1e-6), name
    assert math.isclose(math.sqrt(moved), 0.05, rel_tol=0.01)  # the norm that the optimiser used


def test_accumulation_equals_one_large_batch(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "whole")
    pretrain(tiny(), tmp_path / "parts", "runtime.micro_batch=2")
    for one, other in zip(records(tmp_path / "whole"), records(tmp_path / "parts"), strict=True):
        assert math.isclose(one["loss"], other["loss"], rel_tol=1e-5)
        assert math.isclose(one["grad_norm"], other["grad_norm"], rel_tol=1e-4)
        assert one["learning_rate"] == other["learning_rate"] and one["images"] == other["images"]


def test_the_logged_learning_rate_is_the_schedule_by_steps(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "run", "runtime.micro_batch=2")
    expected = [lr_at(step, base=1e-3, steps=4, warmup_steps=1, schedule="cosine") for step in range(4)]
    assert [record["learning_rate"] for record in records(tmp_path / "run")] == expected


def test_clipping_off_leaves_the_gradient(tiny, tmp_path):
    options = ["optim.name=sgd", "optim.steps=2", "optim.warmup_steps=0", "optim.weight_decay=0"]
    pretrain(tiny(), tmp_path / "off", *options, "optim.clip_norm=0")
    pretrain(tiny(), tmp_path / "far", *options, "optim.clip_norm=1e6")
    assert same(weights(tmp_path / "off"), weights(tmp_path / "far"))


def test_same_seed_same_run_and_every_seed_counts(tiny, tmp_path):
    for name, seed, workers in [("a", 0, 0), ("b", 0, 2), ("c", 1, 0)]:
        pretrain(tiny(model__dropout=0.1), tmp_path / name, f"seed={seed}", f"runtime.workers={workers}")
    assert records(tmp_path / "a", *TIMES) == records(tmp_path / "b", *TIMES)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert [r["loss"] for r in records(tmp_path / "a")] != [r["loss"] for r in records(tmp_path / "c")]


def test_evaluating_does_not_disturb_the_run(tiny, tmp_path):
    pretrain(tiny(model__dropout=0.1), tmp_path / "often", "runtime.eval_every=1")
    pretrain(tiny(model__dropout=0.1), tmp_path / "never")
    assert same(weights(tmp_path / "often"), weights(tmp_path / "never"))


@pytest.mark.parametrize("stop", [1, 3])
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(tiny, tmp_path, monkeypatch, stop):
    path = tiny(model__dropout=0.1, optim__steps=6, runtime__log_every=2)
    pretrain(path, tmp_path / "straight")
    count = iter(range(100))
    with monkeypatch.context() as patch:
        # A signal that arrives in the given step, in the middle of a window of logging.
        original = job._stop_signals

        class Now(list):
            def __bool__(self):
                return next(count) == stop - 1

        from contextlib import contextmanager

        @contextmanager
        def signals():
            with original():
                yield Now()

        patch.setattr(job, "_stop_signals", signals)
        with pytest.raises(
            errors.Stopped, match=f"stopped at step {stop} of 6 and saved in .*; the same command continues"
        ):
            pretrain(path, tmp_path / "broken")
    assert newest(tmp_path / "broken").name == f"step_0000000{stop}"
    pretrain(path, tmp_path / "broken")
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "broken"))
    assert records(tmp_path / "straight", *TIMES) == records(tmp_path / "broken", *TIMES)


def test_signals_stop_once_and_only_a_later_ctrl_c_ends_at_once(monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with job._stop_signals() as received:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # as a launcher passes them on
            os.kill(os.getpid(), number)
        assert received == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
        monkeypatch.setattr(job, "_SAME_SIGNAL_SECONDS", -1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_metrics_after_the_checkpoint_are_dropped_and_a_half_line_too(tiny, tmp_path):
    path = tiny()
    pretrain(path, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')
    pretrain(path, tmp_path / "run")
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_finished_run_is_not_trained_again(tiny, tmp_path, capsys):
    first = pretrain(tiny(), tmp_path / "run")
    before = hashes(tmp_path / "run")
    assert pretrain(tiny(), tmp_path / "run", "runtime.micro_batch=4") == first
    assert "this run is finished" in capsys.readouterr().out
    assert hashes(tmp_path / "run") == before


def test_another_run_in_the_folder_is_refused_and_kept(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "run")
    before = hashes(tmp_path / "run")
    with pytest.raises(UserError) as refusal:
        pretrain(tiny(), tmp_path / "run", "optim.steps=5", "seed=3")
    message = str(refusal.value)
    assert f"--output {tmp_path / 'run'} holds another run" in message and "--overwrite" in message
    assert "optim.steps: 4 there, 5 here" in message and "seed: 0 there, 3 here" in message
    assert hashes(tmp_path / "run") == before
    pretrain(tiny(), tmp_path / "run", "optim.steps=5", overwrite=True)
    assert len(records(tmp_path / "run")) == 5


def test_a_folder_with_other_files_is_not_taken(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"holds files but no run \(thesis.tex\)"):
            pretrain(tiny(), tmp_path / "run", overwrite=overwrite)
    assert hashes(tmp_path / "run") == {str(tmp_path / "run" / "thesis.tex"): b"precious"}
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file; name a folder"):
        pretrain(tiny(), tmp_path / "file")


def test_overwrite_takes_only_runs_of_this_package(tiny, tmp_path):
    other = tmp_path / "hydra"
    (other / "checkpoints").mkdir(parents=True)
    (other / "config.yaml").write_text("defaults:\n- model: resnet\n")
    (other / "checkpoints" / "precious.pt").write_bytes(b"weeks of work")
    before = hashes(other)
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds no run of this package .*; name another folder"):
            pretrain(tiny(), other, overwrite=overwrite)
    (tmp_path / "figures_only" / "figures").mkdir(parents=True)
    with pytest.raises(UserError, match="holds files but no run"):
        pretrain(tiny(), tmp_path / "figures_only", overwrite=True)
    assert hashes(other) == before


def test_a_fine_tuning_does_not_take_the_folder_of_its_init(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "run")
    before = hashes(tmp_path / "run")
    for init in (tmp_path / "run", newest(tmp_path / "run")):
        with pytest.raises(UserError, match=r"holds init=.*, which must stay"):
            finetune(tiny(), tmp_path / "run", f"init={init}", overwrite=True)
    assert hashes(tmp_path / "run") == before


def test_a_folder_of_the_other_kind_is_refused(tiny, tmp_path):
    path = tiny(objective__name="supervised", optim__learning_rate=0.01)
    pretrain(path, tmp_path / "run")
    with pytest.raises(UserError, match="kind of run: pretrain there, finetune here"):
        run.finetune(config.load_run(path)[0], tmp_path / "run", Console())


def test_data_that_changed_is_noticed(tiny, tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    for number in range(4):
        Image.effect_noise((40, 40), 90).convert("RGB").save(tmp_path / "set" / f"{number}.png")
    source = f"data.source=folder:{tmp_path / 'set'}"
    pretrain(tiny(), tmp_path / "run", source)
    Image.new("RGB", (40, 40)).save(tmp_path / "set" / "more.png")
    message = r"what it read has changed since \(data.source\)"
    with pytest.raises(UserError, match=message):  # finished
        pretrain(tiny(), tmp_path / "run", source)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(UserError, match=message):  # to be continued
        pretrain(tiny(), tmp_path / "run", source)


def test_an_init_that_changed_is_noticed(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "pre")
    options = [f"init={tmp_path / 'pre'}", "optim.learning_rate=0.01"]
    finetune(tiny(), tmp_path / "tune", *options)
    finetune(tiny(), tmp_path / "tune", *options)
    pretrain(tiny(), tmp_path / "pre", "seed=1", overwrite=True)
    with pytest.raises(UserError, match=r"what it read has changed since \(init\)"):
        finetune(tiny(), tmp_path / "tune", *options)


def test_a_sweep_that_continues_notices_a_changed_init(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "pre")
    options = [f"init={tmp_path / 'pre'}", "optim.learning_rate=[0.01, 0.1]"]
    finetune(tiny(), tmp_path / "tune", *options)
    shutil.rmtree(tmp_path / "tune" / "checkpoints")  # as if stopped between the sweep and the final training
    (tmp_path / "tune" / "summary.json").unlink()
    pretrain(tiny(), tmp_path / "pre", "seed=1", overwrite=True)
    with pytest.raises(
        UserError, match=r"tune holds a run of the same recipe, but what it read has changed since \(init\)"
    ):
        finetune(tiny(), tmp_path / "tune", *options)


def test_runs_of_different_precision_in_one_process(tiny, tmp_path):
    for precision in ("bf16", "fp32", "bf16"):
        pretrain(tiny(), tmp_path / f"{precision}", f"runtime.precision={precision}")
    losses = [records(tmp_path / precision)[-1]["loss"] for precision in ("bf16", "fp32")]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.05


def test_accumulation_told_by_the_environment_changes_nothing(tiny, tmp_path, monkeypatch):
    pretrain(tiny(), tmp_path / "plain")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    pretrain(tiny(), tmp_path / "told")
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "told"))


def test_a_run_without_a_checkpoint_says_that_it_starts_again(tiny, tmp_path, capsys):
    pretrain(tiny(), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "summary.json").unlink()
    pretrain(tiny(), tmp_path / "run")
    assert "holds a run without a complete checkpoint: it starts again at step 0" in capsys.readouterr().out


def test_divergence_stops_and_leaves_only_finite_checkpoints(tiny, tmp_path):
    with pytest.raises(Diverged, match=r"loss=.* at step \d+, with learning rate .*: the run diverged"):
        pretrain(
            tiny(optim__steps=40, optim__name="sgd"), tmp_path / "run", "optim.learning_rate=1e9", "optim.clip_norm=0",
            "runtime.save_every=1", "optim.warmup_steps=0",
        )  # fmt: skip
    for _, path in checkpoint.complete(tmp_path / "run" / "checkpoints"):
        assert all(value.isfinite().all() for value in load_file(path / "model.safetensors").values())
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.image_size=36"], "data.image_size=36 is not a multiple of the patch size 8 (4 border pixels would be dropped); use 32 or 40"),
        (["runtime.micro_batch=3"], "optim.batch_size=8 is not a multiple of runtime.micro_batch=3 x 1 process; use runtime.micro_batch=2"),
        (["runtime.micro_batch=16"], "use runtime.micro_batch=8"),
        (["data.source=folder:/nowhere"], "data.source=folder:/nowhere: no such folder"),
        (["init=/nowhere"], "init=/nowhere: not found"),
        (["objective.corruption=0.01"], "objective.corruption=0.01 of 16 patches corrupts 0"),
        (["objective.target=colors_4x4", "model.patch_size=2"], "objective.target=colors_4x4 needs a patch size that 4 divides, not 2"),
        (["optim.learning_rate=[1e-3, 1e-2]"], "a list, which is for fine-tuning"),
        (["model.name=vit_nano"], "no such model"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_written(tiny, tmp_path, overrides, words):
    with pytest.raises(UserError) as refusal:
        pretrain(tiny(), tmp_path / "run", *overrides)
    assert words in str(refusal.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("target", ["mean_color", "colors_4x4", "pixels"])
def test_every_target_trains_and_draws_its_picture(tiny, tmp_path, target):
    found = pretrain(tiny(), tmp_path / "run", f"objective.target={target}", "runtime.eval_every=4")["figures"]
    assert math.isfinite(found["held_out_loss"])
    with Image.open(tmp_path / "run" / "figures" / "mosaic.png") as picture:
        assert picture.width > 400 and len(picture.convert("RGB").getcolors(10**6)) > 50


def test_a_set_of_one_color_warns(tiny, tmp_path, capsys):
    (tmp_path / "grey").mkdir()
    for number in range(3):
        Image.new("RGB", (40, 40), (90, 90, 90)).save(tmp_path / "grey" / f"{number}.png")
    pretrain(tiny(), tmp_path / "run", f"data.source=folder:{tmp_path / 'grey'}")
    out = capsys.readouterr().out
    assert "warning: every target is one and the same colour class" in out
    assert "has no split validation" in out  # and so no held-out figures, which is said


def test_inputs_are_logged_on_request(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "run", "runtime.log_inputs=true", "runtime.micro_batch=4")
    lines = [json.loads(line) for line in (tmp_path / "run" / "inputs" / "process_0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 3, 3, 4, 4]
    read = [index for line in lines for index in line["index"]]
    assert sorted(read[:24]) == list(range(24))


# ---- supervised, and fine-tuning


def test_supervised_pretraining_names_its_classes(tiny, tmp_path):
    found = pretrain(tiny(objective__name="supervised"), tmp_path / "run", "runtime.eval_every=4")["figures"]
    assert "held_out_accuracy" in found and "held_out_top_5_accuracy" in found
    saved = json.loads((newest(tmp_path / "run") / "config.json").read_text())
    assert saved["num_classes"] == 10 and saved["label_names"][3] == "class 3"


def test_supervised_needs_classes(tiny, tmp_path):
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "flat" / "a.png")
    with pytest.raises(UserError, match="no classes in split train"):
        pretrain(tiny(objective__name="supervised"), tmp_path / "run", f"data.source=folder:{tmp_path / 'flat'}")


def test_finetuning_chooses_on_held_out_rows_and_reads_the_test_split_once(tiny, tmp_path, monkeypatch):
    pretrain(tiny(), tmp_path / "mpp")
    measured, measure_rows, classify_source = [], run.measure_rows, run.classify_source

    def noted(one, held_out):
        measured.append((one.folder.name, len(held_out[1])))
        return measure_rows(one, held_out)

    def noted_test(one, source, labels):
        measured.append((one.folder.name, len(source)))
        return classify_source(one, source, labels)

    monkeypatch.setattr(run, "measure_rows", noted)
    monkeypatch.setattr(run, "classify_source", noted_test)
    rates = "optim.learning_rate=[0.001, 0.3, 0.01]"
    found = finetune(
        tiny(), tmp_path / "tune", rates, f"init={tmp_path / 'mpp'}", "data.image_size=48", "optim.steps=30", arm="mpp"
    )
    assert measured == [
        ("learning_rate_0.001", 10), ("learning_rate_0.3", 10), ("learning_rate_0.01", 10), ("tune", 40),
    ]  # fmt: skip
    tried = found[0]["tried"]
    best = max(tried, key=lambda rate: (tried[rate]["accuracy"], -tried[rate]["loss"]))
    accuracy = next(record for record in found if record["metric"] == "accuracy")
    assert f"{accuracy['learning_rate']:g}" == best
    assert accuracy["arm"] == "mpp" and accuracy["images"] == 40 and accuracy["train_images"] == 40
    assert json.loads((tmp_path / "tune" / "results.json").read_text()) == found
    assert (tmp_path / "tune" / "report.md").is_file()
    # A second call reads what is there.
    assert (
        finetune(
            tiny(),
            tmp_path / "tune",
            rates,
            f"init={tmp_path / 'mpp'}",
            "data.image_size=48",
            "optim.steps=30",
            arm="mpp",
        )
        == found
    )
    assert len(measured) == 4


def test_the_tests_figure_is_that_of_the_saved_weights(tiny, tmp_path):
    import timm

    found = finetune(
        tiny(),
        tmp_path / "tune",
        "optim.learning_rate=0.1",
        "optim.steps=120",
        "data.flip=false",
        "runtime.log_every=60",
    )
    model = timm.create_model(f"local-dir:{newest(tmp_path / 'tune')}", pretrained=True).eval()
    test = sources.open_source("synthetic:40", "validation")
    images = torch.from_numpy(np.stack([data.whole_image(test.picture(row), 32) for row in range(40)]))
    with torch.no_grad():
        logits = model((images.permute(0, 3, 1, 2).float() - 127.5) / 127.5)
    labels = torch.from_numpy(test.labels)
    figures = {record["metric"]: record["value"] for record in found}
    assert figures["accuracy"] == (logits.argmax(1) == labels).double().mean().item()
    assert math.isclose(figures["loss"], F.cross_entropy(logits, labels).item(), rel_tol=1e-5)
    assert figures["accuracy"] > 0.3  # ten classes


def test_head_position_and_statistics_on_the_way_to_finetuning(tiny, tmp_path, capsys):
    pretrain(tiny(objective__name="supervised"), tmp_path / "pre")
    saved = newest(tmp_path / "pre") / "config.json"
    changed = json.loads(saved.read_text())
    changed["pretrained_cfg"]["mean"] = [0.4, 0.4, 0.4]
    saved.write_text(json.dumps(changed))
    finetune(tiny(), tmp_path / "tune", "optim.learning_rate=0.01", f"init={tmp_path / 'pre'}", "data.image_size=48")
    out = capsys.readouterr().out
    assert "dropped head.bias, head.weight" in out
    assert "pixel mean 0.4" in out
    assert "position embeddings resized from 4 x 4 to 6 x 6" in out
    # The statistics stay with the weights.
    assert json.loads((newest(tmp_path / "tune") / "config.json").read_text())["pretrained_cfg"]["mean"] == [
        0.4,
        0.4,
        0.4,
    ]


def test_a_rate_that_diverges_loses_and_all_that_diverge_stop(tiny, tmp_path):
    options = ["optim.clip_norm=0", "optim.steps=30", "optim.warmup_steps=0"]
    found = finetune(tiny(), tmp_path / "one", "optim.learning_rate=[1e12, 0.01]", *options)
    assert found[0]["learning_rate"] == 0.01 and found[0]["tried"]["1e+12"]["diverged"]
    with pytest.raises(Diverged, match=re.escape(f"{tmp_path / 'all'}: every learning rate of 1e+12, 1e+13 diverged")):
        finetune(tiny(), tmp_path / "all", "optim.learning_rate=[1e12, 1e13]", *options)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective.name=mpp"], "fine-tuning needs supervised"),
        (["data.holdout=0", "optim.learning_rate=[1, 2]"], "data.holdout=0 leaves nothing to choose"),
        (["data.per_class=99"], "data.per_class=99: class class 0 has 4 images"),
        (["data.eval_split=test", "data.source=demo"], "the splits train and validation, not test"),
        (
            ["data.source=folder:{labelled}"],
            "has no split validation to test on; make the folders train/CLASS and validation/CLASS",
        ),
    ],
)
def test_what_finetuning_refuses(tiny, tmp_path, overrides, words):
    for label in ("a", "b"):
        (tmp_path / "labelled" / label).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "labelled" / label / "1.png")
    overrides = [override.format(labelled=tmp_path / "labelled") for override in overrides]
    with pytest.raises(UserError) as refusal:
        finetune(tiny(), tmp_path / "tune", *overrides)
    assert words in str(refusal.value)
    assert not (tmp_path / "tune").exists()


def test_a_checkpoint_of_another_shape_is_refused_before_anything_is_written(tiny, tmp_path):
    pretrain(tiny(), tmp_path / "pre")
    with pytest.raises(UserError, match="unexpected: blocks.1.norm1.weight"):
        finetune(tiny(), tmp_path / "tune", f"init={tmp_path / 'pre'}", "model.depth=1")
    assert not (tmp_path / "tune").exists()


def test_classes_that_differ_between_splits_are_refused(tiny, tmp_path):
    for name in (
        "train/a/1.png",
        "train/a/2.png",
        "train/b/1.png",
        "train/b/2.png",
        "validation/a/1.png",
        "validation/c/1.png",
    ):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "set" / name)
    with pytest.raises(UserError, match=r"only in the first: \['b'\], only in the second: \['c'\]"):
        finetune(tiny(), tmp_path / "tune", f"data.source=folder:{tmp_path / 'set'}")


def test_two_classes_have_no_top_5(tiny, tmp_path):
    for split in ("train", "validation"):
        for label in ("a", "b"):
            for number in range(3):
                path = tmp_path / "set" / split / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                shade = 250 if split == "train" else 230
                Image.new("RGB", (40, 40), (shade, 0, 0) if label == "a" else (0, 0, shade)).save(path)
    found = finetune(
        tiny(), tmp_path / "tune", f"data.source=folder:{tmp_path / 'set'}", "optim.learning_rate=0.1", "optim.steps=20"
    )
    assert {record["metric"]: record["value"] for record in found if record["metric"] != "loss"} == {"accuracy": 1.0}


# ---- what a recipe costs


def test_dry_run_of_the_papers_recipe():
    text = wiring.dry_run(config.load_run("mpp_b16")[0])
    # 12 blocks of (4 D^2 + 2 D M) + 2 N D a token, the patch embedding, and the head on 98 patches; times two.
    tokens, width, mlp = 197, 768, 3072
    blocks = 12 * tokens * (4 * width**2 + 2 * width * mlp + 2 * tokens * width)
    flops = 2 * (blocks + 196 * width * 768 + 98 * width * 512)
    assert f"{flops / 1e9:.2f} GFLOPs an image" in text
    assert "85,798,656 of them the encoder" in text
    assert f"{85_798_656 + 768 + 768 * 512 + 512:,} in all" in text
    assert "1,000,000 of 4,096 images" in text and "4,096,000,000" in text
    assert "learning_rate: 0.0002" in text


def test_dry_run_refuses_what_a_run_would(tiny):
    with pytest.raises(UserError, match="not a multiple of the patch size"):
        wiring.dry_run(config.load_run(tiny(), ["data.image_size=36"])[0])


# ---- the newest pre-training


def test_the_newest_finished_pretraining_is_found(tiny, tmp_path):
    with pytest.raises(UserError, match="no finished pre-training below"):
        run_folder.newest_pretraining(tmp_path / "runs", [])
    for name, when in [("old", "2020"), ("new", "2030")]:
        pretrain(tiny(finetune="finetune_demo"), tmp_path / "runs" / name)
        file = tmp_path / "runs" / name / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "finished": when}))
    finetune(tiny(), tmp_path / "runs" / "tuned", "optim.learning_rate=0.01")
    shape = ["model.embed_dim=32", "model.depth=2", "model.num_heads=2"]
    found = run_folder.newest_pretraining(tmp_path / "runs", [])
    assert found == (tmp_path / "runs" / "new", "finetune_demo", shape)
    found = run_folder.newest_pretraining(tmp_path, [f"init={tmp_path / 'runs' / 'old'}", "model.depth=3"])
    assert found == (None, "finetune_demo", ["model.embed_dim=32", "model.num_heads=2"])
    pretrain(tiny(), tmp_path / "unnamed")
    with pytest.raises(UserError, match="names no fine-tuning recipe"):
        run_folder.newest_pretraining(tmp_path, [f"init={tmp_path / 'unnamed'}"])


# ---- broken images, and sources in shards


def folder_with_two_broken_images(tmp_path):
    return f"data.source=folder:{noise_photos(tmp_path / 'photos', 24, broken=(5, 11))}"


def test_a_broken_image_stops_the_run_by_name_and_what_was_saved_stays(tiny, tmp_path):
    source = folder_with_two_broken_images(tmp_path)
    with pytest.raises(UserError, match=r"photos/(05|11).png can't be read as an image: .*; repair or remove it"):
        pretrain(tiny(), tmp_path / "run", source, "optim.steps=6", "runtime.save_every=1")
    assert all(record["step"] < 3 for record in records(tmp_path / "run"))  # the first epoch meets both


def test_broken_images_are_replaced_listed_and_counted(tiny, tmp_path, capsys):
    changes = [
        folder_with_two_broken_images(tmp_path),
        "data.on_error=replace",
        "optim.steps=9",
        "runtime.log_every=3",
        "runtime.log_inputs=true",
    ]
    pretrain(tiny(), tmp_path / "run", *changes)
    listed = [json.loads(line) for line in (tmp_path / "run" / "broken.jsonl").read_text().splitlines()]
    assert sorted(line["row"] for line in listed) == [5, 11]
    assert {line["name"] for line in listed} == {str(tmp_path / "photos" / f"{row:02d}.png") for row in (5, 11)}
    assert all("can't be read as an image" in line["error"] for line in listed)
    assert capsys.readouterr().out.count("replaced by another image: ") == 2  # each named once
    read = [json.loads(line) for line in (tmp_path / "run" / "inputs" / "process_0.jsonl").read_text().splitlines()]
    rows = [row for line in read for row in line["index"]]
    assert len(rows) == 9 * 8 and not {5, 11} & set(rows)
    # Three epochs of 24 samples, in each of which two were to be read from the broken ones.
    assert records(tmp_path / "run")[-1]["replaced"] == 6
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["figures"]["replaced"] == 6


def test_a_stopped_run_goes_on_counting_what_it_replaced(tiny, tmp_path, monkeypatch):
    source = folder_with_two_broken_images(tmp_path)
    changes = [source, "data.on_error=replace", "optim.steps=9", "runtime.log_every=3"]
    pretrain(tiny(), tmp_path / "straight", *changes)

    real = data.load

    def stops_after_four(*arguments):
        for count, batch in enumerate(real(*arguments)):
            if count == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(data, "load", stops_after_four)
    with pytest.raises(errors.Stopped):
        pretrain(tiny(), tmp_path / "stopped", *changes)
    monkeypatch.setattr(data, "load", real)
    pretrain(tiny(), tmp_path / "stopped", *changes)
    assert records(tmp_path / "stopped", *TIMES) == records(tmp_path / "straight", *TIMES)
    assert same(weights(tmp_path / "stopped"), weights(tmp_path / "straight"))


def test_a_run_that_broken_images_have_stopped_goes_on_in_each_way_that_it_names(tiny, tmp_path):
    source = folder_with_two_broken_images(tmp_path)
    saves = ["runtime.log_every=1", "runtime.save_every=1", "optim.steps=6"]
    with pytest.raises(UserError, match=r"With data.on_error=replace the run continues with another in its place"):
        pretrain(tiny(), tmp_path / "run", source, *saves)
    with pytest.raises(UserError, match=r"Repair them or raise data.max_broken; the same command then continues"):
        pretrain(tiny(), tmp_path / "run", source, *saves, "data.on_error=replace", "data.max_broken=0")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    listed = tmp_path / "other" / "broken.jsonl"
    listed.write_text(listed.read_text() + '{"row": 1')  # half a line of a run that was killed
    pretrain(tiny(), tmp_path / "other", source, *saves, "data.on_error=replace", "data.max_broken=2")
    for row in (5, 11):
        Image.effect_noise((40, 40), 60 + row).convert("RGB").save(tmp_path / "photos" / f"{row:02d}.png")
    found = pretrain(tiny(), tmp_path / "run", source, *saves, "data.on_error=replace", "data.max_broken=0")
    assert found["steps"] == 6 and (tmp_path / "run" / "broken.jsonl").read_text() == ""


def test_a_broken_held_out_image_does_not_cost_the_training(tiny, tmp_path):
    for split, count in (("train", 16), ("validation", 4)):
        for row in range(count):
            file = tmp_path / "photos" / split / "a" / f"{row:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((40, 40), 60 + row).convert("RGB").save(file)
    whole = file.read_bytes()
    file.write_bytes(b"half")
    source = f"data.source=folder:{tmp_path / 'photos'}"
    with pytest.raises(UserError, match=r"validation/a/03.png can't be read"):
        pretrain(tiny(), tmp_path / "run", source)
    assert newest(tmp_path / "run").name == "step_00000004"
    file.write_bytes(whole)
    found = pretrain(tiny(), tmp_path / "run", source)
    straight = pretrain(tiny(), tmp_path / "straight", source)
    assert found["figures"] == straight["figures"] and "held_out_loss" in found["figures"]
    assert records(tmp_path / "run", *TIMES) == records(tmp_path / "straight", *TIMES)


def test_a_defect_ends_a_run_with_loader_processes(tiny, tmp_path):
    script = (
        "import sys\nfrom mpp import objectives, config, run\nfrom mpp.console import Console\nfrom pathlib import Path\n"
        "def broken(*_):\n    raise RuntimeError('a defect')\n"
        "objectives.MaskedPatchPrediction.loss = broken\n"
        "run.pretrain(config.load_run(sys.argv[1], ['runtime.workers=1'])[0], Path(sys.argv[2]), Console())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tiny(), tmp_path / "run"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and "RuntimeError: a defect" in done.stderr


def test_labels_that_can_not_be_used_are_no_matter_to_mpp(tiny, tmp_path):
    write_parquet(tmp_path / "set" / "train-0.parquet", range(8), [[1], [2, 0]] * 4, names=None)
    write_parquet(tmp_path / "set" / "validation-0.parquet", range(8), [[1], [2, 0]] * 4, names=None)
    pretrain(tiny(), tmp_path / "run", f"data.source=parquet:{tmp_path / 'set'}/*.parquet", "optim.steps=2")
    assert (tmp_path / "run" / "figures" / "mosaic.png").is_file()


def test_more_broken_images_than_allowed_stop_the_run(tiny, tmp_path):
    source = folder_with_two_broken_images(tmp_path)
    with pytest.raises(UserError, match=r"2 images can't be read, more than data.max_broken=1; they are listed in"):
        pretrain(tiny(), tmp_path / "run", source, "data.on_error=replace", "data.max_broken=1", "runtime.log_every=4")
    assert len((tmp_path / "run" / "broken.jsonl").read_text().splitlines()) == 2


def labelled_parquets(tmp_path, validation_names=NAMES):
    for part in range(3):
        numbers = range(8 * part, 8 * part + 8)
        labels = [number % 3 for number in numbers]
        write_parquet(tmp_path / "set" / f"train-{part}.parquet", numbers, labels)
    write_parquet(tmp_path / "set" / "validation-0.parquet", range(24, 30), [0, 1, 2] * 2, names=validation_names)
    return f"data.source=parquet:{tmp_path / 'set'}/*.parquet"


def test_a_source_in_shards_is_trained_and_its_classes_are_written_down(tiny, tmp_path, capsys):
    source = labelled_parquets(tmp_path)
    pretrain(tiny(), tmp_path / "mpp", source, "data.shuffle_shards=2")
    assert not (tmp_path / "mpp" / "classes.json").exists()
    changes = [source, "objective.name=supervised", "runtime.workers=2"]
    pretrain(tiny(), tmp_path / "run", *changes)
    assert "24 images, 3 classes" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == NAMES
    assert json.loads((newest(tmp_path / "run") / "config.json").read_text())["label_names"] == NAMES
    (tmp_path / "run" / "summary.json").unlink()  # as if it were not finished yet
    write_parquet(
        tmp_path / "set" / "train-0.parquet", range(8), [number % 3 for number in range(8)], names=NAMES[::-1]
    )
    with pytest.raises(UserError):
        pretrain(tiny(), tmp_path / "run", *changes)


def test_the_same_classes_in_another_order_are_refused(tiny, tmp_path):
    source = labelled_parquets(tmp_path, NAMES[::-1])
    with pytest.raises(UserError, match=r"train and validation have the same classes in another order"):
        finetune(tiny(), tmp_path / "tuned", source)
    assert not (tmp_path / "tuned").exists()


def test_an_init_that_knows_the_classes_in_another_order_is_refused(tiny, tmp_path):
    source = labelled_parquets(tmp_path)
    pretrain(tiny(), tmp_path / "run", source, "objective.name=supervised")
    for part in ("train-0", "train-1", "train-2", "validation-0"):
        write_parquet(tmp_path / "set" / f"{part}.parquet", range(8), [0, 1, 2] * 2 + [0, 1], names=NAMES[::-1])
    with pytest.raises(UserError, match=r"another order, so that label 0 means red there and blue here"):
        finetune(tiny(), tmp_path / "tuned", source, f"init={tmp_path / 'run'}")
    assert not (tmp_path / "tuned").exists()


def test_a_cache_that_can_not_hold_two_windows_is_refused(tiny, tmp_path):
    source = labelled_parquets(tmp_path)
    with pytest.raises(UserError, match=r"runtime.cache_gb=1e-05 can't hold two windows of data.shuffle_shards=8"):
        pretrain(tiny(), tmp_path / "run", source, "runtime.cache_gb=1e-5")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("crop", ["square", "short_side"])
def test_every_crop_trains(tiny, tmp_path, crop):
    pretrain(tiny(), tmp_path / crop, f"data.crop={crop}", "data.eval_crop=center", "data.resize=40", "optim.steps=2")


# ---- predictions, and the choice of a learning rate


def test_the_predictions_of_a_fine_tuning_give_its_figures(tiny, tmp_path):
    import timm

    results = finetune(tiny(), tmp_path / "tune", "optim.learning_rate=0.1", "optim.steps=40", data_set="made")
    found = run_folder.read_arrays(tmp_path / "tune" / "predictions.npz")
    assert set(found) == {"test", "test_labels"} and found["test"].dtype == np.int32
    test = sources.open_source("synthetic:40", "validation")
    assert found["test_labels"].tolist() == test.labels.tolist()
    model = timm.create_model(f"local-dir:{newest(tmp_path / 'tune')}", pretrained=True).eval()
    images = torch.from_numpy(np.stack([data.whole_image(test.picture(row), 32) for row in range(40)]))
    with torch.no_grad():
        logits = model((images.permute(0, 3, 1, 2).float() - 127.5) / 127.5)
    assert found["test"].tolist() == logits.argsort(1, descending=True)[:, :5].tolist()
    right = [[label == guess for guess in row] for row, label in zip(found["test"], test.labels, strict=True)]
    records = {record["metric"]: record for record in results}
    assert records["accuracy"]["value"] == sum(row[0] for row in right) / 40
    assert records["top_5_accuracy"]["value"] == sum(any(row) for row in right) / 40
    assert records["accuracy"]["value"] < records["top_5_accuracy"]["value"]
    assert {(record["data_set"], record["images"]) for record in results} == {("made", 40)}


def test_an_unfinished_fine_tuning_leaves_no_predictions_and_an_overwritten_one_new_ones(tiny, tmp_path):
    finetune(tiny(), tmp_path / "tune", "optim.learning_rate=0.1")
    file = tmp_path / "tune" / "predictions.npz"
    file.write_bytes(b"old")
    finetune(tiny(), tmp_path / "tune", "optim.learning_rate=0.1")  # finished: nothing is written
    assert file.read_bytes() == b"old"
    finetune(tiny(), tmp_path / "tune", "optim.learning_rate=0.1", overwrite=True)
    assert run_folder.read_arrays(file)["test"].shape == (40, 5)


def swept(path, output, *overrides, **flags):
    changes = ["objective.name=supervised", "optim.name=sgd", "optim.weight_decay=0", "data.source=synthetic:40"]
    return run.sweep(config.load_run(path, [*changes, *overrides])[0], output, Console(), **flags)


WILD = ["optim.clip_norm=0", "optim.steps=30", "optim.warmup_steps=0"]


def test_a_sweep_chooses_among_the_rates_that_do_not_diverge(tiny, tmp_path, monkeypatch):
    tried = swept(tiny(), tmp_path / "sweep", "optim.learning_rate=[1e12, 0.05, 0.001]", *WILD)
    assert {rate: numbers["diverged"] for rate, numbers in tried.items()} == {
        "1e+12": True, "0.05": False, "0.001": False
    }  # fmt: skip
    best = max(("0.05", "0.001"), key=lambda rate: (tried[rate]["accuracy"], -tried[rate]["loss"]))
    assert run.best_rate([tried], "an arm") == float(best)
    assert all(numbers["images"] == 30 * 8 and numbers["processes"] == 1 for numbers in tried.values())
    left = {str(file.relative_to(tmp_path / "sweep")) for file in (tmp_path / "sweep").rglob("*") if file.is_file()}
    rates = ("1e+12", "0.05", "0.001")
    files = {f"sweep/learning_rate_{rate}/{name}" for rate in rates for name in ("summary.json", "metrics.jsonl")}
    assert left == {"config.yaml", "classes.json"} | files  # no weights, and nothing of a test split

    def refuse(*_, **__):
        raise AssertionError("a finished sweep was tried again")

    with monkeypatch.context() as patch:
        patch.setattr(run, "run_loop", refuse)
        patch.setattr(run, "measure_rows", refuse)
        assert swept(tiny(), tmp_path / "sweep", "optim.learning_rate=[1e12, 0.05, 0.001]", *WILD) == tried
    # A fine-tuning of the same recipe tries the same.
    again = finetune(tiny(), tmp_path / "tune", "optim.learning_rate=[1e12, 0.05, 0.001]", *WILD)[0]
    timeless = [
        {rate: {key: value for key, value in numbers.items() if key != "seconds"} for rate, numbers in one.items()}
        for one in (again["tried"], tried)
    ]
    assert timeless[0] == timeless[1] and again["learning_rate"] == float(best)


def test_a_sweep_in_which_every_rate_diverges_names_the_arm(tiny, tmp_path):
    tried = swept(tiny(), tmp_path / "sweep", "optim.learning_rate=[1e12, 1e13]", *WILD)
    with pytest.raises(Diverged, match=re.escape("an arm on a task: every learning rate of 1e+12, 1e+13 diverged")):
        run.best_rate([tried], "an arm on a task")


def test_a_rate_that_is_finite_but_measured_as_not_so_has_diverged(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_rows", lambda one, held_out: {"loss": math.nan, "accuracy": 1.0})
    tried = swept(tiny(), tmp_path / "sweep", "optim.learning_rate=[0.1, 0.01]")
    assert [numbers["diverged"] for numbers in tried.values()] == [True, True]


def test_a_sweep_measures_on_rows_that_it_has_not_trained_on(tiny, tmp_path, monkeypatch):
    held_out, measure_rows = [], run.measure_rows

    def noted(one, some):
        held_out.append(set(np.asarray(some[1]).tolist()))
        return measure_rows(one, some)

    monkeypatch.setattr(run, "measure_rows", noted)
    monkeypatch.setattr(wiring, "open_test", None)  # the test split is not even opened
    options = ["optim.learning_rate=[0.1, 0.01]", "optim.steps=12", "runtime.log_inputs=true"]
    swept(tiny(), tmp_path / "sweep", *options)
    for rate, chosen_on in zip(("0.1", "0.01"), held_out, strict=True):
        file = tmp_path / "sweep" / "sweep" / f"learning_rate_{rate}" / "inputs" / "process_0.jsonl"
        read = {row for line in file.read_text().splitlines() for row in json.loads(line)["index"]}
        assert len(chosen_on) == 10 and len(read) == 30 and not read & chosen_on


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.learning_rate=0.1"], "optim.learning_rate=0.1: there is nothing to choose; give a list of rates"),
        (["optim.learning_rate=[0.1]"], "there is nothing to choose"),
        (["data.holdout=0", "optim.learning_rate=[1, 2]"], "data.holdout=0 leaves nothing to choose"),
        (["init=/nowhere", "optim.learning_rate=[1, 2]"], "init=/nowhere: not found"),
        (["data.source=parquet:{several}", "optim.learning_rate=[1, 2]"], "objective.loss=softmax: an image"),
    ],
)
def test_what_a_sweep_refuses_before_anything_is_written(tiny, tmp_path, overrides, words):
    several = write_parquet(tmp_path / "train.parquet", range(8), [[0, 1], [2]] * 4, names=None)
    with pytest.raises(UserError) as refusal:
        swept(tiny(), tmp_path / "sweep", *[override.format(several=several) for override in overrides])
    assert words in str(refusal.value)
    assert not (tmp_path / "sweep").exists()


def tried_with(accuracies, losses=(1.0, 1.0)):
    return {
        rate: {"diverged": accuracy is None, "accuracy": accuracy, "loss": loss}
        for rate, accuracy, loss in zip(("0.1", "0.01"), accuracies, losses, strict=True)
    }


@pytest.mark.parametrize(
    ("sweeps", "best"),
    [
        ([tried_with((0.5, 0.6))], 0.01),
        ([tried_with((0.9, 0.6)), tried_with((0.3, 0.7))], 0.01),  # means 0.6 and 0.65
        ([tried_with((0.9, 0.6)), tried_with((0.5, 0.7))], 0.1),  # 0.7 and 0.65
        ([tried_with((0.5, 0.6), (1.0, 1.0)), tried_with((0.6, 0.5), (1.0, 0.9))], 0.01),  # the loss decides
        ([tried_with((0.5, 0.6), (0.9, 1.0)), tried_with((0.6, 0.5), (1.0, 1.0))], 0.1),
        ([tried_with((0.3, 0.2), (0.9, 1.0)), tried_with((0.0, 0.1))], 0.1),  # 0.3 / 2 and (0.2 + 0.1) / 2 are equal
        ([tried_with((0.9, 0.1)), tried_with((None, 0.1))], 0.01),  # diverged in one of them
        ([tried_with((0.5, 0.5), (2.0, 2.0))], 0.1),
    ],
)  # fmt: skip
def test_the_best_rate_is_that_of_the_best_mean_and_the_loss_breaks_ties(sweeps, best):
    assert run.best_rate(sweeps, "here") == best


def test_without_any_label_the_loss_alone_decides():
    sweeps = [{"0.1": {"diverged": False, "loss": 2.0}, "0.01": {"diverged": False, "loss": 1.0}}]
    assert run.best_rate(sweeps, "here") == 0.01


def test_rates_that_diverge_by_turns_leave_none():
    with pytest.raises(Diverged, match="here: every learning rate of 0.1, 0.01 diverged; give smaller ones"):
        run.best_rate([tried_with((None, 0.5)), tried_with((0.5, None))], "here")


# ---- probes


PROBES = [
    "probe.every=2", "probe.source=synthetic:60", "probe.shots=[1, 4]", "probe.seeds=[0, 3]", "probe.neighbors=[3]",
    "probe.test_images=17",
]  # fmt: skip
PROBED = ("probe_1_shot_accuracy", "probe_4_shot_accuracy", "probe_3_nn_accuracy")


def files_of(step):
    """The bytes of a checkpoint's weights, and their headers, whose notes safetensors writes in any order."""
    found = {}
    for name in ("model.safetensors", "objective.safetensors"):
        content = (step / name).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        found[name] = json.loads(content[8:start]), content[start:]
    return found


def without_probes(logged):
    return [{key: value for key, value in line.items() if not key.startswith("probe_")} for line in logged]


@pytest.mark.parametrize("workers", [0, 2])
def test_probes_do_not_disturb_a_run_and_are_recomputed_from_its_weights(tiny, tmp_path, workers):
    path = tiny(model__dropout=0.2, optim__steps=5, optim__learning_rate=0.01)
    options = [f"runtime.workers={workers}", "runtime.save_every=2", "runtime.keep=9"]
    pretrain(path, tmp_path / "plain", *options)
    summary = pretrain(path, tmp_path / "probed", *options, *PROBES)
    for step in (2, 4, 5):
        plain, probed = (tmp_path / name / "checkpoints" / f"step_{step:08d}" for name in ("plain", "probed"))
        assert files_of(plain) == files_of(probed)
    logged = records(tmp_path / "probed", *TIMES)
    assert without_probes(logged) == records(tmp_path / "plain", *TIMES)
    assert [line["step"] for line in logged if all(name in line for name in PROBED)] == [2, 4, 5]
    assert not any(name.startswith("probe_") for line in (logged[0], logged[2]) for name in line)
    assert all(summary["figures"][name] == logged[-1][name] for name in PROBED)
    for line in (logged[1], logged[4]):
        expected = probes_by_hand(tmp_path / "probed" / "checkpoints" / f"step_{line['step']:08d}")
        assert {name: line[name] for name in PROBED} == pytest.approx(expected, abs=1e-12)


def probes_by_hand(folder):
    """Few-shot and nearest-neighbour accuracy of the encoder in a checkpoint, by scikit-learn."""
    import timm
    from sklearn.linear_model import Ridge
    from sklearn.neighbors import KNeighborsClassifier

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    train, test = (sources.open_source("synthetic:60", split) for split in ("train", "validation"))

    def read(source, rows):
        images = torch.from_numpy(np.stack([data.whole_image(source.picture(int(row)), 32) for row in rows]))
        with torch.no_grad():
            tokens = model.forward_features((images.permute(0, 3, 1, 2).float() - 127.5) / 127.5)
        return tokens[:, 1:].mean(1).double().numpy()  # of the patches, as after masked patch prediction

    tested = data.subset_rows(60, 17)
    found = {name: [] for name in PROBED}
    for seed in (0, 3):
        for shots in (1, 4):
            rows = data.labelled_rows(train, seed, shots, 0.0)[0]
            known, labels = read(train, rows), train.labels[rows]
            mean, spread = known.mean(0), known.std(0) + 1e-5
            x, y = (
                np.hstack([(part - mean) / spread, np.full((len(part), 1), 100.0)])
                for part in (known, read(test, tested))
            )
            ridge = Ridge(alpha=1024.0, fit_intercept=False).fit(x, 2.0 * np.eye(10)[labels] - 1)
            found[f"probe_{shots}_shot_accuracy"].append((ridge.predict(y).argmax(1) == test.labels[tested]).mean())
        near = KNeighborsClassifier(3, metric="cosine", weights=lambda far: np.exp((1 - far) / 0.07)).fit(known, labels)
        found["probe_3_nn_accuracy"].append((near.predict(read(test, tested)) == test.labels[tested]).mean())
    return {name: np.mean(values) for name, values in found.items()}


def test_a_probed_run_that_was_stopped_equals_the_uninterrupted_one(tiny, tmp_path, monkeypatch):
    path = tiny(model__dropout=0.2, optim__steps=5)
    pretrain(path, tmp_path / "straight", *PROBES)
    real, count = data.load, iter(range(100))

    def stops_after_three(samples, *arguments):
        for batch in real(samples, *arguments):
            if isinstance(samples, data.TrainingSamples) and next(count) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(data, "load", stops_after_three)
        with pytest.raises(errors.Stopped, match="stopped at step 3 of 5"):
            pretrain(path, tmp_path / "stopped", *PROBES)
    pretrain(path, tmp_path / "stopped", *PROBES)
    assert files_of(newest(tmp_path / "stopped")) == files_of(newest(tmp_path / "straight"))
    assert records(tmp_path / "stopped", *TIMES) == records(tmp_path / "straight", *TIMES)


def test_an_averaged_run_is_probed_by_its_average(tiny, tmp_path):
    path = tiny(optim__steps=4, optim__learning_rate=0.05, optim__average=0.7)
    pretrain(path, tmp_path / "run", *PROBES)
    last = records(tmp_path / "run")[-1]
    assert {name: last[name] for name in PROBED} == pytest.approx(probes_by_hand(newest(tmp_path / "run")), abs=1e-12)


def test_a_supervised_run_is_probed_too(tiny, tmp_path):
    path = tiny(objective__name="supervised", optim__steps=2)
    found = pretrain(path, tmp_path / "run", "probe.every=1", "probe.shots=[1, 2]", "probe.neighbors=[5]")["figures"]
    names = ("probe_1_shot_accuracy", "probe_2_shot_accuracy", "probe_5_nn_accuracy")
    assert all(name in line for line in records(tmp_path / "run") for name in names) and set(names) <= set(found)


def test_a_broken_probe_image_does_not_cost_the_training(tiny, tmp_path):
    for split in ("train", "validation"):
        for row in range(6):
            file = tmp_path / "photos" / split / "ab"[row % 2] / f"{row:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((40, 40), 60 + row).convert("RGB").save(file)
    whole = file.read_bytes()
    options = [f"probe.source=folder:{tmp_path / 'photos'}", "probe.every=4", "probe.shots=[2]", "probe.neighbors=[2]"]
    straight = pretrain(tiny(), tmp_path / "straight", *options)
    file.write_bytes(b"half")
    with pytest.raises(UserError, match=r"validation/b/05.png can't be read"):
        pretrain(tiny(), tmp_path / "run", *options)
    assert newest(tmp_path / "run").name == "step_00000004"
    file.write_bytes(whole)
    found = pretrain(tiny(), tmp_path / "run", *options)
    assert found["figures"] == straight["figures"] and "probe_2_shot_accuracy" in found["figures"]
    assert records(tmp_path / "run", *TIMES) == records(tmp_path / "straight", *TIMES)


def test_the_curves_of_a_probed_run_have_a_third_panel(tiny, tmp_path):
    sizes = []
    for name, options in (("plain", []), ("probed", PROBES)):
        pretrain(tiny(), tmp_path / name, *options)
        with Image.open(tmp_path / name / "figures" / "curves.png") as picture:
            sizes.append(picture.width)
    assert sizes[1] == pytest.approx(1.5 * sizes[0], abs=2)


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_continued_from(tiny, tmp_path, capsys):
    path = tiny(model__dropout=0.1, optim__steps=6, runtime__save_every=2)
    pretrain(path, tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    (tmp_path / "broken" / "summary.json").unlink()
    file = newest(tmp_path / "broken") / "state" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    pretrain(path, tmp_path / "broken")
    said = capsys.readouterr().out
    assert "warning: " in said and "step_00000006/state/optimizer.safetensors is damaged" in said
    assert "step_00000006.damaged, and step 4 is continued from" in said and "continues from step 4" in said
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "broken"))
    assert records(tmp_path / "straight", *TIMES) == records(tmp_path / "broken", *TIMES)
    names = sorted(folder.name for folder in (tmp_path / "broken" / "checkpoints").iterdir())
    assert names == ["step_00000004", "step_00000006", "step_00000006.damaged"]


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(tiny, tmp_path):
    path = tiny(optim__steps=4, runtime__save_every=2)
    pretrain(path, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    for _, folder in checkpoint.complete(tmp_path / "run" / "checkpoints"):
        (folder / "state" / "meta.json").unlink()
    before = hashes(tmp_path / "run")
    with pytest.raises(
        UserError, match=r"every checkpoint in .* is damaged(?s:.*)step_00000002/state/meta.json is missing"
    ):
        pretrain(path, tmp_path / "run")
    assert hashes(tmp_path / "run") == before


def test_the_state_of_another_recipe_is_refused(tiny, tmp_path):
    pretrain(tiny("one"), tmp_path / "one")
    pretrain(tiny("other", optim__learning_rate=0.5), tmp_path / "other")
    (tmp_path / "one" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "one" / "checkpoints")
    before = hashes(tmp_path / "one")
    with pytest.raises(UserError, match="is the state of another recipe") as error:
        pretrain(tiny("one"), tmp_path / "one")
    assert str(error.value).splitlines()[1:] == ["  optim.learning_rate: 0.5 there, 0.001 here"]
    assert hashes(tmp_path / "one") == before


def test_the_best_checkpoint_outlives_a_stop_and_worse_scores(tiny, tmp_path, monkeypatch, capsys):
    losses = iter([5.0, 3.0, 4.0, 4.5, 4.6, 4.7, 4.8, 4.9, 4.95])
    original = job._held_out_figures

    def measured(one):
        return original(one) | {"held_out_loss": next(losses)}

    monkeypatch.setattr(job, "_held_out_figures", measured)
    path = tiny(
        optim__steps=8, runtime__save_every=1, runtime__eval_every=1, runtime__keep=1, runtime__keep_every=3,
        runtime__keep_best="held_out_loss",
    )  # fmt: skip
    counts = iter(range(100))

    class AtTheFourth(list):
        def __bool__(self):
            return next(counts) == 3

    from contextlib import contextmanager

    with monkeypatch.context() as patch:
        patch.setattr(job, "_stop_signals", contextmanager(lambda: (yield AtTheFourth())))
        with pytest.raises(errors.Stopped):
            pretrain(path, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in checkpoint.complete(folder)] == [2, 3, 4]
    before = hashes(folder / "step_00000002")
    summary = pretrain(path, tmp_path / "run")
    assert [step for step, _ in checkpoint.complete(folder)] == [2, 3, 6, 8]
    assert hashes(folder / "step_00000002") == before
    assert summary["best"] == {"metric": "held_out_loss", "value": 3.0, "step": 2}
    assert f"best held_out_loss 3 at step 2: {folder / 'step_00000002'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["runtime.keep_best=held_out_acuracy"], "held_out_acuracy is not measured in this run; there are .*held_out_loss"),
        (["runtime.keep_best=loss"], "runtime.keep_best=loss must be a held-out number"),
        (["runtime.keep_best=held_out_loss", "runtime.save_every=3"], "save_every=3 must be a multiple of runtime.eval_every=2"),
        (["runtime.keep_best=probe_5_shot_accuracy"], "must be a multiple of probe.every=0"),
        (["runtime.keep_every=3"], "runtime.keep_every=3 must be a multiple of runtime.save_every=2"),
        (["runtime.keep_every=-2"], "must not be negative"),
        (["runtime.push_to_hub=name"], "runtime.push_to_hub=name is no repository of the Hub; give ORG/NAME"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_or_pushed_is_refused_before_anything_is_written(tiny, tmp_path, changes, words):
    path = tiny(runtime__save_every=2, runtime__eval_every=2)
    with pytest.raises(UserError, match=words):
        pretrain(path, tmp_path / "run", *changes)
    assert not (tmp_path / "run").exists()


def test_a_fine_tuning_has_no_best_checkpoint(tiny, tmp_path):
    with pytest.raises(UserError, match="a fine-tuning measures nothing before its end"):
        finetune(
            tiny(), tmp_path / "run", "runtime.keep_best=held_out_loss", "runtime.eval_every=1", "runtime.save_every=1"
        )
    assert not (tmp_path / "run").exists()


def test_a_probe_can_choose_the_best_checkpoint(tiny, tmp_path):
    path = tiny(runtime__save_every=2, runtime__keep=1)
    changes = ["probe.every=2", "probe.shots=[1]", "probe.neighbors=[2]", "runtime.keep_best=probe_2_nn_accuracy"]
    summary = pretrain(path, tmp_path / "run", *changes)
    found = {
        record["step"]: record["probe_2_nn_accuracy"]
        for record in records(tmp_path / "run")
        if "probe_2_nn_accuracy" in record
    }
    best = max(found, key=lambda step: (found[step], -step))
    assert summary["best"] == {"metric": "probe_2_nn_accuracy", "value": found[best], "step": best}


def test_a_full_disk_costs_no_checkpoint(tiny, tmp_path, monkeypatch):
    import resource

    path = tiny(optim__steps=6, runtime__save_every=2)
    pretrain(path, tmp_path / "straight")
    original, limits = checkpoint.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(folder, step, **more):
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            return original(folder, step, **more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        with pytest.raises(UserError, match="step 4 can't be written .* the checkpoint of step 2 is whole"):
            pretrain(path, tmp_path / "run")
    assert [step for step, _ in checkpoint.complete(tmp_path / "run" / "checkpoints")] == [2]
    pretrain(path, tmp_path / "run")
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "run"))
    assert records(tmp_path / "straight", *TIMES) == records(tmp_path / "run", *TIMES)
