"""Evaluation on all replicas: the batches of a data set, each on one replica, and the sums over all of them.

The batches do not depend on the number of replicas. Batch i is evaluated by rank i mod K, so no sample is
repeated to fill up a share. Sums are exact, so their rounding does not depend on K either. The replicas
exchange their sums without a collective call: if those of a replica are missing, because it is lost or does
not evaluate, each of the others evaluates its batches too. So all get the sums over the whole data set.

A program may gather the values of each batch, in place of adding sums. The last batches, if they are fewer
than the replicas, are then evaluated by all of them.
"""

from __future__ import annotations

import base64
import io
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from adascale_core.messages.replica_seconds import Cause
from adascale_worker.errors import WorkerError
from adascale_worker.loop.context import Context
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup, Values
from adascale_worker.reporting.reports import as_number

READING_TIME = 10.0
"""Seconds for which the process that serves the store waits until the others have read it."""

Number = int | float


def total(numbers: Sequence[Number]) -> Number:
    """Return the sum of numbers, rounded once: an int if all are integers."""
    is_exact = all(isinstance(each, int) for each in numbers)
    return sum(numbers) if is_exact or not all(map(math.isfinite, numbers)) else math.fsum(numbers)


def condensed(numbers: Sequence[Number]) -> list[Number]:
    """Return few numbers with exactly the same sum, whatever is added to it."""
    if all(isinstance(each, int) for each in numbers) or not all(map(math.isfinite, numbers)):
        return [sum(numbers)]
    parts: list[Number] = []
    while rest := math.fsum([*numbers, *(-each for each in parts)]):
        parts.append(rest)
    return parts or [0.0]


