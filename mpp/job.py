"""One call of the loop: a resolved job, its state on disk, its log, and signals to stop."""

import dataclasses
import json
import math
import os
import signal
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from timm.models import VisionTransformer
from torch import Tensor, nn

from mpp import checkpoint, config, data, run_folder, wiring
from mpp.background_push import BackgroundPush
from mpp.config import RunConfig
from mpp.console import Console
from mpp.errors import Stopped, UserError
from mpp.files import read_json, write_json_lines
from mpp.frozen import Probes
from mpp.metrics import Tally, exact_type
from mpp.model import encoder_of
from mpp.objectives import Objective, Supervised
from mpp.optim import RunningAverage, build_optimizer, lr_at
from mpp.sources import Source
from mpp.tracking import tracking
from mpp.train import classify, measure, train
from mpp.wiring import HeldOut

# Ctrl-C, a scheduler that ends a run, and one that gives notice of it (Slurm's --signal=USR1@90).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAME_SIGNAL_SECONDS = 2.0


@dataclass(frozen=True)
class Job:
    """All that one call of the loop needs, resolved from a recipe.

    Attributes:
        objective: with the pixel statistics of the model.
        model: what is trained; the loop moves it to its device.
        rows: rows of `source` to train on.
        held_out: (source, rows) measured during and after training; None for none.
        probes: frozen features looked at during training; None for none.
        push: sends checkpoints to the Hub; None where they stay here, and in every process but the first.
        classes: names of the outputs of the encoder's head, if it has one.
        inputs: fingerprints of what the run reads.
        kind: pretrain or finetune.
    """

    recipe: RunConfig
    accelerator: Accelerator
    console: Console
    folder: Path
    objective: Objective
    model: nn.Module
    source: Source
    rows: wiring.Rows
    held_out: HeldOut | None
    classes: list[str] | None
    inputs: dict[str, str]
    kind: str = "pretrain"
    probes: Probes | None = None
    push: BackgroundPush | None = None


def require_best(job: Job) -> None:
    """Raises UserError where `runtime.keep_best` is not among the numbers that this run measures."""
    name = job.recipe.runtime.keep_best
    if name is None:
        return
    names = list(job.probes.names) if job.probes else []
    if job.held_out is not None:
        source, rows = job.held_out
        one = dataclasses.replace(job, model=job.model.to(job.accelerator.device))
        names += [f"held_out_{number}" for number in measure_rows(one, (source, rows[:1]))]
    if name not in names:
        raise UserError(f"runtime.keep_best={name} is not measured in this run; there are {', '.join(names) or 'none'}")


def _newest(job: Job) -> tuple[int, Path] | None:
    """Step and path of the checkpoint that a run continues from; damaged ones are told of and set aside."""
    found = checkpoint.newest_intact(job.folder / "checkpoints")
    if found is None:
        return None
    step, path, damaged = found
    before = read_json(path / "state" / "meta.json").get("recipe", {})
    now = config.decisive(job.recipe)
    changed = [f"{key}: {before[key]} there, {now[key]} here" for key in now if before.get(key, now[key]) != now[key]]
    if changed:
        listed = "\n  ".join(changed)
        raise UserError(
            f"{path} is the state of another recipe; take it out of this folder, or give --overwrite to start again. "
            f"What differs:\n  {listed}"
        )
    for broken, what in damaged:
        aside = checkpoint.set_aside(broken)
        job.console.say(f"warning: {what}. It is now {aside.name}, and step {step} is continued from")
    return step, path


