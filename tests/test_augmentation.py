"""mpp/augmentation.py beside timm called by hand, and what it leaves behind."""

import math
import random
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing

from mpp import augmentation, draws
from mpp.errors import UserError

TEXTS = [
    "rand-m9-mstd0.5-inc1",
    "rand-m15-n2-p1.0-mmax15",
    "rand-m10-n3-p1.0-tweights",
    "rand-m7-n2-t3a",
    "rand-mstd101-inc1",
]


def photo(size=64):
    with Image.open(Path(skimage.__file__).parent / "data" / "coffee.png") as picture:
        return np.array(picture.convert("RGB").resize((size, size)))


def word(index):
    return draws.words(0, "augment", 0, index, 1)[0]


def global_states():
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()


@contextmanager
def kept_states():
    """For a test that seeds by hand what all tests share."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def seed_by_hand(word):
    random.seed(int(word))
    np.random.seed(int(word) >> 32)
    torch.manual_seed(int(word))


@pytest.fixture
def one_operation(monkeypatch):
    """Has RandAugment know one operation only, which it then always applies."""

    def use(name):
        monkeypatch.setattr(auto_augment, "_RAND_TRANSFORMS", [name])
        monkeypatch.setattr(auto_augment, "_RAND_INCREASING_TRANSFORMS", [name])
        augmentation.rand_augment_transform.cache_clear()

    yield use
    augmentation.rand_augment_transform.cache_clear()


# ---- RandAugment


@pytest.mark.parametrize("text", TEXTS)
def test_rand_augment_is_timms_under_the_same_seeds(text):
    pixels, changed = photo(), 0
    hparams = {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BILINEAR}
    by_hand = auto_augment.rand_augment_transform(text, hparams)
    for index in range(40):
        with kept_states():
            seed_by_hand(word(index))
            expected = np.asarray(by_hand(Image.fromarray(pixels)))
        found = augmentation.rand_augment(pixels, text, word(index))
        assert found.dtype == np.uint8 and np.array_equal(found, expected)
        changed += not np.array_equal(found, pixels)
    assert changed > 10


def test_what_a_shift_leaves_bare_is_mid_grey(one_operation):
    one_operation("TranslateXRel")
    pixels = photo(40)
    left, right = np.full_like(pixels, 128), np.full_like(pixels, 128)
    left[:, :-18], right[:, 18:] = pixels[:, 18:], pixels[:, :-18]  # timm's largest shift is 45 % of the side
    found = [augmentation.rand_augment(pixels, "rand-m10-n1-p1.0", word(index)).tolist() for index in range(20)]
    assert {str(shifted) for shifted in found} == {str(left.tolist()), str(right.tolist())}


def test_turning_is_pillows_bilinear(one_operation):
    one_operation("Rotate")
    picture = Image.fromarray(photo())
    turned = [
        np.asarray(picture.rotate(side * 30, Image.Resampling.BILINEAR, fillcolor=(128,) * 3)) for side in (-1, 1)
    ]
    for index in range(10):
        found = augmentation.rand_augment(photo(), "rand-m10-n1-p1.0", word(index))
        assert any(np.array_equal(found, expected) for expected in turned)


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("Posterize", "rand-m0-n1-p1.0", 0),
        ("Posterize", "rand-m5-n1-p1.0", 2),
        ("Posterize", "rand-m20-n1-p1.0-mmax20", 8),
        ("PosterizeIncreasing", "rand-m5-n1-p1.0-inc1", 2),
        ("PosterizeIncreasing", "rand-m10-n1-p1.0-inc1", 0),
        ("PosterizeIncreasing", "rand-m15-n1-p1.0-inc1-mmax15", 0),
    ],
)
def test_posterize_keeps_the_upper_bits_and_none_where_none_are_left(one_operation, name, text, kept):
    one_operation(name)
    pixels = photo()
    expected = (pixels.astype(int) // 2 ** (8 - kept) * 2 ** (8 - kept)).astype(np.uint8)
    assert np.array_equal(augmentation.rand_augment(pixels, text, word(0)), expected)


@pytest.mark.parametrize("magnitude", [0, 1, 5, 9, 10, 13, 15, 20, 30])
def test_no_operation_fails_at_any_magnitude(magnitude):
    pixels = photo(16)
    for index in range(60):
        text = f"rand-m{magnitude}-n4-p1.0-mmax{max(magnitude, 1)}-inc{index % 2}"
        assert augmentation.rand_augment(pixels, text, word(index)).shape == (16, 16, 3)


@given(st.data())
def test_a_string_that_is_taken_means_to_timm_what_it_says(data):
    decimals = st.floats(0.001, 1, allow_nan=False).map(lambda value: round(value, 3))
    magnitude, operations = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 14))
    probability, deviation = data.draw(decimals), data.draw(decimals)
    highest, increasing = data.draw(st.integers(max(magnitude, 1), 40)), data.draw(st.integers(0, 1))
    parts = [
        f"m{magnitude}",
        f"n{operations}",
        f"p{probability}",
        f"mstd{deviation}",
        f"mmax{highest}",
        f"inc{increasing}",
    ]
    choice = data.draw(st.sampled_from(["", "weights", "3a", "3aw"]))
    parts = data.draw(st.permutations(parts + ([f"t{choice}"] if choice else [])))
    found = augmentation.rand_augment_transform("-".join(["rand", *parts]))
    assert found.num_layers == operations
    assert (found.choice_weights is not None) == (choice in ("weights", "3aw"))
    sizes = {"": 15, "weights": 15, "3a": 3, "3aw": 14}
    assert len(found.ops) == sizes[choice]
    if not choice:
        assert any(operation.name == "ColorIncreasing" for operation in found.ops) == bool(increasing)
    for operation in found.ops:
        assert (operation.magnitude, operation.prob) == (magnitude, probability)
        assert (operation.magnitude_std, operation.magnitude_max) == (deviation, highest)
        assert operation.kwargs == {"fillcolor": (128, 128, 128), "resample": Image.Resampling.BILINEAR}


def test_what_a_string_leaves_out_is_timms_default():
    found = augmentation.rand_augment_transform("rand")
    assert (found.num_layers, found.ops[0].magnitude, found.ops[0].prob) == (2, augmentation._MAGNITUDE, 0.5)
    assert augmentation._MAGNITUDE == auto_augment._LEVEL_DENOM


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "must begin with rand"),
        ("none", "must begin with rand"),
        ("randaugment-m9", "must begin with rand"),
        ("augmix-m3-w3", "must begin with rand"),
        ("rand-", "there is no part ;"),
        ("rand-m9.5", "there is no part m9.5;"),
        ("rand-m", "there is no part m;"),
        ("rand-m9-n0", "there is no part n0;"),
        ("rand-m9-p0", "there is no part p0;"),
        ("rand-m9-p.5", "there is no part p.5;"),
        ("rand-m9-p1.5", "there is no part p1.5;"),
        ("rand-m9-p50", "there is no part p50;"),
        ("rand-m9-inc", "there is no part inc;"),  # timm leaves it out
        ("rand-m9-inc2", "there is no part inc2;"),
        ("rand-m9-mstdinf", "there is no part mstdinf;"),  # timm leaves it out
        ("rand-m9-mmax0", "there is no part mmax0;"),  # timm takes it for 10
        ("rand-m9-twild", "there is no part twild;"),  # timm takes all operations
        ("rand-m9-w0", "there is no part w0;"),
        ("rand-m9-M9", "there is no part M9;"),
        ("rand-m9 -n2", "there is no part m9 ;"),
        ("rand-m٩", "there is no part m٩;"),
        ("rand-m9-n2-m8", "m stands twice;"),
    ],
)
def test_other_strings_are_refused(text, what):
    with pytest.raises(UserError) as refused:
        augmentation.rand_augment_transform(text)
    message = str(refused.value)
    assert message.startswith(f"data.rand_augment={text}") and what in message
    assert message.endswith("such as rand-m9-n2-mstd0.5-inc1, or null for none")
    augmentation.rand_augment_transform(augmentation.EXAMPLE)  # which is taken


@pytest.mark.parametrize(
    ("text", "magnitude", "highest", "instead"),
    [
        ("rand-m15-n2-p1.0", 15, 10, "rand-m15-n2-p1.0-mmax15"),
        ("rand-m20-mmax15-n2", 20, 15, "rand-m20-n2-mmax20"),
        ("rand-n2-mmax5", 10, 5, "rand-n2-mmax10"),
    ],
)
def test_a_magnitude_that_timm_would_cut_is_refused(text, magnitude, highest, instead):
    with pytest.raises(UserError) as refused:
        augmentation.rand_augment_transform(text)
    assert str(refused.value) == (
        f"data.rand_augment={text}: timm would cut the magnitude of {magnitude} to {highest}; "
        f"add -mmax{magnitude}, such as {instead}"
    )
    augmentation.rand_augment_transform(instead)


def test_more_operations_than_there_are_to_draw_are_refused():
    with pytest.raises(
        UserError, match="there are 14 operations, none of which is drawn twice with t3aw; use at most -n14"
    ):
        augmentation.rand_augment_transform("rand-m9-n15-t3aw")
    augmentation.rand_augment_transform("rand-m9-n15-t3a")  # timm draws these again


# ---- erasing


def test_erasing_is_timms_on_normalised_pixels_under_the_same_seeds():
    pixels, erased = photo(), 0
    by_hand = RandomErasing(0.5, mode="pixel", device="cpu")
    for index in range(40):
        normalised = (torch.from_numpy(pixels).permute(2, 0, 1).double() - 127.5) / 127.5
        with kept_states():
            seed_by_hand(word(index))
            normalised = by_hand(normalised.float())
        expected = (127.5 + 127.5 * normalised).round().clamp(0, 255).permute(1, 2, 0).numpy().astype(np.uint8)
        found = augmentation.erase(pixels, 0.5, word(index))
        assert found.dtype == np.uint8 and np.array_equal(found, expected)
        erased += not np.array_equal(found, pixels)
    assert 10 < erased < 30


def erased_part(pixels, probability, index):
    """Where two images of other colours agree after the same erasing, which is where they were erased."""
    one = augmentation.erase(pixels, probability, word(index))
    other = augmentation.erase(pixels + np.uint8(128), probability, word(index))
    return (one == other).all(-1), one


def expected_areas(size):
    """Mean and deviation of the share that timm erases: uniform area and log aspect, where the rectangle fits."""
    area = np.linspace(0.02, 1 / 3, 1501)[:, None] * size**2
    aspect = np.exp(np.linspace(math.log(0.3), math.log(1 / 0.3), 1501))
    height, width = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    shares = (height * width)[(height < size) & (width < size)] / size**2
    return shares.mean(), shares.std()


def test_rate_area_and_noise_of_erasing():
    size, count, probability = 64, 1500, 0.25
    pixels = photo(size)
    shares, noise = [], []
    for index in range(count):
        part, found = erased_part(pixels, probability, index)
        if part.any():
            rows, columns = np.flatnonzero(part.any(1)), np.flatnonzero(part.any(0))
            assert part[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()  # one rectangle
            shares.append(part.mean())
            noise.append(found[part].flatten())
        assert np.array_equal(found[~part], pixels[~part])
    assert abs(len(shares) - count * probability) < 4 * math.sqrt(count * probability * (1 - probability))
    mean, deviation = expected_areas(size)
    assert abs(np.mean(shares) - mean) < 4 * deviation / math.sqrt(len(shares))
    assert min(shares) < 0.05 and max(shares) > 0.28
    values = np.concatenate(noise)
    edges = (np.arange(257) - 0.5 - 127.5) / 127.5
    edges[0], edges[-1] = -np.inf, np.inf
    expected = len(values) * np.diff(stats.norm.cdf(edges))
    counts = np.bincount(values, minlength=256)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()  # 256 of them
    assert abs(counts[0] - expected[0]) < 4 * math.sqrt(expected[0] * (1 - stats.norm.cdf(edges[1])))


def test_each_rectangle_has_its_own_place_and_noise():
    pixels = np.zeros((48, 48, 3), dtype=np.uint8)
    middles, first = [], set()
    for index in range(300):
        part, found = erased_part(pixels, 1.0, index)
        middles.append([np.flatnonzero(part.any(axis)).mean() for axis in (1, 0)])
        first.add(found[part][:2].tobytes())
    assert len(first) > 295
    assert (np.min(middles, 0) < 9).all() and (np.max(middles, 0) > 39).all()


# ---- what both leave behind

CALLS = [
    lambda pixels, index: augmentation.rand_augment(pixels, "rand-m9-mstd0.5-inc1", word(index)),
    lambda pixels, index: augmentation.erase(pixels, 1.0, word(index)),
]


@pytest.mark.parametrize("call", CALLS)
def test_global_random_states_are_as_before_and_have_no_say(call, monkeypatch):
    def gpu(*_):
        raise AssertionError("generators of GPUs belong to the model")

    monkeypatch.setattr(torch.cuda, "manual_seed", gpu)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpu)
    with kept_states():
        found = []
        for seed in (1, 2):
            random.seed(seed), np.random.seed(seed), torch.default_generator.manual_seed(seed)
            random.gauss(0, 1), np.random.standard_normal()  # each keeps a second number for later
            before = global_states()
            found.append([call(photo(), index).tobytes() for index in range(5)])
            assert global_states() == before
        assert found[0] == found[1] and len(set(found[0])) > 2


def test_global_random_states_are_as_before_after_an_error():
    before = global_states()
    with pytest.raises(ZeroDivisionError), augmentation._seeded(word(0)):
        random.random(), np.random.random(), torch.rand(1)
        raise ZeroDivisionError
    assert global_states() == before


def test_the_generators_do_not_follow_each_other():
    # All three are Mersenne Twisters: the same seeding would give the same numbers.
    with augmentation._seeded(word(0)):
        python = {random.getrandbits(32) % 2**31 for _ in range(50)}
        numpy = {int(np.random.randint(2**32, dtype=np.uint64)) % 2**31 for _ in range(50)}
        torchs = set(torch.randint(2**31, (50,)).tolist())
    assert len(python | numpy | torchs) == 150


@pytest.mark.parametrize("call", CALLS)
def test_neither_order_nor_earlier_calls_matter_and_the_picture_is_not_written_to(call):
    pixels = photo()
    kept = pixels.copy()
    straight = [call(pixels, index) for index in range(10)]
    backwards = [call(pixels, index) for index in reversed(range(10))][::-1]
    assert all(np.array_equal(one, other) for one, other in zip(straight, backwards, strict=True))
    for found in straight:
        assert found.flags.writeable and not np.shares_memory(found, pixels)
        found[:] = 0
    assert np.array_equal(pixels, kept)
