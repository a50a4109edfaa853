"""mpp/mixing.py beside timm, SciPy and plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from timm.data import mixup as timm_mixup

from mpp import data, draws, mixing, sources

# ---- the draw


def drawn(count, mixup=0.0, cutmix=0.0, image_size=32, seed=0):
    """Shares [count] and boxes [count, 4] of the first images of an epoch."""
    found = [mixing.draw(seed, 0, index, mixup=mixup, cutmix=cutmix, image_size=image_size) for index in range(count)]
    assert {(sample["mix_share"].dtype, sample["mix_share"].shape) for sample in found} == {(np.dtype(np.float32), ())}
    assert {(sample["mix_box"].dtype, sample["mix_box"].shape) for sample in found} == {(np.dtype(np.int64), (4,))}
    return np.stack([sample["mix_share"] for sample in found]), np.stack([sample["mix_box"] for sample in found])


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 5.0])
def test_shares_of_mixup_follow_the_beta_distribution(alpha):
    shares, boxes = drawn(4000, mixup=alpha)
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 0.01
    assert stats.kstest(shares, stats.beta(alpha, 1.1 * alpha).cdf).pvalue < 0.01  # another is told apart
    assert not boxes.any()
    assert shares.min() < 0.2 < 0.8 < shares.max()  # of the image itself: not only the larger one


def test_boxes_and_shares_of_cutmix_are_timms(monkeypatch):
    """From the same share and centre; the share is counted once more, pixel by pixel."""
    size, alpha, cut = 32, 0.7, 0
    shares, boxes = drawn(400, cutmix=alpha, image_size=size)
    for index in range(400):
        _, chance, row, column = draws.uniforms(draws.words(0, "mixing", 0, index, 4))
        centers = [math.floor(size * row), math.floor(size * column)]
        monkeypatch.setattr(np.random, "randint", lambda low, high, size, centers=centers: centers.pop(0))
        share = stats.beta(alpha, alpha).ppf(chance)
        (top, bottom, left, right), kept = timm_mixup.cutmix_bbox_and_lam((3, size, size), share)
        monkeypatch.undo()
        assert shares[index] == np.float32(kept)
        assert boxes[index].tolist() == ([top, left, bottom, right] if kept < 1 else [0, 0, 0, 0])
        inside = sum(
            boxes[index][0] <= y < boxes[index][2] and boxes[index][1] <= x < boxes[index][3]
            for y in range(size)
            for x in range(size)
        )
        assert shares[index] == np.float32(1 - inside / size**2)
        cut += kept > share + 0.01  # what the border takes away
    assert cut > 100


def test_centers_of_boxes_are_uniform():
    _, boxes = drawn(4000, cutmix=1e7, image_size=224)  # half of the area each: squares of 158 pixels
    low, high = boxes[:, :2], boxes[:, 2:]
    assert (high - low).max() == 158
    centers = np.where(low > 0, low + 79, high - 79)
    for axis in (0, 1):
        assert stats.kstest(centers[:, axis] + 0.5, stats.uniform(0, 224).cdf).pvalue > 0.01
    assert abs(stats.pearsonr(*centers.T).statistic) < 4 / math.sqrt(4000)


def test_with_both_either_comes_at_even_odds():
    count, size = 4000, 32
    shares, boxes = drawn(count, mixup=0.8, cutmix=1.0, image_size=size)
    pasted = boxes.any(1)
    expected = 0.5 * (1 - 1 / size**2)  # a square of less than a pixel is none
    assert abs(pasted.sum() - expected * count) < 4 * math.sqrt(count / 4)
    assert stats.kstest(shares[~pasted], stats.beta(0.8, 0.8).cdf).pvalue > 0.01
    alone, _ = drawn(count, cutmix=1.0, image_size=size)
    assert np.array_equal(shares[pasted], alone[pasted])


def test_a_draw_depends_on_its_arguments_alone():
    keys = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in (0, 1, 2)]
    straight = [mixing.draw(*key, mixup=0.8, cutmix=0.0, image_size=32)["mix_share"] for key in keys]
    backwards = [mixing.draw(*key, mixup=0.8, cutmix=0.0, image_size=32)["mix_share"] for key in reversed(keys)]
    assert straight == backwards[::-1]
    assert len(set(map(float, straight))) == len(keys)
    # Written down once; a change here changes what every earlier run was trained on.
    assert draws.words(0, "mixing", 0, 0, 2).tolist() == [15233317299674803120, 16224950406843458254]
    assert math.isclose(straight[0], 0.910544574, rel_tol=1e-6)


@given(
    seed=st.integers(0, 2**32 - 1),
    mixup=st.sampled_from([0.0, 1e-3, 0.2, 1.0, 1e4]),
    cutmix=st.sampled_from([0.0, 1e-3, 0.2, 1.0, 1e4]),
    image_size=st.integers(1, 400),
)
@example(seed=0, mixup=0.0, cutmix=1e-3, image_size=1)
def test_shares_and_boxes_stay_within_their_bounds(seed, mixup, cutmix, image_size):
    if not mixup and not cutmix:
        with pytest.raises(ValueError, match=r"mixup=0.0 and cutmix=0.0 mix nothing; one of them must be positive"):
            mixing.draw(seed, 0, 0, mixup=mixup, cutmix=cutmix, image_size=image_size)
        return
    found = mixing.draw(seed, 0, 0, mixup=mixup, cutmix=cutmix, image_size=image_size)
    share, (top, left, bottom, right) = float(found["mix_share"]), found["mix_box"].tolist()
    assert 0 <= share <= 1
    assert 0 <= top <= bottom <= image_size and 0 <= left <= right <= image_size
    if found["mix_box"].any():
        assert cutmix and top < bottom and left < right
        assert share == np.float32(1 - (bottom - top) * (right - left) / image_size**2)
    else:
        assert mixup or share == 1


# ---- blending

IMAGES = torch.randn(6, 3, 8, 10, generator=torch.Generator().manual_seed(0))
NONE = [0, 0, 0, 0]


def partner(place):
    return place + 1 if place % 2 == 0 else place - 1


@pytest.mark.parametrize("strided", [False, True])
def test_blended_images_against_a_loop(strided):
    shares = torch.tensor([0.25, 0.9, 0.75, 0.0, 0.55, 0.5])
    boxes = torch.tensor([NONE, NONE, [2, 3, 7, 6], [0, 0, 8, 10], [0, 4, 4, 10], NONE])
    images = IMAGES
    if strided:  # as `data.normalize` gives them
        images = IMAGES.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    found = mixing.blend_images(images, shares, boxes).numpy()
    for place in range(6):
        own, other = IMAGES[place].double().numpy(), IMAGES[partner(place)].double().numpy()
        top, left, bottom, right = boxes[place].tolist()
        for y in range(8):
            for x in range(10):
                if top < bottom:
                    pasted = top <= y < bottom and left <= x < right
                    assert np.array_equal(found[place, :, y, x], (other if pasted else own)[:, y, x])
                else:
                    share = float(shares[place])
                    expected = share * own[:, y, x] + (1 - share) * other[:, y, x]
                    np.testing.assert_allclose(found[place, :, y, x], expected, atol=1e-6)
    assert torch.equal(images, IMAGES)


def test_blended_targets_against_a_loop():
    targets = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    shares = [0.25, 0.9, 0.75, 0.0, 1.0, 0.5]
    found = mixing.blend_targets(targets, torch.tensor(shares))
    for place, share in enumerate(shares):
        expected = share * targets[place].double() + (1 - share) * targets[partner(place)].double()
        np.testing.assert_allclose(found[place], expected, atol=1e-7)
    assert torch.equal(found[4], targets[4])


def test_a_share_of_one_keeps_the_bits():
    images = IMAGES.clone()
    images[0, 0, 0] = -0.0
    images[1, 0, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])  # which stay with their own image
    for shares in (torch.ones(6), torch.tensor([1.0, 1, 1, 1, 0.5, 0.5])):
        found = mixing.blend_images(images, shares, torch.zeros(6, 4, dtype=torch.int64))
        assert torch.equal(found[:4].view(torch.int32), images[:4].view(torch.int32))
        found = mixing.blend_targets(images[:, 0, 0], shares)
        assert torch.equal(found[:4].view(torch.int32), images[:4, 0, 0].view(torch.int32))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_the_type_of_images_and_targets_stays(kind):
    shares, boxes = torch.tensor([0.25, 0.5]), torch.tensor([NONE, [1, 1, 3, 3]])
    assert mixing.blend_images(IMAGES[:2].to(kind), shares, boxes).dtype == kind
    assert mixing.blend_targets(torch.ones(2, 4, dtype=kind), shares).dtype == kind


def test_an_odd_batch_is_refused():
    with pytest.raises(ValueError, match="a batch of 3 leaves one without a partner; its length must be even"):
        mixing.blend_images(IMAGES[:3], torch.ones(3), torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="a batch of 1 leaves one without a partner"):
        mixing.blend_targets(torch.ones(1, 4), torch.ones(1))


# ---- along the stream


def blended(batch_size=8, micro_batch=8, processes=1, workers=0, first_step=0):
    """What all processes train on in six steps: {(step, epoch, index): the bytes of its blend}."""
    samples = data.TrainingSamples(
        sources.open_source("synthetic:11", "train"),  # epochs of an odd length
        range(11),
        0,
        data.View(16, area=(0.3, 1.0)),
        lambda epoch, index: {
            "key": np.array([epoch, index]),
            **mixing.draw(0, epoch, index, mixup=0.8, cutmix=1.0, image_size=16),
        },
    )
    found = {}
    for process in range(processes):
        batches = data.training_batches(
            samples,
            first_step=first_step,
            steps=6,
            batch_size=batch_size,
            micro_batch=micro_batch,
            processes=processes,
            process=process,
            workers=workers,
            device=torch.device("cpu"),
        )
        for count, batch in enumerate(batches):
            images = data.normalize(batch["images"], (0.5,) * 3, (0.5,) * 3)
            images = mixing.blend_images(images, batch["mix_share"], batch["mix_box"])
            targets = mixing.blend_targets(torch.eye(11)[batch["index"]], batch["mix_share"])
            step = first_step + count // (batch_size // (micro_batch * processes))
            for key, image, target in zip(batch["key"].tolist(), images, targets, strict=True):
                found[(step, *key)] = image.numpy().tobytes() + target.numpy().tobytes()
    return found


def test_workers_processes_micro_batches_and_start_change_no_blend():
    straight = blended()
    assert len(straight) == 48
    assert blended(workers=2) == straight
    assert blended(micro_batch=2) == straight
    assert blended(processes=2, micro_batch=4) == straight
    assert blended(processes=2, micro_batch=2) == straight
    late = blended(first_step=3)
    assert late == {key: image for key, image in straight.items() if key[0] >= 3}
