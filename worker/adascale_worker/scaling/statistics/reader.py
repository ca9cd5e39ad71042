"""Reads the gradients of one step on this rank: those that the caller passes, or by hooks of autograd.

Each parameter gets one hook, only for the steps that are measured. The hooks return nothing and keep no
gradient, so `.grad` is what it would be without them. They are on the incoming gradient, because those can be
removed without a trace. (For each parameter that ever had a hook on the accumulated gradient, autograd enters
Python: 0.3 ms for 400 parameters, even after all hooks are removed.)

A pass ends when autograd has run the last callback that was queued for it. Under DistributedDataParallel the
first hook of a pass queues one that runs before that of DDP, when gradients are still local. It queues a
second one, which runs after that of DDP, when gradients are averaged.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import UnsupportedOptimizerError
from adascale_worker.scaling.statistics.all_reduce import sqr_norms_of_mean
from adascale_worker.scaling.statistics.metric import Metric
from adascale_worker.scaling.statistics.norms import sum_of_squares
from adascale_worker.scaling.statistics.parameters import OptimizerParameters, require_dense
from adascale_worker.scaling.statistics.steps import GainOptions
from adascale_worker.torch_private.autograd import (
    accumulates_gradient,
    backward_pass_id,
    call_at_end_of_backward,
    current_autograd_node,
    is_last_hook,
    remove_tensor_hook,
)
from adascale_worker.torch_private.modules import communication_hooks


class GradientReader:
    """The squared norms of micro-gradients, which the caller passes, and of averaged gradients."""

    is_compressed = False
    """Whether averaged gradients are not the mean of the local ones."""
    ddp: DistributedDataParallel | None = None

    def __init__(self, parameters: OptimizerParameters, options: GainOptions, metric: Metric) -> None:
        self._parameters = parameters
        self._options = options
        self._metric = metric

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that gradients are averaged over; None for the default process group."""
        return None if self.ddp is None else self.ddp.process_group

    def unreadable_parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients cannot be read as the gradients of the others are."""
        return [p for group in self._parameters.groups() for p in group if hasattr(p, "placements")]

    def require_readable(self) -> None:
        """Check that the gradients of all parameters can be read."""
        unreadable = self.unreadable_parameters()
        if not unreadable:
            return
        shape = tuple(unreadable[0].shape)
        placements = getattr(unreadable[0], "placements", None)
        if placements is None:
            raise UnsupportedOptimizerError(
                f"got {len(unreadable)} parameters that fully_shard did not shard (the first has shape "
                f"{shape}) beside parameters that it did shard; AdaScale reads all gradients of a model in "
                "one way: apply fully_shard to the root module too, without ignored_params"
            )
        raise UnsupportedOptimizerError(
            f"got {len(unreadable)} DTensors as parameters, the first of shape {shape} with placements "
            f"{tuple(placements)}; AdaScale reads a DTensor only if fully_shard alone made it, over all "
            "ranks, and the model is given: AdaScale(..., model=model). Tensor and expert parallelism are "
            "not supported: use replicas, fully_shard, or the optimizer without AdaScale"
        )

    def observe(self, options: GainOptions) -> None:
        """Observe the backward passes of the next step."""
        self._options = options

    def remove_hooks(self) -> None:
        """Remove the hooks from all parameters."""

    def mark_incomplete(self) -> None:
        """Leave the step out if its first gradients were not read."""

    @property
    def micro_gradients(self) -> int:
        """Number of micro-gradients that were read in this step, on all ranks; 0 if it is unknown."""
        return self._options.micro_gradients

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
        return self._has_last and self.passes == self._options.accumulation

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


ReadingTime = Literal["never", "after the pass", "on arrival"]
"""When the local gradient of a parameter is read: never, all at once from .grad after the pass and before the
gradients are averaged, or that of each micro-batch by itself before it is added to .grad."""

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
        options: GainOptions,
        metric: Metric,
        model: torch.nn.Module | None,
        on_pass_start: Callable[[], None],
        on_pass_end: Callable[[], None],
    ) -> None:
        super().__init__(parameters, options, metric)
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self._on_pass_start = on_pass_start
        self._on_pass_end = on_pass_end
        self._reads: ReadingTime = "never"
        self._flat: list[Tensor] = []
        self._group_of: list[int] = []
        self._group_count = 0
        self._handles: dict[int, RemovableHandle] = {}
        self._arrives_in_parts: set[int] = set()

    def observe(self, options: GainOptions) -> None:
        """Observe the passes of the next step. Hooks that are already there stay.

        Gradients are read after the program's own hooks, which may change them. Ours is added again after one
        that the program has added later.
        """
        super().observe(options)
        groups, reading_time = self._parameters.groups(), self._reading_time()
        self._group_count = len(groups)  # some may be without parameters
        flat = [(parameter, number) for number, group in enumerate(groups) for parameter in group]
        same = len(flat) == len(self._flat) and all(
            new is old for (new, _), old in zip(flat, self._flat, strict=True)
        )
        if not same or reading_time != self._reads:
            self.remove_hooks()
            self._flat = [parameter for parameter, _ in flat]
            self._group_of = [number for _, number in flat]
            self._reads = reading_time
            self._arrives_in_parts.clear()
        for index, handle in list(self._handles.items()):
            if not self._comes_last(index):
                handle.remove()
                del self._handles[index]
        for index, parameter in enumerate(self._flat):
            if index not in self._handles and parameter.requires_grad:
                self._handles[index] = self._add_hook(index, parameter)

    def _reading_time(self) -> ReadingTime:
        if self._options.micro_gradients == 1:
            return "never"
        if self._options.accumulation > 1 or self.ddp is None:
            return "on arrival"
        # After the pass is too late if .grad is a view of DDP's bucket, or DDP averages before our callback.
        if self.ddp.gradient_as_bucket_view or self.ddp.static_graph:
            return "on arrival"
        return "after the pass"

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
        has_read_any = bool(self._norms) or bool(self._arrived) or self._group_norms is not None
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
        return is_last_hook(self._flat[index], self._handles[index])

    def begin_step(self, *, measuring: bool) -> None:
        """Discard the passes of this step so far."""
        super().begin_step(measuring=measuring)
        self._passes = 0
        # Of the current pass: the ids of it and of the passes inside it, and of calls of torch.autograd.grad.
        self._pass_ids: set[int] = set()
        self._ignored_ids: set[int] = set()
        self._fired: list[int] = []
        # Of the step: norms by parameter (after passes with inner ones), in order of arrival, or squared
        # norms by group (after passes).
        self._norms: dict[int, Tensor] = {}
        self._arrived: list[tuple[int, Tensor]] = []
        self._group_norms: list[Tensor] | None = None
        self._arrived_before_pass = 0
        self._copies: dict[int, Tensor] = {}
        self._sums_of_parts: dict[int, Tensor] = {}
        self._missed_whole_gradient = False

    def sum_of_sqr_norms(self) -> Tensor:
        """Return the sum of the squared norms of the local micro-gradients: shape (groups,)."""
        device = self._parameters.device
        found: list[list[Tensor]] = [[] for _ in self._parameters.groups()]
        for index, value in (*self._norms.items(), *self._arrived):
            found[self._group_of[index]].append(value)
        sums = [sum_of_squares(values, device) for values in found]
        if self._group_norms is not None:
            sums = [a + b.to(device) for a, b in zip(sums, self._group_norms, strict=True)]
        return torch.stack(sums)

    def averaged_sqr_norms(self) -> Tensor:
        """Return the squared norms of the averaged gradients: shape (groups,)."""
        if not self.is_compressed:
            return super().averaged_sqr_norms()
        ranks, device = self._options.world_size, self._parameters.device
        return sqr_norms_of_mean(
            self._divided_copies(), device, ranks=ranks, process_group=self.process_group
        )

    def _divided_copies(self) -> list[list[Tensor]]:
        """Return copies of the local gradients from before they were averaged, by parameter group.

        Divided as the metric requires. For all parameters that are not frozen; zeros for a parameter without
        a gradient.
        """
        copies = (
            (index, torch.zeros_like(parameter) if (copy := self._copies.get(index)) is None else copy)
            for index, parameter in enumerate(self._flat)
            if parameter.requires_grad
        )
        return [self._metric.divided(*own) for own in self._by_group(copies)]

    def _by_group(self, gradients: Iterable[tuple[int, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return parameters and their gradients by parameter group."""
        groups: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(self._group_count)]
        for index, gradient in gradients:
            parameters, own = groups[self._group_of[index]]
            parameters.append(self._flat[index])
            own.append(gradient)
        return groups

    # -- hooks ------------------------------------------------------------------------------------------

    def _add_hook(self, index: int, parameter: Tensor) -> RemovableHandle:
        hook = self._read_on_arrival if self._reads == "on arrival" else self._note_arrival
        handle: RemovableHandle = parameter.register_hook(partial(hook, index))
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
                self._options.world_size > 1
                and self.ddp is not None
                and any(hook not in AVERAGING_HOOKS for hook in communication_hooks(self.ddp))
            )
        self._pass_ids.add(backward_pass_id())
        call_at_end_of_backward(self._before_averaging)

    def _before_averaging(self) -> None:
        if self._reads == "after the pass" and self._fired:
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
        device = self._flat[0].device
        groups = self._by_group((index, _dense(self._gradient(index))) for index in fired)
        self._group_norms = [self._metric.sqr_norm(*own, device) for own in groups]

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
        if self._reads == "on arrival":
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
