"""mpp/metrics.py against NumPy."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpp.metrics import Tally, entropy, means, sum_and_count, top_k_hits


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
