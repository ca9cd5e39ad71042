"""Reads the gradients of one step on this rank: by hooks, with FSDP2, or those that the caller passes."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.scaling.statistics.all_reduce import sqr_norms_of_mean
from adascale_worker.scaling.statistics.backward import BackwardObserver, ReadingTime
from adascale_worker.scaling.statistics.metric import EuclideanMetric
from adascale_worker.scaling.statistics.parameters import OptimizerParameters
from adascale_worker.scaling.statistics.sharded import ShardedGradients
from adascale_worker.scaling.statistics.steps import StepSettings
from adascale_worker.torch_private.distributed import is_fully_sharded
from adascale_worker.torch_private.modules import communication_hooks


class GivenGradients:
    """The squared norms of the micro-gradients of this rank, which the caller reads in place of hooks."""

    def __init__(self, parameters: OptimizerParameters, metric: EuclideanMetric) -> None:
        self._parameters = parameters
        self._metric = metric
        self.clear()

    def clear(self) -> None:
        """Discard what was read."""
        self._earlier: Tensor | None = None
        self.discard_last()
        self.count = 0  # without the last one

    def discard_last(self) -> None:
        """Discard the present micro-gradient."""
        self._present: dict[int, list[Tensor]] = {}
        self.has_last = False
        self._last_weight = 1.0

    def read(self, group: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Read a part of the present micro-gradient."""
        norm = self._metric.sqr_norm(parameters, gradients, self._parameters.device)
        self._present.setdefault(group, []).append(norm)

    def end(self, weight: float) -> None:
        """End a micro-gradient that does not complete the step, times its weight."""
        norms = self._sqr_norms(weight)
        self._earlier = norms if self._earlier is None else self._earlier + norms
        self.discard_last()
        self.count += 1

    def end_last(self, weight: float) -> None:
        """End the micro-gradient that completes the step."""
        self.has_last, self._last_weight = True, weight

    def sum_of_sqr_norms(self) -> Tensor:
        """Return the sum of the squared norms, each divided by its weight: shape (groups,)."""
        last = self._sqr_norms(self._last_weight)
        return last if self._earlier is None else self._earlier + last

    def _sqr_norms(self, weight: float) -> Tensor:
        groups = len(self._parameters.groups())
        zero = torch.zeros((), **self._parameters.statistics_options)
        if weight <= 0.0:
            return zero.repeat(groups)
        sums = [sum(self._present.get(group, ()), zero) for group in range(groups)]
        return torch.stack(sums) / weight if weight != 1.0 else torch.stack(sums)


AVERAGING_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)
"""DDP communication hooks after which `.grad` is the mean of the ranks' gradients, up to rounding."""


