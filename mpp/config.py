"""Recipes: frozen dataclasses, strict YAML, overrides, and saving what was resolved.

Defaults below are the values of the ViT paper's pre-training where it gives one. A shipped recipe
states every key that matters to it all the same; whoever leaves one out is told which value was taken.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from mpp import credentials
from mpp.errors import UserError
from mpp.files import slug, write_text

# Keys and sections that do not change the results of a run: what is done about an image that can't be read
# does not change what was trained before it was met, and probes only look on.
MAY_DIFFER = ("runtime", "finetune", "probe", "data.on_error", "data.max_broken", "data.max_overlap")


def plain(value: Any) -> Any:
    """A default that no one needs to be told of, for it switches something off or is the plain case."""
    return field(default=value, metadata={"plain": True})


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how they are cut.

    Attributes:
        source: demo, folder:PATH, hub:NAME[@REVISION], parquet:GLOB, wds:GLOB or synthetic:N.
        train_split: the split that is trained on.
        eval_split: held-out images; in fine-tuning the test split, read once at the end.
        choice_split: a split of its own on which fine-tuning chooses its learning rate, in place of `holdout`; what
            is trained at the end is trained on both.
        task: the name of a row of `mpp/tasks.py`, whose published numbers of images and classes must then be met.
        image_column: where the source has columns, the one with the images; null for the only one that can be.
        label_column: the same for the labels.
        image_size: side of the square that the model sees, in pixels.
        crop: how training cuts an image. inception: a random part of its area, stretched to the square;
            square: resized to a square of `resize`, and a random place in it; short_side: the same with the
            short side resized.
        crop_area: smallest and largest share of the image's area that an inception crop takes.
        flip: whether training crops are mirrored at random.
        eval_crop: how evaluation cuts it. whole: nothing is cut, the image is stretched to the square;
            center: the short side is resized to `resize`, and the middle is taken.
        resize: side in pixels before the cut, for every crop but inception and whole.
        shuffle_shards: files of a source in shards whose images are shuffled among each other.
        on_error: at an image that can't be read. stop: with its name; replace: take another that the seed
            draws, and list it in `broken.jsonl`.
        max_broken: different broken images after which a run stops all the same.
        rand_augment: timm's string of a RandAugment after the crop, such as rand-m9-n2-mstd0.5-inc1.
        erasing: share of training crops of which a random rectangle is filled with noise.
        subset: a fixed random part of the training split: a share (0.1), or a number of images (9000000). A
            smaller part lies within every larger one.
        per_class: labelled training images of each class to use, chosen by the seed; null for all.
        holdout: share of each training class on which fine-tuning chooses its learning rate; where images can
            have several labels, of all training images.
        max_overlap: test images that may stand among the training images, too; for data sets in which so many
            are known.
        shuffle_labels: give the training images each other's labels: a control that must score at chance.
    """

    source: str
    train_split: str = "train"
    eval_split: str = "validation"
    choice_split: str | None = plain(None)
    task: str | None = plain(None)
    image_column: str | None = plain(None)
    label_column: str | None = plain(None)
    image_size: int = 224
    crop: Literal["inception", "square", "short_side"] = "inception"
    crop_area: tuple[float, float] = (0.05, 1.0)
    flip: bool = True
    eval_crop: Literal["whole", "center"] = "whole"
    resize: int | None = plain(None)
    shuffle_shards: int = plain(8)
    on_error: Literal["stop", "replace"] = plain("stop")
    max_broken: int = plain(100)
    rand_augment: str | None = plain(None)
    erasing: float = plain(0.0)
    subset: int | float | None = plain(None)
    per_class: int | None = plain(None)
    holdout: float = 0.01
    max_overlap: int = plain(0)
    shuffle_labels: bool = plain(False)


