"""The trainer that an agent starts before its generation is active.

It imports what it needs while the present generation still trains. That keeps the slowest part of a
re-entry, the import of torch, out of the interruption of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from adascale_core.exit_codes import ExitClass, classify_exit
from adascale_core.messages import Allocation
from adascale_worker.agent.trainer_process import TrainerProcess

PREPARATION_TIMEOUT = 60.0
"""Seconds after which a standby trainer counts as prepared even if it has not reported so."""
STANDBY_TIMEOUT = 120.0
"""Seconds that a standby trainer waits for a generation that does not become active."""


class StandbyTrainer:
    """The standby trainer of a replica, if there is one.

    Args:
        start: starts a trainer.
    """

    def __init__(self, start: Callable[[], TrainerProcess]) -> None:
        self._start = start
        self._process: TrainerProcess | None = None
        self._generation = 0
        """The newest generation for which a trainer was started."""
        self._started_at = 0.0

    @property
    def is_prepared(self) -> bool:
        """Whether no trainer is needed, it is ready, or `PREPARATION_TIMEOUT` has passed."""
        return self._process is None or self._process.ready or self._age > PREPARATION_TIMEOUT

    def update(self, desired: Allocation | None, rank: int, present: int) -> TrainerProcess | None:
        """Start a trainer for a desired generation, and stop one whose generation does not become active.

        Args:
            desired: the desired allocation; None if there is none.
            rank: index of the replica.
            present: the last generation that the replica has entered.

        Returns:
            the trainer if it has exited by itself before it got a rank assignment, else None.
        """
        if self._process is not None:
            return self._check(self._process, present)
        if desired is not None and rank < desired.replicas and desired.generation > self._generation:
            self._generation = desired.generation
            self._started_at = time.monotonic()
            self._process = self._start()
        return None

    def take(self, generation: int) -> TrainerProcess:
        """Return the standby trainer, or a new trainer, which then runs `generation`."""
        trainer = self._process or self._start()
        self._process = None
        self._generation = generation
        return trainer

    def stop(self) -> None:
        """Kill the standby trainer, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def restart_after(self, generation: int) -> None:
        """Kill the standby trainer, and start another one for any generation newer than `generation`."""
        self.stop()
        self._generation = generation

    def _check(self, process: TrainerProcess, present: int) -> TrainerProcess | None:
        code = process.exit_code
        if code is None:
            if self._age > STANDBY_TIMEOUT:
                self.stop()
            return None
        self._process = None
        if classify_exit(code) is not ExitClass.KILLED:
            return process
        self._generation = present
        return None

    @property
    def _age(self) -> float:
        """Seconds since the standby trainer was started."""
        return time.monotonic() - self._started_at
