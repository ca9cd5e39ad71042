"""Which replica is slow: a table, properties, and simulated steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.performance.slow_replica import (
    END_FACTOR,
    MIN_ERRORS,
    SLOW_FACTOR,
    WINDOW,
    RecentTimes,
    SlowReplica,
    TypicalTime,
    slow_replica,
)


@pytest.mark.parametrize(
    ("times", "previous", "slow"),
    [
        ([], None, None),
        ([0.1], None, None),
        ([0.1, 0.1], None, None),
        ([0.1, 0.12], None, 1),
        ([0.12, 0.1], None, 0),
        ([0.1, 0.114], None, None),
        ([0.1, 0.1, 0.12, 0.1], None, 2),
        ([0.1, 0.12, 0.12, 0.12], None, None),  # one that is fast is not the reason for the others to wait
        ([0.1, 0.1, 0.12, 0.13], None, 3),
        ([0.1, 0.0], None, None),
        ([0.0, 0.12, 0.1], None, None),
        ([0.1, 0.112], SlowReplica(1, 1.2), 1),
        ([0.1, 0.109], SlowReplica(1, 1.2), None),
        ([0.112, 0.1], SlowReplica(1, 1.2), None),
    ],
)
def test_slowest_replica_is_slow_from_a_factor_on(
    times: list[float], previous: SlowReplica | None, slow: int | None
) -> None:
    found = slow_replica(times, [0.0] * len(times), previous)
    assert (found.replica if found is not None else None) == slow


@pytest.mark.parametrize(
    ("slowest", "others", "is_slow"),
    [
        (0.0, (0.0,), True),
        (0.03, (0.0,), False),
        (0.0, (0.03,), False),
        (0.02, (0.0, 0.0), True),
        (0.02, (0.02, 0.02), False),
        (0.01, (0.01, 0.01, 0.5), True),  # one other that varies much hides no slow one
    ],
)
def test_difference_counts_from_8_of_its_standard_errors_on(
    slowest: float, others: tuple[float, ...], is_slow: bool
) -> None:
    times, errors = [1.2] + [1.0] * len(others), [slowest, *others]
    found = slow_replica(times, errors)
    assert (found is not None) is is_slow
    # A replica that was slow is slow until its time is near those of the others.
    assert slow_replica(times, errors, SlowReplica(0, 1.2)) == SlowReplica(0, 1.2)


@given(
    st.lists(st.floats(1e-4, 1e3), min_size=2, max_size=64),
    st.sampled_from([0.0, 0.01, 0.1]),
    st.none() | st.builds(SlowReplica, st.integers(0, 63), st.floats(1.1, 9.0)),
)
def test_slow_replica_is_the_slowest_and_slower_than_the_median_of_the_others(
    times: list[float], error: float, previous: SlowReplica | None
) -> None:
    found = slow_replica(times, [error] * len(times), previous)
    if found is None:
        usual = median(sorted(times)[:-1])
        assert max(times) < SLOW_FACTOR * usual or max(times) - usual < MIN_ERRORS * error * 1.415
        return
    others = times[: found.replica] + times[found.replica + 1 :]
    assert times[found.replica] == max(times)
    assert found.factor == times[found.replica] / median(others) >= END_FACTOR


@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=16),
    st.floats(0.01, 100.0),
    st.randoms(use_true_random=False),
)
def test_unit_and_order_do_not_matter(times: list[float], unit: float, rng: random.Random) -> None:
    def factor(of: Sequence[float]) -> float | None:
        found = slow_replica(of, [0.0] * len(of))
        return found.factor if found is not None else None

    shuffled = [seconds * unit for seconds in times]
    rng.shuffle(shuffled)
    if abs(max(times) / median(sorted(times)[:-1]) - SLOW_FACTOR) > 1e-9:
        assert factor(shuffled) == pytest.approx(factor(times))


def test_typical_time_needs_a_full_window() -> None:
    recent = RecentTimes()
    for _ in range(WINDOW - 1):
        recent.add(0.1)
    assert recent.typical == TypicalTime()
    recent.add(5.0)
    assert recent.typical == pytest.approx((0.1, 0.0))
    recent.clear()
    assert recent.typical == TypicalTime()


def test_error_is_that_of_the_typical_times_of_independent_windows() -> None:
    rng = random.Random(3)
    found = []
    for _ in range(2000):
        recent = RecentTimes()
        for _ in range(WINDOW):
            recent.add(rng.gauss(1.0, 0.1))
        found.append(recent.typical)
    deviation = stdev(typical.seconds for typical in found)
    assert fmean(typical.error for typical in found) == pytest.approx(deviation, rel=0.1)


def _simulated(
    replicas: int, steps: int, noise: float, seed: int, factor: Callable[[int, int], float], interval: int
) -> tuple[int, SlowReplica] | None:
    """Return the first step at which a replica is found slow, and which.

    Times are log-normal, and one of 100 is a stall of up to 20 times as long. The replicas compare them every
    `interval` steps.
    """
    rng = random.Random(seed)
    recent = [RecentTimes() for _ in range(replicas)]
    for step in range(1, steps + 1):
        for rank, times in enumerate(recent):
            stall = rng.uniform(2.0, 20.0) if rng.random() < 0.01 else 1.0
            times.add(rng.lognormvariate(0.0, noise) * stall * factor(rank, step))
        if step % interval == 0:
            typical, errors = zip(*(times.typical for times in recent), strict=True)
            found = slow_replica(typical, errors)
            if found is not None:
                return step, found
    return None


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("interval", [1, 16])
def test_replica_that_is_slower_by_20_percent_is_found_within_50_steps(replicas: int, interval: int) -> None:
    for seed in range(20):
        slow, begin = seed % replicas, 10 * (seed % 5)
        found = _simulated(
            replicas,
            begin + 50,
            0.05,
            seed,
            lambda rank, step, slow=slow, begin=begin: 1.2 if rank == slow and step > begin else 1.0,  # type: ignore[misc]
            interval,
        )
        assert found is not None, f"seed {seed}: not found"
        assert found[1].replica == slow
        assert SLOW_FACTOR <= found[1].factor < 1.4


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
@pytest.mark.parametrize(
    ("replicas", "steps"),
    [(2, 10_000), pytest.param(8, 100_000, marks=pytest.mark.slow)],
)
def test_no_replica_is_slow_in_many_steps_of_equal_replicas(replicas: int, steps: int, noise: float) -> None:
    assert _simulated(replicas, steps, noise, 7, lambda rank, step: 1.0, 4) is None
