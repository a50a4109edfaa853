"""What frozen models make of images: raw pixels, features, and a folder that keeps them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import BinaryIO
from zipfile import BadZipFile

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from mpp.data import HeldOutSamples, View, load, normalize
from mpp.disk_cache import DiskCache, default_folder
from mpp.model import Kind, represent
from mpp.sources import Source

Rows = Sequence[int] | np.ndarray


def pixels(source: Source, rows: Rows, view: View) -> np.ndarray:
    """Raw pixels of some rows as evaluation cuts them, uint8 [row, image_size, image_size, 3].

    Raises:
        ImageError: an image can't be read.
    """
    images = np.empty((len(rows), view.image_size, view.image_size, 3), dtype=np.uint8)
    for place, row in enumerate(rows):
        images[place] = view.evaluate(source.picture(int(row)))
    return images


@torch.no_grad()
def features(
    model: nn.Module,
    source: Source,
    rows: Rows,
    view: View,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    kind: Kind | None = None,
    block: int | None = None,
    micro_batch: int = 256,
    workers: int = 0,
    accelerator: Accelerator | None = None,
) -> np.ndarray:
    """What a frozen model makes of some images; the model is left as it was, and no random number is drawn.

    Processes take whole micro-batches in turn, so that each is what one process would read.

    Args:
        mean, std: of the model's pixels, on the scale [0, 1].
        kind, block: of `mpp.model.represent`.
        workers: loader processes.
        accelerator: whose processes share the work; None for one process.

    Returns:
        float32 [row, width], in the order of `rows` and the same in every process.

    Raises:
        UserError: the model has no such features.
        ImageError: an image can't be read.
    """
    device = next(model.parameters()).device
    processes, process = (accelerator.num_processes, accelerator.process_index) if accelerator else (1, 0)
    places = [
        list(range(start, min(start + micro_batch, len(rows))))
        for start in range(process * micro_batch, len(rows), processes * micro_batch)
    ]
    batches = load(HeldOutSamples(source, rows, view, _nothing), lambda: iter(places), workers, device)

    def of(images: Tensor) -> Tensor:
        return represent(model, normalize(images, mean, std), kind, block).float()

    with _evaluation(model), closing(batches):
        # What can't be had is refused here, in all processes, and not by those alone that have a batch.
        width = of(torch.zeros(1, view.image_size, view.image_size, 3, dtype=torch.uint8, device=device)).shape[1]
        found = np.empty((len(rows), width), dtype=np.float32)
        for start in range(0, len(rows), processes * micro_batch):
            mine = torch.zeros(micro_batch, width, device=device)
            batch = next(batches, None)
            if batch is not None:
                mine[: len(batch["images"])] = of(batch["images"])
            together = accelerator.gather(mine) if accelerator else mine
            end = min(start + len(together), len(rows))
            found[start:end] = together[: end - start].cpu().numpy()
    return found


def _nothing(_: int, __: int) -> dict[str, np.ndarray]:
    return {}


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Sets a model to evaluation, and each of its parts back to what it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def cached(
    parts: Sequence[str],
    compute: Callable[[], np.ndarray],
    *,
    accelerator: Accelerator | None = None,
    limit_gb: float = 20.0,
) -> np.ndarray:
    """An array that is computed once and then kept on disk, with this package's other files that can be made again.

    Args:
        parts: all that the array depends on.
        compute: makes it, in all processes together.
        accelerator: whose processes call this together; its main process writes. None for one process.
        limit_gb: size of the folder in GB, past which the arrays that were read longest ago go.

    Raises:
        UserError: the disk is full, or the folder can't be written.
    """
    cache = DiskCache(default_folder() / "features", int(limit_gb * 1e9))
    name = hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:32] + ".npz"
    found = _kept(cache, name)
    everywhere = gather_object([found is not None]) if accelerator else [found is not None]
    if found is not None and all(everywhere):
        return found
    found = compute()
    if accelerator is None or accelerator.is_main_process:
        cache.open(name, partial(np.savez, values=found), lambda file: _read(file) is not None).close()
    if accelerator is not None:
        accelerator.wait_for_everyone()  # what is looked for next may be this
    return found


def _kept(cache: DiskCache, name: str) -> np.ndarray | None:
    """The array of that name, None where there is none, or a damaged one."""

    def absent(_: BinaryIO) -> None:
        raise LookupError

    with suppress(LookupError), cache.open(name, absent) as file:
        return _read(file)
    return None


def _read(file: BinaryIO) -> np.ndarray | None:
    """The array in a file, None where the file is damaged; a zip has checksums."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return arrays["values"]
    except (ValueError, EOFError, BadZipFile):
        return None
