"""Reads the gradients of one step on this rank: those that the caller passes, by hooks, or with FSDP2."""

from collections.abc import Sequence
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.scaling.statistics.norms import EuclideanMetric
from adascale_worker.scaling.statistics.parameters import OptimizerParameters
from adascale_worker.scaling.statistics.steps import StepSettings


class GradientReader:
    """The squared norms of micro-gradients, which the caller passes, and of averaged gradients."""

    is_compressed = False
    """Whether averaged gradients are not the mean of the local ones."""
    ddp: DistributedDataParallel | None = None

    def __init__(
        self, parameters: OptimizerParameters, settings: StepSettings, metric: EuclideanMetric
    ) -> None:
        self._parameters = parameters
        self._settings = settings
        self._metric = metric

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that gradients are averaged over; None for the default process group."""
        return None if self.ddp is None else self.ddp.process_group

    def unreadable_parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients cannot be read as the gradients of the others are."""
        return [p for group in self._parameters.groups() for p in group if hasattr(p, "placements")]

    def observe(self, settings: StepSettings) -> None:
        """Observe the backward passes of the next step."""
        self._settings = settings

    def remove_hooks(self) -> None:
        """Remove the hooks from all parameters."""

    def mark_incomplete(self) -> None:
        """Leave the step out if its first gradients were not read."""

    @property
    def micro_gradients(self) -> int:
        """Number of micro-gradients that were read in this step, on all ranks; 0 if it is unknown."""
        return self._settings.micro_gradients

    def synchronisation_problem(self) -> str | None:
        """Return why micro-gradients cannot be read from this loop, and what to change; None if they can."""
        return None

    def averaged_sqr_norms(self) -> Tensor:
        """Return the squared norms of the averaged gradients: shape (groups,).

        With FSDP2, those of the shards of this rank, times the number of ranks, so that the mean over ranks
        is the squared norm of the whole gradient.
        """
        return self.current_sqr_norms()

    def current_sqr_norms(self) -> Tensor:
        """Return the squared norms of the gradients as they are now on this rank: shape (groups,)."""
        device = self._parameters.device
        return torch.stack([self._metric.sqr_norm(*own, device) for own in self._parameters.with_gradients()])

    # -- micro-gradients ----------------------------------------------------------------------------------

    def begin_step(self, *, measuring: bool) -> None:  # noqa: ARG002
        """Discard what was read in this step, and read the next passes if `measuring`."""
        self._earlier: Tensor | None = None
        self.discard_last()
        self._count = 0  # without the last one

    @property
    def passes(self) -> int:
        """Micro-gradients that were read."""
        return self._count + self._has_last

    @property
    def has_read_all(self) -> bool:
        """Whether all micro-gradients of this rank were read."""
        return self._has_last and self.passes == self._settings.accumulation

    def discard_last(self) -> None:
        """Discard the present micro-gradient."""
        self._present: dict[int, list[Tensor]] = {}
        self._has_last = False
        self._last_weight = 1.0

    def read(self, group: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Read a part of a micro-gradient: the gradients of parameters of a group, not averaged."""
        if self._parameters.is_sharded:
            measured = [self._parameters.measures(parameter) for parameter in parameters]
            parameters, gradients = list(compress(parameters, measured)), list(compress(gradients, measured))
        norm = self._metric.sqr_norm(parameters, gradients, self._parameters.device)
        self._present.setdefault(group, []).append(norm)

    def end(self, weight: float) -> None:
        """End a micro-gradient that does not complete the step, whose loss was multiplied by `weight`."""
        norms = self._sqr_norms(weight)
        self._earlier = norms if self._earlier is None else self._earlier + norms
        self.discard_last()
        self._count += 1

    def end_last(self, weight: float) -> None:
        """End the micro-gradient that completes the step."""
        self._has_last, self._last_weight = True, weight

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
