"""The two kinds of run: pre-training, and fine-tuning with its choice of a learning rate."""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from mpp import config, pictures, run_folder, sources, wiring
from mpp.config import RunConfig
from mpp.console import Console
from mpp.errors import UserError
from mpp.files import read_json, write_text
from mpp.job import Job, measure_rows, run_loop
from mpp.model import encoder_of
from mpp.objectives import MaskedPatchPrediction
from mpp.targets import TARGETS
from mpp.train import Diverged

_MOSAIC_IMAGES = 8


def pretrain(recipe: RunConfig, output: Path, console: Console, *, overwrite: bool = False) -> dict[str, Any]:
    """Pre-trains as the recipe says, or continues; returns the summary that it leaves.

    Raises:
        UserError: whatever the user can mend; before training, nothing is written then.
        Stopped: after a signal, with the state saved.
    """
    wiring.require_one_rate(recipe)
    accelerator, source, inputs, finished = _begin(recipe, output, "pretrain", console, overwrite)
    if finished:
        return finished
    held_out = wiring.open_held_out(recipe, source, console)
    rows = wiring.training_rows(recipe, source)
    classes = None
    if recipe.objective.name == "supervised":
        classes = wiring.classes_of(source, recipe)
        wiring.require_loss_for(recipe, source, *([held_out[0]] if held_out else []))
    encoder, mean, std = wiring.initial_encoder(recipe, classes, console)
    objective = wiring.build_objective(recipe, encoder, classes, mean, std)
    wiring.warn(recipe, encoder, console)
    model = objective.build(encoder)
    job = Job(recipe, accelerator, console, output, objective, model, source, rows, held_out, classes, inputs)
    run_folder.open_folder(output, recipe, accelerator, console, overwrite, classes)
    figures = run_loop(job, "pre-training")
    if accelerator.is_main_process:
        pictures.draw_curves(output / "figures" / "curves.png", run_folder.read_records(output))
        if held_out and isinstance(objective, MaskedPatchPrediction):
            _draw_mosaic(job, output / "figures" / "mosaic.png")
    return _summarize(job, recipe, "pretrain", figures, figures["seconds"])


def _begin(
    recipe: RunConfig, output: Path, kind: str, console: Console, overwrite: bool
) -> tuple[Accelerator, sources.Source, dict[str, str], dict[str, Any] | None]:
    """Processes, training split, fingerprints of what is read, and the summary of a run that is finished already."""
    finished = run_folder.look_into(output, recipe, kind, overwrite)
    accelerator = wiring.start_processes(recipe, console)
    wiring.micro_batches(recipe, accelerator.num_processes)
    wiring.view_of(recipe)  # refuses an augmentation that can't be had
    source = wiring.open_training(recipe, console)
    inputs = wiring.inputs_of(recipe, source)
    if finished:
        run_folder.require_same_inputs(output, finished["inputs"], inputs)
        console.say(f"{output}: this run is finished; --overwrite starts it again")
        console.skip(wiring.planned_images(recipe))
    return accelerator, source, inputs, finished


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
    wiring.require_supervised(recipe)
    rates = recipe.optim.learning_rate
    rates = rates if isinstance(rates, tuple) else (rates,)
    accelerator, source, inputs, finished = _begin(recipe, output, "finetune", console, overwrite)
    if finished:
        return json.loads((output / "results.json").read_text())
    classes = wiring.classes_of(source, recipe)
    test = wiring.open_test(recipe, source, console)
    wiring.require_loss_for(recipe, source, test)
    fit_rows, choice_rows = wiring.labelled_rows(recipe, source)

    def resolved(rate: float, folder: Path, rows: np.ndarray, held_out: wiring.HeldOut | None, loud: bool) -> Job:
        with_rate = dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, learning_rate=rate))
        encoder, mean, std = wiring.initial_encoder(with_rate, classes, Console(quiet=not loud))
        objective = wiring.build_objective(with_rate, encoder, classes, mean, std)
        model = objective.build(encoder)
        return Job(with_rate, accelerator, console, folder, objective, model, source, rows, held_out, classes, inputs)

    every_row = np.union1d(fit_rows, choice_rows)
    final = resolved(rates[0], output, every_row, None, loud=True)  # before the folder: a bad init writes nothing
    wiring.warn(recipe, encoder_of(final.model), console)
    run_folder.open_folder(output, recipe, accelerator, console, overwrite, classes)
    tried: dict[str, dict[str, Any]] = {}
    if len(rates) > 1:
        for rate in rates:
            folder = output / "sweep" / f"learning_rate_{rate:g}"
            trial = resolved(rate, folder, fit_rows, (source, choice_rows), loud=False)
            numbers = tried[f"{rate:g}"] = _try_rate(trial)
            outcome = "diverged" if numbers["diverged"] else f"accuracy {_accuracy(numbers):.3f}"
            console.say(f"  learning rate {rate:g}: {outcome} on {len(choice_rows)} held-out training images")
        able = [rate for rate in rates if not tried[f"{rate:g}"]["diverged"]]
        if not able:
            raise Diverged(f"{output}: every learning rate of {list(rates)} diverged; give smaller ones")
        best = max(able, key=lambda rate: (_accuracy(tried[f"{rate:g}"]), -tried[f"{rate:g}"]["loss"]))
        final = resolved(best, output, every_row, None, loud=False)
    last = run_loop(final, "fine-tuning")
    seconds = last["seconds"] + sum(numbers["seconds"] for numbers in tried.values())
    figures = measure_rows(final, (test, range(len(test))))
    chosen = final.recipe.optim.learning_rate
    console.say(f"  {arm or recipe.init}: test accuracy {_accuracy(figures):.4f} with learning rate {chosen:g}")
    results = [
        {
            "arm": arm or recipe.init,
            "data_set": recipe.data.source,
            "metric": metric,
            "value": value,
            "seed": recipe.seed,
            "learning_rate": chosen,
            "init": recipe.init,
            "recipe_hash": config.recipe_hash(recipe),
            "images": len(test),
            "train_images": len(final.rows),
            "tried": tried,
        }
        for metric, value in figures.items()
    ]
    if accelerator.is_main_process:
        write_text(output / "results.json", json.dumps(results, indent=1))
        write_text(output / "report.md", _report(recipe, results, tried))
    _summarize(final, recipe, "finetune", {f"test_{name}": value for name, value in figures.items()}, seconds)
    return results


