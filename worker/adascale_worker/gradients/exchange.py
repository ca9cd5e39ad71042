"""Averages the gradients of some parameters over the replicas, in buckets.

A bucket is one tensor with the gradients of consecutive parameters. Its exchange begins while the backward
pass computes the gradients of the next: when the last of its own has arrived, and the buckets before it have
begun. What has not begun at the end of the pass begins then, with zeros for a gradient that this replica does
not have. So all replicas exchange the same buckets in the same order, whatever parameters they have used. The
last bucket also says which these are: a parameter that no replica has used gets no gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.resource_limits import unused_memory
from adascale_worker.program.trained_parameters import Flags
from adascale_worker.scaling.statistics.norms import MAX_ELEMENTS_TO_COPY, batches
from adascale_worker.torch_private.autograd import flatten_together

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that are exchanged together."""


class _Bucket:
    """One tensor with the gradients of consecutive parameters, small ones after the others."""

    def __init__(self, shards: Sequence[tuple[int, Tensor]], flags: int) -> None:
        def is_small(shard: Tensor) -> bool:
            return shard.is_contiguous() and (not shard.is_cpu or shard.numel() <= MAX_ELEMENTS_TO_COPY)

        self.last = [position for position, _ in shards[-2:]]
        ordered = sorted(shards, key=lambda each: is_small(each[1]))
        self.positions = [position for position, _ in ordered]
        self._shards = [shard for _, shard in ordered]
        self._large = sum(not is_small(shard) for shard in self._shards)
        self._flags = flags
        self.allocate()

    def allocate(self) -> None:
        """Use new memory."""
        first, sizes = self._shards[0], [shard.numel() for shard in self._shards]
        self.flat = torch.empty(sum(sizes) + self._flags, dtype=first.dtype, device=first.device)
        *parts, self.flags = self.flat.split([*sizes, self._flags])
        self.views = [
            # Optimizers are faster if gradients have the layout of their parameters.
            part.as_strided(shard.shape, torch.empty_like(shard, device="meta").stride())
            for part, shard in zip(parts, self._shards, strict=True)
        ]
        start = sum(sizes[: self._large])
        self._small = self.flat[start : sum(sizes)]

    def fill(self, gradients: Sequence[Tensor | None], factor: float) -> None:
        """Copy gradients, times a factor; zeros for one that is missing."""
        for view, gradient in zip(self.views, gradients[: self._large], strict=False):
            if gradient is None:
                view.zero_()
            else:
                torch.mul(gradient, factor, out=view)
        small = [
            view.new_zeros(view.shape) if gradient is None else gradient
            for view, gradient in zip(self.views[self._large :], gradients[self._large :], strict=True)
        ]
        if small:
            torch.mul(flatten_together(small), factor, out=self._small)


