"""What a comparison plans, and which runs on disk belong to it: the one place that decides so.

OUTPUT/
  ARM/                          pre-training, where the arm has a recipe
  finetune/ARM/TASK/seed_N/     a fine-tuning, measured on the test split
  finetune/ARM/TASK/choice/seed_N/sweep/learning_rate_X/   the rates that were tried
  frozen/TASK/ARM.json          classifiers on the frozen encoder
"""

import dataclasses
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mpp import comparison, config, files, references, run_folder, tasks
from mpp.comparison import Outcome, Spending
from mpp.config import CompareConfig, RunConfig
from mpp.errors import UserError
from mpp.files import read_json, slug

CONTROL = "shuffled labels"
_PRETRAINING = "pretraining."  # before an override of an arm's pre-training


@dataclass(frozen=True)
class PlannedArm:
    """One initialisation of a comparison.

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
            return f"{self.pretraining.optim.steps * self.pretraining.optim.batch_size:,} images"
        return "nothing" if self.init == "scratch" else self.init


@dataclass(frozen=True)
class Comparison:
    """A plan and the folder that it is carried out in."""

    plan: CompareConfig
    output: Path

    @property
    def arms(self) -> list[PlannedArm]:
        return [self._arm(name, value) for name, value in self.plan.arms.items()]

    def _arm(self, name: str, value: str | tuple[str, ...]) -> PlannedArm:
        first, *more = (value,) if isinstance(value, str) else value
        before = [change.removeprefix(_PRETRAINING) for change in more if change.startswith(_PRETRAINING)]
        changes = tuple(change for change in more if not change.startswith(_PRETRAINING))
        if first in config.recipe_names() or first.endswith((".yaml", ".yml")):
            return PlannedArm(name, config.load_run(first, before)[0], str(self.output / slug(name)), changes)
        if before:
            raise UserError(f"arms.{name}: {first} is no recipe, so there is no pre-training to override ({before[0]})")
        return PlannedArm(name, None, first, changes)

    @property
    def control(self) -> PlannedArm:
        """The first arm fine-tuned on shuffled labels, which must score at chance if nothing leaks."""
        first = self.arms[0]
        return PlannedArm(CONTROL, None, first.init, (*first.changes, "data.shuffle_labels=true"))

    def tuning(self, arm: PlannedArm, task: str, seed: int) -> RunConfig:
        """The fine-tuning of an arm on a task; a row of the table of tasks brings its splits and preprocessing."""
        recipe, *overrides = self.plan.tasks[task]
        if task in tasks.TASKS:
            given = [value.partition("=")[2] for value in overrides if value.startswith("data.source=")]
            size = config.load_run(recipe, overrides)[0].data.image_size
            overrides = [*tasks.overrides(task, given[-1] if given else None, size), *overrides]
        return config.load_run(recipe, [*overrides, f"init={arm.init}", f"seed={seed}", *arm.changes])[0]

    def shared_tuning(self, task: str) -> RunConfig:
        """The fine-tuning on a task as all arms share it."""
        return self.tuning(dataclasses.replace(self.arms[0], changes=(), init="scratch"), task, self.plan.seeds[0])

    def folder(self, arm: PlannedArm, task: str) -> Path:
        return self.output / "finetune" / slug(arm.name) / slug(task)

    def unit(self, arm: PlannedArm, task: str, seed: int) -> Path:
        return self.folder(arm, task) / f"seed_{seed}"

    def choices(self, arm: PlannedArm, task: str) -> dict[Path, RunConfig]:
        """The sweeps of an arm on a task, by folder; none where there is one learning rate."""
        found = {
            self.folder(arm, task) / "choice" / f"seed_{seed}": self.tuning(arm, task, seed)
            for seed in self.plan.choice_seeds
        }
        rates = next(iter(found.values())).optim.learning_rate
        return found if isinstance(rates, tuple) and len(rates) > 1 else {}

    def frozen(self, task: str, name: str) -> Path:
        return self.output / "frozen" / slug(task) / f"{slug(name)}.json"

    def finished(self, arm: PlannedArm, task: str, seed: int) -> bool:
        """Whether the folder holds this fine-tuning, finished, at whatever rate was chosen and wherever it was made.

        Raises UserError where it holds one under another protocol, or from other weights.
        """
        folder, recipe = self.unit(arm, task, seed), self.tuning(arm, task, seed)
        if not (folder / "summary.json").is_file() or not (folder / "results.json").is_file():
            return False
        there = config.load_run(str(folder / "config.yaml"))[0]
        changed = config.changed_keys(
            there, config.with_rate(dataclasses.replace(recipe, init=there.init), there.optim.learning_rate)
        )
        what = "was fine-tuned under another protocol"
        before = self.output / slug(arm.name) / "config.yaml"
        if arm.pretraining is not None and before.is_file() and not changed:
            changed = config.changed_keys(config.load_run(str(before))[0], arm.pretraining)
            what = "starts from another pre-training"
        if changed:
            listed = "\n  ".join(changed)
            raise UserError(f"{folder} {what}; name another --output, or give --overwrite. What differs:\n  {listed}")
        weights, now = read_json(folder / "summary.json")["inputs"]["init"], weights_of(recipe.init)
        if now is not None and now != weights:
            raise UserError(
                f"{folder} was fine-tuned from other weights than init={recipe.init} holds now; name another "
                "--output, or give --overwrite"
            )
        return True

    def require_part(self, other: Path) -> None:
        """Raises UserError where a folder holds no part of this comparison."""
        if not (other / "config.yaml").is_file():
            raise UserError(f"--merge {other}: no comparison there (its config.yaml is missing)")
        if config.load_compare(str(other / "config.yaml")) != self.plan:
            raise UserError(f"--merge {other} holds another comparison; compare its config.yaml with --recipe")

    def take_in(self, other: Path) -> int:
        """Copies the finished runs that a part has and this folder lacks; checkpoints stay. Says how many."""
        done = [path.parent for path in other.glob("finetune/*/*/seed_*/summary.json")]
        done += [path.parent for arm in self.arms for path in (other / slug(arm.name)).glob("summary.json")]
        done += [path.parent for path in other.glob("finetune/*/*/choice/seed_*/sweep/*/summary.json")]
        taken = 0
        for folder in done:
            here = self.output / folder.relative_to(other)
            if not (here / "summary.json").is_file():
                shutil.rmtree(here, ignore_errors=True)
                shutil.copytree(folder, here, ignore=shutil.ignore_patterns("checkpoints", "inputs"))
                taken += 1
        for file in other.glob("frozen/*/*.json"):
            here = self.output / file.relative_to(other)
            if not here.exists():
                here.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, here)
        return taken

    def collect(self, arm: PlannedArm, failures: dict[str, str]) -> tuple[comparison.Arm, list[dict[str, Any]]]:
        """All that lies on disk of an arm and belongs to the plan, and its records.

        Args:
            failures: task -> why the arm failed on it; those met here are added.
        """
        found = comparison.Arm(arm.name, arm.seen, failures=failures)
        records: list[dict[str, Any]] = []
        made = Path(arm.init) / "summary.json"
        if arm.pretraining is not None and made.is_file():
            found.cost["pre-training"] = _spending(read_json(made))
        for task in self.plan.tasks:
            try:
                records += self._collect_task(found, arm, task)
            except UserError as error:
                failures.setdefault(task, str(error))
            mine = self.tuning(arm, task, self.plan.seeds[0])
            found.differs += config.changed_keys(
                self.tuning(dataclasses.replace(arm, changes=()), task, mine.seed), mine
            )
        return found, records

    def _collect_task(self, found: comparison.Arm, arm: PlannedArm, task: str) -> list[dict[str, Any]]:
        """Adds an arm's fine-tunings on a task, all of them or, where one does not belong, none."""
        units = [seed for seed in self.plan.seeds if self.finished(arm, task, seed)]
        records: list[dict[str, Any]] = []
        outcomes: dict[str, Outcome] = {}
        weights, spent = set(), Spending()
        for seed in units:
            folder = self.unit(arm, task, seed)
            summary, kept = read_json(folder / "summary.json"), files.read_json_list(folder / "results.json")
            arrays = run_folder.read_arrays(folder / run_folder.PREDICTIONS)
            inputs = summary["inputs"]
            weights.add(inputs["init"])
            spent += _spending(summary)
            records += kept
            found.rates[task] = kept[0]["learning_rate"]
            for name in arrays:
                if name.endswith("_labels") or not (arrays[f"{name}_labels"] >= 0).any():
                    continue
                test_set = task if name == "test" else self._further(task, name)
                outcome = outcomes.setdefault(test_set, Outcome({}, arrays[f"{name}_labels"], task=task))
                outcome.best[seed] = arrays[name]
                outcome.inputs[seed] = inputs[f"images {name}"], inputs["images train"]
        if len(weights) > 1:
            raise UserError("its seeds were fine-tuned from different weights, so that they are no repetitions")
        found.outcomes |= outcomes
        if units:
            found.cost["fine-tuning"] = found.cost.get("fine-tuning", Spending()) + spent
        for folder, recipe in self.choices(arm, task).items():
            tried = {
                file.parent.name.removeprefix("learning_rate_"): read_json(file)
                for file in (folder / "sweep").glob("*/summary.json")
            }
            if tried:
                found.sweeps.setdefault(task, {})[recipe.seed] = dict(
                    sorted(tried.items(), key=lambda one: float(one[0]))
                )
            for one in tried.values():
                name = "choice of the learning rate"
                found.cost[name] = found.cost.get(name, Spending()) + _spending(one)
        return records + self.collect_frozen(found, arm.name, task)

    def collect_frozen(self, found: comparison.Arm, name: str, task: str) -> list[dict[str, Any]]:
        """Adds what classifiers made of a frozen encoder."""
        kept = self.frozen(task, name)
        records = read_json(kept)["records"] if kept.is_file() else []
        for record in records:
            found.frozen.setdefault((task, record["metric"]), []).append(record["value"])
        return records

    def _further(self, task: str, name: str) -> str:
        """What a further test set is called in the report."""
        return name if len(self.plan.tasks) == 1 and name not in self.plan.tasks else f"{task}, {name}"


def weights_of(init: str) -> str | None:
    """Fingerprint of a REF's weights; None where they are not on this machine, or not there yet."""
    if init == "scratch":
        return ""
    try:
        file = references.weights_file(init)
    except UserError:
        return None
    return _fingerprint(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _fingerprint(file: Path, _: int) -> str:
    return files.fingerprint(file)


def _spending(summary: dict[str, Any]) -> Spending:
    return Spending(summary["images"], summary["exaflops"], summary["seconds"] * summary["processes"] / 3600)
