"""Frozen encoders by their REF: features that are made once, and classifiers on them."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from timm.models import VisionTransformer
from torch import nn

import mpp
from mpp import (
    checkpoint,
    config,
    contents,
    files,
    frozen,
    intervals,
    pictures,
    probe,
    references,
    report,
    run_folder,
    wiring,
)
from mpp.comparison import ends, percent
from mpp.config import RunConfig
from mpp.console import Console
from mpp.errors import UserError
from mpp.features import cached, features, pixels
from mpp.frozen import Read, Rows
from mpp.model import Classifier, MaskedPatchModel, represent
from mpp.sources import Source

_SILENT = Console(quiet=True)
Parts = list[tuple[Source, np.ndarray]]  # rows to fit on, to choose the strength on, to test on


def frozen_model(recipe: RunConfig) -> tuple[nn.Module, wiring.Pixels, wiring.Pixels]:
    """The encoder that a recipe starts from, in the whole model of its pre-training where that is beside it.

    Returns:
        The model, its pixel mean and standard deviation.

    Raises:
        UserError: there are no weights, or they do not fit the recipe's model.
    """
    if recipe.init == "scratch":
        return wiring.frozen_encoder(recipe)
    # Once, for a run that goes on may have a newer one a moment later.
    file = references.weights_file(recipe.init, Console().say_once)
    encoder, mean, std = wiring.frozen_encoder(dataclasses.replace(recipe, init=str(file)))
    beside = file.with_name(references.OBJECTIVE)
    if not beside.is_file():
        return encoder, mean, std
    there = checkpoint.read_weights(beside)
    if "head.bias" not in there:
        raise UserError(f"{beside} holds no prediction head of this package; take it out of the folder")
    outputs = len(there["head.bias"])
    model: nn.Module
    if "mask_embedding" in there:
        assert isinstance(encoder, VisionTransformer)
        model = MaskedPatchModel(encoder, outputs)
    else:
        model = Classifier(encoder, outputs)
    checkpoint.load_objective(beside.parent, model, encoder)
    return model, mean, std


def _digest(model: nn.Module) -> str:
    """Equal for equal weights only."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.cpu().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:32]


def open_labelled(recipe: RunConfig, console: Console = _SILENT) -> tuple[Source, Source]:
    """Training and test split, for classifiers that need one label an image; raises UserError where they can't be."""
    wiring.require_one_label(recipe)
    source = wiring.open_training(recipe, console)
    wiring.classes_of(source, recipe)
    return source, wiring.open_test(recipe, source, console)


def reader(recipe: RunConfig, accelerator: Accelerator) -> Read:
    """Reads features of the encoder that a recipe starts from, as its evaluation cuts images.

    They are kept by content of weights and images (`mpp/features.py`), so that nothing is computed twice.

    Raises:
        UserError: as `frozen_model`, or the model has no such features; before any image is read.
    """
    model, mean, std = frozen_model(recipe)
    view, chosen = wiring.view_of(recipe), recipe.probe
    represent(model, torch.zeros(1, 3, view.image_size, view.image_size), chosen.features, chosen.block)
    seen = [view.image_size, view.eval_crop, view.resize, mean, std, chosen.features, chosen.block]
    known = [mpp.__version__, _digest(model), json.dumps([dataclasses.asdict(recipe.model), *seen])]
    model.to(accelerator.device)
    workers = wiring.worker_count(recipe, accelerator.num_processes)

    def read(source: Source, rows: Rows) -> np.ndarray:
        images = contents.digest(source, rows, workers=workers)
        return cached(
            [*known, images],
            lambda: features(
                model,
                source,
                rows,
                view,
                mean,
                std,
                kind=chosen.features,
                block=chosen.block,
                micro_batch=recipe.runtime.micro_batch,
                workers=workers,
                accelerator=accelerator,
            ),
            accelerator=accelerator,
        )

    return read


def pixel_reader(recipe: RunConfig) -> Read:
    """Reads raw pixels in place of features."""
    view = wiring.view_of(recipe)
    return lambda source, rows: pixels(source, rows, view).reshape(len(rows), -1).astype(np.float32)


def linear(read: Read, parts: Parts, recipe: RunConfig, device: torch.device | str = "cpu") -> probe.Logistic:
    """A linear classifier on frozen features, its strength chosen on the second part.

    Args:
        parts: what `labelled_parts` returns.
        device: where it is fitted.
    """
    (train, fit_rows), (_, choice_rows), (tested, test_rows) = parts
    known = np.union1d(fit_rows, choice_rows)  # read together, so that every seed's parts of them are read once
    values, labels, test = read(train, known), np.asarray(train.labels), read(tested, test_rows)
    fit, choice = ((values[np.searchsorted(known, rows)], labels[rows]) for rows in (fit_rows, choice_rows))
    classes, strengths = len(parts[0][0].classes or []), recipe.probe.strengths
    return probe.logistic(*fit, test, classes, strengths=strengths, choice=choice, device=device)