class Evaluation(Iterator[Any]):
    """Iterates once over this replica's share of the batches of a data set, and adds up results.

    Made by `ElasticTrainer.evaluation`.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        model: torch.nn.Module,
        exchange: Exchange,
        options: dict[str, Any],
        evaluating: Callable[[], AbstractContextManager[None]],
        *,
        gathers: bool = False,
    ) -> None:
        self._dataset = dataset
        self._length = len(dataset)
        self._batch_size = batch_size
        self._model = model
        self._exchange = exchange
        self._options = options
        self._evaluating = evaluating
        self._gathers = gathers
        self._added: dict[str, list[Tensor | Number]] = {}
        """What was added on this replica since `_settle`."""
        self._numbers: dict[str, list[Number]] = {}
        """What all replicas have added before."""
        self._collected: dict[int, list[Any]] = {}
        """By the number of their batch."""
        self._batch: int | None = None
        """The number of the present batch."""
        self._calls = 0
        """Calls of `gather` for it."""
        self._is_shared = False
        """Whether each other rank has another batch of its round, of which values are gathered."""
        self._replaces: int | None = None
        """The rank in whose place it is delivered; None for one of this rank."""
        self._missing: dict[int, tuple[int, int]] = {}
        """The round and the call from which on the batches of other ranks are evaluated here, by rank."""
        self._found: set[int] = set()
        """The other ranks that have gathered."""
        self._posted: list[str] = []
        """What others may not have read yet."""
        self._is_complete = False
        self._batches = self._deliver()

    def __iter__(self) -> Iterator[Any]:
        # A loop that is left by `break` closes this iterator, so that what follows is training again. With
        # `yield from`, it would close the batches too.
        with self._evaluating():
            for batch in self._batches:  # noqa: UP028
                yield batch

    def __next__(self) -> Any:
        return next(self._batches)

    def add(self, **sums: object) -> None:
        """Add results of a batch.

        Does not synchronize with the device.

        Args:
            sums: by name, the sum of a result over the samples of the batch: a number, or a tensor of one
                element. For example, a loss with `reduction="sum"`, or the number of correct predictions.

        Raises:
            WorkerError: a value is something else.
        """
        for name, value in sums.items():
            number = int(value) if isinstance(value, bool) else as_number(value)
            if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
                # A copy: the program may change its own tensor.
                self._added.setdefault(name, []).append(value.detach().reshape(()).clone())
            elif number is not None:
                self._added.setdefault(name, []).append(number)
            else:
                got = (
                    f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
                    if isinstance(value, Tensor)
                    else type(value)
                )
                raise WorkerError(
                    f"evaluation.add() got {got} for {name}: pass a real number or a tensor of one, the sum "
                    "over the samples of the batch"
                )

    def gather(self, value: Any) -> list[Any]:
        """Return what all replicas have passed for their present batches, by rank.

        Call it for each batch of an evaluation with `gathers=True`, equally often on each replica. In the
        whole loop, each replica gets the values of all batches, each once. If another replica is lost, this
        one evaluates its other batches later.

        Args:
            value: a tensor on the CPU, a number, a string, or lists, tuples and dicts of these.

        Returns:
            A list: empty if the value was gathered before, from a replica that was lost after it.

        Raises:
            WorkerError: the evaluation was made without `gathers=True`.
        """
        if not self._gathers:
            raise WorkerError(
                "evaluation.gather() needs trainer.evaluation(..., gathers=True), which divides the batches "
                "in another way; or add sums with evaluation.add()"
            )
        exchange = self._exchange
        place = (self._batch or 0) // exchange.replicas, self._calls
        self._calls += 1
        if self._replaces is not None:
            return [value] if place >= self._missing[self._replaces] else []
        if not self._is_shared:
            return [value]
        kind = f"gather/{place[0]}/{place[1]}"
        exchange.post(kind, value)
        self._posted.append(kind)
        expected = [rank for rank in exchange.others if rank not in self._missing]
        found = exchange.read(kind, expected, taking_part=self._found)
        if len(found) == len(exchange.others):
            # A rank posts its next value after it has read those before.
            for posted in self._posted[:-1]:
                exchange.retract(posted, [exchange.rank])
            del self._posted[:-1]
        self._found.update(found)
        self._missing.update((rank, place) for rank in expected if rank not in found)
        values = {**found, exchange.rank: value}
        return [values[rank] for rank in sorted(values)]

    def collect(self, output: object) -> None:
        """Keep an output of the present batch, such as its predictions, for `outputs`.

        Tensors are copied to the host, which waits for their device.

        Args:
            output: tensors, numbers, strings and None, in lists, tuples and dicts.

        Raises:
            WorkerError: there is no batch, because the loop has not begun or has ended.
        """
        if self._batch is None:
            raise WorkerError(
                "evaluation.collect() was called outside of the loop over the batches of an evaluation: call "
                "it for each batch that trainer.evaluation() delivers"
            )
        self._collected.setdefault(self._batch, []).append(_on_host(output))

    @property
    def outputs(self) -> list[Any]:
        """What was collected for the whole data set, in the order of its batches, the same on all replicas.

        Tensors are on the CPU. All of it has to fit into the memory of each replica.

        Raises:
            WorkerError: the loop has not ended.
        """
        self._require_complete()
        return [output for batch in sorted(self._collected) for output in self._collected[batch]]

    @property
    def sums(self) -> dict[str, Number]:
        """The sums over the whole data set, the same on all replicas; ints where all numbers are integers.

        Raises:
            WorkerError: the loop has not ended.
        """
        self._require_complete()
        return {name: total(numbers) for name, numbers in self._numbers.items()}

    @property
    def means(self) -> dict[str, float]:
        """The sums over the number of samples in the data set.

        Raises:
            WorkerError: the loop has not ended.
        """
        return {name: value / self._length for name, value in self.sums.items()}

    def _require_complete(self) -> None:
        if not self._is_complete:
            raise WorkerError(
                "the results of an evaluation were read before its loop has ended: iterate over all batches "
                "that trainer.evaluation() delivers, without break"
            )

    # -- batches ----------------------------------------------------------------------------------------

    def _deliver(self) -> Iterator[Any]:
        with self._evaluating():
            if self._model.training:
                raise WorkerError(
                    "trainer.evaluation() needs the model in evaluation mode: call model.eval() before the "
                    "loop, and model.train() after it"
                )
            exchange, replicas = self._exchange, self._exchange.replicas
            count = -(-self._length // self._batch_size)
            # All replicas gather for the last batches if these are fewer than the replicas.
            end = count // replicas * replicas if self._gathers else count
            if exchange.others:
                self._copy_buffers()
            self._is_shared = self._gathers and replicas > 1
            yield from self._batches_of(range(exchange.rank, end, replicas))
            self._is_shared = False
            if exchange.others:
                self._exchange_results()
            for rank, (round_, _) in sorted(self._missing.items()):
                self._replaces = rank
                yield from self._batches_of(range(rank + round_ * replicas, end, replicas))
            self._replaces = None
            yield from self._batches_of(range(end, count))
            self._settle()
            self._is_complete = True

    def _exchange_results(self) -> None:
        """Add the results of the other replicas, unless they were gathered, and note which have not come."""
        exchange, others = self._exchange, self._exchange.others
        if not self._gathers:
            self._settle()
            exchange.post("results", [self._length, self._batch_size, self._numbers, self._collected])
            found = exchange.read("results", others)
            for each in found.values():
                self._add_results(*each)
            self._missing = {rank: (0, 0) for rank in others if rank not in found}
        exchange.post("read")
        if exchange.rank == 0:
            exchange.read("read", others, READING_TIME)
            exchange.retract("results", range(exchange.replicas))

    def _add_results(
        self,
        length: int,
        batch_size: int,
        numbers: dict[str, list[Number]],
        collected: dict[int, list[Any]],
    ) -> None:
        if (length, batch_size) != (self._length, self._batch_size):
            raise WorkerError(
                f"trainer.evaluation() got {self._length} samples in batches of {self._batch_size} on rank "
                f"{self._exchange.rank}, but {length} in batches of {batch_size} on another: pass the same "
                "data set and batch_size on all replicas"
            )
        self._extend(numbers)
        self._collected.update(collected)

    def _batches_of(self, numbers: range) -> Iterator[Any]:
        """Yield the batches with these numbers."""
        if not numbers:
            return
        size = self._batch_size
        loader: DataLoader[Any] = DataLoader(
            self._dataset,  # type: ignore[arg-type]
            batch_sampler=(  # one by one, because there may be many
                list(range(number * size, min((number + 1) * size, self._length))) for number in numbers
            ),
            generator=torch.Generator().manual_seed(0),
            **self._options,
        )
        try:
            for number, batch in zip(numbers, loader, strict=True):
                # Again, if the batch was evaluated before by a replica whose results have not come.
                self._batch, self._calls = number, 0
                yield batch
        finally:
            self._batch = None

    def _settle(self) -> None:
        """Read the numbers that were added since the last call."""
        added, self._added = self._added, {}
        if not self._gathers:
            self._extend({name: condensed([*_read(values)]) for name, values in added.items()})

    def _extend(self, numbers: Mapping[str, Sequence[Number]]) -> None:
        for name, values in numbers.items():
            self._numbers.setdefault(name, []).extend(values)

    # -- buffers ----------------------------------------------------------------------------------------

    def _copy_buffers(self) -> None:
        """Use the buffers of rank 0, such as BatchNorm's statistics, on all replicas."""
        buffers = dict(self._model.named_buffers())
        if not buffers:
            return
        if self._exchange.rank == 0:
            own = {name: buffer.detach().cpu() for name, buffer in buffers.items()}
            self._exchange.post("buffers", own)
            return
        for received in self._exchange.read("buffers", [0]).values():
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(received[name])


