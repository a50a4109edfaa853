"""A run's folder: what lies in it already, and what a run leaves there."""

import dataclasses
import json
import os
import platform
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

import mpp
from mpp import checkpoint, config
from mpp.config import CompareConfig, RunConfig, StudyConfig
from mpp.console import Console
from mpp.errors import ImageError, UserError
from mpp.files import read_json, write_json_lines, write_text
from mpp.sources import Source

PREDICTIONS = "predictions.npz"
_FILES = (
    *("config.yaml", "classes.json", "metrics.jsonl", "broken.jsonl", "summary.json", "results.json", "report.md"),
    *("report.html", PREDICTIONS, "push.log"),
)
_MEASURED = ("few_shot.json",)  # by others, of this run
_FOLDERS = ("checkpoints", "figures", "inputs", "sweep", "tensorboard", "wandb")
Plan = TypeVar("Plan", CompareConfig, StudyConfig)
_PROGRESS = ("step", "images", "epoch", "seconds", "learning_rate", "images_per_second")


def look_into(output: Path, recipe: RunConfig, kind: str, overwrite: bool) -> dict[str, Any] | None:
    """What a run may do with a folder: start, continue, or nothing more; writes nothing.

    Args:
        kind: pretrain or finetune.

    Returns:
        The summary, where the folder holds a finished run of this recipe; None to start or continue.

    Raises:
        UserError: the folder holds something else, or can't be written.
    """
    above = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not above.is_dir():
        raise UserError(f"--output {output}: {above} is a file; name a folder")
    if not os.access(above, os.W_OK):
        raise UserError(f"--output {output}: no permission to write in {above}; name another folder")
    init = Path(recipe.init).expanduser().absolute()
    if recipe.init != "scratch" and (init == output.absolute() or output.absolute() in init.parents):
        raise UserError(f"--output {output} holds init={recipe.init}, which must stay; name another folder")
    if above != output or not any(output.iterdir()):
        return None
    before = output / "config.yaml"
    if not before.is_file():
        some = ", ".join(sorted(path.name for path in output.iterdir())[:3])
        raise UserError(f"--output {output} holds files but no run ({some}); name another folder")
    try:
        old, _ = config.load_run(str(before))
    except UserError as error:
        raise UserError(f"--output {output} holds no run of this package ({error}); name another folder") from None
    summary = read_json(output / "summary.json") if (output / "summary.json").is_file() else None
    changed = config.changed_keys(old, recipe)
    if summary and summary.get("kind") != kind:
        changed.append(f"kind of run: {summary.get('kind')} there, {kind} here")
    if changed and not overwrite:
        listed = "\n  ".join(changed)
        raise UserError(
            f"--output {output} holds another run; name another folder, or give --overwrite to start again. "
            f"What differs:\n  {listed}"
        )
    return None if overwrite else summary