@dataclass(frozen=True)
class ModelConfig:
    """A Vision Transformer, a hybrid or a BiT ResNet; null keeps what the name says.

    Attributes:
        name: a timm name, or one of the paper's models that timm has no name for (docs/models.md).
        patch_size: side in pixels.
        embed_dim: width of the tokens.
        depth: number of blocks.
        num_heads: attention heads of a block.
        mlp_dim: hidden width of a block's MLP.
        layers: units in each stage of a hybrid's or a ResNet's convolutional part.
        width_factor: of the channels of that part.
        pool: what the head reads. token: the class token; gap: the mean of all tokens, without a class token;
            patches: the mean of the patch tokens, with a class token among them.
        head: linear, or the paper's pre-training head with one hidden tanh layer.
        head_bias: with which the head's bias starts.
        position: learned_1d, learned_2d, sincos_2d (fixed), relative or none.
        position_at: where positions enter: after the stem, or in every layer, own or shared.
        position_resize: how position embeddings of a checkpoint are brought to another grid. bilinear_corners:
            as the paper's code, corner on corner; bilinear, bicubic: as timm.
        gelu: erf (exact, as timm) or tanh (the approximation of the paper's code).
        dropout: rate at every place where the paper has it (after the position embeddings, the attention
            output and both layers of the MLP).
        drop_path: stochastic depth of the last block; the others rise to it linearly.
        drop_border: whether an image size that is no multiple of the patch may lose its right and lower border.
    """

    name: str
    patch_size: int | None = plain(None)
    embed_dim: int | None = plain(None)
    depth: int | None = plain(None)
    num_heads: int | None = plain(None)
    mlp_dim: int | None = plain(None)
    layers: tuple[int, ...] | None = plain(None)
    width_factor: float | None = plain(None)
    pool: Literal["token", "gap", "patches"] | None = plain(None)
    head: Literal["linear", "mlp"] = "linear"
    head_bias: float = plain(0.0)
    position: Literal["learned_1d", "learned_2d", "sincos_2d", "relative", "none"] = plain("learned_1d")
    position_at: Literal["stem", "every_layer", "every_layer_shared"] = plain("stem")
    position_resize: Literal["bilinear_corners", "bilinear", "bicubic"] = plain("bilinear_corners")
    gelu: Literal["erf", "tanh"] = plain("erf")
    dropout: float = 0.0
    drop_path: float = plain(0.0)
    drop_border: bool = plain(False)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned.

    Attributes:
        name: mpp or supervised.
        corruption: share of patches that are corrupted in every image (mpp).
        target: what a corrupted patch is predicted as (mpp).
        loss: softmax, or sigmoid for each class by itself (supervised).
        label_smoothing: softmax: share of the target that all classes have in common; sigmoid: target of the
            classes that an image does not show, and what is missing to 1 in the others (supervised).
        mixup: alpha of the Beta distribution by which two images are blended; 0 for none (supervised).
        cutmix: the same for pasting a rectangle of one into the other; with both, either, at even odds.
    """

    name: Literal["mpp", "supervised"] = "mpp"
    corruption: float = 0.5
    target: Literal["mean_color", "colors_4x4", "pixels"] = "mean_color"
    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = 0.0
    mixup: float = plain(0.0)
    cutmix: float = plain(0.0)


@dataclass(frozen=True)
class OptimConfig:
    """How it is learned; every count is in optimiser steps.

    Attributes:
        steps: length of the run.
        batch_size: images of one step, over all processes and accumulation.
        name: adamw (decay times learning rate, as in the paper's code), adam or sgd (decay added to the gradient).
        learning_rate: peak value; a list makes fine-tuning choose among its values.
        schedule: what follows the linear warm-up: cosine to 0, linear to `end_learning_rate`, constant, or
            staircase, which divides by 10 at each of `milestones`.
        end_learning_rate: where the linear schedule ends.
        milestones: of the staircase, in steps.
        warmup_steps: counted inside `steps`.
        weight_decay: see `name`.
        decay_on: kernels (not biases, norms, embeddings and tokens), or all parameters.
        layer_decay: factor on the learning rate from each block to the one below it; 1 for none.
        beta1, beta2: of adamw and adam.
        momentum: of sgd.
        clip_norm: global norm to which gradients are cut; 0 for no clipping.
        average: share that the running (Polyak) average of the weights keeps in a step; 0 for none. The average
            starts at the first weights; it is what is measured and exported.
    """

    steps: int
    batch_size: int
    learning_rate: float | tuple[float, ...]
    name: Literal["adamw", "adam", "sgd"] = "adamw"
    schedule: Literal["cosine", "linear", "constant", "staircase"] = "cosine"
    end_learning_rate: float = 1e-5
    milestones: tuple[int, ...] = plain(())
    warmup_steps: int = 10_000
    weight_decay: float = 0.1
    decay_on: Literal["kernels", "all"] = plain("kernels")
    layer_decay: float = plain(1.0)
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    clip_norm: float = 1.0
    average: float = plain(0.0)


@dataclass(frozen=True)
class RuntimeConfig:
    """How the machine is used; none of it changes results beyond rounding.

    Attributes:
        micro_batch: images of one forward pass on one process; the rest is accumulation.
        workers: loader processes for each training process, or auto.
        cache_gb: room on disk for images that have to be fetched or unpacked before they can be read by
            row (Parquet files, files that lie elsewhere), in GB; in `mpp` of XDG_CACHE_HOME, or of ~/.cache.
        precision: fp32 or bf16; decides, whatever the launcher says.
        log_every, eval_every, save_every: in steps; 0 for only at the end.
        keep: newest checkpoints that stay on disk.
        keep_every: checkpoints of steps that are multiples of it stay, too; 0 for none.
        keep_best: a number that is measured during training, such as held_out_loss or probe_5_shot_accuracy, by which
            the best checkpoint stays, too.
        log_inputs: write what every step read to `inputs/process_R.jsonl`.
        push_to_hub: ORG/NAME on the Hugging Face Hub, to which every checkpoint is sent while the run goes on.
        push_private: whether that repository is private where it is made.
        license: of the weights, as the Hub names it (apache-2.0), for their model card.
        tracker: where metrics are sent beside `metrics.jsonl`, by accelerate; the package of that name must be
            installed.
    """

    micro_batch: int = 128
    workers: int | Literal["auto"] = "auto"
    cache_gb: float = 20.0
    precision: Literal["fp32", "bf16"] = "fp32"
    log_every: int = 50
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2
    keep_every: int = 0
    keep_best: str | None = None
    log_inputs: bool = False
    push_to_hub: str | None = None
    push_private: bool = False
    license: str | None = None
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"


@dataclass(frozen=True)
class ProbeConfig:
    """Classifiers on frozen features, during pre-training and in `eval/few_shot.py` and `eval/linear_probe.py`.

    Attributes:
        every: steps of a pre-training from one probe to the next, a multiple of `runtime.log_every`; 0 for none.
        source: the labelled images of a pre-training's probes; null for those of `data`.
        train_split, test_split: of that source; null for the splits of `data`.
        test_images: at most so many test images in a pre-training's probes, a fixed random part.
        shots: labelled images of each class.
        seeds: each draws other labelled images; what is told is the mean.
        features: token (the class token), patches (the mean of the patch tokens), or null: what a classifier's
            last layer reads, and the patches after masked patch prediction.
        block: read the tokens after so many blocks, normalised as at the end; null for all.
        form: whitened (Google's code: standardised features and a constant), or plain (the paper's sentence).
        strength: of the regularisation of few-shot regression.
        neighbors: of the k-nearest-neighbour classifier; each is told.
        temperature: of its weights, exp(cosine / temperature).
        strengths: inverse regularisation (scikit-learn's C) that the linear classifier chooses from.
    """

    every: int = 0
    source: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    test_images: int = 2000
    shots: tuple[int, ...] = (1, 5, 10, 25)
    seeds: tuple[int, ...] = (0, 1, 2)
    features: Literal["token", "patches"] | None = None
    block: int | None = None
    form: Literal["whitened", "plain"] = "whitened"
    strength: float = 1024.0
    neighbors: tuple[int, ...] = (20,)
    temperature: float = 0.07
    strengths: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclass(frozen=True)
class RunConfig:
    """One run: everything in a recipe.

    Attributes:
        init: where the weights come from, a REF or scratch.
        finetune: the recipe with which `eval/finetune.py` fine-tunes this run.
        tests: further test sets of a fine-tuning, name -> source. `imagenet_real` takes no source (null) but other
            labels for ImageNet's test split; `objectnet` has a mapping of its own; in any other the classes must
            be the training split's, by name or by ImageNet's numbers.
    """

    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    seed: int = 0
    init: str = "scratch"
    finetune: str | None = None
    tests: dict[str, str | None] = field(default_factory=dict, metadata={"plain": True})
    probe: ProbeConfig = field(default_factory=ProbeConfig)


# Folders of a comparison, and what stands beside its arms.
RESERVED = {"finetune", "frozen", "figures", "chance", "raw_pixels", "random_encoder", "shuffled_labels"}
BASELINES = Literal["chance", "raw_pixels", "random_encoder", "shuffled_labels"]


@dataclass(frozen=True)
class CompareConfig:
    """A comparison of pre-training methods under one fine-tuning.

    Attributes:
        tasks: name of a data set -> the one fine-tuning recipe of all arms on it, and overrides. Where the name is
            a row of `mpp/tasks.py`, its splits and preprocessing are taken from there.
        seeds: of the fine-tunings; arms are paired on them.
        arms: name -> pre-training recipe, a REF, or scratch; or a list of that and overrides: of the pre-training as
            pretraining.KEY=VALUE, or of the fine-tuning, with which an arm is no longer comparable and is told apart.
        choice_seeds: of these, the ones with which each arm's learning rate is chosen, for all seeds.
        baselines: measured beside the arms, on the same labelled images.
        probes: classifiers on each arm's frozen encoder, as the fine-tuning recipe's `probe` says.
        published: arm -> the accuracy that was published for it on the first data set.
        published_recipes: arm -> the recipe of the published pre-training; null where it is the arm's own.
        published_finetune: the recipe of the published fine-tuning; what differs from it is listed.
    """

    tasks: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    arms: dict[str, str | tuple[str, ...]]
    choice_seeds: tuple[int, ...]
    baselines: tuple[BASELINES, ...] = ()
    probes: tuple[Literal["linear", "few_shot"], ...] = ()
    published: dict[str, float] = field(default_factory=dict)
    published_recipes: dict[str, str | None] = field(default_factory=dict)
    published_finetune: str | None = None


@dataclass(frozen=True)
class StudyConfig:
    """Pre-training with several models and amounts of data, each measured alike (ViT paper, Figures 3 to 5).

    Attributes:
        models: name in the figures -> a pre-training recipe, and overrides of it.
        finetune: the fine-tuning recipe: its labelled images, and how `finetune` measures; null for the one that
            each model's own recipe names.
        subsets: values of `data.subset` in pre-training; null for all images.
        measures: few_shot: a linear classifier in closed form on frozen features; finetune: test accuracy after
            fine-tuning.
        shots: labelled images of each class for few_shot.
        seeds: of the few labelled images, and of the fine-tuning.
    """

    models: dict[str, tuple[str, ...]]
    finetune: str | None = None
    subsets: tuple[int | float | None, ...] = (None,)
    measures: tuple[Literal["few_shot", "finetune"], ...] = ("few_shot",)
    shots: int = 5
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class _Leaf:
    """A value and where it was written, for messages."""

    value: Any
    place: str


class _Loader(yaml.SafeLoader):
    """PyYAML, but `1e-4` is a number as in every other language, not text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)

T = TypeVar("T")


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files("recipes").iterdir()
        if entry.name.endswith(".yaml")
    )


