"""Backward passes, the hooks of tensors, and arithmetic on many tensors with one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_worker.torch_private import private_part

backward_pass_id: Callable[[], int] = private_part(torch._C, "_current_graph_task_id")
"""Return the number of the backward pass that runs on this thread; -1 outside of a backward pass.

A function of torch itself and not wrapped, because hooks call it for every gradient.
"""

call_at_end_of_backward: Callable[[Callable[[], None]], None] = private_part(
    torch.autograd.Variable._execution_engine, "queue_callback"
)
"""Call a function when the current backward pass ends, after the functions that were queued before it.

DistributedDataParallel queues its own in the same way, so the order of the two is defined. A hook on the last
gradient would not do: which gradient is the last is not known.
"""

current_autograd_node: Callable[[], Any] = private_part(torch._C, "_current_autograd_node")
"""Return the node of the graph that autograd evaluates now; None outside of a node.

At the end of a backward pass that a node of another pass started (re-entrant checkpointing), it is that node.
"""


def accumulates_gradient(parameter: Tensor) -> bool:
    """Whether the current backward pass adds to `parameter.grad`.

    It does not in `torch.autograd.grad`, which calls the same hooks. The function queries whether the engine
    evaluates the node that accumulates the gradient. That node is found behind a view of the parameter.
    """
    with torch.enable_grad():
        view_node = parameter.view_as(parameter).grad_fn
    accumulation_node = None if view_node is None else view_node.next_functions[0][0]
    will_execute = private_part(torch._C, "_will_engine_execute_node")
    try:
        return accumulation_node is not None and bool(will_execute(accumulation_node))
    except RuntimeError:  # the engine refuses to answer for a leaf in torch.autograd.grad
        return False


def is_last_hook(tensor: Tensor, handle: RemovableHandle) -> bool:
    """Whether no hook on the gradient of `tensor` is called after the one of `handle`."""
    hooks = private_part(tensor, "_backward_hooks") or {}
    return next(reversed(hooks), handle.id) == handle.id


def remove_tensor_hook(tensor: Tensor, handle: RemovableHandle) -> None:
    """Remove a hook on the gradient of `tensor`, and the empty collection that its removal leaves behind.

    Autograd enters Python for each tensor with a collection of hooks, even if the collection is empty.
    """
    handle.remove()
    if not private_part(tensor, "_backward_hooks"):
        tensor._backward_hooks = None


def norms_of(tensors: Sequence[Tensor], order: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each tensor, with one kernel for many of them.

    `torch.nn.utils.get_total_norm` uses the same kernel and returns only the norm of all.
    """
    return list(private_part(torch, "_foreach_norm")(tensors, order, dtype=dtype)) if tensors else []


def multiply_in_place(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor by `factor`, with one kernel for many of them."""
    if tensors:
        private_part(torch, "_foreach_mul_")(tensors, factor)


def divide_in_place(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide each tensor by `divisor`, with one kernel for many of them."""
    if tensors:
        private_part(torch, "_foreach_div_")(tensors, divisor)


def add_in_place(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add to each tensor the one at the same place, with one kernel for many of them."""
    if tensors:
        private_part(torch, "_foreach_add_")(tensors, others)


def flatten_together(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements of `tensors` in one dimension.

    One call; `torch.cat` needs a view of each tensor first.
    """
    if len(tensors) == 1:
        return tensors[0].flatten().clone()  # torch would return a view.
    flatten: Callable[[Sequence[Tensor]], Tensor] = private_part(torch._C._nn, "flatten_dense_tensors")
    return flatten(tensors)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; autograd counts these changes."""
    return int(private_part(tensor, "_version"))
