"""Checkpoint folders: written whole or not at all, read whole or not at all.

step_00005000/
  config.json            what timm reads
  model.safetensors      the encoder, in timm's names
  objective.safetensors  mask embedding and prediction head
  state/                 what an exact resume needs: optimizer.safetensors, meta.json

Where weights are averaged, the two upper files hold the average, and state/trained.safetensors what is trained.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import Tensor, nn

from mpp.errors import UserError
from mpp.files import read_json

_PREFIX = "step_"


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
    classes: list[str] | None,
    keep: int,
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
        classes: names of the outputs of the encoder's head, if it has one.
        keep: newest checkpoints that stay.
    """
    final = folder / f"{_PREFIX}{step:08d}"
    draft = folder / f".{final.name}.writing"
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "state").mkdir(parents=True)
    save_for_hf(
        encoder, str(draft), safe_serialization=True, model_config={"label_names": classes} if classes else None
    )
    objective = objective_weights(model, encoder)
    if objective:
        save_file(_whole(objective), draft / "objective.safetensors", metadata=dict(objective_note))
    if trained is not None:
        save_file(_whole(trained.state_dict()), draft / "state" / "trained.safetensors")
    save_file(_optimizer_tensors(optimizer, names), draft / "state" / "optimizer.safetensors")
    (draft / "state" / "meta.json").write_text(json.dumps({"step": step, **meta}, indent=1))
    for path in [*draft.rglob("*"), draft]:
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    draft.rename(final)
    _flush(folder)
    for _, old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


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
        UserError: a file is missing, damaged or does not fit.
    """
    stepped = model if trained is None else trained
    device = next(stepped.parameters()).device
    weights = read_weights(checkpoint / "model.safetensors")
    tensors = read_weights(checkpoint / "state" / "optimizer.safetensors")
    meta = read_json(checkpoint / "state" / "meta.json")
    try:
        encoder.load_state_dict(weights)
        if trained is not None:
            trained.load_state_dict(read_weights(checkpoint / "state" / "trained.safetensors"))
    except RuntimeError as error:
        raise UserError(f"{checkpoint} does not fit this recipe's model: {error}") from None
    load_objective(checkpoint, model, encoder)
    by_name = dict(stepped.named_parameters())
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        # AdamW counts its steps on the CPU, whatever the device of the parameter.
        optimizer.state[by_name[name]][kind] = value if kind == "step" else value.to(device)
    return meta


def load_objective(checkpoint: Path, model: nn.Module, encoder: nn.Module) -> None:
    """Puts a checkpoint's weights that are not the encoder's into a model; raises UserError where they do not fit."""
    own = objective_weights(model, encoder)
    saved = read_weights(checkpoint / "objective.safetensors") if own else {}
    try:
        missing, unexpected = model.load_state_dict(saved, strict=False)
    except RuntimeError as error:
        raise UserError(f"{checkpoint} does not fit this recipe's model: {error}") from None
    if unexpected or set(own) & set(missing):
        raise UserError(f"{checkpoint}: missing {sorted(set(own) & set(missing))}, unexpected {unexpected}")


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


@dataclass(frozen=True)
class Weights:
    """An encoder's weights as found under a REF.

    Attributes:
        tensors: by timm's names.
        path: the file they came from.
        config: the `config.json` beside it, empty where there is none.
    """

    tensors: dict[str, Tensor]
    path: Path
    config: dict[str, Any]


def find_weights(ref: str) -> Weights:
    """The encoder's weights of a run folder, a checkpoint folder or a .safetensors file.

    Of an official .npz file only the path, for what its arrays mean depends on the encoder.

    Raises:
        UserError: nothing there, or no complete checkpoint in it, or a damaged file.
    """
    file = weights_file(ref)
    if file.suffix == ".npz":
        return Weights({}, file, {})
    config = file.parent / "config.json"
    return Weights(read_weights(file), file, read_json(config) if config.is_file() else {})


def weights_file(ref: str) -> Path:
    """The file with the encoder's weights under a REF; raises as `find_weights`."""
    path = Path(ref).expanduser()
    if path.suffix in (".safetensors", ".npz") and path.is_file():
        return path
    if (path / "model.safetensors").is_file():
        return path / "model.safetensors"
    found = complete(path / "checkpoints")
    if found:
        return found[-1][1] / "model.safetensors"
    if path.is_dir():
        raise UserError(f"init={ref}: neither a checkpoint nor a run with a complete checkpoint in it")
    what = "is no file that can be read here" if path.is_file() else "not found"
    raise UserError(
        f"init={ref}: {what}. It can be a run folder, a checkpoint folder, a .safetensors file, an "
        "official .npz file, or scratch"
    )
