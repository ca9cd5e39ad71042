"""Several models of one program, trained data-parallel without `DistributedDataParallel`.

DDP averages gradients in the order of one backward pass through one model. A GAN's passes go through both of
its models, several times for a step, and through one of them only to reach the other. So the gradients are
averaged for each optimizer instead, after the pass (`optimizer_gradients`), and models run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adascale_worker.gradients.data_parallel import ComputeTimer
from adascale_worker.gradients.step_failure import StepFailure, forward_without_activations
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device_clock import PendingTimes, clock_of
from adascale_worker.program.parts import OtherParallelism
from adascale_worker.program.patching import MethodOverride, is_traced
from adascale_worker.torch_private.modules import call_of, override_call


class ModelSet:
    """The calls of several models while they train, and the errors of these.

    It has the attributes and methods of `DataParallelModel`, which does the same for one model.
    """

    ddp = None

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        device: torch.device,
        group: ReplicaGroup,
        failure: StepFailure,
        local_bsz: Callable[[], int],
        *,
        allows_shards: bool = False,
    ) -> None:
        self.other_parallelism = OtherParallelism(models, allows_shards=allows_shards)
        self.device = device
        self._group = group
        self._failure = failure
        self._local_bsz = local_bsz
        self._clock = clock_of(device)
        self.compute = ComputeTimer(self._clock)
        """Measures nothing: the replicas wait for each other several times in a step."""
        self._exchanges: list[tuple[Any, Any]] = []
        """The exchanges of gradients of the present step: marks of the clock at their beginning and end."""
        self._measured: PendingTimes[None] = PendingTimes(self._clock)
        self._sync_time: float | None = None
        for model in models:
            override_call(model, _TrainedForward(model, call_of(model), self))

    def prepare(self) -> None:
        """Do nothing: there are no buckets to make."""

    def connect(self) -> None:
        """Use the process group of the generation that was formed."""
        self._failure.clear()

    def use_trained(self) -> None:
        """Do nothing: nothing depends on which parameters are trained."""

    def follow_trained(self) -> None:
        """Do nothing: each optimizer follows what is trained at its own step."""

    def end_backward(self) -> None:
        """Do nothing: nothing depends on the number of backward passes."""

    def disconnect(self) -> None:
        """Do nothing: nothing is bound to the process group."""

    def begin_timing(self) -> None:
        """Time the exchange of gradients of the next steps only."""
        self._sync_time = None
        self._exchanges.clear()
        self._measured.clear()

    def begin_step(self) -> None:
        """Use the times that were measured in the steps before."""
        if self._exchanges:
            self._measured.add(None, *self._exchanges)
            self._exchanges.clear()
        for _, seconds in self._measured.take():
            self._sync_time = seconds

    def sync_time(self) -> float | None:
        """Return the seconds for which a recent step has waited for the exchange of gradients.

        None if they were returned before.
        """
        measured, self._sync_time = self._sync_time, None
        return measured

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the replicas, and measure the time of it."""
        with self._measured_exchange():
            self._group.average(tensors)

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Return the sums over the replicas of `numbers`. A collective call; measures its time.

        Does not wait for the device.
        """
        if self._group.replicas == 1:
            return tuple(numbers)
        with self._measured_exchange():
            return self._group.sum(numbers)

    @contextmanager
    def _measured_exchange(self) -> Iterator[None]:
        started = self._clock.mark()
        yield
        self._exchanges.append((started, self._clock.mark()))

    def forward(
        self,
        model: torch.nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a model's original forward."""
        self.other_parallelism.check_call()
        if not self._failure.is_discarded and not self._group.has_failed:
            try:
                return original(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not self._failure.shortage(error):
                    raise
        # The step is discarded before an optimizer uses its gradients.
        self._failure.discard()
        if self._failure.lacks_memory:
            # The error is deleted: its traceback has kept the activations.
            return forward_without_activations(original, args, kwargs, self._local_bsz(), model.parameters())
        return original(*args, **kwargs)


class _TrainedForward(MethodOverride):
    """Replaces the forward of a model."""

    def __init__(self, model: torch.nn.Module, original: Callable[..., Any], models: ModelSet) -> None:
        super().__init__(original)
        self._model = model
        self._models = models

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._model.training and not is_traced():
            return self._models.forward(self._model, self.original, args, kwargs)
        return self.original(*args, **kwargs)
