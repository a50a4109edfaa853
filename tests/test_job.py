"""mpp/job.py: the rates, decays and averages of every recipe in a real loop, and every family learns."""

import dataclasses
import math

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpp import checkpoint, config, data, job, run, sources
from mpp.console import Console

STEPS = 12
RUNS = [name for name in config.recipe_names() if not name.startswith(("compare", "scaling"))]
QUIET = Console(quiet=True)


def shrunk(name):
    """A recipe with all that sets rates, decays and averages as it is, on a small model, few images and 12 steps."""
    recipe, _ = config.load_run(name)
    rates = recipe.optim.learning_rate
    warmup = max(1, round(STEPS * recipe.optim.warmup_steps / recipe.optim.steps)) if recipe.optim.warmup_steps else 0
    small = config.load_run("supervised_demo")[0]
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(small.data, source="synthetic:16", image_size=16),
        model=dataclasses.replace(small.model, embed_dim=12, depth=2, num_heads=3, head=recipe.model.head),
        objective=dataclasses.replace(recipe.objective, mixup=0.0, cutmix=0.0),
        optim=dataclasses.replace(
            recipe.optim,
            steps=STEPS,
            batch_size=4,
            warmup_steps=warmup,
            milestones=tuple(round(STEPS * step / recipe.optim.steps) for step in recipe.optim.milestones),
            learning_rate=rates[0] if isinstance(rates, tuple) else rates,
        ),
        runtime=dataclasses.replace(small.runtime, micro_batch=4, log_every=STEPS, eval_every=0, save_every=0),
        finetune=None,
    )


