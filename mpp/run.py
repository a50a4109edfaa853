"""The one place where a recipe becomes objects and starts the loop."""

import dataclasses
import json
import os
import platform
import shutil
import signal
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import mpp
from mpp import checkpoint, config, cost, data, pictures
from mpp.config import RunConfig
from mpp.console import Console
from mpp.errors import UserError
from mpp.metrics import Tally, exact_type
from mpp.model import PIXEL_MEAN, PIXEL_STD, build_encoder, encoder_of, load_encoder, patch_of
from mpp.objectives import OBJECTIVES, MaskedPatchPrediction, Objective, Supervised
from mpp.optim import build_optimizer, lr_at
from mpp.patches import grid_size
from mpp.targets import TARGETS
from mpp.train import Diverged, measure, train

_RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "results.json", "report.md")
_RUN_FOLDERS = ("checkpoints", "figures", "inputs", "sweep")
_PROGRESS = ("step", "images", "epoch", "seconds", "learning_rate", "images_per_second")
_MOSAIC_IMAGES = 8


class Stopped(Exception):
    """The run was asked to stop, saved its state, and can be continued."""


@dataclass(frozen=True)
class Job:
    """All that one call of the loop needs, resolved from a recipe.

    Attributes:
        objective: with the pixel statistics of the model.
        model: what is trained, on its device but not wrapped.
        rows: rows of `source` to train on.
        held_out: (source, rows) measured during and after training; None for none.
        classes: names of the outputs of the encoder's head, if it has one.
    """

    recipe: RunConfig
    accelerator: Accelerator
    console: Console
    folder: Path
    objective: Objective
    model: nn.Module
    source: data.Source
    rows: np.ndarray
    held_out: tuple[data.Source, np.ndarray] | None
    classes: list[str] | None


# ---------------------------------------------------------------- the two kinds of run


def pretrain(recipe: RunConfig, output: Path, console: Console, *, overwrite: bool = False) -> dict[str, Any]:
    """Pre-trains as the recipe says, or continues; returns the summary that it leaves.

    Raises:
        UserError: whatever the user can mend; before training, nothing is written then.
        Stopped: after a signal, with the state saved.
    """
    if not isinstance(recipe.optim.learning_rate, float):
        raise UserError("optim.learning_rate is a list, which is for fine-tuning to choose from; give one number")
    finished = _finished(output, recipe, overwrite)
    if finished:
        console.say(f"{output}: this run is finished; --overwrite starts it again")
        console.skip(recipe.optim.steps * recipe.optim.batch_size)
        return finished
    accelerator = _accelerator(recipe)
    _micro_batches(recipe, accelerator.num_processes)
    source = data.open_source(recipe.data.source, recipe.data.train_split)
    held_out = _held_out(recipe, source, console)
    rows = np.arange(len(source))
    if recipe.data.per_class is not None:
        rows, _ = data.labelled_rows(source, recipe.seed, recipe.data.per_class, 0.0)
    classes = _classes(source, recipe) if recipe.objective.name == "supervised" else None
    encoder, mean, std = _encoder(recipe, classes, console)
    objective = _objective(recipe, encoder, classes, mean, std)
    model = objective.build(encoder)
    job = Job(recipe, accelerator, console, output, objective, model, source, rows, held_out, classes)
    _open_folder(output, recipe, accelerator, console, overwrite)
    figures = _run_loop(job, "pre-training")
    if accelerator.is_main_process:
        pictures.draw_curves(output / "figures" / "curves.png", _records(output))
        if held_out and isinstance(objective, MaskedPatchPrediction):
            _draw_mosaic(job, output / "figures" / "mosaic.png")
    return _summarize(job, "pretrain", figures)


