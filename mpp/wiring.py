"""From a recipe to objects: processes, data, encoder and objective, and what they would cost."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, broadcast_object_list
from timm.models import VisionTransformer
from torch import nn

from mpp import (
    checkpoint,
    config,
    contents,
    cost,
    data,
    decoding,
    draws,
    files,
    imagenet,
    official,
    references,
    sharing,
    sources,
    tasks,
    tracking,
)
from mpp.config import ModelConfig, RunConfig
from mpp.console import Console
from mpp.encoders import PIXEL_MEAN, PIXEL_STD, Encoder, build_encoder, is_hybrid, patch_of, set_pixel_statistics
from mpp.errors import UserError
from mpp.frozen import Probes
from mpp.model import Loaded, encoder_of, load_encoder
from mpp.objectives import MaskedPatchPrediction, Objective, Supervised
from mpp.patches import grid_size
from mpp.shards import Columns, ParquetRows
from mpp.targets import TARGETS

Rows = np.ndarray | range
HeldOut = tuple[sources.Source, Rows]  # a source and rows of it
Pixels = tuple[float, ...]  # of each channel


def start_processes(recipe: RunConfig, console: Console, output: Path | None = None) -> Accelerator:
    """The processes of a run, in the recipe's precision; a barrier.

    Args:
        output: of the run, where a tracker may write; None for no tracker.

    Raises UserError where the launcher is set up for anything but plain data parallelism, or the tracker is missing.
    """
    tracked = output is not None and recipe.runtime.tracker != "none"
    if tracked:
        tracking.require_tracker(recipe.runtime.tracker)
    precision = {"fp32": "no", "bf16": "bf16"}[recipe.runtime.precision]
    AcceleratorState._reset_state()  # runs of one process may differ in precision; the process group stays
    accelerator = Accelerator(
        mixed_precision=precision,
        cpu=not torch.accelerator.is_available(),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # the loop accumulates by itself
        log_with=recipe.runtime.tracker if tracked else None,
        project_config=ProjectConfiguration(logging_dir=str(output / "tensorboard")) if output else None,
    )
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UserError(f"the launcher is set up for {kind}; use plain data parallelism (`accelerate config`)")
    accelerator.wait_for_everyone()  # all have looked into the run's folder; the first may now write there
    told = os.environ.get("ACCELERATE_MIXED_PRECISION", precision)
    launcher = "" if told == precision else f", whatever the launcher says: {told}"
    count = accelerator.num_processes
    console.say_once(
        f"{count} process{'es' if count > 1 else ''} on {accelerator.device.type}, batch of {recipe.optim.batch_size} "
        f"images in all, precision {recipe.runtime.precision} (runtime.precision decides{launcher})"
    )
    return accelerator


T = TypeVar("T")


def on_first(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """What an action of the first process gives, for all of them; a UserError of it is raised in all of them."""
    told: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            told[0] = action()
        except UserError as error:
            told[1] = str(error)
    broadcast_object_list(told)
    if told[1] is not None:
        raise UserError(told[1])
    return told[0]


def micro_batches(recipe: RunConfig, processes: int) -> int:
    """Forward passes of one process in one step; raises UserError where they do not fill the batch."""
    batch, micro = recipe.optim.batch_size, recipe.runtime.micro_batch
    count, rest = divmod(batch, micro * processes)
    if rest or not count:
        share, left = divmod(batch, processes)
        by = 2 if recipe.objective.mixup or recipe.objective.cutmix else 1  # images that are mixed come in pairs
        fits = [size for size in range(by, min(micro, share) + 1, by) if share % size == 0] if not left else []
        remedy = f"use runtime.micro_batch={fits[-1]}" if fits else f"use a batch size that {processes} divides"
        raise UserError(
            f"optim.batch_size={batch} is not a multiple of runtime.micro_batch={micro} x {processes} "
            f"process{'es' if processes > 1 else ''}; {remedy}"
        )
    return count


def worker_count(recipe: RunConfig, processes: int) -> int:
    """Loader processes for each training process; `auto` leaves it a core of its own."""
    if isinstance(recipe.runtime.workers, int):
        return recipe.runtime.workers
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return min(max(data.cores() // here - 1, 0), 16)


def open_training(recipe: RunConfig, console: Console) -> sources.Source:
    """The training split, followed by the choice split where there is one; says how much there is of them.

    Raises UserError where the cache can't hold its shards, or the task has another number of images or classes.
    """
    source = open_split(recipe, recipe.data.train_split)
    _tell_size(recipe, recipe.data.train_split, source, console)
    require_task(recipe, recipe.data.train_split, source, "train_images")
    unpacked = getattr(source, "unpacked_bytes", np.zeros(1))
    if recipe.data.choice_split is not None:
        choice = open_split(recipe, recipe.data.choice_split)
        require_same_classes(source, choice, recipe, recipe.data.choice_split)
        _tell_size(recipe, recipe.data.choice_split, choice, console)
        require_task(recipe, recipe.data.choice_split, choice, "choice_images")
        unpacked = np.concatenate([unpacked, getattr(choice, "unpacked_bytes", np.zeros(1))])
        source = sources.Joined(source, choice)
    room, needed = recipe.runtime.cache_gb, 2 * recipe.data.shuffle_shards * unpacked.max() / 1e9
    if unpacked.sum() / 1e9 > room and needed > room:
        enough = float(f"{1.1 * needed:.2g}")  # rounded up
        raise UserError(
            f"runtime.cache_gb={room:g} can't hold two windows of data.shuffle_shards={recipe.data.shuffle_shards} "
            f"shards of up to {unpacked.max() / 1e9:.2g} GB; give {enough:g}, or shuffle fewer shards together"
        )
    if unpacked.sum() / 1e9 > room:
        console.say_once(
            f"{unpacked.sum() / 1e9:,.1f} GB are fetched or unpacked in every epoch, for runtime.cache_gb={room:g} "
            "does not hold them all"
        )
    if not decoding.decodes_jpeg_in_part():
        console.say_once("nvImageCodec is not installed; Pillow decodes JPEG, to the same pixels at half the speed")
    return source


def open_split(recipe: RunConfig, split: str) -> sources.Source:
    """One split of a recipe's source."""
    columns = Columns(recipe.data.image_column, recipe.data.label_column)
    return sources.open_source(recipe.data.source, split, columns, recipe.runtime.cache_gb)


