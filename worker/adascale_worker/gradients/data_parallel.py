"""Data parallelism in place: the program keeps its model, and the model's `forward` goes through DDP.

`ComputeTimer` measures how long this replica computes in a step, without waiting for others.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from adascale_core.batch.plans import BatchPlan
from adascale_core.performance.slow_replica import RecentTimes, TypicalTime
from adascale_worker.errors import WorkerError
from adascale_worker.gradients.step_failure import StepFailure, forward_without_activations, tensors_in
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device_clock import DeviceClock, PendingTimes, clock_of
from adascale_worker.program.parts import OtherParallelism
from adascale_worker.program.patching import MethodOverride, is_traced
from adascale_worker.program.trained_parameters import Flags, TrainedParameters
from adascale_worker.torch_private.autograd import accumulates_gradient, call_at_end_of_backward
from adascale_worker.torch_private.distributed import local_process_group
from adascale_worker.torch_private.modules import (
    abandon,
    call_of,
    override_call,
    rebuild_buckets,
    replace_process_group,
    set_timing_interval,
    timed_backward_pass,
)

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


TIMING_INTERVAL = 10
"""The exchange of gradients is timed in each n-th step."""


@dataclass
class ForwardRecord:
    """Records forward passes through the model that was passed to `program_reentry`."""

    called: bool = False  # since the last step, in training mode and with gradients enabled


class DataParallelModel:
    """Makes a model data-parallel in place, over the replicas of the present generation.

    In evaluation mode, while gradients are disabled, and on one replica, the model's original forward runs,
    so one replica may evaluate by itself.
    """

    # Under an agent, DDP is made over a process group of this process alone, with the same buckets on all
    # members, and uses the group of a generation from `connect` to `disconnect`. So members with and without
    # DDP can form a group together, without a collective call for it.

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        group: ReplicaGroup,
        forward: ForwardRecord | None = None,
        trained: TrainedParameters | None = None,
        failure: StepFailure | None = None,
        *,
        find_unused_parameters: bool = False,
        before_forward: Callable[[], None] = lambda: None,  # called when buffers are those of rank 0
        changed_forward: Callable[[], None] = lambda: None,  # called if others are trained than in the last
        changed_trained: Callable[[list[Tensor]], None] = lambda _: (
            None
        ),  # called before the optimizer's step
        steps: Callable[[], int] = lambda: 0,
        local_bsz: Callable[[], int] = lambda: 1,
    ) -> None:
        self.other_parallelism = OtherParallelism([model], own=_OriginalForward)
        self.ddp: DistributedDataParallel | None = None
        self.device = device
        self.compute = ComputeTimer(clock_of(device))
        self._has_buffers = any(True for _ in model.buffers())
        self._group = group
        self._failure = failure or StepFailure(group)
        self._local_bsz = local_bsz
        self._find_unused_parameters = find_unused_parameters
        self._has_forward = False
        """Whether there was a forward pass through DDP since the last backward pass, or in this step."""
        self._exchanges = 0
        self._timed = 0
        self._local_group: dist.ProcessGroup | None = None
        self._record = forward or ForwardRecord()
        self._trained = trained or TrainedParameters(model, group)
        self._changed_forward = changed_forward
        self._changed_trained = changed_trained
        self._steps = steps
        self._flags: Flags | None = None
        """The trained parameters that DDP is made for, or the last forward pass on one replica."""
        self._passes: list[tuple[Flags, bool]] = []
        """For each forward pass of this step: which parameters it trains, whether gradients are exchanged."""
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        """The graphs of the forward passes of this step that exist, and whose backward pass has not run."""
        self._unknown_graphs: list[_Graph] = []
        """The graphs of outputs in which no tensor was found. They may exist until the step ends."""

        def begin_original_forward() -> None:
            self.compute.resume()
            before_forward()

        self._wrapped = _OriginalForward(
            model, begin_original_forward, reverse_parameters=not find_unused_parameters
        )
        if not group.is_elastic and group.replicas > 1:
            # With others, torch's error would name nothing.
            self._trained.require_equal()
            self.ddp = self._wrap()
        override_call(model, _DataParallelForward(model, self._wrapped.original_forward, self))

    def connect(self) -> None:
        """Use the process group of the generation that was formed. The gradients are not used again."""
        self._failure.clear()
        if self._group.replicas == 1:
            self._remove()
            return
        if self.ddp is None:
            # Buckets can then have the memory of the gradients, which is still mapped.
            for parameter in self._wrapped.model.parameters():
                parameter.grad = None
            self._local_group = self._local_group or local_process_group()
            self.ddp = self._wrap(self._local_group)
        self._use_world()

    def use_trained(self) -> None:
        """Make DDP again if other parameters are trained than when it was made.

        Not a collective call: all replicas make the same buckets.
        """
        if self._flags == self._trained.current():
            return
        if self._group.replicas == 1:
            self._flags = self._trained.current()
            return
        self._local_group = self._local_group or local_process_group()
        self._remove()
        self.ddp = self._wrap(self._local_group)
        self._use_world()

    def begin_step(self) -> None:
        """Discard the records of the forward passes of the last step."""
        self._has_forward = False
        self._passes.clear()
        self._graphs.clear()
        self._unknown_graphs.clear()
        if self._group.replicas == 1:
            # Gradients may come from another method of the model. On several replicas that is refused.
            self._begin_forward()

    def end_backward(self) -> None:
        """Let the next forward pass replace the buffers by the buffers of rank 0."""
        self._has_forward = False

    def follow_trained(self) -> None:
        """Train the parameters that require gradients now in the step that the optimizer makes next.

        Deletes the gradients of those that do not, and did in the last step or a forward pass of this one.
        """
        now = self._trained.current()
        passes = [flags for flags, _ in self._passes]
        if now == self._trained.flags and all(flags == now for flags in passes):
            self._trained.agree(self._steps())
            return
        self._require_averaged(now)
        before = self._trained.flags
        changed = self._trained.follow(self._steps())
        for parameter, is_trained, *earlier in zip(
            self._wrapped.model.parameters(), now, before, *passes, strict=True
        ):
            if not is_trained and any(earlier):
                parameter.grad = None
        if changed:
            self._changed_trained(changed)

    def _require_averaged(self, now: Flags) -> None:
        """Check that the last micro-batch has trained each parameter whose gradients are used."""
        if self._group.replicas == 1 or not self._passes:
            return
        exchanged = [flags for flags, is_exchanged in self._passes if is_exchanged]
        named = zip(self._wrapped.model.named_parameters(), now, *exchanged, strict=True)
        for (name, parameter), is_trained, *earlier in named:
            if is_trained and not any(earlier) and parameter.grad is not None:
                raise WorkerError(
                    f"the parameter {name!r} has gradients of an earlier micro-batch, but it was frozen in "
                    "all forward passes of the last micro-batch of the step, so they are not averaged over "
                    f"the {self._group.replicas} replicas. Freeze and unfreeze it in the same way in all "
                    "micro-batches of a step, or between two steps: decide by trainer.steps"
                )

    def _begin_forward(self) -> bool:
        """Return whether a forward pass trains parameters, and make DDP for them if it is for others."""
        now = self._trained.current()
        if not any(now):
            return False
        if now != self._flags:
            if self.ddp is not None and self._flags is not None and (self._graphs or self._unknown_graphs):
                name = self._trained.difference(now, self._flags)
                raise WorkerError(
                    f"requires_grad of the parameter {name!r} was set between two forward passes of a step, "
                    "before the backward pass of the first, whose gradients would not be averaged over the "
                    f"{self._group.replicas} replicas: call backward() after each forward pass, or freeze "
                    "and unfreeze parameters between two steps"
                )
            self._trained.agree(self._steps())
            self.use_trained()
            self._changed_forward()
        return True

    def _record_pass(self) -> None:
        assert self._flags is not None
        is_exchanged = self.ddp is not None and bool(self.ddp.require_backward_grad_sync)
        self._exchanges += is_exchanged
        entry = (self._flags, is_exchanged)
        if not self._passes or self._passes[-1][0] is not entry[0] or self._passes[-1][1] != is_exchanged:
            self._passes.append(entry)

    def _observe_graph(self, output: Any) -> None:
        """Find out later whether the backward pass of a forward pass has run."""
        tensors = list(tensors_in(output))
        exchanges = self.ddp is not None and bool(self.ddp.require_backward_grad_sync)
        graph = _Graph(
            self._graphs,
            next(p for p in self._wrapped.model.parameters() if p.requires_grad),
            self.compute.end_backward if exchanges else None,
        )
        if not tensors:
            self._unknown_graphs.append(graph)
        for tensor in tensors:
            if tensor.grad_fn is not None:
                # The graph keeps the object.
                tensor.grad_fn.register_prehook(graph)

    def _use_world(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        if self.ddp is not None:
            replace_process_group(self.ddp, world)

    def prepare(self) -> None:
        """Make DDP, and map the memory of its buckets, before the other replicas wait for this one."""
        self._local_group = local_process_group()
        self.ddp = self._wrap(self._local_group, is_ahead=True)

    def disconnect(self) -> None:
        """Release the process group of the present generation, which is destroyed next."""
        if self.ddp is None or self._local_group is None:
            return
        if self._group.has_failed or self._failure.is_discarded:
            self._remove()
        else:
            replace_process_group(self.ddp, self._local_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's original forward, through DDP on several replicas."""
        self.other_parallelism.check_call()
        if not self._failure.is_discarded and not self._group.has_failed:
            try:
                if not self._begin_forward():
                    return self._wrapped.forward(*args, **kwargs)
                self._record.called = True
                self._record_pass()
                if self.ddp is None:
                    return self._wrapped.forward(*args, **kwargs)
                # A backward pass may need what an earlier forward pass has saved of the buffers.
                self.ddp.broadcast_buffers = not self._has_forward
                self._has_forward = True
                if self._has_buffers:
                    # DDP waits for those of rank 0.
                    self.compute.suspend()
                output = self.ddp(*args, **kwargs)
                self._observe_graph(output)
                return output
            except (RuntimeError, MemoryError, PeersLostError) as error:
                if not self._failure.handles(error):
                    raise
        # The step is discarded before the optimizer uses its gradients.
        self._record.called = True
        self._failure.discard()
        if self._failure.lacks_memory:
            # The error is deleted: its traceback has kept the activations.
            parameters = self._wrapped.model.parameters()
            return forward_without_activations(
                self._wrapped.forward, args, kwargs, self._local_bsz(), parameters
            )
        return self._wrapped.forward(*args, **kwargs)

    def begin_timing(self) -> None:
        """Time the exchange of gradients of the next steps only: the replicas or their batch have changed."""
        self._timed = self._exchanges

    def sync_time(self) -> float | None:
        """Return the seconds of a step in which computation waits for the exchange of gradients.

        This is a recent step since `begin_timing` whose time was not returned before; None if there is none.
        """
        timed = timed_backward_pass(self.ddp) if self.ddp is not None else None
        if timed is None or timed[0] <= self._timed:
            return None
        self._timed, seconds = timed
        return seconds

    def _remove(self) -> None:
        if self.ddp is not None and self._local_group is not None:
            abandon(self.ddp, self._local_group)
            self.ddp = self._flags = None

    def _wrap(
        self, group: dist.ProcessGroup | None = None, *, is_ahead: bool = False
    ) -> DistributedDataParallel | None:
        self._flags = self._trained.current()
        if not any(self._flags):
            return None
        options: dict[str, Any] = {}
        if group is not None and "init_sync" in inspect.signature(DistributedDataParallel).parameters:
            # The members get parameters and buffers with the rest of the state.
            options["init_sync"] = False
        with _hidden_gradients(self._wrapped.model):
            ddp = DistributedDataParallel(
                self._wrapped,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                process_group=group,
                find_unused_parameters=self._find_unused_parameters,
                gradient_as_bucket_view=True,
                **options,
            )
            if not self._find_unused_parameters:
                if is_ahead:
                    _set_zeros(self._wrapped.model)
                rebuild_buckets(ddp)
        set_timing_interval(ddp, TIMING_INTERVAL)
        self._exchanges = self._timed = 0
        return ddp


