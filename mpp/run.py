"""The two kinds of run: pre-training, and fine-tuning with its choice of a learning rate."""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from mpp import checkpoint, config, pictures, report, run_folder, sources, wiring
from mpp.background_push import BackgroundPush
from mpp.config import RunConfig
from mpp.console import Console
from mpp.errors import UserError
from mpp.files import read_json, read_json_list, write_text
from mpp.job import Job, classify_source, measure_rows, require_best, run_loop
from mpp.metrics import accuracies, labelled
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
    wiring.put_objective(recipe, model, console)
    probes = wiring.probes_of(recipe, mean, std, accelerator.num_processes)
    parts = (objective, model, source, rows, held_out, classes, inputs)
    job = Job(recipe, accelerator, console, output, *parts, probes=probes)
    require_best(job)
    wiring.require_push(recipe, accelerator)
    run_folder.open_folder(output, recipe, accelerator, console, overwrite, classes)
    with _pushing(recipe, output, accelerator, console) as push:
        figures = run_loop(dataclasses.replace(job, push=push), "pre-training")
        if accelerator.is_main_process:
            pictures.draw_curves(output / "figures" / "curves.png", run_folder.read_records(output))
            if held_out and isinstance(objective, MaskedPatchPrediction):
                _draw_mosaic(job, output / "figures" / "mosaic.png")
        best = _tell_best(job)
        return _summarize(job, recipe, "pretrain", figures, figures["seconds"], best)


@contextmanager
def _pushing(
    recipe: RunConfig, output: Path, accelerator: Accelerator, console: Console
) -> Iterator[BackgroundPush | None]:
    """Sends checkpoints to the Hub while a run lasts, and the last one at its end, if the recipe says so."""
    chosen = recipe.runtime
    if chosen.push_to_hub is None or not accelerator.is_main_process:
        yield None
        return
    push = BackgroundPush(output, [chosen.push_to_hub, *(["--private"] if chosen.push_private else [])], console.say)
    try:
        yield push
    except BaseException:
        push.stop()
        raise
    push.finish()


def _tell_best(job: Job) -> dict[str, Any] | None:
    """The best checkpoint by the number that the recipe names, for the summary."""
    metric = job.recipe.runtime.keep_best
    found = checkpoint.best(job.folder / "checkpoints", metric) if metric else None
    if found is None:
        return None
    job.console.say(f"best {found.metric} {found.value:.4g} at step {found.step}: {found.path}")
    return {"metric": found.metric, "value": found.value, "step": found.step}


def _begin(
    recipe: RunConfig, output: Path, kind: str, console: Console, overwrite: bool
) -> tuple[Accelerator, sources.Source, dict[str, str], dict[str, Any] | None]:
    """Processes, training split, fingerprints of what is read, and the summary of a run that is finished already."""
    finished = run_folder.look_into(output, recipe, kind, overwrite)
    accelerator = wiring.start_processes(recipe, console, output)
    wiring.micro_batches(recipe, accelerator.num_processes)
    wiring.view_of(recipe)  # refuses an augmentation that can't be had
    source = wiring.open_training(recipe, console)
    inputs = wiring.inputs_of(recipe, source)
    if finished:
        run_folder.require_same_inputs(output, finished["inputs"], inputs)
        console.say(f"{output}: this run is finished; --overwrite starts it again")
        console.skip(wiring.planned_images(recipe))
    return accelerator, source, inputs, finished


@dataclass(frozen=True)
class _Tuning:
    """What a fine-tuning reads, opened.

    Attributes:
        fit_rows, choice_rows: to train on, and to choose the learning rate on.
    """

    recipe: RunConfig
    accelerator: Accelerator
    source: sources.Source
    inputs: dict[str, str]
    classes: list[str]
    fit_rows: np.ndarray
    choice_rows: np.ndarray

    @property
    def rates(self) -> tuple[float, ...]:
        rates = self.recipe.optim.learning_rate
        return rates if isinstance(rates, tuple) else (rates,)

    def job(self, rate: float, folder: Path, rows: np.ndarray, console: Console) -> Job:
        """A run of the loop at one learning rate, on some rows."""
        recipe = config.with_rate(self.recipe, rate)
        encoder, mean, std = wiring.initial_encoder(recipe, self.classes, console)
        objective = wiring.build_objective(recipe, encoder, self.classes, mean, std)
        parts = (self.accelerator, console, folder, objective, objective.build(encoder), self.source, rows)
        return Job(recipe, *parts, held_out=None, classes=self.classes, inputs=self.inputs, kind="finetune")


def _open_tuning(
    recipe: RunConfig, output: Path, kind: str, console: Console, overwrite: bool
) -> tuple[_Tuning, dict[str, Any] | None]:
    wiring.require_supervised(recipe)
    if recipe.runtime.keep_best:
        raise UserError(
            f"runtime.keep_best={recipe.runtime.keep_best}: a fine-tuning measures nothing before its end, and its "
            "test split must not choose; leave it out"
        )
    accelerator, source, inputs, finished = _begin(recipe, output, kind, console, overwrite)
    classes = wiring.classes_of(source, recipe)
    fit_rows, choice_rows = wiring.labelled_rows(recipe, source)
    return _Tuning(recipe, accelerator, source, inputs, classes, fit_rows, choice_rows), finished