def finetune(
    recipe: RunConfig, output: Path, console: Console, *, overwrite: bool = False, arm: str = ""
) -> list[dict[str, Any]]:
    """Fine-tunes one initialisation and reads the test split once; returns the records it leaves.

    Where `optim.learning_rate` is a list, each value is tried on a part of the training split and
    measured on the rest of it; the best is then trained on the whole of it. The test split is not
    read before that.

    Args:
        arm: the name of the initialisation in the records; its REF where it is empty.

    Raises: as `pretrain`.
    """
    if recipe.objective.name != "supervised":
        raise UserError(f"objective.name={recipe.objective.name}: fine-tuning needs supervised")
    rates = recipe.optim.learning_rate
    rates = rates if isinstance(rates, tuple) else (rates,)
    sweep = len(rates) > 1
    if _finished(output, recipe, overwrite):
        console.say(f"{output}: this fine-tuning is finished; --overwrite starts it again")
        console.skip(planned_images(recipe))
        return json.loads((output / "results.json").read_text())
    accelerator = _accelerator(recipe)
    _micro_batches(recipe, accelerator.num_processes)
    source = data.open_source(recipe.data.source, recipe.data.train_split)
    test = data.open_source(recipe.data.source, recipe.data.eval_split)
    classes = _classes(source, recipe)
    _same_classes(source, test, recipe)
    fit_rows, choice_rows = data.labelled_rows(
        source, recipe.seed, recipe.data.per_class, recipe.data.holdout if sweep else 0.0
    )
    if sweep and not len(choice_rows):
        raise UserError("data.holdout=0 leaves nothing to choose the learning rate on; raise it, or give one rate")

    def job(rate: float, folder: Path, rows: np.ndarray, held_out: tuple[data.Source, np.ndarray] | None) -> Job:
        one = dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, learning_rate=rate))
        encoder, mean, std = _encoder(one, classes, quiet if folder != output else console)
        objective = _objective(one, encoder, classes, mean, std)
        return Job(one, accelerator, console, folder, objective, encoder, source, rows, held_out, classes)

    quiet = Console()
    quiet.speaks = False
    final = job(rates[0], output, np.union1d(fit_rows, choice_rows), None)  # so that a bad init writes nothing
    _open_folder(output, recipe, accelerator, console, overwrite)
    tried: dict[str, dict[str, float]] = {}
    if sweep:
        for rate in rates:
            folder = output / "sweep" / f"learning_rate_{rate:g}"
            tried[f"{rate:g}"] = _try_rate(job(rate, folder, fit_rows, (source, choice_rows)))
            console.say(
                f"  learning rate {rate:g}: accuracy {tried[f'{rate:g}']['accuracy']:.3f} on "
                f"{len(choice_rows)} held-out training images"
            )
        best = max(rates, key=lambda rate: (tried[f"{rate:g}"]["accuracy"], -tried[f"{rate:g}"]["loss"]))
        if all(numbers["diverged"] for numbers in tried.values()):
            raise Diverged(f"{output}: every learning rate of {list(rates)} diverged; give smaller ones")
        final = job(best, output, final.rows, None)
    _run_loop(final, "fine-tuning")
    figures = _measure(final, (test, np.arange(len(test))))
    rate = final.recipe.optim.learning_rate
    console.say(f"  {arm or recipe.init}: test accuracy {figures['accuracy']:.4f} with learning rate {rate:g}")
    results = [
        {
            "arm": arm or recipe.init,
            "data_set": recipe.data.source,
            "metric": metric,
            "value": value,
            "seed": recipe.seed,
            "learning_rate": rate,
            "init": recipe.init,
            "recipe_hash": config.recipe_hash(recipe),
            "images": len(test),
            "train_images": len(final.rows),
            "tried": tried,
        }
        for metric, value in figures.items()
    ]
    if accelerator.is_main_process:
        (output / "results.json").write_text(json.dumps(results, indent=1))
        (output / "report.md").write_text(_report(recipe, results, tried))
    _summarize(final, "finetune", {f"test_{name}": value for name, value in figures.items()})
    return results


