"""The replicas that jobs have used over time."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.views.usage import UsageGroup, UsedReplicas, usage


def test_the_means_of_intervals_count_parts_of_them() -> None:
    used = [UsedReplicas("a.x", 2, 95.0, 115.0), UsedReplicas("a.x", 4, 115.0, 120.0)]
    view = usage(used, 100.0, 140.0, 4, largest=5)
    assert (view.start, view.interval) == (100.0, 10.0)
    assert [(each.name, each.replicas) for each in view.largest] == [("a.x", [2.0, 3.0, 0.0, 0.0])]
    assert view.others == [0.0, 0.0, 0.0, 0.0]


def test_the_jobs_that_have_used_less_are_summed() -> None:
    used = [UsedReplicas(f"a.job-{number}", number, 0.0, 10.0) for number in range(1, 5)]
    view = usage(used, 0.0, 10.0, 1, largest=2)
    assert [each.name for each in view.largest] == ["a.job-4", "a.job-3"]
    assert (view.others, view.other_count) == ([3.0], 2)


def test_the_jobs_of_a_namespace_can_be_summed() -> None:
    used = [UsedReplicas(f"{team}.job-{number}", 2, 0.0, 10.0) for team in "aab" for number in range(3)]
    view = usage(used, 0.0, 10.0, 1, largest=2, by=UsageGroup.NAMESPACE)
    assert [(each.name, each.replicas) for each in view.largest] == [("a", [12.0]), ("b", [6.0])]
    assert (view.others, view.other_count) == ([0.0], 0)


def test_the_intervals_of_what_is_not_listed_take_no_memory() -> None:
    used = [UsedReplicas(f"a.job-{number}", 2, 0.5 * number, 1000.0) for number in range(1000)]
    tracemalloc.start()
    try:
        view = usage(used, 0.0, 1000.0, 1000, largest=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert view.other_count == 998
    assert peak < 2_000_000, "bytes"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 8), st.floats(-50, 150), st.floats(0, 100)),
        max_size=20,
    ),
    st.integers(1, 30),
)
def test_the_replica_seconds_are_kept(parts: list[tuple[str, int, float, float]], points: int) -> None:
    used = [UsedReplicas(job, count, start, start + length) for job, count, start, length in parts]
    view = usage(used, 0.0, 100.0, points, largest=2)
    means = [*view.others, *(mean for each in view.largest for mean in each.replicas)]
    expected = sum(each.replicas * max(min(each.end, 100.0) - max(each.start, 0.0), 0.0) for each in used)
    assert view.interval * sum(means) == pytest.approx(expected, abs=0.0006 * 100 * 3 + 1e-6)