def require_task(recipe: RunConfig, split: str, source: sources.Source, kind: str) -> None:
    """Raises UserError where a split has another number of images or classes than was published for its task.

    Args:
        kind: train_images, choice_images or test_images.
    """
    if recipe.data.task is None:
        return
    task = tasks.find(recipe.data.task)
    expected, found = getattr(task, kind), len(source)
    classes = len(source.classes or [])
    if found != expected or (classes != task.classes and kind == "train_images"):
        raise UserError(
            f"data.task={recipe.data.task}: split {split} of data.source={recipe.data.source} holds {found:,} images "
            f"in {classes} classes, and {expected:,} in {task.classes} were published (docs/tasks.md); complete it, or "
            "leave out data.task"
        )


def training_labels(recipe: RunConfig, source: sources.Source, rows: Rows) -> np.ndarray | None:
    """Labels of a source's rows as they are trained on; with `data.shuffle_labels`, `rows` have each other's."""
    labels = labels_of(recipe, source)
    if labels is None or not recipe.data.shuffle_labels:
        return labels
    order = np.argsort(draws.words(recipe.seed, "shuffled labels", 0, 0, len(rows)), kind="stable")
    shuffled, rows = labels.copy(), np.asarray(rows)
    shuffled[rows] = labels[rows[order]]
    return shuffled


def labels_of(recipe: RunConfig, source: sources.Source) -> np.ndarray | None:
    """Labels of a source, where the objective asks for them."""
    return source.labels if recipe.objective.name == "supervised" else None


def view_of(recipe: RunConfig) -> data.View:
    """How a recipe cuts its images."""
    chosen = recipe.data
    return data.View(
        chosen.image_size,
        chosen.crop,
        chosen.crop_area,
        chosen.flip,
        chosen.eval_crop,
        chosen.resize,
        chosen.rand_augment,
        chosen.erasing,
    )


