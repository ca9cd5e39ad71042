"""The evaluations of a training program, in order, and which replicas take no part in one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from adascale_worker.loop.evaluation import Exchange
from adascale_worker.loop.program_loop import ProgramLoop
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.reporting.step_timer import StepTimer

TRAINS = "trains"
"""The event that a replica announces with the place that it has reached, for those that evaluate."""


class EvaluationSequence:
    """Numbers the evaluations of a program, so that all replicas exchange the results of the same one.

    A replica announces the places in training that it has passed. Those that evaluate do not wait for it
    then.
    """

    def __init__(
        self, group: ReplicaGroup, progress: TrainingProgress, step_timer: StepTimer, loop: ProgramLoop
    ) -> None:
        self._group = group
        self._progress = progress
        self._step_timer = step_timer
        self._loop = loop
        self._count = 0
        """Evaluations at `_place` so far."""
        self._place: tuple[int, int, int] | None = None

    def next(self) -> Exchange:
        """Return how the replicas exchange the results of the next evaluation."""
        progress = self._progress
        # A replica passes an evaluation outside of a loop when it begins a loop of the same epoch.
        place = (progress.epoch, progress.step, int(self._loop.has_batch))
        self._count = self._count + 1 if place == self._place else 1
        self._place = place

        def has_passed() -> set[int]:
            values = self._group.announced(TRAINS) or ()
            return {rank for rank, value in enumerate(values) if value and tuple(json.loads(value)) > place}

        name = "/".join(map(str, ("evaluation", *place, self._count)))
        return Exchange(self._group, name, has_passed)

    def begin(self) -> None:
        """Do not take what follows for training, until `end`."""
        self._step_timer.pause()
        self._loop.is_evaluating = True

    def end(self) -> None:
        """Continue with training."""
        self._step_timer.pause()
        self._loop.is_evaluating = False

    def announce_training(self, *, is_waiting: bool = False) -> None:
        """Let replicas that evaluate know that this one trains, or waits in a step."""
        progress = self._progress
        self.announce_passed([progress.epoch, progress.step, 2 if is_waiting else 1])

    def announce_passed(self, place: Sequence[float]) -> None:
        """Let replicas that evaluate know that this one takes no part in evaluations before a place."""
        self._group.announce(TRAINS, json.dumps(place))
