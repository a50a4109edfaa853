"""Compare pre-training methods under one fine-tuning, with paired seeds, and report it.

python eval/compare.py --recipe compare_demo --output runs/demo
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from accelerate import Accelerator

from mpp import (
    command_line,
    comparison,
    comparison_report,
    config,
    cost,
    evaluation,
    frozen,
    probe,
    report,
    run,
    run_folder,
    wiring,
)
from mpp.comparison_folder import CONTROL, Comparison, PlannedArm, weights_of
from mpp.console import Console
from mpp.errors import ImageError, UserError
from mpp.files import read_json, read_json_list, slug, write_text

Record = dict[str, Any]
Failures = dict[str, dict[str, str]]  # arm -> task -> why
_BASELINES = {"random_encoder": "random encoder, frozen", "raw_pixels": "raw pixels", "chance": "chance"}


def main(argv: Sequence[str] | None = None) -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--arm", action="append", metavar="NAME", help="measure this arm only; again for more than one"
        )
        parser.add_argument(
            "--merge",
            action="append",
            type=Path,
            metavar="DIR",
            help="take in what another call of the same comparison measured elsewhere; again for more than one",
        )

    flags = command_line.parse(
        argv,
        command="eval/compare.py",
        purpose="Pre-train the arms that need it, fine-tune all of them alike, and write report.md, report.html and "
        "results.json. Calls with different --arm share an --output, or are put together by --merge.",
        example="python eval/compare.py --recipe compare_demo --output runs/demo",
        recipe="compare_demo",
        more=more,
    )
    command_line.exit_with(lambda: _compare(flags))


def _compare(flags: argparse.Namespace) -> None:
    plan = config.load_compare(flags.recipe, flags.overrides)
    whole = Comparison(plan, flags.output or command_line.default_output(flags.recipe))
    unknown = set(flags.arm or ()) - set(plan.arms)
    if unknown:
        raise UserError(f"--arm {sorted(unknown)[0]}: no such arm; there are {', '.join(plan.arms)}")
    if flags.merge and flags.overwrite:
        raise UserError("--merge and --overwrite: what was merged would be measured again; give one of them")
    chosen = [arm for arm in whole.arms if not flags.arm or arm.name in flags.arm]
    if flags.dry_run:
        _print_costs(whole, chosen)
        return
    run_folder.require_own_folder(whole.output, plan, config.load_compare, flags.overwrite)
    for other in flags.merge or ():
        whole.require_part(other)
    began = time.monotonic()
    processes = wiring.start_processes(whole.shared_tuning(next(iter(plan.tasks))), Console(quiet=True))
    if processes.is_main_process:  # the others have looked into the folder before they got here
        for other in flags.merge or ():
            print(f"{other}: {whole.take_in(other)} finished runs taken in")
    processes.wait_for_everyone()
    failures: Failures = {arm.name: {} for arm in [*whole.arms, whole.control]}
    missing = _rehearse(whole, chosen, failures, flags.overwrite)
    if all(len(failures[arm.name]) == len(plan.tasks) for arm in chosen):
        raise UserError("\n".join(dict.fromkeys(message for arm in chosen for message in failures[arm.name].values())))
    screen = Console(sum(_images(whole, arm, missing) for arm in [*chosen, whole.control]))
    if processes.is_main_process:
        (whole.output / "figures").mkdir(parents=True, exist_ok=True)
        config.save(plan, whole.output / "config.yaml")
    for name, task, message in _listed(failures):
        screen.say(f"warning: {name} can't be measured on {task}, the others go on: {message}")
    _measure(whole, chosen, missing, failures, processes, screen, flags.overwrite)
    screen.close()
    if processes.is_main_process:
        screen.say("\n" + _report(whole, failures))
        minutes = (time.monotonic() - began) / 60
        screen.say(f"\nreport: {whole.output / 'report.html'} and report.md ({minutes:.1f} min)")
    if any(failures.values()):
        names = [name for name, found in failures.items() if found]
        raise UserError(
            f"{', '.join(names)} failed; the report names them, and the same command tries them again.\n"
            + "\n".join(f"{name} on {task}: {message}" for name, task, message in _listed(failures))
        )


def _listed(failures: Failures) -> list[tuple[str, str, str]]:
    return [(name, task, message) for name, found in failures.items() for task, message in found.items()]


# ---------------------------------------------------------------- before anything is trained


Units = set[tuple[str, str, int]]  # arm, task, seed


def _rehearse(whole: Comparison, chosen: Sequence[PlannedArm], failures: Failures, overwrite: bool) -> Units:
    """What has to be fine-tuned; notes what would stop an arm after hours of training, and writes nothing."""
    missing: Units = set()
    for arm in [*chosen, *_controls(whole, chosen)]:
        for task in whole.plan.tasks:
            try:
                seeds = [seed for seed in whole.plan.seeds if overwrite or not whole.finished(arm, task, seed)]
                tunings = [whole.tuning(arm, task, seed) for seed in seeds]
                if tunings and arm.name != CONTROL:
                    wiring.rehearse_arm(arm.pretraining, tunings)
                    if whole.plan.probes:
                        _rehearse_probes(tunings[0], "few_shot" in whole.plan.probes)
            except UserError as error:
                failures[arm.name][task] = str(error)
            else:
                missing |= {(arm.name, task, seed) for seed in seeds}
    return missing


def _rehearse_probes(recipe: config.RunConfig, few_shot: bool) -> None:
    """Raises UserError where classifiers on frozen features can't be had of a fine-tuning's data."""
    train, _ = evaluation.open_labelled(recipe)
    if few_shot:
        try:
            frozen.shot_rows(train, recipe.probe.seeds[0], max(recipe.probe.shots))
        except UserError as error:
            raise UserError(f"probe.shots={list(recipe.probe.shots)}: {error}") from None


def _controls(whole: Comparison, chosen: Sequence[PlannedArm]) -> list[PlannedArm]:
    """The control, where the plan has it and the arm that it is made from is measured by this call."""
    with_it = "shuffled_labels" in whole.plan.baselines and whole.arms[0].name in [arm.name for arm in chosen]
    return [whole.control] if with_it else []


def _parts(whole: Comparison, arm: PlannedArm, missing: Units) -> list[tuple[str, config.RunConfig, int]]:
    """What has to be trained for an arm: part, recipe at one learning rate, and how often."""
    wanted = [
        task for task in whole.plan.tasks if any(name == arm.name and task == other for name, other, _ in missing)
    ]
    parts = [("pre-training", arm.pretraining, 1)] if arm.pretraining is not None and wanted else []
    for task in wanted:
        recipe = whole.tuning(arm, task, whole.plan.seeds[0])
        rates = recipe.optim.learning_rate if isinstance(recipe.optim.learning_rate, tuple) else ()
        sweeps = len(rates) * len(whole.choices(arm, task)) if arm.name != CONTROL else 0
        one = config.with_rate(recipe, rates[0]) if rates else recipe
        seeds = sum((arm.name, task, seed) in missing for seed in whole.plan.seeds)
        parts += [(f"choice of the rate, {task}", one, sweeps)] if sweeps else []
        parts.append((f"fine-tuning, {task}", one, seeds))
    return parts


def _images(whole: Comparison, arm: PlannedArm, missing: Units) -> int:
    return sum(wiring.planned_images(recipe) * count for _, recipe, count in _parts(whole, arm, missing))


def _print_costs(whole: Comparison, chosen: Sequence[PlannedArm]) -> None:
    """Every recipe once, and a table of what it costs; nothing on disk is looked at."""
    arms = [*chosen, *_controls(whole, chosen)]
    missing = {(arm.name, task, seed) for arm in arms for task in whole.plan.tasks for seed in whole.plan.seeds}
    shown, rows, all_images, all_hours = {}, [], 0, 0.0
    for arm in arms:
        for part, recipe, count in _parts(whole, arm, missing):
            recipe = dataclasses.replace(recipe, init="scratch")
            found = wiring.count_cost(recipe, wiring.any_classes(recipe))
            images = wiring.planned_images(recipe) * count
            hours = wiring.exaflops(found, images) * 1e18 / (cost.A100_FLOPS * cost.UTILIZATION) / 3600
            shown[wiring.dry_run(recipe)] = f"# {arm.name}: {part}"
            rows.append([arm.name, part, f"{images:,}", f"{wiring.exaflops(found, images):.4g}", f"{hours:,.1f}"])
            all_images, all_hours = all_images + images, all_hours + hours
    print("\n\n".join(f"{title}\n{text}" for text, title in shown.items()))
    rows.append(["in all", "", f"{all_images:,}", "", f"{all_hours:,.1f}"])
    print("\n" + report.table(["arm", "part", "images", "exaFLOPs", "A100-hours"], rows))


# ---------------------------------------------------------------- measuring


def _measure(
    whole: Comparison,
    chosen: Sequence[PlannedArm],
    missing: Units,
    failures: Failures,
    processes: Accelerator,
    screen: Console,
    overwrite: bool,
) -> None:
    """Trains and measures what is not there yet; an arm that fails on a task stops there alone."""
    plan = whole.plan

    def attempt(name: str, tasks: Sequence[str], action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError as error:
            if isinstance(error, ImageError) and processes.num_processes > 1:
                raise  # one process alone may have met it
            failures[name].update({task: failures[name].get(task, str(error)) for task in tasks})
            screen.say(f"warning: {name} failed, the others go on: {error}")
            return None

    rates: dict[tuple[str, str], float] = {}
    for number, arm in enumerate(chosen):
        wanted = [task for task in plan.tasks if any((arm.name, task, seed) in missing for seed in plan.seeds)]
        if not wanted:
            screen.say(f"{arm.name}: all of it is finished; --overwrite starts it again")
            continue
        screen.say(f"[arm {number + 1}/{len(chosen)}] {arm.name}")
        if arm.pretraining is not None:
            make = partial(run.pretrain, arm.pretraining, Path(arm.init), screen, overwrite=overwrite)
            attempt(arm.name, wanted, make)
        for task in wanted:
            if task not in failures[arm.name]:
                choose = partial(_chosen_rate, whole, arm, task, screen, overwrite)
                rates[arm.name, task] = attempt(arm.name, [task], choose)
    for seed in plan.seeds:
        for task in plan.tasks:
            for arm in [*chosen, *_controls(whole, chosen)]:
                if (arm.name, task, seed) not in missing or task in failures[arm.name]:
                    continue
                screen.say(f"[seed {seed}] {arm.name} on {task}")
                if arm.name == CONTROL and (arm.name, task) not in rates:
                    rates[arm.name, task] = attempt(arm.name, [task], partial(_rate_of_first, whole, task))
                    if task in failures[arm.name]:
                        continue
                recipe = config.with_rate(whole.tuning(arm, task, seed), rates[arm.name, task])
                tune = partial(
                    run.finetune,
                    recipe,
                    whole.unit(arm, task, seed),
                    screen,
                    overwrite=overwrite,
                    arm=arm.name,
                    data_set=task,
                )
                attempt(arm.name, [task], tune)
    for task in plan.tasks:
        for name, measure, weights in _frozen_measures(whole, chosen, task, failures, processes):
            kept = partial(_keep_frozen, whole, task, name, measure, weights, processes, screen, overwrite)
            failures.setdefault(name, {})
            attempt(name, [task], kept)


def _chosen_rate(whole: Comparison, arm: PlannedArm, task: str, screen: Console, overwrite: bool) -> float:
    """The learning rate of an arm on a task: the best on held-out training images, over `choice_seeds`."""
    choices = whole.choices(arm, task)
    if not choices:
        rate = whole.tuning(arm, task, whole.plan.seeds[0]).optim.learning_rate
        return rate[0] if isinstance(rate, tuple) else rate
    tried = [run.sweep(recipe, folder, screen, overwrite=overwrite) for folder, recipe in choices.items()]
    return run.best_rate(tried, f"{arm.name} on {task}")


def _rate_of_first(whole: Comparison, task: str) -> float:
    """The learning rate that was chosen for the first arm, which the control takes, too."""
    for seed in whole.plan.seeds:
        if whole.finished(whole.arms[0], task, seed):
            return read_json_list(whole.unit(whole.arms[0], task, seed) / "results.json")[0]["learning_rate"]
    raise UserError(f"{whole.arms[0].name} was not measured on {task}, whose learning rate the control takes")


# ---------------------------------------------------------------- classifiers on frozen encoders


def _frozen_measures(
    whole: Comparison, chosen: Sequence[PlannedArm], task: str, failures: Failures, processes: Accelerator
) -> list[tuple[str, Callable[[], list[Record]], str | None]]:
    """Name, measure and weights of what is measured of frozen encoders: of this call's arms, and the baselines."""
    plan = whole.plan
    found: list[tuple[str, Callable[[], list[Record]], str | None]] = []
    for arm in chosen if plan.probes else ():
        if task not in failures[arm.name]:
            found.append((arm.name, partial(_frozen, whole, arm.name, task, arm, processes), weights_of(arm.init)))
    if chosen != whole.arms:
        return found
    blank = PlannedArm("", None, "scratch", ())
    for name, measure in {
        "random_encoder": partial(_frozen, whole, "random_encoder", task, blank, processes),
        "raw_pixels": partial(_raw_pixels, whole, task, blank),
        "chance": partial(_chance, whole, task, blank),
    }.items():
        if name in plan.baselines:
            found.append((name, measure, ""))
    return found