def _tell_size(recipe: RunConfig, split: str, source: sources.Source, console: Console) -> None:
    classes = ""
    if recipe.objective.name == "supervised":  # else the labels need not be read
        classes = f", {len(source.classes)} classes" if source.classes else ", no classes"
    console.say_once(f"{recipe.data.source}, {split}: {len(source):,} images{classes}")


def open_test(recipe: RunConfig, source: sources.Source, console: Console) -> sources.Source:
    """The test split, with the classes of the training split; raises UserError where there is none."""
    if not sources.has_held_out_split(recipe.data.source, recipe.data.train_split, recipe.data.eval_split):
        raise UserError(
            f"data.source={recipe.data.source} has no split {recipe.data.eval_split} to test on; make the folders "
            f"{recipe.data.train_split}/CLASS and {recipe.data.eval_split}/CLASS in it"
        )
    test = open_split(recipe, recipe.data.eval_split)
    require_same_classes(source, test, recipe)
    _tell_size(recipe, recipe.data.eval_split, test, console)
    require_task(recipe, recipe.data.eval_split, test, "test_images")
    return test


@dataclasses.dataclass(frozen=True)
class FurtherTest:
    """A test set beside the test split.

    Attributes:
        source: None where the images are those of the test split.
        labels: int32 [image, most], padded with -1; images without any are left out.
    """

    source: sources.Source | None
    labels: np.ndarray


def open_further_tests(recipe: RunConfig, test: sources.Source, classes: list[str]) -> dict[str, FurtherTest]:
    """The test sets of a recipe's `tests` by name; raises UserError where one does not fit the classes."""
    found = {}
    for name, where in recipe.tests.items():
        if name in ("test", recipe.data.source) or name.endswith("_labels"):
            raise UserError(
                f"tests.{name}: this name is the test split's own, or ends as its labels do; choose another"
            )
        if name == "imagenet_real":
            if where is not None:
                raise UserError(f"tests.{name}={where}: its images are those of the test split; write null")
            labels = imagenet.real_labels(_file_names(test))
            numbers = imagenet.map_classes(imagenet.synsets(), classes)
            found[name] = FurtherTest(None, imagenet.renumbered(labels, numbers))
            continue
        if where is None:
            raise UserError(f"tests.{name}=null: only imagenet_real has no images of its own; name a source")
        columns = Columns(recipe.data.image_column, recipe.data.label_column)
        source = sources.open_source(where, recipe.data.eval_split, columns, recipe.runtime.cache_gb)
        if source.classes is None or source.labels is None:
            raise UserError(f"tests.{name}={where}: no classes; every image must lie in a class folder, CLASS/*.jpg")
        if name == "objectnet":
            mappings = Path(where.partition(":")[2]).expanduser().parent / "mappings"
            of_class = imagenet.objectnet_labels(mappings, source.classes)
            numbers = imagenet.map_classes(imagenet.synsets(), classes)
            labels = imagenet.renumbered(of_class[source.labels], numbers)
            found[name] = FurtherTest(sources.Bordered(source, imagenet.BORDER), labels)
        else:
            numbers = imagenet.map_classes(source.classes, classes)
            found[name] = FurtherTest(source, imagenet.renumbered(source.labels, numbers))
    return found


def require_disjoint(
    recipe: RunConfig,
    train: sources.Source,
    rows: Rows,
    test: sources.Source,
    further: Mapping[str, FurtherTest] = MappingProxyType({}),
) -> int:
    """Test images that are trained on, too; raises UserError where they are more than `data.max_overlap`.

    Those of further test sets are looked for, too, each on its own.
    """
    beside = {f"tests.{name}": one.source for name, one in further.items() if one.source is not None}
    found = [
        contents.require_disjoint(
            train,
            rows,
            tested,
            range(len(tested)),
            allowed=recipe.data.max_overlap,
            where=where,
            workers=worker_count(recipe, 1),
        )
        for where, tested in {f"data.source={recipe.data.source}": test, **beside}.items()
    ]
    return found[0]


