"""Frozen encoders by their REF: features that are made once, and classifiers on them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import nn

import mpp
from mpp import (
    checkpoint,
    config,
    contents,
    data,
    files,
    frozen,
    intervals,
    pictures,
    probe,
    report,
    run_folder,
    wiring,
)
from mpp.comparison import percent
from mpp.config import RunConfig
from mpp.console import Console
from mpp.errors import UserError
from mpp.features import cached, features, pixels
from mpp.frozen import Read, Rows
from mpp.sources import Source

_SILENT = Console(quiet=True)
Parts = list[tuple[Source, np.ndarray]]  # rows to fit on, to choose the strength on, to test on


def frozen_model(recipe: RunConfig) -> tuple[nn.Module, wiring.Pixels, wiring.Pixels, str]:
    """What a recipe's `init` names: a whole model where it is a pre-training's folder, else an encoder.

    Returns:
        The model, its pixel mean and standard deviation, and a text that is equal for equal weights only.
    """
    if recipe.init == "scratch":
        encoder, mean, std = wiring.frozen_encoder(recipe)
        return encoder, mean, std, f"scratch {recipe.seed} {dataclasses.asdict(recipe.model)}"
    file = checkpoint.weights_file(recipe.init)
    beside = file.parent / "objective.safetensors"
    key = " ".join(files.fingerprint(one) for one in (file, beside) if one.is_file())
    key += f" {dataclasses.asdict(recipe.model)}"
    folder = Path(recipe.init).expanduser()
    if (folder / "config.yaml").is_file() and beside.is_file():
        before, _ = config.load_run(str(folder / "config.yaml"))
        own = dataclasses.replace(before.model, position_resize=recipe.model.position_resize)
        resized = dataclasses.replace(before.data, image_size=recipe.data.image_size)
        return *wiring.pretrained_model(dataclasses.replace(before, model=own, data=resized), folder), key
    return *wiring.frozen_encoder(recipe), key


def open_labelled(recipe: RunConfig, console: Console = _SILENT) -> tuple[Source, Source]:
    """Training and test split, for classifiers that need one label an image; raises UserError where they can't be."""
    wiring.require_one_label(recipe)
    source = wiring.open_training(recipe, console)
    wiring.classes_of(source, recipe)
    return source, wiring.open_test(recipe, source, console)


def accuracy_on(scores: np.ndarray, test: Source) -> float:
    """Share of a test split whose label has the highest score, [row, class]."""
    return float((scores.argmax(1) == np.asarray(test.labels)).mean())


