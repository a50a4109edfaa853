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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from accelerate import Accelerator

from mpp import command_line, comparison, comparison_report, config, evaluation, run, run_folder, tasks, wiring
from mpp.comparison import Outcome, Spending
from mpp.config import CompareConfig, RunConfig
from mpp.console import Console
from mpp.errors import ImageError, UserError
from mpp.files import read_json, write_text

Record = dict[str, Any]
_PRETRAINING = "pretraining."  # before an override of an arm's pre-training
_BASELINES = {
    "random_encoder": "random encoder, frozen",
    "raw_pixels": "raw pixels",
    "chance": "chance",
    "shuffled_labels": "shuffled labels",
}


@dataclass(frozen=True)
class Arm:
    """One initialisation of the comparison.

    Attributes:
        pretraining: the recipe that makes it, or None.
        init: the REF that the fine-tuning starts from.
        changes: overrides of the fine-tuning, for this arm alone.
    """

    name: str
    pretraining: RunConfig | None
    init: str
    changes: tuple[str, ...]

    @property
    def seen(self) -> str:
        if self.pretraining is not None:
            return f"{wiring.planned_images(self.pretraining):,} images"
        return "nothing" if self.init == "scratch" else self.init


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
    output = flags.output or command_line.default_output(flags.recipe)
    arms = [_arm(name, value, output) for name, value in plan.arms.items()]
    unknown = set(flags.arm or ()) - set(plan.arms)
    if unknown:
        raise UserError(f"--arm {sorted(unknown)[0]}: no such arm; there are {', '.join(plan.arms)}")
    chosen = [arm for arm in arms if not flags.arm or arm.name in flags.arm]
    if flags.dry_run:
        _print_costs(plan, chosen)
        return
    run_folder.require_own_folder(output, plan, config.load_compare, flags.overwrite)
    for other in flags.merge or ():
        _require_part(other, plan)
    failures = _rehearse(plan, chosen, output, flags.overwrite)
    if len(failures) == len(arms):
        raise UserError("\n".join(dict.fromkeys(failures.values())))

    began = time.monotonic()
    screen = Console(_images_to_train(plan, chosen, failures))
    processes = wiring.start_processes(
        _tuning(plan, arms[0], next(iter(plan.tasks)), plan.seeds[0]), Console(quiet=True)
    )
    if processes.is_main_process:  # the others have looked into the folder before they got here
        (output / "figures").mkdir(parents=True, exist_ok=True)
        config.save(plan, output / "config.yaml")
        for other in flags.merge or ():
            _take_in(other, output, arms, screen)
    processes.wait_for_everyone()
    for name, message in failures.items():
        screen.say(f"warning: {name} can't be measured, the others go on: {message}")
    _measure(plan, chosen, output, failures, screen, flags.overwrite)
    if not flags.arm:
        _baselines(plan, arms, output, failures, processes, screen, flags.overwrite)
    screen.close()
    if processes.is_main_process:
        _tell(plan, arms, output, failures, screen)
        screen.say(f"\nreport: {output / 'report.html'} and report.md ({(time.monotonic() - began) / 60:.1f} min)")
    if failures:
        listed = "\n".join(f"{name}: {message}" for name, message in failures.items())
        raise UserError(
            f"{len(failures)} of {len(arms)} arms failed; the report names them, and the same command tries them "
            f"again.\n{listed}"
        )


# ---------------------------------------------------------------- the plan


def _arm(name: str, value: str | tuple[str, ...], output: Path) -> Arm:
    first, *more = (value,) if isinstance(value, str) else value
    before = [change.removeprefix(_PRETRAINING) for change in more if change.startswith(_PRETRAINING)]
    changes = tuple(change for change in more if not change.startswith(_PRETRAINING))
    if first in config.recipe_names() or first.endswith((".yaml", ".yml")):
        return Arm(name, config.load_run(first, before)[0], str(output / _slug(name)), changes)
    if before:
        raise UserError(f"arms.{name}: {first} is no recipe, so there is no pre-training to override ({before[0]})")
    return Arm(name, None, first, changes)


def _slug(name: str) -> str:
    return name.replace(" ", "_").replace("/", "_")


def _folder(output: Path, arm: str, task: str) -> Path:
    return output / "finetune" / _slug(arm) / _slug(task)


