"""Where the program is among its loops over `trainer.dataloader`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from adascale_worker.errors import WorkerError


class Place(Enum):
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
        self.place = Place.OUTSIDE
        self.number = 0
        self.is_evaluating = False
        self.epoch = 0
        self.delivered = 0
        self.overtaken_epoch: int | None = None
        self.overtaken_states: Mapping[str, dict[str, Any]] | None = None
        self.step_at_begin = 0
        self.epochs_behind = 0
        self._ended_epoch: int | None = None
        self._step_at_end = 0

    @property
    def has_batch(self) -> bool:
        """Whether the program works on a batch of the trainer."""
        return self.place is Place.BATCH

    @property
    def trains(self) -> bool:
        """Whether it trains on that batch, and does not evaluate."""
        return self.has_batch and not self.is_evaluating

    @property
    def goes_on(self) -> bool:
        """Whether a loop has begun and not ended."""
        return self.place in (Place.BETWEEN, Place.BATCH)

    @property
    def is_overtaken(self) -> bool:
        """Whether the state came from another member, whose program is in a later epoch than this one."""
        return self.overtaken_states is not None

    # -- transitions --------------------------------------------------------------------------------------

    def begin(self, epoch: int, delivered: int) -> int:
        """Begin a loop over the rest of an epoch, and return its number."""
        self.place, self.epoch, self.delivered = Place.BETWEEN, epoch, delivered
        self.number += 1
        return self.number

    def deliver(self, samples: int) -> None:
        """Give the program a batch, of `samples` samples over all replicas."""
        self.place = Place.BATCH
        self.delivered += samples

    def request(self) -> None:
        """Return to the trainer, because the program requests the next batch."""
        if self.place is Place.BATCH:
            self.place = Place.BETWEEN

    def leave(self, *, by_program: bool = False) -> None:
        """End the loop."""
        self.place = Place.LEFT if by_program else Place.OUTSIDE

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
        if self.number == 0:
            return self.step_at_begin != step
        return self.epoch == epoch or self._step_at_end != step

    def require_loop_in(self, epoch: int, step: int, *, is_finished: bool) -> None:
        """Check that an epoch which ends has had a loop or steps."""
        if not self.has_begun(epoch, step) and not is_finished:
            raise WorkerError(
                f"epoch {epoch} has ended, but has had no batch: call "
                "trainer.dataloader(dataset) in each epoch, because the iterator that it returns ends with "
                "its epoch"
            )
        self._step_at_end = step