def sweep(recipe: RunConfig, output: Path, console: Console, *, overwrite: bool = False) -> dict[str, dict[str, Any]]:
    """Tries every learning rate of a fine-tuning on a part of the training split, measured on the rest of it.

    Returns:
        By learning rate: diverged, held-out loss and accuracy, and what it cost. The test split is not read.

    Raises: as `pretrain`.
    """
    tuning, _ = _open_tuning(recipe, output, "sweep", console, overwrite)
    if len(tuning.rates) < 2:
        raise UserError(f"optim.learning_rate={tuning.rates[0]:g}: there is nothing to choose; give a list of rates")
    wiring.require_loss_for(recipe, tuning.source)
    tuning.job(tuning.rates[0], output, tuning.fit_rows, console)  # before the folder: a bad init writes nothing
    run_folder.open_folder(output, recipe, tuning.accelerator, console, overwrite, tuning.classes)
    return _try_rates(tuning, output, console)


def _try_rates(tuning: _Tuning, output: Path, console: Console) -> dict[str, dict[str, Any]]:
    tried: dict[str, dict[str, Any]] = {}
    for rate in tuning.rates:
        numbers = tried[f"{rate:g}"] = _try_rate(tuning, rate, output, console)
        outcome = "diverged" if numbers["diverged"] else f"accuracy {_accuracy(numbers):.3f}"
        console.say(f"  learning rate {rate:g}: {outcome} on {len(tuning.choice_rows)} held-out training images")
    return tried


def best_rate(sweeps: Sequence[Mapping[str, Mapping[str, Any]]], where: str) -> float:
    """The learning rate of the best mean held-out accuracy over some sweeps of the same rates; the loss breaks ties.

    Raises Diverged where every rate diverged in one of them.
    """
    able = [rate for rate in sweeps[0] if not any(tried[rate]["diverged"] for tried in sweeps)]
    if not able:
        raise Diverged(f"{where}: every learning rate of {', '.join(sweeps[0])} diverged; give smaller ones")

    def merit(rate: str) -> tuple[float, float]:
        numbers = [tried[rate] for tried in sweeps]
        accuracy = fmean(_accuracy(one) for one in numbers)
        return round(accuracy, 12), -fmean(one["loss"] for one in numbers)  # sums in another order may round apart

    return float(max(able, key=merit))


def finetune(
    recipe: RunConfig, output: Path, console: Console, *, overwrite: bool = False, arm: str = "", data_set: str = ""
) -> list[dict[str, Any]]:
    """Fine-tunes one initialisation and reads the test split once; returns the records it leaves.

    Where `optim.learning_rate` is a list, each value is tried on a part of the training split and
    measured on the rest of it; the best is then trained on the whole of it. The test split is not
    read before that. `predictions.npz` keeps the most likely classes of every test image.

    Args:
        arm: the name of the initialisation in the records; its REF where it is empty.
        data_set: the name of the data in the records; the source where it is empty.

    Raises: as `pretrain`.
    """
    tuning, finished = _open_tuning(recipe, output, "finetune", console, overwrite)
    if finished:
        return read_json_list(output / "results.json")
    accelerator, source, classes = tuning.accelerator, tuning.source, tuning.classes
    test = wiring.open_test(recipe, source, console)
    wiring.require_loss_for(recipe, source, test)
    further = wiring.open_further_tests(recipe, test, classes)
    every_row = np.union1d(tuning.fit_rows, tuning.choice_rows)
    final = tuning.job(tuning.rates[0], output, every_row, console)  # a bad init writes nothing
    known = wiring.require_disjoint(recipe, source, every_row, test, further)  # last, for it may read every image
    wiring.warn(recipe, encoder_of(final.model), console)
    wiring.require_push(recipe, accelerator)
    run_folder.open_folder(output, recipe, accelerator, console, overwrite, classes)
    with _pushing(recipe, output, accelerator, console):  # what is sent is what was tested
        return _finetune(tuning, final, test, further, known, arm, data_set)


