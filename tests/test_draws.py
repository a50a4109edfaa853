"""mpp/draws.py: golden words, and independence of everything but the key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpp import draws


def test_words_are_philox_of_the_seed_sequence():
    bits = np.random.Philox(np.random.SeedSequence((7, 2, 3, 11)))
    assert draws.words(7, "corruption", 3, 11, 5).tolist() == [bits.random_raw() for _ in range(5)]


def test_golden_words_never_change():
    # Written down once; a change here changes what every earlier run would read.
    assert draws.words(0, "order", 0, 0, 2).tolist() == [259491006799949737, 4754966410622352325]
    assert draws.words(1, "augment", 2, 3, 2).tolist() == [922551694772640032, 6539067217464825250]


def test_purposes_seeds_epochs_and_indices_have_their_own_streams():
    keys = [
        (0, "augment", 0, 0),
        (0, "corruption", 0, 0),
        (1, "augment", 0, 0),
        (0, "augment", 1, 0),
        (0, "augment", 0, 1),
    ]
    assert len({int(draws.words(*key, 1)[0]) for key in keys}) == len(keys)
    assert len(set(draws.PURPOSES.values())) == len(draws.PURPOSES)


def test_numbers_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match="32"):
        draws.words(2**32, "order", 0, 0, 1)
    with pytest.raises(ValueError, match="index=-1"):
        draws.words(0, "order", 0, -1, 1)


def test_uniforms_at_the_ends_of_the_range():
    ends = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert draws.uniforms(ends).tolist() == [0.0, 1.0 - 2.0**-53]
    assert draws.below(ends, 10).tolist() == [0, 9]


@given(seed=st.integers(0, 2**32 - 1), rounds=st.sampled_from([2, 4, 8]), count=st.integers(1, 3000))
def test_a_permutation_holds_every_number_once(seed, rounds, count):
    keys = draws.words(seed, "order", 0, 0, rounds)
    assert sorted(draws.permuted(keys, count, np.arange(count))) == list(range(count))


def test_the_network_is_what_its_description_says():
    # The same in Python's own integers, one round after the other, on a grid of 4 columns and 3 rows.
    keys = [int(key) for key in draws.words(5, "order", 0, 0, 4)]

    def mixed(value):
        value %= 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    def encipher(cell):
        row, column = divmod(cell, 4)
        row = (row + mixed(column + keys[0])) % 3
        column = (column + mixed(row + keys[1])) % 4
        row = (row + mixed(column + keys[2])) % 3
        return row * 4 + (column + mixed(row + keys[3])) % 4

    expected = []
    for place in range(11):
        found = encipher(place)
        while found >= 11:
            found = encipher(found)
        expected.append(found)
    assert draws.permuted(np.array(keys, dtype=np.uint64), 11, np.arange(11)).tolist() == expected


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), seed=st.integers(0, 99))
def test_ranks_count_up_within_each_class(labels, seed):
    ranks = draws.ranked_within_class(seed, "subset", np.array(labels))
    for label in set(labels):
        mine = [rank for rank, other in zip(ranks, labels, strict=True) if other == label]
        assert sorted(mine) == list(range(len(mine)))


def test_step_seeds_differ_by_step_and_process():
    seeds = {draws.step_seed(0, step, process) for step in range(10) for process in range(4)}
    assert len(seeds) == 40
    assert all(0 <= seed < 2**63 for seed in seeds)
