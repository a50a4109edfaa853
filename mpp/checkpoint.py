"""Checkpoint folders: written whole or not at all, read whole or not at all.

step_00005000/
  config.json            what timm reads
  model.safetensors      the encoder, in timm's names
  objective.safetensors  mask embedding and prediction head
  SHA256SUMS             of every other file; `sha256sum -c SHA256SUMS` checks them, too
  state/                 what an exact resume needs: optimizer.safetensors, meta.json

Where weights are averaged, the two upper files hold the average, and state/trained.safetensors what is trained.
No random state, schedule or position in the data is in there, for all three are functions of the step.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import Tensor, nn

from mpp.errors import UserError
from mpp.files import read_json

SUMS = "SHA256SUMS"
_PREFIX = "step_"
# How the optimiser's state lies in `state`: in one file. Another layout (sharded) would have another name here.
_LAYOUT = "whole"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay on disk: the newest, those of certain steps, and the best one.

    Attributes:
        newest: so many.
        every: those of steps that are multiples of it; 0 for none.
        best: the name of a measured number by which one stays; None for none. The higher is better, but of losses.
    """

    newest: int
    every: int = 0
    best: str | None = None


def write(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    encoder: nn.Module,
    trained: nn.Module | None,
    objective_note: Mapping[str, str],
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    meta: Mapping[str, Any],
    measured: Mapping[str, float],
    classes: list[str] | None,
    description: Mapping[str, Any],
    retention: Retention,
) -> Path:
    """Writes `folder/step_XXXXXXXX` beside its name, flushes it, renames it, and drops older ones.

    Args:
        model: what is exported; its weights that are not the encoder's are the objective's, without a file where
            there are none.
        encoder: the part of it that timm knows.
        trained: where `model` is an average, the model that it is the average of.
        objective_note: what the objective's weights mean, for the file's metadata.
        names: of every parameter that the optimiser holds.
        meta: plain values for `state/meta.json`.
        measured: what is known of the weights at this step.
        classes: names of the outputs of the encoder's head, if it has one.
        description: plain values by which this package builds the model again, for `config.json`.
        retention: which of the older ones stay.

    Raises:
        UserError: it can't be written, such as on a full disk; the checkpoints that there were stay.
    """
    final = folder / f"{_PREFIX}{step:08d}"
    draft = folder / f".{final.name}.writing"
    try:
        _sweep(folder)
        (draft / "state").mkdir(parents=True)
        about: dict[str, Any] = {"mpp": dict(description)} | ({"label_names": classes} if classes else {})
        save_encoder(draft, encoder, about)
        objective = objective_weights(model, encoder)
        if objective:
            # One entry, for safetensors writes several in a random order, and equal weights shall be equal files.
            note = {"objective": json.dumps(dict(objective_note))}
            save_file(_whole(objective), draft / "objective.safetensors", metadata=note)
        if trained is not None:
            save_file(_whole(trained.state_dict()), draft / "state" / "trained.safetensors")
        save_file(_optimizer_tensors(optimizer, names), draft / "state" / "optimizer.safetensors")
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        state = {"step": step, "layout": _LAYOUT, **meta, "measured": finite}
        (draft / "state" / "meta.json").write_text(json.dumps(state, indent=1))
        written = sorted(path.relative_to(draft) for path in draft.rglob("*") if path.is_file())
        (draft / SUMS).write_text(sums({str(name): draft / name for name in written}))
        for path in [*draft.rglob("*"), draft]:
            _flush(path)
        if final.exists():
            _remove(final)
        draft.rename(final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        left = complete(folder)
        before = f"the checkpoint of step {left[-1][0]} is whole" if left else "there is no earlier one"
        raise UserError(
            f"the checkpoint of step {step} can't be written in {folder} ({error}); {before}. Make room or give "
            "permission; the same command continues"
        ) from None
    for path in _superfluous(folder, retention):
        _remove(path)
    return final


def save_encoder(folder: Path, encoder: nn.Module, about: Mapping[str, Any]) -> None:
    """Writes an encoder as timm and transformers read it: `model.safetensors` and `config.json`.

    Args:
        about: more values for `config.json`.
    """
    save_for_hf(encoder, str(folder), safe_serialization=True, model_config=dict(about))
    config = json.loads((folder / "config.json").read_text())
    # It stands beside them, too, and transformers takes no second one.
    config.get("model_args", {}).pop("num_classes", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _sweep(folder: Path) -> None:
    """Takes away what writing or removing left when it was killed."""
    for path in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint so that a kill leaves no part of one under its name."""
    hidden = path.with_name(f".{path.name}.removing")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _superfluous(folder: Path, retention: Retention) -> list[Path]:
    found = complete(folder)
    kept = {step for step, _ in found[-retention.newest :]}
    kept |= {step for step, _ in found if retention.every and step % retention.every == 0}
    chosen = best(folder, retention.best) if retention.best else None
    kept |= {chosen.step} if chosen else set()
    return [path for step, path in found if step not in kept]


@dataclass(frozen=True)
class Best:
    """The checkpoint of the best value of a number: the earliest of several equal ones."""

    metric: str
    value: float
    step: int
    path: Path


def best(folder: Path, metric: str) -> Best | None:
    """The best of the checkpoints of a folder that were measured; None where none was."""
    found = [
        Best(metric, float(value), step, path)
        for step, path in complete(folder)
        if (value := _measured(path).get(metric)) is not None
    ]
    sign = 1 if metric.endswith("loss") else -1
    return min(found, key=lambda one: (sign * one.value, one.step), default=None)


def _measured(checkpoint: Path) -> Mapping[str, float]:
    try:
        return read_json(checkpoint / "state" / "meta.json").get("measured", {})
    except UserError:  # a damaged one, which is told where it is read for more
        return {}


def sums(files: Mapping[str, Path | bytes]) -> str:
    """SHA-256 sums of files or contents by name, as `sha256sum` writes them."""
    return "".join(
        f"{hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else _sum(content)}  {name}\n"
        for name, content in files.items()
    )


def _sum(file: Path) -> str:
    seen = file.stat()
    return _sum_as_seen(file, seen.st_size, seen.st_mtime_ns)


@lru_cache(maxsize=256)
def _sum_as_seen(file: Path, _size: int, _changed: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def require_intact(checkpoint: Path, names: Iterable[str] | None = None) -> None:
    """Raises UserError where a checkpoint's file is missing, or is not what its SHA256SUMS says.

    Args:
        names: of files to check, as far as they are there or listed; None for all that are listed.
    """
    try:
        lines = (checkpoint / SUMS).read_text(encoding="utf-8").splitlines()
        listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except FileNotFoundError:
        raise UserError(f"{checkpoint / SUMS} is missing; the checkpoint is not whole, name another") from None
    except (OSError, ValueError):
        raise UserError(f"{checkpoint / SUMS} is damaged; name another checkpoint") from None
    for name in listed if names is None else names:
        file = checkpoint / name
        if name not in listed:
            continue
        if checkpoint not in Path(os.path.normpath(file)).parents:
            raise UserError(f"{checkpoint / SUMS} names {name}, which is not in that folder; name another checkpoint")
        if not file.is_file():
            raise UserError(f"{file} is missing; the checkpoint is not whole, name another")
        if _sum(file) != listed[name]:
            raise UserError(f"{file} is damaged (its SHA-256 is not that of {SUMS}); name another checkpoint")


def newest_intact(folder: Path, names: Iterable[str] | None = None) -> tuple[int, Path, list[tuple[Path, str]]] | None:
    """Step and path of the newest checkpoint of a folder whose files are all as they were written.

    Args:
        names: as in `require_intact`.

    Returns:
        With them, the newer ones that are damaged, and what is wrong; None where there is no checkpoint at all.

    Raises:
        UserError: there are some, and all are damaged.
    """
    found, damaged = complete(folder), []
    for step, path in reversed(found):
        try:
            require_intact(path, names)
        except UserError as error:
            damaged.append((path, str(error)))
        else:
            return step, path, damaged
    if damaged:
        listed = "\n  ".join(what for _, what in damaged)
        raise UserError(f"every checkpoint in {folder} is damaged; put back one of them, or start again:\n  {listed}")
    return None


def set_aside(checkpoint: Path) -> Path:
    """Renames a damaged checkpoint, so that none takes it for one that could be continued from."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    return aside


def _whole(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in weights.items()}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of the checkpoints in a folder, by number, oldest first."""
    found = [
        (int(path.name.removeprefix(_PREFIX)), path)
        for path in folder.glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit()
    ]
    return sorted(found)


def _optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    return {
        f"{kind}/{names[parameter]}": value.contiguous()
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, Tensor)
    }


def restore(
    checkpoint: Path,
    *,
    model: nn.Module,
    encoder: nn.Module,
    trained: nn.Module | None,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Puts a run's own checkpoint back into the model and the optimiser; arguments as in `write`.

    Returns:
        The meta values it was written with.

    Raises:
        UserError: a file is missing, damaged or does not fit; nothing was put back then.
    """
    meta = read_json(checkpoint / "state" / "meta.json")
    if meta.get("layout") != _LAYOUT:
        raise UserError(
            f"{checkpoint}/state is laid out as {meta.get('layout')}, and this version of the package reads {_LAYOUT}; "
            "continue with the version that wrote it, or start again with --overwrite"
        )
    stepped = model if trained is None else trained
    by_name = {
        name: parameter
        for name, parameter in stepped.named_parameters()
        if any(parameter is held for group in optimizer.param_groups for held in group["params"])
    }
    moments = read_weights(checkpoint / "state" / "optimizer.safetensors")
    parts = [
        ("model.safetensors", encoder.state_dict(), read_weights(checkpoint / "model.safetensors")),
        ("state/optimizer.safetensors", _expected_moments(optimizer, moments, by_name), moments),
    ]
    objective = objective_weights(model, encoder)
    if objective or (checkpoint / "objective.safetensors").is_file():
        parts.append(("objective.safetensors", objective, read_weights(checkpoint / "objective.safetensors")))
    if trained is not None:
        file = "state/trained.safetensors"
        parts.append((file, trained.state_dict(), read_weights(checkpoint / file)))
    problems = [f"{file}: {problem}" for file, own, found in parts for problem in misfits(own, found)]
    if problems:
        listed = "\n  ".join(problems)
        raise UserError(f"{checkpoint} does not fit this recipe's model; nothing was loaded:\n  {listed}")
    for _, own, found in parts:
        _put(own, found)
    for key, value in moments.items():
        kind, _, name = key.partition("/")
        # AdamW counts its steps on the CPU, whatever the device of the parameter.
        optimizer.state[by_name[name]][kind] = value if kind == "step" else value.to(by_name[name].device)
    return meta


def _expected_moments(
    optimizer: torch.optim.Optimizer, found: Mapping[str, Tensor], by_name: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Names and shapes of an optimiser's whole state; which kinds of it SGD has is for the file to say."""
    adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    kinds = ["step", "exp_avg", "exp_avg_sq"] if adam else dict.fromkeys(key.partition("/")[0] for key in found)
    return {
        f"{kind}/{name}": torch.empty(()) if kind == "step" else torch.empty_like(parameter, device="meta")
        for kind in kinds
        for name, parameter in by_name.items()
    }


def misfits(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Every name that is missing, unexpected or of another shape in what was found, in words."""
    return [
        *(f"missing: {name}" for name in own if name not in found),
        *(f"unexpected: {name}" for name in found if name not in own),
        *(
            f"shape of {name}: {list(found[name].shape)} there, {list(value.shape)} in the model"
            for name, value in own.items()
            if name in found and found[name].shape != value.shape
        ),
    ]


@torch.no_grad()
def _put(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, value in own.items():
        if not value.is_meta:
            value.copy_(found[name])


def load_objective(checkpoint: Path, model: nn.Module, encoder: nn.Module) -> None:
    """Puts a checkpoint's weights that are not the encoder's into a model; raises UserError where they do not fit."""
    own = objective_weights(model, encoder)
    found = read_weights(checkpoint / "objective.safetensors") if own else {}
    problems = misfits(own, found)
    if problems:
        listed = "\n  ".join(problems)
        raise UserError(f"{checkpoint}/objective.safetensors does not fit; nothing was loaded of it:\n  {listed}")
    _put(own, found)


def objective_weights(model: nn.Module, encoder: nn.Module) -> dict[str, Tensor]:
    """Weights of a model that are not its encoder's, by name."""
    inside = {id(value) for value in encoder.state_dict(keep_vars=True).values()}
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if id(value) not in inside}


def read_weights(file: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file by name; raises UserError where it is missing or damaged."""
    try:
        return load_file(file)
    except FileNotFoundError:
        raise UserError(f"{file} is missing; the checkpoint is not whole, name another") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({error}); name another checkpoint") from None


def read_note(file: Path) -> dict[str, str]:
    """What an objective's file says of its weights, empty where it says nothing; raises UserError if it is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            found = json.loads((opened.metadata() or {}).get("objective", "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file} is missing or damaged ({error}); name another checkpoint") from None
    return found if isinstance(found, dict) else {}
