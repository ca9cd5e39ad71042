"""How often the program itself has failed, counted from what its pods have left behind.

The rule is that of `FailureCount`. The job's status keeps the count and what is counted, so that a restarted
operator neither loses a failure nor counts it twice. When pods are deleted, for example because the Job is
created again, the count stays, and later failures are added to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from adascale_controller.operator.pods import Pod, own_failure
from adascale_controller.operator.sighting import Sighting
from adascale_core.failure_count import FailureCount


def read_failures(status: Mapping[str, Any]) -> FailureCount:
    """The failures in a job's status."""
    attempts = status.get("attempts") or {}
    return FailureCount(
        status.get("failures", 0), attempts.get("failedGeneration", 0), attempts.get("falseStarts", 0)
    )


def count_failures(sighting: Sighting) -> FailureCount:
    """The failures of a job: those in its status, and those of its pods unless its program has finished."""
    recorded = read_failures(sighting.job.status)
    return recorded if sighting.has_come_to_its_end else with_pods(recorded, sighting.own_pods)


def with_pods(recorded: FailureCount, pods: Iterable[Pod]) -> FailureCount:
    """The failures in `recorded` and those of the pods of the job's own Job."""
    generations: set[int] = set()
    starts: Counter[int] = Counter()
    for pod in failed(pods):
        message = pod.ended.words if pod.ended is not None else None
        if message is not None and message.generation > 0:
            generations.add(message.generation)
        else:
            starts[pod.rank] += 1
    return recorded.with_generations(generations).with_false_starts(starts.values())


def failed(pods: Iterable[Pod]) -> list[Pod]:
    """The pods that the program itself has failed in, the latest last."""
    found = [pod for pod in pods if pod.ended is not None and own_failure(pod.ended)]
    return sorted(found, key=lambda pod: (pod.created_at, pod.rank))
