"""A run's folder: what lies in it already, and what a run leaves there."""

import json
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator

import mpp
from mpp import checkpoint, config
from mpp.config import RunConfig
from mpp.console import Console
from mpp.errors import UserError

_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "results.json", "report.md")
_FOLDERS = ("checkpoints", "figures", "inputs", "sweep")
_PROGRESS = ("step", "images", "epoch", "seconds", "learning_rate", "images_per_second")


def finished_summary(output: Path, recipe: RunConfig, overwrite: bool) -> dict[str, Any] | None:
    """The summary of a finished run of this recipe; raises UserError where the folder holds something else."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder")
    before = output / "config.yaml"
    if not before.is_file():
        foreign = [path.name for path in output.iterdir() if path.name not in (*_FILES, *_FOLDERS)]
        if foreign:
            raise UserError(
                f"--output {output} holds files but no run ({', '.join(sorted(foreign)[:3])}); name another"
            )
        return None
    if overwrite:
        return None
    changed = config.changed_keys(config.load_run(str(before))[0], recipe)
    if changed:
        listed = "\n  ".join(changed)
        raise UserError(
            f"--output {output} holds another run; name another folder, or give --overwrite to start again. "
            f"What differs:\n  {listed}"
        )
    summary = output / "summary.json"
    return json.loads(summary.read_text()) if summary.is_file() else None


def open_folder(output: Path, recipe: RunConfig, accelerator: Accelerator, console: Console, overwrite: bool) -> None:
    """Makes the run's folder; an earlier run of the same recipe in it is continued."""
    if accelerator.is_main_process:
        if overwrite:
            for name in _FILES:
                (output / name).unlink(missing_ok=True)
            for name in _FOLDERS:
                shutil.rmtree(output / name, ignore_errors=True)
        began_before = (output / "config.yaml").is_file()
        (output / "figures").mkdir(parents=True, exist_ok=True)
        config.save(recipe, output / "config.yaml")
        if began_before and not checkpoint.complete(output / "checkpoints"):
            console.say(f"{output} holds a run without a complete checkpoint: it starts again at step 0")
    accelerator.wait_for_everyone()


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a half-written last line of a killed run is left out."""
    file = folder / "metrics.jsonl"
    records = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def write_summary(
    folder: Path,
    recipe: RunConfig,
    accelerator: Accelerator,
    *,
    kind: str,
    figures: Mapping[str, float],
    train_images: int,
    data_fingerprint: str,
) -> dict[str, Any]:
    """Writes `summary.json`, by which a run counts as finished, and returns it."""
    records = read_records(folder)
    summary = {
        "kind": kind,
        "figures": {key: value for key, value in figures.items() if key not in _PROGRESS},
        "steps": recipe.optim.steps,
        "images": recipe.optim.steps * recipe.optim.batch_size,
        "train_images": train_images,
        "data_fingerprint": data_fingerprint,
        "recipe_hash": config.recipe_hash(recipe),
        "seconds": round(records[-1]["seconds"], 1) if records else 0.0,
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
        draft = folder / ".summary.json"
        draft.write_text(json.dumps(summary, indent=1))
        draft.rename(folder / "summary.json")
    accelerator.wait_for_everyone()
    return summary


def newest_pretraining(root: Path, overrides: Sequence[str]) -> tuple[Path | None, str]:
    """The newest finished pre-training below a folder, and the fine-tuning recipe that it names.

    Where an override names another `init`, that one is looked at in its place, and the path is None.

    Raises:
        UserError: there is none, or it names no recipe.
    """
    named = [override.partition("=")[2] for override in overrides if override.startswith("init=")]
    if named:
        run, path = Path(named[-1]).expanduser(), None
        if not (run / "config.yaml").is_file():
            raise UserError(f"--recipe is missing, and init={named[-1]} is no run folder that would name one")
    else:
        finished = [
            (json.loads(file.read_text()).get("finished", ""), str(file.parent))
            for file in root.glob("**/summary.json")
            if json.loads(file.read_text()).get("kind") == "pretrain"
        ]
        if not finished:
            raise UserError(
                f"no finished pre-training below {root.absolute()}: make one with "
                "`accelerate launch mpp/pretrain.py --recipe mpp_demo`, or name --recipe and init=REF"
            )
        run = path = Path(max(finished)[1])
    recipe = config.load_run(str(run / "config.yaml"))[0].finetune
    if recipe is None:
        raise UserError(f"{run}/config.yaml names no fine-tuning recipe (its key finetune); give --recipe")
    return path, recipe