def newest_pretraining(root: Path, overrides: Sequence[str]) -> tuple[Path | None, str]:
    """The newest finished pre-training below a folder, and the fine-tuning recipe that it names.

    Where an override names another `init`, that one is looked at in its place, and the path is None.

    Raises:
        UserError: there is none, or it names no recipe.
    """
    named = [override.partition("=")[2] for override in overrides if override.startswith("init=")]
    if named:
        run, path = Path(named[-1]).expanduser(), None
        if not (run / "config.yaml").is_file():
            raise UserError(f"--recipe is missing, and init={named[-1]} is no run folder that would name one")
    else:
        finished = [
            (json.loads(file.read_text()).get("finished", ""), str(file.parent))
            for file in root.glob("**/summary.json")
            if json.loads(file.read_text()).get("kind") == "pretrain"
        ]
        if not finished:
            raise UserError(
                f"no finished pre-training below {root.absolute()}: make one with "
                "`accelerate launch mpp/pretrain.py --recipe mpp_demo`, or name --recipe and init=REF"
            )
        run = path = Path(max(finished)[1])
    recipe = config.load_run(str(run / "config.yaml"))[0].finetune
    if recipe is None:
        raise UserError(f"{run}/config.yaml names no fine-tuning recipe (its key finetune); give --recipe")
    return path, recipe


def frozen_encoder(recipe: RunConfig) -> tuple[timm.models.VisionTransformer, tuple[float, ...], tuple[float, ...]]:
    """The encoder that a recipe starts from, without a head, and its pixel mean and standard deviation."""
    quiet = Console()
    quiet.speaks = False
    return _encoder(recipe, None, quiet)


def planned_images(recipe: RunConfig) -> int:
    """Images that a run trains on, its choice of a learning rate included."""
    rates = recipe.optim.learning_rate
    runs = len(rates) + 1 if isinstance(rates, tuple) and len(rates) > 1 else 1
    return runs * recipe.optim.steps * recipe.optim.batch_size


def _try_rate(job: Job) -> dict[str, float]:
    """Held-out loss and accuracy of one learning rate; kept, so that it is not tried again."""
    done = job.folder / "summary.json"
    if done.is_file():
        job.console.skip(planned_images(job.recipe))
        return json.loads(done.read_text())
    assert job.held_out is not None
    if job.accelerator.is_main_process:
        job.folder.mkdir(parents=True, exist_ok=True)
    job.accelerator.wait_for_everyone()
    try:
        _run_loop(dataclasses.replace(job, held_out=None), f"learning rate {job.recipe.optim.learning_rate:g}")
        numbers = {**_measure(job, job.held_out), "diverged": False}
    except Diverged:
        numbers = {"accuracy": 0.0, "loss": float("inf"), "diverged": True}
    job.accelerator.free_memory()
    if job.accelerator.is_main_process:
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
        done.write_text(json.dumps(numbers, indent=1))
    return numbers


def _report(recipe: RunConfig, results: list[dict[str, Any]], tried: Mapping[str, Mapping[str, float]]) -> str:
    lines = [f"# Fine-tuning of {recipe.init}", "", "| metric | value |", "| --- | --- |"]
    lines += [f"| {record['metric']} | {record['value']:.4f} |" for record in results]
    first = results[0]
    lines += ["", f"{first['images']} test images, {first['train_images']} training images, seed {recipe.seed}."]
    if tried:
        lines += ["", "| learning rate | held-out accuracy | held-out loss |", "| --- | --- | --- |"]
        lines += [f"| {rate} | {numbers['accuracy']:.4f} | {numbers['loss']:.4f} |" for rate, numbers in tried.items()]
        lines += ["", f"Chosen on held-out training images: {first['learning_rate']:g}."]
    return "\n".join(lines) + "\n"