def labelled_parts(recipe: RunConfig, train: Source, test: Source) -> Parts:
    """Labelled images as a fine-tuning's seed draws them: to fit on, to choose on, and the whole test split."""
    if recipe.data.holdout or recipe.data.choice_split:  # a strength is chosen where one learning rate would not be
        recipe = config.with_rate(recipe, (1.0, 2.0))
    fit_rows, choice_rows = wiring.labelled_rows(recipe, train)
    return [(train, fit_rows), (train, choice_rows), (test, np.arange(len(test)))]


def few_shot(
    read: Read, recipe: RunConfig, train: Source, test: Source, allow_fewer: bool = False
) -> Mapping[tuple[int, int], np.ndarray]:
    """Hits of few-shot classifiers on the whole test split, by (shots, seed), as a recipe's `probe` says."""
    chosen = recipe.probe
    return frozen.few_shot(
        read,
        train,
        test,
        np.arange(len(test)),
        shots=chosen.shots,
        seeds=chosen.seeds,
        form=chosen.form,
        strength=chosen.strength,
        allow_fewer=allow_fewer,
    )


def record(recipe: RunConfig, arm: str, metric: str, value: float, **more: Any) -> dict[str, Any]:
    """One measured number, as `results.json` holds it."""
    return {
        "arm": arm,
        "data_set": recipe.data.source,
        "metric": metric,
        "value": value,
        "seed": recipe.seed,
        "learning_rate": None,
        "init": recipe.init,
        "recipe_hash": config.recipe_hash(recipe),
        **more,
    }


# ---------------------------------------------------------------- entry points


def resolve(name: str | None, overrides: Sequence[str], console: Console) -> tuple[RunConfig, str]:
    """The recipe of a frozen evaluation, and what it evaluates, in a word for the folder.

    Where no recipe is named, it is the fine-tuning recipe of the run that `init` names, or of the newest, with that
    run's model and its way of cutting images: a frozen encoder is looked at as it was trained.

    Raises:
        UserError: there is none, or it is no recipe for labelled images, or a key would do nothing.
    """
    if name is None:
        path, name, model = run_folder.newest_pretraining(Path("runs"), overrides)
        given = [value.removeprefix("init=") for value in overrides if value.startswith("init=")]
        before, _ = config.load_run(str((path or Path(given[-1]).expanduser()) / "config.yaml"))
        own = [f"init={path}"] if path is not None else []
        own += [*model, *run_folder.cut_overrides(before, overrides)]
        if before.objective.name == "supervised" and before.model.pool != config.load_run(name)[0].model.pool:
            own.append(f"model.pool={json.dumps(before.model.pool)}")  # which its last layer was trained on
        console.say(f"with the recipe {name}, as the run: {' '.join(dict.fromkeys(own))}")
        overrides = [*own, *overrides]
    recipe, defaults = config.load_run(name, overrides)
    if recipe.objective.name != "supervised":
        raise UserError(
            f"--recipe {name} (objective.name={recipe.objective.name}) is a pre-training; name a recipe for labelled "
            "images, such as finetune_demo, or none for the one that the run names"
        )
    values = config.flat(recipe)
    for key in ("data.shuffle_labels", "probe.source", "probe.train_split", "probe.test_split"):
        if values[key]:
            raise UserError(f"{key} does nothing here, where images and labels are those of data.source; leave it out")
    defaults = [default for default in defaults if default.startswith(("data.", "model."))]
    if defaults:
        console.say(f"not in the recipe, so by default: {', '.join(defaults)}")
    return recipe, Path(recipe.init).expanduser().resolve().name


def _open(
    recipe: RunConfig, name: str, kind: str, output: Path | None, overwrite: bool, console: Console
) -> tuple[Path, Accelerator, Source, Source]:
    """Folder, processes, and the two splits; what can't be evaluated is refused before anything is written."""
    output = output or Path("runs") / kind / name
    _require_own_folder(output, recipe, kind, overwrite)
    processes = wiring.start_processes(recipe, _SILENT)
    count = processes.num_processes
    console.say(f"{count} process{'es' if count > 1 else ''} on {processes.device.type}, features in float32")
    train, test = open_labelled(recipe, console)
    return output, processes, train, test


