"""Lookups: claims and Events are fetched beside the cycle, and pods that start slowly are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import (
    CONTAINER_CREATING_TIMEOUT,
    CONTAINER_START_TIMEOUT,
    START_EVENTS,
    Pod,
    PodProblem,
    with_start_problem,
)
from adascale_controller.operator.runtime import lookup_fetcher
from adascale_controller.operator.runtime.lookup_fetcher import EventReader, LookupFetcher
from adascale_controller.operator.types.kubernetes import ApiObject, ConditionType, JobKey, timestamp
from support.definitions import define
from support.fake_api_server import FakeApiServer
from support.observed_jobs import (
    NOW,
    SPEC,
    actions_for,
    checkpoint_settings,
    condition,
    job,
    observed,
    pod,
    view,
)

SHARED_CLAIM: ApiObject = {"spec": {"accessModes": ["ReadWriteMany"]}}
GetClaim = Callable[[str], Awaitable[ApiObject | None]]
ListEvents = Callable[[str, str], Awaitable[Sequence[ApiObject]]]


# -- the fetcher --------------------------------------------------------------------------------------------


class ClaimCluster(FakeApiServer):
    """A cluster whose claims are answered by a function of the claim's name."""

    def __init__(self, get_claim: GetClaim) -> None:
        super().__init__()
        self._get_claim = get_claim

    async def get_claim(self, namespace: str, name: str) -> ApiObject | None:
        return await self._get_claim(name)


def cached(name: str) -> ObservedJob:
    """Return a job that saves its checkpoints in a claim of the same name."""
    parsed = define(f"team.{name}", SPEC, checkpoint=checkpoint_settings(claim_name=name))
    template = {"spec": {"containers": [{"name": "worker"}]}}
    resource = AdaScaleJob("team", name, f"uid-{name}", 1, 0, parsed, template=template)
    return ObservedJob(resource, (), frozenset())


def test_a_call_that_hangs_for_one_job_delays_no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_fetcher, "CYCLE_WAIT", 0.05)

    async def main() -> None:
        answer = asyncio.Event()
        reported = asyncio.Event()
        calls: list[str] = []

        async def get_claim(name: str) -> ApiObject:
            calls.append(name)
            if name == "slow":
                await answer.wait()
            return SHARED_CLAIM

        fetcher = LookupFetcher(ClaimCluster(get_claim), lambda _: reported.set())
        slow, fast = cached("slow"), cached("fast")
        loop = asyncio.get_running_loop()
        for cycle in range(3):
            started_at = loop.time()
            await fetcher.fetch([slow, fast], NOW + cycle)
            assert loop.time() - started_at < 1.0
            results = fetcher.results(fast)
            assert results is not None
            assert results.claim is not None
            assert fetcher.results(slow) is None
        assert calls == ["slow", "fast"], "a call is repeated while it runs"
        answer.set()
        async with asyncio.timeout(5):
            await reported.wait()
        results = fetcher.results(slow)
        assert results is not None
        assert results.claim is not None
        assert results.claim.exists

    asyncio.run(main())


def test_a_call_that_hangs_fails_at_its_deadline_and_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_fetcher, "DEADLINE", 0.01)

    async def main() -> None:
        calls: list[str] = []

        async def get_claim(name: str) -> ApiObject:
            calls.append(name)
            await asyncio.Event().wait()
            raise AssertionError

        fetcher = LookupFetcher(ClaimCluster(get_claim), lambda _: None)
        slow = cached("slow")
        await fetcher.fetch([slow], NOW)
        with pytest.raises(ApiServerError, match="does not answer within"):
            fetcher.results(slow)
        await fetcher.fetch([slow], NOW + 1)
        assert calls == ["slow", "slow"]

    asyncio.run(main())


