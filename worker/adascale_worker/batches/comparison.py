"""Whether the replicas have the same data in the same order, and the same as before a restart.

In the first loop of a generation and of an epoch each process fetches a few samples under seeds that follow
from their indices, where it fetches its batches: in worker processes, if there are any. What all have is
compared in the first loop of a generation, and with a checkpoint of the same epoch, since the program may
make other data for each epoch. Where something differs, each sample is fetched several times, and data that
vary by themselves are not compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from adascale_worker.batches.order import BY_PROGRAM, SampleSequence, mix, permute
from adascale_worker.errors import FROM_SCRATCH, DatasetError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.reporting.progress import TrainingProgress

_MAX_DEPTH = 20
_MAX_VALUES = 10_000
"""Values in a sample, beyond which it has no summary."""
_PART = 2**14
"""Bytes of each part of a large value: its begin, its end, and as many with equal distances in between.
Also elements of a large array in a summary."""
_FEW = 16
"""Integers of an array that are compared exactly."""
_MAX_ARRAYS = 32
"""Arrays in a summary. Of more, the shapes count only."""
_TOLERANCE = 0.02
"""Of the length of an array, by which a projection may differ."""

Summary = list[Any]
"""The digest of what is exact in a sample, then for each array three projections and its length."""

Found = list[tuple[int, Summary | None]]
"""Summaries of samples by index. None for what cannot be compared."""


def fingerprint(record: object) -> int:
    """Return 63 bits that depend on the contents of a record.

    Of large arrays, a part counts. Of an object whose contents are unknown, such as an open file, the type
    counts only.
    """
    return _Digest(is_exact=True).of(record)


def summary(sample: object) -> Summary | None:
    """Return what `agree` compares of a sample; None if its contents cannot be read.

    As `fingerprint`, but arrays may differ as by rounding on another device, and of an absolute path the
    name counts only.
    """
    found = _Digest(is_exact=False)
    with suppress(Exception):
        # What an object does when its contents are read is not known.
        return [found.of(sample), *found.arrays]
    return None


def agree(one: Summary, other: Summary) -> bool:
    """Whether two samples are the same, apart from rounding."""
    if one[0] != other[0] or len(one) != len(other):
        return False
    return all(
        abs(left - right) <= _TOLERANCE * max(first[-1], second[-1]) + 1e-6
        for first, second in zip(one[1:], other[1:], strict=True)
        for left, right in zip(first, second, strict=True)
    )


# Python's `hash` and `pickle` differ between processes for equal values, such as sets of strings.


class _Digest:
    """Adds the contents of a record to a digest.

    If not `is_exact`, arrays and numbers may differ as by rounding on another device: their projections are
    in `arrays`, and they are not in the digest.
    """

    def __init__(self, *, is_exact: bool) -> None:
        self._digest = blake2b(digest_size=8)
        self._update: Callable[[bytes], None] = self._digest.update
        self._is_exact = is_exact
        self._left = math.inf if is_exact else _MAX_VALUES
        self.arrays: list[list[float]] = []

    def of(self, record: object) -> int:
        self._add(record, 0)
        return int.from_bytes(self._digest.digest(), "big") >> 1

    def _add(self, value: Any, depth: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("the sample has too many values")
        if not self._is_exact and isinstance(value, list | tuple) and len(value) > _FEW:
            is_numeric = {*map(type, value)} <= {int, float}
            value = numpy.asarray(value, numpy.float64) if is_numeric else value
        self._update(type(value).__name__.encode() + b"(")
        if depth > _MAX_DEPTH:
            return
        if value is None or isinstance(value, bool | int | float | complex | str | numpy.generic):
            self._add_scalar(value)
        elif isinstance(value, bytes | bytearray | memoryview):
            self._add_bytes(numpy.frombuffer(value, numpy.uint8))
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
            self._add_each(value.tolist(), depth)
        elif isinstance(value, Mapping):
            self._add_each(sorted(value.items(), key=_key_of), depth)
        elif isinstance(value, list | tuple):
            self._add_each(value, depth)
        elif isinstance(value, set | frozenset):
            self._add_each(sorted(_Digest(is_exact=self._is_exact).of(each) for each in value), depth)
        elif callable(getattr(value, "tobytes", None)):
            # Also images of PIL, and arrays.
            self._update(repr(getattr(value, "shape", getattr(value, "size", ""))).encode())
            is_array = isinstance(value, numpy.ndarray)
            self._add_array(value if is_array else numpy.frombuffer(value.tobytes(), numpy.uint8))
        elif hasattr(value, "__dict__"):
            self._add(vars(value), depth + 1)
        self._update(b")")

    def _add_each(self, values: Any, depth: int) -> None:
        for value in values:
            self._add(value, depth + 1)

    def _add_scalar(self, value: object) -> None:
        if not self._is_exact and isinstance(value, float | complex | numpy.inexact):
            self._add_array(numpy.asarray([value]))
            return
        if not self._is_exact and isinstance(value, str) and value.startswith("/"):
            # Machines may have the data in different folders.
            value = value.rpartition("/")[2]
        self._update(repr(value).encode(errors="surrogatepass"))

    def _add_bytes(self, content: NDArray[numpy.uint8]) -> None:
        size = len(content)
        self._update(str(size).encode())
        if size > 4 * _PART:
            content = numpy.concatenate([content[:_PART], content[:: size // _PART], content[-_PART:]])
        self._update(content.tobytes())

    def _add_tensor(self, tensor: Tensor) -> None:
        self._update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return
        flat = tensor.detach().reshape(-1)
        if self._is_exact:
            self._add_bytes(flat.cpu().contiguous().view(torch.uint8).numpy())
            return
        part = flat[:: 1 + len(flat) // _PART]
        part = torch.view_as_real(part).reshape(-1) if part.is_complex() else part
        part = part.float() if part.dtype is torch.bfloat16 else part
        self._add_array(part.cpu().numpy())

    def _add_array(self, array: NDArray[Any]) -> None:
        flat, kind = array.reshape(-1), array.dtype.kind
        if self._is_exact or kind not in "biufc" or (kind in "biu" and len(flat) <= _FEW):
            self._add_bytes(numpy.frombuffer(flat.tobytes(), numpy.uint8))
        elif len(self.arrays) < _MAX_ARRAYS:
            part = flat[:: 1 + len(flat) // _PART]
            numbers = numpy.ascontiguousarray(part).view(part.real.dtype).astype(numpy.float64)
            numbers = numpy.clip(numpy.nan_to_num(numbers, posinf=0.0, neginf=0.0), -1e100, 1e100)
            projections = _factors()[:, : len(numbers)] @ numbers
            length = numpy.linalg.norm(numbers)
            self.arrays.append([float(f"{each:.6g}") for each in (*projections, length)])


@lru_cache(maxsize=1)
def _factors() -> NDArray[numpy.float64]:
    """Return factors by which arrays are projected. The numbers of `RandomState` never change."""
    return numpy.random.RandomState(0).standard_normal((3, 2 * _PART))


def _key_of(item: tuple[object, object]) -> tuple[str, str]:
    return type(item[0]).__name__, repr(item[0])


SAMPLES, PLACES = 4, 16
"""Samples of the data set that are compared, and places of a pass whose indices are."""
ROUNDS = 8
"""How often a sample that differs is fetched again."""

CAUSES = (
    "Usual causes are random_split without generator=torch.Generator().manual_seed(0), labels numbered in "
    "the order of a set of strings, or files in the order of os.listdir or glob: use sorted(...)"
)
_CONTINUE = (
    "To continue with the present data, call trainer.dataloader(dataset, allow_other_length=True), or "
    f"{FROM_SCRATCH}"
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
            self._compare_earlier(sequence, before, record, fetch, allow_others=allow_others)
        self._record, self._compared, self._awaits_checkpoint = record, self._place, False

    @property
    def _place(self) -> tuple[int, int]:
        return self._group.generation, self._progress.epoch

    def _compare_replicas(
        self, sequence: SampleSequence, record: Record, fetch: Callable[[list[int]], Found]
    ) -> None:
        rows = self._gather([sequence.samples, sequence.length, record.order, record.samples])
        first, *names = self._names
        (samples, length, order, found), *others = rows
        difference = None
        for name, other in zip(names, others, strict=True):
            if other[0] != samples:
                raise DatasetError(
                    f"the data set has {samples} samples on {first}, but {other[0]} on {name}. {_SAME}. "
                    f"{CAUSES}"
                )
            if other[1] != length:
                raise DatasetError(
                    f"a pass of order= has {length} samples on {first}, but {other[1]} on {name}: return "
                    "the same on all replicas"
                )
            if other[2] != order:
                index, theirs = next(pair for pair in zip(order, other[2], strict=True) if pair[0] != pair[1])
                raise DatasetError(
                    f"the order of the samples differs between replicas: at one place of pass "
                    f"{record.number}, {first} has sample {index}, {name} sample {theirs}. "
                    f"{_remedy(sequence)}"
                )
            if difference is None and (different := _first_difference(found, other[3])) is not None:
                difference = f"sample {different} of the data set is another one on {name} than on {first}"
        if difference is not None and not self._varies(record, fetch):
            raise DatasetError(f"{difference}. {_SAME}. {CAUSES}")
        # All replicas compare the same with the checkpoint.
        record.samples = [] if record.varies else found

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all processes of all replicas."""
        rows = self._group.gather(self._group.own.exchange(value))
        return [each for row in rows for each in row]

    @property
    def _names(self) -> list[str]:
        ranks, processes = range(self._group.replicas), range(self._group.processes)
        if len(processes) == 1:
            return [f"rank {rank}" for rank in ranks]
        return [f"process {process} of rank {rank}" for rank in ranks for process in processes]

    def _varies(self, record: Record, fetch: Callable[[list[int]], Found]) -> bool:
        """Fetch the samples several times, and return whether one of any process varies. Collective."""
        first = dict(record.samples)
        again = fetch([*first] * ROUNDS)
        varies = any(
            one is None or other is None or not agree(one, other)
            for one, other in ((first[index], found) for index, found in again)
        )
        record.varies = any(self._gather(varies))
        return record.varies

    def _compare_earlier(
        self,
        sequence: SampleSequence,
        before: Record,
        record: Record,
        fetch: Callable[[list[int]], Found],
        *,
        allow_others: bool,
    ) -> None:
        """Compare the order of the same pass, and with a checkpoint the samples of the same epoch."""
        when = "when the checkpoint was saved" if self._awaits_checkpoint else "before"
        if before.number == record.number and before.order not in ([], record.order):
            pairs = zip(record.order, before.order, strict=True)
            index, earlier = next(pair for pair in pairs if pair[0] != pair[1])
            what = (
                f"the order of the samples has changed: at one place of pass {record.number} is sample "
                f"{index} now, and {when} was sample {earlier}"
            )
            remedy = _remedy(sequence)
        else:
            different = _first_difference(before.samples, record.samples)
            is_same_epoch = self._awaits_checkpoint and before.epoch == record.epoch
            # The program may make other data for each epoch.
            if different is None or not is_same_epoch or self._varies(record, fetch):
                return
            what = f"sample {different} of the data set is another one than {when}"
            remedy = f"To continue exactly, use the data set from before. {CAUSES}"
        if not self._awaits_checkpoint:
            raise DatasetError(f"{what}. {remedy}")
        if not allow_others:
            raise DatasetError(f"{what}. {remedy}. {_CONTINUE}")
        if self._group.is_main:
            print(
                f"adascale: {what}: training continues at the same place of the order with the present data",
                file=sys.stderr,
                flush=True,
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
