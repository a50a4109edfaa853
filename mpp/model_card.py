"""The model card of a repository on the Hugging Face Hub: what a checkpoint is, what was measured, how to load it."""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from mpp import config, credentials, report
from mpp.config import RunConfig

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_SHOWN_CLASSES = 10
_LEFT_OUT = "…"
_PAPER = '"An Image is Worth 16x16 Words" ([2010.11929](https://arxiv.org/abs/2010.11929), Dosovitskiy et al., 2021)'
_CITATION = """@inproceedings{dosovitskiy2021image,
  title = {An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale},
  author = {Alexey Dosovitskiy and Lucas Beyer and Alexander Kolesnikov and Dirk Weissenborn and Xiaohua Zhai and
            Thomas Unterthiner and Mostafa Dehghani and Matthias Minderer and Georg Heigold and Sylvain Gelly and
            Jakob Uszkoreit and Neil Houlsby},
  booktitle = {International Conference on Learning Representations},
  year = {2021},
  eprint = {2010.11929},
  archivePrefix = {arXiv}
}"""
_TARGETS = {
    "mean_color": "its mean colour in 3 bits a channel (512 classes)",
    "colors_4x4": "the mean colours of its 4 x 4 parts in 3 bits a channel (512 classes each)",
    "pixels": "its pixels",
}
_LOSSES = {
    "mean_color": "cross-entropy of the colour classes of corrupted patches, in nats",
    "colors_4x4": "cross-entropy of the colour classes of corrupted patches, in nats",
    "pixels": "mean squared error of the pixels of corrupted patches, in [-1, 1]",
    "softmax": "cross-entropy of the labels, in nats",
    "sigmoid": "binary cross-entropies, summed over the classes, in nats",
}
_LABEL_HIT = "share of images whose most likely class is right"
_MEANINGS = {
    "loss": ("training loss", "{loss}"),
    "held_out_loss": ("held-out loss", "{loss}"),
    "held_out_target_entropy": (
        "entropy of the colour classes",
        "the loss of who knows only how frequent each is, in nats",
    ),
    "held_out_accuracy_masked": (
        "held-out accuracy on masked patches",
        "share of masked {parts} whose mean colour class is right, among 512",
    ),
    "held_out_nearest_patch_accuracy_masked": (
        "for reference: nearest patch",
        "the same share where the nearest uncorrupted patches give the colour, without a network",
    ),
    "held_out_most_frequent_accuracy": (
        "for reference: most frequent colour",
        "share of corrupted {parts} in the commonest class",
    ),
    "held_out_accuracy_random": ("held-out accuracy on replaced patches", "the same of those shown as another patch"),
    "held_out_accuracy_kept": ("held-out accuracy on kept patches", "the same of those shown as they are"),
    "held_out_accuracy": ("held-out accuracy", "{hit}"),
    "held_out_top_5_accuracy": ("held-out top-5 accuracy", "share of images with their class among the best five"),
}
_FOR_THE_HUB = {  # by which name it knows the metric
    "held_out_accuracy_masked": "accuracy",
    "held_out_accuracy": "accuracy",
    "held_out_top_5_accuracy": "top_5_accuracy",
    "held_out_loss": "loss",
}
_PIXELS = {"mean": "pixel mean", "std": "pixel standard deviation", "interpolation": "interpolation"}
_CAPTIONS = {"figures/curves.png": "loss by step", "figures/mosaic.png": "image, input, predicted and true colours"}


@dataclass(frozen=True)
class Facts:
    """What a card tells of a checkpoint.

    Attributes:
        repository: ORG/NAME.
        revision: the branch or tag it is sent to; None for the usual one.
        kind: pretrain or finetune.
        step: of the checkpoint.
        numbers: the record of `metrics.jsonl` at that step.
        results: `results.json` of a finished fine-tuning, else empty.
        classes: names of the outputs of the encoder's head; None where it has none.
        parameters: of the encoder.
        license: as the Hub names it, such as apache-2.0; None where it is not known.
        pictures: those there are of figures/curves.png and figures/mosaic.png.
        timm_opens: whether timm builds the model from its `config.json`.
        versions: of packages, by name.
        images, seconds, devices: of a finished run, from its summary.
        pixels: `pretrained_cfg` of `config.json`, for mean, standard deviation and interpolation.
    """

    repository: str
    revision: str | None
    recipe: RunConfig
    kind: str
    step: int
    numbers: Mapping[str, float]
    results: Sequence[Mapping[str, Any]]
    classes: Sequence[str] | None
    parameters: int
    license: str | None
    pictures: Sequence[str]
    timm_opens: bool
    versions: Mapping[str, str]
    images: int | None = None
    seconds: float | None = None
    devices: str | None = None
    pixels: Mapping[str, Any] | None = None


