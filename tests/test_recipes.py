"""recipes/*.yaml: every one loads, is complete, and is the paper's where it says so."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import yaml

from mpp import config
from mpp.model import build_encoder
from mpp.optim import lr_at

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
RUNS = [name for name in config.recipe_names() if not name.startswith("compare")]


def test_there_are_the_recipes_that_the_interface_names():
    assert {"mpp_b16", "mpp_demo", "finetune_b16", "compare_demo"} <= set(config.recipe_names())


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_is_complete_and_can_be_built(name):
    recipe, defaults = config.load_run(name)
    assert defaults == []
    assert (RECIPES / f"{name}.yaml").read_text().startswith("# ")
    with torch.device("meta"):
        build_encoder(image_size=recipe.data.image_size, **dataclasses.asdict(recipe.model))
    optim = recipe.optim
    rates = optim.learning_rate if isinstance(optim.learning_rate, tuple) else (optim.learning_rate,)
    for base in rates:
        trace = [
            lr_at(step, base=base, steps=optim.steps, warmup_steps=optim.warmup_steps, schedule=optim.schedule)
            for step in range(0, optim.steps, max(1, optim.steps // 500))
        ]
        assert all(math.isfinite(rate) and 0 <= rate <= base for rate in trace)
        assert max(trace) > 0.9 * base
    assert recipe.finetune is None or recipe.finetune in config.recipe_names()


def test_mpp_b16_is_appendix_b_1_2():
    written = yaml.safe_load((RECIPES / "mpp_b16.yaml").read_text())
    expected = {
        "objective": {"name": "mpp", "corruption": 0.5, "target": "mean_color"},
        "optim": {
            "steps": 1_000_000, "batch_size": 4096, "name": "adamw", "learning_rate": 2e-4, "schedule": "cosine",
            "warmup_steps": 10_000, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "clip_norm": 1.0,
        },
        "data": {"image_size": 224, "crop_area": [0.05, 1.0], "flip": True},
        "model": {"name": "vit_base_patch16_224", "dropout": 0.0},
    }  # fmt: skip
    for section, values in expected.items():
        assert {key: written[section][key] for key in values} == values


def test_finetune_b16_is_table_4():
    written = yaml.safe_load((RECIPES / "finetune_b16.yaml").read_text())
    assert written["data"]["image_size"] == 384 and written["data"]["holdout"] == 0.01
    expected = {
        "steps": 20_000, "batch_size": 512, "name": "sgd", "momentum": 0.9, "schedule": "cosine",
        "learning_rate": [0.003, 0.01, 0.03], "weight_decay": 0.0, "clip_norm": 1.0,
    }  # fmt: skip
    assert {key: written["optim"][key] for key in expected} == expected


def test_the_demos_arms_share_model_and_images():
    arms = [config.load_run(name)[0] for name in ("mpp_demo", "supervised_demo", "finetune_demo")]
    assert len({arm.model for arm in arms}) == 1
    assert len({(arm.data.source, arm.data.image_size) for arm in arms}) == 1
