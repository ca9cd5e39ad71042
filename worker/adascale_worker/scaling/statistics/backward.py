"""Reads the gradients that this rank computes, micro-batch by micro-batch, with hooks of autograd.

Each parameter gets one hook, only for the steps that are measured. The hooks return nothing and keep no
gradient, so `.grad` is what it would be without them. They are hooks on the incoming gradient, because those
can be removed without a trace, unlike hooks on the accumulated gradient. (For each parameter that ever had
one of the latter, autograd enters Python: 0.3 ms for 400 parameters, even after all hooks are removed.)

A backward pass ends when autograd has run the last callback that was queued for it. Under
DistributedDataParallel their order matters. The first hook of a pass queues a callback that runs before that
of DDP, when gradients are still local. It queues a second callback, which runs after that of DDP, when
gradients are averaged.
"""

from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from adascale_worker.scaling.statistics.all_reduce import sqr_norms_of_mean
from adascale_worker.scaling.statistics.norms import EuclideanMetric, sum_of_squares
from adascale_worker.scaling.statistics.parameters import OptimizerParameters, require_dense
from adascale_worker.scaling.statistics.reader import GradientReader
from adascale_worker.scaling.statistics.steps import StepSettings
from adascale_worker.torch_private.autograd import (
    accumulates_gradient,
    backward_pass_id,
    call_at_end_of_backward,
    current_autograd_node,
    is_last_hook,
    remove_tensor_hook,
)
from adascale_worker.torch_private.modules import communication_hooks


class ReadingTime(Enum):
    """When the local gradient of a parameter is read."""

    NEVER = "only the ends of passes are observed"
    AFTER_PASS = "all at once from .grad, after the pass and before the gradients are averaged"
    ON_ARRIVAL = "that of each micro-batch by itself, before it is added to .grad"
    IN_FSDP = "not here: FSDP2 writes .grad, and calls the hooks on accumulated gradients itself"


AVERAGING_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)
"""DDP communication hooks after which `.grad` is the mean of the ranks' gradients, up to rounding."""