def content_of(recipe: RunConfig, source: sources.Source, rows: Rows) -> str:
    """Digits that are equal for the same images in the same order."""
    return contents.digest(source, rows, workers=worker_count(recipe, 1))


def _file_names(source: sources.Source) -> list[str]:
    """The names that images had as files, of sources that keep them, else what messages call them."""
    kept = source.file_names() if isinstance(source, ParquetRows) else None
    return kept or [source.name(row) for row in range(len(source))]


def open_held_out(recipe: RunConfig, source: sources.Source, console: Console) -> HeldOut | None:
    """Held-out images for the figures of a pre-training, if the source has any."""
    if not sources.has_held_out_split(recipe.data.source, recipe.data.train_split, recipe.data.eval_split):
        console.say(
            f"{recipe.data.source} has no split {recipe.data.eval_split}: "
            "all images are trained on, and there are no held-out figures"
        )
        return None
    held_out = open_split(recipe, recipe.data.eval_split)
    if recipe.objective.name == "supervised":
        require_same_classes(source, held_out, recipe)
    _tell_size(recipe, recipe.data.eval_split, held_out, console)
    return held_out, range(len(held_out))


def inputs_of(recipe: RunConfig, source: sources.Source) -> dict[str, str]:
    """Fingerprints of what a run reads, by which a later call sees that it has changed."""
    init = "" if recipe.init == "scratch" else files.fingerprint(references.weights_file(recipe.init))
    classes = source.classes if recipe.objective.name == "supervised" else None
    found = {"data.source": source.fingerprint, "classes": files.digest(classes), "init": init}
    objective = _objective_of(recipe)
    return found if objective is None else found | {"init, objective": files.fingerprint(objective)}


def classes_of(source: sources.Source, recipe: RunConfig) -> list[str]:
    if source.classes is None:
        raise UserError(
            f"data.source={recipe.data.source}: no classes in split {recipe.data.train_split}. Training on labels "
            "needs every image in a class folder, SPLIT/CLASS/*.jpg, or a column of labels; mpp needs none"
        )
    if len(source.classes) < 2:
        raise UserError(f"data.source={recipe.data.source}: {len(source.classes)} class; training needs two or more")
    return source.classes


def require_same_classes(source: sources.Source, other: sources.Source, recipe: RunConfig, split: str = "") -> None:
    """Raises UserError where a label would mean something else in another split: `data.eval_split` if none is named."""
    if source.classes == other.classes:
        return
    splits = f"{recipe.data.train_split} and {split or recipe.data.eval_split}"
    numbered = source.classes and source.classes == [str(number) for number in range(len(source.classes))]
    if numbered and other.classes == (source.classes or [])[: len(other.classes or [])]:
        return  # labels without names, of which the last do not occur in the other split
    if set(source.classes or []) == set(other.classes or []):
        raise UserError(
            f"data.source={recipe.data.source}: {splits} have the same classes in another order, so that every label "
            "would mean something else; write one of them anew"
        )
    here, there = set(source.classes or []), set(other.classes or [])
    raise UserError(
        f"data.source={recipe.data.source}: the classes of {splits} differ (only in the first: "
        f"{sorted(here - there)[:5]}, only in the second: {sorted(there - here)[:5]})"
    )


def training_rows(recipe: RunConfig, source: sources.Source) -> Rows:
    """Rows to pre-train on: all, a fixed part, or so many of each class."""
    rows = data.subset_rows(len(source), recipe.data.subset)
    if recipe.data.per_class is None:
        return rows
    return data.labelled_rows(source, recipe.seed, recipe.data.per_class, 0.0, rows)[0]


