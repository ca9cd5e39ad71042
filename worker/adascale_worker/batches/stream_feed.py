"""Streams that each replica reads as a whole: iterable data sets, whose length is unknown until a pass ends.

Each replica, and each of its worker processes, reads the whole stream forward and keeps its share. The stream
yields the same records in the same order everywhere, so a position is the number of records before it. The
records of the present step and of what was read ahead stay in memory, for a step that is discarded.

A reader that begins inside a pass loads the last state of the data set before this position, if it has
states, reads forward from there, and compares the fingerprint of the next record with the one from before.

A data set may draw from the generators of Python, NumPy and torch. They are seeded for it at the beginning of
each pass and where its state is saved, and have states of their own outside it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.fingerprint import fingerprint
from adascale_worker.batches.records import RecordFeed, RecordReader
from adascale_worker.batches.seeding import mix, pass_seed
from adascale_worker.errors import DatasetError

SAVE_INTERVAL = 1024
"""Records after which the state of a data set is saved. A reader that begins later reads them again."""


_SAME_RECORDS = (
    "the data set has to yield the same records in the same order in each process, and after a restart. "
    "Seed what is shuffled, by the number that set_epoch(number) gets. In place of a shuffle buffer of the "
    "data set, whose contents are not a part of its state, pass shuffle_buffer= to trainer.dataloader. For a "
    "stream that cannot be repeated, pass exactly_once=False"
)


@dataclass(frozen=True)
class SavedState:
    """The state of a data set."""

    position: int  # of the next record after the state was loaded
    state: Any


@dataclass(frozen=True)
class StreamPlace:
    """A position in a stream, and what a reader needs to begin there."""

    position: int  # records before it, over all passes
    number: int = 0  # of the pass that the next record is in
    begin: int = 0  # position of the first record of this pass
    length: int | None = None  # records of the first pass; None while it has not ended
    fingerprint: int | None = None  # of the next record; None if it is unknown or the first of its pass
    saved: SavedState | None = None  # the last state of the data set in this pass; None if it has none

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain values."""
        saved = None if self.saved is None else [self.saved.position, self.saved.state]
        return {**vars(self), "saved": saved}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StreamPlace:
        """Return the place that `state_dict` describes."""
        saved = None if state["saved"] is None else SavedState(*state["saved"])
        return cls(**{**state, "saved": saved})


