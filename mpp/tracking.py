"""Sending metrics to a tracker, by accelerate."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mpp.errors import UserError

PROJECT = "mpp"
Send = Callable[[int, Mapping[str, float]], None]


def require_tracker(name: str) -> None:
    """Raises UserError where a tracker's package is not installed; none is always there."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(
            f"runtime.tracker={name}: the package {name} is not installed; `pip install {name}`, or use none"
        )


@contextmanager
def tracking(accelerator: Accelerator, name: str, folder: Path, settings: Mapping[str, Any]) -> Iterator[Send]:
    """A function that sends (step, numbers) to a tracker for as long as the context lasts.

    Args:
        accelerator: made with `log_with=name`.
        name: tensorboard, wandb, trackio or none.
        folder: of the run; its path is the run's name there. TensorBoard's files lie in `folder/tensorboard`.
        settings: plain values by dotted keys, shown beside the run.
    """
    if name == "none":
        yield lambda step, numbers: None
        return
    own = {"wandb": {"name": str(folder), "dir": str(folder)}, "trackio": {"name": str(folder)}}.get(name, {})
    plain = {key: value if isinstance(value, bool | int | float) else str(value) for key, value in settings.items()}
    accelerator.init_trackers(PROJECT, config=plain, init_kwargs={name: own})
    try:
        yield lambda step, numbers: accelerator.log(dict(numbers), step=step)
    finally:
        for tracker in accelerator.trackers:  # `end_training` would end the processes' group, too
            tracker.finish()
