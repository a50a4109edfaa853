"""mpp/model.py against timm, SciPy, and a whole forward pass in NumPy."""

import math

import numpy as np
import pytest
import scipy.special
import timm
import torch

from mpp.corruption import KEEP, MASK, RANDOM
from mpp.encoders import build_encoder
from mpp.errors import UserError
from mpp.model import Classifier, MaskedPatchModel, encoder_of, load_encoder, represent
from mpp.positions import resize_line, resize_table, sincos_table


def tiny_encoder(image_size=16, classes=0, **changes):
    torch.manual_seed(0)
    shape = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, **changes}
    return build_encoder("vit_tiny_patch16_224", image_size=image_size, classes=classes, **shape)


def plan(positions, actions, donors):
    return tuple(torch.tensor(part) for part in (positions, actions, donors))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_with_nothing_corrupted_it_is_timms_forward_features_bit_for_bit(dropout):
    model = MaskedPatchModel(tiny_encoder(dropout=dropout), 512)
    images = torch.randn(3, 3, 16, 16)
    kept = plan([[0, 5, 9]] * 3, [[KEEP] * 3] * 3, [[1, 2, 3]] * 3)
    torch.manual_seed(1)
    ours = model.encode(images, *kept)
    torch.manual_seed(1)
    assert torch.equal(ours, model.encoder.forward_features(images))


def norm(x, layer):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * layer["weight"] + layer["bias"]


def in_numpy(weights, image, positions, actions, donors, heads):
    """Logits at the corrupted patches of one image [channel, height, width], from equations 1 to 4 of the paper."""
    w = {name: value.detach().double().numpy() for name, value in weights.items()}

    def layer(name):
        return {"weight": w[f"encoder.{name}.weight"], "bias": w[f"encoder.{name}.bias"]}

    kernel = layer("patch_embed.proj")
    width, _, p, _ = kernel["weight"].shape
    side = image.shape[1] // p
    patches = [image[:, r * p : r * p + p, c * p : c * p + p].ravel() for r in range(side) for c in range(side)]
    embeddings = np.stack(patches) @ kernel["weight"].reshape(width, -1).T + kernel["bias"]
    tokens = embeddings.copy()
    for position, action, donor in zip(positions, actions, donors, strict=True):
        if action == MASK:
            tokens[position] = w["mask_embedding"]
        elif action == RANDOM:
            tokens[position] = embeddings[donor]
    z = np.concatenate([w["encoder.cls_token"][0], tokens]) + w["encoder.pos_embed"][0]
    block = 0
    while f"encoder.blocks.{block}.norm1.weight" in w:
        at = f"blocks.{block}."
        x = norm(z, layer(at + "norm1"))
        qkv = x @ layer(at + "attn.qkv")["weight"].T + layer(at + "attn.qkv")["bias"]
        q, k, v = (part.reshape(len(z), heads, -1).transpose(1, 0, 2) for part in np.split(qkv, 3, axis=1))
        attention = scipy.special.softmax(q @ k.transpose(0, 2, 1) / math.sqrt(width / heads), axis=-1)
        mixed = (attention @ v).transpose(1, 0, 2).reshape(len(z), width)
        z = z + mixed @ layer(at + "attn.proj")["weight"].T + layer(at + "attn.proj")["bias"]
        x = norm(z, layer(at + "norm2")) @ layer(at + "mlp.fc1")["weight"].T + layer(at + "mlp.fc1")["bias"]
        x = x * 0.5 * (1 + scipy.special.erf(x / math.sqrt(2)))
        z = z + x @ layer(at + "mlp.fc2")["weight"].T + layer(at + "mlp.fc2")["bias"]
        block += 1
    z = norm(z, layer("norm"))
    return z[[1 + position for position in positions]] @ w["head.weight"].T + w["head.bias"]


def test_a_whole_forward_pass_and_loss_against_numpy():
    model = MaskedPatchModel(tiny_encoder(), 512)
    with torch.no_grad():  # nothing may hide behind a zero
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    images = torch.randn(2, 3, 16, 16)
    positions = [[0, 3, 6, 15], [1, 2, 8, 9]]
    actions = [[MASK, RANDOM, KEEP, MASK], [RANDOM, RANDOM, MASK, KEEP]]
    donors = [[2, 0, 5, 7], [2, 15, 3, 4]]
    logits = model(images, *plan(positions, actions, donors))
    expected = np.stack(
        [
            in_numpy(
                model.state_dict(), images[row].double().numpy(), positions[row], actions[row], donors[row], heads=3
            )
            for row in range(2)
        ]
    )
    np.testing.assert_allclose(logits.detach().numpy(), expected, atol=2e-5)
    targets = np.array([[3, 511, 0, 9], [7, 7, 400, 21]])
    log_softmax = expected - scipy.special.logsumexp(expected, axis=-1, keepdims=True)
    loss = -np.take_along_axis(log_softmax, targets[..., None], -1).mean()
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
    assert math.isclose(ours.item(), loss, rel_tol=1e-5)