def dry_run(recipe: RunConfig) -> str:
    """The resolved recipe and what it would cost, without reading data or training.

    Raises UserError where the recipe can't be run.
    """
    with torch.device("meta"):
        classes = ["a class"] * 1000 if recipe.objective.name == "supervised" else None
        encoder = build_encoder(
            image_size=recipe.data.image_size,
            classes=len(classes) if classes else 0,
            **dataclasses.asdict(recipe.model),
        )
        objective = _objective(recipe, encoder, classes, PIXEL_MEAN, PIXEL_STD)
        model = objective.build(encoder)
    side, rows = recipe.data.image_size, 2
    batch = {"images": torch.zeros(rows, side, side, 3, dtype=torch.uint8), "labels": torch.zeros(rows, dtype=torch.int64)}
    plans = [objective.per_sample(0, row) for row in range(rows)]
    batch |= {key: torch.from_numpy(np.stack([plan[key] for plan in plans])) for key in plans[0]}
    found = cost.of_model(model, objective, {key: value.to("meta") for key, value in batch.items()})
    images = planned_images(recipe)
    optim, micro = recipe.optim, recipe.runtime.micro_batch
    states = 2 if optim.name == "adamw" else 1
    memory = found.parameters * 4 * (2 + states) + found.activation_bytes * micro
    hours = 3 * found.forward_flops * images / (cost.A100_FLOPS * cost.UTILIZATION) / 3600
    note = " (with a head of 1000 classes)" if classes else ""
    return "\n".join(
        [
            config.to_yaml(recipe),
            f"parameters         {found.parameters:,} in all, {found.encoder_parameters:,} of them the encoder{note}",
            f"forward            {found.forward_flops / 1e9:.2f} GFLOPs an image (a multiply-add counts as 2)",
            f"steps              {optim.steps:,} of {optim.batch_size:,} images",
            f"images             {images:,}" + (", the choice of a learning rate included" if images > optim.steps * optim.batch_size else ""),
            f"training           {3 * found.forward_flops * images / 1e18:.4g} exaFLOPs (3 x forward)",
            f"memory             {memory / 2**30:.1f} GiB a process at runtime.micro_batch={micro} (weights, gradients, "
            "optimiser, activations in float32)",
            f"device-hours       {hours:,.1f} on an A100 ({cost.A100_FLOPS / 1e12:.0f} TFLOP/s in bf16) at an assumed "
            f"{cost.UTILIZATION:.0%} of its peak",
        ]
    )


# ---------------------------------------------------------------- from recipe to objects


def _accelerator(recipe: RunConfig) -> Accelerator:
    precision = {"fp32": "no", "bf16": "bf16"}[recipe.runtime.precision]
    return Accelerator(mixed_precision=precision, cpu=not torch.accelerator.is_available())


def _micro_batches(recipe: RunConfig, processes: int) -> int:
    """Forward passes of one process in one step; raises UserError where they do not fill the batch."""
    batch, micro = recipe.optim.batch_size, recipe.runtime.micro_batch
    count, rest = divmod(batch, micro * processes)
    if rest or not count:
        share, left = divmod(batch, processes)
        fits = [size for size in range(1, min(micro, share) + 1) if share % size == 0] if not left else []
        remedy = f"use runtime.micro_batch={fits[-1]}" if fits else f"use a batch size that {processes} divides"
        raise UserError(
            f"optim.batch_size={batch} is not a multiple of runtime.micro_batch={micro} x {processes} "
            f"process{'es' if processes > 1 else ''}; {remedy}"
        )
    return count


def _workers(recipe: RunConfig, processes: int) -> int:
    if isinstance(recipe.runtime.workers, int):
        return recipe.runtime.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // processes - 1, 0), 16)


def _held_out(
    recipe: RunConfig, source: data.Source, console: Console
) -> tuple[data.Source, np.ndarray] | None:
    if not data.has_split(recipe.data.source, recipe.data.eval_split):
        console.say(
            f"{recipe.data.source} has no split {recipe.data.eval_split}: "
            "all images are trained on, and there are no held-out figures"
        )
        return None
    held_out = data.open_source(recipe.data.source, recipe.data.eval_split)
    if recipe.objective.name == "supervised":
        _same_classes(source, held_out, recipe)
    return held_out, np.arange(len(held_out))


