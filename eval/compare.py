"""Compare pre-training methods under one fine-tuning, with paired seeds, and report it.

python eval/compare.py --recipe compare_demo --output runs/demo
"""

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from mpp import command_line, config, console, pictures, probe, run, run_folder, wiring
from mpp.files import read_json, write_text

Record = dict[str, Any]
_BASELINES = {"random_encoder": "random encoder, frozen", "raw_pixels": "raw pixels", "chance": "chance"}


@dataclass(frozen=True)
class Arm:
    """One initialisation of the comparison.

    Attributes:
        pretraining: the recipe that makes it, or None.
        init: the REF that the fine-tuning starts from.
    """

    name: str
    pretraining: config.RunConfig | None
    init: str


def main(argv: Sequence[str] | None = None) -> None:
    flags = command_line.parse(
        argv,
        command="eval/compare.py",
        purpose="Pre-train the arms that need it, fine-tune all of them alike, and write report.md and results.json.",
        example="python eval/compare.py --recipe compare_demo --output runs/demo",
        recipe="compare_demo",
    )
    command_line.exit_with(lambda: _compare(flags))


def _compare(flags: command_line.argparse.Namespace) -> None:
    plan = config.load_compare(flags.recipe, flags.overrides)
    output = flags.output or command_line.default_output(flags.recipe)
    arms = [_arm(name, value, output) for name, value in plan.arms.items()]
    tunings = {
        (arm.name, seed): config.load_run(plan.finetune, [f"init={arm.init}", f"seed={seed}"])[0]
        for arm in arms
        for seed in plan.seeds
    }
    recipes = [arm.pretraining for arm in arms if arm.pretraining is not None]
    if flags.dry_run:
        for recipe in [*recipes, next(iter(tunings.values()))]:
            print(wiring.dry_run(recipe), end="\n\n")
        print(f"in all             {sum(map(wiring.planned_images, [*recipes, *tunings.values()])):,} images")
        return
    run_folder.require_own_folder(output, plan, config.load_compare, flags.overwrite)
    wiring.require_one_label(next(iter(tunings.values())))
    for arm in arms:
        wiring.rehearse_arm(arm.pretraining, [tunings[arm.name, seed] for seed in plan.seeds])

    began = time.monotonic()
    screen = console.Console(sum(map(wiring.planned_images, [*recipes, *tunings.values()])))
    processes = wiring.start_processes(next(iter(tunings.values())), console.Console(quiet=True))
    if processes.is_main_process:  # the others have looked into the folder before they got here
        output.mkdir(parents=True, exist_ok=True)
        config.save(plan, output / "config.yaml")
        (output / "figures").mkdir(exist_ok=True)
    parts, part = len(recipes) + len(tunings), 0
    for arm in arms:
        if arm.pretraining is not None:
            part += 1
            screen.say(f"[{part}/{parts}] pre-training of {arm.name}")
            run.pretrain(arm.pretraining, Path(arm.init), screen, overwrite=flags.overwrite)
    records: list[Record] = []
    for seed in plan.seeds:
        for arm in arms:
            part += 1
            screen.say(f"[{part}/{parts}] fine-tuning {arm.name}, seed {seed}")
            folder = _tuning_folder(output, arm, seed)
            records += run.finetune(tunings[arm.name, seed], folder, screen, overwrite=flags.overwrite, arm=arm.name)
    screen.close()
    if not processes.is_main_process:
        return
    screen.say("measuring the baselines")
    for seed in plan.seeds:
        records += _frozen(arms, plan.baselines, {arm.name: tunings[arm.name, seed] for arm in arms}, seed)
    write_text(output / "results.json", json.dumps(records, indent=1))
    _draw(output, arms, plan, records)
    table = _table(arms, plan, records)
    write_text(output / "report.md", _report(output, arms, plan, records, table))
    screen.say("\n" + table + "\n")
    for arm in arms:
        for sentence in _pretraining_facts(arm):
            screen.say(sentence)
    for sentence in _differences(arms, records):
        screen.say(sentence.replace("**", ""))
    minutes = (time.monotonic() - began) / 60
    screen.say(f"\nreport: {output / 'report.md'}, pictures: {output / 'figures'} ({minutes:.1f} min)")


def _arm(name: str, value: str, output: Path) -> Arm:
    if value in config.recipe_names() or value.endswith((".yaml", ".yml")):
        return Arm(name, config.load_run(value)[0], str(output / _slug(name)))
    return Arm(name, None, value)


def _slug(name: str) -> str:
    return name.replace(" ", "_")


def _tuning_folder(output: Path, arm: Arm, seed: int) -> Path:
    return output / "finetune" / _slug(arm.name) / f"seed_{seed}"