def test_all_masked_without_positions_is_the_same_everywhere_and_with_them_it_is_not():
    model = MaskedPatchModel(tiny_encoder(), 8)
    torch.nn.init.normal_(model.head.weight)
    everything = plan([list(range(16))], [[MASK] * 16], [[(i + 1) % 16 for i in range(16)]])
    images = torch.randn(1, 3, 16, 16)
    differ = model(images, *everything)[0]
    assert differ.std(0).max() > 1e-3
    torch.nn.init.zeros_(model.encoder.pos_embed)
    alike = model(images, *everything)[0]
    assert torch.allclose(alike, alike[:1].expand_as(alike), atol=1e-6)


@pytest.mark.parametrize(
    ("patch", "image", "width", "heads"), [(8, 96, 192, 3), (14, 224, 192, 3), (16, 96, 320, 5), (32, 224, 192, 3)]
)
def test_any_patch_width_and_image(patch, image, width, heads):
    encoder = tiny_encoder(image, patch_size=patch, embed_dim=width, num_heads=heads, depth=1)
    model = MaskedPatchModel(encoder, 512)
    count = (image // patch) ** 2
    half = count // 2
    parts = plan([list(range(half))], [[MASK] * half], [[count - 1] * half])
    model(torch.randn(1, 3, image, image), *parts).sum().backward()
    assert model.mask_embedding.grad.shape == (width,)


def test_heads_and_mask_start_as_in_the_paper():
    encoder = tiny_encoder(classes=7)
    assert encoder.head.weight.abs().sum() == 0 and encoder.head.bias.abs().sum() == 0
    model = MaskedPatchModel(tiny_encoder(embed_dim=768, num_heads=3), 512)
    assert model.head.weight.abs().sum() == 0
    assert 0.018 < model.mask_embedding.std() < 0.022


def test_loading_keeps_the_new_head_and_drops_the_old():
    old, new = tiny_encoder(classes=5), tiny_encoder(image_size=24, classes=5)
    torch.nn.init.normal_(old.head.weight)
    loaded = load_encoder(new, old.state_dict(), "there")
    assert loaded.dropped == ["head.weight", "head.bias"]
    assert loaded.resized == (4, 6)
    assert new.head.weight.abs().sum() == 0
    assert torch.equal(new.blocks[1].mlp.fc1.weight, old.blocks[1].mlp.fc1.weight)
    assert torch.equal(new.pos_embed, resize_table(old.pos_embed, 1, (6, 6)))


@pytest.mark.parametrize("way", ["bilinear_corners", "bilinear", "bicubic"])
def test_loading_resizes_in_the_way_that_is_asked_for(way):
    old, new = tiny_encoder(), tiny_encoder(image_size=24)
    load_encoder(new, old.state_dict(), "there", way)
    assert torch.equal(new.pos_embed, resize_table(old.pos_embed, 1, (6, 6), way))


@pytest.mark.parametrize("position_at", ["stem", "every_layer", "every_layer_shared"])
@pytest.mark.parametrize("position", ["learned_1d", "learned_2d"])
def test_every_kind_of_positions_comes_to_another_grid(position, position_at):
    old, new = (tiny_encoder(size, position=position, position_at=position_at) for size in (16, 24))
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert load_encoder(new, old.state_dict(), "there").resized == (4, 6)
    there = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        kind = name.split(".")[-1]
        if kind in ("rows", "columns"):
            expected = resize_line(there[name], 6)
        elif kind in ("patches", "pos_embed"):
            expected = resize_table(there[name], 1 if kind == "pos_embed" else 0, (6, 6))
        else:
            expected = there[name]
        assert torch.equal(parameter, expected), name


def test_fixed_positions_are_computed_for_the_new_grid():
    old, new = tiny_encoder(position="sincos_2d"), tiny_encoder(24, position="sincos_2d")
    assert load_encoder(new, old.state_dict(), "there").resized == (4, 6)
    assert torch.equal(new.pos_embed[:, 1:], sincos_table((6, 6), 24))


@pytest.mark.parametrize("image_size", [16, 24])
def test_learned_positions_do_not_become_fixed_ones(image_size):
    with pytest.raises(UserError, match=r"pos_embed: learned there|shape of pos_embed"):
        load_encoder(tiny_encoder(image_size, position="sincos_2d"), tiny_encoder().state_dict(), "there")
    same = tiny_encoder(position="sincos_2d")
    assert load_encoder(tiny_encoder(position="sincos_2d"), same.state_dict(), "there").resized is None


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ({}, {"pool": "gap"}, "the weights have a class token: use model.pool=token, or patches"),
        ({"pool": "gap"}, {}, "the weights have no class token: use model.pool=gap"),
        ({"position": "relative"}, {"position": "relative", "image_size": 24}, "keep image size, patch size and pool"),
        ({"position": "learned_2d"}, {}, "unexpected: positions.rows"),
    ],
)
def test_what_a_misfit_means(there, here, words):
    with pytest.raises(UserError) as refusal:
        load_encoder(tiny_encoder(**here), tiny_encoder(**there).state_dict(), "runs/other")
    assert words in str(refusal.value)