def _classes(source: data.Source, recipe: RunConfig) -> list[str]:
    if source.classes is None:
        raise UserError(
            f"data.source={recipe.data.source}: no classes in split {recipe.data.train_split}; "
            "put every image in a class folder, SPLIT/CLASS/*.jpg, or pre-train with objective.name=mpp"
        )
    if len(source.classes) < 2:
        raise UserError(f"data.source={recipe.data.source}: {len(source.classes)} class; training needs two or more")
    return source.classes


def _same_classes(source: data.Source, other: data.Source, recipe: RunConfig) -> None:
    if source.classes == other.classes:
        return
    here, there = set(source.classes or []), set(other.classes or [])
    raise UserError(
        f"data.source={recipe.data.source}: the classes of {recipe.data.train_split} and {recipe.data.eval_split} "
        f"differ (only in the first: {sorted(here - there)[:5]}, only in the second: {sorted(there - here)[:5]})"
    )


def _encoder(
    recipe: RunConfig, classes: list[str] | None, console: Console
) -> tuple[timm.models.VisionTransformer, tuple[float, ...], tuple[float, ...]]:
    """The encoder with its first weights, and the pixel mean and standard deviation it was made for."""
    torch.manual_seed(recipe.seed)
    encoder = build_encoder(
        image_size=recipe.data.image_size,
        classes=len(classes) if classes else 0,
        **dataclasses.asdict(recipe.model),
    )
    if recipe.init == "scratch":
        return encoder, PIXEL_MEAN, PIXEL_STD
    found = checkpoint.find_weights(recipe.init)
    loaded = load_encoder(encoder, found.tensors, recipe.init)
    pixels = found.config.get("pretrained_cfg", {})
    mean, std = tuple(pixels.get("mean", PIXEL_MEAN)), tuple(pixels.get("std", PIXEL_STD))
    encoder.pretrained_cfg.update(mean=mean, std=std)
    notes = [f"encoder from {found.path}", f"pixel mean {mean[0]:g}, standard deviation {std[0]:g}"]
    notes += [] if pixels else ["no config.json beside it, so these two are this package's own"]
    notes += [f"dropped {', '.join(loaded.dropped)}"] if loaded.dropped else []
    if loaded.resized:
        old, new = loaded.resized
        notes.append(f"position embeddings resized from {old} x {old} to {new} x {new}")
    console.say("; ".join(notes))
    return encoder, mean, std


