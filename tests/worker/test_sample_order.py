"""Tests of the order of samples, which does not depend on the number of replicas."""

import time
import tracemalloc
from collections import Counter
from itertools import islice, pairwise, permutations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.feed import MicroBatches
from adascale_worker.batches.order import (
    Indices,
    SampleSequence,
    by_program,
    grouped,
    permute,
    sequential,
    shuffled,
)
from adascale_worker.errors import DatasetError

plans = st.builds(
    BatchPlan, replicas=st.integers(1, 5), local_bsz=st.integers(1, 7), accumulation=st.integers(1, 3)
)


def take_steps(sequence: SampleSequence, consumed: int, plan: BatchPlan, steps: int) -> list[int]:
    """Return the samples of `steps` steps of all replicas."""
    shares = [MicroBatches(sequence, consumed, plan, rank) for rank in range(plan.replicas)]
    return [
        index
        for share in shares
        for micro_batch in islice(iter(share), steps * plan.accumulation)
        for index in micro_batch
    ]


@given(
    length=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    phases=st.lists(st.tuples(plans, st.integers(0, 6)), min_size=1, max_size=5),
)
def test_each_pass_contains_every_sample_once_across_changes_of_replicas(
    length: int, seed: int, phases: list[tuple[BatchPlan, int]]
) -> None:
    consumed = 0
    taken: list[int] = []
    for plan, steps in phases:
        sequence = shuffled(length, seed)  # every process makes its own sequence
        samples = take_steps(sequence, consumed, plan, steps)
        assert len(samples) == steps * plan.global_bsz
        taken += samples
        consumed += steps * plan.global_bsz
    whole_passes, rest = divmod(consumed, length)
    counts = Counter(taken)
    assert all(whole_passes <= counts[index] <= whole_passes + 1 for index in range(length))
    assert sum(counts.values()) == whole_passes * length + rest


@given(length=st.integers(1, 60), seed=st.integers(0, 2**32), plan=plans, steps=st.integers(1, 5))
def test_all_replicas_together_take_the_samples_that_one_replica_would_take(
    length: int, seed: int, plan: BatchPlan, steps: int
) -> None:
    shared = take_steps(shuffled(length, seed), 0, plan, steps)
    single = shuffled(length, seed)[0 : steps * plan.global_bsz]
    assert Counter(shared) == Counter(single)


def test_passes_contain_the_same_samples_in_different_orders() -> None:
    sequence = shuffled(50, 3)
    first, second = sequence[0:50], sequence[50:100]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_seeds_give_different_orders() -> None:
    assert shuffled(50, 3)[0:50] != shuffled(50, 4)[0:50]


def test_unshuffled_passes_have_the_order_of_the_data_set() -> None:
    assert sequential(3, 0)[1:8] == [1, 2, 0, 1, 2, 0, 1]


# -- the permutation ------------------------------------------------------------------------------------


