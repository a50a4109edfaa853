"""REF: where the weights of an encoder lie, on this machine or on the Hugging Face Hub.

A run folder, a checkpoint folder, a .safetensors file, an official .npz file, hf-hub:ORG/NAME[@REVISION], timm:NAME.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.models import get_pretrained_cfg
from torch import Tensor

from mpp import checkpoint, sharing
from mpp.errors import UserError
from mpp.files import read_json

OBJECTIVE = "objective.safetensors"
WEIGHTS = ("model.safetensors", OBJECTIVE)


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


def _silent(_: str) -> None:
    pass


def find_weights(ref: str, warn: Callable[[str], None] = _silent) -> Weights:
    """The encoder's weights under a REF.

    Of an official .npz file only the path, for what its arrays mean depends on the encoder.

    Raises:
        UserError: nothing there, or no whole checkpoint in it, or a damaged file.
    """
    file = weights_file(ref, warn)
    if file.suffix == ".npz":
        return Weights({}, file, {})
    return Weights(checkpoint.read_weights(file), file, read_config(file.with_name("config.json")))


def weights_file(ref: str, warn: Callable[[str], None] = _silent) -> Path:
    """The file with the encoder's weights under a REF, fetched where it lies on the Hub.

    Where it is in a checkpoint with SHA256SUMS, its files are what these say.

    Args:
        warn: takes what to know: a damaged checkpoint that was passed over, a hub that could not be reached.

    Raises: as `find_weights`.
    """
    kind, _, name = ref.partition(":")
    if kind in PLACES and name:
        return _of_checkpoint(PLACES[kind](name, warn))
    path = Path(ref).expanduser()
    if path.suffix == ".npz" and path.is_file():
        return path
    if path.suffix == ".safetensors" and path.is_file():
        return _of_checkpoint(path.parent) if path.name == "model.safetensors" else path
    if (path / "model.safetensors").is_file() or (path / checkpoint.SUMS).is_file():
        return _of_checkpoint(path)
    found = checkpoint.newest_intact(path / "checkpoints", WEIGHTS)
    if found:
        step, newest, damaged = found
        for broken, what in damaged:
            warn(f"warning: {broken.name} of init={ref} is passed over, and step {step} is taken: {what}")
        return newest / "model.safetensors"
    if path.is_dir():
        raise UserError(f"init={ref}: neither a checkpoint nor a run with a complete checkpoint in it")
    what = "is no file that can be read here" if path.is_file() else "not found"
    raise UserError(
        f"init={ref}: {what}. It can be a run folder, a checkpoint folder, a .safetensors file, an "
        "official .npz file, hf-hub:ORG/NAME[@REVISION], timm:NAME, or scratch"
    )


def _of_checkpoint(folder: Path) -> Path:
    if (folder / checkpoint.SUMS).is_file():
        checkpoint.require_intact(folder, WEIGHTS)
    return folder / "model.safetensors"


def _from_hub(name: str, warn: Callable[[str], None]) -> Path:
    return sharing.fetch(sharing.parse(name), files=(*WEIGHTS, "config.json", checkpoint.SUMS), warn=warn)


def _from_timm(name: str, warn: Callable[[str], None]) -> Path:
    """The folder of a pretrained model of timm's, by timm's own table of where it lies."""
    if not timm.is_model(name.partition(".")[0]):
        near = difflib.get_close_matches(name, timm.list_models("vit_*", pretrained=True), 3, cutoff=0.3)
        raise UserError(f"init=timm:{name}: timm has no such model; nearest are {', '.join(near)}")
    try:
        found = get_pretrained_cfg(name)
    except RuntimeError:  # a name after the point that timm does not know
        found = None
    if found is None or not found.hf_hub_id:
        there = timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True)
        some = f"; it has {', '.join(there)}" if there else ""
        raise UserError(f"init=timm:{name}: timm has no weights of that name on the Hub{some}")
    if found.hf_hub_filename:
        raise UserError(f"init=timm:{name}: its weights are in {found.hf_hub_filename}, which is not in timm's names")
    return _from_hub(found.hf_hub_id, warn)


PLACES: dict[str, Callable[[str, Callable[[str], None]], Path]] = {"hf-hub": _from_hub, "timm": _from_timm}


def is_remote(ref: str) -> bool:
    """Whether a REF names a place that is not on this machine."""
    return ref.partition(":")[0] in PLACES


def read_config(file: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint, empty where there is none.

    Raises UserError where what is taken from it is not what it has to be, for it may come from anywhere.
    """
    if not file.is_file():
        return {}
    config = read_json(file)
    pixels = config.get("pretrained_cfg", {})
    if not isinstance(pixels, dict):
        raise UserError(f"{file}: pretrained_cfg is no object")
    for key in ("mean", "std"):
        values = pixels.get(key, [1.0, 1.0, 1.0])
        numbers = isinstance(values, list) and all(isinstance(value, int | float) for value in values)
        if not numbers or len(values) != 3 or not all(math.isfinite(value) for value in values):
            raise UserError(f"{file}: pretrained_cfg.{key}={values} must be three numbers")
        if key == "std" and min(values) <= 0:
            raise UserError(f"{file}: pretrained_cfg.std={values} must be positive")
    names = config.get("label_names")
    if isinstance(names, dict | tuple):  # timm's other form, in which numbers may be left out
        config.pop("label_names")
    elif names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{file}: label_names must be a list of names")
    return config
