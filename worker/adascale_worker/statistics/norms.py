"""Norms and inner products of gradients, without a temporary of their size."""

from collections.abc import Sequence

import torch
from torch import Tensor

Gradients = Sequence[Sequence[Tensor]]
"""Gradients by parameter group."""

LARGE = 1 << 15
"""Elements from which `torch.dot` is used on the CPU: as fast as a norm, and more exact in float32."""

SMALL = 1 << 11
"""Elements up to which gradients on the CPU are copied together, which costs less than a call for each."""

NARROW = (torch.float16, torch.bfloat16)


def local(tensor: Tensor) -> Tensor:
    """Return a tensor without history; of a sharded one this rank's shard."""
    if type(tensor) is Tensor:
        return tensor.detach() if tensor.requires_grad else tensor
    # Asked by name, because importing DTensor takes a third of a second that most programs can do without.
    shard: Tensor = getattr(tensor.detach(), "to_local", tensor.detach)()
    return shard


def norm(gradient: Tensor) -> Tensor:
    """Return the L2 norm of one gradient: no dimension, on the gradient's device.

    Gradients of 16 bits are summed in 32, here as below, so that 1e4 in float16 does not overflow.
    """
    if gradient.is_cpu and gradient.dtype is torch.float32 and gradient.is_contiguous():
        flat = gradient.view(-1)
        return torch.dot(flat, flat).sqrt()
    return _norms([gradient])[0]


def sqr_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the squared L2 norm of several gradients taken as one: no dimension, on `device`."""
    small, norms, others = [], [], []
    for gradient in gradients:
        if gradient.is_cpu and gradient.dtype is torch.float32:
            size = gradient.numel()
            if size < SMALL:
                small.append(gradient)
                continue
            if size >= LARGE:
                norms.append(_dot(gradient, gradient).sqrt())
                continue
        others.append(gradient)
    if small:
        flat = torch._C._nn.flatten_dense_tensors(small)
        norms.append(torch.dot(flat, flat).sqrt())
    return sum_of_squares(norms + _norms(others), device)


def sqr_norms(groups: Gradients, device: torch.device) -> Tensor:
    """Return the squared L2 norm of each group's gradients: shape (groups,), on `device`."""
    return torch.stack([sqr_norm(gradients, device) for gradients in groups])


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


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    wide = [gradient for gradient in gradients if gradient.dtype not in NARROW]
    norms = list(torch._foreach_norm(wide, 2)) if wide else []
    if len(wide) < len(gradients):
        narrow = [gradient for gradient in gradients if gradient.dtype in NARROW]
        norms += torch._foreach_norm(narrow, 2, dtype=torch.float32)
    return norms


def _gather(values: Sequence[Tensor], device: torch.device) -> Tensor:
    dtype = widest_type(device)
    if not values:
        return torch.zeros(1, dtype=dtype, device=device)
    if len({(value.device, value.dtype) for value in values}) > 1 or values[0].device != device:
        values = [value.to(device, dtype) for value in values]
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
