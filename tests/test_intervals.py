"""mpp/intervals.py: coverage in simulation, closed forms, and the edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from mpp import intervals
from mpp.intervals import Interval, bootstrap

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(100)


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def simulated(rng, seeds, images, mean, spreads, paired):
    """Hits, or differences of two arms' hits, and the truth that they estimate."""
    of_image, of_seed, of_both = spreads
    image = rng.normal(0, of_image, images)

    def hits(mean):
        seed = rng.normal(0, of_seed, (seeds, 1))
        both = rng.normal(0, of_both, (seeds, images))
        return (rng.random((seeds, images)) < sigmoid(mean + image + seed + both)).astype(float)

    def truth(mean):
        return WEIGHTS @ sigmoid(mean + np.hypot.reduce(spreads) * NODES) / WEIGHTS.sum()

    if not paired:
        return hits(mean), truth(mean)
    return hits(mean + 0.3) - hits(mean), truth(mean + 0.3) - truth(mean)


def naive(rng, values, replicates):
    """Plain percentiles of the crossed bootstrap."""
    seeds, images = values.shape
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), replicates) / seeds
    by_image = rng.multinomial(images, np.full(images, 1 / images), replicates) / images
    means = np.sum((by_seed @ values) * by_image, axis=1)
    return Interval(values.mean(), *np.quantile(means, [0.025, 0.975]))


def coverage(method, seeds, images, mean, spreads, paired, simulations=400):
    rng = np.random.default_rng(0)
    covered = 0
    for number in range(simulations):
        values, truth = simulated(rng, seeds, images, mean, spreads, paired)
        interval = method(values, number)
        covered += interval.low <= truth <= interval.high
    return covered / simulations


# Standard deviations of the effects of image, seed and both on the logit.
IMAGES, SEEDS, MIXED, CHANCE = (4.0, 0.05, 0.5), (0.3, 0.5, 0.2), (1.5, 0.2, 1.0), (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("seeds", "images", "mean", "spreads", "paired"),
    [
        (1, 100, 2.9, CHANCE, False),
        (1, 100, 1.0, CHANCE, True),
        (2, 100, 0.0, SEEDS, False),
        (2, 100, 2.0, MIXED, True),
        (3, 100, 0.0, SEEDS, False),
        (3, 200, 2.0, SEEDS, True),
        (3, 100, 8.0, IMAGES, False),
        (3, 100, 3.0, CHANCE, True),
        (5, 200, 1.0, SEEDS, False),
        (5, 200, 1.0, MIXED, True),
        (5, 100, 8.0, IMAGES, False),
        (10, 100, 3.0, MIXED, False),
    ],
)
def test_the_interval_covers_the_truth_as_often_as_it_says(seeds, images, mean, spreads, paired):
    rate = coverage(
        lambda values, number: bootstrap(values, replicates=400, seed=number), seeds, images, mean, spreads, paired
    )
    assert 0.92 <= rate <= 0.985


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("seeds", [3, 5])
def test_plain_percentiles_of_a_few_seeds_do_not(seeds, paired):
    rng = np.random.default_rng(1)
    rate = coverage(lambda values, _: naive(rng, values, 400), seeds, 200, 1.0, (0.3, 0.7, 0.2), paired, 200)
    assert rate < 0.9


def test_plain_percentiles_count_chance_three_times_and_ours_once():
    rng = np.random.default_rng(2)
    expected = 2 * 1.96 / (20 * 200) ** 0.5  # of values that are independent
    plain, ours = [], []
    for number in range(20):
        values = rng.normal(size=(20, 200))
        for widths, interval in ((plain, naive(rng, values, 500)), (ours, bootstrap(values, seed=number))):
            widths.append(interval.high - interval.low)
    assert np.mean(plain) == pytest.approx(3**0.5 * expected, rel=0.06)
    # Student's quantile of 19 degrees of freedom is 7 % more, and the images' part is not cut below 0.
    assert expected < np.mean(ours) < 1.2 * expected


