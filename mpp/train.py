"""The loop, for pre-training and fine-tuning alike, and measuring a split."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mpp.draws import step_seed
from mpp.errors import UserError
from mpp.metrics import BEST, Tally, most_likely
from mpp.objectives import Objective, Supervised
from mpp.optim import RunningAverage


class Diverged(UserError):
    """The loss or the gradient is no longer a finite number."""


def train(
    *,
    accelerator: Accelerator,
    model: nn.Module,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    average: RunningAverage | None,
    batches: Iterator[Mapping[str, Tensor]],
    learning_rate: Callable[[int], float],
    seed: int,
    first_step: int,
    steps: int,
    batch_size: int,
    micro_batches: int,
    clip_norm: float,
    log_every: int,
    save_every: int,
    tally: Tally,
    log: Callable[[int, dict[str, float]], None],
    evaluations: Sequence[tuple[int, Callable[[], dict[str, float]]]],
    save: Callable[[int, Tally], None],
    stop_wanted: Callable[[], bool],
    track: Callable[[Iterable[int]], Iterable[int]],
) -> bool:
    """Trains from `first_step` to `steps` and says whether it got there, or was asked to stop.

    A step is an optimiser step: `micro_batches` forward passes on each process, one clipping, one
    update. Counts stay on the device; the host waits only to log.

    Args:
        average: the running average of the weights, if there is one.
        batches: the micro-batches of this process, from `first_step` on.
        learning_rate: of the update after so many finished steps.
        clip_norm: global norm to which gradients are cut; 0 for no clipping.
        log_every, save_every: in steps; 0 for only at the end.
        tally: counts since the last log; not empty when a stopped run continues.
        log: (step, numbers).
        save: (step, counts since the last log).
        evaluations: every so many steps, and at the end, numbers on other images.
        stop_wanted: asked after every step; the run then saves and returns.
        track: wraps the steps in a progress bar.

    Raises:
        Diverged: the loss or the gradient is not finite; nothing is saved then.
    """

    def due(step: int, every: int) -> bool:
        return step == steps or (every > 0 and step % every == 0)

    began, seen = time.perf_counter(), 0
    for step in track(range(first_step + 1, steps + 1)):
        model.train()
        torch.manual_seed(step_seed(seed, step - 1, accelerator.process_index))  # dropout
        rate = learning_rate(step - 1)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        for micro in range(micro_batches):
            last = micro + 1 == micro_batches
            with nullcontext() if last else accelerator.no_sync(model):
                loss, counts = objective.loss(model, next(batches))
                accelerator.backward(loss / micro_batches)
            tally.add(counts)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if average is not None:
            average.update()
        seen += batch_size

        stop = stop_wanted() and step < steps
        record: dict[str, float] = {}
        if stop or due(step, log_every) or due(step, save_every):
            totals = tally.total(lambda value: accelerator.reduce(value, "sum"))
            numbers = {**objective.summary(totals), "grad_norm": float(grad_norm), "learning_rate": rate}
            if not all(math.isfinite(numbers[name]) for name in ("loss", "grad_norm")):
                raise Diverged(
                    f"loss={numbers['loss']} and grad_norm={numbers['grad_norm']} at step {step}, with learning rate "
                    f"{rate:.3g}: the run diverged and stops here; lower optim.learning_rate, or raise "
                    "optim.warmup_steps"
                )
            if due(step, log_every):
                record = {**numbers, "images_per_second": seen / (time.perf_counter() - began)}
                tally.sums.clear()
        try:
            for every, evaluate in evaluations:
                if due(step, every):
                    record |= evaluate()
        except UserError:  # a held-out image that can't be read must not cost the training
            if record:
                log(step, record)
            save(step, tally)
            raise
        if record:
            log(step, record)
        if due(step, log_every):
            began, seen = time.perf_counter(), 0
        if stop or due(step, save_every):
            save(step, tally)
        if stop:
            return False
    return True


@torch.no_grad()
def measure(
    accelerator: Accelerator, model: nn.Module, objective: Objective, batches: Iterable[Mapping[str, Tensor]]
) -> dict[str, float]:
    """The objective's numbers over a whole split, every image counted once over all processes.

    Processes may have different numbers of batches, so the model is called without its wrapper.
    """
    bare = accelerator.unwrap_model(model)
    bare.eval()
    tally = Tally()
    for batch in batches:
        tally.add(objective.measure(bare, batch))
    return objective.summary(tally.total(lambda value: accelerator.reduce(value, "sum")))


@torch.no_grad()
def classify(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Supervised,
    batches: Iterable[Mapping[str, Tensor]],
    images: int,
    judged: bool = True,
) -> tuple[dict[str, float], np.ndarray]:
    """What `measure` says of a split, and the classes that the model holds most likely for each image.

    Args:
        batches: whose `index` counts the images from 0.
        images: number of them, over all processes.
        judged: whether the batches have labels to measure by.

    Returns:
        The numbers, none where nothing is judged, and int32 [image, up to 5], the most likely class first.
    """
    bare = accelerator.unwrap_model(model)
    bare.eval()
    tally = Tally()
    best = torch.zeros(images, min(BEST, objective.classes), dtype=torch.int64, device=accelerator.device)
    for batch in batches:
        logits = objective.predict(bare, batch)
        if judged:
            tally.add(objective.judge(logits, batch)[1])
        best[batch["index"]] = most_likely(logits)
    found = objective.summary(tally.total(lambda value: accelerator.reduce(value, "sum")))
    return found, accelerator.reduce(best, "sum").to(torch.int32).cpu().numpy()  # each image stands in one process
