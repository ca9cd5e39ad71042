"""What `trainer.dataloader` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn


class DataLoop(Iterator[Any]):
    """Iterates over the batches of an epoch, once.

    Args:
        batches: the batches.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> NoReturn:
        raise TypeError(
            "trainer.dataloader() has no length, because the number of batches of an epoch changes with the "
            "batch size. An epoch is len(dataset) / batch_size scale-invariant steps, which trainer.progress "
            "and a scheduler count: for example, T_max=epochs * len(dataset) // batch_size"
        )
