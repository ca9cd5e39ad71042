"""Whether the replicas have the same data in the same order, and the same as before a restart.

In the first loop of a generation and of an epoch each process fetches a few samples under seeds that follow
from their indices, where it fetches its batches: in worker processes, if there are any. What all have is
compared in the first loop of a generation, and with a checkpoint of the same epoch, since the program may
make other data for each epoch. Where something differs, each sample is fetched several times, and data that
vary by themselves are not compared.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import numpy

from adascale_worker.batches.fingerprint import Found, agree
from adascale_worker.batches.order import BY_PROGRAM, SampleSequence
from adascale_worker.batches.seeding import mix, permute
from adascale_worker.errors import DatasetError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.reporting.progress import TrainingProgress

SAMPLES, PLACES = 4, 16
"""Samples of the data set that are compared, and places of a pass whose indices are."""
ROUNDS = 4
"""How often a sample that differs is fetched again, before a pause and after it."""
PAUSE = 1.1
"""Seconds of this pause, so that a sample that contains the time differs."""

CAUSES = (
    "Usual causes are random_split without generator=torch.Generator().manual_seed(0), labels numbered in "
    "the order of a set of strings, or files in the order of os.listdir or glob: use sorted(...)"
)
_CONTINUE = (
    "To continue with the present data, call trainer.dataloader(dataset, allow_other_length=True). To start "
    "from scratch, use adascale run --fresh, or another checkpoint folder"
)
_SAME = "Each replica needs the same samples in the same order, and the trainer shares them out"


@dataclass
class Record:
    """What is known of the data, for a comparison after a restart."""

    epoch: int  # in which the samples were fetched
    number: int  # of the pass of `order`
    order: list[int]  # indices at some places of a pass
    samples: Found = field(default_factory=list)
    varies: bool = False  # whether a sample differs each time it is fetched


class DataComparison:
    """Compares the data of the replicas, and those of before a restart."""

    def __init__(self, group: ReplicaGroup, progress: TrainingProgress, *, is_saved: bool) -> None:
        self._group = group
        self._progress = progress
        self._is_saved = is_saved
        """Whether there are checkpoints, or replicas that join."""
        self._record: Record | None = None
        self._compared: tuple[int, int] | None = None
        """The generation and the epoch of the last comparison of this process."""
        self._awaits_checkpoint = False
        """Whether `_record` is from before a restart."""

    def forget(self) -> None:
        """Compare nothing with the data before, because others are trained now."""
        self._record = None

    def forget_order(self) -> None:
        """Do not compare the order with the one before."""
        if self._record is not None:
            self._record.order = []

    def requests(self, sequence: SampleSequence, consumed: int) -> list[int]:
        """Return the indices of the samples to fetch for `compare`."""
        record, present = self._record, self._place
        if present == self._compared or (record is not None and record.varies):
            return []
        if self._group.replicas * self._group.processes == 1 and not self._is_saved:
            return []
        if record is not None and record.samples:
            return [index for index, _ in record.samples if index < sequence.samples]
        return list(dict.fromkeys(_order_at(sequence, consumed)[1]))[:SAMPLES]

    def compare(
        self,
        sequence: SampleSequence,
        consumed: int,
        found: Found,
        fetch: Callable[[list[int]], Found],
        *,
        allow_others: bool,
    ) -> None:
        """Compare what was fetched. A collective call in the first loop of a generation.

        `fetch` fetches samples again. `allow_others`: they may differ from those of the checkpoint.
        """
        if self._place == self._compared:
            return
        before = self._record
        number, order = _order_at(sequence, consumed)
        record = Record(self._progress.epoch, number, order, found)
        if before is not None:
            record.varies = before.varies
            if not found and not self._awaits_checkpoint:
                # Persistent worker processes go on with the same data.
                record.samples, record.epoch = before.samples, before.epoch
        if self._compared is None or self._compared[0] != self._place[0]:
            self._compare_replicas(sequence, record, fetch)
        if before is not None:
            is_accepted = self._awaits_checkpoint and allow_others
            if before.number == number and before.order not in ([], order) and not is_accepted:
                self._refuse_order(sequence, number, order, before.order)
            if self._awaits_checkpoint:
                self._compare_checkpoint(before, record, fetch, allow_others=allow_others)
        self._record, self._compared, self._awaits_checkpoint = record, self._place, False

    @property
    def _place(self) -> tuple[int, int]:
        return self._group.generation, self._progress.epoch

    # -- replicas -----------------------------------------------------------------------------------------

    def _compare_replicas(
        self, sequence: SampleSequence, record: Record, fetch: Callable[[list[int]], Found]
    ) -> None:
        rows = self._gather([sequence.samples, sequence.length, record.order, record.samples])
        names = self._names
        (samples, length, order, found), *others = rows
        for name, other in zip(names[1:], others, strict=True):
            if other[0] != samples:
                raise DatasetError(
                    f"the data set has {samples} samples on {names[0]}, but {other[0]} on {name}. {_SAME}. "
                    f"{CAUSES}"
                )
            if other[1] != length:
                raise DatasetError(
                    f"a pass of order= has {length} samples on {names[0]}, but {other[1]} on {name}: return "
                    "the same on all replicas"
                )
            if other[2] != order:
                index, theirs = next(pair for pair in zip(order, other[2], strict=True) if pair[0] != pair[1])
                raise DatasetError(
                    f"the order of the samples differs between replicas: at one place of pass "
                    f"{record.number}, {names[0]} has sample {index}, {name} sample {theirs}. "
                    f"{_remedy(sequence)}"
                )
        differing = [_first_difference(found, other[3]) for other in others]
        if all(index is None for index in differing) or self._varies(record, fetch):
            return
        rows = self._gather(record.samples)
        for name, other in zip(names[1:], rows[1:], strict=True):
            index = _first_difference(rows[0], other)
            if index is not None:
                raise DatasetError(
                    f"sample {index} of the data set is another one on {name} than on {names[0]}. {_SAME}. "
                    f"{CAUSES}"
                )

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all processes of all replicas."""
        rows = self._group.gather(self._group.own.exchange(value))
        return [each for row in rows for each in row]

    @property
    def _names(self) -> list[str]:
        group = self._group
        if group.processes == 1:
            return [f"rank {rank}" for rank in range(group.replicas)]
        return [
            f"process {process} of rank {rank}"
            for rank in range(group.replicas)
            for process in range(group.processes)
        ]

    def _varies(self, record: Record, fetch: Callable[[list[int]], Found]) -> bool:
        """Fetch the samples several times, and return whether one of any process varies. Collective."""
        indices = [index for index, _ in record.samples]
        found = fetch(indices * ROUNDS)
        time.sleep(PAUSE)
        found += fetch(indices * ROUNDS)
        first = dict(found)
        varies = any(
            one is None or other is None or not agree(one, other)
            for one, other in ((first[index], again) for index, again in found)
        )
        record.varies = any(self._gather(varies))
        record.samples = [] if record.varies else list(first.items())
        return record.varies

    # -- other times --------------------------------------------------------------------------------------

    def _compare_checkpoint(
        self, before: Record, record: Record, fetch: Callable[[list[int]], Found], *, allow_others: bool
    ) -> None:
        if before.epoch != record.epoch:
            # The program may make other data for each epoch.
            return
        # All replicas decide by the same.
        record.samples = self._group.broadcast(record.samples)
        if _first_difference(before.samples, record.samples) is None or self._varies(record, fetch):
            return
        record.samples = self._group.broadcast(record.samples)
        index = _first_difference(before.samples, record.samples)
        if index is None:
            return
        what = f"sample {index} of the data set is another one than when the checkpoint was saved"
        if not allow_others:
            raise DatasetError(
                f"{what}. To continue exactly, use the data set from before. {CAUSES}. {_CONTINUE}"
            )
        if self._group.is_main:
            print(
                f"adascale: {what}: training continues at the same place of the order with the present data",
                file=sys.stderr,
                flush=True,
            )

    def _refuse_order(
        self, sequence: SampleSequence, number: int, order: list[int], before: list[int]
    ) -> NoReturn:
        index, earlier = next(pair for pair in zip(order, before, strict=True) if pair[0] != pair[1])
        when, remedy = "before", _remedy(sequence)
        if self._awaits_checkpoint:
            when, remedy = "when the checkpoint was saved", f"{remedy}. {_CONTINUE}"
        raise DatasetError(
            f"the order of the samples has changed: at one place of pass {number} is sample {index} now, and "
            f"{when} was sample {earlier}. {remedy}"
        )

    # -- the state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return what is known of the data; None before the first loop."""
        if self._record is None:
            return None
        return {**asdict(self._record), "awaits_checkpoint": self._awaits_checkpoint}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a saved state."""
        described = dict(state or {})
        self._awaits_checkpoint = described.pop("awaits_checkpoint", False)
        self._record = Record(**described) if described else None

    def begin_from_checkpoint(self) -> None:
        """Record that the state is from before a restart."""
        self._awaits_checkpoint = True


def _order_at(sequence: SampleSequence, consumed: int) -> tuple[int, list[int]]:
    """Return the number of the present pass, and the indices of the samples at some places of it."""
    length = sequence.length
    places = permute(numpy.arange(min(PLACES, length)), length, mix(sequence.seed))
    return sequence.pass_at(consumed, places)


def _first_difference(one: Found, other: Found) -> int | None:
    """Return the index of the first sample that differs; None if none does."""
    summaries = dict(other)
    for index, mine in one:
        theirs = summaries.get(index)
        if mine is not None and theirs is not None and not agree(mine, theirs):
            return index
    return None


def _remedy(sequence: SampleSequence) -> str:
    if sequence.kind == BY_PROGRAM:
        return (
            "order(number, seed) has to return the same indices for the same pass each time: draw from the "
            "seed that it gets only, such as by numpy.random.default_rng(seed)"
        )
    return "Pass the same arguments to trainer.dataloader on all replicas, and each time"