def run_loop(job: Job, title: str, lines: bool = True) -> dict[str, float]:
    """Trains a job to its end from its newest checkpoint and returns the last numbers logged.

    Args:
        title: of the progress bar and the lines.
        lines: whether to say what is logged, and to send it to the tracker.
    """
    recipe, accelerator, folder = job.recipe, job.accelerator, job.folder
    optim, runtime = recipe.optim, recipe.runtime
    processes, process = accelerator.num_processes, accelerator.process_index
    micro_batches = wiring.micro_batches(recipe, processes)
    model, encoder = job.model, encoder_of(job.model)
    base = optim.learning_rate
    assert isinstance(base, float)  # a list was resolved before
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(
        model.named_parameters(),
        name=optim.name,
        weight_decay=optim.weight_decay,
        betas=(optim.beta1, optim.beta2),
        momentum=optim.momentum,
        decay_on=optim.decay_on,
        layer_decay=optim.layer_decay,
        depth=len(encoder.blocks) if isinstance(encoder, VisionTransformer) else 0,
    )
    wrapped = accelerator.prepare_model(model)
    average = RunningAverage(model, optim.average) if optim.average else None
    # What is measured and exported, and beside it what is trained, where that is another.
    shown, trained = (average.model, model) if average else (model, None)
    encoder, measured = encoder_of(shown), dataclasses.replace(job, model=shown)
    tally, first_step, seconds_before, replaced = Tally(), 0, 0.0, 0
    saved = wiring.on_first(accelerator, lambda: _newest(job))
    if saved is not None:
        first_step, newest = saved
        meta = checkpoint.restore(newest, model=shown, encoder=encoder, trained=trained, optimizer=optimizer)
        run_folder.require_same_inputs(folder, meta["inputs"], job.inputs)
        seconds_before, replaced = meta["seconds"], meta["replaced"]
        if accelerator.is_main_process:  # the counts are of all processes; one of them carries them on
            exact = exact_type(accelerator.device)
            tally.add(
                {
                    key: torch.tensor(value, dtype=exact, device=accelerator.device)
                    for key, value in meta["tally"].items()
                }
            )
        job.console.skip(first_step * optim.batch_size)
        if first_step < optim.steps:
            job.console.say(f"{folder}: continues from step {first_step}")
    kept = [record for record in run_folder.read_records(folder) if record["step"] <= first_step]
    if accelerator.is_main_process:
        write_json_lines(folder / "metrics.jsonl", kept)
    last = kept[-1] if kept else {}
    if first_step == optim.steps:
        if trained is not None:
            model.load_state_dict(shown.state_dict())
        missing: dict[str, float] = {}  # for the run before could not read the images
        if job.held_out and last and "held_out_loss" not in last:
            missing |= _held_out_figures(job)
        if job.probes and last and not any(name.startswith("probe_") for name in last):
            missing |= _probe_figures(job)
        if missing:
            last |= missing
            kept[-1] = last
            if accelerator.is_main_process:
                write_json_lines(folder / "metrics.jsonl", kept)
        return last
    samples = data.TrainingSamples(
        job.source,
        job.rows,
        recipe.seed,
        wiring.view_of(recipe),
        job.objective.per_sample,
        labels=wiring.training_labels(recipe, job.source, job.rows),
        replace=recipe.data.on_error == "replace",
        window=recipe.data.shuffle_shards,
    )
    broken = run_folder.BrokenImages(folder, accelerator, job.console, job.source, recipe.data.max_broken, replaced)
    batches = data.training_batches(
        samples,
        first_step=first_step,
        steps=optim.steps,
        batch_size=optim.batch_size,
        micro_batch=runtime.micro_batch,
        processes=processes,
        process=process,
        workers=wiring.worker_count(recipe, processes),
        device=accelerator.device,
        found_broken=broken.found,
    )
    if runtime.log_inputs:
        batches = _log_inputs(batches, folder / "inputs" / f"process_{process}.jsonl", first_step, micro_batches)
    evaluations = [(runtime.eval_every, lambda: _held_out_figures(measured))]
    if job.probes is not None:
        evaluations.append((recipe.probe.every, lambda: _probe_figures(measured)))
    began = time.monotonic()

    def log(step: int, numbers: dict[str, float]) -> None:
        nonlocal last
        seconds = seconds_before + time.monotonic() - began
        if recipe.data.on_error == "replace":
            numbers["replaced"] = broken.share()
        last = {
            "step": step,
            **{name: value for name, value in numbers.items() if math.isfinite(value)},
            "images": step * optim.batch_size,
            "epoch": step * optim.batch_size / len(job.rows),
            "seconds": seconds,
        }
        if accelerator.is_main_process:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(last) + "\n")
        send(step, last)
        if lines:
            job.console.say(_line(title, last, optim.steps))
        if numbers.get("target_classes") == 1:
            job.console.say(
                "warning: every target is one and the same colour class; there is nothing to learn in these images"
            )

    def save(step: int, counts: Tally) -> None:
        totals = counts.total(lambda value: accelerator.reduce(value, "sum"))
        if recipe.data.on_error == "replace":
            broken.share()
        write = partial(
            checkpoint.write,
            folder / "checkpoints",
            step,
            model=shown,
            encoder=encoder,
            trained=trained,
            objective_note=job.objective.note,
            optimizer=optimizer,
            names=names,
            meta={
                "tally": {name: value.tolist() for name, value in totals.items()},
                "seconds": seconds_before + time.monotonic() - began,
                "replaced": broken.replaced,
                "kind": job.kind,
                "recipe": config.decisive(recipe),
                "inputs": job.inputs,
            },
            measured=last if last.get("step") == step else {},
            classes=job.classes if recipe.model.head == "linear" else None,
            description=wiring.description(recipe),
            retention=checkpoint.Retention(runtime.keep, runtime.keep_every, runtime.keep_best),
        )
        wiring.on_first(accelerator, write)
        if job.push is not None and step < optim.steps:  # the last one goes with the card of the finished run
            job.push.offer()

    tracker = tracking(accelerator, runtime.tracker if lines else "none", folder, config.flat(recipe))
    with closing(batches), _stop_signals() as received, tracker as send:  # loader processes end even after a defect

        def stop_wanted() -> bool:
            if processes == 1:
                return bool(received)
            # Processes must agree. They do so on the CPU: the host does not wait for the device.
            count = torch.tensor(len(received))
            torch.distributed.all_reduce(count, group=_cpu_group())
            return bool(count)

        complete = train(
            accelerator=accelerator,
            model=wrapped,
            objective=job.objective,
            optimizer=optimizer,
            average=average,
            batches=batches,
            learning_rate=lambda step: lr_at(
                step,
                base=base,
                steps=optim.steps,
                warmup_steps=optim.warmup_steps,
                schedule=optim.schedule,
                end=optim.end_learning_rate,
                milestones=optim.milestones,
            ),
            seed=recipe.seed,
            first_step=first_step,
            steps=optim.steps,
            batch_size=optim.batch_size,
            micro_batches=micro_batches,
            clip_norm=optim.clip_norm,
            log_every=runtime.log_every,
            save_every=runtime.save_every,
            tally=tally,
            log=log,
            evaluations=evaluations,
            save=save,
            stop_wanted=stop_wanted,
            track=lambda steps: job.console.track(steps, title, optim.batch_size),
        )
    if not complete:
        step = checkpoint.complete(folder / "checkpoints")[-1][0]
        raise Stopped(f"stopped at step {step} of {optim.steps} and saved in {folder}; the same command continues")
    if trained is not None:
        model.load_state_dict(shown.state_dict())  # from here on the average is the model
    return last