def test_a_job_keeps_its_last_result_while_a_later_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_fetcher, "CYCLE_WAIT", 0.01)

    async def main() -> None:
        calls: list[str] = []

        async def get_claim(name: str) -> ApiObject | None:
            calls.append(name)
            if len(calls) > 1:
                await asyncio.Event().wait()
            return None

        fetcher = LookupFetcher(ClaimCluster(get_claim), lambda _: None)
        slow = cached("slow")
        for second in (0, 1, 5, 6):
            await fetcher.fetch([slow], NOW + second)
            results = fetcher.results(slow)
            assert results is not None
            assert results.claim is not None
            assert not results.claim.exists
        assert len(calls) == 2, "a claim that does not exist is read again after 5 s"

    asyncio.run(main())


def test_no_more_calls_run_at_once_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_fetcher, "MAX_CONCURRENT", 3)

    async def main() -> None:
        running, most = 0, 0

        async def get_claim(name: str) -> ApiObject:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.005)
            running -= 1
            return SHARED_CLAIM

        fetcher = LookupFetcher(ClaimCluster(get_claim), lambda _: None)
        jobs = [cached(f"job-{number}") for number in range(10)]
        await fetcher.fetch(jobs, NOW)
        assert all(fetcher.results(each) is not None for each in jobs)
        assert most == 3

    asyncio.run(main())


def test_a_refusal_is_kept_until_pods_are_created_and_its_text_only_changes_with_its_reason() -> None:
    invalid = replace(job(), job=None)
    fetcher, seen, shown = LookupFetcher(FakeApiServer(), lambda _: None), observed(invalid), []
    denied, again, quota = (
        ApiServerError("rejects it", 403, reply) for reply in ("no 1", "no 2", "exceeded quota: gpus")
    )
    for error in (denied, again, quota, None):
        fetcher.note_creation("job-uid", error)
        results = fetcher.results(seen)
        assert results is not None
        shown.append(None if results.refusal is None else (results.refusal.reason, results.refusal.message))
    first = (Reason.POD_CREATION_FAILED, "no 1")
    assert shown == [first, first, (Reason.QUOTA_EXCEEDED, "exceeded quota: gpus"), None]


class EventsCluster(FakeApiServer):
    """A cluster that answers reads of Events by a function of namespace and selector."""

    def __init__(self, list_events: ListEvents) -> None:
        super().__init__()
        self._list_events = list_events

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        return await self._list_events(namespace, field_selector)


def starting_slowly(number: int) -> ObservedJob:
    """Return a job with a pod that has been on its node for long without starting a container."""
    name = f"digits-{number}"
    resource = AdaScaleJob("team", name, f"uid-{name}", 1, 0, None)
    slow = creating_pod(CONTAINER_START_TIMEOUT + 1, uid=f"uid-of-pod-{number}")
    return ObservedJob(resource, (slow,), frozenset())


def test_all_jobs_of_a_namespace_with_pods_that_start_slowly_share_one_read_of_events() -> None:

    async def main() -> None:
        reads: list[tuple[str, str]] = []

        async def list_events(namespace: str, selector: str) -> Sequence[ApiObject]:
            reads.append((namespace, selector))
            return [
                {**event("FailedMount", f"of {each}"), "involvedObject": {"uid": f"uid-of-pod-{each}"}}
                for each in range(100)
            ]

        returned = set()
        all_returned = asyncio.Event()

        def on_result(key: JobKey) -> None:
            returned.add(key)
            if len(returned) == len(jobs):
                all_returned.set()

        fetcher = LookupFetcher(EventsCluster(list_events), on_result)
        jobs = [starting_slowly(number) for number in range(100)]
        await fetcher.fetch(jobs, NOW)
        assert not reads, "a job with other changes waits for Events"
        async with asyncio.timeout(5):
            await all_returned.wait()
        assert reads == [("team", START_EVENTS)]
        for number, each in enumerate(jobs):
            results = fetcher.results(each)
            assert results is not None
            assert [raw["message"] for raw in results.slow_pod[1]] == [f"of {number}"]

    asyncio.run(main())


