"""Pre-train several models on parts of a training split, measure each alike, and draw the paper's curves.

python eval/scaling.py --recipe scaling_demo --output runs/scaling
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from accelerate import Accelerator

from mpp import command_line, config, console, evaluation, frozen, pictures, report, run, run_folder, wiring
from mpp.errors import UserError
from mpp.files import read_json, write_text

Record = dict[str, Any]
_TITLES = {"few_shot_accuracy": "{shots}-shot linear accuracy", "accuracy": "fine-tuned accuracy"}


@dataclass(frozen=True)
class Point:
    """One pre-training of a study, and the fine-tunings that measure it, by seed."""

    name: str
    pretraining: config.RunConfig
    tunings: dict[int, config.RunConfig]

    @property
    def folder(self) -> Path:
        return Path(next(iter(self.tunings.values())).init)


def main(argv: Sequence[str] | None = None) -> None:
    flags = command_line.parse(
        argv,
        command="eval/scaling.py",
        purpose="Pre-train models on parts of a training split, measure each, and draw accuracy against images and "
        "compute (ViT paper, Figures 3 to 5).",
        example="python eval/scaling.py --recipe scaling_demo --output runs/scaling",
        recipe="scaling_demo",
    )
    command_line.exit_with(lambda: _study(flags))


def _study(flags: command_line.argparse.Namespace) -> None:
    plan = config.load_study(flags.recipe, flags.overrides)
    output = flags.output or command_line.default_output(flags.recipe)
    points = [
        _point(name, values, subset, plan, output / "pretrain")
        for name, values in plan.models.items()
        for subset in plan.subsets
    ]
    folders = [point.folder for point in points]
    if len(set(folders)) < len(folders):
        raise UserError(f"{flags.recipe}: two of its models, or two of its subsets, have the same name; rename one")
    if flags.dry_run:
        _print_costs(points)
        return
    run_folder.require_own_folder(output, plan, config.load_study, flags.overwrite)
    for point in points:
        wiring.rehearse_arm(point.pretraining, list(point.tunings.values()))
    for point in points:
        _require_shots(point, plan)

    began = time.monotonic()
    tuned = "finetune" in plan.measures
    runs = [point.pretraining for point in points]
    runs += [tuning for point in points for tuning in point.tunings.values()] if tuned else []
    screen = console.Console(sum(map(wiring.planned_images, runs)))
    processes = wiring.start_processes(points[0].pretraining, console.Console(quiet=True))
    if processes.is_main_process:  # the others have looked into the folder before they got here
        output.mkdir(parents=True, exist_ok=True)
        config.save(plan, output / "config.yaml")
        (output / "figures").mkdir(exist_ok=True)
    records: list[Record] = []
    for number, point in enumerate(points):
        subset = point.pretraining.data.subset
        part = "all images" if subset is None else f"data.subset={subset}"
        screen.say(f"[{number + 1}/{len(points)}] {point.name}, {part}")
        summary = run.pretrain(point.pretraining, point.folder, screen, overwrite=flags.overwrite)
        about = {key: summary[key] for key in ("train_images", "images", "parameters", "exaflops")}
        if "few_shot" in plan.measures:  # in every process, so that none waits for another until it gives up
            records += [record | about for record in _few_shot(point, plan, processes, flags.overwrite)]
        for seed, tuning in point.tunings.items() if tuned else ():
            folder = output / "finetune" / point.folder.relative_to(output / "pretrain") / f"seed_{seed}"
            found = run.finetune(tuning, folder, screen, overwrite=flags.overwrite, arm=point.name)
            records += [record | about for record in found if record["metric"] == "accuracy"]
    screen.close()
    if not processes.is_main_process:
        return
    write_text(output / "results.json", json.dumps(records, indent=1))
    titles = {metric: title.format(shots=plan.shots) for metric, title in _TITLES.items()}
    pictures.draw_scaling(output / "figures" / "scaling.png", records, titles)
    table = _table(records, titles)
    minutes = (time.monotonic() - began) / 60
    report.write(output, _report(plan, table, minutes))
    screen.say(f"\n{table}\n\nreport: {output / 'report.html'}, picture: {output / 'figures'} ({minutes:.1f} min)")


def _point(name: str, values: Sequence[str], subset: float | None, plan: config.StudyConfig, below: Path) -> Point:
    recipe, *overrides = values
    part = "all" if subset is None else str(subset)
    pretraining = config.load_run(recipe, [*overrides, f"data.subset={json.dumps(subset)}"])[0]
    init = f"init={below / name.replace(' ', '_').replace('/', '_') / part}"
    finetune = plan.finetune or pretraining.finetune
    if finetune is None:
        raise UserError(f"models.{name}: {recipe} names no fine-tuning recipe, so the study must (its key finetune)")
    shape = run_folder.model_overrides(pretraining, finetune)
    tunings = {seed: config.load_run(finetune, [init, f"seed={seed}", *shape])[0] for seed in plan.seeds}
    return Point(name, pretraining, tunings)


def _print_costs(points: Sequence[Point]) -> None:
    """What each pre-training would cost, without reading data; a head of 1000 classes stands for any."""
    print(f"{'model':<24} {'data.subset':>12} {'images seen':>15} {'parameters':>15} {'exaFLOPs':>10}")
    for point in points:
        recipe = point.pretraining
        found, images = wiring.count_cost(recipe, wiring.any_classes(recipe)), wiring.planned_images(recipe)
        subset = "all" if recipe.data.subset is None else str(recipe.data.subset)
        print(
            f"{point.name:<24} {subset:>12} {images:>15,} {found.parameters:>15,} "
            f"{wiring.exaflops(found, images):>10.4g}"
        )


def _require_shots(point: Point, plan: config.StudyConfig) -> None:
    """Raises UserError where a class has fewer images than shots."""
    if "few_shot" in plan.measures:
        recipe = next(iter(point.tunings.values()))
        wiring.require_one_label(recipe)
        frozen.shot_rows(wiring.open_split(recipe, recipe.data.train_split), 0, plan.shots)


def _few_shot(point: Point, plan: config.StudyConfig, processes: Accelerator, overwrite: bool) -> list[Record]:
    """Few-shot accuracy for each seed; kept beside the pre-training, so that it is not measured again.

    Images are cut as the pre-training's evaluation cuts them, at its size.
    """
    kept = point.folder / "few_shot.json"
    recipe = next(iter(point.tunings.values()))
    how = f"{config.recipe_hash(recipe)} {recipe.probe}"
    measured = {"shots": plan.shots, "seeds": list(plan.seeds), "with": how}
    found = read_json(kept) if kept.is_file() and not overwrite else {}
    processes.wait_for_everyone()  # all have looked before one writes
    if found.get("measured") == measured:
        return [_record(point, seed, found["accuracy"][str(seed)]) for seed in plan.seeds]
    cut = point.pretraining.data
    resize = cut.resize if cut.eval_crop == "center" else None
    own = dataclasses.replace(
        recipe.data, image_size=cut.image_size, crop="inception", eval_crop=cut.eval_crop, resize=resize
    )
    train, test = evaluation.open_labelled(recipe)
    hits = frozen.few_shot(
        evaluation.reader(dataclasses.replace(recipe, data=own), processes),
        train,
        test,
        np.arange(len(test)),
        shots=[plan.shots],
        seeds=plan.seeds,
        form=recipe.probe.form,
        strength=recipe.probe.strength,
    )
    accuracy = {str(seed): float(hits[plan.shots, seed].mean()) for seed in plan.seeds}
    if processes.is_main_process:
        write_text(kept, json.dumps({"measured": measured, "accuracy": accuracy}))
    processes.wait_for_everyone()
    return [_record(point, seed, accuracy[str(seed)]) for seed in plan.seeds]


def _record(point: Point, seed: int, value: float) -> Record:
    recipe = point.tunings[seed]
    return {
        "arm": point.name,
        "data_set": recipe.data.source,
        "metric": "few_shot_accuracy",
        "value": value,
        "seed": seed,
        "learning_rate": None,
        "init": recipe.init,
        "recipe_hash": config.recipe_hash(point.pretraining),
    }


def _table(records: Sequence[Record], titles: dict[str, str]) -> str:
    metrics = [metric for metric in titles if any(record["metric"] == metric for record in records)]
    header = ["model", "trained on", "images seen", "parameters", "exaFLOPs", *(titles[m] for m in metrics)]
    rows = []
    for init in dict.fromkeys(record["init"] for record in records):
        mine = [record for record in records if record["init"] == init]
        first, cells = mine[0], []
        for metric in metrics:
            values = np.array([record["value"] for record in mine if record["metric"] == metric])
            cells.append(f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""))
        counts = [f"{first[key]:,}" for key in ("train_images", "images", "parameters")]
        rows.append([first["arm"], *counts, f"{first['exaflops']:.3g}", *cells])
    return report.table(header, rows)


def _report(plan: config.StudyConfig, table: str, minutes: float) -> str:
    measured = f"`{plan.finetune}`" if plan.finetune else "the fine-tuning recipe that each model's recipe names"
    return "\n".join(
        [
            "# Scaling study",
            "",
            table,
            "",
            f"Mean ± standard deviation over the seeds {list(plan.seeds)}, which draw the labelled images; each "
            "encoder was pre-trained once. Smaller parts of the training split lie within larger ones. exaFLOPs count "
            "a multiply-add as 2 and training as three forward passes, as the ViT paper's Table 6 does. A run is "
            "measured at its end; the paper stopped its runs on small parts of JFT early, at their best held-out "
            f"accuracy. Measured by {measured}. Time of this call: {minutes:.1f} minutes.",
            "",
            "![accuracy against images and compute](figures/scaling.png)",
            "",
            report.table(
                ["model", "recipe and overrides"], [[name, f"`{' '.join(v)}`"] for name, v in plan.models.items()]
            ),
            "",
        ]
    )


if __name__ == "__main__":
    main()
