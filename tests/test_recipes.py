"""recipes/*.yaml: every one loads, is complete and short, can be built, and is the paper's where it says so.

The tables of the ViT paper (2010.11929) and of its successors are typed in here once more, so that a slip in a
recipe is seen. What a table does not say has its source in the recipe.
"""

import dataclasses
import importlib
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from timm.data.auto_augment import rand_augment_transform

from mpp import command_line, config, references, run_folder, tasks, wiring
from mpp.comparison_folder import Comparison
from mpp.config import DataConfig, ModelConfig, ObjectiveConfig, OptimConfig
from mpp.model import encoder_of
from mpp.optim import lr_at

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
WRITTEN = {name: yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) for name in config.recipe_names()}
RUNS = [name for name, recipe in WRITTEN.items() if "optim" in recipe]  # the others are comparisons and studies
COMPARISONS = [name for name, recipe in WRITTEN.items() if "arms" in recipe]
IMAGES = {"jft": 303_000_000, "i21k": 14_000_000, "i1k": 1_281_167}
TWO_CLASSES = ["cat", "dog"]

MODELS = {
    "s16": "vit_small_patch16_224", "b16": "vit_base_patch16_224", "b32": "vit_base_patch32_224",
    "l16": "vit_large_patch16_224", "l32": "vit_large_patch32_224", "h14": "vit_huge_patch14_224",
    "r50x1": "resnetv2_50x1_bit", "r50x2": "resnetv2_50x2_bit", "r101x1": "resnetv2_101x1_bit",
    "r152x1": "resnetv2_152x1_bit", "r152x2": "resnetv2_152x2_bit", "r200x3": "resnetv2_200x3_bit",
    "r50_b16": "vit_base_r50_s16_224", "r50_b32": "vit_base_r50_s32_224",
    "r50_l16": "vit_large_r50_s16_224", "r50_l32": "vit_large_r50_s32_224",
}  # fmt: skip

# Models, data, epochs, base learning rate, decay, weight decay, dropout. All: Adam (0.9, 0.999), batch of 4096,
# warm-up of 10k steps, 224 px. Not in the paper's table: R152x2 for 14 epochs, R200x3, and H/14 on ImageNet-21k.
TABLE_3 = [
    ("b16 b32", "jft", 7, 8e-4, "linear", 0.1, 0.0),
    ("l32", "jft", 7, 6e-4, "linear", 0.1, 0.0),
    ("l16", "jft", 7, 4e-4, "linear", 0.1, 0.0),
    ("l16", "jft", 14, 4e-4, "linear", 0.1, 0.0),
    ("h14", "jft", 14, 3e-4, "linear", 0.1, 0.0),
    ("r50x1 r50x2", "jft", 7, 1e-3, "linear", 0.1, 0.0),
    ("r101x1", "jft", 7, 8e-4, "linear", 0.1, 0.0),
    ("r152x1 r152x2", "jft", 7, 6e-4, "linear", 0.1, 0.0),
    ("r152x2 r200x3", "jft", 14, 6e-4, "linear", 0.1, 0.0),
    ("r50_b16 r50_b32", "jft", 7, 8e-4, "linear", 0.1, 0.0),
    ("r50_l32", "jft", 7, 2e-4, "linear", 0.1, 0.0),
    ("r50_l16", "jft", 7, 4e-4, "linear", 0.1, 0.0),
    ("r50_l16", "jft", 14, 4e-4, "linear", 0.1, 0.0),
    ("b16 b32", "i21k", 90, 1e-3, "linear", 0.03, 0.1),
    ("l16 l32", "i21k", 90, 1e-3, "linear", 0.03, 0.1),
    ("h14", "i21k", 90, 1e-3, "linear", 0.03, 0.1),
    ("b16 b32 l16 l32", "i1k", 300, 3e-3, "cosine", 0.3, 0.1),
]
# What the paper's code and its authors' answers say: the start of the head's bias, label smoothing.
PRETRAINING_LOSS = {"jft": (-10.0, 0.0), "i21k": (-10.0, 0.0), "i1k": (-6.9, 1e-4)}