def _finetune(
    tuning: _Tuning,
    final: Job,
    test: sources.Source,
    further: Mapping[str, wiring.FurtherTest],
    known: int,
    arm: str,
    data_set: str,
) -> list[dict[str, Any]]:
    recipe, accelerator, source, classes = tuning.recipe, tuning.accelerator, tuning.source, tuning.classes
    output, console, every_row = final.folder, final.console, np.asarray(final.rows)
    tried: dict[str, dict[str, Any]] = {}
    if len(tuning.rates) > 1:
        tried = _try_rates(tuning, output, console)
        rate = best_rate([tried], str(output))
        final = dataclasses.replace(tuning.job(rate, output, every_row, Console(quiet=True)), console=console)
    last = run_loop(final, "fine-tuning")
    seconds = last["seconds"] + sum(numbers["seconds"] for numbers in tried.values())
    began = time.monotonic()
    labels = np.asarray(test.labels)
    figures, best = classify_source(final, test, labels)
    predictions = {"test": best, "test_labels": labels}
    measured = {"test": figures}
    for name, beside in further.items():
        guesses = best if beside.source is None else classify_source(final, beside.source, None)[1]
        predictions |= {name: guesses, f"{name}_labels": beside.labels}
        measured[name] = accuracies(guesses, beside.labels, len(classes))
    seconds += time.monotonic() - began
    chosen = final.recipe.optim.learning_rate
    console.say(f"  {arm or recipe.init}: test accuracy {_accuracy(figures):.4f} with learning rate {chosen:g}")
    results = [
        {
            "arm": arm or recipe.init,
            "data_set": data_set or recipe.data.source if name == "test" else name,
            "metric": metric,
            "value": value,
            "seed": recipe.seed,
            "learning_rate": chosen,
            "init": recipe.init,
            "recipe_hash": config.recipe_hash(recipe),
            "images": int(labelled(predictions[f"{name}_labels"]).sum()),
            "train_images": len(final.rows),
            "overlap": known,
            "tried": tried,
        }
        for name, numbers in measured.items()
        for metric, value in numbers.items()
    ]
    if accelerator.is_main_process:
        run_folder.write_arrays(output / run_folder.PREDICTIONS, predictions)
        write_text(output / "results.json", json.dumps(results, indent=1))
        report.write(output, _report(recipe, results, tried))
    tested = {f"{name}_{metric}": value for name, numbers in measured.items() for metric, value in numbers.items()}
    inputs = tuning.inputs | {
        "images train": wiring.content_of(recipe, source, every_row),
        "images test": wiring.content_of(recipe, test, range(len(test))),
    }
    for name, beside in further.items():
        seen = beside.source or test
        inputs[f"images {name}"] = wiring.content_of(recipe, seen, range(len(seen)))
    _summarize(dataclasses.replace(final, inputs=inputs), recipe, "finetune", tested, seconds)
    return results


def _summarize(
    job: Job,
    recipe: RunConfig,
    kind: str,
    figures: Mapping[str, float],
    seconds: float,
    best: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
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
        best=best,
    )


def _accuracy(numbers: Mapping[str, float]) -> float:
    """Of a measurement; 0 where no image of it has a label, so that the loss decides."""
    return numbers.get("accuracy", 0.0)


def _try_rate(tuning: _Tuning, rate: float, output: Path, console: Console) -> dict[str, Any]:
    """Held-out loss and accuracy of one learning rate; kept, so that it is not tried again."""
    folder = output / "sweep" / f"learning_rate_{rate:g}"
    done = folder / "summary.json"
    if done.is_file():
        numbers = read_json(done)
        run_folder.require_same_inputs(output, numbers["inputs"], tuning.inputs)
        console.skip(tuning.recipe.optim.steps * tuning.recipe.optim.batch_size)
        return numbers
    job = tuning.job(rate, folder, tuning.fit_rows, Console(quiet=True))
    job = dataclasses.replace(job, console=console)
    if job.accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    job.accelerator.wait_for_everyone()
    began = time.monotonic()
    numbers = {"diverged": True}
    try:
        run_loop(job, f"learning rate {rate:g}", lines=False)
        measured = measure_rows(job, (tuning.source, tuning.choice_rows))
        if math.isfinite(measured["loss"]):
            numbers = {**measured, "diverged": False}
    except Diverged:
        pass
    images = job.recipe.optim.steps * job.recipe.optim.batch_size
    numbers |= {
        "seconds": round(time.monotonic() - began, 1),
        "processes": job.accelerator.num_processes,
        "images": images,
        "exaflops": wiring.exaflops(wiring.count_cost(job.recipe, job.classes), images),
        "inputs": job.inputs,
    }
    job.accelerator.free_memory()
    if job.accelerator.is_main_process:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        write_text(done, json.dumps(numbers, indent=1))
    return numbers


def _report(recipe: RunConfig, results: list[dict[str, Any]], tried: Mapping[str, Mapping[str, Any]]) -> str:
    first = results[0]
    rows = [
        [record["data_set"], record["metric"], f"{record['value']:.4f}", f"{record['images']:,}"] for record in results
    ]
    lines = [
        f"# Fine-tuning of {recipe.init}",
        "",
        report.table(["data set", "metric", "value", "test images"], rows),
        "",
        f"{first['train_images']:,} training images, seed {recipe.seed}.",
    ]
    if first["overlap"]:
        lines[-1] += f" {first['overlap']} test images are among them (data.max_overlap={recipe.data.max_overlap})."
    if tried:
        shown = [
            [rate, "diverged", ""] if one["diverged"] else [rate, f"{_accuracy(one):.4f}", f"{one['loss']:.4f}"]
            for rate, one in tried.items()
        ]
        lines += ["", report.table(["learning rate", "held-out accuracy", "held-out loss"], shown)]
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