def load_run(recipe: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
    """A checked run from a recipe's name or path and `key=value` overrides.

    Returns:
        The run, and the keys that were left out though they change its results, as `key=value` with the
        default that they took.

    Raises:
        UserError: naming file and line or the override, the key, and what would be right.
    """
    config, defaults = _load(RunConfig, recipe, overrides)
    check_run(config)
    return config, [f"{key}={value}" for key, value in defaults.items() if not (_may_differ(key) or _idle(key, config))]


def _idle(key: str, config: RunConfig) -> bool:
    """Whether a key does nothing in a run, for what it belongs to is not used."""
    supervised, optim = config.objective.name == "supervised", config.optim
    return {
        "objective.corruption": supervised,
        "objective.target": supervised,
        "objective.loss": not supervised,
        "objective.label_smoothing": not supervised,
        "model.head": not supervised,
        "data.crop_area": config.data.crop != "inception",
        "data.holdout": not isinstance(optim.learning_rate, tuple) or config.data.choice_split is not None,
        "optim.beta1": optim.name == "sgd",
        "optim.beta2": optim.name == "sgd",
        "optim.momentum": optim.name != "sgd",
        "optim.end_learning_rate": optim.schedule != "linear",
    }.get(key, False)


def model_from(values: Any, where: str) -> ModelConfig:
    """The `model` section from plain values of a file, which may come from anywhere; raises UserError as `load_run`."""
    tree = _parse(json.dumps(values), where)
    if not isinstance(tree, dict):
        raise UserError(f"{where}: model is no section")
    return _build(ModelConfig, tree, "model.", where, [f"model.{key}" for key in _paths(ModelConfig)], {})


def _require_different(recipe: str, seeds: Sequence[int], key: str = "seeds") -> None:
    if len(set(seeds)) < len(seeds):
        raise UserError(f"{recipe}: {key}={list(seeds)} names one twice, which would count it twice")


def load_compare(recipe: str, overrides: Sequence[str] = ()) -> CompareConfig:
    """A comparison from a recipe's name or path; raises as `load_run`."""
    config, _ = _load(CompareConfig, recipe, overrides)
    if not config.arms or not config.seeds or not config.tasks:
        raise UserError(f"{recipe}: a comparison needs at least one arm, one seed and one task")
    _require_different(recipe, config.seeds)
    _require_different(recipe, config.choice_seeds, "choice_seeds")
    if not config.choice_seeds or not set(config.choice_seeds) <= set(config.seeds):
        raise UserError(
            f"{recipe}: choice_seeds={list(config.choice_seeds)} must be some of seeds={list(config.seeds)}"
        )
    for kind, chosen in (("tasks", config.tasks), ("arms", config.arms)):
        for name, values in chosen.items():
            if not values:
                raise UserError(f"{recipe}: {kind}.{name} names nothing")
    for name in [*config.published, *config.published_recipes]:
        if name not in config.arms:
            raise UserError(f"{recipe}: published figures for {name}, which is no arm; arms: {', '.join(config.arms)}")
    for name, figure in config.published.items():
        if not 0 < figure < 1:
            raise UserError(f"{recipe}: published.{name}={figure} must be a share in (0, 1), such as 0.799")
    if (config.published_recipes or config.published_finetune) and not config.published:
        raise UserError(f"{recipe}: published_recipes and published_finetune go with published, which is missing")
    for published in [config.published_finetune, *config.published_recipes.values()]:
        if published is not None:
            load_run(published)
    for kind, names in (("arms", config.arms), ("tasks", config.tasks)):
        slugs = [slug(name) for name in names]
        if len(set(slugs)) < len(slugs):
            raise UserError(f"{recipe}: two of its {kind} would have the same folder; name one otherwise")
    taken = {slug(name) for name in config.arms} & RESERVED
    if taken:
        raise UserError(f"{recipe}: an arm can't be named {sorted(taken)[0]}, for something else is called so")
    return config


def load_study(recipe: str, overrides: Sequence[str] = ()) -> StudyConfig:
    """A study from a recipe's name or path; raises as `load_run`."""
    config, _ = _load(StudyConfig, recipe, overrides)
    if not (config.models and config.subsets and config.measures and config.seeds):
        raise UserError(f"{recipe}: a study needs at least one of models, subsets, measures and seeds")
    if config.shots < 1:
        raise UserError(f"{recipe}: shots={config.shots} must be positive")
    _require_different(recipe, config.seeds)
    for name, values in config.models.items():
        if not values:
            raise UserError(f"{recipe}: models.{name} names no recipe, such as [supervised_demo]")
    return config


def _keep_best(runtime: RuntimeConfig, probe: ProbeConfig) -> list[tuple[Any, str]]:
    """What must hold for `runtime.keep_best`: that its number is known of every checkpoint."""
    if runtime.keep_best is None:
        return []
    probed = runtime.keep_best.startswith("probe_")
    key, every = ("probe.every", probe.every) if probed else ("runtime.eval_every", runtime.eval_every)
    return [
        (
            probed or runtime.keep_best.startswith("held_out_"),
            f"runtime.keep_best={runtime.keep_best} must be a held-out number, held_out_... or probe_...",
        ),
        (
            every > 0 and runtime.save_every > 0 and runtime.save_every % every == 0,
            f"runtime.keep_best={runtime.keep_best} needs every checkpoint measured: runtime.save_every="
            f"{runtime.save_every} must be a multiple of {key}={every}",
        ),
    ]


def check_run(config: RunConfig) -> None:
    """Raises UserError where values contradict each other or lie outside their range."""
    for key, value in flat(config).items():
        if isinstance(value, str) and credentials.holds_one(value):
            raise UserError(
                f"{key} holds what looks like an access token or a password, and a recipe is written down; take it "
                "out, and set HF_TOKEN in the environment or use `hf auth login`"
            )
    data, optim, objective, runtime, probe = config.data, config.optim, config.objective, config.runtime, config.probe
    rates = optim.learning_rate if isinstance(optim.learning_rate, tuple) else (optim.learning_rate,)
    smallest, largest = data.crop_area
    for holds, message in [
        (0 <= config.seed < 2**32, f"seed={config.seed} must lie in 0 .. 2**32 - 1"),
        (
            data.train_split != data.eval_split,
            f"data.eval_split={data.eval_split} is the training split; held-out images must be others",
        ),
        (data.image_size > 0, f"data.image_size={data.image_size} must be positive"),
        (0 < smallest <= largest <= 1, f"data.crop_area={list(data.crop_area)} must rise within (0, 1]"),
        (
            (data.resize is None) == (data.crop == "inception" and data.eval_crop == "whole"),
            f"data.resize={data.resize} goes with data.crop=square or short_side or data.eval_crop=center, and only "
            f"with them (here: {data.crop}, {data.eval_crop})",
        ),
        (
            data.resize is None or data.resize >= data.image_size,
            f"data.resize={data.resize} must not be smaller than data.image_size={data.image_size}, cut out of it",
        ),
        (data.shuffle_shards > 0, f"data.shuffle_shards={data.shuffle_shards} must be positive"),
        (data.max_broken >= 0, f"data.max_broken={data.max_broken} must not be negative"),
        (0 <= data.erasing <= 1, f"data.erasing={data.erasing} must lie in [0, 1]"),
        (
            data.subset is None or (data.subset > 1 if isinstance(data.subset, int) else 0 < data.subset <= 1),
            f"data.subset={data.subset} must be a share in (0, 1], written with a point, or a number of images above 1",
        ),
        (data.per_class is None or data.per_class > 0, f"data.per_class={data.per_class} must be positive"),
        (0 <= data.holdout < 1, f"data.holdout={data.holdout} must lie in [0, 1)"),
        (data.max_overlap >= 0, f"data.max_overlap={data.max_overlap} must not be negative"),
        (
            data.choice_split not in (data.train_split, data.eval_split),
            f"data.choice_split={data.choice_split} must be neither the training split nor the test split",
        ),
        (
            data.choice_split is None or data.per_class is None,
            f"data.per_class={data.per_class} draws from the training split alone; it does not go with "
            f"data.choice_split={data.choice_split}",
        ),
        (
            data.choice_split is None or data.subset is None,
            f"data.subset={data.subset} is of the training split alone; it does not go with "
            f"data.choice_split={data.choice_split}",
        ),
        (
            not (data.shuffle_labels and objective.name == "mpp"),
            "data.shuffle_labels=true: masked patch prediction reads no labels; leave it out",
        ),
        *[
            (value is None or value > 0, f"model.{name}={value} must be positive, or null")
            for name, value in dataclasses.asdict(config.model).items()
            if name in ("patch_size", "embed_dim", "depth", "num_heads", "mlp_dim", "width_factor")
        ],
        (
            config.model.layers is None or (config.model.layers and min(config.model.layers) > 0),
            f"model.layers={list(config.model.layers or ())} must be positive numbers, one a stage",
        ),
        *[
            (0 <= value < 1, f"model.{name}={value} must lie in [0, 1)")
            for name, value in [("dropout", config.model.dropout), ("drop_path", config.model.drop_path)]
        ],
        (
            0 < objective.corruption <= 1,
            f"objective.corruption={objective.corruption} must lie in (0, 1]: it is the share of corrupted patches",
        ),
        (
            0 <= objective.label_smoothing < 1,
            f"objective.label_smoothing={objective.label_smoothing} must lie in [0, 1)",
        ),
        (
            objective.loss == "softmax" or objective.label_smoothing < 0.5,
            f"objective.label_smoothing={objective.label_smoothing} must be smaller than 0.5 for the sigmoid loss, "
            "whose targets it brings nearer to each other",
        ),
        *[
            (
                objective.name == "supervised" or value == usual,
                f"{key}={value} belongs to objective.name=supervised; masked patch prediction has none, leave it out",
            )
            for key, value, usual in [
                ("objective.loss", objective.loss, "softmax"),
                ("objective.label_smoothing", objective.label_smoothing, 0.0),
                ("model.head", config.model.head, "linear"),
                ("model.head_bias", config.model.head_bias, 0.0),
            ]
        ],
        *[
            (value >= 0, f"objective.{name}={value} must not be negative")
            for name, value in [("mixup", objective.mixup), ("cutmix", objective.cutmix)]
        ],
        (
            objective.name == "supervised" or not (objective.mixup or objective.cutmix),
            f"objective.mixup={objective.mixup} and objective.cutmix={objective.cutmix} blend images and their labels; "
            "masked patch prediction has no labels: use 0",
        ),
        (
            not (objective.mixup or objective.cutmix) or runtime.micro_batch % 2 == 0,
            f"runtime.micro_batch={runtime.micro_batch} must be even for objective.mixup and cutmix, which take images "
            "in pairs",
        ),
        (optim.steps > 0, f"optim.steps={optim.steps} must be positive"),
        (optim.batch_size > 0, f"optim.batch_size={optim.batch_size} must be positive"),
        (all(rate > 0 for rate in rates) and rates, f"optim.learning_rate={optim.learning_rate} must be positive"),
        (len(set(rates)) == len(rates), f"optim.learning_rate={list(rates)} names one twice"),
        *[
            (
                re.fullmatch(r"[A-Za-z0-9_-]+", name) and name not in ("test", "file", "allow_pickle"),
                f"tests.{name}: choose another name, of letters, digits, _ and -",
            )
            for name in config.tests
        ],
        (
            0 <= optim.warmup_steps < optim.steps,
            f"optim.warmup_steps={optim.warmup_steps} must be smaller than optim.steps={optim.steps}",
        ),
        (
            (optim.schedule == "staircase") == bool(optim.milestones),
            f"optim.milestones={list(optim.milestones)} go with optim.schedule=staircase, and only with it "
            f"(here: {optim.schedule})",
        ),
        (
            list(optim.milestones) == sorted(set(optim.milestones))
            and all(0 < step < optim.steps for step in optim.milestones),
            f"optim.milestones={list(optim.milestones)} must rise within 1 .. optim.steps - 1",
        ),
        (
            optim.schedule != "linear" or not rates or optim.end_learning_rate <= min(rates),
            f"optim.end_learning_rate={optim.end_learning_rate} is above optim.learning_rate={optim.learning_rate}, "
            "from which the linear schedule comes down to it",
        ),
        (optim.end_learning_rate >= 0, f"optim.end_learning_rate={optim.end_learning_rate} must not be negative"),
        *[
            (0 <= value < 1, f"optim.{name}={value} must lie in [0, 1)")
            for name, value in [("beta1", optim.beta1), ("beta2", optim.beta2), ("momentum", optim.momentum)]
        ],
        (optim.weight_decay >= 0, f"optim.weight_decay={optim.weight_decay} must not be negative"),
        (0 < optim.layer_decay <= 1, f"optim.layer_decay={optim.layer_decay} must lie in (0, 1]; 1 for none"),
        (0 <= optim.average < 1, f"optim.average={optim.average} must lie in [0, 1); 0 for none"),
        (optim.clip_norm >= 0, f"optim.clip_norm={optim.clip_norm} must not be negative; 0 turns clipping off"),
        (runtime.micro_batch > 0, f"runtime.micro_batch={runtime.micro_batch} must be positive"),
        (
            runtime.workers == "auto" or runtime.workers >= 0,
            f"runtime.workers={runtime.workers} must be auto or not negative",
        ),
        (runtime.cache_gb > 0, f"runtime.cache_gb={runtime.cache_gb} must be positive"),
        (runtime.log_every > 0, f"runtime.log_every={runtime.log_every} must be positive"),
        (runtime.eval_every >= 0, f"runtime.eval_every={runtime.eval_every} must not be negative"),
        (
            runtime.save_every >= 0 and runtime.save_every % runtime.log_every == 0,
            f"runtime.save_every={runtime.save_every} must be a multiple of runtime.log_every={runtime.log_every}, "
            "so that what is saved was seen to be finite",
        ),
        (runtime.keep > 0, f"runtime.keep={runtime.keep} must be positive"),
        (runtime.keep_every >= 0, f"runtime.keep_every={runtime.keep_every} must not be negative; 0 for none"),
        (
            not runtime.keep_every or (runtime.save_every and runtime.keep_every % runtime.save_every == 0),
            f"runtime.keep_every={runtime.keep_every} must be a multiple of runtime.save_every={runtime.save_every}",
        ),
        *_keep_best(runtime, probe),
        (
            runtime.push_to_hub is None or re.fullmatch(r"[\w.-]+/[\w.-]+", runtime.push_to_hub),
            f"runtime.push_to_hub={runtime.push_to_hub} is no repository of the Hub; give ORG/NAME",
        ),
        (
            probe.every >= 0 and probe.every % runtime.log_every == 0,
            f"probe.every={probe.every} must be a multiple of runtime.log_every={runtime.log_every}",
        ),
        *[
            (
                bool(values) and all(value > 0 for value in values) and len(set(values)) == len(values),
                f"probe.{name}={list(values)} must be positive numbers, each once",
            )
            for name, values in [
                ("shots", probe.shots),
                ("neighbors", probe.neighbors),
                ("strengths", probe.strengths),
            ]
        ],
        (
            bool(probe.seeds)
            and all(0 <= seed < 2**32 for seed in probe.seeds)
            and len(set(probe.seeds)) == len(probe.seeds),
            f"probe.seeds={list(probe.seeds)} must lie in 0 .. 2**32 - 1, each once",
        ),
        *[
            (value > 0, f"probe.{name}={value} must be positive")
            for name, value in [
                ("strength", probe.strength),
                ("temperature", probe.temperature),
                ("test_images", probe.test_images),
            ]
        ],
        (probe.block is None or probe.block > 0, f"probe.block={probe.block} must be positive, or null"),
    ]:
        if not holds:
            raise UserError(message)


def save(config: RunConfig | CompareConfig | StudyConfig, path: Path) -> None:
    """Writes the resolved recipe, which `load_run` reads back to an equal one."""
    write_text(path, to_yaml(config))


def to_yaml(config: RunConfig | CompareConfig | StudyConfig) -> str:
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def with_rate(config: RunConfig, rate: float | tuple[float, ...]) -> RunConfig:
    """A recipe at another learning rate."""
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, learning_rate=rate))