def _tuning(plan: CompareConfig, arm: Arm, task: str, seed: int, *more: str) -> RunConfig:
    """The fine-tuning of an arm on a task; a row of the table of tasks brings its splits and preprocessing."""
    recipe, *overrides = plan.tasks[task]
    own = [f"init={arm.init}", f"seed={seed}", *arm.changes, *more]
    if task in tasks.TASKS:
        given = [value.partition("=")[2] for value in overrides if value.startswith("data.source=")]
        size = config.load_run(recipe, overrides)[0].data.image_size
        overrides = [*tasks.overrides(task, given[-1] if given else None, size), *overrides]
    return config.load_run(recipe, [*overrides, *own])[0]


def _choices(plan: CompareConfig, arm: Arm, task: str) -> dict[int, RunConfig]:
    """The sweeps of an arm on a task by seed; none where there is one learning rate."""
    found = {seed: _tuning(plan, arm, task, seed) for seed in plan.choice_seeds}
    rates = next(iter(found.values())).optim.learning_rate
    return found if isinstance(rates, tuple) and len(rates) > 1 else {}


def _with_rate(recipe: RunConfig, rate: float) -> RunConfig:
    return dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, learning_rate=rate))


def _images_to_train(plan: CompareConfig, chosen: Sequence[Arm], failures: dict[str, str]) -> int:
    total = 0
    for arm in chosen:
        if arm.name in failures:
            continue
        total += wiring.planned_images(arm.pretraining) if arm.pretraining is not None else 0
        for task in plan.tasks:
            optim = _tuning(plan, arm, task, plan.seeds[0]).optim
            rates = optim.learning_rate if isinstance(optim.learning_rate, tuple) else (optim.learning_rate,)
            sweeps = len(rates) * len(plan.choice_seeds) if len(rates) > 1 else 0
            total += (sweeps + len(plan.seeds)) * optim.steps * optim.batch_size
    return total


def _print_costs(plan: CompareConfig, chosen: Sequence[Arm]) -> None:
    shown: list[str] = []
    for arm in chosen:
        recipes = [arm.pretraining] if arm.pretraining is not None else []
        recipes += [_tuning(plan, arm, task, plan.seeds[0]) for task in plan.tasks]
        shown += [wiring.dry_run(dataclasses.replace(recipe, init="scratch")) for recipe in recipes]
    print("\n\n".join(dict.fromkeys(shown)))
    print(f"\nin all             {_images_to_train(plan, chosen, {}):,} images")


def _rehearse(plan: CompareConfig, chosen: Sequence[Arm], output: Path, overwrite: bool) -> dict[str, str]:
    """What would stop an arm after hours of training, by arm; writes nothing."""
    failures = {}
    for arm in chosen:
        try:
            for task in plan.tasks:
                tunings = [_tuning(plan, arm, task, seed) for seed in plan.seeds]
                done = [
                    _finished(_folder(output, arm.name, task) / f"seed_{tuning.seed}", tuning) for tuning in tunings
                ]
                if overwrite or not all(done):
                    wiring.rehearse_arm(arm.pretraining, tunings)
        except UserError as error:
            failures[arm.name] = str(error)
    return failures


# ---------------------------------------------------------------- measuring


def _finished(folder: Path, recipe: RunConfig) -> bool:
    """Whether a folder holds this fine-tuning, finished, at whatever learning rate was chosen and wherever it was.

    Raises UserError where it holds one under another protocol.
    """
    if not (folder / "summary.json").is_file() or not (folder / "results.json").is_file():
        return False
    there = config.load_run(str(folder / "config.yaml"))[0]
    rate = there.optim.learning_rate
    assert isinstance(rate, float)
    changed = config.changed_keys(there, dataclasses.replace(_with_rate(recipe, rate), init=there.init))
    if changed:
        listed = "\n  ".join(changed)
        raise UserError(
            f"{folder} was fine-tuned under another protocol; name another --output, or give --overwrite. "
            f"What differs:\n  {listed}"
        )
    return True


