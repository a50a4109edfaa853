"""mpp/optim.py against closed forms and torch's own optimisers."""

import math

import pytest
import timm
import torch

from mpp.encoders import build_encoder
from mpp.model import MaskedPatchModel
from mpp.optim import RunningAverage, build_optimizer, is_decayed, layer_of, lr_at

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


def test_the_staircase_of_bit():
    # BiT-HyperRule on CIFAR: 10,000 steps, warm-up 500, a tenth from 3,000, 6,000 and 9,000 on.
    bit = {"base": 0.003, "steps": 10_000, "warmup_steps": 500, "schedule": "staircase"}
    steps = [0, 250, 500, 2_999, 3_000, 5_999, 6_000, 9_000, 9_999]
    expected = [0, 0.0015, 0.003, 0.003, 3e-4, 3e-4, 3e-5, 3e-6, 3e-6]
    assert [lr_at(s, **bit, milestones=(3_000, 6_000, 9_000)) for s in steps] == pytest.approx(expected)


def tiny_model(**shape):
    shape = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, **shape}
    return MaskedPatchModel(build_encoder("vit_tiny_patch16_224", image_size=16, **shape), 512)


def test_only_kernels_are_decayed():
    model = tiny_model()
    decayed = {name for name, parameter in model.named_parameters() if is_decayed(name, parameter)}
    block = "encoder.blocks.0."
    kernels = ["attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"]
    assert decayed == {"encoder.patch_embed.proj.weight", "head.weight", *(block + name for name in kernels)}


@pytest.mark.parametrize("position", ["learned_2d", "relative"])
def test_embeddings_of_positions_are_not_decayed(position):
    model = tiny_model(position=position)
    names = {"rows", "columns", "prefix", "relative"}
    found = {name: is_decayed(name, p) for name, p in model.named_parameters() if name.split(".")[-1] in names}
    assert found and not any(found.values())


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
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


def test_adam_adds_the_decay_to_the_gradient():
    # Adam's first step has the size of the learning rate, whatever the gradient: here that of the decay alone.
    weight = torch.nn.Parameter(torch.full((1, 1), 2.0))
    optimizer = build_optimizer([("a.weight", weight)], name="adam", weight_decay=0.1, betas=(0.9, 0.999), momentum=0.0)
    optimizer.param_groups[0]["lr"] = 0.5
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.item() == pytest.approx(2.0 - 0.5, abs=1e-6)


def test_everything_is_decayed_when_asked():
    model = tiny_model()
    optimizer = build_optimizer(
        model.named_parameters(), name="adamw", weight_decay=0.3, betas=(0.9, 0.9), momentum=0, decay_on="all"
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def mae_layer(name, blocks):
    """As the code of MAE numbers layers: `get_layer_id_for_vit`."""
    name = name.removeprefix("encoder.")
    if name in ("cls_token", "pos_embed", "mask_embedding") or name.startswith("patch_embed"):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks") else blocks + 1


def test_each_layer_has_its_rate_as_in_mae():
    model = tiny_model(depth=3)
    optimizer = build_optimizer(
        model.named_parameters(), name="adamw", weight_decay=0.05, betas=(0.9, 0.9), momentum=0,
        layer_decay=0.65, depth=3,
    )  # fmt: skip
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen[names[id(parameter)]] = group["lr_scale"]
    assert seen.keys() == set(names.values())
    for name, scale in seen.items():
        assert scale == pytest.approx(0.65 ** (4 - mae_layer(name, 3)), rel=1e-12), name
    assert len({group["lr_scale"] for group in optimizer.param_groups}) == 5


def test_layers_agree_with_timms_of_every_paper_model():
    from timm.models import group_parameters

    for name, shape in [
        ("vit_tiny_patch16_224", {}),
        ("vit_base_r50_s16_224", {}),
        ("vit_tiny_patch16_224", {"depth": 3}),
    ]:
        with torch.device("meta"):
            encoder = build_encoder(name, image_size=32, classes=2, **shape)
        depth = len(encoder.blocks)
        theirs = group_parameters(encoder, encoder.group_matcher(coarse=False), reverse=True)
        for key, layer in theirs.items():
            if not key.startswith("norm."):  # which timm counts to the last block, but MAE and BEiT to the head
                assert layer_of(key, depth) == min(layer, depth + 1), key


def test_a_running_average_follows_its_closed_form():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    steps = [[torch.randn_like(p) for p in model.parameters()] for _ in range(6)]
    first = [p.detach().double() for p in model.parameters()]
    average = RunningAverage(model, 0.7)
    for step in steps:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), step, strict=True):
                parameter.copy_(value)
        average.update()
    for place, parameter in enumerate(average.model.parameters()):
        expected = 0.7**6 * first[place] + sum(
            0.3 * 0.7 ** (5 - number) * step[place].double() for number, step in enumerate(steps)
        )
        torch.testing.assert_close(parameter.double(), expected, atol=1e-6, rtol=1e-6)
        assert not parameter.requires_grad


def test_an_average_has_the_buffers_of_its_model():
    model = torch.nn.BatchNorm1d(2)
    average = RunningAverage(model, 0.9)
    model(torch.randn(8, 2) + 3)
    average.update()
    assert torch.equal(average.model.running_mean, model.running_mean)


def test_frozen_parameters_are_left_out():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=2)
    model.patch_embed.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), name="sgd", weight_decay=0.0, betas=(0, 0), momentum=0.9)
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert id(model.patch_embed.proj.weight) not in grouped