def changed_keys(before: RunConfig, after: RunConfig) -> list[str]:
    """Keys that change results and differ, as `key: before there, after here`."""
    old, new = dict(_flat(_plain(before))), dict(_flat(_plain(after)))
    return [
        f"{key}: {old.get(key)} there, {new.get(key)} here"
        for key in {**old, **new}
        if not _may_differ(key) and old.get(key) != new.get(key)
    ]


def _may_differ(key: str) -> bool:
    return key in MAY_DIFFER or key.split(".")[0] in MAY_DIFFER


def recipe_hash(config: RunConfig) -> str:
    """Twelve digits that are equal where everything that changes results is equal."""
    return hashlib.sha256(json.dumps(decisive(config), sort_keys=True).encode()).hexdigest()[:12]


def decisive(config: RunConfig) -> dict[str, Any]:
    """Plain values, by dotted keys, of everything that changes results."""
    return {key: value for key, value in flat(config).items() if not _may_differ(key)}


def flat(config: RunConfig) -> dict[str, Any]:
    """Plain values by dotted keys."""
    return dict(_flat(_plain(config)))


def _plain(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _load(kind: type[T], recipe: str, overrides: Sequence[str]) -> tuple[T, dict[str, Any]]:
    text, name = _find(recipe)
    tree = _parse(text, name)
    if not isinstance(tree, dict):
        raise UserError(f"{name} holds no recipe: expected lines such as `seed: 0`")
    for override in overrides:
        _override(tree, override)
    for mark, owner, what, door in [
        ("arms", CompareConfig, "a comparison", "eval/compare.py"),
        ("models", StudyConfig, "a study", "eval/scaling.py"),
    ]:
        if mark in tree and kind is not owner:
            raise UserError(f"{name} is {what}: {door} takes it")
    if kind is not RunConfig and "optim" in tree:
        raise UserError(f"{name} is a run: mpp/pretrain.py or eval/finetune.py takes it")
    defaults: dict[str, Any] = {}
    config = _build(kind, tree, "", name, sorted(_paths(kind)), defaults)
    return config, defaults


def _find(recipe: str) -> tuple[str, str]:
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"--recipe {recipe}: no such file; recipes by name: {', '.join(recipe_names())}")
        try:
            return path.read_text(encoding="utf-8"), recipe
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{recipe} can't be read: {error}") from None
    if recipe not in recipe_names():
        nearest = difflib.get_close_matches(recipe, recipe_names(), 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        raise UserError(
            f"--recipe {recipe}: no such recipe{hint} There are {', '.join(recipe_names())}, or a path to a .yaml file"
        )
    return (resources.files("recipes") / f"{recipe}.yaml").read_text(), f"{recipe}.yaml"


def _parse(text: str, name: str) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return _read_node(loader, node, name) if node else None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: not YAML: {getattr(error, 'problem', error)}") from None


def _read_node(loader: _Loader, node: yaml.Node, name: str) -> Any:
    """Mappings as dicts, everything else as a leaf with its file and line."""
    place = name if "=" in name else f"{name}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        return _Leaf(loader.construct_object(node, deep=True), place)
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if key in tree:
            raise UserError(f"{name}:{key_node.start_mark.line + 1}: {key} stands twice; remove one")
        tree[key] = _read_node(loader, value_node, name)
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override}: an override is key=value, such as optim.learning_rate=3e-4")
    value = _parse(text, override)
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"{override}: {section} is a value, not a section")
    if isinstance(tree.get(last), dict):
        raise UserError(f"{override}: {key} is a section; name a key in it, such as {key}.{next(iter(tree[last]))}")
    tree[last] = value if value is not None else _Leaf(None, override)


