"""mpp/corruption.py: exact counts, the paper's shares, and what happens to each token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpp.corruption import KEEP, MASK, RANDOM, corrupt, corrupted_count, plan, take
from mpp.errors import UserError


@settings(deadline=None)
@given(
    index=st.integers(0, 2**32 - 1),
    patches=st.integers(2, 300),
    share=st.floats(0.2, 1.0),
    purpose=st.sampled_from(["corruption", "held-out corruption"]),
)
def test_a_plan_is_exact_and_distinct(index, patches, share, purpose):
    count = round(share * patches)
    if count < 1:
        return
    found = plan(0, 0, index, patches, share, purpose)
    positions = found["positions"]
    assert len(positions) == len(set(positions.tolist())) == count
    assert (np.diff(positions) > 0).all() and positions.min() >= 0 and positions.max() < patches
    assert set(found["actions"].tolist()) <= {MASK, RANDOM, KEEP}
    assert (found["donors"] != positions).all()
    assert found["donors"].min() >= 0 and found["donors"].max() < patches


def test_the_papers_image_has_98_of_196():
    assert corrupted_count(196, 0.5) == 98
    assert corrupted_count(49, 0.5) == 24  # Python's round, half to even


def test_a_plan_is_a_pure_function_of_seed_epoch_and_index():
    later = plan(3, 4, 5, 64, 0.5)
    plan(0, 0, 0, 64, 0.5)
    again = plan(3, 4, 5, 64, 0.5)
    assert all(np.array_equal(later[key], again[key]) for key in later)
    for other in [(2, 4, 5), (3, 3, 5), (3, 4, 6)]:
        assert not np.array_equal(later["positions"], plan(*other, 64, 0.5)["positions"])
    assert not np.array_equal(later["positions"], plan(3, 4, 5, 64, 0.5, "held-out corruption")["positions"])


def test_golden_plan_never_changes():
    found = plan(0, 0, 0, 16, 0.5)
    assert {key: value.tolist() for key, value in found.items()} == {
        "positions": [3, 4, 6, 7, 8, 9, 12, 13],
        "actions": [0, 2, 0, 0, 0, 0, 0, 0],
        "donors": [11, 0, 4, 4, 4, 15, 0, 4],
    }


def test_shares_over_many_images():
    plans = [plan(1, 0, index, 196, 0.5) for index in range(1100)]
    actions = np.concatenate([found["actions"] for found in plans])
    assert len(actions) > 100_000
    for action, share in [(MASK, 0.8), (RANDOM, 0.1), (KEEP, 0.1)]:
        sigma = (share * (1 - share) / len(actions)) ** 0.5
        assert abs((actions == action).mean() - share) < 4 * sigma
    chosen = np.bincount(np.concatenate([found["positions"] for found in plans]), minlength=196) / len(plans)
    assert abs(chosen - 0.5).max() < 5 * (0.25 / len(plans)) ** 0.5  # every place alike
    offset = np.concatenate([(found["donors"] - found["positions"]) % 196 for found in plans])
    counts = np.bincount(offset, minlength=196)
    assert counts[0] == 0  # never itself
    expected = len(offset) / 195
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 195 + 5 * (2 * 195) ** 0.5  # chi-square: every other alike


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_the_share_reaches_the_plan(share):
    assert len(plan(0, 0, 0, 100, share)["positions"]) == 100 * share


@pytest.mark.parametrize(("patches", "share"), [(4, 0.1), (1, 1.0)])
def test_nothing_to_corrupt_or_no_donor_is_refused(patches, share):
    with pytest.raises(UserError, match="objective.corruption"):
        plan(0, 0, 0, patches, share)


def test_corrupt_by_hand():
    tokens = torch.arange(12.0).reshape(1, 6, 2)
    mask = torch.tensor([-1.0, -2.0])
    positions, donors = torch.tensor([[0, 2, 5]]), torch.tensor([[3, 0, 1]])
    actions = torch.tensor([[MASK, RANDOM, KEEP]])
    found = corrupt(tokens, mask, positions, actions, donors)
    # The donor of position 2 is position 0, which is itself masked: it gives what it was before.
    assert found[0].tolist() == [[-1, -2], [2, 3], [0, 1], [6, 7], [8, 9], [10, 11]]


def test_untouched_and_kept_tokens_are_the_same_bits():
    tokens = torch.randn(4, 64, 8)
    plans = [plan(0, 0, index, 64, 0.5) for index in range(4)]
    positions, actions, donors = (
        torch.from_numpy(np.stack([p[key] for p in plans])) for key in ("positions", "actions", "donors")
    )
    found = corrupt(tokens, torch.randn(8), positions, actions, donors)
    changed = (found != tokens).any(-1)
    for image in range(4):
        replaced = positions[image][actions[image] != KEEP]
        assert set(changed[image].nonzero().flatten().tolist()) == set(replaced.tolist())


def test_gradient_reaches_mask_and_donors_but_not_what_was_replaced():
    tokens = torch.randn(1, 4, 3, requires_grad=True)
    mask = torch.randn(3, requires_grad=True)
    found = corrupt(tokens, mask, torch.tensor([[0, 1]]), torch.tensor([[MASK, RANDOM]]), torch.tensor([[2, 3]]))
    found.sum().backward()
    assert mask.grad.tolist() == [1, 1, 1]
    assert tokens.grad[0, :, 0].tolist() == [0, 0, 1, 2]  # patch 3 is itself and patch 1


def test_take_with_any_trailing_shape():
    values = torch.arange(24).reshape(1, 4, 2, 3)
    assert torch.equal(take(values, torch.tensor([[3, 1]]))[0], values[0, [3, 1]])