def _measure(
    plan: CompareConfig,
    chosen: Sequence[Arm],
    output: Path,
    failures: dict[str, str],
    screen: Console,
    overwrite: bool,
) -> None:
    """Pre-trains, chooses learning rates and fine-tunes what is not there yet; an arm that fails stops alone."""

    def attempt(arm: Arm, action: Callable[[], Any]) -> Any:
        if arm.name in failures:
            return None
        try:
            return action()
        except ImageError:  # one process alone may have met it
            raise
        except UserError as error:
            failures[arm.name] = str(error)
            screen.say(f"warning: {arm.name} failed, the others go on: {error}")
            return None

    missing = {
        (arm.name, task, seed)
        for arm in chosen
        for task in plan.tasks
        for seed in plan.seeds
        if overwrite
        or not attempt(
            arm, partial(_finished, _folder(output, arm.name, task) / f"seed_{seed}", _tuning(plan, arm, task, seed))
        )
    }
    rates: dict[tuple[str, str], float] = {}
    for number, arm in enumerate(chosen):
        wanted = [task for task in plan.tasks if any((arm.name, task, seed) in missing for seed in plan.seeds)]
        if not wanted:
            screen.skip(_images_to_train(plan, [arm], failures))
            screen.say(f"{arm.name}: all of it is finished; --overwrite starts it again")
            continue
        screen.say(f"[arm {number + 1}/{len(chosen)}] {arm.name}")

        def prepare(arm: Arm = arm, wanted: list[str] = wanted) -> None:
            if arm.pretraining is not None:
                run.pretrain(arm.pretraining, Path(arm.init), screen, overwrite=overwrite)
            for task in wanted:
                rates[arm.name, task] = _chosen_rate(plan, arm, task, output, screen, overwrite)

        attempt(arm, prepare)
    for seed in plan.seeds:
        for task in plan.tasks:
            for arm in chosen:
                if (arm.name, task, seed) not in missing or arm.name in failures:
                    continue
                screen.say(f"[seed {seed}] {arm.name} on {task}")
                recipe = _with_rate(_tuning(plan, arm, task, seed), rates[arm.name, task])
                folder = _folder(output, arm.name, task) / f"seed_{seed}"
                attempt(
                    arm, partial(run.finetune, recipe, folder, screen, overwrite=overwrite, arm=arm.name, data_set=task)
                )


def _chosen_rate(plan: CompareConfig, arm: Arm, task: str, output: Path, screen: Console, overwrite: bool) -> float:
    """The learning rate of an arm on a task: the best on held-out training images, over `choice_seeds`."""
    choices = _choices(plan, arm, task)
    if not choices:
        rate = _tuning(plan, arm, task, plan.seeds[0]).optim.learning_rate
        return rate[0] if isinstance(rate, tuple) else rate
    folder = _folder(output, arm.name, task)
    tried = [
        run.sweep(recipe, folder / "choice" / f"seed_{seed}", screen, overwrite=overwrite)
        for seed, recipe in choices.items()
    ]
    return run.best_rate(tried, f"{arm.name} on {task}")


def _baselines(
    plan: CompareConfig,
    arms: Sequence[Arm],
    output: Path,
    failures: dict[str, str],
    processes: Accelerator,
    screen: Console,
    overwrite: bool,
) -> None:
    """Classifiers on frozen encoders and raw pixels, and the control with shuffled labels; kept in `frozen/`."""
    able = [arm for arm in arms if arm.name not in failures]
    for task in plan.tasks:
        first = _tuning(plan, able[0], task, plan.seeds[0])
        measures: dict[str, Callable[[], list[Record]]] = {}
        for arm in able if plan.probes else ():
            measures[arm.name] = partial(_frozen, plan, arm.name, task, arm, processes)
        if "random_encoder" in plan.baselines:
            random = dataclasses.replace(able[0], init="scratch")
            measures["random_encoder"] = partial(_frozen, plan, "random_encoder", task, random, processes)
        if "raw_pixels" in plan.baselines:
            measures["raw_pixels"] = partial(_raw_pixels, plan, task, able[0])
        if "chance" in plan.baselines:
            measures["chance"] = partial(_chance, plan, task, able[0])
        for name, measure in measures.items():
            kept = output / "frozen" / _slug(task) / f"{_slug(name)}.json"
            with_this = config.recipe_hash(dataclasses.replace(first, init="")) + f" {plan.probes} {first.probe}"
            found = read_json(kept) if kept.is_file() and not overwrite else {}
            processes.wait_for_everyone()  # all have looked before one writes
            if found.get("with") == with_this:
                continue
            screen.say(f"frozen: {_BASELINES.get(name, name)} on {task}")
            records = measure()
            if processes.is_main_process:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_text(kept, json.dumps({"with": with_this, "records": records}, indent=1))
            processes.wait_for_everyone()
        if "shuffled_labels" not in plan.baselines:
            continue
        control = _control(able[0])
        for seed in plan.seeds:
            folder, before = (_folder(output, arm.name, task) / f"seed_{seed}" for arm in (control, able[0]))
            recipe = _tuning(plan, control, task, seed)
            if not overwrite and _finished(folder, recipe):
                continue
            screen.say(f"[seed {seed}] {control.name} on {task}")
            rate = json.loads((before / "results.json").read_text())[0]["learning_rate"]
            run.finetune(_with_rate(recipe, rate), folder, screen, overwrite=overwrite, arm=control.name, data_set=task)


