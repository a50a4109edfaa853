"""Pictures from arrays: what the encoder saw and predicted, and curves over training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from mpp.corruption import KEEP, MASK, RANDOM
from mpp.intervals import Interval

_GREY = 128
_OUTLINES = {RANDOM: "#e8000b", KEEP: "#1ac938"}


def fill(background: np.ndarray, positions: np.ndarray, patches: np.ndarray) -> np.ndarray:
    """An image with some patches replaced.

    Args:
        background: uint8 [height, width, 3].
        positions: int [corrupted], row-major over the grid.
        patches: uint8 [corrupted, row, column, 3].
    """
    picture = background.copy()
    side = patches.shape[1]
    columns = background.shape[1] // side
    for position, patch in zip(positions, patches, strict=True):
        top, left = position // columns * side, position % columns * side
        picture[top : top + side, left : left + side] = patch
    return picture


def seen(image: np.ndarray, plan: Mapping[str, np.ndarray], patch_size: int) -> np.ndarray:
    """What the encoder saw: masked patches grey, random ones with their donor's pixels; uint8 as `image`."""
    columns = image.shape[1] // patch_size
    patches = []
    for action, position, donor in zip(plan["actions"], plan["positions"], plan["donors"], strict=True):
        source = donor if action == RANDOM else position
        top, left = source // columns * patch_size, source % columns * patch_size
        patch = image[top : top + patch_size, left : left + patch_size]
        patches.append(np.full_like(patch, _GREY) if action == MASK else patch)
    return fill(image, plan["positions"], np.stack(patches))