class _Graph:
    """A hook on the outputs of a forward pass, which are in a graph until their backward pass or for ever."""

    def __init__(
        self, graphs: weakref.WeakSet[_Graph], parameter: Tensor, at_end: Callable[[], None] | None
    ) -> None:
        self._graphs = graphs
        self._parameter = parameter
        self._at_end = at_end
        graphs.add(self)

    def __call__(self, *_: Any) -> None:
        # torch.autograd.grad, as for a gradient penalty, does not accumulate gradients.
        if accumulates_gradient(self._parameter):
            self._graphs.discard(self)
            if self._at_end is not None:
                # DDP queues its own when the last gradient is there, which is later.
                call_at_end_of_backward(self._at_end)
                self._at_end = None


@contextmanager
def _hidden_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Hide the gradients of the last step, which DDP would copy into its buckets, twice."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _set_zeros(model: torch.nn.Module) -> None:
    """Set gradients of zeros, without memory of their own, which DDP copies into its next buckets."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.new_zeros(()).expand_as(parameter)


class _OriginalForward(torch.nn.Module):
    """The module that DDP wraps: calls the forward that the model had before it was overridden."""

    def __init__(
        self, model: torch.nn.Module, before: Callable[[], None], *, reverse_parameters: bool
    ) -> None:
        super().__init__()
        if reverse_parameters:
            # Usually the order in which gradients become ready: DDP exchanges the first buckets meanwhile.
            self.reversed_parameters = torch.nn.ParameterList(reversed(list(model.parameters())))
        self.original_forward = call_of(model)
        self.model = model
        self._before = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self.original_forward(*args, **kwargs)


class _DataParallelForward(MethodOverride):
    """Replaces the forward of a data-parallel model."""

    def __init__(
        self, model: torch.nn.Module, original: Callable[..., Any], parallel: DataParallelModel
    ) -> None:
        super().__init__(original)
        self._model = model
        self._parallel = parallel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._model.training and not is_traced():
            return self._parallel.forward(*args, **kwargs)
        return self.original(*args, **kwargs)


def warm_up() -> None:
    """Make what the first DDP module of a process imports and allocates, before it is needed."""
    if not dist.is_available():
        return
    model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=local_process_group())
    model(torch.zeros(1, 1)).sum().backward()
