"""Sees the gradients that this rank computes, micro-batch by micro-batch, as backward makes them.

One hook on each parameter, and only for the steps that are measured. The hooks return nothing and keep no
gradient, so `.grad` is what it would be without them. They are hooks on the incoming gradient: those, unlike
hooks on the accumulated one, can be taken away without a trace. (Autograd enters Python for every parameter
that ever had one of the latter, 0.3 ms for 400 parameters, even when none is left.)

A backward pass ends when autograd has run the last callback queued for it. Under
DistributedDataParallel their order matters: a first callback, queued by the first hook of a pass, runs
before DDP's (gradients are still local), and queues a second one, which runs after it (gradients are
averaged). Re-entrant checkpointing runs whole backward passes inside one; their callbacks run while a node
of the outer pass is evaluated, which tells them apart. The outer pass may come to no parameter by itself: it
is then seen at the nodes that follow that one.

A parameter that two such inner passes use has its gradient arrive in two parts, of which none is a
micro-gradient. Once that was seen, the parts of such a parameter are added up in a copy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_worker.statistics.norms import norm, sqr_norm, sum_of_squares


class Reading(Enum):
    """When the local gradient of a parameter is read."""

    NOT_AT_ALL = "only the ends of passes are of interest"
    AFTER_PASS = "all at once from .grad, when the pass is over and before they are averaged"
    ARRIVING = "each micro-batch's by itself, before it is added to .grad"
    ELSEWHERE = "not here; .grad is not written by autograd but by FSDP, which calls hooks on its own"


class SparseGradientError(TypeError):
    """A parameter has sparse gradients, whose norm is not that of a sum of micro-gradients."""


class BackwardWatch:
    """Norms of the local micro-gradients of a step, and the count of its backward passes.

    Args:
        on_pass_start: called in the first hook of each backward pass.
        on_pass_end: called after each backward pass, when gradients are averaged.
    """

    def __init__(self, on_pass_start: Callable[[], None], on_pass_end: Callable[[], None]) -> None:
        self._on_pass_start = on_pass_start
        self._on_pass_end = on_pass_end
        self._reading = Reading.NOT_AT_ALL
        self._parameters: list[Tensor] = []
        self._group_of: list[int] = []
        self._handles: dict[int, RemovableHandle] = {}
        self._tasks: set[int] = set()
        self._ignored: set[int] = set()
        self._fired: list[int] = []
        self._norms: dict[int, Tensor] = {}
        self._arrived: list[tuple[int, Tensor]] = []
        self._whole: list[Tensor] | None = None
        self._kept: dict[int, Tensor] = {}
        self._in_parts: set[int] = set()
        self._parts: dict[int, Tensor] = {}
        self._before_pass = 0
        self._missed = False
        self.keep = False
        """Whether to keep copies of the local gradients, see `kept`."""
        self.passes = 0
        """Backward passes since `begin_step`."""

    def watch(self, groups: Sequence[Iterable[Tensor]], reading: Reading) -> None:
        """See the next passes. What is watched already stays as it is, so that this may be called often."""
        flat = [(parameter, index) for index, group in enumerate(groups) for parameter in group]
        same = len(flat) == len(self._parameters) and all(
            new is old for (new, _), old in zip(flat, self._parameters, strict=True)
        )
        if not same or reading is not self._reading:
            self.stop()
            self._parameters = [parameter for parameter, _ in flat]
            self._group_of = [index for _, index in flat]
            self._reading = reading
            self._in_parts.clear()
        for index, parameter in enumerate(self._parameters):
            if index not in self._handles and parameter.requires_grad:
                self._handles[index] = self._hook(index, parameter)
        self.begin_step()

    def stop(self) -> None:
        """Take the hooks away."""
        for index, handle in self._handles.items():
            handle.remove()
            parameter = self._parameters[index]
            if not parameter._backward_hooks:
                # As before the first hook: an empty collection of hooks is still looked through.
                parameter._backward_hooks = None
        self._handles.clear()

    @property
    def saw_any(self) -> bool:
        """Whether a gradient was read in this step."""
        return bool(self._norms) or bool(self._arrived) or self._whole is not None

    def sees_all(self) -> bool:
        """Whether each gradient was read whole.

        Not if a parameter was unfrozen just now, or if its gradient came in parts for the first time.
        """
        return not self._missed and all(
            index in self._handles or parameter.grad is None or not parameter.requires_grad
            for index, parameter in enumerate(self._parameters)
        )

    def begin_step(self) -> None:
        """Forget the passes so far."""
        self.passes = 0
        self._tasks.clear()
        self._ignored.clear()
        self._fired.clear()
        self._norms.clear()
        self._arrived.clear()
        self._kept.clear()
        self._parts.clear()
        self._before_pass = 0
        self._missed = False
        self._whole = None

    def local_sqr(self, groups: int, device: torch.device) -> Tensor:
        """Return the sum of the squared norms of the local micro-gradients: shape (groups,)."""
        found: list[list[Tensor]] = [[] for _ in range(groups)]
        for index, value in self._norms.items():
            found[self._group_of[index]].append(value)
        for index, value in self._arrived:
            found[self._group_of[index]].append(value)
        sums = [sum_of_squares(values, device) for values in found]
        if self._whole is not None:
            sums = [one + other.to(device) for one, other in zip(sums, self._whole, strict=True)]
        return torch.stack(sums)

    def kept(self) -> list[list[Tensor]]:
        """Return copies of the local gradients as they were before averaging, zeros where there was none.

        For all parameters that are not frozen, by group.
        """
        groups: list[list[Tensor]] = [[] for _ in range(max(self._group_of) + 1)]
        for index, (parameter, group) in enumerate(zip(self._parameters, self._group_of, strict=True)):
            if parameter.requires_grad:
                gradient = self._kept.get(index)
                groups[group].append(torch.zeros_like(parameter) if gradient is None else gradient)
        return groups

    # -- hooks ------------------------------------------------------------------------------------------

    def _hook(self, index: int, parameter: Tensor) -> RemovableHandle:
        if self._reading is Reading.ELSEWHERE:
            handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._written)
        else:
            hook = self._read if self._reading is Reading.ARRIVING else self._note
            handle = parameter.register_hook(partial(hook, index))
        return handle

    def _note(self, index: int, gradient: Tensor) -> None:
        """Note that there is a gradient, to be read later. This runs most often of all: keep it short."""
        if current_task() in self._tasks or self._enter(index):
            self._fired.append(index)
            if self.keep:
                _add(self._kept, index, gradient)

    def _read(self, index: int, gradient: Tensor) -> None:
        """Read a micro-gradient."""
        if current_task() in self._tasks or self._enter(index):
            if index in self._in_parts:
                _add(self._parts, index, gradient)
            else:
                self._arrived.append((index, norm(_dense(gradient))))
            if self.keep:
                _add(self._kept, index, gradient)

    def _written(self, _: Tensor) -> None:
        """See FSDP write a gradient."""
        if current_task() not in self._tasks:
            self._begin()

    def _enter(self, index: int) -> bool:
        """Begin a pass, or one inside it; False in `torch.autograd.grad`, which leaves .grad alone."""
        if current_task() in self._ignored:
            return False
        if not _accumulates(self._parameters[index]):
            self._ignored.add(current_task())
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        if not self._tasks:
            self._on_pass_start()
        self._tasks.add(current_task())
        queue(self._before_averaging)

    def _before_averaging(self) -> None:
        if self._reading is Reading.AFTER_PASS and self._fired:
            self._read_fired()
        self._fired.clear()
        queue(self._after_averaging)

    def _read_fired(self) -> None:
        fired = list(dict.fromkeys(self._fired))
        if self._norms or _inside_a_pass():
            # Part of a pass: an outer one may add to the same gradients, and replaces what is read here.
            for index in fired:
                self._norms[index] = norm(_dense(self._gradient(index)))
            return
        groups: list[list[Tensor]] = [[] for _ in range(max(self._group_of) + 1)]
        for index in fired:
            groups[self._group_of[index]].append(_dense(self._gradient(index)))
        device = self._parameters[0].device
        self._whole = [sqr_norm(gradients, device) for gradients in groups]

    def _gradient(self, index: int) -> Tensor:
        gradient = self._parameters[index].grad
        if gradient is None:
            raise LookupError("a gradient was taken away while it was accumulated")
        return gradient

    def _after_averaging(self) -> None:
        if _inside_a_pass():
            self._await_outer()
            return
        if self._reading is Reading.ARRIVING:
            self._join_parts()
        self._tasks.clear()
        self.passes += 1
        self._on_pass_end()

    def _await_outer(self) -> None:
        """See the pass around the one that ends now at the nodes that follow the current one in it.

        The engine evaluates them all: where it would not, it refuses re-entrant checkpoints.
        """
        handles: list[RemovableHandle] = []

        def see(*_: object) -> None:
            for handle in handles:
                handle.remove()
            if current_task() not in self._tasks:
                self._begin()

        for node, _ in _current_node().next_functions:
            if node is not None:
                handles.append(node.register_prehook(see))

    def _join_parts(self) -> None:
        """Read the gradients that came in parts, and find those that did so for the first time."""
        self._arrived += [(index, norm(whole)) for index, whole in self._parts.items()]
        self._parts.clear()
        if len(self._tasks) > 1:
            arrivals = Counter(index for index, _ in self._arrived[self._before_pass :])
            several = {index for index, count in arrivals.items() if count > 1}
            self._in_parts |= several
            self._missed = self._missed or bool(several)
        self._before_pass = len(self._arrived)


current_task: Callable[[], int] = torch._C._current_graph_task_id

queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def _inside_a_pass() -> bool:
    """Whether a callback runs at the end of a backward pass that a node of another one has started."""
    return _current_node() is not None


_current_node: Callable[[], Any] = torch._C._current_autograd_node


def _add(gradients: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    """Add to the copy of a gradient, or make one."""
    copy = gradients.get(index)
    gradients[index] = _dense(gradient).clone() if copy is None else copy.add_(_dense(gradient))


def _accumulates(parameter: Tensor) -> bool:
    """Whether the backward pass that runs now adds to .grad of this parameter, unlike torch.autograd.grad."""
    with torch.enable_grad():
        view = parameter.view_as(parameter).grad_fn
    accumulation = None if view is None else view.next_functions[0][0]
    try:
        return accumulation is not None and torch._C._will_engine_execute_node(accumulation)
    except RuntimeError:  # a leaf is not to be asked about in torch.autograd.grad
        return False


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient without its history, or refuse it."""
    if gradient.layout is not torch.strided:
        raise SparseGradientError(
            f"got a gradient of layout {gradient.layout} for a parameter of shape {tuple(gradient.shape)}; "
            "AdaScale needs dense ones: make the layer with sparse=False, or give the parameter to an "
            "optimizer of its own"
        )
    return gradient.detach() if gradient.requires_grad else gradient