def draw_mosaic(
    path: Path,
    images: np.ndarray,
    plans: Sequence[Mapping[str, np.ndarray]],
    predicted: np.ndarray,
    truth: np.ndarray,
    names: Sequence[str] = (),
) -> None:
    """A column for each image: image, what the encoder saw, prediction, truth.

    Args:
        images: uint8 [image, height, width, 3].
        plans: the corruption of each image.
        predicted, truth: uint8 [image, patch, row, column, 3], of every patch; predictions count only at
            corrupted patches, the others are the truth.
        names: written above the columns.
    """
    side = predicted.shape[2]
    columns = images.shape[2] // side
    every = np.arange(predicted.shape[1])
    rows = ["image", "what the\nencoder saw", "predicted", "true"]
    figure, axes = plt.subplots(len(rows), len(images), figsize=(1.5 * len(images) + 1, 6.8), squeeze=False)
    for number, (image, plan) in enumerate(zip(images, plans, strict=True)):
        panels = [
            image,
            seen(image, plan, side),
            fill(image, every, predicted[number]),
            fill(image, every, truth[number]),
        ]
        for row, panel in enumerate(panels):
            axis = axes[row, number]
            axis.imshow(panel, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if number == 0:
                axis.set_ylabel(rows[row], rotation=0, ha="right", va="center", fontsize=11)
        for action, position in zip(plan["actions"], plan["positions"], strict=True):
            if action in _OUTLINES:
                corner = (position % columns * side - 0.5, position // columns * side - 0.5)
                outline = Rectangle(corner, side, side, fill=False, edgecolor=_OUTLINES[action], linewidth=1.6)
                axes[1, number].add_patch(outline)
        if names:
            axes[0, number].set_title(names[number], fontsize=9)
    figure.text(
        0.5,
        0.01,
        "grey: mask embedding    red frame: another patch's embedding    green frame: kept, but predicted too.\n"
        "Patches that were not corrupted are shown in their true colour in both lower rows.",
        ha="center",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_curves(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Loss and accuracy over the steps of a run, beside the baselines that need no network; and probes, if any."""
    trained = [record for record in records if "loss" in record]
    held_out = [record for record in records if "held_out_loss" in record]
    probes = list(dict.fromkeys(name for record in records for name in record if name.startswith("probe_")))
    panels = 3 if probes else 2
    figure, (left, right, *rest) = plt.subplots(1, panels, figsize=(5.5 * panels, 4))
    left.plot([r["step"] for r in trained], [r["loss"] for r in trained], color="0.6", label="training")
    left.plot([r["step"] for r in held_out], [r["held_out_loss"] for r in held_out], "C0.-", label="held out")
    left.set(xlabel="optimiser step", ylabel="loss (nats)" if trained and "accuracy" in trained[0] else "loss")
    if held_out and "held_out_target_entropy" in held_out[-1]:
        entropy = held_out[-1]["held_out_target_entropy"]
        left.axhline(entropy, color="C3", linestyle="--", label=f"entropy of the classes, {entropy:.2f}")
    left.set_ylim(bottom=0)
    left.set_xlim(left=0)
    left.legend(fontsize=9)
    lines = {
        "accuracy_masked": ("C0.-", "masked patches"),
        "accuracy_random": ("C1.-", "random patches"),
        "accuracy_kept": ("C2.-", "kept patches"),
        "accuracy": ("C4.-", "accuracy"),
    }
    apart = bool(held_out) and "held_out_accuracy_masked" in held_out[-1]
    for name, (style, label) in lines.items():
        if held_out and f"held_out_{name}" in held_out[-1] and not (apart and name == "accuracy"):
            right.plot([r["step"] for r in held_out], [r[f"held_out_{name}"] for r in held_out], style, label=label)
    for name, color, label in [
        ("held_out_nearest_patch_accuracy_masked", "C3", "nearest-patch colour, masked"),
        ("held_out_most_frequent_accuracy", "0.4", "most frequent class"),
    ]:
        if held_out and name in held_out[-1]:
            value = held_out[-1][name]
            right.axhline(value, color=color, linestyle="--", label=f"{label}, {value:.2f}")
    right.set(xlabel="optimiser step", ylabel="held-out accuracy", ylim=(0, 1), xlim=left.get_xlim())
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize=9)
    for axis in rest:
        for number, name in enumerate(probes):
            points = [(record["step"], record[name]) for record in records if name in record]
            label = name.removeprefix("probe_").removesuffix("_accuracy").replace("_nn", "-NN").replace("_", "-")
            axis.plot(*zip(*points, strict=True), f"C{number % 10}.-", label=label)
        axis.set(xlabel="optimiser step", ylabel="accuracy of probes", ylim=(0, 1), xlim=left.get_xlim())
        axis.legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_arms(
    path: Path,
    arms: Mapping[str, Mapping[str, tuple[Interval, Sequence[float]]]],
    baselines: Mapping[str, float],
) -> None:
    """Accuracy of each arm, a dot a seed and a bar for the mean with its interval; a panel for each test set.

    Args:
        arms: test set -> arm -> interval, and each seed's accuracy.
        baselines: drawn as lines.
    """
    widths = [1.3 * len(found) + 1 for found in arms.values()]
    columns = min(len(arms), 3)
    rows = -(-len(arms) // columns)
    size = (max(widths) * columns + (2.5 if baselines else 0), 4 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(arms) :]:
        axis.set_axis_off()
    for axis, (title, found) in zip(axes.flat, arms.items(), strict=False):
        for place, (interval, values) in enumerate(found.values()):
            axis.bar(place, interval.estimate, width=0.6, color=f"C{place}", alpha=0.5)
            ends = [[interval.estimate - interval.low], [interval.high - interval.estimate]]
            axis.errorbar(place, interval.estimate, ends, color="k", capsize=5, linewidth=1.2)
            spread = np.linspace(-0.15, 0.15, len(values)) if len(values) > 1 else np.zeros(1)
            axis.plot(place + spread, values, ".", color="0.25", markersize=6)
            axis.text(place, 0.02, f"{100 * interval.estimate:.1f}", ha="center", fontsize=10)
        for number, (name, value) in enumerate(baselines.items()):
            style = ["--", ":", "-."][number % 3]
            axis.axhline(value, linestyle=style, color="0.4", label=f"{name}, {100 * value:.1f}")
        axis.set_xticks(range(len(found)), [_broken(name) for name in found], fontsize=9)
        axis.set(ylabel="test accuracy", ylim=(0, 1), title=title)
    if baselines:
        axes[0, 0].legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _broken(name: str) -> str:
    """A name on lines of one word each, as there is room for under a bar."""
    return name.replace(" ", "\n").replace("-", "-\n")


def draw_rates(
    path: Path, curves: Mapping[str, Mapping[str, tuple[Mapping[float, float | None], float | None]]]
) -> None:
    """Held-out accuracy against the learning rate, a line an arm with a ring at the chosen rate; a panel for each task.

    Args:
        curves: task -> arm -> accuracy by rate, None where it diverged, and the rate that was chosen.
    """
    columns = min(len(curves), 3)
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 3.8 * rows), squeeze=False)
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    for axis, (task, arms) in zip(axes.flat, curves.items(), strict=False):
        every = sorted({rate for curve, _ in arms.values() for rate in curve})
        for number, (name, (curve, chosen)) in enumerate(arms.items()):
            able = sorted(rate for rate, value in curve.items() if value is not None)
            color = f"C{number}"
            axis.plot(able, [curve[rate] for rate in able], color=color, marker="o", markersize=4, label=name)
            if chosen in able:
                axis.plot(chosen, curve[chosen], "o", color=color, markersize=12, fillstyle="none")
            for rate in set(curve) - set(able):
                axis.plot(rate, 0.02, "x", color=color)
        axis.set(xscale="log", xlabel="learning rate", ylabel="held-out accuracy", title=task, ylim=(0, 1))
        axis.set_xticks(every, [f"{rate:g}" for rate in every])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    figure.text(0.99, 0.005, "ring: chosen    cross: diverged", ha="right", fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_shots(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Accuracy against labelled images of each class, a dot a seed and a line through the means.

    Args:
        records: with shots and value.
    """
    shots = sorted({record["shots"] for record in records})
    values = [[record["value"] for record in records if record["shots"] == count] for count in shots]
    figure, axis = plt.subplots(figsize=(5.5, 4))
    axis.plot(shots, [np.mean(some) for some in values], "C0.-")
    for count, some in zip(shots, values, strict=True):
        axis.plot([count] * len(some), some, "k.", markersize=4)
    axis.set(xscale="log", xlabel="labelled images of each class", ylabel="test accuracy", ylim=(0, 1))
    axis.set_xticks(shots, [str(count) for count in shots])
    axis.minorticks_off()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_scaling(path: Path, records: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> None:
    """Accuracy against the images trained on, and against compute; a row of panels for each metric.

    Args:
        records: with arm, metric, value, train_images and exaflops.
        titles: of the metrics, in the order of the rows.
    """
    metrics = [metric for metric in titles if any(record["metric"] == metric for record in records)]
    figure, axes = plt.subplots(len(metrics), 2, figsize=(11, 4.2 * len(metrics)), squeeze=False)
    for metric, (by_images, by_compute) in zip(metrics, axes, strict=True):
        for number, arm in enumerate(dict.fromkeys(record["arm"] for record in records)):
            values: dict[tuple[float, float], list[float]] = {}
            for record in records:
                if (record["arm"], record["metric"]) == (arm, metric):
                    values.setdefault((record["train_images"], record["exaflops"]), []).append(record["value"])
            places = sorted(values)
            means = [np.mean(values[place]) for place in places]
            spread = [np.std(values[place], ddof=1) if len(values[place]) > 1 else 0.0 for place in places]
            style = {"color": f"C{number % 10}", "marker": "os^Dv<>P*X"[number % 10], "label": arm}
            by_images.errorbar([images for images, _ in places], means, spread, capsize=3, **style)
            most = max(images for images, _ in places)
            full = [place for place, (images, _) in enumerate(places) if images == most]
            by_compute.errorbar(
                [places[place][1] for place in full],
                [means[place] for place in full],
                [spread[place] for place in full],
                capsize=3,
                linestyle="none",
                markersize=9,
                **style,
            )
        by_images.set(xscale="log", xlabel="images that were trained on", ylabel=titles[metric])
        by_compute.set(xscale="log", xlabel="exaFLOPs of pre-training, on all images", ylabel=titles[metric])
        sizes = sorted({record["train_images"] for record in records})
        by_images.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=20)
        by_images.minorticks_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = min(len(labels), 5)
    room = 0.06 + 0.25 * -(-len(labels) // columns) / figure.get_figheight()
    figure.legend(handles, labels, loc="lower center", ncols=columns, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, room, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