def require_same_inputs(output: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises UserError where a run has read other data or weights than it would read now."""
    changed = [key for key in now if before.get(key) != now[key]]
    if changed:
        raise UserError(
            f"--output {output} holds a run of the same recipe, but what it read has changed since "
            f"({', '.join(changed)}); name another folder, or give --overwrite to start again"
        )


def open_folder(
    output: Path,
    recipe: RunConfig,
    accelerator: Accelerator,
    console: Console,
    overwrite: bool,
    classes: list[str] | None = None,
) -> None:
    """Makes the run's folder; an earlier run of the same recipe in it is continued."""
    if accelerator.is_main_process:
        if overwrite:
            for name in (*_FILES, *_MEASURED):
                (output / name).unlink(missing_ok=True)
            for name in _FOLDERS:
                shutil.rmtree(output / name, ignore_errors=True)
        began_before = (output / "config.yaml").is_file()
        output.mkdir(parents=True, exist_ok=True)
        config.save(recipe, output / "config.yaml")
        if classes:
            write_text(output / "classes.json", json.dumps(classes, indent=0))
        (output / "figures").mkdir(exist_ok=True)
        unfinished = began_before and not (output / "sweep").is_dir()
        if unfinished and not checkpoint.complete(output / "checkpoints"):
            console.say(f"{output} holds a run without a complete checkpoint: it starts again at step 0")
    accelerator.wait_for_everyone()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """An .npz file, whole or not at all."""
    draft = path.with_name(f".{path.name}.writing")
    with draft.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    draft.replace(path)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Arrays of an .npz file by name; raises UserError where it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return dict(found)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} can't be read ({error}); remove the folder {path.parent} to measure anew") from None


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a half-written last line of a killed run is left out."""
    return _json_lines(folder / "metrics.jsonl")


def _json_lines(file: Path) -> list[dict[str, Any]]:
    records = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class BrokenImages:
    """Images that could not be read and were replaced: counted, listed in `broken.jsonl`, and limited.

    Args:
        limit: different images after which a run stops.
        replaced: samples that were replaced before this call of the run.
    """

    def __init__(
        self, folder: Path, accelerator: Accelerator, console: Console, source: Source, limit: int, replaced: int
    ) -> None:
        self.file, self.accelerator, self.console = folder / "broken.jsonl", accelerator, console
        self.source, self.limit, self.replaced = source, limit, replaced
        self.new: list[list[tuple[int, str]]] = []
        listed = _json_lines(self.file)
        self.rows = {record["row"] for record in listed if self._is_broken(record["row"])}  # others were repaired
        accelerator.wait_for_everyone()
        if listed and accelerator.is_main_process:  # without the half line of a run that was killed
            write_json_lines(self.file, [record for record in listed if record["row"] in self.rows])

    def _is_broken(self, row: int) -> bool:
        try:
            picture = self.source.picture(row)
            picture.region((0, 0, picture.width, picture.height))
        except ImageError:
            return True
        return False

    def found(self, broken: Sequence[list[tuple[int, str]]]) -> None:
        """Samples that this process has replaced: for each, the rows that were broken, with what is wrong."""
        self.new += broken

    def share(self) -> int:
        """Tells all processes of what each has found, and returns how many samples were replaced in all.

        Raises UserError, in every process, where more different images are broken than the limit allows.
        """
        everywhere = gather_object(self.new)
        self.new = []
        self.replaced += len(everywhere)
        fresh = {row: what for sample in everywhere for row, what in sample if row not in self.rows}
        self.rows |= set(fresh)
        if fresh and self.accelerator.is_main_process:
            with self.file.open("a") as file:
                for row, what in sorted(fresh.items()):
                    file.write(json.dumps({"row": row, "name": self.source.name(row), "error": what}) + "\n")
                    self.console.say(f"replaced by another image: {what}")
        if len(self.rows) > self.limit:
            raise UserError(
                f"{len(self.rows)} images can't be read, more than data.max_broken={self.limit}; they are listed in "
                f"{self.file}. Repair them or raise data.max_broken; the same command then continues"
            )
        return self.replaced


def write_summary(
    folder: Path,
    recipe: RunConfig,
    accelerator: Accelerator,
    *,
    kind: str,
    figures: Mapping[str, float],
    train_images: int,
    parameters: int,
    exaflops: float,
    inputs: Mapping[str, str],
    seconds: float,
    best: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes `summary.json`, by which a run counts as finished, and returns it."""
    summary = {
        "kind": kind,
        "figures": {key: value for key, value in figures.items() if key not in _PROGRESS},
        "steps": recipe.optim.steps,
        "images": recipe.optim.steps * recipe.optim.batch_size,
        "train_images": train_images,
        "parameters": parameters,
        "exaflops": exaflops,
        **({"best": dict(best)} if best else {}),
        "inputs": dict(inputs),
        "recipe_hash": config.recipe_hash(recipe),
        "seconds": round(seconds, 1),
        "processes": accelerator.num_processes,
        "device": str(accelerator.device),
        "precision": recipe.runtime.precision,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "mpp": mpp.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "timm", "accelerate", "numpy", "pillow")},
        },
    }
    if accelerator.is_main_process:
        write_text(folder / "summary.json", json.dumps(summary, indent=1))
    accelerator.wait_for_everyone()
    return summary