def public(recipe: RunConfig) -> RunConfig:
    """A recipe as anyone may read it: of a local path its last part, of an address no query, and no place to push to.

    Twice gives the same as once.
    """
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, source=_source(recipe.data.source)),
        probe=dataclasses.replace(recipe.probe, source=recipe.probe.source and _source(recipe.probe.source)),
        runtime=dataclasses.replace(recipe.runtime, push_to_hub=None, push_private=False),
        init=recipe.init if recipe.init == "scratch" or _base(recipe.init) else _last_part(recipe.init),
        finetune=recipe.finetune
        and (recipe.finetune if recipe.finetune in config.recipe_names() else _last_part(recipe.finetune)),
        tests={name: source and _source(source) for name, source in recipe.tests.items()},
    )


def _source(source: str) -> str:
    kind, colon, place = source.partition(":")
    if not colon or kind == "synthetic" or _hub_name(source):
        return source
    scheme, remote, _ = place.partition("://")
    if not remote or scheme in ("file", "local") or "::" in place:  # fsspec chains may end on this disk
        return f"{kind}:{_last_part(place)}"
    # A signed address has its signature in the query; elsewhere the mark is part of a pattern.
    return f"{kind}:{credentials.hide(place.partition('?')[0] if scheme in ('http', 'https') else place)}"


def _last_part(path: str) -> str:
    parts = [part for part in re.split(r"[\\/]", path) if part.strip(f".~{_LEFT_OUT}")]
    return "/".join([_LEFT_OUT, *map(_line, parts[-1:])])


def _hub_name(source: str) -> str:
    """The plain name of a data set of the Hub; empty for everything else, such as a local copy of one."""
    kind, _, place = source.partition(":")
    name = place.partition("@")[0]
    return name if kind == "hub" and _HUB_NAME.fullmatch(name) and not Path(name).exists() else ""


def _base(init: str) -> str:
    """The repository that weights came from; empty where they came from no hub."""
    kind, _, name = init.partition(":")
    name = name.partition("@")[0] if kind == "hf-hub" else f"timm/{name}"
    return name if kind in ("hf-hub", "timm") and _HUB_NAME.fullmatch(name) else ""


def card(facts: Facts) -> str:
    """A repository's README.md: YAML for the Hub between two rules, and Markdown for people."""
    recipe = public(facts.recipe)
    facts = dataclasses.replace(
        facts,
        recipe=recipe,
        # The head with a hidden layer is no part of the encoder, and stays behind.
        classes=(recipe.model.head == "linear" and facts.classes) or None,
        numbers={key: value for key, value in facts.numbers.items() if math.isfinite(value)},
        results=[record for record in facts.results if math.isfinite(record["value"])],
    )
    supervised = recipe.objective.name == "supervised"
    measured = _tested(facts) if facts.kind == "finetune" else _held_out(facts)
    tags = ["supervised"] if supervised else ["masked-patch-prediction", "self-supervised-learning"]
    if not recipe.model.name.startswith("resnet"):
        tags.append("vision-transformer")
    data = ModelCardData(
        library_name="timm" if facts.timm_opens else "mpp-vit",
        pipeline_tag=_task(facts),
        license=facts.license or "unknown",
        tags=tags + (["timm"] if facts.timm_opens else []),
        datasets=[_hub_name(recipe.data.source)] if _hub_name(recipe.data.source) else None,
        base_model=_base(recipe.init) or None,
        model_name=facts.repository.rpartition("/")[2],
        eval_results=measured or None,
    )
    if not measured:
        data.pop("model_name")  # which would be a key of its own
    sections = [f"# {_code(facts.repository)}", *_about(facts), *_model(facts), *_data(facts), *_metrics(facts)]
    sections += [*_loading(facts), *_recipe(facts), *_closing(facts)]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def _task(facts: Facts) -> str:
    return "image-classification" if facts.classes else "image-feature-extraction"