class StreamReader(RecordReader):
    """Reads the records of a stream, pass after pass."""

    def __init__(
        self, dataset: Iterable[Any], seed: int, *, shuffle_buffer: int = 0, is_exact: bool = True
    ) -> None:
        super().__init__(seed, shuffle_buffer, is_exact=is_exact)
        self._dataset = dataset
        self._interval = self._block * max(1, SAVE_INTERVAL // self._block)
        self._is_open = False
        self._passes: deque[tuple[int, int]] = deque()
        """Number and first position of each pass that the window, or what follows it, is in."""
        self._saves: deque[SavedState] = deque()
        self._length: int | None = None
        self._first_end = 0
        """Position of the end of the first pass, if `_length` is known."""

    def _read_until(self, end: int, ahead: int) -> None:  # noqa: ARG002
        while self._next < end:
            self._read_block()
        self._look_ahead(end)

    def _close(self) -> None:
        self._is_open = False

    def _look_ahead(self, position: int) -> None:
        """Read the record at `position` too, unless the pass ends there."""
        if self._next == position and self._iterator is not None:
            self._read_block()

    # -- another place ------------------------------------------------------------------------------------

    def _begin_at(self, start: StreamPlace) -> None:
        if self._is_open and self._base <= start.position <= self._next:
            return
        saved = start.saved if self._is_exact else None
        is_ahead = self._is_open and self._next < start.position and self._is_exact
        if not is_ahead or (saved is not None and saved.position > self._next):
            self._begin(start, saved)
        while self._next < start.position:
            self._read_block()
            self._drop_before(start.position)
            if self._passes[-1][0] > start.number and self._passes[-1][1] <= start.position:
                raise DatasetError(
                    f"pass {start.number} of the stream (counted from 0) has ended after "
                    f"{self._passes[-1][1] - start.begin} records, but {start.position - start.begin} of it "
                    f"were read before: {_SAME_RECORDS}"
                )
        self._drop_before(start.position)
        self._look_ahead(start.position)
        if self._is_exact and start.fingerprint not in (None, self._fingerprint_at(start.position)):
            how = "after load_state_dict() of the data set" if saved is not None else "when it is read again"
            raise DatasetError(
                f"record {start.position - start.begin} of pass {start.number} of the stream (both counted "
                f"from 0) is another one {how} than before: {_SAME_RECORDS}"
            )

    def _begin(self, start: StreamPlace, saved: SavedState | None) -> None:
        begin = start.begin if self._is_exact else start.position
        self._window.clear()
        self._passes = deque([(start.number, begin)])
        self._length, self._first_end = start.length, begin
        self._saves = deque() if saved is None else deque([saved])
        self._base = begin if saved is None else saved.position
        self._is_open = True
        self._begin_pass(saved)

    def _begin_pass(self, saved: SavedState | None = None) -> None:
        number, _ = self._passes[-1]
        dataset: Any = self._dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(number)
        self._seed_generators()
        if saved is not None and _has_states(dataset):
            dataset.load_state_dict(copy.deepcopy(saved.state))
        iterator: Any = iter(dataset)
        if saved is not None and not _has_states(dataset):
            iterator.load_state_dict(copy.deepcopy(saved.state))
        self._iterator = iterator
        if saved is not None:
            self._seed_generators()

    def _seed_generators(self) -> None:
        if self._is_exact:
            number, begin = self._passes[-1]
            self._generators.seed(mix(pass_seed(self._seed, number) + self._next - begin))

    # -- reading ------------------------------------------------------------------------------------------

    def _read_block(self) -> None:
        """Read a block of the present pass, or find its end."""
        if self._iterator is None:
            self._begin_pass()
        assert self._iterator is not None
        number, begin = self._passes[-1]
        offset = self._next - begin
        is_loaded = bool(self._saves) and self._saves[-1].position == self._next
        if offset and offset % self._interval == 0 and not is_loaded:
            self._save(self._iterator)
        self._window += self._next_block(pass_seed(self._seed, number) + offset)
        if self._iterator is None:
            self._end_pass()

    def _end_pass(self) -> None:
        (number, begin), end = self._passes[-1], self._next
        if end == begin:
            kind = type(self._dataset).__name__
            if self._length is None:
                raise DatasetError(
                    f"the stream (type {kind}) has 0 records: check the path of the data, and what filters it"
                )
            raise DatasetError(
                f"pass {number} of the stream (type {kind}, passes are counted from 0) has 0 records, and "
                f"the first one had {self._length}: iter(dataset) has to begin a new pass each time, such as "
                "by __iter__ with yield"
            )
        if self._length is None:
            self._length, self._first_end = end - begin, end
        self._passes.append((number + 1, end))

    def _save(self, iterator: Any) -> None:
        """Save the state of the data set before its next record, if it has one."""
        self._seed_generators()
        source: Any = self._dataset if _has_states(self._dataset) else iterator
        if self._is_exact and _has_states(source):
            self._saves.append(SavedState(self._next, copy.deepcopy(source.state_dict())))

    def _drop_before(self, position: int) -> None:
        super()._drop_before(position)
        while len(self._passes) > 1 and self._passes[1][1] <= self._base:
            self._passes.popleft()
        while len(self._saves) > 1 and self._saves[1].position <= self._base:
            self._saves.popleft()

    # -- places -------------------------------------------------------------------------------------------

    def _place_at(self, position: int, ahead: int) -> StreamPlace:  # noqa: ARG002
        """Return the place at a position whose record, or the end of a pass, was read."""
        number, begin = max(each for each in self._passes if each[1] <= position)
        inside = [each for each in self._saves if begin < each.position <= position]
        is_known = self._length is not None and self._first_end <= position
        return StreamPlace(
            position,
            number,
            begin,
            self._length if is_known else None,
            self._fingerprint_at(position) if self._is_exact and position > begin else None,
            inside[-1] if inside else None,
        )

    def _fingerprint_at(self, position: int) -> int | None:
        """Return the fingerprint of the record at a position; None if the pass ends there."""
        return fingerprint(self._window[position - self._base]) if position < self._next else None


class StreamFeed(RecordFeed[StreamPlace]):
    """Loads a replica's micro-batches of a stream that it reads as a whole."""

    def __init__(self, place: StreamPlace, consumed: int) -> None:
        super().__init__()
        self._places = [(consumed, place)]

    def _is_open(self, source: Iterable[Any]) -> bool:
        return source is self._source

    def _make_reader(self) -> StreamReader:
        how = self.how
        return StreamReader(
            self._source, self._seed, shuffle_buffer=how.shuffle_buffer, is_exact=how.is_exact
        )

    def micro_batches(self, consumed: int, plan: BatchPlan, rank: int) -> Iterator[Any]:
        """Load this replica's micro-batches, without end."""
        place = self.place_at(consumed)
        self._places = [(consumed, place)]
        is_shared, sequence = self.how.is_exact, (self._source, self._seed)
        loaded = self._load(sequence, place, place.position, consumed, plan, rank, is_shared=is_shared)
        return self._delivered(loaded, consumed, plan.replicas * plan.local_bsz)

    def place_at(self, consumed: int) -> StreamPlace:
        """Return the place where all replicas together have got `consumed` samples, at a step boundary."""
        return next(
            (place for reached, place in reversed(self._places) if reached <= consumed), self._places[0][1]
        )

    def length_at(self, consumed: int) -> int | None:
        """Return the records of the first pass; None while it has not ended."""
        return self.place_at(consumed).length

    def restore(self, state: dict[str, Any], consumed: int) -> None:
        """Continue at the place of a saved state."""
        self._places = [(consumed, StreamPlace.from_state(state))]


def require_repeatable(dataset: Iterable[Any]) -> None:
    """Check that a stream can be read again."""
    if isinstance(dataset, Iterator):
        raise DatasetError(
            f"dataloader() got an iterator (type {type(dataset).__name__}), which can be read only once, and "
            "replicas that join have to read it too: pass an object whose __iter__ begins a pass each time, "
            "such as an IterableDataset, or a torchdata Loader in place of its node"
        )


def _has_states(source: object) -> bool:
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