def _keep_frozen(
    whole: Comparison,
    task: str,
    name: str,
    measure: Callable[[], list[Record]],
    weights: str | None,
    processes: Accelerator,
    screen: Console,
    overwrite: bool,
) -> None:
    """Measures once, and keeps the records with what they were measured of."""
    kept, shared = whole.frozen(task, name), whole.shared_tuning(task)
    what = f"{config.recipe_hash(shared)} {whole.plan.probes} {whole.plan.seeds} {shared.probe}"
    found = read_json(kept) if kept.is_file() and not overwrite else {}
    processes.wait_for_everyone()  # all have looked before one writes
    if found.get("with") == what and weights in (None, found.get("weights")):
        return
    screen.say(f"frozen: {_BASELINES.get(name, name)} on {task}")
    records = [record | {"data_set": task} for record in measure()]
    if processes.is_main_process:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps({"with": what, "weights": weights, "records": records}, indent=1))
    processes.wait_for_everyone()


def _frozen(whole: Comparison, name: str, task: str, arm: PlannedArm, processes: Accelerator) -> list[Record]:
    """A linear classifier on the labelled images that each seed draws, and few-shot ones on the training split."""
    found = []
    for seed in whole.plan.seeds:
        recipe = whole.tuning(arm, task, seed)
        train, test = evaluation.open_labelled(recipe)
        read = evaluation.reader(recipe, processes)
        if "linear" in whole.plan.probes:
            fitted = evaluation.linear(read, evaluation.labelled_parts(recipe, train, test), recipe)
            accuracy = probe.accuracy(fitted.scores, np.asarray(test.labels))
            about = {"strength": fitted.strength, "at_edge": fitted.at_edge, "converged": fitted.converged}
            found.append(evaluation.record(recipe, name, "linear_probe_accuracy", accuracy, **about))
        if "few_shot" in whole.plan.probes and seed == whole.plan.seeds[0]:  # it has seeds of its own
            drawn = [frozen.shot_rows(train, one, max(recipe.probe.shots)) for one in recipe.probe.seeds]
            wiring.require_disjoint(recipe, train, np.unique(np.concatenate(drawn)), test)
            for (shots, own_seed), hits in evaluation.few_shot(read, recipe, train, test).items():
                own = dataclasses.replace(recipe, seed=own_seed)
                found.append(evaluation.record(own, name, f"{shots}_shot_accuracy", float(hits.mean()), shots=shots))
    return found