def _require_own_folder(output: Path, recipe: RunConfig, kind: str, overwrite: bool) -> None:
    """Raises UserError where a folder holds anything but this evaluation."""
    before, summary = output / "config.yaml", output / "summary.json"
    if before.is_file() and not (summary.is_file() and files.read_json(summary).get("kind") == kind):
        raise UserError(f"--output {output} holds another kind of run, which must stay; name another folder")
    run_folder.look_into(output, recipe, kind, overwrite)
    if not before.is_file() or overwrite:
        return
    there, here = config.flat(config.load_run(str(before))[0]), config.flat(recipe)
    changed = [key for key in here if key.startswith("probe.") and there[key] != here[key]]
    if changed:
        listed = "\n  ".join(f"{key}: {there[key]} there, {here[key]} here" for key in changed)
        raise UserError(
            f"--output {output} holds another evaluation; name another folder, or give --overwrite to replace it. "
            f"What differs:\n  {listed}"
        )


def _close(
    output: Path,
    recipe: RunConfig,
    kind: str,
    processes: Accelerator,
    records: list[dict[str, Any]],
    lines: Sequence[str],
) -> None:
    if processes.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        files.write_text(output / "summary.json", json.dumps({"kind": kind, "recipe_hash": config.recipe_hash(recipe)}))
        config.save(recipe, output / "config.yaml")
        if kind == "few_shot":
            (output / "figures").mkdir(exist_ok=True)
            pictures.draw_shots(output / "figures" / "few_shot.png", records)
        files.write_text(output / "results.json", json.dumps(records, indent=1))
        report.write(output, "\n\n".join(lines) + "\n")
    processes.wait_for_everyone()


def _how(recipe: RunConfig, test: Source, overlap: int) -> dict[str, Any]:
    """What all records of an evaluation say of it."""
    chosen = recipe.probe
    weights = None if recipe.init == "scratch" else str(references.weights_file(recipe.init))
    return {
        "images": len(test),
        "overlap": overlap,
        "features": chosen.features,
        "block": chosen.block,
        "image_size": recipe.data.image_size,
        "weights": weights,
    }


def _in_words(recipe: RunConfig, how: Mapping[str, Any]) -> str:
    """The same for a reader of the report."""
    features = {
        "token": "the class token",
        "patches": "the mean of the patches",
        None: "what the last layer reads (after masked patch prediction, the mean of the patches)",
    }[recipe.probe.features]
    block = f" after block {recipe.probe.block}" if recipe.probe.block else ""
    text = (
        f"{how['images']:,} test images of {recipe.data.source} at {recipe.data.image_size} pixels. Weights: "
        f"{how['weights'] or f'drawn by seed {recipe.seed}'}; features: {features}{block}."
    )
    if how["overlap"]:
        text += f" Of them, training images, too: {how['overlap']} (data.max_overlap={recipe.data.max_overlap})."
    return text


def _interval(hits: np.ndarray) -> list[str]:
    """Accuracy and its interval as two cells, of hits [seed, image]."""
    found = intervals.bootstrap(hits)
    return [percent(found.estimate), ends(found)]


