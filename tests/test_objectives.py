"""mpp/objectives.py: what enters the loss, and what is counted beside it."""

import math

import numpy as np
import pytest
import torch

from mpp.corruption import KEEP, MASK, RANDOM
from mpp.encoders import build_encoder
from mpp.metrics import Tally
from mpp.model import Classifier
from mpp.objectives import MaskedPatchPrediction, Supervised
from mpp.targets import TARGETS

HALF = (0.5, 0.5, 0.5)


def tiny(classes=0):
    torch.manual_seed(0)
    return build_encoder(
        "vit_tiny_patch16_224", image_size=16, classes=classes, patch_size=4, embed_dim=24, depth=1, num_heads=3
    )


def mpp(target="mean_color", corruption=0.5):
    return MaskedPatchPrediction(0, 4, 16, corruption, target, HALF, HALF)


def batch_of(objective, count=4):
    plans = [objective.per_sample(0, index) for index in range(count)]
    batch = {key: torch.from_numpy(np.stack([plan[key] for plan in plans])) for key in plans[0]}
    batch["images"] = torch.randint(0, 256, (count, 16, 16, 3), dtype=torch.uint8)
    return batch


def trained(objective):
    model = objective.build(tiny())
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model


def test_the_first_loss_is_exactly_ln_512():
    objective = mpp()
    loss, counts = objective.loss(objective.build(tiny()), batch_of(objective))
    assert math.isclose(loss.item(), math.log(512), rel_tol=1e-6)
    assert counts["loss"][1] == 4 * 8


@pytest.mark.parametrize("target", ["mean_color", "colors_4x4", "pixels"])
def test_only_corrupted_patches_enter_the_loss(target):
    objective = mpp(target)
    model = trained(objective).eval()
    batch = batch_of(objective, 1)
    chosen = batch["positions"][0].tolist()
    untouched = next(patch for patch in range(16) if patch not in chosen and patch not in batch["donors"][0].tolist())

    # The encoder's input is held fixed, so that only the target of one patch changes.
    class Frozen(torch.nn.Module):
        def forward(self, images, *plan):
            return prediction

    prediction = model(torch.zeros(1, 3, 16, 16), batch["positions"], batch["actions"], batch["donors"]).detach()

    def loss_with(patch):
        images = batch["images"].clone()
        row, column = divmod(patch, 4)
        images[0, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] ^= 255
        return objective.loss(Frozen(), {**batch, "images": images})[0].item()

    before = objective.loss(Frozen(), batch)[0].item()
    assert loss_with(untouched) == before
    for patch in chosen:  # kept ones too
        assert loss_with(patch) != before


def test_gradient_reaches_the_mask_embedding_and_the_encoder():
    objective = mpp()
    model = trained(objective)
    objective.loss(model, batch_of(objective))[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.mask_embedding.grad.abs().sum() > 0
    assert model.encoder.patch_embed.proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("target", ["mean_color", "pixels"])
def test_no_gradient_passes_through_the_targets(target):
    # Were the target a function of the model, the loss of a constant prediction would have a gradient.
    objective = mpp(target)
    batch = batch_of(objective)
    constant = torch.zeros(4, 8, TARGETS[target].outputs(4), requires_grad=True)
    model = trained(objective)

    class Constant(torch.nn.Module):
        def forward(self, images, *plan):
            model(images, *plan)  # it is run, but its result is not used
            return constant

    objective.loss(Constant(), batch)[0].backward()
    assert constant.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_file_of_the_head_says_what_its_outputs_are():
    assert mpp().note == {
        "target": "mean_color",
        "outputs": "class = 64 R + 8 G + B, each the top 3 bits of the mean",
        "corruption": "0.5",
    }
    assert mpp("pixels").note["outputs"] == "row, column, channel"


def test_accuracy_apart_for_each_action_by_hand():
    objective = mpp()
    batch = batch_of(objective, 1)
    batch["images"] = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)  # every target is class 0
    batch["actions"] = torch.tensor([[MASK, MASK, MASK, RANDOM, RANDOM, KEEP, MASK, KEEP]])
    right = torch.tensor([1, 1, 0, 1, 0, 0, 0, 1]).bool()

    class Fixed(torch.nn.Module):
        def forward(self, images, *plan):
            logits = torch.zeros(1, 8, 512)
            logits[0, right, 0] = 1.0
            logits[0, ~right, 5] = 1.0
            return logits

    tally = Tally()
    tally.add(objective.measure(Fixed(), batch))
    found = objective.summary(tally.total(lambda x: x))
    assert found["accuracy"] == 4 / 8
    assert (found["accuracy_masked"], found["accuracy_random"], found["accuracy_kept"]) == (2 / 4, 1 / 2, 1 / 2)
    assert found["nearest_patch_accuracy_masked"] == 1.0
    assert (found["target_entropy"], found["target_classes"], found["most_frequent_accuracy"]) == (0.0, 1, 1.0)


