"""mpp/optim.py against closed forms and torch's own optimisers."""

import math

import pytest
import timm
import torch

from mpp.model import MaskedPatchModel, build_encoder
from mpp.optim import build_optimizer, is_decayed, lr_at

PAPER = {"base": 2e-4, "steps": 1_000_000, "warmup_steps": 10_000, "schedule": "cosine"}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 2e-8),
        (5_000, 1e-4 * 1.0),
        (10_000, 2e-4),
        (505_000, 1e-4),  # half-way after the warm-up
        (999_999, 2e-4 * 0.5 * (1 + math.cos(math.pi * 989_999 / 990_000))),
        (1_000_000, 0.0),
    ],
)
def test_the_papers_cosine(step, expected):
    assert math.isclose(lr_at(step, **PAPER), expected, rel_tol=1e-9, abs_tol=1e-18)


def test_linear_and_constant():
    linear = {"base": 1.0, "steps": 110, "warmup_steps": 10, "schedule": "linear", "end": 0.1}
    assert [lr_at(step, **linear) for step in (5, 10, 60, 110)] == pytest.approx([0.5, 1.0, 0.55, 0.1])
    constant = {"base": 3.0, "steps": 10, "warmup_steps": 0, "schedule": "constant"}
    assert [lr_at(step, **constant) for step in (0, 9)] == [3.0, 3.0]


def tiny_model():
    encoder = build_encoder("vit_tiny_patch16_224", image_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    return MaskedPatchModel(encoder, 512)


def test_only_kernels_are_decayed():
    model = tiny_model()
    decayed = {name for name, parameter in model.named_parameters() if is_decayed(name, parameter)}
    block = "encoder.blocks.0."
    kernels = ["attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"]
    assert decayed == {"encoder.patch_embed.proj.weight", "head.weight", *(block + name for name in kernels)}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_every_parameter_is_in_one_group(name):
    model = tiny_model()
    optimizer = build_optimizer(model.named_parameters(), name=name, weight_decay=0.1, betas=(0.9, 0.95), momentum=0.8)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_decay_is_times_the_learning_rate_and_momentum_is_plain():
    # One step from zero gradient moves a kernel by the decay alone: w - lr * wd * w.
    weight = torch.nn.Parameter(torch.full((1, 1), 2.0))
    optimizer = build_optimizer(
        [("a.weight", weight)], name="adamw", weight_decay=0.1, betas=(0.9, 0.999), momentum=0.0
    )
    optimizer.param_groups[0]["lr"] = 0.5
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.item() == pytest.approx(2.0 * (1 - 0.5 * 0.1))
    bias = torch.nn.Parameter(torch.zeros(1))
    optimizer = build_optimizer([("bias", bias)], name="sgd", weight_decay=0.1, betas=(0, 0), momentum=0.9)
    optimizer.param_groups[0]["lr"] = 1.0
    for expected in (-1.0, -2.9):  # velocity 1, then 0.9 + 1
        bias.grad = torch.ones(1)
        optimizer.step()
        assert bias.item() == pytest.approx(expected)


def test_frozen_parameters_are_left_out():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=2)
    model.patch_embed.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), name="sgd", weight_decay=0.0, betas=(0, 0), momentum=0.9)
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert id(model.patch_embed.proj.weight) not in grouped