class GradientExchange:
    """Averages over the replicas what each of them has of the gradients of some parameters."""

    def __init__(self, shards: Sequence[Tensor], group: ReplicaGroup) -> None:
        self._shards = shards  # the parameters, or of sharded ones the parts that this process has
        self._group = group
        self.trained: Flags | None = None
        """The parameters that there are buckets for; None without any."""
        self._buckets: list[_Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._take: Callable[[Sequence[int]], list[Tensor | None]] = lambda _: []
        self._begins_early = self._keeps_means = False
        self._begun = 0
        """Buckets whose exchange has begun."""
        self._works: list[dist.Work | None] = []
        self._mapping: threading.Thread | None = None
        self._present: dict[int, bool] = {}
        self._patterns: dict[tuple[bool, ...], Tensor] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the exchange of a bucket has begun, and none is finished."""
        return self._begun > 0

    def forget(self) -> None:
        """Make the buckets again before the next exchange, with other replicas or after a failure."""
        self.trained, self._buckets, self._works, self._begun = None, [], [], 0
        self._begins_early = False
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._mapping = [], None

    def discard(self) -> None:
        """Leave the memory of an exchange that has not finished to it."""
        if self._works:
            self.forget()
        self._begins_early, self._begun = False, 0

    def covers(self, trained: Flags) -> bool:
        """Whether there are buckets for all parameters that are trained."""
        known = self.trained
        return known is not None and (
            known == trained or all(has for has, needs in zip(known, trained, strict=True) if needs)
        )

    def use(self, trained: Flags) -> None:
        """Make buckets for the parameters that are trained, the same on all replicas."""
        if trained == self.trained:
            return
        self.forget()
        self.trained = trained
        # Usually the order in which gradients arrive.
        numbers = [number for number, is_trained in enumerate(trained) if is_trained][::-1]
        parts = list(_divided([(number, self._shards[number].detach()) for number in numbers]))
        self._buckets = [_Bucket(part, len(numbers) if part is parts[-1] else 0) for part in parts]
        self._patterns.clear()
        for bucket in self._buckets[:-1]:
            for position in bucket.last:
                parameter = self._shards[position]
                if parameter.is_leaf and parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))

    def begin(
        self,
        take: Callable[[Sequence[int]], list[Tensor | None]],  # removes and returns gradients, by position
        *,
        is_early: bool,  # whether buckets whose gradients have all arrived begin before `flush`
        keeps_means: bool,  # whether the last means are still used
    ) -> None:
        """Prepare for an exchange."""
        if self._mapping is not None:
            self._mapping.join()
            self._mapping = None
        if self._works and (trained := self.trained) is not None:
            # An exchange that has failed may still write into the buckets.
            self.forget()
            self.use(trained)
        self._take, self._begins_early, self._keeps_means = take, is_early, keeps_means
        self._begun, self._works, self._present = 0, [], {}

    def prepare(self, trained: Flags) -> None:
        """Make buckets before they are needed, and map their memory in a thread, if there is enough."""
        try:
            self.use(trained)
            flats = [bucket.flat for bucket in self._buckets]
            if self._mapping is None and unused_memory() > 2 * sum(flat.nbytes for flat in flats):
                mapping = threading.Thread(target=lambda: [flat.zero_() for flat in flats], daemon=True)
                mapping.start()
                self._mapping = mapping
        except (RuntimeError, MemoryError):
            self.forget()

    def _arrived(self, _: Tensor) -> None:
        while self._begins_early and self._begun < len(self._buckets):
            positions = self._buckets[self._begun].positions
            if any(self._shards[position].grad is None for position in positions):
                return
            self._begin_bucket()

    def stop_early(self) -> None:
        """Begin no more buckets before `flush`, because gradients may arrive in parts."""
        self._begins_early = False

    @torch.no_grad()
    def _begin_bucket(self) -> None:
        bucket = self._buckets[self._begun]
        self._begun += 1
        if self._keeps_means:
            bucket.allocate()
        gradients = self._take(bucket.positions)
        bucket.fill(gradients, 1.0 / self._group.replicas)
        for position, gradient in zip(bucket.positions, gradients, strict=True):
            self._present[position] = gradient is not None
        if bucket is self._buckets[-1]:
            bucket.flags.copy_(self._pattern())
        self._works.append(self._group.start_sum(bucket.flat))

    def _pattern(self) -> Tensor:
        present = tuple(self._present.values())
        if present not in self._patterns:
            last = self._buckets[-1].flat
            self._patterns = {present: torch.tensor(present, dtype=last.dtype).to(last.device)}
        return self._patterns[present]

    def flush(self) -> None:
        """Begin with the buckets that have not begun."""
        self._begins_early = False
        begun = (position for bucket in self._buckets[: self._begun] for position in bucket.positions)
        if any(self._shards[position].grad is not None for position in begun):
            raise WorkerError(
                "the gradient of a parameter arrived in two parts of one backward pass, after the exchange "
                "of the first part had begun: use checkpoint(..., use_reentrant=False)"
            )
        while self._begun < len(self._buckets):
            self._begin_bucket()

    def wait(self) -> None:
        """Wait for the exchange."""
        if self._works and self._group.finish_sums(self._works):
            self._works = []

    def means(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the positions of parameters with their means, after the exchange."""
        self.wait()
        self._begun = 0
        used = None
        if not all(self._present.values()):
            # Only now, because it waits for the device.
            used = [share != 0.0 for share in self._buckets[-1].flags.tolist()]
        means = chain.from_iterable(zip(each.positions, each.views, strict=True) for each in self._buckets)
        return means if used is None else compress(means, used)


def _divided(shards: Sequence[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield parts of one type and device, each with at most `BUCKET_BYTES` if possible."""
    kinds = list(dict.fromkeys((shard.dtype, shard.device) for _, shard in shards))
    ordered = sorted(shards, key=lambda each: kinds.index((each[1].dtype, each[1].device)))
    sizes = [shard.nbytes for _, shard in ordered]
    for batch in batches(sizes, [(shard.dtype, shard.device) for _, shard in ordered], BUCKET_BYTES):
        yield [ordered[n] for n in batch]
