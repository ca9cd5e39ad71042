"""What `trainer.dataloader` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn


class DataLoop(Iterator[Any]):
    """Iterates over the rest of the current epoch, each time it is iterated over.

    A `for` loop that is left ends its iteration, also if a variable refers to this object: only the loop has
    the iterator.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._batches: Iterator[Any] | None = None
        """For `next(trainer.dataloader(dataset))`."""

    def __iter__(self) -> Iterator[Any]:
        return self._begin() if self._batches is None else self._batches

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        return next(self._batches)

    def __len__(self) -> NoReturn:
        raise TypeError(
            "trainer.dataloader() has no length, because the number of batches of an epoch changes with the "
            "batch size. An epoch is len(dataset) / batch_size scale-invariant steps, which trainer.progress "
            "and a scheduler count: for example, T_max=epochs * len(dataset) // batch_size"
        )