def labelled_rows(recipe: RunConfig, source: sources.Source) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fine-tune on, and rows to choose the learning rate on: none where there is no choice."""
    choice = isinstance(recipe.optim.learning_rate, tuple) and len(recipe.optim.learning_rate) > 1
    if isinstance(source, sources.Joined):
        every, first = np.arange(len(source)), len(source.first)
        return (every[:first], every[first:]) if choice else (every, every[:0])
    if choice and not recipe.data.holdout:
        raise UserError("data.holdout=0 leaves nothing to choose the learning rate on; raise it, or give one rate")
    rows = data.subset_rows(len(source), recipe.data.subset)
    holdout = recipe.data.holdout if choice else 0.0
    return data.labelled_rows(source, recipe.seed, recipe.data.per_class, holdout, rows)


def require_supervised(recipe: RunConfig) -> None:
    if recipe.objective.name != "supervised":
        raise UserError(f"objective.name={recipe.objective.name}: fine-tuning needs supervised")


def require_one_rate(recipe: RunConfig) -> None:
    if not isinstance(recipe.optim.learning_rate, float):
        raise UserError("optim.learning_rate is a list, which is for fine-tuning to choose from; give one number")


def build(recipe: RunConfig, classes: list[str] | None) -> Encoder:
    """The encoder of a recipe; a linear head on the classes is a part of it."""
    count = len(classes) if classes and recipe.model.head == "linear" else 0
    return build_encoder(image_size=recipe.data.image_size, classes=count, **shape_of(recipe.model))


def shape_of(model: ModelConfig) -> dict[str, Any]:
    """What `build_encoder` takes of a model's section."""
    shape = dataclasses.asdict(model)
    del shape["head"], shape["position_resize"]  # of what stands on the encoder, and of weights that are put in
    return shape


def require_push(recipe: RunConfig, accelerator: Accelerator) -> None:
    """Raises UserError where checkpoints are to be sent to the Hub and can't be; makes the repository."""
    chosen = recipe.runtime
    if chosen.push_to_hub is not None:
        repository = sharing.parse(chosen.push_to_hub)
        on_first(accelerator, lambda: sharing.require_write(repository, private=chosen.push_private))


def description(recipe: RunConfig) -> dict[str, Any]:
    """What a checkpoint says of its model, by which `mpp/conversion.py` builds it again."""
    return {"model": dataclasses.asdict(recipe.model), "image_size": recipe.data.image_size}


def put_weights(recipe: RunConfig, encoder: Encoder, found: references.Weights) -> Loaded:
    """Puts weights that were found into an encoder; raises UserError as `load_encoder`."""
    tensors = found.tensors
    if found.path.suffix == ".npz":
        tensors = official.to_timm(official.read(found.path), encoder, recipe.init)
    return load_encoder(encoder, tensors, recipe.init, recipe.model.position_resize)


def initial_encoder(recipe: RunConfig, classes: list[str] | None, console: Console) -> tuple[Encoder, Pixels, Pixels]:
    """The encoder with its first weights, and the pixel mean and standard deviation it was made for."""
    torch.manual_seed(recipe.seed)
    encoder = build(recipe, classes)
    if recipe.init == "scratch":
        return encoder, PIXEL_MEAN, PIXEL_STD
    found = references.find_weights(recipe.init, console.say_once)
    before = found.config.get("label_names")
    if classes and before and classes != before and sorted(classes) == sorted(before):
        first = next(number for number, name in enumerate(classes) if name != before[number])
        raise UserError(
            f"init={recipe.init} was trained on the classes of data.source={recipe.data.source} in another order, so "
            f"that label {first} means {before[first]} there and {classes[first]} here; write the data anew in the "
            f"order of {found.path.parent / 'config.json'} (label_names)"
        )
    loaded = put_weights(recipe, encoder, found)
    pixels = found.config.get("pretrained_cfg") or {}
    mean, std = tuple(pixels.get("mean", PIXEL_MEAN)), tuple(pixels.get("std", PIXEL_STD))
    set_pixel_statistics(encoder, mean, std)
    notes = [f"encoder from {found.path}", f"pixel mean {mean[0]:g}, standard deviation {std[0]:g}"]
    if found.path.suffix != ".npz" and not pixels:
        notes.append("no config.json beside it, so these two are this package's own")
    if loaded.dropped:
        here = f"; the new head has {len(classes)} classes" if classes else ""
        notes.append(f"dropped {', '.join(loaded.dropped)}{here}")
    if found.path.with_name(references.OBJECTIVE).is_file() and _objective_of(recipe) is None:
        notes.append(f"its {references.OBJECTIVE} (prediction head, mask embedding) left out")
    if loaded.resized:
        old, new = loaded.resized
        way = recipe.model.position_resize
        if recipe.model.position == "sincos_2d":
            notes.append(f"fixed position embeddings computed for {new} x {new} in place of {old} x {old}")
        else:
            notes.append(f"position embeddings resized from {old} x {old} to {new} x {new} ({way})")
    console.say("; ".join(notes))
    return encoder, mean, std


