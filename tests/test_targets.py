"""mpp/targets.py against plain Python integers, and values worked out by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mpp.errors import UserError
from mpp.targets import TARGETS, bin_colors, color_bins, nearest_color_bins, patch_pixels


def solid(color, side=16):
    return torch.tensor(color, dtype=torch.uint8).expand(1, side, side, 3)


def by_hand(image, patch, cells=1):
    """Class of every cell of every patch, in Python integers."""
    side, cell = image.shape[0] // patch, patch // cells
    found = []
    for row in range(side):
        for column in range(side):
            inside = []
            for u in range(cells):
                for v in range(cells):
                    top, left = row * patch + u * cell, column * patch + v * cell
                    packed = 0
                    for channel in range(3):
                        total = sum(
                            int(image[y, x, channel]) for y in range(top, top + cell) for x in range(left, left + cell)
                        )
                        packed = packed * 8 + min(total // (32 * cell * cell), 7)
                    inside.append(packed)
            found.append(inside)
    return found


@pytest.mark.parametrize(
    ("color", "expected"),
    [
        ((0, 0, 0), 0),
        ((255, 255, 255), 511),
        ((255, 0, 0), 448),
        ((0, 255, 0), 56),
        ((0, 0, 255), 7),
        ((32, 64, 96), 64 + 16 + 3),
    ],
)
def test_solid_colors(color, expected):
    assert color_bins(solid(color), 16).tolist() == [[[expected]]]


@pytest.mark.parametrize("edge", range(32, 256, 32))
def test_a_mean_just_below_an_edge_stays_below(edge):
    image = torch.full((1, 16, 16, 3), edge, dtype=torch.uint8)
    assert color_bins(image, 16).item() == 73 * (edge // 32)
    image[0, 3, 5] = edge - 1  # the mean is now edge - 1/256, which float16 can't tell from the edge
    assert color_bins(image, 16).item() == 73 * (edge // 32 - 1)


def test_all_512_colors_give_512_classes():
    levels = torch.arange(16, 256, 32)
    colors = torch.cartesian_prod(levels, levels, levels).to(torch.uint8)
    images = colors[:, None, None, :].expand(512, 8, 8, 3)
    assert color_bins(images, 8).flatten().tolist() == list(range(512))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    patch=st.sampled_from([4, 8, 12]),
    side=st.integers(1, 3),
    cells=st.sampled_from([1, 2, 4]),
)
def test_classes_equal_python_integers(seed, patch, side, cells):
    image = np.random.default_rng(seed).integers(0, 256, (side * patch, side * patch, 3), dtype=np.uint8)
    assert color_bins(torch.from_numpy(image)[None], patch, cells)[0].tolist() == by_hand(image, patch, cells)


def test_autocast_and_device_precision_change_nothing():
    images = torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(color_bins(images, 8), torch.tensor([by_hand(image.numpy(), 8) for image in images]))


def test_normalized_pixels_are_refused():
    with pytest.raises(TypeError, match="uint8"):
        color_bins(torch.rand(1, 16, 16, 3), 16)
    with pytest.raises(TypeError, match="uint8"):
        patch_pixels(torch.rand(1, 16, 16, 3), 16)


def test_4x4_colors_need_a_patch_that_4_divides():
    with pytest.raises(UserError, match="patch size that 4 divides, not 14"):
        color_bins(solid((0, 0, 0), 28), 14, cells=4)


def test_bin_colors_lie_in_the_middle_of_their_bin():
    bins = torch.arange(512)
    colors = bin_colors(bins)
    assert torch.equal(color_bins(colors[:, None, None, :].expand(512, 4, 4, 3), 4).flatten(), bins)
    assert colors[0].tolist() == [16, 16, 16]
    assert colors[511].tolist() == [240, 240, 240]


def test_pixels_are_in_minus_one_to_one():
    image = torch.tensor([0, 255, 51], dtype=torch.uint8).expand(1, 4, 4, 3)
    expected = torch.tensor([-1.0, 1.0, 51 / 127.5 - 1]).repeat(4)
    assert torch.allclose(patch_pixels(image, 2)[0, 3], expected)


def nearest_by_hand(image, positions, patch):
    """Mean colour over the nearest uncorrupted patches, looked for one by one."""
    side = image.shape[0] // patch
    found = []
    for position in positions:
        row, column = divmod(position, side)
        distance = {
            other: (other // side - row) ** 2 + (other % side - column) ** 2
            for other in range(side * side)
            if other not in positions
        }
        nearest = [other for other in distance if distance[other] == min(distance.values())]
        packed = 0
        for channel in range(3):
            total = sum(
                int(v)
                for other in nearest
                for v in image[
                    other // side * patch : other // side * patch + patch,
                    other % side * patch : other % side * patch + patch,
                    channel,
                ].ravel()
            )
            packed = packed * 8 + total // (32 * patch * patch * len(nearest))
        found.append(packed)
    return found


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), side=st.integers(2, 4))
def test_nearest_patch_baseline_equals_a_search_by_hand(seed, side):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (side * 4, side * 4, 3), dtype=np.uint8)
    positions = np.sort(rng.permutation(side * side)[: side * side // 2])
    found = nearest_color_bins(torch.from_numpy(image)[None], torch.from_numpy(positions)[None], 4)
    assert found[0].tolist() == nearest_by_hand(image, positions.tolist(), 4)


def test_nearest_patch_baseline_without_any_uncorrupted_patch():
    found = nearest_color_bins(solid((200, 200, 200), 8), torch.arange(4)[None], 4)
    assert found.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "shape", "outputs"), [("mean_color", (1,), 512), ("colors_4x4", (16,), 8192), ("pixels", (192,), 192)]
)
def test_each_kind_has_its_shapes(name, shape, outputs):
    kind = TARGETS[name]
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    assert kind.of_patches(images, 8).shape == (2, 4, *shape)
    assert kind.outputs(8) == outputs


def test_costs_against_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 16 * 512)).astype(np.float32)
    bins = rng.integers(0, 512, (2, 3, 16))
    rows = logits.reshape(2, 3, 16, 512).astype(np.float64)
    log_sum = np.log(np.exp(rows).sum(-1))
    expected = (log_sum - np.take_along_axis(rows, bins[..., None], -1)[..., 0]).mean(-1)
    found = TARGETS["colors_4x4"].cost(torch.from_numpy(logits), torch.from_numpy(bins))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    single = TARGETS["mean_color"].cost(torch.zeros(1, 2, 512), torch.tensor([[[3], [511]]]))
    assert torch.allclose(single, torch.full((1, 2), math.log(512)))
    guess, truth = torch.randn(1, 2, 12), torch.randn(1, 2, 12)
    assert torch.allclose(TARGETS["pixels"].cost(guess, truth).mean(), F.mse_loss(guess, truth))


@pytest.mark.parametrize("name", ["mean_color", "colors_4x4", "pixels"])
def test_a_perfect_prediction_paints_the_target(name):
    kind = TARGETS[name]
    images = torch.randint(0, 256, (1, 8, 8, 3), dtype=torch.uint8)
    target = kind.of_patches(images, 8)
    if kind.colors:
        prediction = F.one_hot(target, 512).float().flatten(2)
        painted = kind.paint(kind.decide(prediction), 8)
        cells = 4 if name == "colors_4x4" else 1
        assert torch.equal(color_bins(painted[:, 0], 8, cells), target)
    else:
        assert torch.equal(kind.paint(kind.decide(target), 8)[:, 0], images)
