"""Arithmetic on many tensors with one kernel, and the version of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adascale_worker.torch_private import private_part


def l2_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the L2 norm of each tensor, with one kernel for many of them.

    `torch.nn.utils.get_total_norm` uses the same kernel and returns only the norm of all.
    """
    if not tensors:
        return []
    norm = private_part(torch, "_foreach_norm", "to read the norms of gradients")
    return list(norm(tensors, 2) if dtype is None else norm(tensors, 2, dtype=dtype))


def weighted_sqr_norms(tensors: Sequence[Tensor], divisors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of x^2 / divisor for each tensor x. May overwrite the divisors.

    For tensors on the CPU, where an inner product costs a fraction of a norm.
    """
    return [torch.dot(_quotient(x, divisor), x) for x, divisor in zip(tensors, divisors, strict=True)]


def _quotient(tensor: Tensor, divisor: Tensor) -> Tensor:
    if tensor.dtype is divisor.dtype:
        return torch.div(tensor, divisor, out=divisor)
    return (tensor / divisor).to(tensor.dtype)


def multiply_in_place(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor by `factor`, with one kernel for many of them."""
    if tensors:
        private_part(torch, "_foreach_mul_", "to convert the steps of an optimizer")(tensors, factor)


def divide_in_place(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide each tensor by `divisor`, with one kernel for many of them."""
    if tensors:
        private_part(torch, "_foreach_div_", "to divide gradients")(tensors, divisor)


def add_in_place(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add to each tensor the one at the same place, with one kernel for many of them."""
    if tensors:
        private_part(torch, "_foreach_add_", "to add gradients")(tensors, others)


def flatten_together(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements of `tensors` in one dimension.

    One call; `torch.cat` needs a view of each tensor first.
    """
    if len(tensors) == 1:
        return tensors[0].flatten().clone()  # torch would return a view.
    flatten: Callable[[Sequence[Tensor]], Tensor] = private_part(
        torch._C._nn, "flatten_dense_tensors", "to read the norms of small gradients"
    )
    return flatten(tensors)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; autograd counts these changes."""
    return int(private_part(tensor, "_version", "to find the buffers that a step has changed"))