def _objective_of(recipe: RunConfig) -> Path | None:
    """The file with the prediction head and the mask embedding that a masked patch prediction starts from, if any."""
    if recipe.init == "scratch" or recipe.objective.name != "mpp":
        return None
    file = references.weights_file(recipe.init).with_name(references.OBJECTIVE)
    wanted = {"target": recipe.objective.target}
    return file if file.is_file() and wanted.items() <= checkpoint.read_note(file).items() else None


def put_objective(recipe: RunConfig, model: nn.Module, console: Console) -> None:
    """Puts in the prediction head and the mask embedding of `init`, where it was trained on the same target."""
    file = _objective_of(recipe)
    if file is not None:
        checkpoint.load_objective(file.parent, model, encoder_of(model))
        console.say(f"prediction head and mask embedding from {file}")


def probes_of(recipe: RunConfig, mean: Pixels, std: Pixels, processes: int) -> Probes | None:
    """The probes of a pre-training, if it has any; raises UserError where they can't be had."""
    chosen = recipe.probe
    if not chosen.every:
        return None
    where = chosen.source or recipe.data.source
    own = dataclasses.replace(
        recipe.data,
        source=where,
        train_split=chosen.train_split or recipe.data.train_split,
        eval_split=chosen.test_split or recipe.data.eval_split,
    )
    other = dataclasses.replace(recipe, data=own)
    train, test = open_split(other, own.train_split), open_split(other, own.eval_split)
    if train.classes is None:
        raise UserError(
            f"probe.every={chosen.every}: {where} has no classes to probe on; name a source that has, in probe.source"
        )
    require_same_classes(train, test, other)
    rows = data.subset_rows(len(test), min(chosen.test_images, len(test)))
    return Probes(
        train=train,
        test=test,
        test_rows=np.asarray(rows),
        view=view_of(recipe),
        mean=mean,
        std=std,
        shots=chosen.shots,
        seeds=chosen.seeds,
        form=chosen.form,
        strength=chosen.strength,
        neighbors=chosen.neighbors,
        temperature=chosen.temperature,
        kind=chosen.features,
        block=chosen.block,
        micro_batch=recipe.runtime.micro_batch,
        workers=worker_count(recipe, processes),
    )


def frozen_encoder(recipe: RunConfig) -> tuple[Encoder, Pixels, Pixels]:
    """The encoder that a recipe starts from, without a head, and its pixel mean and standard deviation."""
    return initial_encoder(recipe, None, Console(quiet=True))


def build_objective(
    recipe: RunConfig, encoder: Encoder, classes: list[str] | None, mean: Pixels, std: Pixels
) -> Objective:
    """The objective of a recipe; raises UserError where it can't be had with this encoder."""
    chosen, model = recipe.objective, recipe.model
    if recipe.optim.layer_decay < 1 and not isinstance(encoder, VisionTransformer):
        raise UserError(
            f"optim.layer_decay={recipe.optim.layer_decay}: {model.name} has no layers of a Vision Transformer; use 1"
        )
    if chosen.name == "supervised":
        return Supervised(
            classes=len(classes or []),
            mean=mean,
            std=std,
            kind=chosen.loss,
            label_smoothing=chosen.label_smoothing,
            head=model.head,
            head_bias=model.head_bias,
            mixup=chosen.mixup,
            cutmix=chosen.cutmix,
            seed=recipe.seed,
            image_size=recipe.data.image_size,
        )
    if not isinstance(encoder, VisionTransformer):
        raise UserError(f"objective.name=mpp: {model.name} has no patches to predict; use a Vision Transformer")
    if model.drop_border and recipe.data.image_size % patch_of(encoder):
        raise UserError("objective.name=mpp needs whole patches: leave out model.drop_border, and choose another size")
    if not isinstance(encoder.fc_norm, nn.Identity):
        raise UserError(f"objective.name=mpp: {model.name} has its last norm after pooling; give model.pool")
    patch_size = patch_of(encoder)
    rows, columns = grid_size(recipe.data.image_size, patch_size)
    objective = MaskedPatchPrediction(
        seed=recipe.seed,
        patch_size=patch_size,
        patch_count=rows * columns,
        corruption=chosen.corruption,
        target=chosen.target,
        mean=mean,
        std=std,
    )
    objective.per_sample(0, 0)  # refuses a share that corrupts no patch
    blank = torch.zeros(1, recipe.data.image_size, recipe.data.image_size, 3, dtype=torch.uint8)
    TARGETS[chosen.target].of_patches(blank, patch_size)  # refuses a patch that can't give this target
    return objective