# Recipe: model, data, pixels, steps, base learning rates, share held out, warm-up (the paper's code), dropout (its
# code). All: SGD with momentum 0.9, batch of 512, cosine, no weight decay, clipping at 1.
SMALL_RATES = (0.001, 0.003, 0.01, 0.03)
TABLE_4 = {
    "finetune_b16": ("b16", "imagenet", 384, 20_000, (0.003, 0.01, 0.03), 0.01, 500, 0.0),
    "finetune_l16": ("l16", "imagenet", 384, 20_000, (0.003, 0.01, 0.03), 0.01, 500, 0.1),
    "finetune_r50_b16": ("r50_b16", "imagenet", 384, 20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500, 0.1),
    "finetune_r50x1": ("r50x1", "imagenet", 384, 20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500, 0.0),
    "finetune_l16_512": ("l16", "imagenet", 512, 20_000, (0.003, 0.01, 0.03), 0.01, 500, 0.1),
    "finetune_h14_518": ("h14", "imagenet", 518, 20_000, (0.003, 0.01, 0.03), 0.01, 500, 0.1),
    "finetune_cifar100": ("b16", "cifar100", 384, 10_000, SMALL_RATES, 0.02, 500, 0.0),
    "finetune_cifar10": ("b16", "cifar10", 384, 10_000, SMALL_RATES, 0.02, 500, 0.0),
    "finetune_pets": ("b16", "pet", 384, 500, SMALL_RATES, 0.1, 100, 0.0),
    "finetune_flowers": ("b16", "flowers", 384, 500, SMALL_RATES, 0.1, 100, 0.0),
    "finetune_vtab": ("b16", "vtab", 384, 2_500, 0.01, None, 500, 0.0),
    "finetune_b16_short": ("b16", "cifar10", 384, 500, 0.01, None, 50, 0.0),  # README of the paper's code
}
POLYAK = {"finetune_l16_512": 0.9999, "finetune_h14_518": 0.9999}  # section 4.1, for Table 2

# Recipe: ImageNet after fine-tuning at 384 px, exaFLOPs of pre-training.
TABLE_6 = {
    "b32": (80.73, 55), "b16": (84.15, 224), "l32": (84.37, 196), "l16": (86.30, 783), "l16_14": (87.12, 1567),
    "h14": (88.08, 4262), "r50x1": (77.54, 50), "r50x2": (82.12, 199), "r101x1": (80.67, 96), "r152x1": (81.88, 141),
    "r152x2": (84.97, 563), "r152x2_14": (85.56, 1126), "r200x3_14": (87.22, 3306), "r50_b32": (84.90, 106),
    "r50_b16": (85.58, 274), "r50_l32": (85.68, 246), "r50_l16": (86.60, 859), "r50_l16_14": (87.12, 1668),
}  # fmt: skip
# ImageNet after fine-tuning at 384 px.
TABLE_5 = {
    "i1k": {"b16": 77.91, "b32": 73.38, "l16": 76.53, "l32": 71.16},
    "i21k": {"b16": 83.97, "b32": 81.28, "l16": 85.15, "l32": 80.99, "h14": 85.13},
}
# Of encoders at 224 px without a head, counted from the layers' sizes (section 3.1, Table 1).
PARAMETERS = {
    "b16": 85_798_656, "b32": 87_455_232, "l16": 303_301_632, "l32": 305_510_400, "h14": 630_764_800,
    "r50_b16": 97_890_112, "r50_l32": 327_969_856,
}  # fmt: skip


def load(name):
    return config.load_run(name)[0]


def header(name):
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def steps(epochs, images, batch_size=4096):
    return round(epochs * images / batch_size)