def _held_out_figures(job: Job) -> dict[str, float]:
    if job.held_out is None:
        return {}
    return {f"held_out_{name}": value for name, value in measure_rows(job, job.held_out).items()}


def _probe_figures(job: Job) -> dict[str, float]:
    assert job.probes is not None
    return job.probes.measure(job.model, job.accelerator)


def measure_rows(job: Job, held_out: HeldOut) -> dict[str, float]:
    """The objective's numbers on rows of a source, each counted once over all processes."""
    source, rows = held_out
    with closing(_held_out_batches(job, source, rows, wiring.labels_of(job.recipe, source))) as batches:
        return measure(job.accelerator, job.model, job.objective, batches)


def classify_source(job: Job, source: Source, labels: np.ndarray | None) -> tuple[dict[str, float], np.ndarray]:
    """The numbers of a whole source under some labels, and the most likely classes of each image, as `classify`.

    Args:
        labels: that the loss can be had on; None for no numbers.
    """
    assert isinstance(job.objective, Supervised)
    with closing(_held_out_batches(job, source, range(len(source)), labels)) as batches:
        return classify(job.accelerator, job.model, job.objective, batches, len(source), labels is not None)


def _held_out_batches(job: Job, source: Source, rows: wiring.Rows, labels: np.ndarray | None) -> data.Batches:
    recipe, accelerator = job.recipe, job.accelerator
    view = wiring.view_of(recipe)
    return data.held_out_batches(
        data.HeldOutSamples(source, rows, view, job.objective.per_held_out_sample, labels),
        micro_batch=recipe.runtime.micro_batch,
        processes=accelerator.num_processes,
        process=accelerator.process_index,
        workers=wiring.worker_count(recipe, accelerator.num_processes),
        device=accelerator.device,
    )