def _paths(kind: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _paths(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


def _build(kind: Any, tree: dict[str, Any], prefix: str, name: str, known: list[str], defaults: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            place = value.place if isinstance(value, _Leaf) else name
            raise UserError(f"{place}: unknown key {prefix}{key}{_nearest(prefix + key, known)}")
    values = {}
    for spec in fields(kind):
        path, hint = prefix + spec.name, hints[spec.name]
        section = dataclasses.is_dataclass(hint)
        if spec.name not in tree and not section:
            if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise UserError(f"{name}: {path} is missing, and has no default")
            default = spec.default if spec.default is not dataclasses.MISSING else ()
            if not spec.metadata.get("plain"):
                defaults[path] = list(default) if isinstance(default, tuple) else default
            continue
        value = tree.get(spec.name, {})
        if section:
            if not isinstance(value, dict):
                raise UserError(f"{value.place}: {path} is a section, not a value")
            values[spec.name] = _build(hint, value, f"{path}.", name, known, defaults)
        elif isinstance(value, dict):
            leaves = {key: leaf.value if isinstance(leaf, _Leaf) else leaf for key, leaf in value.items()}
            values[spec.name] = _convert(leaves, hint, path, name)
        else:
            values[spec.name] = _convert(value.value, hint, path, value.place)
    return kind(**values)


def _nearest(key: str, known: list[str]) -> str:
    last = key.split(".")[-1]
    same = [path for path in known if path.split(".")[-1] == last]
    by_last = {path.split(".")[-1]: path for path in known}
    near = [by_last[match] for match in difflib.get_close_matches(last, by_last, 1)]
    found = same or difflib.get_close_matches(key, known, 1) or near
    return f"; did you mean {found[0]}?" if found else f"; the keys are {', '.join(known)}"


def _convert(value: Any, hint: Any, path: str, place: str) -> Any:
    """A value as the type that its field asks for: int may stand for float, bool never for int."""
    try:
        return _as(value, hint)
    except TypeError:
        shown = "null" if value is None else repr(value)
        raise UserError(f"{place}: {path} must be {_describe(hint)}, not {shown}") from None


def _as(value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for option in arguments:
            try:
                return _as(value, option)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        if value in arguments and not isinstance(value, bool):
            return value
        raise TypeError
    if origin is tuple:
        kinds = arguments[:1] * len(value) if isinstance(value, list) and arguments[-1] is ... else arguments
        if isinstance(value, list) and len(value) == len(kinds):
            return tuple(_as(part, kind) for part, kind in zip(value, kinds, strict=True))
        raise TypeError
    if origin is dict:
        if isinstance(value, dict):
            return {_as(key, arguments[0]): _as(part, arguments[1]) for key, part in value.items()}
        raise TypeError
    if hint is type(None) and value is None:
        return None
    if hint is bool and (isinstance(value, bool) or (type(value) is int and value in (0, 1))):
        return bool(value)
    if hint is int and type(value) is int:
        return value
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    raise TypeError


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(option) for option in arguments)
    if origin is Literal:
        return " or ".join(str(option) for option in arguments)
    if origin is tuple:
        return f"a list such as [{', '.join(_describe(kind) for kind in arguments if kind is not ...)}]"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(hint, "a section of names")