def warn(recipe: RunConfig, encoder: Encoder, console: Console) -> None:
    """Says what is allowed but may mislead."""
    if recipe.model.drop_border and isinstance(encoder, VisionTransformer):
        seen = encoder.patch_embed.grid_size[0] * patch_of(encoder)
        if seen < recipe.data.image_size:
            console.say_once(
                f"model.drop_border: {recipe.data.image_size - seen} of {recipe.data.image_size} pixels at the "
                f"right and at the bottom are not seen, for patches of {patch_of(encoder)} fill {seen}"
            )
    if recipe.objective.name == "mpp" and is_hybrid(encoder):
        console.say_once(
            f"warning: {recipe.model.name} is a hybrid. Its ResNet sees the pixels around a cell, so a masked cell's "
            "colour shows through its neighbours, and the task is easier than the paper's"
        )


def require_loss_for(recipe: RunConfig, *splits: sources.Source) -> None:
    """Raises UserError where the loss can't be had on the labels of a split."""
    several = [labels for split in splits if (labels := labels_of(recipe, split)) is not None and labels.ndim == 2]
    if several and recipe.objective.loss == "softmax":
        raise UserError(
            f"objective.loss=softmax: an image of data.source={recipe.data.source} can have several labels; use "
            "objective.loss=sigmoid"
        )


def planned_images(recipe: RunConfig) -> int:
    """Images that a run trains on, its choice of a learning rate included."""
    rates = recipe.optim.learning_rate
    runs = len(rates) + 1 if isinstance(rates, tuple) and len(rates) > 1 else 1
    return runs * recipe.optim.steps * recipe.optim.batch_size


def rehearse(recipe: RunConfig, classes: list[str] | None) -> tuple[nn.Module, Objective]:
    """Model and objective without storage; raises UserError where the recipe does not allow them."""
    view_of(recipe)
    with torch.device("meta"):
        encoder = build(recipe, classes)
        objective = build_objective(recipe, encoder, classes, PIXEL_MEAN, PIXEL_STD)
        return objective.build(encoder), objective


def require_one_label(recipe: RunConfig) -> None:
    """Raises UserError where an image of a recipe's source can have several labels, for what needs exactly one."""
    splits = [open_split(recipe, split) for split in (recipe.data.train_split, recipe.data.eval_split)]
    if any(split.labels is not None and split.labels.ndim == 2 for split in splits):
        raise UserError(
            f"data.source={recipe.data.source}: an image can have several labels, and classifiers on frozen features "
            "need one; fine-tune with eval/finetune.py instead"
        )