def test_reads_of_events_are_made_one_at_a_time_with_rests_between_them() -> None:

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        reads: list[tuple[float, float]] = []

        async def list_events(namespace: str, selector: str) -> Sequence[ApiObject]:
            start = clock()
            await asyncio.sleep(0.01)
            reads.append((start, clock()))
            if namespace == "refused":
                raise ApiServerError("refused", 403)
            return []

        reader = EventReader(EventsCluster(list_events), deadline=60.0)
        answers = await asyncio.gather(*(reader.read(name) for name in ("a", "refused", "b", "a")))
        assert answers == [{}, None, {}, {}]
        assert len(reads) == 3
        for (start, end), (next_start, _) in pairwise(reads):
            assert next_start - end >= 9 * (end - start) - 0.01

    asyncio.run(main())


def test_a_read_of_events_that_hangs_fails_at_its_deadline_and_is_made_again() -> None:

    async def main() -> None:
        answers: list[Awaitable[Sequence[ApiObject]]] = [asyncio.sleep(60, []), asyncio.sleep(0, [])]

        async def list_events(namespace: str, selector: str) -> Sequence[ApiObject]:
            return await answers.pop(0)

        reader = EventReader(EventsCluster(list_events), deadline=0.01)
        assert await reader.read("team") is None
        assert await reader.read("team") == {}

    asyncio.run(main())


def test_claims_are_read_while_reads_of_events_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_fetcher, "CYCLE_WAIT", 0.01)

    async def main() -> None:
        async def list_events(namespace: str, selector: str) -> Sequence[ApiObject]:
            await asyncio.Event().wait()
            return []

        fetcher = LookupFetcher(EventsCluster(list_events), lambda _: None)
        jobs = [starting_slowly(number) for number in range(lookup_fetcher.MAX_CONCURRENT + 1)]
        await fetcher.fetch(jobs, NOW)
        claimed = cached("claimed")
        await fetcher.fetch([claimed], NOW + 2)
        assert fetcher.results(claimed) is not None

    asyncio.run(main())


# -- pods in ContainerCreating ------------------------------------------------------------------------------


def event(reason: str, message: str, kind: str = "Warning", moment: float = NOW) -> dict[str, Any]:
    return {"reason": reason, "message": message, "type": kind, "lastTimestamp": timestamp(moment)}


def problem_after(seconds: float, *events: ApiObject, **changes: Any) -> PodProblem | None:
    """Return the problem of a pod that was assigned to its node some seconds ago."""
    creating = creating_pod(seconds, **changes)
    return with_start_problem(creating, events, NOW).problem


def creating_pod(seconds: float, **changes: Any) -> Pod:
    state: dict[str, Any] = {
        "created_at": NOW - seconds - 300,
        "scheduled_at": NOW - seconds,
        "phase": "Pending",
        "has_started": False,
    }
    return pod(0, **state | changes)


def test_an_event_about_a_failed_start_is_reported_after_ten_seconds() -> None:
    failed = event("FailedMount", 'configmap "settings" not found')
    assert problem_after(CONTAINER_START_TIMEOUT, failed) is None
    problem = problem_after(CONTAINER_START_TIMEOUT + 1, failed)
    assert problem == PodProblem(Reason.CONTAINER_START_FAILED, 'FailedMount: configmap "settings" not found')


@pytest.mark.parametrize(
    ("events", "is_over"),
    [
        ([event("Pulling", "Pulling image", "Normal", NOW)], True),
        ([event("Pulling", "Pulling image", "Normal", NOW - 9)], True),
        ([event("Pulling", "Pulling image", "Normal", NOW - 10)], False),
        ([event("Odd", "unknown warning", moment=NOW)], False),
    ],
    ids=["pulls", "pulls since the same second", "pulled before", "another warning"],
)
def test_a_failed_start_is_over_once_the_image_is_pulled(events: list[ApiObject], is_over: bool) -> None:
    failed = event("FailedMount", "not yet", moment=NOW - 9)
    problem = problem_after(CONTAINER_CREATING_TIMEOUT + 1, failed, *events)
    assert problem is not None
    if is_over:
        assert problem.reason is Reason.CONTAINER_CREATING
        assert problem.message.endswith("on node node1: Pulling: Pulling image")
    else:
        assert problem == PodProblem(Reason.CONTAINER_START_FAILED, "FailedMount: not yet")