def _frozen(
    arms: Sequence[Arm], baselines: Sequence[str], tunings: Mapping[str, config.RunConfig], seed: int
) -> list[Record]:
    """Linear classifiers on frozen features and raw pixels, on the labelled images that the seed draws."""
    recipe = next(iter(tunings.values()))
    train = wiring.open_split(recipe, recipe.data.train_split)
    test = wiring.open_split(recipe, recipe.data.eval_split)
    fit_rows, choice_rows = wiring.labelled_rows(recipe, train)
    parts = [(train, fit_rows), (train, choice_rows), (test, np.arange(len(test)))]
    view = wiring.view_of(recipe)
    labels = [np.asarray(source.labels)[rows] for source, rows in parts]

    def accuracy(features: list[np.ndarray]) -> float:
        return probe.linear_accuracy(*zip(features, labels, strict=True))

    def of_encoder(tuning: config.RunConfig) -> float:
        encoder, mean, std = wiring.frozen_encoder(tuning)
        return accuracy([probe.patch_means(encoder, source, rows, view, mean, std) for source, rows in parts])

    def record(arm: str, metric: str, value: float, init: str) -> Record:
        return {
            "arm": arm,
            "data_set": recipe.data.source,
            "metric": metric,
            "value": value,
            "seed": seed,
            "learning_rate": None,
            "init": init,
            "recipe_hash": config.recipe_hash(recipe),
        }

    found = [record(arm.name, "linear_probe_accuracy", of_encoder(tunings[arm.name]), arm.init) for arm in arms]
    if "random_encoder" in baselines:
        value = of_encoder(dataclasses.replace(recipe, init="scratch"))
        found.append(record("random_encoder", "linear_probe_accuracy", value, "scratch"))
    if "raw_pixels" in baselines:
        flat = [probe.pixels(source, rows, view).reshape(len(rows), -1) for source, rows in parts]
        value = accuracy([some.astype(np.float32) for some in flat])
        found.append(record("raw_pixels", "linear_probe_accuracy", value, "none"))
    if "chance" in baselines:
        most = np.bincount(labels[2]).max() / len(labels[2])
        found.append(record("chance", "most_frequent_accuracy", float(most), "none"))
    return found


def _values(records: Sequence[Record], arm: str, metric: str) -> np.ndarray:
    return np.array([record["value"] for record in records if record["arm"] == arm and record["metric"] == metric])