def _on_host(output: object) -> object:
    """Return a copy of nested tensors, numbers, strings and None, on the CPU."""
    if isinstance(output, Tensor):
        return output.detach().to("cpu", copy=True)
    if isinstance(output, Mapping):
        return {key: _on_host(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        values = [_on_host(value) for value in output]
        return values if isinstance(output, list) else tuple(values)
    if output is None or isinstance(output, (str, bool, int, float)):
        return output
    raise WorkerError(
        f"evaluation.collect() got {type(output)}: pass tensors, numbers, strings and None, in lists, tuples "
        "and dicts"
    )


def _read(values: list[Tensor | Number]) -> Iterator[Number]:
    """Yield the values as numbers, with one transfer from the device for all tensors of a type."""
    yield from (value for value in values if not isinstance(value, Tensor))
    tensors = [value for value in values if isinstance(value, Tensor)]
    floating = [tensor.double() for tensor in tensors if tensor.is_floating_point()]
    integers = [tensor.long() for tensor in tensors if not tensor.is_floating_point()]
    for group in (floating, integers):
        if group:
            yield from torch.stack(group).tolist()


TRAINS = "trains"
"""The event that a replica announces with the place that it has reached, for those that evaluate."""
_NUMBERS = "numbers"
PART_LENGTH = 2**22
"""Characters of a value in the store, which takes at most 8 MiB."""


def encoded(value: Any) -> str:
    """Return tensors, numbers, strings and None, in lists, tuples and dicts, as a text."""
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getbuffer()).decode()


def decoded(text: str) -> Any:
    """Return the value that `encoded` has returned as a text."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


class Exchange:
    """What the replicas exchange during an evaluation.

    A replica that has passed the place of the evaluation takes no part in it.
    """

    def __init__(self, group: ReplicaGroup, place: tuple[int, int, int], number: int) -> None:
        self._group = group
        self.rank, self.replicas = group.rank, group.replicas
        self.others = [rank for rank in range(group.replicas) if rank != group.rank]
        self._place = place
        self._name = "/".join(map(str, ("evaluation", *place, number)))
        self._parts: dict[str, int] = defaultdict(int)
        """By the kind of a value, the most parts that one of the replicas has posted."""

    def post(self, kind: str, value: Any = "") -> None:
        """Let the others read tensors, numbers, strings and None, in lists, tuples and dicts."""
        if self._group.has_failed:
            return
        text = encoded(value)
        parts = [text[start : start + PART_LENGTH] for start in range(0, len(text), PART_LENGTH)]
        self._parts[kind] = max(self._parts[kind], len(parts))
        # The first one last, which the others wait for.
        for number in reversed(range(len(parts))):
            self._group.announce(self._event(kind, number), [len(parts), parts[number]])

    def read(
        self,
        kind: str,
        ranks: Sequence[int],
        timeout: float = math.inf,
        *,
        taking_part: Collection[int] = (),  # ranks that are known to take part
    ) -> Values:
        """Wait for the values of the ranks that take part, and return the values that have come."""
        group, first = self._group, Values()
        if ranks and not group.has_failed:
            # In this order: what a rank has posted before it passed is there.
            for places, values in group.poll(TRAINS, self._event(kind, 0), timeout=timeout):
                first = {rank: values[rank] for rank in ranks if rank in values}
                passed = {rank for rank, place in places.items() if tuple(place) > self._place}
                if all(rank in first or rank in passed.difference(taking_part) for rank in ranks):
                    break
        longest = max([count for count, _ in first.values()], default=0)
        self._parts[kind] = max(self._parts[kind], longest)
        # They were posted before the first. They are gone if rank 0 has not waited for this reader.
        others = [group.announced(self._event(kind, number)) or {} for number in range(1, longest)]
        found: Values = {}
        for rank, (count, part) in first.items():
            parts = [part, *(each[rank][1] for each in others[: count - 1] if rank in each)]
            if len(parts) == count:
                found[rank] = decoded("".join(parts))
        return found

    def retract(self, kind: str, ranks: Iterable[int]) -> None:
        """Delete what some ranks have posted, because it was read."""
        for number in range(self._parts.pop(kind, 0)):
            self._group.retract(self._event(kind, number), ranks)

    def _event(self, kind: str, part: int) -> str:
        return f"{self._name}/{kind}/{part}"


class EvaluationSequence(Context):
    """Numbers the evaluations and sums of a program, so that all replicas exchange what belongs together.

    A replica announces the places in training that it has passed: those that evaluate do not wait for it.
    """

    def __init__(self, known: Context) -> None:
        super().__init__(known)
        self._count = 0
        """Evaluations at `_place` so far."""
        self._place: tuple[int, int, int] | None = None
        self._sums: deque[Exchange] = deque()
        """Those whose numbers others may not have read yet."""

    def next(self) -> Exchange:
        """Return how the replicas exchange the results of the next evaluation."""
        progress = self.progress
        # A replica passes an evaluation outside of a loop when it begins a loop of the same epoch.
        place = (progress.epoch, progress.step, int(self.loop.has_batch))
        self._count = self._count + 1 if place == self._place else 1
        self._place = place
        return Exchange(self.group, place, self._count)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Do not take what is done meanwhile for training."""
        self.telemetry.step_timer.pause()
        self.loop.is_evaluating = True
        try:
            with self.spent.measured(Cause.EVALUATION):
                yield
        finally:
            self.telemetry.step_timer.pause()
            self.loop.is_evaluating = False

    def announce_training(self, *, is_waiting: bool = False) -> None:
        """Let replicas that evaluate know that this one trains, or waits in a step."""
        progress = self.progress
        self.announce_passed([progress.epoch, progress.step, 2 if is_waiting else 1])

    def announce_passed(self, place: Sequence[float]) -> None:
        """Let replicas that evaluate know that this one takes no part in evaluations before a place.

        A place is the epoch, the step, and 1 if the replica trains there, 2 if it waits in the step.
        """
        self.group.announce(TRAINS, place)

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of numbers of all processes at the same place of the program, the same on all.

        A replica that is lost, or at another place, takes no part.
        """
        exchange = self.next()
        numbers = self.group.own.sum(list(map(float, values.values())))
        if not exchange.others:
            return dict(zip(values, numbers, strict=True))
        exchange.post(_NUMBERS, numbers)
        self._sums.append(exchange)
        while len(self._sums) > 2:
            # Who posts numbers has read those before the last.
            self._sums.popleft().retract(_NUMBERS, [exchange.rank])
        found = {exchange.rank: numbers, **exchange.read(_NUMBERS, exchange.others)}
        for rank, each in found.items():
            if len(each) != len(values):
                raise WorkerError(
                    f"trainer.sum_over_replicas() got {len(values)} values on rank {exchange.rank}, but "
                    f"{len(each)} on rank {rank}: call it with the same names on all replicas"
                )
        return dict(zip(values, map(total, zip(*found.values(), strict=True)), strict=True))


def average(training: Context, tensor: torch.Tensor) -> bool:
    """Replace a tensor by its mean over all processes, and return whether that was possible.

    If a replica is lost, the step that the program works on is discarded. In a discarded step nothing is
    exchanged, because the other replicas do not communicate any more.
    """
    group = training.group
    if group.processes > 1:
        group.add_shards(tensor)
        tensor.div_(group.processes)
    if group.has_failed or training.failure.is_discarded:
        return False
    try:
        group.average(tensor)
    except PeersLostError:
        if training.loop.trains:
            training.failure.discard()
        return False
    return True