def run_few_shot(
    recipe: RunConfig,
    name: str,
    output: Path | None,
    console: Console,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    allow_fewer: bool = False,
) -> None:
    """Measures few-shot accuracy of a frozen encoder and leaves results.json and a report.

    Raises:
        UserError: whatever the user can mend, before anything is written.
    """
    if dry_run:
        console.say(config.to_yaml(recipe))
        return
    if recipe.data.subset is not None:
        raise UserError(
            "data.subset does nothing here, where the few images are of the whole training split; leave it out"
        )
    output, processes, train, test = _open(recipe, name, "few_shot", output, overwrite, console)
    chosen, most = recipe.probe, max(recipe.probe.shots)
    drawn = [frozen.shot_rows(train, seed, most, allow_fewer) for seed in chosen.seeds]
    counts = np.bincount(np.asarray(train.labels), minlength=len(train.classes or []))
    short = {(train.classes or [])[label]: int(counts[label]) for label in np.flatnonzero(counts < most)}
    listed = [f"{label} {count}" for label, count in short.items()]
    if short:
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        console.say(f"fewer than {most} images, all of them used: {', '.join(listed[:5])}{more}")
    read = reader(recipe, processes)
    how = _how(recipe, test, wiring.require_disjoint(recipe, train, np.unique(np.concatenate(drawn)), test))
    found = few_shot(read, recipe, train, test, allow_fewer)
    records = [
        record(
            dataclasses.replace(recipe, seed=seed),
            recipe.init,
            f"{shots}_shot_accuracy",
            float(hits.mean()),
            shots=shots,
            form=chosen.form,
            strength=chosen.strength,
            fewer={label: count for label, count in short.items() if count < shots},
            **how,
        )
        for (shots, seed), hits in found.items()
    ]
    rows = []
    for shots in chosen.shots:
        hits = np.stack([found[shots, seed] for seed in chosen.seeds])
        rows.append([str(shots), *_interval(hits), " ".join(percent(value) for value in hits.mean(axis=1))])
    table = report.table(["images a class", "accuracy", "95 % interval", "each seed"], rows)
    form = "standardised features and a constant (Google's code)" if chosen.form == "whitened" else "plain features"
    lines = [
        f"# Few-shot accuracy of {recipe.init}",
        table,
        *([f"Fewer than {most} images, all of them used: {', '.join(listed)}."] if short else []),
        f"Percent of {_in_words(recipe, how)} Regularised least squares to -1 and 1 on {form}, strength "
        f"{chosen.strength:g}. Intervals are over other test images and other labelled ones.",
        "![accuracy against the number of labelled images](figures/few_shot.png)",
    ]
    _close(output, recipe, "few_shot", processes, records, lines)
    console.say(f"{table}\nreport: {output / 'report.html'}")


def run_linear_probe(
    recipe: RunConfig,
    name: str,
    output: Path | None,
    console: Console,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
) -> None:
    """Measures a linear classifier and nearest neighbours on a frozen encoder; leaves results.json and a report.

    Raises: as `run_few_shot`.
    """
    if dry_run:
        console.say(config.to_yaml(recipe))
        return
    output, processes, train, test = _open(recipe, name, "linear_probe", output, overwrite, console)
    chosen, parts = recipe.probe, labelled_parts(recipe, train, test)
    rows, labels = np.union1d(parts[0][1], parts[1][1]), np.asarray(test.labels)
    if max(chosen.neighbors) > len(rows):
        raise UserError(f"probe.neighbors={list(chosen.neighbors)}: there are {len(rows)} training images; use fewer")
    read = reader(recipe, processes)
    how = _how(recipe, test, wiring.require_disjoint(recipe, train, rows, test))
    device = processes.device if processes.device.type == "cuda" else "cpu"  # not all others have float64
    fitted = linear(read, parts, recipe, device)
    scores = probe.nearest(
        read(train, rows),
        np.asarray(train.labels)[rows],
        read(*parts[2]),
        len(train.classes or []),
        neighbors=chosen.neighbors,
        temperature=chosen.temperature,
        device=device,
    )
    of_linear = {"strength": fitted.strength, "at_edge": fitted.at_edge, "converged": fitted.converged}
    measured = [("linear", "linear_probe_accuracy", fitted.scores, of_linear)]
    for count in chosen.neighbors:
        of_nearest = {"temperature": chosen.temperature}
        measured.append((f"{count} nearest neighbours", f"{count}_nn_accuracy", scores[count], of_nearest))
    records = [
        record(recipe, recipe.init, metric, probe.accuracy(some, labels), train_images=len(rows), **how, **more)
        for _, metric, some, more in measured
    ]
    shown = [[title, *_interval((some.argmax(1) == labels)[None])] for title, _, some, _ in measured]
    table = report.table(["classifier", "accuracy", "95 % interval"], shown)
    warnings = []
    if fitted.at_edge:
        warnings.append(
            f"Warning: the best strength, {fitted.strength:g}, is at the edge of probe.strengths; widen it, for there "
            "may be a better one."
        )
    if not fitted.converged:
        warnings.append("Warning: the linear classifier did not reach its optimum; its accuracy may be too low.")
    where = f"{len(parts[1][1]):,} held-out training images" if fitted.tried else "nothing, for data.holdout=0"
    lines = [
        f"# Linear probe of {recipe.init}",
        table,
        *warnings,
        f"Percent of {_in_words(recipe, how)} {len(rows):,} training images. Intervals are over other test images.",
        f"Inverse regularisation {fitted.strength:g}, chosen on {where}.",
    ]
    if fitted.tried:
        tried = [[f"{strength:g}", percent(value)] for strength, value in fitted.tried.items()]
        lines.append(report.table(["inverse regularisation", "held-out accuracy"], tried))
    _close(output, recipe, "linear_probe", processes, records, lines)
    console.say("\n".join([table, *warnings, f"report: {output / 'report.html'}"]))