@given(length=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_the_permutation_has_each_number_once(length: int, key: int) -> None:
    assert sorted(permute(numpy.arange(length), length, key).tolist()) == list(range(length))


def test_the_order_is_that_of_the_format_of_checkpoints() -> None:
    """A change of these numbers needs another FORMAT in adascale_core/checkpoint_manifest.py."""
    assert shuffled(10, 3)[8:14] == [3, 7, 9, 8, 4, 1]
    assert shuffled(10**8, 3)[10**8 - 1 : 10**8 + 2] == [4726762, 69589406, 72410342]
    lengths = [4, 2, 9, 4, 1, 7, 3, 8, 2, 6]
    assert grouped(lengths, 3, 2)[8:14] == [0, 3, 9, 5, 7, 2]


def test_all_orders_of_four_samples_are_equally_frequent() -> None:
    draws = 2400
    counts = Counter(tuple(permute(numpy.arange(4), 4, key)) for key in range(draws))
    expected = draws / 24
    chi_squared = sum((counts[order] - expected) ** 2 / expected for order in permutations(range(4)))
    assert chi_squared < 58  # of 23 degrees of freedom, p = 0.0001; the keys are fixed


@pytest.mark.parametrize("length", [1000, 2**20, 10**8])
def test_samples_are_independent_of_their_place_their_neighbours_and_other_passes(length: int) -> None:
    positions = numpy.arange(min(length, 100_000))
    passes = [permute(positions, length, key) for key in range(200 if length == 1000 else 2)]

    def deviation(pairs: list[tuple[Indices, Indices]]) -> float:
        """Return the chi squared of the tables of 10 by 10 cells, in standard deviations from its mean."""
        cells = numpy.zeros((10, 10))
        for a, b in pairs:
            cells += numpy.histogram2d(a, b, bins=10, range=[[0, a.max() + 1], [0, length]])[0]
        expected = sum(len(a) for a, _ in pairs) / 100
        return float((((cells - expected) ** 2 / expected).sum() - 99) / (2 * 99) ** 0.5)

    assert deviation([(positions, images) for images in passes]) < 5
    for distance in (1, 7):
        assert deviation([(images[:-distance], images[distance:]) for images in passes]) < 5
    assert deviation(list(pairwise(passes))) < 5


def test_a_sequence_of_100_million_samples_needs_no_memory_and_does_not_block_the_interpreter() -> None:
    sequence = shuffled(10**8, 0)
    plan = BatchPlan(replicas=2, local_bsz=32, accumulation=1)
    cpu_time = time.thread_time()
    tracemalloc.start()
    first = next(iter(MicroBatches(sequence, 10**8 - 40, plan, 1)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    cpu_time = time.thread_time() - cpu_time
    assert len(set(first)) == 32
    assert max(first) < 10**8
    assert peak < 2**20  # 0.01 bytes per sample
    # Its own time of the processor bounds every block, and other processes do not change it.
    assert cpu_time < 0.05


# -- orders of the program ------------------------------------------------------------------------------


def test_the_program_determines_the_order_of_each_pass() -> None:
    def order(number: int, seed: int) -> list[int]:
        seeds.append(seed)
        return [number % 5, 1, 1, 4]

    seeds: list[int] = []
    sequence = by_program(order, 5, 0, number=0)
    assert sequence.length == 4
    assert sequence[2:10] == [1, 4, 1, 1, 1, 4, 2, 1]
    assert len(set(seeds)) == 3
    assert by_program(order, 5, 0, number=2)[8:10] == [2, 1]


@given(plan=plans, steps=st.integers(1, 5))
def test_replicas_share_an_order_of_the_program(plan: BatchPlan, steps: int) -> None:
    def sequence() -> SampleSequence:
        return by_program(
            lambda number, seed: numpy.random.default_rng(seed).integers(0, 10 + number, 30), 1000, 7, 0
        )

    shared = take_steps(sequence(), 0, plan, steps)
    assert Counter(shared) == Counter(sequence()[0 : steps * plan.global_bsz])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0, 5], r"returned the index 5, but the data set has 5 samples: .* from 0 to 4"),
        ([-1, 2], r"returned the index -1, but"),
        ([0.5, 1.0], r"an object of type list: it must return the indices"),
        ([[0, 1]], r"an object of type list: it must return the indices"),
        (None, r"an object of type NoneType: it must return the indices"),
    ],
)
def test_an_order_without_valid_indices_is_refused(returned: object, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        by_program(lambda _number, _seed: returned, 5, 0, 0)


def test_a_pass_with_another_number_of_samples_is_refused() -> None:
    sequence = by_program(lambda number, _seed: range(4 + number), 5, 0, 0)
    with pytest.raises(DatasetError, match=r"order\(1, seed\) returned 5 indices, but 4 in another pass"):
        sequence[0:5]


def test_samples_are_grouped_by_length_and_each_comes_once_per_pass() -> None:
    lengths = numpy.random.default_rng(0).integers(1, 500, 4 * 50 * 8 + 3)
    sequence = grouped(lengths, 3, group_size=8)
    passes = [sequence[start : start + len(lengths)] for start in (0, len(lengths))]
    assert passes[0] != passes[1]
    for order in passes:
        assert sorted(order) == list(range(len(lengths)))
        groups = [lengths[order[start : start + 8]] for start in range(0, 4 * 50 * 8, 8)]
        spreads = [int(group.max() - group.min()) for group in groups]
        assert sum(spreads) / len(spreads) < 20  # about 390 without groups
        means = [float(group.mean()) for group in groups]
        rising = sum(a < b for a, b in pairwise(means))
        assert 80 < rising < 120  # of 199: the groups are shuffled