def test_there_are_the_recipes_that_the_interface_names():
    assert {"mpp_b16", "mpp_demo", "finetune_b16", "compare_demo"} <= set(config.recipe_names())


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_is_complete_and_short(name):
    recipe, defaults = config.load_run(name)
    assert defaults == []
    text = (RECIPES / f"{name}.yaml").read_text()
    assert text.startswith("# ") and text.isascii() and len(text.splitlines()) <= 60
    assert "demo" in name or "Not run at this scale" in header(name)
    optim = recipe.optim
    rates = optim.learning_rate if isinstance(optim.learning_rate, tuple) else (optim.learning_rate,)
    for base in rates:
        trace = [
            lr_at(
                step,
                base=base,
                steps=optim.steps,
                warmup_steps=optim.warmup_steps,
                schedule=optim.schedule,
                end=optim.end_learning_rate,
            )
            for step in range(0, optim.steps, max(1, optim.steps // 500))
        ]
        assert all(math.isfinite(rate) and 0 <= rate <= base for rate in trace)
        assert max(trace) > 0.9 * base
    assert recipe.finetune is None or recipe.finetune in config.recipe_names()
    if recipe.finetune:
        assert load(recipe.finetune).objective.name == "supervised"


@pytest.mark.parametrize("name", RUNS)
def test_every_number_that_changes_results_has_a_source(name):
    if "demo" in name:
        return  # its head says where they come from
    section, bare = "", []
    for line in (RECIPES / f"{name}.yaml").read_text().splitlines():
        section = line[:-1] if re.fullmatch(r"\w+:", line) else section
        value = line.partition("#")[0].strip()
        if section not in ("", "runtime") and re.search(r": \[?-?\d", value) and "# " not in line:
            bare.append(line)
    assert not bare


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_states_nothing_that_does_nothing(name):
    if "demo" in name:
        return  # these keep the values of runs that were measured
    recipe = load(name)
    for section in ("data", "model", "objective", "optim"):
        values = getattr(recipe, section)
        plain = {key.name for key in dataclasses.fields(values) if key.metadata.get("plain")}
        for key in WRITTEN[name][section]:
            assert not config._idle(f"{section}.{key}", recipe)
            assert key not in plain or getattr(values, key) != getattr(type(values), key)


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_can_be_built(name):
    recipe = load(name)
    wiring.rehearse(recipe, TWO_CLASSES if recipe.objective.name == "supervised" else None)
    wiring.micro_batches(recipe, 1)


@pytest.mark.parametrize("name", [name for name in RUNS if load(name).finetune])
def test_a_pre_training_fits_the_fine_tuning_that_it_names(name, tmp_path):
    before = load(name)
    config.save(before, tmp_path / "config.yaml")
    _, tuning, model = run_folder.newest_pretraining(tmp_path, [f"init={tmp_path}"])
    recipe, _ = config.load_run(tuning, model)
    pretrained = wiring.rehearse(before, TWO_CLASSES if before.objective.name == "supervised" else None)[0]
    weights = references.Weights(encoder_of(pretrained).state_dict(), tmp_path, {})
    wiring.put_weights(recipe, encoder_of(wiring.rehearse(recipe, TWO_CLASSES)[0]), weights)


# ---- the paper's pre-training


ROWS_OF_TABLE_3 = [
    (f"supervised_{data}_{model}{'_14' if epochs == 14 and model != 'h14' else ''}", model, data, epochs, *values)
    for models, data, epochs, *values in TABLE_3
    for model in models.split()
]


def test_table_3_and_the_recipes_have_the_same_rows():
    assert {row[0] for row in ROWS_OF_TABLE_3} == {name for name in RUNS if re.match("supervised_(jft|i21k|i1k)", name)}


@pytest.mark.parametrize("row", ROWS_OF_TABLE_3, ids=lambda row: row[0])
def test_table_3(row):
    name, model, data, epochs, learning_rate, decay, weight_decay, dropout = row
    recipe = load(name)
    assert recipe.data == DataConfig(
        source=recipe.data.source, train_split="train", eval_split="validation", image_size=224, crop="inception",
        crop_area=(0.05, 1.0), flip=True, eval_crop="whole",
    )  # fmt: skip
    assert {"jft": "jft", "i21k": "imagenet21k", "i1k": "imagenet-1k"}[data] in recipe.data.source
    bias, smoothing = PRETRAINING_LOSS[data]
    resnet = "x" in model
    assert recipe.model == ModelConfig(
        name=MODELS[model], head="linear" if resnet else "mlp", head_bias=bias, dropout=dropout
    )
    assert recipe.objective == ObjectiveConfig(name="supervised", loss="sigmoid", label_smoothing=smoothing)
    assert recipe.optim == OptimConfig(
        steps=steps(epochs, IMAGES[data]), batch_size=4096, name="adamw", learning_rate=learning_rate, schedule=decay,
        end_learning_rate=1e-5, warmup_steps=10_000, weight_decay=weight_decay, decay_on="kernels", beta1=0.9,
        beta2=0.999, clip_norm=1.0, average=0.0,
    )  # fmt: skip
    hybrid = model.startswith("r50_")
    fitting = {"b16": "finetune_b16", "b32": "finetune_b16", "l32": "finetune_b16"}.get(model, "finetune_l16")
    assert recipe.finetune == ("finetune_r50x1" if resnet else "finetune_r50_b16" if hybrid else fitting)
    key = name.removeprefix(f"supervised_{data}_")
    expected = TABLE_6[key][0] if data == "jft" else TABLE_5[data][key]
    assert f"{expected:.2f} % on ImageNet" in header(name) or f"{expected:.2f} % (ReaL" in header(name)
    assert f"{recipe.finetune}" in header(name)


def test_thirty_epochs_of_imagenet_21k_are_named():
    for name in ("supervised_i21k_l16", "supervised_i21k_l32"):
        assert f"optim.steps={steps(30, IMAGES['i21k'])}" in header(name)


@pytest.mark.parametrize("key", TABLE_6)
def test_pre_training_costs_what_table_6_says(key):
    """Steps, batch and model together against exaFLOPs that were counted elsewhere; parameters exactly."""
    recipe = load(f"supervised_jft_{key}")
    found = wiring.count_cost(recipe, TWO_CLASSES)
    assert wiring.exaflops(found, wiring.planned_images(recipe)) == pytest.approx(TABLE_6[key][1], rel=0.05)
    assert f"{TABLE_6[key][1]} exaFLOPs" in header(f"supervised_jft_{key}")
    if key in PARAMETERS:
        assert found.encoder_parameters == PARAMETERS[key]


@pytest.mark.parametrize(
    ("name", "model", "length"),
    [("mpp_b16", "b16", 1_000_000), ("mpp_l16", "l16", 1_000_000), ("mpp_i1k_b16", "b16", 100_000)],
)
def test_masked_patch_prediction_is_appendix_b_1_2(name, model, length):
    recipe = load(name)
    assert recipe.objective == ObjectiveConfig(name="mpp", corruption=0.5, target="mean_color")
    assert recipe.optim == OptimConfig(
        steps=length, batch_size=4096, name="adamw", learning_rate=2e-4, schedule="cosine", warmup_steps=10_000,
        weight_decay=0.1, beta1=0.9, beta2=0.999, clip_norm=1.0,
    )  # fmt: skip
    assert recipe.data == DataConfig(
        source="hub:ILSVRC/imagenet-1k", image_size=224, crop="inception", crop_area=(0.05, 1.0), flip=True,
        eval_crop="whole",
    )  # fmt: skip
    assert recipe.model == ModelConfig(name=MODELS[model], dropout=0.0)
    assert recipe.finetune == f"finetune_{model}"


# ---- the paper's fine-tuning


def test_the_other_fine_tuning_of_resnets_is_bits():
    recipe = load("finetune_r50x1_bit")
    assert recipe.optim == OptimConfig(
        steps=20_000, batch_size=512, name="sgd", learning_rate=0.003, schedule="staircase", warmup_steps=500,
        milestones=(6_000, 12_000, 18_000), weight_decay=0.0, momentum=0.9, clip_norm=0.0,
    )  # fmt: skip
    assert recipe.objective == ObjectiveConfig(name="supervised", loss="softmax", label_smoothing=0.0, mixup=0.1)
    assert recipe.data == DataConfig(
        source="hub:ILSVRC/imagenet-1k", image_size=480, crop="square", resize=512, flip=True, eval_crop="whole"
    )


def test_table_4_and_the_recipes_have_the_same_rows():
    others = {"finetune_demo", "finetune_mae_b16", "finetune_beit_b16", "finetune_r50x1_bit"}
    assert {name for name in RUNS if name.startswith("finetune")} == set(TABLE_4) | others


@pytest.mark.parametrize("name", TABLE_4)
def test_table_4(name):
    model, data, size, length, rates, holdout, warmup, dropout = TABLE_4[name]
    recipe = load(name)
    assert recipe.init == "scratch"
    assert recipe.optim == OptimConfig(
        steps=length, batch_size=512, name="sgd", learning_rate=rates, schedule="cosine", warmup_steps=warmup,
        weight_decay=0.0, momentum=0.9, clip_norm=1.0, average=POLYAK.get(name, 0.0),
    )  # fmt: skip
    assert recipe.model == ModelConfig(
        name=MODELS[model], head="linear", dropout=dropout, drop_border=name == "finetune_l16"
    )
    assert recipe.objective == ObjectiveConfig(name="supervised", loss="softmax", label_smoothing=0.0)
    cut = {"crop": "inception", "crop_area": (0.05, 1.0)}
    if name == "finetune_vtab":
        cut = {"crop": "square", "resize": 448}
    assert recipe.data == DataConfig(
        source=recipe.data.source,
        eval_split="validation" if data == "imagenet" else "test",
        label_column={"cifar100": "fine_label", "pet": "label"}.get(data),
        image_size=size,
        flip=True,
        eval_crop="whole",
        holdout=0.01 if holdout is None else holdout,  # without a choice of rates it is not read
        **cut,
    )
    assert data in recipe.data.source


def test_the_fine_tunings_of_table_2_differ_by_resolution_and_averaging():
    plain, headline = load("finetune_l16"), load("finetune_l16_512")
    assert [key.split(":")[0] for key in config.changed_keys(plain, headline)] == [
        "data.image_size", "model.drop_border", "optim.average",
    ]  # fmt: skip


# ---- successors

AUGREG = {  # operations, magnitude, alpha of mixup
    "augreg_i1k_s16": (2, 15, 0.5),
    "augreg_i1k_b16": (2, 15, 0.5),
    "augreg_i1k_l16": (2, 15, 0.5),
    "augreg_i1k_b16_strong2": (2, 20, 0.8),
    "augreg_i21k_b16": (2, 10, 0.2),
    "augreg_i21k_l16": (2, 15, 0.5),
}


def require_augmentation(text, operations, magnitude):
    """That every one of timm's operations is applied, at its magnitude."""
    found = rand_augment_transform(text)
    assert found.num_layers == operations
    for operation in found.ops:
        assert operation.prob == 1.0 and operation.magnitude == magnitude and operation.magnitude_std == 0
        assert (operation.magnitude_max or 10) >= magnitude


@pytest.mark.parametrize("name", AUGREG)
def test_augreg(name):
    """ "How to train your ViT?" (2106.10270) as in big_vision, configs/vit_i1k.py and vit_i21k.py."""
    recipe, small = load(name), "i1k" in name
    operations, magnitude, mixup = AUGREG[name]
    require_augmentation(recipe.data.rand_augment, operations, magnitude)
    assert recipe.data == DataConfig(
        source="hub:ILSVRC/imagenet-1k" if small else "parquet:/data/imagenet21k/{split}-*.parquet",
        image_size=224, crop="inception", crop_area=(0.05, 1.0), flip=True, eval_crop="center", resize=256,
        rand_augment=recipe.data.rand_augment, subset=0.99 if small else None,
    )  # fmt: skip
    rate = 0.1 if name.endswith("strong2") else 0.0
    assert recipe.model == ModelConfig(
        name=MODELS[name.split("_")[2]], pool=None if small else "gap", head="mlp" if small else "linear",
        head_bias=-6.9 if small else -10.0, dropout=rate, drop_path=rate,
    )  # fmt: skip
    assert recipe.objective == ObjectiveConfig(name="supervised", loss="sigmoid", label_smoothing=0.0, mixup=mixup)
    images = int(0.99 * IMAGES["i1k"]) if small else IMAGES["i21k"]
    assert recipe.optim == OptimConfig(
        steps=steps(300, images), batch_size=4096, name="adamw", learning_rate=1e-3, schedule="cosine",
        warmup_steps=10_000, weight_decay=1e-4 / 1e-3, beta1=0.9, beta2=0.999, clip_norm=1.0,
    )  # fmt: skip
    assert recipe.finetune == "finetune_b16"


def test_plain_baseline():
    """ "Better plain ViT baselines" (2205.01580) as in big_vision, configs/vit_s16_i1k.py."""
    recipe = load("plain_i1k_s16")
    require_augmentation(recipe.data.rand_augment, 2, 10)
    images = int(0.99 * IMAGES["i1k"])
    assert recipe.data == DataConfig(
        source="hub:ILSVRC/imagenet-1k", image_size=224, crop="inception", crop_area=(0.05, 1.0), flip=True,
        eval_crop="center", resize=256, rand_augment=recipe.data.rand_augment, subset=0.99,
    )  # fmt: skip
    assert recipe.model == ModelConfig(
        name=MODELS["s16"], pool="gap", head="mlp", head_bias=0.0, position="sincos_2d", dropout=0.0
    )
    assert recipe.objective == ObjectiveConfig(name="supervised", loss="softmax", label_smoothing=0.0, mixup=0.2)
    assert recipe.optim == OptimConfig(
        steps=steps(90, images, 1024), batch_size=1024, name="adamw", learning_rate=1e-3, schedule="cosine",
        warmup_steps=10_000, weight_decay=1e-4 / 1e-3, beta1=0.9, beta2=0.999, clip_norm=1.0,
    )  # fmt: skip
    for epochs, accuracy in [(150, 78.5), (300, 80.0)]:
        assert f"optim.steps={steps(epochs, images, 1024)}" in header("plain_i1k_s16")
        assert f"{accuracy} %" in header("plain_i1k_s16")


@pytest.mark.parametrize(
    ("name", "learning_rate", "warmup_epochs"),
    [("finetune_mae_b16", 5e-4 * 1024 / 256, 5), ("finetune_beit_b16", 4e-3, 20)],
)
def test_fine_tunings_of_mae_and_beit(name, learning_rate, warmup_epochs):
    recipe = load(name)
    assert recipe.data == DataConfig(
        source="hub:ILSVRC/imagenet-1k", image_size=224, crop="inception", crop_area=(0.08, 1.0), flip=True,
        eval_crop="center", resize=256, rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25,
    )  # fmt: skip
    assert recipe.model == ModelConfig(name=MODELS["b16"], pool="patches", head="linear", dropout=0.0, drop_path=0.1)
    assert recipe.objective == ObjectiveConfig(
        name="supervised", loss="softmax", label_smoothing=0.1, mixup=0.8, cutmix=1.0
    )
    assert recipe.optim == OptimConfig(
        steps=steps(100, IMAGES["i1k"], 1024), batch_size=1024, name="adamw", learning_rate=learning_rate,
        schedule="cosine", warmup_steps=steps(warmup_epochs, IMAGES["i1k"], 1024), weight_decay=0.05, layer_decay=0.65,
        beta1=0.9, beta2=0.999, clip_norm=0.0,
    )  # fmt: skip


# ---- the demo, and the pages about recipes


def test_the_demos_arms_share_model_and_images():
    arms = [load(name) for name in ("mpp_demo", "supervised_demo", "finetune_demo")]
    assert len({arm.model for arm in arms}) == 1
    assert len({(arm.data.source, arm.data.image_size) for arm in arms}) == 1


PAGES = ("README.md", "docs/recipes.md", "docs/evaluation.md", "docs/tasks.md")


def documented_commands():
    """Calls of the entry points that take a recipe, in blocks of code."""
    for page in PAGES:
        text = (ROOT / page).read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if re.match(r"(accelerate launch|python) (mpp/pretrain|eval/\w+)\.py ", line):
                yield line


def test_the_page_lists_every_recipe():
    listed = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "recipes.md").read_text()))
    assert set(config.recipe_names()) <= listed