def _control(arm: Arm) -> Arm:
    """An arm fine-tuned on shuffled labels, which must score at chance if nothing leaks."""
    return Arm(_BASELINES["shuffled_labels"], None, arm.init, (*arm.changes, "data.shuffle_labels=true"))


def _frozen(plan: CompareConfig, name: str, task: str, arm: Arm, processes: Accelerator) -> list[Record]:
    """What classifiers make of an arm's frozen encoder, on the labelled images that each seed draws."""
    found = []
    for seed in plan.seeds:
        recipe = _tuning(plan, arm, task, seed)
        train, test = evaluation.open_labelled(recipe)
        read = evaluation.reader(recipe, processes)
        if "linear" in plan.probes or name == "random_encoder":
            parts = evaluation.labelled_parts(recipe, train, test)
            fitted = evaluation.linear(read, parts, recipe)
            accuracy = evaluation.accuracy_on(fitted.scores, test)
            found.append(evaluation.record(recipe, name, "linear_probe_accuracy", accuracy, task=task))
        if "few_shot" in plan.probes and seed == plan.seeds[0]:
            for (shots, own_seed), hits in evaluation.few_shot(read, recipe, train, test).items():
                own = dataclasses.replace(recipe, seed=own_seed)
                found.append(evaluation.record(own, name, f"{shots}_shot_accuracy", float(hits.mean()), task=task))
    return found


def _raw_pixels(plan: CompareConfig, task: str, arm: Arm) -> list[Record]:
    found = []
    for seed in plan.seeds:
        recipe = dataclasses.replace(_tuning(plan, arm, task, seed), init="none")
        train, test = evaluation.open_labelled(recipe)
        parts = evaluation.labelled_parts(recipe, train, test)
        fitted = evaluation.linear(evaluation.pixel_reader(recipe), parts, recipe)
        accuracy = evaluation.accuracy_on(fitted.scores, test)
        found.append(evaluation.record(recipe, "raw_pixels", "linear_probe_accuracy", accuracy, task=task))
    return found


def _chance(plan: CompareConfig, task: str, arm: Arm) -> list[Record]:
    recipe = dataclasses.replace(_tuning(plan, arm, task, plan.seeds[0]), init="none")
    _, test = evaluation.open_labelled(recipe)
    share = float(np.bincount(np.asarray(test.labels)).max() / len(test))
    return [evaluation.record(recipe, "chance", "most_frequent_accuracy", share, task=task)]


# ---------------------------------------------------------------- parts that were measured elsewhere


def _require_part(other: Path, plan: CompareConfig) -> None:
    """Raises UserError where a folder holds no part of this comparison."""
    if not (other / "config.yaml").is_file():
        raise UserError(f"--merge {other}: no comparison there (its config.yaml is missing)")
    if config.load_compare(str(other / "config.yaml")) != plan:
        raise UserError(f"--merge {other} holds another comparison; compare its config.yaml with --recipe")


def _take_in(other: Path, output: Path, arms: Sequence[Arm], screen: Console) -> None:
    """Copies what a part measured and this folder lacks; checkpoints stay where they are."""
    folders = [path.parent.relative_to(other) for path in other.glob("finetune/*/*/*/config.yaml")]
    folders += [Path(_slug(arm.name)) for arm in arms if (other / _slug(arm.name) / "summary.json").is_file()]
    taken = 0
    for folder in sorted(folders):
        if not (output / folder).exists():
            shutil.copytree(other / folder, output / folder, ignore=shutil.ignore_patterns("checkpoints", "inputs"))
            taken += 1
    for file in other.glob("frozen/*/*.json"):
        if not (output / file.relative_to(other)).exists():
            (output / file.relative_to(other)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, output / file.relative_to(other))
    screen.say(f"{other}: {taken} runs taken in")


# ---------------------------------------------------------------- the report