@pytest.fixture
def recorded(monkeypatch):
    """Rates and decays by parameter at the start of each step, and values of parameters after it."""
    names, rates, values = {}, [], []
    build = job.build_optimizer

    def named(parameters, **arguments):
        parameters = list(parameters)
        names.update({id(parameter): name for name, parameter in parameters})
        values.append({name: parameter.detach().clone() for name, parameter in parameters})
        return build(parameters, **arguments)

    def before(optimizer, *_):
        rates.append(
            {
                names[id(parameter)]: (group["lr"], group["weight_decay"])
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
        )

    def after(optimizer, *_):
        values.append({names[id(p)]: p.detach().clone() for group in optimizer.param_groups for p in group["params"]})

    monkeypatch.setattr(job, "build_optimizer", named)
    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    yield rates, values
    for hook in hooks:
        hook.remove()


def closed_form(optim, step):
    """The rate of the update after `step` finished ones, from the paper's code (its section 3.2 in words)."""
    base, warmup = optim.learning_rate, optim.warmup_steps
    done = max(0.0, min(1.0, (step - warmup) / (STEPS - warmup)))
    if optim.schedule == "linear":
        rate = optim.end_learning_rate + (base - optim.end_learning_rate) * (1 - done)
    elif optim.schedule == "staircase":
        rate = base / 10 ** sum(step >= milestone for milestone in optim.milestones)
    else:
        assert optim.schedule == "cosine"
        rate = base * (1 + math.cos(math.pi * done)) / 2
    return rate * min(1.0, step / warmup) if warmup else rate


def layer(name, blocks=2):
    """Layers as in the fine-tuning code of BEiT and MAE: embeddings 0, blocks from 1, all that follows the last."""
    name = name.removeprefix("encoder.")
    if name.startswith(("cls_token", "pos_embed", "patch_embed", "mask_embedding")):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else blocks + 1


def is_kernel(name):
    return name.endswith(
        ("attn.qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight", "patch_embed.proj.weight")
    ) or (name in ("head.weight", "pre_logits.weight"))


@pytest.mark.parametrize("name", RUNS)
def test_rates_decays_and_averages_of_every_recipe(name, recorded, tmp_path):
    rates, values = recorded
    recipe = shrunk(name)
    run.pretrain(recipe, tmp_path / "run", QUIET)
    optim = recipe.optim
    assert len(rates) == STEPS
    for step, by_name in enumerate(rates):
        assert len(by_name) > 20
        for parameter, (rate, decay) in by_name.items():
            scale = optim.layer_decay ** (3 - layer(parameter))
            assert rate == pytest.approx(closed_form(optim, step) * scale, rel=1e-9, abs=1e-15), (step, parameter)
            assert decay == (optim.weight_decay if is_kernel(parameter) or optim.decay_on == "all" else 0.0)
    exported = load_file(checkpoint.complete(tmp_path / "run" / "checkpoints")[-1][1] / "model.safetensors")
    keep = optim.average
    prefix = "" if "blocks.1.mlp.fc2.weight" in values[0] else "encoder."
    for parameter in ("blocks.1.mlp.fc2.weight", "patch_embed.proj.weight", "blocks.0.attn.qkv.bias"):
        trace = [value[prefix + parameter].double() for value in values]
        expected = keep**STEPS * trace[0] + sum(
            (1 - keep) * keep ** (STEPS - number) * value for number, value in enumerate(trace) if number
        )
        torch.testing.assert_close(exported[parameter].double(), expected, atol=1e-7, rtol=1e-5)
        if parameter.endswith("qkv.bias") and not keep:
            assert not torch.equal(trace[0], trace[-1])


def test_an_averaged_run_continues_bit_for_bit_and_is_measured_by_its_average(tmp_path, monkeypatch):
    recipe = shrunk("finetune_b16")
    optim = dataclasses.replace(recipe.optim, average=0.8, learning_rate=0.1)
    recipe = dataclasses.replace(recipe, optim=optim)
    whole = run.pretrain(recipe, tmp_path / "whole", QUIET)
    saving = dataclasses.replace(recipe, runtime=dataclasses.replace(recipe.runtime, log_every=5, save_every=5))

    class Halt(Exception):
        pass

    write = checkpoint.write

    def once(*arguments, **named):
        write(*arguments, **named)
        raise Halt

    monkeypatch.setattr(checkpoint, "write", once)
    with pytest.raises(Halt):
        run.pretrain(saving, tmp_path / "halted", QUIET)
    monkeypatch.setattr(checkpoint, "write", write)
    assert checkpoint.complete(tmp_path / "halted" / "checkpoints")[-1][0] == 5
    continued = run.pretrain(saving, tmp_path / "halted", QUIET)
    ends = [
        checkpoint.complete(tmp_path / folder / "checkpoints")[-1][1] / "model.safetensors"
        for folder in ("whole", "halted")
    ]
    first, second = (load_file(file) for file in ends)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert whole["figures"]["held_out_loss"] == continued["figures"]["held_out_loss"]

    # The held-out figures are those of the average, which is what lies in the files.
    exported = timm.create_model(f"local-dir:{ends[0].parent}", pretrained=True).eval()
    split = sources.open_source("synthetic:16", "validation")
    pixels = np.stack([data.whole_image(split.picture(row), 16) for row in range(16)]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        logits = exported(torch.from_numpy((pixels - 127.5) / 127.5).float())
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(split.labels).long())
    assert whole["figures"]["held_out_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_fine_tuning_is_tested_by_its_average(tmp_path):
    recipe = shrunk("finetune_b16")
    recipe = dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, average=0.8, learning_rate=0.3))
    found = {record["metric"]: record["value"] for record in run.finetune(recipe, tmp_path / "run", QUIET)}
    folder = checkpoint.complete(tmp_path / "run" / "checkpoints")[-1][1]
    trained, average = load_file(folder / "state" / "trained.safetensors"), load_file(folder / "model.safetensors")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    split = sources.open_source("synthetic:16", "validation")
    pixels = np.stack([data.whole_image(split.picture(row), 16) for row in range(16)]).transpose(0, 3, 1, 2)
    losses = []
    for weights in (average, trained):
        model.load_state_dict(weights)
        with torch.no_grad():
            logits = model(torch.from_numpy((pixels - 127.5) / 127.5).float())
        losses.append(torch.nn.functional.cross_entropy(logits, torch.from_numpy(split.labels).long()).item())
    assert found["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3


FAMILIES = {
    "plain": {},
    "mean of all tokens": {"pool": "gap"},
    "mean of patches": {"pool": "patches"},
    "tanh head": {"head": "mlp"},
    "no positions": {"position": "none"},
    "2-D positions": {"position": "learned_2d"},
    "2-D positions in every layer": {"position": "learned_2d", "position_at": "every_layer"},
    "shared positions": {"position_at": "every_layer_shared"},
    "relative positions": {"position": "relative"},
    "fixed positions": {"position": "sincos_2d"},
    "tanh GELU, stochastic depth, dropout": {"gelu": "tanh", "drop_path": 0.1, "dropout": 0.1},
    "hybrid": {"name": "vit_tiny_r26_s16_224", "patch_size": None, "layers": (1, 1, 1), "width_factor": 0.5, "depth": 1},
    "ResNet": {
        "name": "resnetv2_26x1_bit", "patch_size": None, "embed_dim": None, "depth": None, "num_heads": None,
        "layers": (1, 1, 1, 1), "width_factor": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_real_images(family, tmp_path):
    recipe = config.load_run("supervised_demo", ["data.subset=160", "optim.steps=60", "optim.batch_size=32"])[0]
    shape = {"embed_dim": 48, "depth": 2, **FAMILIES[family]}
    if shape["embed_dim"] is None:
        del shape["embed_dim"]
    recipe = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, **{"embed_dim": None, **shape}),
        optim=dataclasses.replace(recipe.optim, warmup_steps=5, learning_rate=2e-3),
        runtime=dataclasses.replace(recipe.runtime, micro_batch=32, log_every=20, eval_every=0),
    )
    summary = run.pretrain(recipe, tmp_path / "run", QUIET)
    assert summary["train_images"] == 160
    assert summary["figures"]["accuracy"] > 0.4  # chance is 0.1
    assert summary["exaflops"] > 0


def test_sigmoid_loss_with_mixed_and_augmented_images_learns(tmp_path):
    recipe = config.load_run("supervised_demo", ["data.subset=160", "optim.steps=160", "optim.batch_size=32"])[0]
    recipe = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, rand_augment="rand-m5-n1", erasing=0.25),
        model=dataclasses.replace(recipe.model, embed_dim=48, depth=2, head="mlp", head_bias=-2.3),
        objective=dataclasses.replace(recipe.objective, loss="sigmoid", mixup=0.2, cutmix=0.2),
        optim=dataclasses.replace(recipe.optim, warmup_steps=5, learning_rate=2e-3),
        runtime=dataclasses.replace(recipe.runtime, micro_batch=32, log_every=20, eval_every=0),
    )
    summary = run.pretrain(recipe, tmp_path / "run", QUIET)
    assert "accuracy" not in summary["figures"]  # mixed images have no one label
    assert summary["figures"]["held_out_accuracy"] > 0.3  # chance is 0.1