def _held_out(facts: Facts) -> list[EvalResult]:
    """What was measured beside a pre-training, for the Hub."""
    data, probe, numbers = facts.recipe.data, facts.recipe.probe, facts.numbers
    of_patches = facts.recipe.objective.name == "mpp"
    task = ("image-feature-extraction", "masked patch prediction") if of_patches else ("image-classification", None)
    found = [
        _result(data.source, data.eval_split, kind, _MEANINGS[key][0], numbers[key], *task)
        for key, kind in _FOR_THE_HUB.items()
        if key in numbers and not (of_patches and key == "held_out_accuracy")  # over masked and other patches
    ]
    source, split = probe.source or data.source, probe.test_split or data.eval_split
    return found + [_result(source, split, "accuracy", name, numbers[key]) for key, name in _probed(facts)]


def _tested(facts: Facts) -> list[EvalResult]:
    """What a fine-tuning scored on its test sets, for the Hub, which tells them apart by what it calls their type."""
    recipe, found = facts.recipe, []
    types: dict[str, str] = {}
    for record in facts.results:
        name, metric = _source(record["data_set"]), record["metric"]
        source = name if name in recipe.tests else recipe.data.source
        if name not in types:
            kind = _hub_name(source) or source
            types[name] = f"{name} (test set)" if kind in types.values() else kind
        one = _result(source, recipe.data.eval_split, metric, f"test {_words(metric)}", record["value"])
        found.append(
            dataclasses.replace(one, dataset_name=_line(_hub_name(name) or name), dataset_type=_line(types[name]))
        )
    return found


def _result(
    source: str,
    split: str,
    metric: str,
    name: str,
    value: float,
    task: str = "image-classification",
    task_name: str | None = None,
) -> EvalResult:
    return EvalResult(
        task,
        dataset_type=_line(_hub_name(source) or source),
        dataset_name=_line(_hub_name(source) or source),
        dataset_split=_line(split),
        dataset_revision=(_hub_name(source) and source.partition("@")[2]) or None,
        metric_type=metric,
        metric_name=name,
        metric_value=value,
        task_name=task_name,
    )


def _probed(facts: Facts) -> Iterator[tuple[str, str]]:
    """Keys of numbers that probes gave, and what they are."""
    for key in facts.numbers:
        found = re.fullmatch(r"probe_(\d+)_(shot|nn)_accuracy", key)
        if found:
            yield key, f"{found[1]}-{found[2].replace('nn', 'nearest-neighbour')} accuracy of frozen features"


def _words(metric: str) -> str:
    return metric.replace("top_5", "top-5").replace("_", " ")


def _about(facts: Facts) -> list[str]:
    recipe, steps = facts.recipe, facts.recipe.optim.steps
    what = "fine-tuned on labels" if facts.kind == "finetune" else "pre-trained on labels"
    if recipe.objective.name == "mpp":
        what = "pre-trained without labels by masked patch prediction"
    start = "" if recipe.init == "scratch" else f" It started from {_code(recipe.init)}."
    finished = "the end of its run" if facts.step == steps else "**the run is not finished**"
    text = f"An image encoder, {_code(recipe.model.name)}, {what}.{start} "
    text += f"This is step {facts.step:,} of {steps:,}: {finished}."
    if recipe.objective.name == "mpp":
        text += (
            f" Masked patch prediction corrupts {recipe.objective.corruption:.0%} of an image's patches (most take a "
            "learned mask embedding, a few another patch's or their own) and learns to predict of each "
            f"{_TARGETS[recipe.objective.target]}. It is the self-supervised experiment of the ViT paper, {_PAPER}, "
            "appendix B.1.2."
        )
    return [text]


def _model(facts: Facts) -> list[str]:
    recipe, pixels, classes = facts.recipe, facts.pixels or {}, facts.classes or []
    patch = recipe.model.patch_size or next(iter(re.findall(r"patch(\d+)", recipe.model.name)), None)
    changed = config.flat(dataclasses.replace(recipe, model=config.ModelConfig(recipe.model.name)))
    own = [
        f"{key.removeprefix('model.')}={json.dumps(value)}"
        for key, value in config.flat(recipe).items()
        if value != changed[key] and key != "model.patch_size"
    ]
    rows = [
        ["architecture", _code(recipe.model.name)],
        *([["differs from it in", ", ".join(map(_code, own))]] if own else []),
        *([["patch", f"{patch} x {patch} pixels"]] if patch else []),
        ["image", f"{recipe.data.image_size} x {recipe.data.image_size} pixels"],
        ["parameters of the encoder", f"{facts.parameters:,}"],
        ["head", f"{len(classes):,} classes" if classes else "none: features"],
        *([[name, _listed(pixels[key])] for key, name in _PIXELS.items() if key in pixels]),
    ]
    shown = ", ".join(map(_code, classes[:_SHOWN_CLASSES]))
    more = ", and so on (`label_names` in `config.json` has all)" if len(classes) > _SHOWN_CLASSES else ""
    return ["## Model", report.table(["", ""], rows), *([f"Classes: {shown}{more}."] if classes else [])]


