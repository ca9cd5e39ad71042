"""Where the program is among its loops over `trainer.dataloader`, and the epochs that it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from adascale_worker.errors import WorkerError


class ProgramPlace(Enum):
    """Where the program is.

    `OUTSIDE` or `LEFT` -> begin -> `BETWEEN` -> deliver -> `BATCH` -> request -> `BETWEEN` -> ... -> leave
    -> `OUTSIDE`, or `LEFT` if the program has left its loop.
    """

    OUTSIDE = auto()
    """Before its first loop, or after one."""
    BETWEEN = auto()
    """In its loop, where it waits for the next batch, so that the trainer has the control."""
    BATCH = auto()
    """In its loop, where it works on a batch."""
    LEFT = auto()
    """After a loop that it has left before its end, so that an error may end it."""


class ProgramLoop:
    """The loop of the program over the batches of an epoch, and the epochs that it has ended."""

    def __init__(self) -> None:
        self.place = ProgramPlace.OUTSIDE
        self.number = 0
        """Loops that it has begun."""
        self.is_evaluating = False
        self._is_waiting = False
        """Whether it waits for the others before its first batch."""
        self.epoch = 0
        """The epoch of its last loop."""
        self.overtaken_epoch: int | None = None
        """The epoch of its loop, if another member had ended it, and this one has copied its state."""
        self.overtaken_states: Mapping[str, dict[str, Any]] | None = None
        """The states of the registered objects then: the program changes them again after its loop."""
        self.step_at_begin = 0
        """The last step before the generation."""
        self._ended_epoch: int | None = None
        self._step_at_end = 0

    @property
    def has_batch(self) -> bool:
        """Whether the program works on a batch of the trainer."""
        return self.place is ProgramPlace.BATCH

    @property
    def trains(self) -> bool:
        """Whether it trains on that batch, or waits for the others there, and does not evaluate."""
        return (self.has_batch or self._is_waiting) and not self.is_evaluating

    @property
    def is_inside(self) -> bool:
        """Whether a loop has begun and not ended."""
        return self.place in (ProgramPlace.BETWEEN, ProgramPlace.BATCH)

    # -- transitions --------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> int:
        """Begin a loop over the rest of an epoch, and return its number."""
        self.place, self.epoch = ProgramPlace.BETWEEN, epoch
        self.number += 1
        return self.number

    def deliver(self) -> None:
        """Give the program a batch."""
        self.place = ProgramPlace.BATCH

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the others before the first batch."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def request(self) -> None:
        """Record that the program requests the next batch, and waits for it."""
        if self.place is ProgramPlace.BATCH:
            self.place = ProgramPlace.BETWEEN

    def leave(self, *, by_program: bool = False) -> None:
        """End the loop; `by_program` if the program has left it before its end."""
        self.place = ProgramPlace.LEFT if by_program else ProgramPlace.OUTSIDE

    def require_last(self, number: int) -> None:
        """Check that no later loop than `number` has begun."""
        if number != self.number:
            raise WorkerError(
                "another loop over trainer.dataloader() began before this one ended: iterate over "
                "one at a time, and use a DataLoader of your own for other data"
            )

    # -- epochs -------------------------------------------------------------------------------------------

    def end_of_epoch(self, epoch: int) -> None:
        """Record that all batches of `epoch` were delivered."""
        self._ended_epoch = epoch

    def require_batches(self, epoch: int) -> None:
        """Check that not all batches of `epoch` were delivered."""
        if self._ended_epoch == epoch:
            raise WorkerError(
                f"trainer.dataloader() was called again after all batches of epoch {epoch}: iterate over it "
                "once in each epoch of `for epoch in trainer.epochs(...)`, or call "
                f"trainer.step({epoch}), with the number of the epoch, after the loop over its batches"
            )

    def has_begun(self, epoch: int, step: int) -> bool:
        """Whether an epoch has had a loop or steps."""
        return self.number > 0 and (self.epoch == epoch or self._step_at_end != step)

    def require_loop_in(self, epoch: int, step: int, *, is_finished: bool) -> None:
        """Check that an epoch which ends has had a loop or steps."""
        if not self.has_begun(epoch, step) and not is_finished:
            raise WorkerError(
                f"epoch {epoch} has ended, but has had no batch: call "
                "trainer.dataloader(dataset) in each epoch, because the iterator that it returns ends with "
                "its epoch"
            )
        self._step_at_end = step
