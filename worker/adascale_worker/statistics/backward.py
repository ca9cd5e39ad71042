"""Sees the gradients that this rank computes, micro-batch by micro-batch, as backward makes them.

One hook on each parameter, and only for the steps that are measured. The hooks return nothing and keep no
gradient, so `.grad` is what it would be without them.

A backward pass ends when autograd has run the last callback queued for it. Under
DistributedDataParallel their order matters: a first callback, queued by the first hook of a pass, runs
before DDP's (gradients are still local), and queues a second one, which runs after it (gradients are
averaged). Re-entrant checkpointing runs whole backward passes inside one; their callbacks run while a node
of the outer pass is evaluated, which tells them apart.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_worker.statistics.norms import norm, norms, sum_of_squares


class Reading(Enum):
    """When the local gradient of a parameter is read."""

    NOT_AT_ALL = "only the ends of passes are of interest"
    AFTER_PASS = "all at once from .grad, when the pass is over and before they are averaged"
    IN_GRAD = "from .grad, as soon as the gradient of the only micro-batch is in it"
    BEFORE_GRAD = "each micro-batch's, before it is added to .grad"


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
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._tasks: set[int] = set()
        self._fired: list[int] = []
        self._incoming: dict[int, Tensor] = {}
        self._norms: list[dict[int, Tensor]] = []
        self._added: list[list[Tensor]] = []
        self._kept: dict[int, Tensor] = {}
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
        for index, parameter in enumerate(self._parameters):
            if index not in self._handles and parameter.requires_grad:
                self._handles[index] = self._hook(index, parameter)
        self.begin_step()

    def stop(self) -> None:
        """Take the hooks away."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    @property
    def watching(self) -> bool:
        """Whether there are hooks."""
        return bool(self._handles)

    @property
    def saw_any(self) -> bool:
        """Whether a gradient was read in this step."""
        return bool(self._norms[0]) or bool(self._added)

    def sees_all(self) -> bool:
        """Whether each parameter that has a gradient is watched: not if one was unfrozen just now."""
        return all(
            index in self._handles or parameter.grad is None or not parameter.requires_grad
            for index, parameter in enumerate(self._parameters)
        )

    def begin_step(self) -> None:
        """Forget the passes so far."""
        self.passes = 0
        self._tasks.clear()
        self._fired.clear()
        self._norms = [{}]
        self._added = []
        self._kept.clear()

    def local_sqr(self, groups: int, device: torch.device) -> Tensor:
        """Return the sum of the squared norms of the local micro-gradients: shape (groups,)."""
        found: list[list[Tensor]] = [[] for _ in range(groups)]
        for by_parameter in self._norms:
            for index, value in by_parameter.items():
                found[self._group_of[index]].append(value)
        for group, values in enumerate(self._added):
            found[group].extend(values)
        return torch.stack([sum_of_squares(values, device) for values in found])

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

    def _hook(self, index: int, parameter: Tensor) -> list[RemovableHandle]:
        # torch leaves both functions without types.
        hooks: list[Any] = [parameter.register_post_accumulate_grad_hook(partial(self._accumulated, index))]  # type: ignore[no-untyped-call]
        if self._reading is Reading.BEFORE_GRAD:
            hooks.append(parameter.register_hook(partial(self._arrived, index)))  # type: ignore[no-untyped-call]
        return hooks

    def _arrived(self, index: int, gradient: Tensor) -> None:
        """Read a micro-gradient. It counts when it is accumulated: torch.autograd.grad() ends here."""
        if gradient.layout is torch.strided:
            self._incoming[index] = norm(gradient.detach())

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise SparseGradientError(
                f"got a gradient of layout {gradient.layout} for a parameter of shape "
                f"{tuple(parameter.shape)}; AdaScale needs dense ones: make the layer with sparse=False, or "
                "give the parameter to an optimizer of its own"
            )
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            if not self._tasks:
                self._on_pass_start()
            self._tasks.add(task)
            _queue(self._before_averaging)
        if self.keep:
            self._kept[index] = gradient.detach().clone()
        if self._reading is Reading.AFTER_PASS:
            self._fired.append(index)
        elif self._reading is Reading.IN_GRAD:
            self._norms[0][index] = norm(gradient.detach())
        elif self._reading is Reading.BEFORE_GRAD:
            self._added_to(self._group_of[index]).append(self._incoming.pop(index))

    def _added_to(self, group: int) -> list[Tensor]:
        while len(self._added) <= group:
            self._added.append([])
        return self._added[group]

    def _before_averaging(self) -> None:
        if self._fired:
            fired = list(dict.fromkeys(self._fired))
            self._fired.clear()
            gradients = [gradient for i in fired if (gradient := self._parameters[i].grad) is not None]
            self._norms[0].update(zip(fired, norms(gradients), strict=True))
        _queue(self._after_averaging)

    def _after_averaging(self) -> None:
        if torch._C._current_autograd_node() is not None:
            return  # the end of a pass inside a pass
        self._tasks.clear()
        self.passes += 1
        self._on_pass_end()


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