def _collect(plan: CompareConfig, arm: Arm, output: Path, failure: str | None) -> comparison.Arm:
    """All that lies on disk of an arm."""
    found = comparison.Arm(arm.name, arm.seen, failure=failure)
    if arm.pretraining is not None and (Path(arm.init) / "summary.json").is_file():
        found.cost["pre-training"] = _spending(read_json(Path(arm.init) / "summary.json"))
    weights = set()
    for task in plan.tasks:
        best: dict[str, dict[int, np.ndarray]] = {}
        labels: dict[str, np.ndarray] = {}
        each_image, folder = 0.0, _folder(output, arm.name, task)
        for seed in plan.seeds:
            unit = folder / f"seed_{seed}"
            if not (unit / "summary.json").is_file():
                continue
            summary, records = read_json(unit / "summary.json"), json.loads((unit / "results.json").read_text())
            weights.add(summary["inputs"]["init"])
            found.rates[task], each_image = records[0]["learning_rate"], summary["exaflops"] / summary["images"]
            found.cost["fine-tuning"] = found.cost.get("fine-tuning", Spending()) + _spending(summary)
            for name, predictions in run_folder.read_arrays(unit / run_folder.PREDICTIONS).items():
                test_set = _test_set(plan, task, name.removesuffix("_labels"))
                if name.endswith("_labels"):
                    labels[test_set] = predictions
                else:
                    best.setdefault(test_set, {})[seed] = predictions
        found.outcomes |= {
            name: Outcome(values, labels[name]) for name, values in best.items() if (labels[name] >= 0).any()
        }
        for seed in plan.choice_seeds:
            tried = {
                file.parent.name.removeprefix("learning_rate_"): read_json(file)
                for file in (folder / "choice" / f"seed_{seed}" / "sweep").glob("*/summary.json")
            }
            if not tried:
                continue
            found.sweeps.setdefault(task, {})[seed] = dict(sorted(tried.items(), key=lambda item: float(item[0])))
            spent = sum(
                (_spending(one | {"exaflops": each_image * one["images"]}) for one in tried.values()), Spending()
            )
            found.cost["choice of the learning rate"] = (
                found.cost.get("choice of the learning rate", Spending()) + spent
            )
        base = _tuning(plan, dataclasses.replace(arm, changes=()), task, plan.seeds[0])
        found.differs += config.changed_keys(base, _tuning(plan, arm, task, plan.seeds[0]))
        kept = output / "frozen" / _slug(task) / f"{_slug(arm.name)}.json"
        for record in read_json(kept)["records"] if kept.is_file() else ():
            found.frozen.setdefault((task, record["metric"]), []).append(record["value"])
    if len(weights) > 1 and failure is None:
        found.failure = (
            "its seeds were fine-tuned from different weights, so that they are no repetitions of one another; start "
            "it again with --overwrite"
        )
        found.outcomes.clear()
    return found


def _test_set(plan: CompareConfig, task: str, name: str) -> str:
    if name == "test":
        return task
    return name if len(plan.tasks) == 1 else f"{task}, {name}"


def _spending(summary: dict[str, Any]) -> Spending:
    hours = summary["seconds"] * summary["processes"] / 3600
    return Spending(summary["images"], summary["exaflops"], hours)


def _beside(plan: CompareConfig, arms: Sequence[Arm], output: Path) -> list[comparison.Arm]:
    """The control and the baselines, as they lie on disk."""
    found = []
    for name in plan.baselines:
        if name == "shuffled_labels":
            one = _collect(plan, _control(arms[0]), output, None)
            one.seen = f"as {arms[0].name}"
        else:
            one = _collect(plan, Arm(name, None, "scratch", ()), output, None)
            one.name = _BASELINES[name]
            one.seen = "" if name in ("raw_pixels", "chance") else "nothing"
        one.beside = True
        found.append(one)
    return found


def _tell(plan: CompareConfig, arms: Sequence[Arm], output: Path, failures: dict[str, str], screen: Console) -> None:
    """Writes results.json, the pictures and the report, and says the most important of it."""
    found = [_collect(plan, arm, output, failures.get(arm.name)) for arm in arms] + _beside(plan, arms, output)
    records = [
        record
        for file in sorted(output.glob("finetune/*/*/seed_*/results.json"))
        for record in json.loads(file.read_text())
    ]
    records += [record for file in sorted(output.glob("frozen/*/*.json")) for record in read_json(file)["records"]]
    write_text(output / "results.json", json.dumps(records, indent=1))
    for arm in arms:
        for picture in (Path(arm.init) / "figures").glob("*.png") if arm.pretraining is not None else ():
            shutil.copyfile(picture, output / "figures" / f"{_slug(arm.name)}_{picture.name}")
    tunings = {
        task: _tuning(plan, dataclasses.replace(arms[0], changes=()), task, plan.seeds[0]) for task in plan.tasks
    }
    summaries = {
        arm.name: (arm.pretraining, read_json(Path(arm.init) / "summary.json"))
        for arm in arms
        if arm.pretraining is not None and (Path(arm.init) / "summary.json").is_file()
    }
    text = comparison_report.write(output, plan, found, tunings, summaries)
    screen.say("\n" + text)


if __name__ == "__main__":
    main()