@pytest.mark.parametrize("spreads", [(2.0, 0.3, 0.5), (0.2, 0.02, 3.0), (3.0, 0.02, 3.0), (1.0, 0.15, 2.0)])
def test_the_width_is_that_of_a_two_way_random_effects_analysis(spreads):
    seeds, images = 20, 300
    of_image, of_seed, of_both = spreads
    rng = np.random.default_rng(4)
    widths = []
    for _ in range(30):
        values = (
            rng.normal(0, of_image, images)
            + rng.normal(0, of_seed, (seeds, 1))
            + rng.normal(0, of_both, (seeds, images))
        )
        interval = bootstrap(values, replicates=1000)
        widths.append(interval.high - interval.low)
    # Var(mean) = V(image) / images + V(seed) / seeds + V(both) / (images * seeds); the last two have the seeds'
    # degrees of freedom.
    by_seeds = of_seed**2 / seeds + of_both**2 / (seeds * images)
    expected = 4 * (stats.t.ppf(0.975, seeds - 1) ** 2 * by_seeds + 1.96**2 * of_image**2 / images)
    assert np.mean(np.square(widths)) == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize(("seeds", "tolerance"), [(2, 0.06), (3, 0.06), (5, 0.05), (10, 0.05)])
def test_seeds_alone_give_students_interval(seeds, tolerance):
    means = np.random.default_rng(seeds).normal(size=seeds)
    half = stats.t.ppf(0.975, seeds - 1) * means.std(ddof=1) / seeds**0.5
    for images in (1, 50):
        interval = bootstrap(np.tile(means[:, None], images), replicates=20000)
        assert interval.high - interval.low == pytest.approx(2 * half, rel=tolerance)
        assert (interval.low + interval.high) / 2 == pytest.approx(means.mean(), abs=2 * tolerance * half)


def test_images_alone_give_the_bca_interval_stretched_for_few():
    rng = np.random.default_rng(1)
    values = rng.lognormal(sigma=2.0, size=100)
    means = np.concatenate([rng.choice(values, (5000, 100)).mean(axis=1) for _ in range(12)])
    # Efron 1987: the bias correction counted among the replicates, the acceleration by the jackknife.
    bias = stats.norm.ppf(np.mean(means < values.mean()))
    left_out = (values.sum() - values) / 99
    away = left_out.mean() - left_out
    acceleration = np.sum(away**3) / (6 * np.sum(away**2) ** 1.5)
    shifted = bias + stats.norm.ppf([0.025, 0.975])
    ends = np.quantile(means, stats.norm.cdf(bias + shifted / (1 - acceleration * shifted))) - values.mean()
    ours = bootstrap(values[None], replicates=60000)
    assert ours.estimate == pytest.approx(values.mean())
    stretch = stats.t.ppf(0.975, 99) / 1.95996 * (100 / 99) ** 0.5
    width = ends[1] - ends[0]
    found = np.array([ours.low, ours.high]) - values.mean()
    assert found == pytest.approx(ends * stretch, abs=0.01 * width)
    assert (ends + values.mean() - np.quantile(means, [0.025, 0.975]) > 0.04 * width).all()


def test_skew_images_do_not_skew_what_the_seeds_outweigh():
    image = np.random.default_rng(6).lognormal(sigma=1.5, size=100)
    interval = bootstrap(image + 100 * np.linspace(-1, 1, 11)[:, None], replicates=20000)
    assert (interval.low + interval.high) / 2 - interval.estimate == pytest.approx(
        0, abs=0.02 * (interval.high - interval.low)
    )


def test_few_images_are_stretched_by_student_too():
    values = np.random.default_rng(9).normal(size=(1, 6))
    half = stats.t.ppf(0.975, 5) * values.std(ddof=1) / 6**0.5
    interval = bootstrap(values, replicates=20000)
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.05)


def test_seeds_that_happen_to_agree_do_not_narrow_what_the_images_show():
    # Two seeds of equal accuracy, each with misses of its own: 10 of 100.
    values = np.ones((2, 100))
    values[0, :10] = values[1, 10:20] = 0
    alone = bootstrap(values.mean(axis=0, keepdims=True))
    both = bootstrap(values)
    assert both.estimate == 0.9
    assert both.high - both.low == pytest.approx(alone.high - alone.low, rel=0.1)
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * (0.2 * 0.25 - 0.1**2) ** 0.5 / 10, rel=0.1)


