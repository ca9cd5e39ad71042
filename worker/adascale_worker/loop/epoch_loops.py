"""The program's loops over `trainer.epochs`, which begin where training is and end each epoch by themselves.

The end of an epoch is an exchange among the replicas, which may fail. An iterator that is left by `break` or
by an error learns of it only when it is deleted, where it cannot raise an error, and does not know which of
both it was. So the epoch of a loop that is left ends when the program next uses the trainer, or at the end of
the program unless the program fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from adascale_worker.errors import WorkerError
from adascale_worker.loop.ending import Ending


class EpochLoops:
    """The loops over epochs of a program."""

    def __init__(
        self,
        ending: Ending,
        is_finished: Callable[[], bool],
        end_epoch: Callable[[int], None],
        has_begun: Callable[[int], bool],
    ) -> None:
        self._ending = ending
        self._is_finished = is_finished
        self._end_epoch = end_epoch
        self._has_begun = has_begun
        self._epoch: int | None = None
        self._is_inside = False
        self._is_complete = False
        """Whether the body of the loop has come to its end."""

    def begin(self) -> Iterator[int]:
        """Yield the numbers of the epochs until training ends; each epoch has ended before the
        next number.
        """
        self._require_outside()
        self.end_left()
        while not self._is_finished():
            self._require_outside()
            self._epoch, self._is_inside, self._is_complete = self._ending.current_epoch, True, False
            try:
                yield self._epoch
                self._is_complete = True
            finally:
                self._is_inside = False
            self.end_left()

    def _require_outside(self) -> None:
        if self._is_inside:
            raise WorkerError(
                f"a loop over trainer.epochs() began inside epoch {self._epoch} of another one: use one loop "
                "over epochs, and inside it one loop over trainer.dataloader(dataset)"
            )

    @property
    def left(self) -> int | None:
        """The epoch whose body the program has left, and which has not ended; else None."""
        return self._epoch if not self._is_inside else None

    def end_left(self) -> None:
        """End the epoch whose body the program has left, if `trainer.step` has not ended it already.

        An epoch that was left before its first batch goes on.
        """
        epoch = self.left
        if epoch is None:
            return
        self._epoch = None
        if self._ending.is_in_epoch(epoch) and (self._is_complete or self._has_begun(epoch)):
            self._end_epoch(epoch)