@pytest.mark.parametrize("command", dict.fromkeys(documented_commands()))
def test_a_command_of_the_pages_can_be_run(command, monkeypatch):
    """Its flags are known, and its recipe resolves with its overrides."""
    door, *words = shlex.split(command.removeprefix("accelerate launch ").removeprefix("python "), comments=True)
    parse, found = command_line.parse, []
    monkeypatch.setattr(command_line, "parse", lambda *flags, **about: found.append(parse(*flags, **about)))
    monkeypatch.setattr(command_line, "exit_with", lambda action: None)
    importlib.import_module(door.removesuffix(".py").replace("/", ".")).main(words)
    (flags,) = found
    if door == "eval/compare.py":
        plan = config.load_compare(flags.recipe, flags.overrides)
        assert set(flags.arm or ()) <= set(plan.arms) and Comparison(plan, Path("out")).arms
    elif door == "eval/scaling.py":
        config.load_study(flags.recipe, flags.overrides)
    else:
        overrides, task = flags.overrides, getattr(flags, "task", None)
        if task:
            given = [word.partition("=")[2] for word in overrides if word.startswith("data.source=")]
            overrides = [*tasks.overrides(task, given[-1] if given else None, 384), *overrides]
        recipe, _ = config.load_run(flags.recipe or "finetune_b16", overrides)
        wiring.rehearse(recipe, TWO_CLASSES if recipe.objective.name == "supervised" else None)


