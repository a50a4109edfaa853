"""mpp/positions.py against NumPy, SciPy, timm, and the properties that define each kind."""

import numpy as np
import pytest
import scipy.ndimage
import scipy.special
import torch
from timm.layers import resample_abs_pos_embed

from mpp.encoders import build_encoder
from mpp.positions import Positions, RelativeAttention, resize_line, resize_table, sincos_table


def encoder_with(position, position_at="stem", **changes):
    torch.manual_seed(0)
    shape = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, **changes}
    return build_encoder("vit_tiny_patch16_224", image_size=12, position=position, position_at=position_at, **shape)


def test_two_dimensional_embeddings_are_a_row_and_a_column_side_by_side():
    positions = Positions((2, 3), 1, 8, two_dimensional=True)
    table = positions.table()[0]
    assert table.shape == (7, 8)
    assert torch.equal(table[0], positions.prefix[0, 0])
    for row in range(2):
        for column in range(3):
            expected = torch.cat([positions.rows[0, row], positions.columns[0, column]])
            assert torch.equal(table[1 + 3 * row + column], expected)


@pytest.mark.parametrize(("position", "parameters"), [("learned_1d", 10 * 24), ("learned_2d", 24 + 2 * 3 * 12)])
def test_how_many_parameters_each_place_of_entry_adds(position, parameters):
    def count(**shape):
        return sum(p.numel() for p in encoder_with(**shape).parameters())

    none = count(position="none")
    assert count(position=position) - none == parameters
    assert count(position=position, position_at="every_layer_shared") - none == parameters
    assert count(position=position, position_at="every_layer") - none == 3 * parameters
    assert count(position="relative") - none == 3 * (2 * 10 - 1) * 8
    trained = [name for name, p in encoder_with("sincos_2d").named_parameters() if not p.requires_grad]
    assert trained == ["pos_embed"]


