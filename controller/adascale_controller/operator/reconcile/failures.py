"""Failures of the program and lost pods, from how pods have ended.

`FailureCount` has the rule for counting. The status holds the count together with what is counted, so a
restarted operator neither loses a failure nor counts it twice. When pods are deleted, the count stays, and
later failures are added to it. The failure in a pod that is deleted while no operator runs is known from what
its agent has registered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, failed_pods, is_program_failure
from adascale_core.failures import (
    FailureCount,
    ProgramFailure,
    classify_exit,
    is_permanent,
    repeats_early_failure,
)
from adascale_core.messages.registration import ReplicaState

LONG_LIFE: Final = 600.0
"""Seconds after which the end of a pod does not delay its replacement."""
FIRST_PAUSE: Final = 10.0
"""Seconds from the end of a pod to its replacement, as of a Job. They double with each further end."""
MAX_PAUSE: Final = 600.0
"""The longest such pause, in seconds."""


def read_failures(status: Mapping[str, Any]) -> FailureCount:
    """Return the failures recorded in a status."""
    attempts = status.get("attempts") or {}
    return FailureCount(
        status.get("failures", 0), attempts.get("failedGeneration", 0), attempts.get("falseStarts", 0)
    )


def count_failures(observed: ObservedJob) -> FailureCount:
    """Return the failures of a job, from its status and its pods.

    Pods that fail after the program has finished on rank 0 do not count.
    """
    recorded = read_failures(observed.resource.status)
    if observed.program_finished:
        return recorded
    pods, spares = observed.pods, _spares(observed)
    recorded = recorded.with_generations(_registered_failures(observed))
    if spares and _all_train(observed):
        return with_generations(recorded, pods).without_false_starts(false_starts(pods).values())
    return with_pods(recorded, pods, spares)


def with_pods(recorded: FailureCount, pods: Iterable[Pod], spares: int = 0) -> FailureCount:
    """Return the recorded failures, and the failures of pods."""
    pods = list(pods)
    starts = false_starts(pods)
    return with_generations(recorded, pods).with_false_starts(starts.values(), spares=spares)


def with_generations(recorded: FailureCount, pods: Iterable[Pod]) -> FailureCount:
    """Return the recorded failures, and those of pods that have trained."""
    return recorded.with_generations({_generation(pod) for pod in failed_pods(pods)})


def false_starts(pods: Iterable[Pod]) -> Counter[int]:
    """Return rank -> how many of its pods have failed before they trained."""
    return Counter(pod.rank for pod in failed_pods(pods) if _generation(pod) == 0)


def _generation(pod: Pod) -> int:
    """Return the last generation in which the program of an ended pod has trained; 0 if it has in none."""
    message = pod.exit.termination if pod.exit is not None else None
    return message.generation if message is not None else 0


def _registered_failures(observed: ObservedJob) -> set[int]:
    """Return the generations in which agents have registered a failure of the program, and have no pod."""
    if observed.resource.recorded_allocation is None:
        # They may be those of an earlier job of this name.
        return set()
    ranks, replicas = {pod.rank for pod in observed.pods}, observed.view.replicas
    failed = (each for each in replicas if each.state is ReplicaState.FAILED and each.replica not in ranks)
    return {each.generation for each in failed}


def _spares(observed: ObservedJob) -> int:
    """Return the number of spares. A suspended job has none, but its pods may have been spares."""
    job = observed.resource.job
    return max(observed.spares, job.spare_replicas if job is not None else 0)


def _all_train(observed: ObservedJob) -> bool:
    """Whether as many replicas as allocated have made a step together, whichever starts failed before."""
    view, current = observed.view, observed.current_allocation
    if view.active is None or view.latest is None or current is None:
        return False
    replicas = observed.training_replicas
    return 0 < current.replicas <= replicas and view.latest.generation >= view.active.generation


def _final_failures(observed: ObservedJob) -> list[Pod]:
    """Return the failed pods that show whether the program would fail again.

    Pods that have failed before they trained, of as many ranks as there are spares, do not show it: another
    replica takes their place. Nor do those that the status has: the job continued after them.
    """
    starts, recorded = false_starts(observed.pods), read_failures(observed.resource.status)
    excused = set(sorted(starts, key=lambda rank: (-starts[rank], -rank))[: _spares(observed)])
    excused |= {rank for rank, count in starts.items() if count <= recorded.false_starts}
    return [pod for pod in failed_pods(observed.pods) if _generation(pod) or pod.rank not in excused]


def has_permanent_failure(observed: ObservedJob) -> bool:
    """Whether the program has failed, before its end on rank 0, in a way that a restart would repeat."""
    measured = _measured(observed)
    return not observed.program_finished and any(
        pod.exit is not None
        and pod.exit.of_worker
        and pod.exit.exit_code is not None
        and is_permanent(classify_exit(pod.exit.exit_code), measured)
        for pod in _final_failures(observed)
    )


def has_repeated_failure(observed: ObservedJob) -> bool:
    """Whether the program has failed twice in the same way before its first step."""
    view, current = observed.service, observed.current_allocation
    if observed.program_finished or view is None:
        return False
    failures = []
    for pod in _final_failures(observed):
        end = pod.exit.termination if pod.exit is not None else None
        if pod.exit is not None and end is not None:
            failures.append(ProgramFailure(pod.rank, end.generation, pod.exit.exit_code, end.log))
    latest = view.latest.generation if view.latest is not None else 0
    replicas = current.replicas if current is not None else None
    return repeats_early_failure(failures, latest, replicas, _measured(observed))


def _measured(observed: ObservedJob) -> set[int]:
    """Return the replica counts with measured step times. One replica is assumed without the service."""
    return {each.replicas for each in observed.service.step_times} if observed.service is not None else {1}


def is_lost(pod: Pod, now: float) -> bool:
    """Whether a pod was ended from outside, so that its replacement may start at once.

    A pod that was killed or ran out of memory soon after its start is not lost: its replacement may end the
    same way.
    """
    if pod.exit is None or pod.phase != "Failed" or is_program_failure(pod.exit):
        return False
    return pod.exit.disruption or pod.deletion_deadline is not None or now > pod.created_at + LONG_LIFE


def replaced_at(pods: Sequence[Pod], now: float) -> float:
    """Return when another pod of a replica may be created after these, in the order of their attempts."""
    end = pods[-1].exit if pods else None
    if end is None or is_lost(pods[-1], now):
        return now
    number = sum(not is_lost(pod, now) for pod in pods)
    pause: float = min(FIRST_PAUSE * 2 ** (number - 1), MAX_PAUSE)
    return (end.ended_at or pods[-1].created_at) + pause