def test_the_plan_of_the_page_about_evaluation_loads(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "evaluation.md").read_text(), re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    whole = Comparison(config.load_compare(str(tmp_path / "mine.yaml")), tmp_path)
    assert {arm.pretraining.seed for arm in whole.arms if arm.pretraining} == {0, 1}
    steps_of = {arm.name: [whole.tuning(arm, task, 0).optim.steps for task in whole.plan.tasks] for arm in whole.arms}
    assert steps_of.pop("longer") == [4000, 4000]
    assert all(found == [2000, 10_000] for found in steps_of.values())


# ---- comparisons

# Table 5, in per cent, of ViT-B/16: ImageNet, CIFAR-10, CIFAR-100, Pets, Flowers.
TRANSFER = {
    "after ImageNet ": (77.91, 98.13, 87.13, 93.81, 89.49),
    "after ImageNet-21k": (83.97, 98.95, 91.67, 94.43, 99.38),
    "after JFT-300M": (84.15, 99.00, 91.87, 95.80, 99.56),
}
# Of ImageNet, as shares: B.1.2; Table 5 after ImageNet-21k; Table 5 after ImageNet.
PUBLISHED = {"self-supervised": 0.799, "supervised": 0.8397, "from scratch": 0.7791}


def comparison_of(name):
    return Comparison(config.load_compare(name), Path("out"))


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_resolves_for_every_arm_task_and_seed(name):
    whole = comparison_of(name)
    assert "demo" in name or "Not run at this scale" in header(name)
    assert (RECIPES / f"{name}.yaml").read_text().startswith("# ")
    for task in whole.plan.tasks:
        of_seeds = []
        for seed in whole.plan.seeds:
            tunings = [whole.tuning(arm, task, seed) for arm in whole.arms]
            assert len({tuning.init for tuning in tunings}) == len(tunings)
            assert len({config.recipe_hash(dataclasses.replace(tuning, init="")) for tuning in tunings}) == 1
            assert tunings[0].objective.name == "supervised" and tunings[0].seed == seed
            assert tunings[0].data.task == (task if task in tasks.TASKS else None)
            of_seeds.append(tunings[0])
        assert len({config.recipe_hash(dataclasses.replace(tuning, seed=0)) for tuning in of_seeds}) == 1
    for arm in whole.arms:
        assert arm.pretraining is not None or arm.init == "scratch"


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_arms_of_a_comparison_fit_its_fine_tunings(name, tmp_path):
    whole = comparison_of(name)
    tunings = {str(whole.shared_tuning(task).model): whole.shared_tuning(task) for task in whole.plan.tasks}
    for arm in whole.arms:
        if arm.pretraining is None:
            continue
        classes = TWO_CLASSES if arm.pretraining.objective.name == "supervised" else None
        made = encoder_of(wiring.rehearse(arm.pretraining, classes)[0])
        weights = references.Weights(made.state_dict(), tmp_path, {})
        for tuning in tunings.values():
            wiring.put_weights(tuning, encoder_of(wiring.rehearse(tuning, TWO_CLASSES)[0]), weights)