# Keys of `model` that a fine-tuning recipe decides, not the run that it starts from.
_OF_THE_TUNING = ("head", "head_bias", "position_resize", "dropout", "drop_path", "drop_border")


def newest_pretraining(root: Path, overrides: Sequence[str]) -> tuple[Path | None, str, list[str]]:
    """The newest finished pre-training below a folder, the fine-tuning recipe that it names, and its model.

    Where an override names another `init`, that one is looked at in its place, and the path is None.

    Returns:
        The path, the recipe's name, and overrides for what the recipe's model is not and the run's is.

    Raises:
        UserError: there is none, or it names no recipe.
    """
    named = [override.partition("=")[2] for override in overrides if override.startswith("init=")]
    if named:
        run, path = Path(named[-1]).expanduser(), None
        if not (run / "config.yaml").is_file():
            raise UserError(f"--recipe is missing, and init={named[-1]} is no run folder that would name one")
    else:
        summaries = {file.parent: read_json(file) for file in root.glob("**/summary.json")}
        finished = [
            (found.get("finished", ""), str(folder))
            for folder, found in summaries.items()
            if found.get("kind") == "pretrain"
        ]
        if not finished:
            raise UserError(
                f"no finished pre-training below {root.absolute()}: make one with "
                "`accelerate launch mpp/pretrain.py --recipe mpp_demo`, or name --recipe and init=REF"
            )
        run = path = Path(max(finished)[1])
    before, _ = config.load_run(str(run / "config.yaml"))
    if before.finetune is None:
        raise UserError(f"{run}/config.yaml names no fine-tuning recipe (its key finetune); give --recipe")
    return path, before.finetune, model_overrides(before, before.finetune, overrides)


def model_overrides(before: RunConfig, finetune: str, overrides: Sequence[str] = ()) -> list[str]:
    """What a fine-tuning recipe's model must be changed by to be that of a run, as overrides.

    Args:
        before: the run's recipe.
        finetune: the fine-tuning recipe's name.
        overrides: that a person has given, and that stand.
    """
    planned = dataclasses.asdict(config.load_run(finetune)[0].model)
    trained = dataclasses.asdict(before.model)
    if trained["pool"] != "gap" and planned["pool"] != "gap":  # both have a class token, and the tuning its choice
        trained["pool"] = planned["pool"]
    given = {override.partition("=")[0] for override in overrides}
    return [
        f"model.{key}={json.dumps(value)}"
        for key, value in trained.items()
        if value != planned[key] and key not in _OF_THE_TUNING and f"model.{key}" not in given
    ]


def cut_overrides(before: RunConfig, overrides: Sequence[str] = ()) -> list[str]:
    """What cuts images in evaluation as a run does, as overrides; those that a person has given stand.

    At an image size that is given, `resize` is in the run's proportion to it.
    """
    given = dict(override.partition("=")[::2] for override in overrides)
    own, size = before.data, given.get("data.image_size", "")
    cut: dict[str, Any] = {"data.image_size": own.image_size}
    if not given.keys() & {"data.eval_crop", "data.resize"}:
        scale = int(size) / own.image_size if size.isdigit() else 1
        resize = round(own.resize * scale) if own.resize and own.eval_crop == "center" else "null"
        cut |= {"data.eval_crop": own.eval_crop, "data.resize": resize, "data.crop": "inception"}
    return [f"{key}={value}" for key, value in cut.items() if key not in given]


def require_own_folder(output: Path, plan: Plan, load: Callable[[str], Plan], overwrite: bool) -> None:
    """Raises UserError where a folder holds anything but this comparison or study.

    Args:
        load: reads a plan of its kind from a path.
    """
    if not output.exists() or not any(output.iterdir()):
        return
    before = output / "config.yaml"
    if not before.is_file():
        raise UserError(f"--output {output} holds files but none of this kind of plan; name another folder")
    try:
        same = load(str(before)) == plan
    except UserError as error:
        raise UserError(f"--output {output} holds something else ({error}); name another folder") from None
    if not same and not overwrite:
        raise UserError(f"--output {output} holds another plan; name another folder, or give --overwrite")