def _raw_pixels(whole: Comparison, task: str, arm: PlannedArm) -> list[Record]:
    found = []
    for seed in whole.plan.seeds:
        recipe = dataclasses.replace(whole.tuning(arm, task, seed), init="none")
        train, test = evaluation.open_labelled(recipe)
        parts = evaluation.labelled_parts(recipe, train, test)
        fitted = evaluation.linear(evaluation.pixel_reader(recipe), parts, recipe)
        accuracy = probe.accuracy(fitted.scores, np.asarray(test.labels))
        found.append(evaluation.record(recipe, "raw_pixels", "linear_probe_accuracy", accuracy))
    return found


def _chance(whole: Comparison, task: str, arm: PlannedArm) -> list[Record]:
    recipe = dataclasses.replace(whole.tuning(arm, task, whole.plan.seeds[0]), init="none")
    _, test = evaluation.open_labelled(recipe)
    share = float(np.bincount(np.asarray(test.labels)).max() / len(test))
    return [evaluation.record(recipe, "chance", "most_frequent_accuracy", share)]


# ---------------------------------------------------------------- the report


def _report(whole: Comparison, failures: Failures) -> str:
    """Writes results.json, pictures and report from what lies on disk; returns what a person should see at once."""
    plan, arms, records = whole.plan, [], []
    for arm in whole.arms:
        found, own = whole.collect(arm, failures[arm.name])
        arms.append(found)
        records += own
        for picture in (Path(arm.init) / "figures").glob("*.png") if arm.pretraining is not None else ():
            shutil.copyfile(picture, whole.output / "figures" / f"{slug(arm.name)}_{picture.name}")
    for name in plan.baselines:
        if name == "shuffled_labels":
            found, own = whole.collect(whole.control, failures[CONTROL])
            found.seen, found.beside = f"as {whole.arms[0].name}", True
            records += own
        else:
            seen = "nothing" if name == "random_encoder" else ""
            found = comparison.Arm(_BASELINES[name], seen, failures=failures.get(name, {}), beside=True)
            for task in plan.tasks:
                records += whole.collect_frozen(found, name, task)
        arms.append(found)
    write_text(whole.output / "results.json", json.dumps(records, indent=1))
    pretrainings = {
        arm.name: (arm.pretraining, read_json(Path(arm.init) / "summary.json"))
        for arm in whole.arms
        if arm.pretraining is not None and (Path(arm.init) / "summary.json").is_file()
    }
    tunings = {task: whole.shared_tuning(task) for task in plan.tasks}
    return comparison_report.write(whole.output, plan, arms, tunings, pretrainings)


if __name__ == "__main__":
    main()