@pytest.mark.parametrize("name", COMPARISONS)
def test_few_shot_probes_ask_for_no_more_images_than_there_are(name):
    whole = comparison_of(name)
    for task in whole.plan.tasks if "few_shot" in whole.plan.probes else ():
        shots, row = max(whole.shared_tuning(task).probe.shots), tasks.TASKS.get(task, tasks.TASKS["imagenet"])
        assert shots * row.classes <= row.train_images + row.choice_images


def test_the_papers_comparisons_have_its_arms_seeds_and_figures():
    papers = [name for name in COMPARISONS if name != "compare_demo"]
    assert papers == ["compare_b16", "compare_transfer", "compare_vtab"]
    for name in papers:
        whole = comparison_of(name)
        assert whole.plan.seeds == (0, 1, 2)  # Table 2 has the mean of three fine-tunings
        assert {arm.name: arm.pretraining for arm in whole.arms} == {
            "self-supervised": load("mpp_i1k_b16"),
            "supervised": load("supervised_i21k_b16"),
            "from scratch": load("supervised_i1k_b16"),
        }
        assert whole.plan.published == ({} if name == "compare_vtab" else PUBLISHED)
        if whole.plan.published:
            first = next(iter(whole.plan.tasks))
            assert whole.shared_tuning(first).data.source == "hub:ILSVRC/imagenet-1k"  # what the figures are of
            assert (whole.plan.published_finetune, whole.plan.tasks[first][0]) == ("finetune_b16", "finetune_b16")
            assert whole.plan.published_recipes == {
                "self-supervised": "mpp_b16", "supervised": "supervised_i21k_b16", "from scratch": "supervised_i1k_b16",
            }  # fmt: skip


