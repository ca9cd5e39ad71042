"""Iterable data sets for tests, with the interfaces of those of Hugging Face and torchdata."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class Numbers(IterableDataset[int]):
    """Yields the numbers below `count`, in each pass. Counts what is read.

    Args:
        count: of a pass. None: without end.
        shuffles: whether each pass has an order of its own, drawn from Python's generator.

    Attributes:
        rotation: records that come last instead of first.
    """

    def __init__(self, count: int | None, *, shuffles: bool = False) -> None:
        self.count = count
        self.shuffles = shuffles
        self.rotation = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.count or 0))
        if self.shuffles:
            random.shuffle(numbers)
        numbers = numbers[self.rotation :] + numbers[: self.rotation]
        position = 0
        while self.count is None or position < self.count:
            self.read += 1
            yield numbers[position] if self.count is not None else position
            position += 1


class Items(IterableDataset[Any]):
    """The items of a data set with a length, in their order in each pass."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.dataset.__getitem__, range(len(self.dataset)))


class WithState(IterableDataset[int]):
    """Yields numbers in another order in each pass, and has states as data sets of Hugging Face have.

    Args:
        count: of a pass.
        buffer: of a shuffle buffer, which is filled again after a state was loaded, so that its records are
            lost.
    """

    def __init__(self, count: int, *, buffer: int = 0) -> None:
        self.count = count
        self.buffer = buffer
        self.read = 0
        self._epoch = 0
        self._position = 0
        self._start: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def order(self, epoch: int) -> list[int]:
        """Return the numbers in the order of a pass, without a buffer."""
        numbers = list(range(self.count))
        random.Random(epoch).shuffle(numbers)
        return numbers

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = dict(state)

    def __iter__(self) -> Iterator[int]:
        self._position = 0
        if self._start is not None and self._start["epoch"] == self._epoch:
            self._position = self._start["position"]
        generator = random.Random(self._epoch)
        order = self.order(self._epoch)
        held: list[int] = []
        while self._position < self.count:
            number = order[self._position]
            self._position += 1
            self.read += 1
            if len(held) < self.buffer:
                held.append(number)
                continue
            if self.buffer:
                place = generator.randrange(self.buffer)
                number, held[place] = held[place], number
            yield number
        yield from held


class WithIteratorState:
    """Yields numbers, and its iterator has states."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return _NumberIterator(self.count)


class _NumberIterator(Iterator[int]):
    def __init__(self, count: int) -> None:
        self._count = count
        self._position = 0

    def __next__(self) -> int:
        if self._position == self._count:
            raise StopIteration
        self._position += 1
        return self._position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class Packed(IterableDataset[list[int]]):
    """Packs 40 documents of 1 to 9 tokens into sequences of 16 tokens, as language models do."""

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(40))
        random.Random(self._epoch).shuffle(order)
        tokens: list[int] = []
        for document in order:
            tokens += [10 * document + place for place in range(1 + document % 9)]
            while len(tokens) >= 16:
                yield tokens[:16]
                tokens = tokens[16:]


class Sharded(IterableDataset[int]):
    """The numbers below `count` in shards of different lengths, as a data set of Hugging Face."""

    def __init__(self, count: int, num_shards: int, index: int | None = None) -> None:
        self.count = count
        self.num_shards = 1 if index is not None else num_shards
        self._shards = num_shards
        self._index = index
        self._epoch = 0

    def shard(self, *, num_shards: int, index: int) -> Sharded:
        assert num_shards == self.num_shards
        return Sharded(self.count, num_shards, index)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        shards = range(self._shards) if self._index is None else [self._index]
        for shard in shards:
            numbers = [number for number in range(self.count) if number % 7 % self._shards == shard]
            random.Random(self._epoch).shuffle(numbers)
            yield from numbers