def _spread(values: np.ndarray) -> str:
    if not len(values):
        return ""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def _table(arms: Sequence[Arm], plan: config.CompareConfig, records: Sequence[Record]) -> str:
    rows = [["arm", "pre-trained on", "fine-tuned accuracy", "linear probe of frozen encoder", "each seed, fine-tuned"]]
    for arm in arms:
        tuned = _values(records, arm.name, "accuracy")
        seen = "nothing"
        if arm.pretraining is not None:
            seen = f"{wiring.planned_images(arm.pretraining):,} images"
        elif arm.init != "scratch":
            seen = arm.init
        probed = _spread(_values(records, arm.name, "linear_probe_accuracy"))
        rows.append([arm.name, seen, _spread(tuned), probed, " ".join(f"{value:.3f}" for value in tuned)])
    for name in plan.baselines:
        probed = _spread(_values(records, name, "linear_probe_accuracy"))
        if name == "chance":
            rows.append([_BASELINES[name], "", _spread(_values(records, name, "most_frequent_accuracy")[:1]), "", ""])
        else:
            rows.append([_BASELINES[name], "nothing", "", probed, ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def _differences(arms: Sequence[Arm], records: Sequence[Record]) -> list[str]:
    """Plain sentences about the paired differences, also where they say nothing."""
    base = next((arm for arm in arms if arm.init == "scratch"), None)
    if base is None:
        return []
    sentences = []
    for arm in arms:
        if arm is base:
            continue
        gain = 100 * (_values(records, arm.name, "accuracy") - _values(records, base.name, "accuracy"))
        each = ", ".join(f"{value:+.1f}" for value in gain)
        verdict = (
            "it helps in every seed"
            if (gain > 0).all()
            else "it hurts in every seed"
            if (gain < 0).all()
            else "the seeds disagree on the sign, so this run does not show that it helps"
        )
        sentences.append(
            f"**{arm.name}** against {base.name}: {gain.mean():+.1f} points of test accuracy in the mean "
            f"(seed by seed {each}); {verdict}."
        )
    return sentences


def _pretraining_facts(arm: Arm) -> list[str]:
    if arm.pretraining is None or arm.pretraining.objective.name != "mpp":
        return []
    found = read_json(Path(arm.init) / "summary.json")["figures"]
    if "held_out_loss" not in found:
        return []
    facts = [f"{arm.name}: held-out loss {found['held_out_loss']:.2f} nats"]
    if "held_out_target_entropy" in found:
        facts[0] += f"; the entropy of the colour classes is {found['held_out_target_entropy']:.2f}"
    if "held_out_nearest_patch_accuracy_masked" in found:
        ours, theirs = found["held_out_accuracy_masked"], found["held_out_nearest_patch_accuracy_masked"]
        outcome = "passes" if ours > theirs else "does not reach"
        facts.append(
            f"{arm.name}: accuracy on masked patches {ours:.3f} {outcome} the nearest-patch baseline {theirs:.3f} "
            f"(random patches {found['held_out_accuracy_random']:.3f}, kept {found['held_out_accuracy_kept']:.3f}, "
            f"always the most frequent colour {found['held_out_most_frequent_accuracy']:.3f})"
        )
    return facts


def _draw(output: Path, arms: Sequence[Arm], plan: config.CompareConfig, records: Sequence[Record]) -> None:
    baselines = {}
    for name in plan.baselines:
        metric = "most_frequent_accuracy" if name == "chance" else "linear_probe_accuracy"
        baselines[_BASELINES[name]] = float(_values(records, name, metric).mean())
    accuracies = {arm.name: _values(records, arm.name, "accuracy").tolist() for arm in arms}
    pictures.draw_arms(output / "figures" / "arms.png", accuracies, baselines)
    for arm in arms:
        for picture in (Path(arm.init) / "figures").glob("*.png") if arm.pretraining is not None else ():
            shutil.copyfile(picture, output / "figures" / f"{_slug(arm.name)}_{picture.name}")


def _report(
    output: Path,
    arms: Sequence[Arm],
    plan: config.CompareConfig,
    records: Sequence[Record],
    table: str,
) -> str:
    tuning = config.load_run(plan.finetune)[0]
    folders = [Path(arm.init) for arm in arms if arm.pretraining is not None]
    folders += [_tuning_folder(output, arm, seed) for arm in arms for seed in plan.seeds]
    seconds = sum(read_json(folder / "summary.json")["seconds"] for folder in folders)
    measured = [record for record in records if record["metric"] == "accuracy"]
    rates = {arm.name: [record["learning_rate"] for record in measured if record["arm"] == arm.name] for arm in arms}
    tried = tuning.optim.learning_rate
    grid = tried if isinstance(tried, tuple) else (tried,)
    lines = [
        "# Comparison of pre-training methods",
        "",
        table,
        "",
        f"Mean ± standard deviation over the seeds {list(plan.seeds)} of the fine-tuning; each encoder was pre-trained "
        f"once, so the spread does not contain that of pre-training. {measured[0]['images']} test images, "
        f"{measured[0]['train_images']} labelled training images a seed.",
        "",
        *[f"- {sentence}" for sentence in _differences(arms, records)],
        *[f"- {fact}." for arm in arms for fact in _pretraining_facts(arm)],
        "",
        "## Protocol",
        "",
        f"One recipe for all arms, `{plan.finetune}`: {tuning.optim.name}, {tuning.optim.steps} steps of "
        f"{tuning.optim.batch_size}. A seed draws the labelled images, their order and their crops, alike for every "
        f"arm. The learning rate is chosen for each arm and seed from {list(grid)} "
        f"on {tuning.data.holdout:.0%} of the labelled training images; the test split is read once after that. "
        "Baselines are logistic regressions on the same images, on the mean of the patch tokens or on raw pixels.",
        "",
        "| arm | learning rates chosen |",
        "| --- | --- |",
        *[f"| {name} | {', '.join(f'{rate:g}' for rate in chosen)} |" for name, chosen in rates.items()],
        "",
        f"Training time of all runs: {seconds / 60:.1f} minutes.",
        "",
        "![accuracy of the arms](figures/arms.png)",
        "",
    ]
    if tuning.data.source == "demo":
        lines += [
            "## What these images are",
            "",
            "Crops of 32 x 32 pixels of ten photographs; the question is which photograph a crop comes from. Training "
            "and test crops share no pixel. These are real colours and textures, and the pipeline's learning shows on "
            "them; it is not object recognition, and says nothing about accuracies on ImageNet. Labels are few on "
            "purpose, and so are the steps: the recipe `mpp_demo_long` pre-trains the same encoder for longer.",
            "",
        ]
    for arm in arms:
        if arm.pretraining is None:
            continue
        lines += [f"## Pre-training: {arm.name}", ""]
        for picture, caption in [
            ("mosaic.png", "held-out images: image, what the encoder saw, predicted and true colours"),
            ("curves.png", "loss and accuracy over the steps"),
        ]:
            if (output / "figures" / f"{_slug(arm.name)}_{picture}").is_file():
                lines += [f"![{caption}](figures/{_slug(arm.name)}_{picture})", "", caption.capitalize() + ".", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