def _listed(value: Any) -> str:
    return _code(", ".join(f"{one:g}" for one in value) if isinstance(value, list | tuple) else str(value))


def _data(facts: Facts) -> list[str]:
    data = facts.recipe.data
    name = _hub_name(data.source)
    where = f"[{name}](https://huggingface.co/datasets/{name})" if name else _code(data.source)
    splits = " and ".join(_code(split) for split in (data.train_split, data.choice_split) if split)
    text = f"Trained on {where}, {splits}; held out: {_code(data.eval_split)}."
    if data.source == "demo":
        text += " These are crops of ten photographs that come with scikit-image and scikit-learn."
    if data.subset is not None:
        text += f" Of the training split a part was used (`data.subset={data.subset}`)."
    if data.per_class is not None:
        text += f" Of each class {data.per_class:,} labelled images were used."
    if data.shuffle_labels:
        text += " **The labels were shuffled: this is a control, and its predictions mean nothing.**"
    if facts.images is not None:
        text += f" The run saw {facts.images:,} images, counting each every time."
    if facts.seconds is not None:
        took = f"{facts.seconds / 3600:,.1f} hours" if facts.seconds >= 3600 else f"{facts.seconds / 60:.1f} minutes"
        text += f" That took {took} on {_code(facts.devices)}." if facts.devices else f" That took {took}."
    return ["## Data", text]


def _metrics(facts: Facts) -> list[str]:
    pictures = [f"![{_CAPTIONS[name]}]({name})" for name in facts.pictures if name in _CAPTIONS]
    return ["## Measured", *(_test_table(facts) if facts.kind == "finetune" else _numbers(facts)), *pictures]


def _numbers(facts: Facts) -> list[str]:
    objective = facts.recipe.objective
    parts = "parts of patches" if objective.target == "colors_4x4" else "patches"
    of_patches = f"share of all corrupted {parts} whose mean colour class is right, among 512"
    words = {"parts": parts, "hit": of_patches, "loss": _LOSSES[objective.target]}
    if objective.name == "supervised":
        words |= {"hit": _LABEL_HIT, "loss": _LOSSES[objective.loss]}
    probed = {key: (name, f"{_LABEL_HIT}, of a classifier on few labelled images") for key, name in _probed(facts)}
    rows = [
        [name, f"{facts.numbers[key]:.4f}", meaning.format(**words)]
        for key, (name, meaning) in (_MEANINGS | probed).items()
        if key in facts.numbers
    ]
    return [report.table(["metric", "value", "what it is"], rows) if rows else "Nothing was measured at this step."]


def _test_table(facts: Facts) -> list[str]:
    if not facts.results:
        return ["The test split was not read yet."]
    rows = [
        [
            _code(_source(record["data_set"])),
            _words(record["metric"]),
            f"{record['value']:.4f}",
            f"{record['images']:,}",
        ]
        for record in facts.results
    ]
    first = facts.results[0]
    text = f"{first['train_images']:,} training images, seed {first['seed']}, learning rate {first['learning_rate']:g}"
    text += ", chosen on held-out training images." if first.get("tried") else "."
    if first.get("overlap"):
        text += f" {first['overlap']:,} test images are known to be among the training images."
    return [report.table(["test set", "metric", "value", "images"], rows), text]


