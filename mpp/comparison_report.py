"""The report of a comparison: what was measured, what it cost, and what it may be compared with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpp import comparison, config, pictures, report, tasks
from mpp.comparison import Arm, ends, percent
from mpp.config import CompareConfig, RunConfig
from mpp.files import slug

_MEASURES = {"linear_probe_accuracy": "linear probe, frozen"}
_INTERVALS = (
    "Accuracies are in percent, the mean over the seeds. An interval holds the true mean in 95 of 100 comparisons like "
    "this one, with other seeds of the fine-tuning and other test images (two-way bootstrap). Each encoder was "
    "pre-trained once, so that no interval contains the spread of pre-training."
)
_PAIRED = (
    "Differences are paired: a seed draws the same labelled images, order and crops for every arm, and all are tested "
    "on the same images."
)


def write(
    output: Path,
    plan: CompareConfig,
    arms: Sequence[Arm],
    tunings: Mapping[str, RunConfig],
    pretrainings: Mapping[str, tuple[RunConfig, Mapping[str, Any]]],
) -> str:
    """Writes report.md, report.html and figures/*.png; returns what a person should see at once.

    Args:
        arms: in order; baselines and controls last.
        tunings: the fine-tuning on each task, as all arms share it.
        pretrainings: arm -> its recipe and its summary.
    """
    results = _results(output, plan, arms)
    failures, edges = _failures(arms), comparison.edge_warnings(arms)
    facts = [fact for name, found in pretrainings.items() for fact in _pretraining_facts(name, *found)]
    sections = [
        "# Comparison of pre-training methods",
        *failures,
        *results,
        *facts,
        *_rates(output, plan, arms, edges),
        *_costs(arms),
        *_published(plan, arms, tunings, pretrainings),
        *_protocol(plan, tunings),
        *_demo(tunings),
        *_pictures(output, pretrainings),
    ]
    report.write(output, "\n\n".join(sections) + "\n")
    told = [
        section for section in [*results, *facts, *failures, *edges] if not section.startswith(("#", "!", _INTERVALS))
    ]
    return "\n\n".join(section.replace("**", "") for section in told)


def _test_sets(arms: Sequence[Arm]) -> list[str]:
    return list(dict.fromkeys(name for arm in arms for name in arm.outcomes))


def _results(output: Path, plan: CompareConfig, arms: Sequence[Arm]) -> list[str]:
    sections = [_INTERVALS]
    if len(plan.seeds) == 1:
        sections[0] += " There is one seed here, so the intervals are over other test images alone."
    if len(plan.tasks) > 1:
        sections.append(_overview(plan, arms))
    test_sets = _test_sets(arms)
    for test_set in test_sets or list(plan.tasks):
        measures = list(dict.fromkeys(metric for arm in arms for task, metric in arm.frozen if task == test_set))
        measures = [metric for metric in measures if metric != "most_frequent_accuracy"]
        header = ["arm", "pre-trained on", "accuracy", "95 % interval", "each seed"]
        header += [_MEASURES.get(metric, metric.replace("_", " ")) for metric in measures]
        shown = [arm for arm in arms if not arm.beside or test_set in plan.tasks]
        sections += [f"## {test_set}", report.table(header, comparison.accuracy_rows(shown, test_set, measures))]
        pairs = comparison.differences(arms, test_set)
        if pairs:
            header = ["difference", "points", "95 % interval", "each seed", "the first is"]
            sections += [report.table(header, comparison.difference_rows(pairs)), _PAIRED]
        sections += _control(arms, test_set)
    if test_sets:
        pictures.draw_arms(output / "figures" / "arms.png", *_bars(arms, test_sets))
        sections.append("![accuracy of the arms: each seed, mean and 95 % interval](figures/arms.png)")
    return sections


def _bars(arms: Sequence[Arm], test_sets: Sequence[str]) -> tuple[dict[str, Any], dict[str, float]]:
    """For the picture: by test set and arm the interval and each seed; and the baselines of the first."""
    bars = {
        name: {
            arm.name: (arm.outcomes[name].accuracy, list(arm.outcomes[name].of_seeds().values()))
            for arm in arms
            if name in arm.outcomes
        }
        for name in test_sets
    }
    lines = {
        arm.name: sum(values) / len(values)
        for arm in arms
        if arm.beside and not arm.outcomes
        for (task, metric), values in arm.frozen.items()
        if task == test_sets[0] and metric in ("linear_probe_accuracy", "most_frequent_accuracy")
    }
    return bars, lines if len(test_sets) == 1 else {}


def _overview(plan: CompareConfig, arms: Sequence[Arm]) -> str:
    """Mean accuracy of every arm on every task, and the means of VTAB where all of it was measured."""
    header, rows = ["arm", *plan.tasks], []
    groups = list(tasks.group_means(dict.fromkeys(plan.tasks, 0.0)))
    for arm in arms:
        if arm.beside:
            continue
        found = {task: arm.outcomes[task].accuracy.estimate for task in plan.tasks if task in arm.outcomes}
        means = tasks.group_means(found)
        cells = [percent(found[task]) if task in found else "" for task in plan.tasks]
        rows.append([arm.name, *cells, *(percent(means[group]) if group in means else "" for group in groups)])
    return report.table([*header, *(f"VTAB {group}" for group in groups)], rows)


def _control(arms: Sequence[Arm], test_set: str) -> list[str]:
    """Whether the arm with shuffled labels is at chance."""
    found = [arm for arm in arms if arm.beside and test_set in arm.outcomes]
    most = [
        arm.frozen[test_set, "most_frequent_accuracy"]
        for arm in arms
        if (test_set, "most_frequent_accuracy") in arm.frozen
    ]
    if not found or not most:
        return []
    interval, chance = found[0].outcomes[test_set].accuracy, most[0][0]
    text = (
        f"Control: fine-tuned on shuffled labels, the test accuracy is {percent(interval.estimate)} "
        f"({ends(interval)}); always the most frequent class scores "
        f"{percent(chance)}."
    )
    if interval.low > chance:
        text += " **Warning:** that is above chance, so something of the labels leaks past the shuffling."
    return [text]


def _failures(arms: Sequence[Arm]) -> list[str]:
    found = [
        f"**{arm.name} failed on {task} (‡):** {message}" for arm in arms for task, message in arm.failures.items()
    ]
    found += [
        f"**{arm.name} is not comparable (†):** its protocol differs, so that no difference is formed with it.\n\n"
        + "\n".join(f"- `{line}`" for line in dict.fromkeys(arm.differs))
        for arm in arms
        if arm.differs and not (arm.beside or arm.failures)
    ]
    return found


def _rates(output: Path, plan: CompareConfig, arms: Sequence[Arm], edges: Sequence[str]) -> list[str]:
    swept = [arm for arm in arms if arm.sweeps]
    if not swept:
        return []
    header, rows = ["arm", "task", "learning rates and held-out accuracy", "chosen"], []
    curves: dict[str, dict[str, Any]] = {}
    for arm in swept:
        for task, sweeps in arm.sweeps.items():
            curve = comparison.mean_curve(sweeps)
            tried = ", ".join(f"{rate:g}: {'diverged' if v is None else percent(v)}" for rate, v in curve.items())
            chosen = f"{arm.rates[task]:g}" if task in arm.rates else "none"
            rows.append([arm.name, task, tried, chosen])
            curves.setdefault(task, {})[arm.name] = (curve, arm.rates.get(task))
    pictures.draw_rates(output / "figures" / "rates.png", curves)
    seeds = ", ".join(map(str, plan.choice_seeds))
    return [
        "## Learning rates",
        f"Chosen for each arm on the same held-out part of the training images (seed {seeds}); used with all seeds.",
        report.table(header, rows),
        *edges,
        "![held-out accuracy against the learning rate](figures/rates.png)",
    ]


def _costs(arms: Sequence[Arm]) -> list[str]:
    rows = comparison.cost_rows([arm for arm in arms if not arm.beside])
    if not rows:
        return []
    return [
        "## Cost",
        report.table(["arm", "part", "images", "exaFLOPs", "device-hours"], rows),
        "Images that were planned to be trained on; a multiply-add counts as 2 and training as three forward passes "
        "(ViT paper, Table 6); hours of all processes, testing included. Of an arm that starts from a checkpoint made "
        "elsewhere, its pre-training is not counted.",
    ]


def _published(
    plan: CompareConfig,
    arms: Sequence[Arm],
    tunings: Mapping[str, RunConfig],
    pretrainings: Mapping[str, tuple[RunConfig, Mapping[str, Any]]],
) -> list[str]:
    """Published figures beside ours, and every key in which the protocols differ."""
    if not plan.published:
        return []
    task = next(iter(plan.tasks))
    by_name, rows = {arm.name: arm for arm in arms}, []
    for name, figure in plan.published.items():
        outcome = by_name[name].outcomes.get(task)
        ours = outcome.accuracy if outcome else None
        shown = f"{percent(ours.estimate)} ({ends(ours)})" if ours else "not measured"
        gap = f"{100 * (ours.estimate - figure):+.1f}" if ours else ""
        rows.append([name, f"{100 * figure:.2f}", shown, gap])
    recipe = plan.published_finetune
    lines = [_keys("Fine-tuning", recipe, tunings[task])] if recipe else ["- Fine-tuning: its recipe is not stated."]
    for name in plan.published:
        recipe, title = plan.published_recipes.get(name), f"Pre-training of {name}"
        if recipe is None or name not in pretrainings:
            lines.append(f"- {title}: not compared, for no recipe of it is stated or none was run here.")
        else:
            lines.append(_keys(title, recipe, pretrainings[name][0]))
    return [
        "## Published figures",
        report.table(["arm", "published", "here", "difference in points"], rows),
        "Other protocols give other figures. What differs here from the recipes of the published ones:",
        "\n".join(lines),
    ]


def _keys(title: str, published: str, here: RunConfig) -> str:
    """The keys in which a recipe differs from the published one, as a list."""
    changed = config.changed_keys(config.load_run(published)[0], here)
    listed = "".join(f"\n  - `{line}`" for line in changed if not line.startswith(("seed:", "init:")))
    return f"- {title}, from `{published}`:{listed}" if listed else f"- {title}: as `{published}`."


def _protocol(plan: CompareConfig, tunings: Mapping[str, RunConfig]) -> list[str]:
    lines = []
    for task, tuning in tunings.items():
        optim, recipe, data = tuning.optim, plan.tasks[task][0], tuning.data
        labelled = "all" if data.per_class is None else f"{data.per_class} a class of the"
        text = (
            f"- {task}: `{recipe}`, {optim.name}, {optim.steps:,} steps of {optim.batch_size}, at {data.image_size} "
            f"pixels; {labelled} labelled images of {data.source}"
        )
        if isinstance(optim.learning_rate, tuple) and len(optim.learning_rate) > 1:
            held = f"split {data.choice_split}" if data.choice_split else f"{data.holdout:.0%} of them"
            text += f", of which the learning rate is chosen on {held}; then trained on all of them"
        text += f". {data.max_overlap} test images may be among them." if data.max_overlap else "."
        if plan.probes:
            probe = tuning.probe
            read = probe.features or "what the last layer reads"
            text += f" Frozen encoders are read at {data.image_size} pixels ({read})"
            if "few_shot" in plan.probes:
                text += f"; shots are drawn from the whole training split, seeds {list(probe.seeds)}"
            text += "."
        lines.append(text)
    return [
        "## Protocol",
        "One recipe for all arms, which differ in their first weights alone, but for those marked †. No test image is "
        "among the images of the fine-tuning, by content, but where it is said; those of pre-training are not looked "
        "at. The test split is read once an arm and seed, after the learning rate was chosen. "
        f"Seeds: {', '.join(map(str, plan.seeds))}.",
        "\n".join(lines),
    ]


def _pretraining_facts(name: str, recipe: RunConfig, summary: Mapping[str, Any]) -> list[str]:
    """Of masked patch prediction: held-out loss and accuracies beside what needs no network."""
    found = summary["figures"]
    if recipe.objective.name != "mpp" or "held_out_loss" not in found:
        return []
    text = f"Pre-training of {name}: held-out loss {found['held_out_loss']:.2f} nats"
    if "held_out_target_entropy" in found:
        text += f"; the entropy of the colour classes is {found['held_out_target_entropy']:.2f}"
    if "held_out_nearest_patch_accuracy_masked" in found:
        ours, theirs = found["held_out_accuracy_masked"], found["held_out_nearest_patch_accuracy_masked"]
        text += (
            f". Accuracy on masked patches {ours:.3f} {'passes' if ours > theirs else 'does not reach'} that of the "
            f"nearest patch's colour, {theirs:.3f} (random patches {found['held_out_accuracy_random']:.3f}, kept "
            f"{found['held_out_accuracy_kept']:.3f}, always the most frequent colour "
            f"{found['held_out_most_frequent_accuracy']:.3f})"
        )
    return [text + "."]


def _demo(tunings: Mapping[str, RunConfig]) -> list[str]:
    if all(tuning.data.source != "demo" for tuning in tunings.values()):
        return []
    return [
        "## What these images are",
        "Crops of 32 x 32 pixels of ten photographs; the question is which photograph a crop comes from. Training and "
        "test crops share no pixel. These are real colours and textures, and the pipeline's learning shows on them; it "
        "is not object recognition, and says nothing about accuracies on ImageNet. Labels are few on purpose, and so "
        "are the steps: the recipe `mpp_demo_long` pre-trains the same encoder for longer.",
    ]


def _pictures(output: Path, pretrainings: Mapping[str, Any]) -> list[str]:
    sections = []
    for name in pretrainings:
        shown = []
        for picture, caption in [
            ("mosaic.png", "Held-out images: image, what the encoder saw, predicted and true colours"),
            ("curves.png", "Loss and accuracy over the steps"),
        ]:
            file = f"figures/{slug(name)}_{picture}"
            if (output / file).is_file():
                shown += [f"![{caption}]({file})", f"{caption}."]
        sections += [f"## Pre-training: {name}", *shown] if shown else []
    return sections