def test_eight_grey_levels_are_at_least_eight_targets():
    objective = mpp()
    batch = batch_of(objective, 64)
    levels = torch.arange(64) % 8 * 32 + 16
    batch["images"] = levels.to(torch.uint8)[:, None, None, None].expand(64, 16, 16, 3).contiguous()
    tally = Tally()
    tally.add(objective.loss(objective.build(tiny()), batch)[1])
    found = objective.summary(tally.total(lambda x: x))
    assert found["target_classes"] == 8
    assert math.isclose(found["target_entropy"], math.log(8))


def test_held_out_plans_stay_the_same_over_epochs_and_seeds():
    first = mpp().per_held_out_sample(0, 7)
    other = MaskedPatchPrediction(5, 4, 16, 0.5, "mean_color", HALF, HALF).per_held_out_sample(3, 7)
    assert all(np.array_equal(first[key], other[key]) for key in first)
    assert not np.array_equal(first["positions"], mpp().per_sample(0, 7)["positions"])


def test_targets_come_from_uint8_under_bf16_too():
    objective = mpp()
    model, batch = objective.build(tiny()), batch_of(objective)
    _, full = objective.loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        _, half = objective.loss(model, batch)
    assert torch.equal(full["colors"], half["colors"])


def test_supervised_loss_against_numpy_and_top_k():
    objective = Supervised(7, HALF, HALF, label_smoothing=0.1)
    model = objective.build(tiny(7))
    torch.nn.init.normal_(model.head.weight)
    labels = torch.tensor([0, 6, 3])
    batch = {"images": torch.randint(0, 256, (3, 16, 16, 3), dtype=torch.uint8), "labels": labels}
    loss, counts = objective.loss(model, batch)
    logits = model((batch["images"].permute(0, 3, 1, 2).float() - 127.5) / 127.5).detach().double().numpy()
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    smooth = 0.9 * np.eye(7)[labels] + 0.1 / 7
    assert math.isclose(loss.item(), -(smooth * log_p).sum(1).mean(), rel_tol=1e-5)
    ranks = (logits > logits[np.arange(3), labels][:, None]).sum(1)
    assert counts["accuracy"].tolist() == [(ranks < 1).sum(), 3]
    assert counts["top_5_accuracy"].tolist() == [(ranks < 5).sum(), 3]


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_few_classes_have_no_top_5(classes):
    objective = Supervised(classes, HALF, HALF)
    batch = {"images": torch.zeros(2, 16, 16, 3, dtype=torch.uint8), "labels": torch.tensor([0, 1])}
    assert set(objective.loss(objective.build(tiny(classes)), batch)[1]) == {"loss", "accuracy"}


def photos(count):
    torch.manual_seed(4)
    return torch.randint(0, 256, (count, 16, 16, 3), dtype=torch.uint8)


def logits_of(model, images):
    return model((images.permute(0, 3, 1, 2).float() - 127.5) / 127.5).detach().double().numpy()


def with_random_head(objective, classes):
    model = objective.build(tiny(classes))
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def sigmoid_cost(logits, targets):
    """-sum_k [t log sigma(z) + (1 - t) log sigma(-z)], from the definition."""
    return -(targets * -np.log1p(np.exp(-logits)) + (1 - targets) * -np.log1p(np.exp(logits))).sum(1)


