"""The calls of the program's models while they train, the errors of these, and the times of a step.

The program keeps its models, which run as they are: the gradients are averaged after they were computed
(`optimizer_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from adascale_core.batch.plans import BatchPlan
from adascale_core.performance.slow_replica import RecentTimes, TypicalTime
from adascale_worker.gradients.step_failure import StepFailure, forward_without_activations
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device_clock import DeviceClock, PendingTimes, clock_of
from adascale_worker.program.parts import OtherParallelism
from adascale_worker.program.patching import MethodOverride, is_traced
from adascale_worker.torch_private.modules import call_of, override_call

Place = tuple[int, BatchPlan]
"""The generation and the batch plan of a step: times are compared within these."""


class ComputeTimer:
    """Measures the time from the beginning of a step to the end of its last backward pass.

    All replicas begin a step at the same time, because all of them have waited for the same exchange. Where a
    replica waits in between, the timer is suspended. The optimizer's own step is left out.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []
        """Marks of the clock at the beginning and end of computation in the present step."""
        self._since: Any = None
        """Mark of the clock at the beginning of the present span; None while it is suspended."""
        self._is_running = self._is_complete = False
        self._measured: PendingTimes[Place] = PendingTimes(clock)
        self._recent = RecentTimes()
        self._place: Place | None = None

    def begin_step(self) -> None:
        """Begin with a step, when all replicas have made the one before."""
        self._spans = []
        self._since = self._clock.mark()
        self._is_running, self._is_complete = True, False

    def suspend(self) -> None:
        """Leave out the time until `resume`, in which this replica may wait for others."""
        if self._since is not None:
            self._spans.append((self._since, self._clock.mark()))
            self._since = None

    def resume(self) -> None:
        """Continue after `suspend`."""
        if self._is_running and self._since is None:
            self._since = self._clock.mark()

    def end_backward(self) -> None:
        """End the measurement: all gradients of this replica are computed, and it waits for the others."""
        if self._is_running:
            self.suspend()
            self._is_running, self._is_complete = False, True

    def finish_step(self, place: Place, *, counts: bool) -> None:
        """Record the time of a step, if nothing else was done (`counts`). Does not wait for the device."""
        if place != self._place:
            self._place = place
            self._recent.clear()
        if counts and self._is_complete:
            self._measured.add(place, *self._spans)
        for measured_in, seconds in self._measured.take():
            if measured_in == place:
                self._recent.add(seconds)
        self._is_running = self._is_complete = False
        self._since = None

    @property
    def typical(self) -> TypicalTime:
        """The typical time of the last steps."""
        return self._recent.typical


class TrainedModels:
    """The calls of the models while they train, and the errors of these."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        device: torch.device,
        group: ReplicaGroup,
        failure: StepFailure,
        local_bsz: Callable[[], int],
        before_forward: Callable[[], None],
        *,
        is_sharded: bool,  # over the processes of a replica, whose collective calls an error would end
    ) -> None:
        self.other_parallelism = OtherParallelism(models, allows_shards=is_sharded)
        self.device = device
        self._group = group
        self._failure = failure
        self._local_bsz = local_bsz
        self._before_forward = before_forward
        self._is_sharded = is_sharded
        self._clock = clock_of(device)
        self.compute = ComputeTimer(self._clock)
        self._exchanges: list[tuple[Any, Any]] = []
        """The exchanges of gradients of the present step: marks of the clock at their beginning and end."""
        self._measured: PendingTimes[None] = PendingTimes(self._clock)
        self._sync_time: float | None = None
        for model in models:
            override_call(model, _TrainedForward(model, call_of(model), self))

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

    @contextmanager
    def measured_exchange(self) -> Iterator[None]:
        """Measure the time for which the gradients of this replica wait for those of the others."""
        if self._group.replicas == 1:
            yield
            return
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
        if self._is_sharded:
            self._before_forward()
            return original(*args, **kwargs)
        if not self._failure.is_discarded and not self._group.has_failed:
            try:
                self._before_forward()
                return original(*args, **kwargs)
            except (RuntimeError, MemoryError, PeersLostError) as error:
                if not self._failure.handles(error):
                    raise
        # The step is discarded before an optimizer uses its gradients.
        self._failure.discard()
        self._before_forward()
        if self._failure.lacks_memory:
            # The error is deleted: its traceback has kept the activations.
            return forward_without_activations(original, args, kwargs, self._local_bsz(), model.parameters())
        return original(*args, **kwargs)


class _TrainedForward(MethodOverride):
    """Replaces the forward of a model."""

    def __init__(self, model: torch.nn.Module, original: Callable[..., Any], models: TrainedModels) -> None:
        super().__init__(original)
        self._model = model
        self._models = models

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._model.training and not is_traced():
            return self._models.forward(self._model, self.original, args, kwargs)
        return self.original(*args, **kwargs)