def test_equal_seeds_count_as_one():
    values = np.random.default_rng(10).random((1, 200)) < 0.8
    one, many = bootstrap(values, replicates=5000), bootstrap(np.tile(values, (5, 1)), replicates=5000)
    assert many.low == pytest.approx(one.low, abs=0.0076)
    assert many.high == pytest.approx(one.high, abs=0.0076)


def test_a_lower_level_gives_a_narrower_interval():
    values = np.random.default_rng(11).normal(size=(1, 500))
    interval = bootstrap(values, level=0.5, replicates=8000)
    assert interval.high - interval.low == pytest.approx(2 * 0.6745 * values.std() / 500**0.5, rel=0.05)


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (5, 1), (3, 70)])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1])
def test_equal_values_give_no_width(shape, value):
    assert bootstrap(np.full(shape, value)) == Interval(value, value, value)


def test_nothing_but_interaction_leaves_nothing_to_resample():
    assert bootstrap(np.eye(2)) == Interval(0.5, 0.5, 0.5)


def test_bools_are_hits():
    hits = np.random.default_rng(12).random((3, 80)) < 0.7
    assert bootstrap(hits) == bootstrap(hits.astype(np.float32)) == bootstrap(hits.astype(float))
    assert bootstrap(np.ones((3, 80), dtype=bool)) == Interval(1.0, 1.0, 1.0)


def test_hits_and_differences_stay_in_their_range():
    far = np.array([np.r_[np.ones(1), np.zeros(9)], np.r_[np.ones(8), np.zeros(2)]])
    assert bootstrap(far) == Interval(0.45, 0.0, 1.0)
    assert bootstrap(far * 0.5).low < 0 and bootstrap(far * 0.5).high > 0.5
    differences = far.copy()
    differences[0, 1] = -1
    assert bootstrap(differences) == Interval(0.4, -1.0, 1.0)


@given(
    arrays.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.integers(-1, 1)),
    st.integers(0, 99),
)
def test_the_estimate_lies_within_the_interval(values, seed):
    interval = bootstrap(values, replicates=60, seed=seed)
    assert interval.estimate == pytest.approx(values.mean(), abs=1e-12)
    assert -1 <= interval.low <= interval.estimate + 1e-12
    assert interval.estimate - 1e-12 <= interval.high <= 1


def test_a_mirrored_image_mirrors_the_interval():
    values = (np.random.default_rng(13).random((1, 60)) < 0.95).astype(float)
    hits, misses = bootstrap(values), bootstrap(1 - values)
    assert misses.low == pytest.approx(1 - hits.high, abs=1e-12)
    assert misses.high == pytest.approx(1 - hits.low, abs=1e-12)


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(14).random((3, 100))
    assert bootstrap(values) == bootstrap(values.copy())
    assert bootstrap(values).low != bootstrap(values, seed=1).low


def test_parts_of_the_replicates_draw_anew(monkeypatch):
    values = np.random.default_rng(15).normal(size=(1, 100))
    whole = bootstrap(values)
    monkeypatch.setattr(intervals, "_WORDS_AT_ONCE", 700)
    parts = bootstrap(values)
    assert parts != whole
    assert parts.high - parts.low == pytest.approx(whole.high - whole.low, rel=0.1)
    monkeypatch.setattr(intervals, "_WORDS_AT_ONCE", 1)
    assert bootstrap(values).high - bootstrap(values).low == pytest.approx(whole.high - whole.low, rel=0.1)


@pytest.mark.parametrize("values", [np.zeros((0, 5)), np.zeros((3, 0)), np.zeros(5), np.zeros((2, 2, 2)), []])
def test_values_that_are_not_a_filled_table_are_refused(values):
    with pytest.raises(ValueError, match=r"\[seed, image\]"):
        bootstrap(values)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="NaN"):
        bootstrap(np.array([[0.0, 1.0], [value, 1.0]]))


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0, np.nan])
def test_a_level_outside_0_to_1_is_refused(level):
    with pytest.raises(ValueError, match="level"):
        bootstrap(np.eye(3), level=level)


def test_too_few_replicates_for_the_level_are_refused():
    with pytest.raises(ValueError, match="more than 200"):
        bootstrap(np.eye(3), level=0.99, replicates=150)