def test_the_transfer_is_table_5s():
    whole = comparison_of("compare_transfer")
    lines = (RECIPES / "compare_transfer.yaml").read_text().splitlines()
    for title, figures in TRANSFER.items():
        (line,) = [line for line in lines if line.startswith(f"#   {title}")]
        assert re.findall(r"\d+\.\d\d", line) == [f"{figure:.2f}" for figure in figures]
    assert TRANSFER["after ImageNet "][0] == round(100 * PUBLISHED["from scratch"], 2) == TABLE_5["i1k"]["b16"]
    assert TRANSFER["after ImageNet-21k"][0] == round(100 * PUBLISHED["supervised"], 2) == TABLE_5["i21k"]["b16"]
    assert list(whole.plan.tasks) == ["imagenet", "cifar10", "cifar100", "oxford_pets", "oxford_flowers"]
    of_task = {task: whole.shared_tuning(task) for task in whole.plan.tasks}
    assert [tuning.optim.steps for tuning in of_task.values()] == [20_000, 10_000, 10_000, 500, 500]  # Table 4
    assert {tuning.data.image_size for tuning in of_task.values()} == {384}
    chosen_on = [tuning.data.choice_split or tuning.data.holdout for tuning in of_task.values()]
    assert chosen_on == [0.01, 0.02, 0.02, 0.1, "validation"]  # B.1.1, and the split that Flowers comes with