INIT_RUNS: dict[str, Any] = {"has_started": True, "init_container": "fetch"}


@pytest.mark.parametrize(
    ("events", "changes", "message"),
    [
        ([], {}, "has been in ContainerCreating"),
        ([], INIT_RUNS, "has waited for init container fetch"),
        ([event("FailedMount", "not yet")], INIT_RUNS, "has waited for init container fetch"),
    ],
    ids=["without events", "an init container", "a failed start is over once an init container runs"],
)
def test_a_pod_without_a_problem_that_starts_slowly_is_reported_after_a_minute(
    events: list[ApiObject], changes: dict[str, Any], message: str
) -> None:
    assert problem_after(CONTAINER_CREATING_TIMEOUT, *events, **changes) is None
    problem = problem_after(CONTAINER_CREATING_TIMEOUT + 1, *events, **changes)
    assert problem is not None
    assert problem.reason is Reason.CONTAINER_CREATING
    assert problem.message == f"pod digits-0 {message} for more than 60 s on node node1"
    assert not problem.blocks


@pytest.mark.parametrize(
    ("events", "detail"),
    [
        ([event("Pulling", "Pulling image trainer:1", "Normal")], ": Pulling: Pulling image trainer:1"),
        (
            [event("Odd", "unknown warning", moment=NOW - 9), event("Pulling", "Pulling", "Normal")],
            ": Odd: unknown warning",
        ),
    ],
)
def test_the_newest_event_explains_why_a_pod_is_in_container_creating(
    events: list[ApiObject], detail: str
) -> None:
    problem = problem_after(CONTAINER_CREATING_TIMEOUT + 1, *events)
    assert problem is not None
    assert problem.message.endswith(f"more than 60 s on node node1{detail}")


def test_the_message_about_container_creating_changes_only_when_the_time_doubles() -> None:
    messages = {getattr(problem_after(seconds), "message", "") for seconds in range(61, 1000)}
    thresholds = sorted(int(message.split("more than ")[1].split(" s")[0]) for message in messages)
    assert thresholds == [60, 120, 240, 480, 960]


@pytest.mark.parametrize(
    "changes",
    [
        {"has_started": True},
        {"scheduled_at": None, "node": None},
        {"deletion_deadline": NOW + 9},
        {"problem": PodProblem(Reason.IMAGE_PULL_FAILED, "not found")},
    ],
)
def test_only_a_pod_that_has_started_no_container_is_in_container_creating(changes: dict[str, Any]) -> None:
    assert problem_after(500, **changes) == changes.get("problem")


def test_a_pod_in_container_creating_is_named_in_the_jobs_condition() -> None:
    creating = [with_start_problem(creating_pod(61), (), NOW)]
    starting = observed(job((1, 1)), view((1, 1)), creating)
    actions = actions_for(starting, 1)
    running = condition(actions, ConditionType.RUNNING)
    assert (running.status, running.reason) == (False, Reason.CONTAINER_CREATING)
    assert running.message.startswith("pod digits-0 has been in ContainerCreating for more than 60 s")
    assert [each.reason for each in actions.events] == ["ContainerCreating"]


def test_a_pod_in_container_creating_does_not_fail_its_placement() -> None:
    creating = [with_start_problem(creating_pod(61), (), NOW)]
    starting = observed(job((1, 1)), view((1, 1)), creating)
    assert starting.start_problem(range(1)) is not None
    assert starting.placement_problem(range(1)) is None
