"""mpp/order.py and the shares of processes: each sample once an epoch, whatever the machine looks like."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpp import data
from mpp.order import Order

SHARDS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum)


def starts(sizes):
    return np.concatenate([[0], np.cumsum(sizes)])


@settings(deadline=None)
@given(sizes=SHARDS, window=st.integers(1, 13), seed=st.integers(0, 99), epochs=st.integers(1, 3))
def test_an_epoch_reads_every_sample_once(sizes, window, seed, epochs):
    count = sum(sizes)
    found_epochs, samples = Order(seed, starts(sizes), window).at(np.arange(epochs * count))
    assert found_epochs.tolist() == np.repeat(np.arange(epochs), count).tolist()
    for epoch in range(epochs):
        assert sorted(samples[found_epochs == epoch]) == list(range(count))


@settings(deadline=None)
@given(
    sizes=SHARDS, window=st.integers(1, 13), seed=st.integers(0, 99), places=st.lists(st.integers(0, 500), min_size=1)
)
def test_a_place_is_the_same_in_whatever_company_it_is_asked_for(sizes, window, seed, places):
    together = Order(seed, starts(sizes), window).at(np.array(places))
    alone = [Order(seed, starts(sizes), window).at(np.array([place])) for place in places]
    assert together[0].tolist() == [int(epoch[0]) for epoch, _ in alone]
    assert together[1].tolist() == [int(sample[0]) for _, sample in alone]


def test_a_window_reads_its_shards_to_the_end_before_the_next():
    sizes = [5, 3, 4, 6, 2, 7]
    _, samples = Order(1, starts(sizes), 2).at(np.arange(sum(sizes)))
    shards = np.searchsorted(starts(sizes), samples, side="right") - 1
    seen, left = [], list(shards)
    while left:
        pair = set(left[:1])
        while left and (left[0] in pair or len(pair) < 2):
            pair.add(left.pop(0))
        seen.append(pair)
    assert len(seen) == 3 and set().union(*seen) == set(range(6))
    assert any(len(set(shards[: sizes[a] + sizes[b]])) == 2 for a in seen[0] for b in seen[0] if a < b)


@pytest.mark.parametrize("count", [5, 10, 64])
def test_shuffles_are_even(count):
    # Where each sample comes to stand, and which follows which, over many seeds: chi-squared near its freedom.
    runs = 3000
    where, follows = np.zeros((count, count)), np.zeros((count, count))
    for seed in range(runs):
        _, samples = Order(seed, np.array([0, count]), 1).at(np.arange(count))
        where[np.arange(count), samples] += 1
        follows[samples[:-1], samples[1:]] += 1
    pairs = follows[~np.eye(count, dtype=bool)]
    for counts, freedom in ((where, (count - 1) ** 2), (pairs, pairs.size - 1)):
        expected = counts.sum() / counts.size
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_seeds_epochs_and_windows_have_their_own_orders():
    def first(seed, place):
        return tuple(Order(seed, np.array([0, 30]), 1).at(np.arange(place, place + 30))[1])

    assert len({first(0, 0), first(1, 0), first(0, 30), first(0, 60)}) == 4
    _, samples = Order(0, starts([20] * 4), 1).at(np.arange(80))
    inside = [tuple(samples[part : part + 20] % 20) for part in (0, 20, 40, 60)]
    assert len(set(inside)) == 4


def test_golden_order_never_changes():
    # Written down once; a change here changes what every earlier run would read.
    assert Order(0, np.array([0, 10]), 1).at(np.arange(10))[1].tolist() == [4, 8, 0, 5, 6, 9, 2, 7, 1, 3]
    assert Order(7, starts([3, 4, 5]), 2).at(np.arange(12, 24))[1].tolist() == [5, 7, 10, 4, 11, 9, 8, 3, 6, 0, 2, 1]


def test_three_hundred_million_images_take_no_more_memory_than_ten():
    import tracemalloc

    tracemalloc.start()
    order = Order(0, np.array([0, 300_000_000]), 1)
    _, samples = order.at(np.arange(1_000_000, 1_004_096))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(samples)) == 4096 and samples.max() > 290_000_000
    assert peak < 2_000_000


# ---- processes, workers, resume


@settings(deadline=None)
@given(
    processes=st.integers(1, 64),
    micro=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    length=st.integers(1, 200),
    first=st.integers(0, 6),
    other=st.integers(1, 64),
)
def test_any_number_of_processes_reads_the_same_batches_from_any_step(
    processes, micro, accumulation, length, first, other
):
    batch = processes * micro * accumulation
    order = Order(0, np.array([0, length]), 1)

    def batches(processes, micro, steps):
        for step in steps:
            places = [
                place
                for process in range(processes)
                for part in data.read_order(step, batch, micro, processes, process)
                for place in part
            ]
            yield sorted(map(tuple, np.stack(order.at(np.array(places))).T.tolist()))

    straight = list(batches(processes, micro, range(8)))
    assert [len(places) for places in straight] == [batch] * 8
    assert list(batches(processes, micro, range(first, 8))) == straight[first:]
    fits = next(count for count in range(other, 0, -1) if batch % count == 0)  # another machine
    assert list(batches(fits, 1, range(first, 8))) == straight[first:]
    # Over all steps every sample is read as often as every other, within one.
    seen = np.bincount([sample for places in straight for _, sample in places], minlength=length)
    assert seen.max() - seen.min() <= 1


@given(count=st.integers(1, 300), micro=st.integers(1, 40), processes=st.integers(1, 64), workers=st.integers(0, 8))
def test_held_out_samples_are_read_once(count, micro, processes, workers):
    seen = []
    for process in range(processes):
        batches = list(data.held_out_order(count, micro, processes, process))
        assert all(len(batch) == micro for batch in batches[:-1])
        # torch hands whole batches to workers in turn
        shares = [batches[worker::workers] for worker in range(workers)] if workers else [batches]
        seen += [place for share in shares for batch in share for place in batch]
    assert sorted(seen) == list(range(count))