def test_vtab_is_all_19_tasks_in_one_setting():
    whole = comparison_of("compare_vtab")
    of_task = {task: whole.shared_tuning(task) for task in whole.plan.tasks}
    assert set(of_task) == {name for name, row in tasks.TASKS.items() if row.group in tasks.VTAB_GROUPS}
    assert len(of_task) == 19
    for task, tuning in of_task.items():
        assert tuning.data.source == f"list:/data/vtab-1k/{tasks.TASKS[task].folder}"
        data = tuning.data
        assert (data.train_split, data.choice_split, data.eval_split) == ("train800", "val200", "test")
        assert tuning.optim == load("finetune_vtab").optim and tuning.optim.learning_rate == 0.01
    assert sum(not tuning.data.flip for tuning in of_task.values()) == 3  # BiT, appendix F
    assert sorted(tuning.data.resize for tuning in of_task.values()) == [384] * 5 + [448] * 14
    for mean in (72.72, 76.28, 77.63):  # Table 2
        assert f"{mean} %" in header("compare_vtab")


# ---- studies


def study_of(name):
    plan = config.load_study(name)
    runs = {
        key: [config.load_run(recipe, [*more, f"data.subset={subset or 'null'}"])[0] for subset in plan.subsets]
        for key, (recipe, *more) in plan.models.items()
    }
    return plan, runs


def test_the_parts_of_jft_are_figure_4s():
    plan, runs = study_of("scaling_jft")
    assert plan.subsets == (9_000_000, 30_000_000, 90_000_000, None)
    assert (plan.measures, plan.shots) == (("few_shot",), 5)
    assert {run.model.name for parts in runs.values() for run in parts} == {
        *("vit_base_patch32_224", "vit_base_patch16_224", "vit_large_patch32_224", "vit_large_patch16_224"),
        *("resnetv2_50x1_bit", "resnetv2_152x2_bit"),
    }
    half = runs["ViT-b/32"][0].model  # "all hidden dimensions halved"
    assert (half.embed_dim, half.mlp_dim, half.num_heads, half.depth) == (384, 1536, 6, None)


def test_the_other_studies_cover_figures_3_and_5():
    plan, runs = study_of("scaling_figure_3")
    assert plan.measures == ("finetune",)
    sources = {run.data.source.split(":")[0] + run.data.source[-40:] for parts in runs.values() for run in parts}
    assert len(runs) == 13 and len(sources) == 3
    plan, runs = study_of("scaling_figure_5")
    assert {parts[0].model.name + str(parts[0].optim.steps) for parts in runs.values()} == {
        load(f"supervised_jft_{key}").model.name + str(load(f"supervised_jft_{key}").optim.steps) for key in TABLE_6
    }
    assert plan.finetune is None and all(parts[0].finetune for parts in runs.values())
    plan, _ = study_of("scaling_i1k")
    assert plan.subsets == (0.1, 0.3, 0.6, None)