def test_patches_are_pooled_from_weights_with_a_class_token():
    old, new = tiny_encoder(), tiny_encoder(pool="patches", classes=2)
    load_encoder(new, old.state_dict(), "there")
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(new.forward_features(images), old.forward_features(images))


def test_the_pretraining_head_has_one_tanh_layer():
    torch.manual_seed(1)
    model = Classifier(tiny_encoder(), 5, bias=-10.0).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(images), torch.full((2, 5), -10.0))  # zero kernel
    torch.nn.init.normal_(model.head.weight)
    y = model.encoder.forward_features(images)[:, 0].detach().double().numpy()
    w = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    hidden = np.tanh(y @ w["pre_logits.weight"].T + w["pre_logits.bias"])
    np.testing.assert_allclose(model(images).detach().numpy(), hidden @ w["head.weight"].T - 10.0, atol=1e-5)
    assert encoder_of(model) is model.encoder


def unlike(encoder):
    """With weights that hide nothing behind a zero or a one."""
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder.eval()


def test_a_model_is_represented_by_what_its_last_layer_reads_and_masked_prediction_by_its_patches():
    encoder = unlike(tiny_encoder())
    images = torch.randn(3, 3, 16, 16)
    classifier = unlike(Classifier(encoder, 5))
    torch.testing.assert_close(classifier.head(represent(classifier, images)), classifier(images))
    tokens = encoder.forward_features(images)
    assert torch.equal(represent(encoder, images), tokens[:, 0])
    pooled = unlike(tiny_encoder(pool="patches"))
    assert torch.equal(represent(pooled, images), pooled.forward_features(images)[:, 1:].mean(1))
    masked = MaskedPatchModel(encoder, 512)
    assert torch.equal(represent(masked, images), tokens[:, 1:].mean(1))
    for model in (encoder, classifier, masked):
        assert torch.equal(represent(model, images, "token"), tokens[:, 0])
        assert torch.equal(represent(model, images, "patches"), tokens[:, 1:].mean(1))


KINDS = (None, "token", "patches")
HYBRID = {"name": "vit_tiny_r26_s32_224", "patch_size": None, "layers": (1, 1, 1, 1), "width_factor": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool": "patches"},
        {"pool": "gap"},
        {"position": "learned_2d"},
        {"position_at": "every_layer"},
        {"position_at": "every_layer_shared"},
        {"position": "relative"},
        {"position": "sincos_2d"},
        HYBRID,
    ],
)
def test_tokens_of_a_block_are_timms_with_the_final_norm(changes):
    torch.manual_seed(0)
    shape = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, **changes}
    name = shape.pop("name", "vit_tiny_patch16_224")
    encoder = unlike(build_encoder(name, image_size=32, **shape))
    images = torch.randn(2, 3, 32, 32)
    prefix = encoder.num_prefix_tokens
    found = encoder.forward_intermediates(
        images, output_fmt="NLC", norm=True, return_prefix_tokens=True, intermediates_only=True
    )
    seen = []
    for block, parts in enumerate(found, start=1):
        patches, tokens = parts if prefix else (parts, None)
        assert torch.equal(represent(encoder, images, "patches", block), patches.mean(1))
        usual = patches.mean(1) if changes.get("pool") else tokens[:, 0]
        assert torch.equal(represent(encoder, images, block=block), usual)
        if prefix:
            assert torch.equal(represent(encoder, images, "token", block), tokens[:, 0])
        seen.append(represent(encoder, images, block=block))
    assert len(seen) == 3 and not any(torch.allclose(seen[2], earlier, atol=1e-2) for earlier in seen[:2])
    for kind in KINDS if prefix else (None, "patches"):
        assert torch.equal(represent(encoder, images, kind, 3), represent(encoder, images, kind))


