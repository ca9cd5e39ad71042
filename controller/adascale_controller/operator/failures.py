"""How often the program itself has failed, counted from what its pods have left behind.

A generation counts once, whatever number of its replicas fail in it. A program that fails before it is in any
generation counts once for each round of starts: as often as it did on the replica that tried most often.
What is counted is kept in the job's status together with the count, so that a restarted operator neither
forgets a failure nor counts it twice. Pods that are gone, as when the Job was made anew, take nothing off the
count, and what fails after them counts again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from adascale_controller.operator.pods import Pod, own_failure
from adascale_controller.operator.sighting import Sighting


@dataclass(frozen=True)
class Failures:
    """What is counted.

    Args:
        count: how often the program has failed.
        generation: the newest generation that is counted.
        false_starts: rounds of starts that are counted, of pods that are still there.
    """

    count: int = 0
    generation: int = 0
    false_starts: int = 0

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> Self:
        """What a status tells."""
        attempts = status.get("attempts") or {}
        return cls(
            status.get("failures", 0), attempts.get("failedGeneration", 0), attempts.get("falseStarts", 0)
        )

    @classmethod
    def of(cls, sighting: Sighting) -> Failures:
        """Those of a job, with what its pods tell unless its program has come to its end."""
        known = cls.read(sighting.job.status)
        return known if sighting.has_come_to_its_end else known.seen(sighting.own_pods)

    def seen(self, pods: Iterable[Pod]) -> Failures:
        """With what the pods of the job's own Job tell."""
        generations: set[int] = set()
        starts: Counter[int] = Counter()
        for pod in failed(pods):
            assert pod.ended is not None
            words = pod.ended.words
            if words is not None and words.generation > 0:
                generations.add(words.generation)
            else:
                starts[pod.rank] += 1
        new = {one for one in generations if one > self.generation}
        rounds = max(starts.values(), default=0)
        return replace(
            self,
            count=self.count + len(new) + max(rounds - self.false_starts, 0),
            generation=max([self.generation, *new]),
            false_starts=rounds,
        )


def failed(pods: Iterable[Pod]) -> list[Pod]:
    """The pods that the program itself has failed in, the latest last."""
    found = [pod for pod in pods if pod.ended is not None and own_failure(pod.ended)]
    return sorted(found, key=lambda pod: (pod.created_at, pod.rank))