def _objective(
    recipe: RunConfig,
    encoder: timm.models.VisionTransformer,
    classes: list[str] | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Objective:
    if OBJECTIVES[recipe.objective.name] is Supervised:
        return Supervised(len(classes or []), recipe.objective.label_smoothing, mean, std)
    patch_size = patch_of(encoder)
    rows, columns = grid_size(recipe.data.image_size, patch_size)
    objective = MaskedPatchPrediction(
        seed=recipe.seed,
        patch_size=patch_size,
        patch_count=rows * columns,
        corruption=recipe.objective.corruption,
        target=recipe.objective.target,
        mean=mean,
        std=std,
    )
    objective.per_sample(0, 0)  # refuses a share that corrupts no patch
    blank = torch.zeros(1, recipe.data.image_size, recipe.data.image_size, 3, dtype=torch.uint8)
    TARGETS[recipe.objective.target].of_patches(blank, patch_size)  # refuses a patch that can't give this target
    return objective


# ---------------------------------------------------------------- the run's folder


def _finished(output: Path, recipe: RunConfig, overwrite: bool) -> dict[str, Any] | None:
    """The summary of a finished run of this recipe; raises UserError where the folder holds something else."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder")
    before = output / "config.yaml"
    if not before.is_file():
        foreign = [path.name for path in output.iterdir() if path.name not in (*_RUN_FILES, *_RUN_FOLDERS)]
        if foreign:
            raise UserError(f"--output {output} holds files but no run ({', '.join(sorted(foreign)[:3])}); name another")
        return None
    if overwrite:
        return None
    changed = config.changed_keys(config.load_run(str(before))[0], recipe)
    if changed:
        listed = "\n  ".join(changed)
        raise UserError(
            f"--output {output} holds another run; name another folder, or give --overwrite to start again. "
            f"What differs:\n  {listed}"
        )
    summary = output / "summary.json"
    return json.loads(summary.read_text()) if summary.is_file() else None


def _open_folder(output: Path, recipe: RunConfig, accelerator: Accelerator, console: Console, overwrite: bool) -> None:
    """Makes the run's folder; an earlier run of the same recipe in it is continued."""
    if accelerator.is_main_process:
        if overwrite:
            for name in _RUN_FILES:
                (output / name).unlink(missing_ok=True)
            for name in _RUN_FOLDERS:
                shutil.rmtree(output / name, ignore_errors=True)
        began_before = (output / "config.yaml").is_file()
        (output / "figures").mkdir(parents=True, exist_ok=True)
        config.save(recipe, output / "config.yaml")
        if began_before and not checkpoint.complete(output / "checkpoints"):
            console.say(f"{output} holds a run without a complete checkpoint: it starts again at step 0")
    accelerator.wait_for_everyone()


def _records(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a half-written last line of a killed run is left out."""
    file = folder / "metrics.jsonl"
    records = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _summarize(job: Job, kind: str, figures: Mapping[str, float]) -> dict[str, Any]:
    accelerator = job.accelerator
    records = _records(job.folder)
    summary = {
        "kind": kind,
        "figures": {key: value for key, value in figures.items() if key not in _PROGRESS},
        "steps": job.recipe.optim.steps,
        "images": job.recipe.optim.steps * job.recipe.optim.batch_size,
        "train_images": len(job.rows),
        "data_fingerprint": job.source.fingerprint,
        "recipe_hash": config.recipe_hash(job.recipe),
        "seconds": round(records[-1]["seconds"], 1) if records else 0.0,
        "processes": accelerator.num_processes,
        "device": str(accelerator.device),
        "precision": job.recipe.runtime.precision,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "mpp": mpp.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "timm", "accelerate", "numpy", "pillow")},
        },
    }
    if accelerator.is_main_process:
        draft = job.folder / ".summary.json"
        draft.write_text(json.dumps(summary, indent=1))
        draft.rename(job.folder / "summary.json")
    accelerator.wait_for_everyone()
    return summary


# ---------------------------------------------------------------- starting the loop


def _run_loop(job: Job, title: str) -> dict[str, float]:
    """Trains a job to its end from its newest checkpoint and returns the last numbers logged."""
    recipe, accelerator, folder = job.recipe, job.accelerator, job.folder
    optim, runtime = recipe.optim, recipe.runtime
    processes, process = accelerator.num_processes, accelerator.process_index
    micro_batches = _micro_batches(recipe, processes)
    model, encoder = job.model, encoder_of(job.model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(
        model.named_parameters(),
        name=optim.name,
        weight_decay=optim.weight_decay,
        betas=(optim.beta1, optim.beta2),
        momentum=optim.momentum,
    )
    wrapped = accelerator.prepare_model(model)
    tally, first_step, seconds_before = Tally(), 0, 0.0
    saved = checkpoint.complete(folder / "checkpoints")
    if saved:
        first_step, newest = saved[-1]
        meta = checkpoint.restore(newest, encoder=encoder, model=model, optimizer=optimizer)
        seconds_before = meta["seconds"]
        if accelerator.is_main_process:  # the counts are of all processes; one of them carries them on
            exact = exact_type(accelerator.device)
            tally.add({key: torch.tensor(value, dtype=exact, device=accelerator.device) for key, value in meta["tally"].items()})
        if first_step < optim.steps:
            job.console.say(f"{folder}: continues from step {first_step}")
    kept = [record for record in _records(folder) if record["step"] <= first_step]
    if accelerator.is_main_process:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    last = kept[-1] if kept else {}
    if first_step == optim.steps:
        return last
    samples = data.TrainingSamples(
        job.source,
        job.rows,
        recipe.seed,
        recipe.data.image_size,
        recipe.data.crop_area,
        recipe.data.flip,
        job.objective.per_sample,
    )
    batches = data.training_batches(
        samples,
        first_step=first_step,
        steps=optim.steps,
        batch_size=optim.batch_size,
        micro_batch=runtime.micro_batch,
        processes=processes,
        process=process,
        workers=_workers(recipe, processes),
        device=accelerator.device,
    )
    if runtime.log_inputs:
        batches = _log_inputs(batches, folder / "inputs" / f"process_{process}.jsonl", first_step, micro_batches)
    began = time.monotonic()

    def log(step: int, numbers: dict[str, float]) -> None:
        nonlocal last
        seconds = seconds_before + time.monotonic() - began
        last = {
            "step": step,
            **numbers,
            "images": step * optim.batch_size,
            "epoch": step * optim.batch_size / len(job.rows),
            "seconds": seconds,
        }
        if accelerator.is_main_process:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(last) + "\n")
        job.console.say(_line(title, last, optim.steps))
        if numbers.get("target_classes") == 1:
            job.console.say("warning: every target is one and the same colour class; there is nothing to learn in these images")

    def save(step: int, counts: Tally) -> None:
        totals = counts.total(lambda value: accelerator.reduce(value, "sum"))
        if accelerator.is_main_process:
            checkpoint.write(
                folder / "checkpoints",
                step,
                encoder=encoder,
                objective=checkpoint.objective_weights(model, encoder),
                optimizer=optimizer,
                names=names,
                meta={
                    "tally": {name: value.tolist() for name, value in totals.items()},
                    "seconds": seconds_before + time.monotonic() - began,
                    "recipe_hash": config.recipe_hash(recipe),
                },
                classes=job.classes,
                keep=runtime.keep,
            )
        accelerator.wait_for_everyone()

    with _stop_signals() as received:

        def stop_wanted(step: int) -> bool:
            # Processes must agree; asking on every step would make the host wait for the device.
            if processes == 1:
                return bool(received)
            if step % runtime.log_every:
                return False
            return bool(accelerator.reduce(torch.tensor(len(received), device=accelerator.device), "sum"))

        complete = train(
            accelerator=accelerator,
            model=wrapped,
            objective=job.objective,
            optimizer=optimizer,
            batches=batches,
            learning_rate=lambda step: lr_at(
                step,
                base=optim.learning_rate,
                steps=optim.steps,
                warmup_steps=optim.warmup_steps,
                schedule=optim.schedule,
                end=optim.end_learning_rate,
            ),
            seed=recipe.seed,
            first_step=first_step,
            steps=optim.steps,
            batch_size=optim.batch_size,
            micro_batches=micro_batches,
            clip_norm=optim.clip_norm,
            log_every=runtime.log_every,
            eval_every=runtime.eval_every,
            save_every=runtime.save_every,
            tally=tally,
            log=log,
            evaluate=lambda: {
                f"held_out_{name}": value
                for name, value in (_measure(job, job.held_out) if job.held_out else {}).items()
            },
            save=save,
            stop_wanted=stop_wanted,
            track=lambda steps: job.console.track(steps, title, optim.batch_size),
        )
    if not complete:
        step = checkpoint.complete(folder / "checkpoints")[-1][0]
        raise Stopped(f"stopped at step {step} of {optim.steps} and saved in {folder}; the same command continues")
    return last


def _measure(job: Job, held_out: tuple[data.Source, np.ndarray]) -> dict[str, float]:
    recipe, accelerator = job.recipe, job.accelerator
    source, rows = held_out
    samples = data.HeldOutSamples(source, rows, recipe.data.image_size, job.objective.per_held_out_sample)
    batches = data.held_out_batches(
        samples,
        micro_batch=recipe.runtime.micro_batch,
        processes=accelerator.num_processes,
        process=accelerator.process_index,
        workers=_workers(recipe, accelerator.num_processes),
        device=accelerator.device,
    )
    return measure(accelerator, job.model, job.objective, batches)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM instead of dying of them; a second one acts as usual."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def receive(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log_inputs(
    batches: Iterator[dict[str, Tensor]], file: Path, first_step: int, micro_batches: int
) -> Iterator[dict[str, Tensor]]:
    """Writes what each step of this process read: rows, and checksums of pixels and plans."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        for count, batch in enumerate(batches):
            parts = {key: value.cpu().numpy() for key, value in batch.items() if key != "labels"}
            index = parts.pop("index").tolist()
            sums = {key: [zlib.crc32(np.ascontiguousarray(one)) for one in value] for key, value in parts.items()}
            lines.write(json.dumps({"step": first_step + 1 + count // micro_batches, "index": index, **sums}) + "\n")
            lines.flush()
            yield batch


def _line(title: str, record: Mapping[str, float], steps: int) -> str:
    """A record as a person would read it."""
    shown = [
        ("loss", "loss", "{:.4f}"),
        ("held_out_loss", "held-out loss", "{:.4f}"),
        ("held_out_target_entropy", "(class entropy", "{:.2f})"),
        ("held_out_accuracy_masked", "held-out accuracy: masked", "{:.3f}"),
        ("held_out_accuracy_random", "random", "{:.3f}"),
        ("held_out_accuracy_kept", "kept", "{:.3f}"),
        ("held_out_nearest_patch_accuracy_masked", "(nearest patch, masked:", "{:.3f})"),
        ("accuracy", "accuracy", "{:.3f}"),
        ("target_entropy", "target entropy", "{:.2f}"),
        ("learning_rate", "lr", "{:.2e}"),
        ("images_per_second", "images/s", "{:.0f}"),
    ]
    if "held_out_accuracy_masked" not in record:
        shown.insert(3, ("held_out_accuracy", "held-out accuracy", "{:.3f}"))
    parts = [f"{label} {form.format(record[key])}" for key, label, form in shown if key in record]
    return f"{title} {int(record['step'])}/{steps}  " + "  ".join(parts)


@torch.no_grad()
def _draw_mosaic(job: Job, path: Path) -> None:
    """The first held-out images, evenly over the split: seen, predicted and true colours."""
    objective, recipe = job.objective, job.recipe
    assert isinstance(objective, MaskedPatchPrediction) and job.held_out is not None
    source, rows = job.held_out
    chosen = rows[np.linspace(0, len(rows) - 1, min(_MOSAIC_IMAGES, len(rows))).round().astype(int)]
    images = np.stack([data.whole_image(source.image(int(row)), recipe.data.image_size) for row in chosen])
    plans = [objective.per_held_out_sample(0, int(row)) for row in chosen]
    device = next(job.model.parameters()).device
    batch = {key: torch.from_numpy(np.stack([plan[key] for plan in plans])).to(device) for key in plans[0]}
    batch["images"] = torch.from_numpy(images).to(device)
    job.model.eval()
    kind = TARGETS[recipe.objective.target]
    truth = kind.of_patches(batch["images"], objective.patch_size)
    guess = kind.decide(objective.predict(job.model, batch))
    index = batch["positions"].reshape(*batch["positions"].shape, *[1] * (guess.dim() - 2)).expand_as(guess)
    mixed = truth.scatter(1, index, guess)
    pictures.draw_mosaic(
        path,
        images,
        plans,
        kind.paint(mixed, objective.patch_size).cpu().numpy(),
        kind.paint(truth, objective.patch_size).cpu().numpy(),
        [source.classes[source.labels[row]] for row in chosen] if source.classes and source.labels is not None else (),
    )