def test_an_earlier_block_of_a_classifier_passes_through_its_hidden_layer_as_the_last_does():
    model = unlike(Classifier(tiny_encoder(), 5))
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(represent(model, images, block=2), represent(model, images))
    earlier = model.encoder.forward_intermediates(
        images, [0], output_fmt="NLC", norm=True, return_prefix_tokens=True, intermediates_only=True
    )[0][1][:, 0]
    assert torch.equal(represent(model, images, block=1), torch.tanh(model.pre_logits(earlier)))
    assert torch.equal(represent(MaskedPatchModel(model.encoder, 8), images, "token", 1), earlier)


def test_a_norm_that_stands_after_pooling_is_applied():
    torch.manual_seed(0)
    encoder = unlike(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, global_pool="avg"))
    images = torch.randn(2, 3, 32, 32)
    tokens = encoder.forward_features(images)  # timm leaves them as the last block gives them
    expected = norm(
        tokens[:, 1:].mean(1).detach().numpy(), {k: v.detach().numpy() for k, v in encoder.fc_norm.named_parameters()}
    )
    np.testing.assert_allclose(represent(encoder, images, "patches").detach().numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(represent(encoder, images).detach().numpy(), expected, atol=1e-4)
    assert torch.equal(represent(encoder, images, "token"), encoder.fc_norm(tokens[:, 0]))


def test_a_norm_that_stands_before_the_blocks_is_applied():
    torch.manual_seed(0)
    encoder = unlike(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, pre_norm=True))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(represent(encoder, images, "token"), encoder.forward_features(images)[:, 0])


def test_a_resnet_has_the_mean_of_its_map_and_neither_class_token_nor_blocks():
    torch.manual_seed(0)
    resnet = unlike(build_encoder("resnetv2_26x1_bit", image_size=64, layers=(1, 1, 1, 1), width_factor=0.5))
    images = torch.randn(2, 3, 64, 64)
    cells = resnet.forward_features(images)
    assert cells.shape[2:] == (2, 2)
    for model in (resnet, Classifier(resnet, 3)):
        torch.testing.assert_close(represent(model, images, "patches"), cells.mean((2, 3)))
        with pytest.raises(UserError, match="features=token: this encoder has no class token; use patches, or null"):
            represent(model, images, "token")
        with pytest.raises(UserError, match="block=1: a ResNet has no such blocks; use null"):
            represent(model, images, block=1)
    torch.testing.assert_close(represent(resnet, images), cells.mean((2, 3)))
    classifier = unlike(Classifier(resnet, 3))
    torch.testing.assert_close(classifier.head(represent(classifier, images)), classifier(images))


def test_features_that_a_model_does_not_have_are_refused():
    images = torch.randn(1, 3, 16, 16)
    with pytest.raises(UserError, match="no class token; use patches, or null"):
        represent(tiny_encoder(pool="gap"), images, "token")
    for block in (-1, 0, 3):
        with pytest.raises(UserError, match=f"block={block}: the encoder has blocks 1 to 2; use one of them, or null"):
            represent(tiny_encoder(), images, block=block)


@pytest.mark.parametrize(
    ("name", "image_size", "classes", "expected"),  # paper-scale models with the head of ImageNet-21k
    [
        ("vit_base_patch16_224", 224, 21_843, 103_186_515),
        ("vit_large_patch32_224", 224, 21_843, 328_949_075),
        ("vit_huge_patch14_224", 224, 21_843, 660_385_363),
    ],
)
def test_parameters_with_the_pretraining_head(name, image_size, classes, expected):
    with torch.device("meta"):
        model = Classifier(build_encoder(name, image_size=image_size), classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_every_name_that_does_not_fit_is_listed_and_nothing_is_loaded():
    new = tiny_encoder()
    before = {name: value.clone() for name, value in new.state_dict().items()}
    weights = {name: value + 1 for name, value in tiny_encoder(depth=3).state_dict().items()}
    del weights["norm.bias"]
    weights["cls_token"] = torch.zeros(1, 1, 5)
    with pytest.raises(UserError) as refusal:
        load_encoder(new, weights, "runs/other")
    message = str(refusal.value)
    assert message.startswith("init=runs/other does not fit the model of this recipe; nothing was loaded")
    assert "missing: norm.bias" in message
    assert "shape of cls_token: [1, 1, 5] there, [1, 1, 24] in the model" in message
    assert all(f"unexpected: {name}" in message for name in weights if name.startswith("blocks.2."))
    assert all(torch.equal(before[name], value) for name, value in new.state_dict().items())


def test_the_private_names_of_timm_that_are_used_exist():
    encoder = timm.create_model("vit_tiny_patch16_224", depth=1)
    for name in ("patch_embed", "_pos_embed", "patch_drop", "norm_pre", "blocks", "norm", "num_prefix_tokens"):
        assert hasattr(encoder, name)