@lru_cache(maxsize=1)
def _cpu_group() -> Any:
    return torch.distributed.new_group(backend="gloo")


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects the signals that end a run instead of dying of them; Ctrl-C again, after a moment, ends at once.

    A moment, because launchers pass on to every process the signal that the whole group has had already.
    """
    received: list[int] = []
    first = math.inf

    def receive(number: int, _: Any) -> None:
        nonlocal first
        if number == signal.SIGINT and time.monotonic() > first + _SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        if not received and os.environ.get("RANK", "0") == "0" and os.getpid() == here:
            # Not by print, which a signal may have interrupted.
            os.write(2, b"\nstopping: the step is finished and saved first (Ctrl-C again ends at once)\n")
        first = min(first, time.monotonic())
        received.append(number)

    here = os.getpid()  # loader processes inherit this
    before = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log_inputs(batches: data.Batches, file: Path, first_step: int, micro_batches: int) -> data.Batches:
    """Writes what each step of this process read: rows, and checksums of pixels and plans."""
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text().splitlines(keepends=True) if file.is_file() and first_step else []
    file.write_text("".join(line for line in before if line.endswith("\n") and json.loads(line)["step"] <= first_step))
    with file.open("a") as lines:
        for count, batch in enumerate(batches):
            parts = {key: value.cpu().numpy() for key, value in batch.items() if key != "labels"}
            index = parts.pop("index").tolist()
            sums = {key: [zlib.crc32(one.tobytes()) for one in value] for key, value in parts.items()}
            lines.write(json.dumps({"step": first_step + 1 + count // micro_batches, "index": index, **sums}) + "\n")
            lines.flush()
            yield batch


def _line(title: str, record: Mapping[str, float], steps: int) -> str:
    """A record as a person would read it."""
    shown = [
        ("loss", "loss", "{:.4f}"),
        ("held_out_loss", "held-out loss", "{:.4f}"),
        ("held_out_target_entropy", "(class entropy", "{:.2f})"),
        ("held_out_accuracy_masked", "held-out accuracy: masked", "{:.3f}"),
        ("held_out_accuracy_random", "random", "{:.3f}"),
        ("held_out_accuracy_kept", "kept", "{:.3f}"),
        ("held_out_nearest_patch_accuracy_masked", "(nearest patch, masked:", "{:.3f})"),
        ("accuracy", "accuracy", "{:.3f}"),
        ("target_entropy", "target entropy", "{:.2f}"),
        ("learning_rate", "lr", "{:.2e}"),
        ("images_per_second", "images/s", "{:.0f}"),
    ]
    if "held_out_accuracy_masked" not in record:
        shown.insert(3, ("held_out_accuracy", "held-out accuracy", "{:.3f}"))
    for name in record:
        if name.startswith("probe_"):  # such as probe_5_shot_accuracy
            shown.append((name, name.removesuffix("_accuracy").replace("_", " "), "{:.3f}"))
    parts = [f"{label} {form.format(record[key])}" for key, label, form in shown if key in record]
    return f"{title} {int(record['step'])}/{steps}  " + "  ".join(parts)
