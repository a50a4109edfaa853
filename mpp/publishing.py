"""From a run's folder to a repository of the Hugging Face Hub, and back."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open

import mpp
from mpp import checkpoint, config, model_card, pictures, references, run_folder, sharing
from mpp.console import Console
from mpp.errors import UserError
from mpp.files import read_json, read_json_list

RECIPE = "recipe.yaml"  # not config.yaml: a folder that came from elsewhere is no run to continue
_TRIES = 3  # of a checkpoint that is removed while it is sent, for there is a newer one


def push(
    path: Path, repository: sharing.Repository, *, private: bool, license_name: str | None, console: Console
) -> str:
    """Sends a run's newest checkpoint, or the one that is named, with a model card; the run's files stay as they are.

    Args:
        path: a run folder, or a checkpoint folder within one.
        license_name: of the weights; None for what the recipe says.

    Returns:
        Where to look at it.

    Raises:
        UserError: there is nothing to send, or it can't be sent.
    """
    run = path if (path / "config.yaml").is_file() else path.absolute().parents[1]
    if not (run / "config.yaml").is_file():
        raise UserError(f"{path} is neither a run folder nor a checkpoint folder within one")
    for attempt in range(1, _TRIES + 1):
        folder = path if run != path else _newest(run, console)
        try:
            files, step = gather(run, folder, repository, license_name)
            message = f"{run.absolute().name}, step {step}"
            return sharing.upload(repository, files, message=message, private=private)
        except (UserError, FileNotFoundError) as error:
            if folder.is_dir() or attempt == _TRIES or not isinstance(error, UserError):
                raise
    raise AssertionError


def _newest(run: Path, console: Console) -> Path:
    found = checkpoint.newest_intact(run / "checkpoints", references.WEIGHTS)
    if found is None:
        raise UserError(f"{run} holds no complete checkpoint yet; there is nothing to send")
    step, folder, damaged = found
    for _, what in damaged:
        console.say(f"warning: {what}; step {step} is sent")
    return folder


def gather(
    run: Path, folder: Path, repository: sharing.Repository, license_name: str | None
) -> tuple[dict[str, Path | bytes], int]:
    """What a repository holds, by name, and the step of it; raises UserError where a file is damaged."""
    checkpoint.require_intact(folder, references.WEIGHTS)
    recipe, _ = config.load_run(str(run / "config.yaml"))
    license_name = license_name or recipe.runtime.license
    state = read_json(folder / "state" / "meta.json")
    step = state["step"]
    done = (run / "summary.json").is_file() and step == recipe.optim.steps
    summary = read_json(run / "summary.json") if done else {}
    results = read_json_list(run / "results.json") if done and (run / "results.json").is_file() else []
    records = [record for record in run_folder.read_records(run) if record["step"] <= step]
    about = references.read_config(folder / "config.json")
    about["pretrained_cfg"] |= {"tag": repository.name.partition("/")[2]}
    if license_name:
        about["pretrained_cfg"]["license"] = license_name
    weights = {name: folder / name for name in references.WEIGHTS if (folder / name).is_file()}
    images = _pictures(run, records, done)
    public = model_card.public(recipe)
    card = model_card.card(
        model_card.Facts(
            repository=repository.name,
            revision=repository.revision,
            recipe=public,
            kind=state["kind"],
            step=step,
            numbers=records[-1] if records and records[-1]["step"] == step else {},
            results=results,
            classes=about.get("label_names"),
            parameters=_parameters(folder / "model.safetensors"),
            license=license_name,
            pictures=list(images),
            timm_opens=timm_opens(about, folder / "model.safetensors"),
            versions={"mpp": mpp.__version__, **{name: version(name) for name in ("torch", "timm")}},
            images=summary.get("images"),
            seconds=summary.get("seconds"),
            devices=f"{summary['processes']} x {summary['device']}" if summary else None,
            pixels=about["pretrained_cfg"],
        )
    )
    files: dict[str, Path | bytes] = {
        **weights,
        "config.json": json.dumps(about, indent=2).encode(),
        "README.md": card.encode(),
        RECIPE: config.to_yaml(public).encode(),
        checkpoint.SUMS: checkpoint.sums(weights).encode(),
        **images,
    }
    return files | ({"summary.json": run / "summary.json"} if done else {}), step


def _pictures(run: Path, records: list[dict[str, Any]], done: bool) -> dict[str, Path | bytes]:
    found: dict[str, Path | bytes] = {}
    if records:
        with tempfile.TemporaryDirectory() as folder:
            drawn = Path(folder) / "curves.png"
            pictures.draw_curves(drawn, records)
            found["figures/curves.png"] = drawn.read_bytes()
    if done and (run / "figures" / "mosaic.png").is_file():
        found["figures/mosaic.png"] = run / "figures" / "mosaic.png"
    return found


def _parameters(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118


def timm_opens(about: Mapping[str, Any], file: Path) -> bool:
    """Whether timm builds a model with the very weights of a file from what its config.json says."""
    with torch.device("meta"):
        try:
            heads = {key: about[key] for key in ("num_classes", "global_pool") if key in about}
            made = timm.create_model(about["architecture"], **{**heads, **about.get("model_args", {})})
        except (RuntimeError, TypeError, ValueError, AssertionError):
            return False
    with safe_open(file, framework="pt") as tensors:
        there = {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return there == {name: value.shape for name, value in made.state_dict().items()}


def pull(repository: sharing.Repository, output: Path, overwrite: bool, console: Console) -> None:
    """Fetches a repository into a folder of its own, which is then a checkpoint folder; whole or not at all.

    Raises:
        UserError: it can't be had, it is damaged, or the folder holds something else.
    """
    taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    pulled = (output / RECIPE).is_file() and (output / "model.safetensors").is_file()
    if taken and not (overwrite and pulled):
        again = ", or give --overwrite" if pulled else ""
        raise UserError(f"{output} holds something already; name another folder{again}")
    found = sharing.fetch(repository, warn=console.say)
    draft = output.absolute().with_name(f".{output.absolute().name}.pulling")
    shutil.rmtree(draft, ignore_errors=True)
    names = [name.relative_to(found) for name in sorted(found.rglob("*")) if name.is_file()]
    for name in names:
        if any(name.match(pattern) for pattern in sharing.FILES):
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found / name, draft / name)
    try:
        if (draft / checkpoint.SUMS).is_file():
            checkpoint.require_intact(draft)
        if output.exists():
            shutil.rmtree(output)
        draft.rename(output)
    except UserError as error:
        shutil.rmtree(draft)
        raise UserError(str(error).replace(str(draft), f"{repository.name} on the Hub, file ")) from None
