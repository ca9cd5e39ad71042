"""Norms and inner products of gradients, without a temporary tensor of their size, and copies of tensors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adascale_worker.torch_private.autograd import flatten_together, norms_of

Gradients = Sequence[Sequence[Tensor]]
"""Gradients by parameter group."""

MAX_ELEMENTS_TO_COPY = 1 << 14
"""Tensors on the CPU up to this size are copied together, which costs less than a call for each."""

HALF_PRECISION = (torch.float16, torch.bfloat16)

SEPARATELY_READ = ("cpu",)
"""Types of devices where tensors are read one by one. Elsewhere, to launch a kernel for each takes longer
than to copy many of them together."""

MAX_ELEMENTS_TOGETHER = 1 << 24
"""Tensors are copied together up to this size."""


def local_shard(tensor: Tensor) -> Tensor:
    """Return a tensor without its history; for a DTensor, the shard of this rank."""
    if type(tensor) is Tensor:
        return tensor.detach() if tensor.requires_grad else tensor
    # By attribute and not by type, because importing DTensor takes a third of a second.
    shard: Tensor = getattr(tensor.detach(), "to_local", tensor.detach)()
    return shard


def is_first_copy(parameter: Tensor) -> bool:
    """Whether this process has the first copy of its part of a parameter, among those with a sharded model.

    So exactly one of the processes counts each element, whatever meshes the parameters are on.
    """
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return dist.get_rank() == 0
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    place = zip(mesh.get_coordinate(), placements, strict=True)
    return not any(index > 0 and placement.is_replicate() for index, placement in place)


def norm(gradient: Tensor) -> Tensor:
    """Return the L2 norm of one gradient: shape (), on the device of the gradient.

    Here and below, gradients of 16 bits are summed in 32, so that 1e4 in float16 does not overflow.
    """
    if gradient.is_cpu and gradient.dtype is torch.float32 and gradient.is_contiguous():
        flat = gradient.view(-1)
        return torch.dot(flat, flat).sqrt()
    return norms([gradient])[0]


def sqr_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the squared L2 norm of several gradients taken as one vector: shape (), on `device`."""
    small, found, others = [], [], []
    for gradient in gradients:
        if not gradient.is_cpu or gradient.dtype is not torch.float32:
            others.append(gradient)
        elif gradient.numel() <= MAX_ELEMENTS_TO_COPY:
            small.append(gradient)
        else:  # As fast as a norm, and more exact in float32.
            found.append(_dot(gradient, gradient).sqrt())
    if small:
        flat = flatten_together(small)
        found.append(torch.dot(flat, flat).sqrt())
    return sum_of_squares(found + norms(others), device)


def inner_products(left: Gradients, right: Gradients, device: torch.device) -> Tensor:
    """Return the inner product of the gradients in `left` and `right`, per group: shape (groups,)."""
    products = [_products(a, b) for a, b in zip(left, right, strict=True)]
    return torch.stack([stacked(terms, device).sum() for terms in products])


def sum_of_squares(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of scalars on any devices: shape (), on `device`."""
    terms = stacked(values, device)
    return torch.dot(terms, terms)


def are_read_together(tensors: Sequence[Tensor]) -> bool:
    """Whether many tensors are copied together before they are read."""
    return bool(tensors) and tensors[0].device.type not in SEPARATELY_READ


def batches(sizes: Sequence[int], kinds: Sequence[object], largest: int | None = None) -> Iterator[list[int]]:
    """Return the positions of consecutive tensors of one kind, together of the size `largest` at most.

    By default `MAX_ELEMENTS_TOGETHER`.
    """
    largest = MAX_ELEMENTS_TOGETHER if largest is None else largest
    batch: list[int] = []
    size = 0
    for position, (elements, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if batch and (size + elements > largest or kind != kinds[batch[0]]):
            yield batch
            batch, size = [], 0
        batch.append(position)
        size += elements
    if batch:
        yield batch


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return the real numbers of tensors of one dtype in one dimension, at least 32 bits each.

    Perhaps a view, so it must not be changed.
    """
    flat = tensors[0].reshape(-1) if len(tensors) == 1 else flatten_together(tensors)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.float() if flat.dtype in HALF_PRECISION else flat


def divided_like(whole: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a tensor of one dimension, in the shapes of `tensors`, which it has the size of."""
    parts = whole.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def copied(tensor: Tensor, memory: Tensor | None) -> Tensor:
    """Return a copy of a tensor: in `memory`, if that has its shape, layout, type and device."""
    if (
        memory is None
        or (memory.shape, memory.dtype, memory.device) != (tensor.shape, tensor.dtype, tensor.device)
        or memory.stride() != tensor.stride()
    ):
        memory = torch.empty_like(tensor)
    return memory.copy_(tensor)


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype to add statistics up in: float64, or float32 on devices without it (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def norms(tensors: Sequence[Tensor], order: int = 2) -> list[Tensor]:
    """Return the L1 or L2 norm of each tensor."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        return [each for tensor in tensors for each in norms([tensor], order)]
    is_narrow = bool(tensors) and tensors[0].dtype in HALF_PRECISION
    return norms_of(tensors, order, dtype=torch.float32 if is_narrow else None)


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return scalars on any devices, to be added up on `device`: shape (values,), or a zero for none."""
    dtype = accumulation_dtype(device)
    if not values:
        return torch.zeros(1, dtype=dtype, device=device)
    if len({(value.device, value.dtype) for value in values}) > 1 or values[0].device != device:
        values = [value.to(device, dtype) for value in values]
    return torch.stack(list(values)).to(dtype)


def _products(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """Return numbers that add up to the inner product."""
    if not are_read_together(left):
        return [_dot(a, b) for a, b in zip(left, right, strict=True)]
    kinds = [(a.dtype, b.dtype, a.device) for a, b in zip(left, right, strict=True)]
    return [
        torch.dot(flattened([left[n] for n in batch]), flattened([right[n] for n in batch]))
        for batch in batches([tensor.numel() for tensor in left], kinds)
    ]


def _dot(left: Tensor, right: Tensor) -> Tensor:
    if left.is_contiguous() and right.is_contiguous():
        left, right = left.view(-1), right.view(-1)
    else:
        # The gradient of a convolution may be channels-last: flat in the order of its strides.
        order = sorted(range(left.dim()), key=left.stride, reverse=True)
        left, right = left.permute(order).reshape(-1), right.permute(order).reshape(-1)
    if left.is_complex():
        left, right = torch.view_as_real(left).view(-1), torch.view_as_real(right).view(-1)
    if left.dtype in HALF_PRECISION:
        left, right = left.float(), right.float()
    return torch.dot(left, right)
