"""mpp/comparison.py on made predictions, recomputed by hand."""

import numpy as np
import pytest

from mpp import comparison, intervals
from mpp.comparison import Arm, Outcome, Spending


def outcome(*seeds, labels=(0, 1, 2, 3)):
    """Predictions seed by seed: the most likely class of each image."""
    return Outcome({number: np.array(best)[:, None] for number, best in enumerate(seeds)}, np.array(labels))


def test_hits_are_by_seed_and_image_and_leave_out_images_without_labels():
    found = Outcome(
        {3: np.array([[0, 9], [5, 1], [2, 0]]), 1: np.array([[1, 9], [5, 1], [0, 2]])},
        np.array([[0, -1], [-1, -1], [2, 7]]),
    )
    assert found.hits().tolist() == [[True, True], [False, False]]
    assert found.hits([1]).tolist() == [[False, False]]
    assert found.of_seeds() == {3: 1.0, 1: 0.0}


def test_accuracy_is_the_mean_over_seeds_and_images_with_its_bootstrap():
    found = outcome([0, 1, 2, 0], [0, 1, 0, 0])
    expected = intervals.bootstrap(np.array([[1, 1, 1, 0], [1, 1, 0, 0]]))
    assert found.accuracy == expected and expected.estimate == pytest.approx(5 / 8)


def test_differences_are_paired_on_the_seeds_that_both_have():
    first, second = outcome([0, 1, 2, 3], [0, 1, 2, 0]), Outcome({1: np.zeros((4, 1), int)}, np.arange(4))
    (found,) = comparison.differences([Arm("a", "", {"t": first}), Arm("b", "", {"t": second})], "t")
    assert (found.first, found.second, found.of_seeds) == ("a", "b", {1: 0.5})  # seed 1: hits 1 1 1 0 less 1 0 0 0
    assert found.interval == intervals.bootstrap(np.array([[0, 1, 1, 0]]))


def test_identical_arms_differ_by_nothing():
    same = outcome([0, 1, 0, 3], [1, 1, 2, 3])
    (found,) = comparison.differences([Arm("a", "", {"t": same}), Arm("b", "", {"t": same})], "t")
    assert (found.interval.estimate, found.interval.low, found.interval.high) == (0, 0, 0)
    assert found.verdict == "no difference in any image"


@pytest.mark.parametrize(
    "hindrance",
    [
        Arm("b", "", {"t": outcome([0, 1, 2, 3])}, differs=["optim.steps: 1 there, 2 here"]),
        Arm("b", "", {"t": outcome([0, 1, 2, 3])}, beside=True),
        Arm("b", "", {"t": Outcome({0: np.arange(4)[:, None]}, np.arange(4), task="x")}, failures={"x": "broke"}),
        Arm("b", "", {"t": Outcome({0: np.arange(4)[:, None]}, np.arange(4), {0: ("other", "images")})}),
        Arm("b", "", {"t": outcome([0, 1, 2, 3], labels=(3, 2, 1, 0))}),  # other images
        Arm("b", "", {"t": Outcome({7: np.zeros((4, 1), int)}, np.arange(4))}),  # no common seed
        Arm("b", "", {"other": outcome([0, 1, 2, 3])}),
    ],
)
def test_no_difference_is_formed_where_it_would_mean_nothing(hindrance):
    assert comparison.differences([Arm("a", "", {"t": outcome([0, 1, 2, 3])}), hindrance], "t") == []


def test_a_verdict_says_what_the_interval_allows():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 400)

    def arm(name, share):  # right on a share of the images
        right = {seed: rng.random(400) < share for seed in range(3)}
        return Arm(name, "", {"t": Outcome({s: np.where(r, labels, 9)[:, None] for s, r in right.items()}, labels)})

    good, bad, alike = arm("good", 0.9), arm("bad", 0.5), arm("alike", 0.9)
    by_pair = {(d.first, d.second): d.verdict for d in comparison.differences([good, bad, alike], "t")}
    assert by_pair["good", "bad"] == "better" and by_pair["bad", "alike"] == "worse"
    assert by_pair["good", "alike"] == "not told apart: the interval holds 0"


def test_rows_name_failed_and_differing_arms():
    arms = [
        Arm("whole", "9 images", {"t": outcome([0, 1, 2, 3], [0, 1, 2, 0])}, frozen={("t", "linear"): [0.5, 0.7]}),
        Arm("part", "", {"t": Outcome({0: np.arange(4)[:, None]}, np.arange(4), task="t")}, failures={"t": "broke"}),
        Arm("none", "", failures={"t": "broke"}),
        Arm("odd", "", {"t": outcome([0, 0, 0, 0])}, differs=["x"]),
        Arm("later", ""),
        Arm("chance", "", frozen={("t", "most_frequent_accuracy"): [0.25]}, beside=True),
    ]
    rows = comparison.accuracy_rows(arms, "t", ["linear"])
    assert [row[0] for row in rows] == ["whole", "part ‡", "none", "odd †", "later", "chance"]
    assert [row[2] for row in rows] == ["87.5", "100.0", "failed", "25.0", "not measured", "25.0"]
    assert rows[0][4] == "100.0 75.0" and rows[0][5] == "60.0 ± 14.1"  # (0.7 - 0.5) / sqrt(2)


def tried(**accuracies):
    return {
        rate.removeprefix("r"): {"diverged": value is None, "accuracy": value, "loss": 1.0}
        for rate, value in accuracies.items()
    }


def test_curves_are_means_over_the_seeds_that_tried():
    sweeps = {0: tried(r1=0.2, r2=0.4, r3=None), 5: tried(r1=0.4, r2=0.5, r3=0.9, r4=0.9)}  # one is not done
    assert comparison.mean_curve(sweeps) == {1.0: pytest.approx(0.3), 2.0: pytest.approx(0.45), 3.0: None}


@pytest.mark.parametrize(
    ("chosen", "words"),
    [(1.0, "1, is the smallest that was tried; a smaller one"), (2.0, None), (3.0, "3, is the largest")],
)
def test_a_best_rate_at_the_edge_of_the_grid_is_warned_of(chosen, words):
    arm = Arm("a", "", sweeps={"t": {0: tried(r1=0.2, r2=0.4, r3=0.3)}}, rates={"t": chosen})
    found = comparison.edge_warnings([arm])
    assert (words in found[0]) if words else not found


def test_a_largest_rate_below_one_that_diverged_is_no_edge_and_one_rate_has_none():
    below = Arm("a", "", sweeps={"t": {0: tried(r1=0.2, r2=0.4, r3=None)}}, rates={"t": 2.0})
    single = Arm("a", "", sweeps={"t": {0: tried(r1=0.2)}}, rates={"t": 1.0})
    assert comparison.edge_warnings([below, single]) == []


def test_costs_add_up():
    arm = Arm("a", "", cost={"pre-training": Spending(100, 0.5, 2.0), "fine-tuning": Spending(20, 0.25, 0.5)})
    assert comparison.cost_rows([arm, Arm("free", "")]) == [
        ["a", "pre-training", "100", "0.5", "2"],
        ["a", "fine-tuning", "20", "0.25", "0.5"],
        ["a", "all", "120", "0.75", "2.5"],
    ]