def test_sigmoid_loss_against_numpy_with_one_and_with_several_labels():
    objective = Supervised(7, HALF, HALF, kind="sigmoid", label_smoothing=0.01)
    model = with_random_head(objective, 7)
    images = photos(3)
    logits = logits_of(model, images)
    several = torch.tensor([[0, 5], [6, -1], [-1, -1]])
    for labels, truth in [
        (torch.tensor([0, 6, 3]), np.eye(7)[[0, 6, 3]]),
        (several, np.array([[1, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1], [0] * 7])),
    ]:
        loss, counts = objective.loss(model, {"images": images, "labels": labels})
        costs = sigmoid_cost(logits, np.where(truth == 1, 0.99, 0.01))
        assert math.isclose(loss.item(), costs.mean(), rel_tol=1e-5)
        assert counts["loss"].tolist() == pytest.approx([costs.sum(), 3], rel=1e-5)
    best = logits.argmax(1)
    hits = sum(best[row] in set(several[row].tolist()) for row in range(2))
    assert counts["accuracy"].tolist() == [hits, 2]  # the image without a label is left out


def test_the_first_sigmoid_loss_is_that_of_the_bias():
    objective = Supervised(1000, HALF, HALF, kind="sigmoid", head="mlp", head_bias=-6.9)
    model = objective.build(tiny())
    assert isinstance(model, Classifier)
    loss, _ = objective.loss(model, {"images": photos(2), "labels": torch.tensor([1, 999])})
    p = 1 / (1 + math.exp(6.9))
    assert math.isclose(loss.item(), -math.log(p) - 999 * math.log(1 - p), rel_tol=1e-4)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_mixed_images_and_targets_against_numpy(kind):
    objective = Supervised(4, HALF, HALF, kind=kind, label_smoothing=0.1, mixup=0.8, image_size=16)
    model = with_random_head(objective, 4)
    images, labels = photos(4), torch.tensor([0, 3, 1, 1])
    share = np.array([0.25, 0.5, 1.0, 0.75])
    batch = {
        "images": images,
        "labels": labels,
        "mix_share": torch.tensor(share, dtype=torch.float32),
        "mix_box": torch.zeros(4, 4, dtype=torch.int64),
    }
    loss, counts = objective.loss(model, batch)
    x = (images.permute(0, 3, 1, 2).double().numpy() - 127.5) / 127.5
    partner = [1, 0, 3, 2]
    blended = share[:, None, None, None] * x + (1 - share)[:, None, None, None] * x[partner]
    logits = model(torch.from_numpy(blended).float()).detach().double().numpy()
    one_hot = np.eye(4)[labels]
    targets = share[:, None] * one_hot + (1 - share)[:, None] * one_hot[partner]
    if kind == "softmax":
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        expected = -((0.9 * targets + 0.1 / 4) * log_p).sum(1).mean()
    else:
        expected = sigmoid_cost(logits, targets * 0.8 + 0.1).mean()
    assert math.isclose(loss.item(), expected, rel_tol=1e-4)
    assert set(counts) == {"loss"}


def test_only_training_samples_are_mixed():
    objective = Supervised(4, HALF, HALF, mixup=0.8, cutmix=1.0, seed=3, image_size=16)
    assert set(objective.per_sample(0, 5)) == {"mix_share", "mix_box"}
    assert objective.per_held_out_sample(0, 5) == {}
    assert Supervised(4, HALF, HALF).per_sample(0, 5) == {}


@pytest.mark.parametrize(("kind", "shape"), [("softmax", (0,)), ("sigmoid", (0,)), ("sigmoid", (0, 3))])
def test_a_process_without_images_has_counts_of_nothing(kind, shape):
    objective = Supervised(7, HALF, HALF, kind=kind)
    model = with_random_head(objective, 7)
    none = {"images": photos(1)[:0], "labels": torch.zeros(shape, dtype=torch.int64)}
    some = {"images": photos(1), "labels": torch.zeros((1, *shape[1:]), dtype=torch.int64)}
    counts = objective.measure(model, none)
    assert counts.keys() == objective.measure(model, some).keys()
    assert all(pair.tolist() == [0, 0] for pair in counts.values())