def rehearse_arm(pretraining: RunConfig | None, tunings: Sequence[RunConfig]) -> None:
    """Raises UserError for what would else stop an arm after hours of training; writes nothing.

    Args:
        pretraining: of the encoder that the fine-tunings start from; None where their `init` exists already.
        tunings: recipes that differ in their seed alone.
    """
    for recipe in (*tunings, *([pretraining] if pretraining else [])):
        if recipe.runtime.push_to_hub:
            raise UserError(
                f"runtime.push_to_hub={recipe.runtime.push_to_hub}: all runs of a comparison would go to one "
                "repository; leave it out, and send the one that you choose by mpp/hub.py push"
            )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    silent, first = Console(quiet=True), tunings[0]
    weights: references.Weights | None = None
    if pretraining is not None:
        require_one_rate(pretraining)
        micro_batches(pretraining, processes)
        source = open_training(pretraining, silent)
        training_rows(pretraining, source)
        classes = classes_of(source, pretraining) if pretraining.objective.name == "supervised" else None
        held_out = open_held_out(pretraining, source, silent)
        require_loss_for(pretraining, source, *([held_out[0]] if held_out else []))
        made = encoder_of(rehearse(pretraining, classes)[0])
        weights = references.Weights(made.state_dict(), Path(first.init), {})
    elif first.init != "scratch":
        weights = references.find_weights(first.init)
    require_supervised(first)
    micro_batches(first, processes)
    source = open_training(first, silent)
    test, classes = open_test(first, source, silent), classes_of(source, first)
    require_loss_for(first, source, test)
    further = open_further_tests(first, test, classes)
    encoder = encoder_of(rehearse(first, classes)[0])
    if weights is not None:
        put_weights(first, encoder, weights)
    drawn = [np.union1d(*labelled_rows(tuning, source)) for tuning in tunings]
    # Last, for it may read every image.
    require_disjoint(first, source, np.unique(np.concatenate(drawn)), test, further)


def count_cost(recipe: RunConfig, classes: list[str] | None) -> cost.Cost:
    """What a recipe's model costs; raises UserError as `rehearse`."""
    model, objective = rehearse(recipe, classes)
    side, rows = recipe.data.image_size, 2
    batch = {
        "images": torch.zeros(rows, side, side, 3, dtype=torch.uint8),
        "labels": torch.zeros(rows, dtype=torch.int64),
    }
    plans = [objective.per_sample(0, row) for row in range(rows)]
    batch |= {key: torch.from_numpy(np.stack([plan[key] for plan in plans])) for key in plans[0]}
    return cost.of_model(model, objective, {key: value.to("meta") for key, value in batch.items()})


def any_classes(recipe: RunConfig) -> list[str] | None:
    """A thousand classes, which stand for those of data that is not read."""
    return ["a class"] * 1000 if recipe.objective.name == "supervised" else None


def exaflops(found: cost.Cost, images: int) -> float:
    """Of training on so many images: three forward passes each, as the ViT paper counts (Table 6)."""
    return 3 * found.forward_flops * images / 1e18


def dry_run(recipe: RunConfig) -> str:
    """The resolved recipe and what it would cost, without reading data or training.

    Raises UserError where the recipe can't be run.
    """
    classes = any_classes(recipe)
    found = count_cost(recipe, classes)
    images = planned_images(recipe)
    optim, micro = recipe.optim, recipe.runtime.micro_batch
    states = 1 if optim.name == "sgd" else 2
    copies = 2 + states + (optim.average > 0)
    memory = found.parameters * 4 * copies + found.activation_bytes * micro
    hours = 3 * found.forward_flops * images / (cost.A100_FLOPS * cost.UTILIZATION) / 3600
    note = " (with a head of 1000 classes)" if classes else ""
    return "\n".join(
        [
            config.to_yaml(recipe),
            f"parameters         {found.parameters:,} in all, {found.encoder_parameters:,} of them the encoder{note}",
            f"forward            {found.forward_flops / 1e9:.2f} GFLOPs an image (a multiply-add counts as 2)",
            f"steps              {optim.steps:,} of {optim.batch_size:,} images",
            f"images             {images:,}"
            + (", the choice of a learning rate included" if images > optim.steps * optim.batch_size else ""),
            f"training           {exaflops(found, images):.4g} exaFLOPs (3 x forward)",
            f"memory             {memory / 2**30:.1f} GiB a process at runtime.micro_batch={micro} (weights, "
            "gradients, optimiser and activations, all in float32)",
            f"device-hours       {hours:,.1f} on an A100 ({cost.A100_FLOPS / 1e12:.0f} TFLOP/s in bf16) at an assumed "
            f"{cost.UTILIZATION:.0%} of its peak",
        ]
    )
