"""The evaluations of a training program, in order, and which replicas take no part in one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from adascale_worker.loop.evaluation import Exchange
from adascale_worker.state.components import TrainerComponents

TRAINS = "trains"
"""The event that a replica announces with the place that it has reached, for those that evaluate."""


class EvaluationSequence:
    """Numbers the evaluations of a program, so that all replicas exchange the results of the same one.

    A replica announces the places in training that it has passed. Those that evaluate do not wait for it
    then.

    Args:
        trainer: the parts of the trainer.

    Attributes:
        is_evaluating: whether the program is inside a loop over `ElasticTrainer.evaluation`.
    """

    def __init__(self, trainer: TrainerComponents) -> None:
        self._trainer = trainer
        self._count = 0
        """Evaluations at `_place` so far."""
        self._place: tuple[int, int, int] | None = None
        self.is_evaluating = False

    def next(self, *, inside_epoch: bool) -> Exchange:
        """Return how the replicas exchange the results of the next evaluation.

        Args:
            inside_epoch: whether the program is inside its data loop.
        """
        progress = self._trainer.progress
        # A replica passes an evaluation outside of a loop when it begins a loop of the same epoch.
        place = (progress.epoch, progress.step, int(inside_epoch))
        self._count = self._count + 1 if place == self._place else 1
        self._place = place

        def has_passed() -> set[int]:
            values = self._trainer.group.announced(TRAINS) or ()
            return {rank for rank, value in enumerate(values) if value and tuple(json.loads(value)) > place}

        name = "/".join(map(str, ("evaluation", *place, self._count)))
        return Exchange(self._trainer.group, name, has_passed)

    def begin(self) -> None:
        """Do not take what follows for training, until `end`."""
        self._trainer.telemetry.step_timer.pause()
        self.is_evaluating = True

    def end(self) -> None:
        """Continue with training."""
        self._trainer.telemetry.step_timer.pause()
        self.is_evaluating = False

    def announce_training(self, *, is_waiting: bool = False) -> None:
        """Let replicas that evaluate know that this one trains, or waits in a step."""
        progress = self._trainer.progress
        self.announce_passed([progress.epoch, progress.step, 2 if is_waiting else 1])

    def announce_passed(self, place: Sequence[float]) -> None:
        """Let replicas that evaluate know that this one takes no part in evaluations before a place.

        Args:
            place: the epoch; then the step; then 1 for its training, 2 for the wait for other replicas in it.
        """
        self._trainer.group.announce(TRAINS, json.dumps(place))