def reader(recipe: RunConfig, accelerator: Accelerator) -> Read:
    """Reads features of the encoder that a recipe starts from, as its evaluation cuts images.

    They are kept by content of weights and images (`mpp/features.py`), so that nothing is computed twice.
    """
    model, mean, std, weights = frozen_model(recipe)
    model.to(accelerator.device)
    view, chosen = wiring.view_of(recipe), recipe.probe
    workers = wiring.worker_count(recipe, accelerator.num_processes)
    seen = [view.image_size, view.eval_crop, view.resize, mean, std, chosen.features, chosen.block]

    def read(source: Source, rows: Rows) -> np.ndarray:
        images = contents.digest(source, rows, workers=workers)
        return cached(
            [mpp.__version__, weights, json.dumps(seen), images],
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


def linear(read: Read, parts: Parts, recipe: RunConfig) -> probe.Logistic:
    """A linear classifier on frozen features, its strength chosen on the second part.

    Args:
        parts: what `labelled_parts` returns.
    """
    fit, choice, test = ((read(source, rows), np.asarray(source.labels)[rows]) for source, rows in parts)
    classes = len(parts[0][0].classes or [])
    return probe.logistic(*fit, test[0], classes, strengths=recipe.probe.strengths, choice=choice)


def labelled_parts(recipe: RunConfig, train: Source, test: Source) -> Parts:
    """Labelled images as a fine-tuning's seed draws them: to fit on, to choose on, and the whole test split."""
    fit_rows, choice_rows = wiring.labelled_rows(recipe, train)
    if not len(choice_rows) and recipe.data.holdout:  # one learning rate needs no choice, a classifier's strength does
        fit_rows, choice_rows = data.labelled_rows(
            train,
            recipe.seed,
            recipe.data.per_class,
            recipe.data.holdout,
            data.subset_rows(len(train), recipe.data.subset),
        )
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
        UserError: there is none, or it is no recipe for labelled images.
    """
    overrides = list(overrides)
    if name is None:
        path, name, more = run_folder.newest_pretraining(Path("runs"), overrides)
        more += [f"init={path}"] if path is not None else []
        before = path or Path(next(value for value in overrides if value.startswith("init=")).partition("=")[2])
        more += run_folder.cut_overrides(config.load_run(str(before.expanduser() / "config.yaml"))[0], overrides)
        console.say(f"with the recipe {name}, as the run: {' '.join(more)}" if more else f"with the recipe {name}")
        overrides += more
    recipe, defaults = config.load_run(name, overrides)
    wiring.require_supervised(recipe)
    if defaults:
        console.say(f"not in the recipe, so by default: {', '.join(defaults)}")
    return recipe, Path(recipe.init).name or recipe.init


def _open(
    recipe: RunConfig, name: str, kind: str, output: Path | None, overwrite: bool, console: Console
) -> tuple[Path, Accelerator, Source, Source]:
    """Folder, processes, and the two splits; what can't be evaluated is refused before anything is written."""
    output = output or Path("runs") / kind / name
    run_folder.look_into(output, recipe, kind, overwrite)
    processes = wiring.start_processes(recipe, console)
    train, test = open_labelled(recipe, console)
    return output, processes, train, test


def _close(
    output: Path,
    recipe: RunConfig,
    kind: str,
    processes: Accelerator,
    records: list[dict[str, Any]],
    lines: Sequence[str],
) -> None:
    if processes.is_main_process:
        (output / "figures").mkdir(parents=True, exist_ok=True)
        config.save(recipe, output / "config.yaml")
        if kind == "few_shot":
            pictures.draw_shots(output / "figures" / "few_shot.png", records)
        files.write_text(output / "results.json", json.dumps(records, indent=1))
        files.write_text(output / "summary.json", json.dumps({"kind": kind, "recipe_hash": config.recipe_hash(recipe)}))
        report.write(output, "\n\n".join(lines) + "\n")
    processes.wait_for_everyone()


def _how(recipe: RunConfig) -> dict[str, Any]:
    chosen = recipe.probe
    return {"features": chosen.features, "block": chosen.block, "image_size": recipe.data.image_size}


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
    output, processes, train, test = _open(recipe, name, "few_shot", output, overwrite, console)
    chosen, most = recipe.probe, max(recipe.probe.shots)
    drawn = {seed: frozen.shot_rows(train, seed, most, allow_fewer) for seed in chosen.seeds}
    wiring.require_disjoint(recipe, train, np.unique(np.concatenate(list(drawn.values()))), test)
    counts = np.bincount(np.asarray(train.labels), minlength=len(train.classes or []))
    short = {(train.classes or [])[label]: int(counts[label]) for label in np.flatnonzero(counts < most)}
    if short:
        listed = ", ".join(f"{label} {count}" for label, count in list(short.items())[:5])
        console.say(
            f"--allow-fewer: {len(short)} classes have fewer than {most} images ({listed}); all of them are used"
        )
    found = few_shot(reader(recipe, processes), recipe, train, test, allow_fewer)
    records = [
        record(
            dataclasses.replace(recipe, seed=seed),
            recipe.init,
            f"{shots}_shot_accuracy",
            float(hits.mean()),
            shots=shots,
            form=chosen.form,
            strength=chosen.strength,
            images=len(hits),
            fewer={label: count for label, count in short.items() if count < shots},
            **_how(recipe),
        )
        for (shots, seed), hits in found.items()
    ]
    rows = []
    for shots in chosen.shots:
        hits = np.stack([found[shots, seed] for seed in chosen.seeds])
        interval = intervals.bootstrap(hits)
        each = " ".join(percent(value) for value in hits.mean(axis=1))
        rows.append(
            [str(shots), percent(interval.estimate), f"{percent(interval.low)} to {percent(interval.high)}", each]
        )
    table = report.table(["images a class", "accuracy", "95 % interval", "each seed"], rows)
    form = "standardised features and a constant (Google's code)" if chosen.form == "whitened" else "plain features"
    lines = [
        f"# Few-shot accuracy of {recipe.init}",
        table,
        f"Regularised least squares to -1 and 1 on {form}, strength {chosen.strength:g}; features: "
        f"{chosen.features or 'what the last layer reads'}"
        + (f" after block {chosen.block}" if chosen.block else "")
        + f"; {len(test):,} test images of {recipe.data.source} at {recipe.data.image_size} pixels.",
        "![accuracy against the number of labelled images](figures/few_shot.png)",
    ]
    if short:
        lines.insert(2, f"Classes with fewer images, all used: {', '.join(f'{k} {v}' for k, v in short.items())}.")
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
    rows = np.union1d(parts[0][1], parts[1][1])
    wiring.require_disjoint(recipe, train, rows, test)
    if max(chosen.neighbors) > len(rows):
        raise UserError(f"probe.neighbors={list(chosen.neighbors)}: there are {len(rows)} training images; use fewer")
    read = reader(recipe, processes)
    fitted = linear(read, parts, recipe)
    labels, tested = np.asarray(test.labels), parts[2][1]
    scores = probe.nearest(
        read(train, rows),
        np.asarray(train.labels)[rows],
        read(test, tested),
        len(train.classes or []),
        neighbors=chosen.neighbors,
        temperature=chosen.temperature,
    )
    hits = {"linear_probe_accuracy": fitted.scores.argmax(1) == labels}
    hits |= {f"{count}_nn_accuracy": scores[count].argmax(1) == labels for count in chosen.neighbors}
    about = {"images": len(test), "train_images": len(rows), **_how(recipe)}
    about_linear = {"strength": fitted.strength, "at_edge": fitted.at_edge, "converged": fitted.converged}
    records = [
        record(recipe, recipe.init, metric, float(one.mean()), **about, **(about_linear if "linear" in metric else {}))
        for metric, one in hits.items()
    ]
    shown = []
    for metric, one in hits.items():
        interval = intervals.bootstrap(one[None])
        title = "linear" if "linear" in metric else f"{metric.split('_')[0]} nearest neighbours"
        shown.append([title, percent(interval.estimate), f"{percent(interval.low)} to {percent(interval.high)}"])
    table = report.table(["classifier", "accuracy", "95 % interval"], shown)
    warnings = []
    if fitted.at_edge:
        warnings.append(
            f"Warning: the best strength, {fitted.strength:g}, is at the edge of probe.strengths; widen it, for there "
            "may be a better one."
        )
    if not fitted.converged:
        warnings.append("Warning: the linear classifier did not reach its optimum; its accuracy may be too low.")
    tried = report.table(
        ["inverse regularisation", "held-out accuracy"],
        [[f"{strength:g}", percent(value)] for strength, value in fitted.tried.items()],
    )
    lines = [
        f"# Linear probe of {recipe.init}",
        table,
        *warnings,
        f"{len(rows):,} training and {len(test):,} test images of {recipe.data.source} at {recipe.data.image_size} "
        f"pixels; features: {chosen.features or 'what the last layer reads'}"
        + (f" after block {chosen.block}" if chosen.block else "")
        + ". Intervals are over other test images.",
        *(
            [tried, f"Chosen on {len(parts[1][1]):,} held-out training images: {fitted.strength:g}."]
            if fitted.tried
            else []
        ),
    ]
    _close(output, recipe, "linear_probe", processes, records, lines)
    console.say("\n".join([table, *warnings, f"report: {output / 'report.html'}"]))
