"""Jobs are looked at when they change, when their time has come, and each now and then."""

from __future__ import annotations

from collections import Counter
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from adascale_controller.operator.runtime.work_queue import SWEEP_INTERVAL, WorkQueue

NOW = 1_800_000_000.0


def planned(due: float = inf, background: float = inf, now: float = NOW) -> WorkQueue[str]:
    queue = WorkQueue[str]()
    queue.plan("a", now, due, background)
    return queue


def test_a_changed_job_is_looked_at_once() -> None:
    queue = WorkQueue[str]()
    queue.add(["a", "b", "a"])
    assert queue.take(NOW, 10) == ["a", "b"]
    assert queue.take(NOW, 10) == []


def test_a_job_is_looked_at_when_its_time_has_come() -> None:
    queue = planned(due=NOW + 10)
    assert queue.take(NOW + 9.9, 10) == []
    assert queue.take(NOW + 10, 10) == ["a"]
    assert queue.take(NOW + 11, 10) == [], "it is planned again by those who look at it"


def test_background_work_is_due_at_its_time() -> None:
    queue = planned(background=NOW + 30)
    assert queue.take(NOW + 29, 10) == []
    assert queue.take(NOW + 30, 10) == ["a"]


def test_a_job_without_any_time_is_looked_at_after_the_interval() -> None:
    queue = planned()
    assert queue.take(NOW + SWEEP_INTERVAL - 1, 10) == []
    assert queue.take(NOW + SWEEP_INTERVAL, 10) == ["a"]
    assert queue.take(NOW + 2 * SWEEP_INTERVAL, 10) == ["a"], "also if the look at it has failed"


def test_a_clock_that_is_set_back_delays_no_job() -> None:
    queue = planned(background=NOW + 30)
    assert queue.take(NOW - 2 * SWEEP_INTERVAL, 10) == ["a"]


def test_jobs_that_have_changed_do_not_wait_for_the_reports_of_all_jobs() -> None:
    queue = WorkQueue[str]()
    everyone = [f"job-{number}" for number in range(30)]
    queue.add_reported(everyone)
    queue.add(["changed", everyone[-1]])
    first = queue.take(NOW, 10)
    assert first[:2] == ["changed", everyone[-1]]
    assert len(first) == 10 + 2
    assert queue.has_reported
    assert queue.take(NOW, 0) == []
    seen = [*first, *queue.take(NOW, 10), *queue.take(NOW, 10), *queue.take(NOW, 10)]
    assert sorted(seen) == sorted(["changed", *everyone]), "each once"
    assert not queue.has_reported


def test_of_what_can_wait_the_oldest_is_first() -> None:
    queue = WorkQueue[str]()
    for number in range(200):
        queue.plan(f"job-{number}", NOW, inf, NOW + 50 - number % 50)
    due = {f"job-{number}" for number in range(200) if number % 50 >= 25}
    assert set(queue.take(NOW + 60, 100)) == due


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_reports_and_what_is_due_share_what_is_allowed(reported: int, due: int, limit: int) -> None:
    queue = WorkQueue[str]()
    queue.add_reported(f"reported-{number}" for number in range(reported))
    for number in range(due):
        queue.plan(f"due-{number}", NOW, inf, NOW)
    taken = queue.take(NOW, limit)
    assert len(taken) == min(limit, reported + due)
    kinds = Counter(name.split("-")[0] for name in taken)
    assert kinds["reported"] >= min(reported, limit // 2)
    assert kinds["due"] >= min(due, limit // 2)


def test_a_job_that_is_gone_is_not_looked_at() -> None:
    queue = planned(due=NOW + 1)
    queue.add(["a"])
    queue.add_reported(["a"])
    queue.discard(["a"])
    assert queue.take(NOW + 2 * SWEEP_INTERVAL, 10) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 300), st.floats(0, 300)), max_size=8))
def test_no_job_is_left_out_for_longer_than_the_interval(plans: list[tuple[str, float, float]]) -> None:
    queue = WorkQueue[str]()
    for job, due, background in plans:
        queue.plan(job, NOW, NOW + due, NOW + background)
    seen = {job for second in range(int(SWEEP_INTERVAL) + 1) for job in queue.take(NOW + second, 10)}
    assert seen == {job for job, _, _ in plans}