def _summarize(job: Job, recipe: RunConfig, kind: str, figures: Mapping[str, float], seconds: float) -> dict[str, Any]:
    found = wiring.count_cost(recipe, job.classes)
    return run_folder.write_summary(
        job.folder,
        recipe,
        job.accelerator,
        kind=kind,
        figures=figures,
        train_images=len(job.rows),
        parameters=found.parameters,
        exaflops=wiring.exaflops(found, wiring.planned_images(recipe)),
        inputs=job.inputs,
        seconds=seconds,
    )


def _accuracy(numbers: Mapping[str, float]) -> float:
    """Of a measurement; 0 where no image of it has a label, so that the loss decides."""
    return numbers.get("accuracy", 0.0)


def _try_rate(job: Job) -> dict[str, Any]:
    """Held-out loss and accuracy of one learning rate; kept, so that it is not tried again."""
    done = job.folder / "summary.json"
    if done.is_file():
        numbers = read_json(done)
        run_folder.require_same_inputs(job.folder.parent.parent, numbers["inputs"], job.inputs)
        job.console.skip(wiring.planned_images(job.recipe))
        return numbers
    assert job.held_out is not None
    if job.accelerator.is_main_process:
        job.folder.mkdir(parents=True, exist_ok=True)
    job.accelerator.wait_for_everyone()
    began = time.monotonic()
    title = f"learning rate {job.recipe.optim.learning_rate:g}"
    numbers = {"diverged": True}
    try:
        run_loop(dataclasses.replace(job, held_out=None), title, lines=False)
        measured = measure_rows(job, job.held_out)
        if math.isfinite(measured["loss"]):
            numbers = {**measured, "diverged": False}
    except Diverged:
        pass
    numbers |= {"seconds": round(time.monotonic() - began, 1), "inputs": job.inputs}
    job.accelerator.free_memory()
    if job.accelerator.is_main_process:
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
        write_text(done, json.dumps(numbers, indent=1))
    return numbers


def _report(recipe: RunConfig, results: list[dict[str, Any]], tried: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"# Fine-tuning of {recipe.init}", "", "| metric | value |", "| --- | --- |"]
    lines += [f"| {record['metric']} | {record['value']:.4f} |" for record in results]
    first = results[0]
    lines += ["", f"{first['images']} test images, {first['train_images']} training images, seed {recipe.seed}."]
    if tried:
        lines += ["", "| learning rate | held-out accuracy | held-out loss |", "| --- | --- | --- |"]
        for rate, numbers in tried.items():
            shown = "diverged | " if numbers["diverged"] else f"{_accuracy(numbers):.4f} | {numbers['loss']:.4f}"
            lines.append(f"| {rate} | {shown} |")
        lines += ["", f"Chosen on held-out training images: {first['learning_rate']:g}."]
    return "\n".join(lines) + "\n"


@torch.no_grad()
def _draw_mosaic(job: Job, path: Path) -> None:
    """The first held-out images, evenly over the split: seen, predicted and true colours."""
    objective, recipe = job.objective, job.recipe
    assert isinstance(objective, MaskedPatchPrediction) and job.held_out is not None
    source, rows = job.held_out
    evenly = np.linspace(0, len(rows) - 1, min(_MOSAIC_IMAGES, len(rows))).round().astype(int)
    chosen = [int(rows[place]) for place in evenly]
    images = np.stack([wiring.view_of(recipe).evaluate(source.picture(row)) for row in chosen])
    plans = [objective.per_held_out_sample(0, row) for row in chosen]
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
        _class_names(source, chosen),
    )


def _class_names(source: sources.Source, rows: list[int]) -> list[str]:
    """Titles of pictures; none where the source has no labels, or none that can be used."""
    try:
        classes, labels = source.classes, source.labels
    except UserError:
        return []
    if classes is None or labels is None:
        return []
    return [", ".join(classes[label] for label in np.atleast_1d(labels[row]) if label >= 0) for row in rows]