def _loading(facts: Facts) -> list[str]:
    recipe, name = facts.recipe, facts.repository
    at = f"hf-hub:{name}" + (f"@{facts.revision}" if facts.revision else "")
    sections = ["## Use"]
    if facts.timm_opens:
        shape = "logits [1, class]" if facts.classes else "features [1, width]"
        revision = f", revision={json.dumps(facts.revision)}" if facts.revision else ""
        sections += [
            "With timm:",
            _block("python", _TIMM.format(at=json.dumps(at), shape=shape)),
            "With transformers, which reads it through timm:",
            _block("python", _TRANSFORMERS.format(task=_task(facts), name=json.dumps(name), revision=revision)),
            "With this package, from a checkout of it:",
        ]
    else:
        sections.append(
            "timm can't express this model, and transformers reads such weights through timm, so neither opens it. "
            "This package does, from a checkout of it:"
        )
    tuning = recipe.finetune if recipe.finetune in config.recipe_names() else "RECIPE"
    tuning = "recipe.yaml" if facts.kind == "finetune" else tuning
    init = shlex.quote(f"init={at}")
    sections.append(_block("bash", f"python eval/finetune.py --recipe {tuning} {init} data.source=folder:PATH"))
    if recipe.objective.name == "mpp":
        go_on = f"accelerate launch mpp/pretrain.py --recipe recipe.yaml {init} data.source=folder:PATH"
        sections += [
            "Pre-training goes on with the prediction head and the mask embedding, too:",
            _block("bash", go_on),
        ]
    return [
        *sections,
        "A recipe's `model` has to be that of the recipe below, which is `recipe.yaml` in this repository.",
    ]


def _recipe(facts: Facts) -> list[str]:
    left_out = {key: str(value) for key, value in config.flat(facts.recipe).items() if _LEFT_OUT in str(value)}
    left_out.pop("finetune", None)
    door = "python eval/finetune.py" if facts.kind == "finetune" else "accelerate launch mpp/pretrain.py"
    paths = [f"{key}={value.partition(_LEFT_OUT)[0]}PATH" for key, value in left_out.items()]
    revision = f" --revision {shlex.quote(facts.revision)}" if facts.revision else ""
    commands = [
        f"hf download {facts.repository} recipe.yaml --local-dir .{revision}",
        " ".join([door, "--recipe recipe.yaml", *paths]),
    ]
    text = "Two commands repeat the run"
    text += f"; where the recipe has {_LEFT_OUT}, a path was left out, and `PATH` is to be your own:" if paths else ":"
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    # What is not ASCII is to be read, too.
    recipe = yaml.safe_dump(yaml.safe_load(config.to_yaml(facts.recipe)), sort_keys=False, allow_unicode=True)
    return ["## Recipe", text, _block("bash", "\n".join(commands)), _block("yaml", recipe), f"Made with {versions}."]


def _closing(facts: Facts) -> list[str]:
    limits = [
        "Nothing was measured but what is listed above, in one run: not robustness, other kinds of images, or how the "
        "model treats pictures of different people."
    ]
    if facts.classes:
        limits.append("It knows its classes only, and names one of them for every image.")
    else:
        limits.append("It has no classes: its features need a head that is trained on labels.")
    if facts.recipe.data.source == "demo":
        limits.append("The demo's images tell colours and textures apart, not objects.")
    if facts.step < facts.recipe.optim.steps:
        limits.append("The run is not finished, so that the figures are not its last.")
    rights = (
        _code(facts.license) if facts.license else "Not stated: ask whoever published it before you use the weights."
    )
    listed = "\n".join(f"- {limit}" for limit in limits)
    return ["## Limits", listed, "## Licence", rights, "## Citation", _block("bibtex", _CITATION)]


_TIMM = """import timm
from PIL import Image

model = timm.create_model({at}, pretrained=True).eval()
settings = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**settings, is_training=False)
image = transform(Image.open("image.jpg").convert("RGB"))
output = model(image.unsqueeze(0))  # {shape}"""
_TRANSFORMERS = """from transformers import pipeline

output = pipeline("{task}", model={name}{revision})("image.jpg")"""


def _line(text: str) -> str:
    """One line of what can be seen: no control characters, nothing that reverses the direction, no half letters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _code(text: str) -> str:
    """A name as Markdown code, in which nothing is a link, HTML or an emphasis, also in a cell of a table."""
    line = _line(text).replace("\\|", "\\¦")  # readers do not agree on a bar after a backslash
    rule = "`" * (_longest_rule(line) + 1)
    return f"{rule} {line} {rule}" if "`" in line or not line else f"{rule}{line}{rule}"


def _block(language: str, text: str) -> str:
    rule = "`" * max(3, _longest_rule(text) + 1)
    return f"{rule}{language}\n{text.strip()}\n{rule}"


def _longest_rule(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
