"""Norms and inner products of gradients, without a temporary of their size."""

from collections.abc import Sequence

import torch
from torch import Tensor

Gradients = Sequence[Sequence[Tensor]]
"""Gradients by parameter group."""

LARGE = 1 << 15
"""Elements from which `torch.dot` is used on the CPU: as fast as a norm, and more exact in float32."""

NARROW = (torch.float16, torch.bfloat16)


def local(tensor: Tensor) -> Tensor:
    """Return a tensor without history; of a sharded one this rank's shard."""
    if type(tensor) is Tensor:
        return tensor.detach()
    # Asked by name, because importing DTensor takes a third of a second that most programs can do without.
    shard: Tensor = getattr(tensor.detach(), "to_local", tensor.detach)()
    return shard


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each gradient, in order: no dimension, on the gradient's device.

    Gradients of 16 bits are summed in 32, so that 1e4 in float16 does not overflow.
    """
    result: list[Tensor] = [gradients[0]] * len(gradients) if gradients else []
    batches: dict[torch.dtype | None, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient.is_cpu and gradient.dtype is torch.float32 and gradient.numel() >= LARGE:
            result[index] = _dot(gradient, gradient).sqrt()
        else:
            batches.setdefault(torch.float32 if gradient.dtype in NARROW else None, []).append(index)
    for dtype, indices in batches.items():
        batch = torch._foreach_norm([gradients[index] for index in indices], 2, dtype=dtype)
        for index, norm in zip(indices, batch, strict=True):
            result[index] = norm
    return result


def norm(gradient: Tensor) -> Tensor:
    """Return the L2 norm of one gradient, as `norms` does."""
    if gradient.is_cpu and gradient.dtype is torch.float32 and gradient.is_contiguous():
        flat = gradient.view(-1)
        return torch.dot(flat, flat).sqrt()
    return norms([gradient])[0]


def sqr_norms(groups: Gradients, device: torch.device) -> Tensor:
    """Return the squared L2 norm of each group's gradients: shape (groups,), on `device`."""
    return torch.stack([sum_of_squares(norms(gradients), device) for gradients in groups])


def inner_products(left: Gradients, right: Gradients, device: torch.device) -> Tensor:
    """Return the inner product of each group's gradients in `left` with those in `right`: (groups,)."""
    return torch.stack(
        [
            _gather([_dot(a, b) for a, b in zip(one, other, strict=True)], device).sum()
            for one, other in zip(left, right, strict=True)
        ]
    )


def sum_of_squares(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of numbers of any device: no dimension, on `device`."""
    terms = _gather(values, device)
    return torch.dot(terms, terms)


def widest_type(device: torch.device) -> torch.dtype:
    """Return the floating type to add statistics up in: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _gather(values: Sequence[Tensor], device: torch.device) -> Tensor:
    dtype = widest_type(device)
    if not values:
        return torch.zeros(1, dtype=dtype, device=device)
    if any(value.device != device for value in values):
        values = [value.to(device) for value in values]
    if len({value.dtype for value in values}) > 1:
        values = [value.to(dtype) for value in values]
    return torch.stack(list(values)).to(dtype)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    if left.is_contiguous() and right.is_contiguous():
        left, right = left.view(-1), right.view(-1)
    else:
        # A convolution's gradient may lie channels-last: in the order of its strides it is flat again.
        order = sorted(range(left.dim()), key=left.stride, reverse=True)
        left, right = left.permute(order).reshape(-1), right.permute(order).reshape(-1)
    if left.is_complex():
        left, right = torch.view_as_real(left).view(-1), torch.view_as_real(right).view(-1)
    if left.dtype in NARROW:
        left, right = left.float(), right.float()
    return torch.dot(left, right)