class GradientReader:
    """The squared norms of micro-gradients and of averaged gradients."""

    def __init__(
        self,
        parameters: OptimizerParameters,
        settings: StepSettings,
        model: torch.nn.Module | None,
        on_pass_start: Callable[[], None],
        on_pass_end: Callable[[], None],
        metric: EuclideanMetric,
        *,
        observes_backward: bool,
    ) -> None:
        self._metric = metric
        self._parameters = parameters
        self._given = None if observes_backward else GivenGradients(parameters, metric)
        self._settings = settings
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self.is_compressed = False  # whether averaged gradients are not the mean of the local ones
        self._sharded = _sharded_gradients(model, parameters, settings.world_size, metric)
        self._is_measuring = False
        self._on_pass_start = on_pass_start
        self._observer = BackwardObserver(self._start_pass, on_pass_end, metric)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that gradients are averaged over; None for the default process group."""
        return None if self.ddp is None else self.ddp.process_group

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has only its shard of the averaged gradients (FSDP2)."""
        return self._sharded is not None

    def unreadable_parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients cannot be read as the gradients of the others are.

        With `fully_shard` on the model, those that it did not shard alone; otherwise all DTensors.
        """
        parameters = [parameter for group in self._parameters.groups() for parameter in group]
        if self._sharded is None:
            return [parameter for parameter in parameters if hasattr(parameter, "placements")]
        return [parameter for parameter in parameters if id(parameter) not in self._sharded.parameter_ids]

    def observe(self, settings: StepSettings) -> None:
        """Observe the backward passes of the next step."""
        self._settings = settings
        if self._given is None:
            self._observer.observe(self._parameters.groups(), self._reading_time())

    def begin_step(self, *, measuring: bool) -> None:
        """Discard what was read in this step, and read the next passes with FSDP2 if `measuring`."""
        self._is_measuring = measuring
        if self._given is not None:
            self._given.clear()
        self._observer.begin_step()
        if self._sharded is not None:
            self._sharded.begin_step(measuring=measuring)

    def mark_incomplete(self) -> None:
        """Leave the step out if its first gradients were not read.

        FSDP2 calls a hook only when the first gradients of a pass are already reduced.
        """
        if self._sharded is not None:
            self._sharded.mark_incomplete()

    def remove_hooks(self) -> None:
        """Remove the hooks from all parameters."""
        self._observer.remove_hooks()

    @property
    def passes(self) -> int:
        """Backward passes of this step so far, including passes that FSDP2 does not synchronise."""
        if self._given is not None:
            return self._given.count + self._given.has_last
        return self._observer.passes if self._sharded is None else self._sharded.passes

    @property
    def micro_gradients(self) -> int:
        """Number of micro-gradients that were read in this step, on all ranks; 0 if it is unknown."""
        own = self._settings.accumulation if self._sharded is None else self._sharded.micro_gradients
        return self._settings.world_size * own

    @property
    def has_read_all(self) -> bool:
        """Whether all micro-gradients of this rank were read."""
        if self._given is not None:
            return self._given.has_last and self.passes == self._settings.accumulation
        if self._sharded is not None:
            return self.micro_gradients > 1
        return self._observer.has_read_any and self._observer.has_read_all

    # -- what the caller reads, without an observer --------------------------------------------------------

    def read(self, group: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Read a part of a micro-gradient: the gradients of parameters of a group."""
        if self._given is not None:
            self._given.read(group, parameters, gradients)

    def end_micro_gradient(self, weight: float) -> None:
        """End a micro-gradient that does not complete the step, times its weight."""
        if self._given is not None and self._is_measuring:
            self._given.end(weight)

    def end_last_gradient(self, weight: float) -> None:
        """End the micro-gradient that completes the step, times its weight."""
        if self._given is not None and self._is_measuring:
            self._given.end_last(weight)

    def discard_last_gradient(self) -> None:
        """Discard the micro-gradient that completes the step."""
        if self._given is not None:
            self._given.discard_last()

    # -- what was read --------------------------------------------------------------------------------------

    def synchronisation_problem(self) -> str | None:
        """Return why micro-gradients of FSDP2 cannot be read, and what to change; None if they can."""
        return None if self._sharded is None else self._sharded.synchronisation_problem()

    def micro_gradient_sqr_norms(self) -> Tensor:
        """Return the sum of the squared norms of the micro-gradients of this rank: shape (groups,).

        Each is divided by its weight.
        """
        if self._given is not None:
            return self._given.sum_of_sqr_norms()
        device = self._parameters.device
        if self._sharded is not None:
            return self._sharded.sum_of_sqr_norms(device)
        return self._observer.sum_of_sqr_norms(len(self._parameters.groups()), device)

    def averaged_sqr_norms(self) -> Tensor:
        """Return the squared norms of the averaged gradients: shape (groups,).

        With FSDP2, those of the shards of this rank, times the number of shards, so that the mean over ranks
        is the squared norm of the whole gradient.
        """
        device = self._parameters.device
        self.is_compressed = self._observer.keeps_copies
        if self.is_compressed:
            return sqr_norms_of_mean(
                self._observer.copies(),
                device,
                ranks=self._settings.world_size,
                process_group=self.process_group,
            )
        norms = self.current_sqr_norms()
        return norms if self._sharded is None else norms * self._sharded.shards

    def current_sqr_norms(self) -> Tensor:
        """Return the squared norms of the gradients as they are now on this rank: shape (groups,)."""
        device = self._parameters.device
        return torch.stack([self._metric.sqr_norm(*own, device) for own in self._parameters.with_gradients()])

    def _start_pass(self) -> None:
        self._on_pass_start()
        self._observer.keeps_copies = self._settings.world_size > 1 and self._compresses()

    def _reading_time(self) -> ReadingTime:
        if self._sharded is not None:
            return ReadingTime.IN_FSDP
        if self._settings.micro_gradients == 1:
            return ReadingTime.NEVER
        if self._settings.accumulation > 1 or self.ddp is None:
            return ReadingTime.ON_ARRIVAL
        # After the pass is too late if .grad is a view of DDP's bucket, or DDP averages before our callback.
        if self.ddp.gradient_as_bucket_view or self.ddp.static_graph:
            return ReadingTime.ON_ARRIVAL
        return ReadingTime.AFTER_PASS

    def _compresses(self) -> bool:
        """Whether gradients are averaged by a communication hook that may lose a part of them."""
        return self.ddp is not None and any(
            hook not in AVERAGING_HOOKS for hook in communication_hooks(self.ddp)
        )


def _sharded_gradients(
    model: torch.nn.Module | None, parameters: OptimizerParameters, ranks: int, metric: EuclideanMetric
) -> ShardedGradients | None:
    if model is None or not is_fully_sharded(model):
        return None
    return ShardedGradients(model, parameters.groups(), ranks, metric)
