"""mpp/metrics.py against NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpp.metrics import (
    Tally,
    accuracies,
    entropy,
    hits,
    labelled,
    means,
    most_likely,
    sum_and_count,
    top_k_hits,
)


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9), min_size=1, max_size=6))
def test_a_mean_weighs_every_example_once_over_uneven_batches(batches):
    tally = Tally()
    for batch in batches:
        tally.add({"loss": sum_and_count(torch.tensor(batch))})
    everything = np.concatenate([np.array(batch, dtype=np.float64) for batch in batches])
    assert math.isclose(means(tally.total(lambda x: x))["loss"], everything.mean(), rel_tol=1e-9, abs_tol=1e-9)


def test_total_reduces_once_and_keeps_shapes():
    tally, calls = Tally(), []
    tally.add({"pair": torch.tensor([1.0, 2.0]).double(), "histogram": torch.arange(6.0).double().reshape(2, 3)})

    def two_processes(flat):
        calls.append(flat.shape)
        return flat * 2

    total = tally.total(two_processes)
    assert calls == [(8,)]
    assert total["pair"].tolist() == [2.0, 4.0]
    assert total["histogram"].tolist() == [[0, 2, 4], [6, 8, 10]]


def test_a_name_under_which_nothing_was_counted_has_no_mean():
    assert means({"none": torch.tensor([0.0, 0.0]), "some": torch.tensor([3.0, 2.0])}) == {"some": 1.5}


def test_entropy_of_known_histograms():
    assert math.isclose(entropy(torch.tensor([5, 5, 5, 5, 0])), math.log(4))
    assert entropy(torch.tensor([0, 9, 0])) == 0.0
    p = np.array([0.5, 0.25, 0.25])
    assert math.isclose(entropy(torch.tensor([2, 1, 1])), -(p * np.log(p)).sum())


def test_top_k_hits():
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.8, 0.1, 0.3], [0.2, 0.3, 0.4]])
    labels = torch.tensor([2, 0, 0])
    assert top_k_hits(logits, labels, 1).tolist() == [False, True, False]
    assert top_k_hits(logits, labels, 2).tolist() == [True, True, False]


def test_any_of_several_labels_will_do():
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.8, 0.1, 0.3], [0.2, 0.3, 0.4]])
    labels = torch.tensor([[2, 1], [1, -1], [-1, -1]])
    assert top_k_hits(logits, labels, 1).tolist() == [True, False, False]
    assert top_k_hits(logits, labels, 3).tolist() == [True, True, False]


@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.booleans())
def test_accuracies_are_those_of_a_loop_over_images(seed, classes, several):
    draw = np.random.default_rng(seed)
    best = np.array([draw.permutation(classes)[:5] for _ in range(11)])
    labels = draw.integers(0 if not several else -1, classes, (11, 3) if several else 11)
    allowed = [{label for label in np.atleast_1d(row).tolist() if label >= 0} for row in labels]
    counted = [row for row in range(11) if allowed[row]]
    assert labelled(labels).tolist() == [bool(some) for some in allowed]
    found = accuracies(best, labels, classes)
    for name, k in (("accuracy", 1), ("top_5_accuracy", 5)):
        expected = [bool(set(best[row, :k].tolist()) & allowed[row]) for row in range(11)]
        assert hits(best, labels, k).tolist() == expected
        if counted and (k == 1 or classes > 5):
            assert found.pop(name) == sum(expected[row] for row in counted) / len(counted)
    assert found == {}  # with up to five classes, any five would do


def test_without_labels_there_is_no_accuracy():
    assert accuracies(np.zeros((2, 5), dtype=int), np.array([[-1, -1], [-1, -1]]), 10) == {}


@pytest.mark.parametrize("classes", [2, 5, 40, 1000])
def test_of_equal_logits_the_same_class_is_kept_and_counted(classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (500, classes), generator=generator).float()  # as bf16 has equal ones
    best = most_likely(logits)
    assert best.shape == (500, min(classes, 5)) and (best.sort(1).values.diff(dim=1) > 0).all()
    assert torch.equal(logits.gather(1, best), logits.sort(1, descending=True).values[:, :5])
    for k in range(1, min(classes, 5) + 1):
        labels = best[:, k - 1]
        assert top_k_hits(logits, labels, k).all() and not (k > 1 and top_k_hits(logits, labels, k - 1).any())
        assert hits(best.numpy(), labels.numpy(), k).all()