def by_hand(encoder, images, tables):
    """Tokens after the blocks where `tables[i]` is added before block i; timm's parts, called one by one."""
    tokens = encoder.patch_embed(images)
    tokens = torch.cat([encoder.cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
    for block, table in zip(encoder.blocks, tables, strict=True):
        tokens = tokens if table is None else tokens + table
        tokens = tokens + block.attn(block.norm1(tokens))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return encoder.norm(tokens)


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d"])
@pytest.mark.parametrize("position_at", ["stem", "every_layer", "every_layer_shared"])
def test_where_positions_enter(position, position_at):
    encoder = encoder_with(position, position_at).eval()
    if position_at == "every_layer":
        tables = [block.positions.table() for block in encoder.blocks]
        assert not torch.equal(tables[0], tables[1])
    else:
        learned = encoder.pos_embed if (position, position_at) == ("learned_1d", "stem") else encoder.positions.table()
        tables = [learned, *([None] * 2 if position_at == "stem" else [learned] * 2)]
    images = torch.randn(2, 3, 12, 12)
    expected = by_hand(encoder, images, tables)
    torch.testing.assert_close(encoder.forward_features(images), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(encoder.forward_intermediates(images)[0], encoder.forward_features(images))


def test_shared_embeddings_stay_shared_in_a_copy():
    import copy

    encoder = encoder_with("learned_1d", "every_layer_shared").eval()
    other, images = copy.deepcopy(encoder), torch.randn(1, 3, 12, 12)
    before = encoder.forward_features(images)
    with torch.no_grad():
        other.positions.patches.add_(torch.randn_like(other.positions.patches))
    assert torch.equal(encoder.forward_features(images), before)
    assert not torch.allclose(other.forward_features(images), before, atol=1e-2)


def test_relative_attention_in_numpy():
    torch.manual_seed(3)
    attention = RelativeAttention(12, num_heads=3, qkv_bias=True)
    attention.use(5)
    x = torch.randn(2, 5, 12)
    w = {name: value.detach().double().numpy() for name, value in attention.state_dict().items()}
    assert w["relative"].shape == (9, 4)
    qkv = (x.double().numpy() @ w["qkv.weight"].T + w["qkv.bias"]).reshape(2, 5, 3, 3, 4)
    mixed = np.empty((2, 5, 3, 4))
    for image in range(2):
        for head in range(3):
            q, k, v = (qkv[image, :, part, head] for part in range(3))
            logits = np.empty((5, 5))
            for at in range(5):
                for to in range(5):
                    logits[at, to] = q[at] @ k[to] + q[at] @ w["relative"][at - to + 4]
            mixed[image, :, head] = scipy.special.softmax(logits / 2.0, axis=1) @ v
    expected = mixed.reshape(2, 5, 12) @ w["proj.weight"].T + w["proj.bias"]
    np.testing.assert_allclose(attention(x).detach().numpy(), expected, atol=1e-6)


def test_without_positions_the_order_of_patches_does_not_matter_and_with_relative_ones_it_does():
    images = torch.randn(1, 3, 12, 12)
    swapped = torch.cat([images[:, :, 4:8], images[:, :, :4], images[:, :, 8:]], dim=2)
    for position, alike in [("none", True), ("relative", False), ("learned_1d", False), ("sincos_2d", False)]:
        encoder = encoder_with(position).eval()
        ours, theirs = (encoder.forward_features(some)[:, 0] for some in (images, swapped))
        assert torch.allclose(ours, theirs, atol=1e-5) == alike, position


def test_sine_and_cosine_in_numpy():
    table = sincos_table((2, 3), 8)[0].double().numpy()
    frequency = [10_000.0 ** (-i / 1) for i in range(2)]
    for row in range(2):
        for column in range(3):
            expected = [f(at * w) for at in (column, row) for f in (np.sin, np.cos) for w in frequency]
            np.testing.assert_allclose(table[3 * row + column], expected, atol=1e-7)


def test_fixed_positions_leave_the_class_token_alone():
    encoder = encoder_with("sincos_2d")
    assert torch.equal(encoder.pos_embed[:, :1], torch.zeros(1, 1, 24))
    assert torch.equal(encoder.pos_embed[:, 1:], sincos_table((3, 3), 24))
    assert torch.equal(encoder_with("sincos_2d", pool="gap").pos_embed, sincos_table((3, 3), 24))


@pytest.mark.parametrize("new", [(5, 5), (2, 2), (7, 3)])
def test_tables_resize_as_scipy_zoom(new):
    old = torch.randn(1, 1 + 16, 6)
    found = resize_table(old, 1, new)
    grid = old[0, 1:].reshape(4, 4, 6).double().numpy()
    expected = scipy.ndimage.zoom(grid, (new[0] / 4, new[1] / 4, 1), order=1)
    assert expected.shape == (*new, 6)
    np.testing.assert_allclose(found[0, 1:].numpy(), expected.reshape(-1, 6), atol=1e-5)
    assert torch.equal(found[:, :1], old[:, :1])


@pytest.mark.parametrize("way", ["bilinear", "bicubic"])
def test_tables_resize_as_timm(way):
    old = torch.randn(1, 1 + 16, 6)
    expected = resample_abs_pos_embed(old, [7, 7], [4, 4], num_prefix_tokens=1, interpolation=way)
    assert torch.equal(resize_table(old, 1, (7, 7), way), expected)
    assert not torch.allclose(resize_table(old, 1, (7, 7)), expected, atol=1e-2)


@pytest.mark.parametrize("way", ["bilinear_corners", "bilinear", "bicubic"])
def test_tables_that_fit_are_left_alone(way):
    old = torch.randn(1, 17, 6)
    assert resize_table(old, 1, (4, 4), way) is old
    flat = torch.ones(1, 17, 6)
    torch.testing.assert_close(resize_table(flat, 1, (9, 9), way), torch.ones(1, 82, 6))


def test_rows_and_columns_resize_as_the_table_that_they_make():
    small = Positions((4, 4), 1, 12, two_dimensional=True)
    large = Positions((7, 7), 1, 12, two_dimensional=True)
    with torch.no_grad():
        large.prefix.copy_(small.prefix)
        large.rows.copy_(resize_line(small.rows, 7))
        large.columns.copy_(resize_line(small.columns, 7))
    torch.testing.assert_close(large.table(), resize_table(small.table(), 1, (7, 7)), atol=1e-6, rtol=1e-6)
