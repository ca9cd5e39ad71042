"""Backward passes, and the hooks of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_worker.torch_private import private_part

backward_pass_id: Callable[[], int] = private_part(
    torch._C, "_current_graph_task_id", "to count the backward passes of a step"
)
"""Return the number of the backward pass that runs on this thread; -1 outside of a backward pass.

A function of torch itself and not wrapped, because hooks call it for every gradient.
"""

call_at_end_of_backward: Callable[[Callable[[], None]], None] = private_part(
    torch.autograd.Variable._execution_engine, "queue_callback", "to read gradients after a backward pass"
)
"""Call a function when the current backward pass ends, after the functions that were queued before it.

DistributedDataParallel queues its own in the same way, so the order of the two is defined. A hook on the last
gradient would not do: which gradient is the last is not known.
"""

current_autograd_node: Callable[[], Any] = private_part(
    torch._C, "_current_autograd_node", "to distinguish a backward pass inside another from the outer pass"
)
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
    will_execute = private_part(torch._C, "_will_engine_execute_node", "to ignore torch.autograd.grad")
    try:
        return accumulation_node is not None and bool(will_execute(accumulation_node))
    except RuntimeError:  # the engine refuses to answer for a leaf in torch.autograd.grad
        return False


def is_last_hook(tensor: Tensor, handle: RemovableHandle) -> bool:
    """Whether no hook on the gradient of `tensor` is called after the one of `handle`."""
    hooks = private_part(tensor, "_backward_hooks", "to find the hooks of the program") or {}
    return next(reversed(hooks), handle.id) == handle.id


def remove_tensor_hook(tensor: Tensor, handle: RemovableHandle) -> None:
    """Remove a hook on the gradient of `tensor`, and the empty collection that its removal leaves behind.

    Autograd enters Python for each tensor with a collection of hooks, even if the collection is empty.
    """
    handle.remove()
    if not private_part(tensor, "_backward_hooks", "to remove its hooks without a trace"):
        tensor._backward_hooks = None