class HookedGradients(GradientReader):
    """Norms of the local micro-gradients of a step, and the number of its backward passes."""

    def __init__(
        self,
        parameters: OptimizerParameters,
        settings: StepSettings,
        metric: EuclideanMetric,
        model: torch.nn.Module | None,
        on_pass_start: Callable[[], None],
        on_pass_end: Callable[[], None],
    ) -> None:
        super().__init__(parameters, settings, metric)
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self._on_pass_start = on_pass_start
        self._on_pass_end = on_pass_end
        self._reading_time = ReadingTime.NEVER
        self._flat: list[Tensor] = []
        self._group_of: list[int] = []
        self._group_count = 0
        self._handles: dict[int, RemovableHandle] = {}
        # Of the current pass: the ids of it and of the passes inside it, and of calls of torch.autograd.grad.
        self._pass_ids: set[int] = set()
        self._ignored_ids: set[int] = set()
        self._fired: list[int] = []
        # Of the step: norms by parameter (AFTER_PASS with inner passes), in order of arrival (ON_ARRIVAL), or
        # squared norms by group (AFTER_PASS).
        self._norms: dict[int, Tensor] = {}
        self._arrived: list[tuple[int, Tensor]] = []
        self._by_group: list[Tensor] | None = None
        self._arrived_before_pass = 0
        self._copies: dict[int, Tensor] = {}
        self._arrives_in_parts: set[int] = set()
        self._sums_of_parts: dict[int, Tensor] = {}
        self._missed_whole_gradient = False
        self._passes = 0

    def observe(self, settings: StepSettings) -> None:
        """Observe the passes of the next step. Hooks that are already there stay.

        Gradients are read after the program's own hooks, which may change them. Ours is added again after one
        that the program has added later.
        """
        super().observe(settings)
        groups, reading_time = self._parameters.groups(), self._time_to_read()
        self._group_count = len(groups)  # some may be without parameters
        flat = [(parameter, number) for number, group in enumerate(groups) for parameter in group]
        same = len(flat) == len(self._flat) and all(
            new is old for (new, _), old in zip(flat, self._flat, strict=True)
        )
        if not same or reading_time is not self._reading_time:
            self.remove_hooks()
            self._flat = [parameter for parameter, _ in flat]
            self._group_of = [number for _, number in flat]
            self._reading_time = reading_time
            self._arrives_in_parts.clear()
        for index, handle in list(self._handles.items()):
            if not self._comes_last(index):
                handle.remove()
                del self._handles[index]
        for index, parameter in enumerate(self._flat):
            if index not in self._handles and parameter.requires_grad:
                self._handles[index] = self._add_hook(index, parameter)

    def _time_to_read(self) -> ReadingTime:
        if self._settings.micro_gradients == 1:
            return ReadingTime.NEVER
        if self._settings.accumulation > 1 or self.ddp is None:
            return ReadingTime.ON_ARRIVAL
        # After the pass is too late if .grad is a view of DDP's bucket, or DDP averages before our callback.
        if self.ddp.gradient_as_bucket_view or self.ddp.static_graph:
            return ReadingTime.ON_ARRIVAL
        return ReadingTime.AFTER_PASS

    def remove_hooks(self) -> None:
        """Remove the hooks from all parameters."""
        for index, handle in self._handles.items():
            remove_tensor_hook(self._flat[index], handle)
        self._handles.clear()

    @property
    def passes(self) -> int:
        """Backward passes of this step so far."""
        return self._passes

    @property
    def has_read_all(self) -> bool:
        """Whether gradients were read in this step, each of them whole.

        False if a parameter was unfrozen or got a hook in this step, or if its gradient came in parts for the
        first time.
        """
        has_read_any = bool(self._norms) or bool(self._arrived) or self._by_group is not None
        return (
            has_read_any
            and not self._missed_whole_gradient
            and all(
                self._comes_last(index)
                if index in self._handles
                else parameter.grad is None or not parameter.requires_grad
                for index, parameter in enumerate(self._flat)
            )
        )

    def _comes_last(self, index: int) -> bool:
        """Whether no hook of the program on a parameter is called after ours."""
        if self._reading_time is ReadingTime.IN_FSDP:
            return True
        return is_last_hook(self._flat[index], self._handles[index])

    def begin_step(self, *, measuring: bool) -> None:
        """Discard the passes of this step so far."""
        super().begin_step(measuring=measuring)
        self._passes = 0
        self._pass_ids.clear()
        self._ignored_ids.clear()
        self._fired.clear()
        self._norms.clear()
        self._arrived.clear()
        self._copies.clear()
        self._sums_of_parts.clear()
        self._arrived_before_pass = 0
        self._missed_whole_gradient = False
        self._by_group = None

    def sum_of_sqr_norms(self) -> Tensor:
        """Return the sum of the squared norms of the local micro-gradients: shape (groups,)."""
        device = self._parameters.device
        found: list[list[Tensor]] = [[] for _ in self._parameters.groups()]
        for index, value in (*self._norms.items(), *self._arrived):
            found[self._group_of[index]].append(value)
        sums = [sum_of_squares(values, device) for values in found]
        if self._by_group is not None:
            sums = [a + b.to(device) for a, b in zip(sums, self._by_group, strict=True)]
        return torch.stack(sums)

    def averaged_sqr_norms(self) -> Tensor:
        """Return the squared norms of the averaged gradients: shape (groups,)."""
        if not self.is_compressed:
            return super().averaged_sqr_norms()
        ranks, device = self._settings.world_size, self._parameters.device
        return sqr_norms_of_mean(
            self._divided_copies(), device, ranks=ranks, process_group=self.process_group
        )

    def _divided_copies(self) -> list[list[Tensor]]:
        """Return copies of the local gradients from before they were averaged, by parameter group.

        Divided as the metric requires. For all parameters that are not frozen; zeros for a parameter without
        a gradient.
        """
        parameters: list[list[Tensor]] = [[] for _ in range(self._group_count)]
        groups: list[list[Tensor]] = [[] for _ in range(self._group_count)]
        for index, (parameter, group) in enumerate(zip(self._flat, self._group_of, strict=True)):
            if parameter.requires_grad:
                gradient = self._copies.get(index)
                parameters[group].append(parameter)
                groups[group].append(torch.zeros_like(parameter) if gradient is None else gradient)
        return [self._metric.divided(*own) for own in zip(parameters, groups, strict=True)]

    # -- hooks ------------------------------------------------------------------------------------------

    def _add_hook(self, index: int, parameter: Tensor) -> RemovableHandle:
        if self._reading_time is ReadingTime.IN_FSDP:
            handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._on_accumulated)
        else:
            on_arrival = self._reading_time is ReadingTime.ON_ARRIVAL
            hook = self._read_on_arrival if on_arrival else self._note_arrival
            handle = parameter.register_hook(partial(hook, index))
        return handle

    def _note_arrival(self, index: int, gradient: Tensor) -> None:
        """Record that there is a gradient, to read it later. The most frequent hook, so it does little."""
        if backward_pass_id() in self._pass_ids or self._enter_pass(index):
            self._fired.append(index)
            if self.is_compressed:
                _add_to_copy(self._copies, index, gradient)

    def _read_on_arrival(self, index: int, gradient: Tensor) -> None:
        """Read a micro-gradient, or add a part of it to the others."""
        if backward_pass_id() in self._pass_ids or self._enter_pass(index):
            if index in self._arrives_in_parts:
                _add_to_copy(self._sums_of_parts, index, gradient)
            else:
                self._arrived.append((index, self._norm(index, gradient)))
            if self.is_compressed:
                _add_to_copy(self._copies, index, gradient)

    def _on_accumulated(self, _: Tensor) -> None:
        """Detect a pass at a gradient that FSDP2 wrote."""
        if backward_pass_id() not in self._pass_ids:
            self._begin_pass()

    def _enter_pass(self, index: int) -> bool:
        """Begin a pass, or a pass inside it. False in `torch.autograd.grad`, which does not change .grad."""
        if backward_pass_id() in self._ignored_ids:
            return False
        if not accumulates_gradient(self._flat[index]):
            self._ignored_ids.add(backward_pass_id())
            return False
        self._begin_pass()
        return True

    def _begin_pass(self) -> None:
        if not self._pass_ids:
            self._on_pass_start()
            # Whether gradients are averaged by a communication hook that may lose a part of them.
            self.is_compressed = (
                self._settings.world_size > 1
                and self.ddp is not None
                and any(hook not in AVERAGING_HOOKS for hook in communication_hooks(self.ddp))
            )
        self._pass_ids.add(backward_pass_id())
        call_at_end_of_backward(self._before_averaging)

    def _before_averaging(self) -> None:
        if self._reading_time is ReadingTime.AFTER_PASS and self._fired:
            self._read_fired()
        self._fired.clear()
        call_at_end_of_backward(self._after_averaging)

    def _read_fired(self) -> None:
        fired = list(dict.fromkeys(self._fired))
        if self._norms or _is_inner_pass():
            # The outer pass may add to the same gradients; it then replaces the norms read here.
            for index in fired:
                self._norms[index] = self._norm(index, self._gradient(index))
            return
        parameters: list[list[Tensor]] = [[] for _ in range(self._group_count)]
        groups: list[list[Tensor]] = [[] for _ in range(self._group_count)]
        for index in fired:
            parameters[self._group_of[index]].append(self._flat[index])
            groups[self._group_of[index]].append(_dense(self._gradient(index)))
        device = self._flat[0].device
        self._by_group = [
            self._metric.sqr_norm(own, gradients, device)
            for own, gradients in zip(parameters, groups, strict=True)
        ]

    def _norm(self, index: int, gradient: Tensor) -> Tensor:
        return self._metric.norm(self._flat[index], _dense(gradient))

    def _gradient(self, index: int) -> Tensor:
        gradient = self._flat[index].grad
        if gradient is None:
            raise LookupError(
                f"the gradient of a parameter of shape {tuple(self._flat[index].shape)} was removed "
                "during the backward pass; set .grad to None after backward() returns"
            )
        return gradient

    def _after_averaging(self) -> None:
        if _is_inner_pass():
            self._detect_outer_pass()
            return
        if self._reading_time is ReadingTime.ON_ARRIVAL:
            self._read_sums_of_parts()
        self._pass_ids.clear()
        self._passes += 1
        self._on_pass_end()

    def _detect_outer_pass(self) -> None:
        """Begin the outer pass at the next of the nodes that follow the current node in it.

        The engine evaluates all of them: where it would not, it refuses re-entrant checkpoints.
        """
        handles: list[RemovableHandle] = []

        def begin(*_: object) -> None:
            for handle in handles:
                handle.remove()
            if backward_pass_id() not in self._pass_ids:
                self._begin_pass()

        for node, _ in current_autograd_node().next_functions:
            if node is not None:
                handles.append(node.register_prehook(begin))

    def _read_sums_of_parts(self) -> None:
        """Read the gradients that came in parts, and find those that did so for the first time."""
        self._arrived += [(index, self._norm(index, whole)) for index, whole in self._sums_of_parts.items()]
        self._sums_of_parts.clear()
        if len(self._pass_ids) > 1:
            arrivals = Counter(index for index, _ in self._arrived[self._arrived_before_pass :])
            several = {index for index, count in arrivals.items() if count > 1}
            self._arrives_in_parts |= several
            self._missed_whole_gradient = self._missed_whole_gradient or bool(several)
        self._arrived_before_pass = len(self._arrived)


# Re-entrant checkpointing runs whole backward passes inside an outer pass. Their callbacks run while a node
# of the outer pass is evaluated, which distinguishes them. The outer pass may reach no parameter itself; it
# is then detected at the nodes that follow that node. A parameter that two such inner passes use gets its
# gradient in two parts, and neither is a micro-gradient. The step in which this first happens is left out;
# afterwards the parts of such a parameter are added up in a copy.


def _is_inner_pass() -> bool:
    """Whether the current callback runs at the end of a backward pass that a node of another pass started."""
    return current_autograd_node() is not None


def _add_to_copy(copies: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    """Add to the copy of a gradient, or make the copy."""
    copy = copies.get(index)
    copies[index] = _dense(gradient).clone() if copy is None else copy.add_(_dense(gradient))


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient without its history."""
    gradient = require_dense(gradient)
    return gradient.detach() if gradient.requires_grad else gradient
