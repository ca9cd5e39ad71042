"""Tests of the sample stream: the order does not depend on the number of replicas."""

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.stream import MicroBatches, SampleStream

plans = st.builds(
    BatchPlan, replicas=st.integers(1, 5), local_bsz=st.integers(1, 7), accumulation=st.integers(1, 3)
)


def take_steps(stream: SampleStream, consumed: int, plan: BatchPlan, steps: int) -> list[int]:
    """Return the samples of `steps` steps of all replicas."""
    shares = [MicroBatches(stream, consumed, plan, rank) for rank in range(plan.replicas)]
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
        stream = SampleStream(length, seed)  # every process makes its own stream
        samples = take_steps(stream, consumed, plan, steps)
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
    shared = take_steps(SampleStream(length, seed), 0, plan, steps)
    single = SampleStream(length, seed)[0 : steps * plan.global_bsz]
    assert Counter(shared) == Counter(single)


def test_passes_contain_the_same_samples_in_different_orders() -> None:
    stream = SampleStream(50, seed=3)
    first, second = stream[0:50], stream[50:100]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_seeds_give_different_orders() -> None:
    assert SampleStream(50, seed=3)[0:50] != SampleStream(50, seed=4)[0:50]


def test_unshuffled_passes_have_the_order_of_the_data_set() -> None:
    assert SampleStream(3, seed=0, shuffle=False)[1:8] == [1, 2, 0, 1, 2, 0, 1]
