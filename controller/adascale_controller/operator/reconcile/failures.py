"""Failures of the program and lost pods, from how pods have ended.

`FailureCount` has the rule for counting. The status holds the count together with what is counted, so a
restarted operator neither loses a failure nor counts it twice. When pods are deleted, for example because the
Indexed Job is created again, the count stays, and later failures are added to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from adascale_controller.operator.observe.failed_pods import failed_pods, is_program_failure
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod
from adascale_core.failures.count import FailureCount
from adascale_core.failures.exit_codes import ExitClass, classify_exit

LONG_LIFE: Final = 600.0
"""Seconds after which the Job controller no longer counts a pod's end against its backoff."""


def read_failures(status: Mapping[str, Any]) -> FailureCount:
    """Return the failures recorded in a status."""
    attempts = status.get("attempts") or {}
    return FailureCount(
        status.get("failures", 0), attempts.get("failedGeneration", 0), attempts.get("falseStarts", 0)
    )


def count_failures(observed: ObservedJob) -> FailureCount:
    """Return the failures of a job: those in its status, and those of its pods.

    Pods that fail after the program has finished on rank 0 do not count.
    """
    recorded = read_failures(observed.resource.status)
    return recorded if observed.program_finished else with_pods(recorded, observed.own_pods)


def with_pods(recorded: FailureCount, pods: Iterable[Pod]) -> FailureCount:
    """Return the recorded failures and those of the pods of the job's own Indexed Job."""
    generations: set[int] = set()
    starts: Counter[int] = Counter()
    for pod in failed_pods(pods):
        message = pod.exit.termination if pod.exit is not None else None
        if message is not None and message.generation > 0:
            generations.add(message.generation)
        else:
            starts[pod.rank] += 1
    return recorded.with_generations(generations).with_false_starts(starts.values())


def has_permanent_failure(observed: ObservedJob) -> bool:
    """Whether the program has failed, before its end on rank 0, in a way that a restart would repeat.

    A program that has failed because it has several replicas may continue on one, if it has trained on one.
    """
    permanent = {ExitClass.INVALID_PROGRAM}
    view = observed.service
    if view is not None and not any(each.replicas == 1 for each in view.step_times):
        permanent.add(ExitClass.SINGLE_REPLICA_PROGRAM)
    return not observed.program_finished and any(
        pod.exit is not None
        and pod.exit.of_worker
        and pod.exit.exit_code is not None
        and classify_exit(pod.exit.exit_code) in permanent
        for pod in failed_pods(observed.own_pods)
    )


def repeats_early_failure(observed: ObservedJob) -> bool:
    """Whether the program has failed twice in a row in the same way, both times before its first step.

    In the same way: with the same exit code and the same last two lines of output. False if it has trained on
    another replica count, to which the job may return.
    """
    view = observed.service
    if observed.program_finished or view is None:
        return False
    current = observed.current_allocation
    if any(current is not None and each.replicas != current.replicas for each in view.step_times):
        return False
    latest = view.latest.generation if view.latest is not None else 0
    return any(
        len(failures) > 1 and failures[-1] == failures[-2]
        for failures in _early_failures(failed_pods(observed.own_pods), latest).values()
    )


def _early_failures(pods: Iterable[Pod], latest: int) -> dict[int, list[tuple[int | None, list[str]]]]:
    """Return the failures before the first step of each rank, by creation time.

    Args:
        pods: pods that the program has failed in.
        latest: the newest generation that has made a step; 0 if none has.
    """
    failures: dict[int, list[tuple[int | None, list[str]]]] = {}
    for pod in pods:
        end = pod.exit
        message = end.termination if end is not None else None
        if end is None or message is None:
            continue
        if 0 < message.generation <= latest:
            failures.pop(pod.rank, None)
        else:
            failures.setdefault(pod.rank, []).append((end.exit_code, message.log.strip().splitlines()[-2:]))
    return failures


def is_lost(pod: Pod, now: float) -> bool:
    """Whether a pod was ended from outside, so that its replacement may start at once.

    A pod that was killed or ran out of memory soon after its start is not lost: its replacement may end the
    same way.
    """
    if pod.exit is None or pod.phase != "Failed" or is_program_failure(pod.exit):
        return False
    return pod.exit.disruption or pod.deletion_deadline is not None or now > pod.created_at + LONG_LIFE
