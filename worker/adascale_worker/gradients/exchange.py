"""Averages gradients over the replicas after a backward pass, without `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 32 << 20
"""Bytes of gradients that are averaged together."""


def averaged(
    parameters: Sequence[Tensor],
    gradients: Mapping[Tensor, Tensor],
    average: Callable[[Sequence[Tensor]], None],
) -> dict[Tensor, Tensor]:
    """Return the means over the replicas of the gradients of `parameters`. A collective call.

    A gradient that some replicas have and others do not have counts as zero where it is missing. A parameter
    without a gradient on any replica is left out.
    """
    buckets = list(_buckets(parameters))
    flat = []
    for bucket in buckets:
        parts = [gradients.get(p, torch.zeros_like(p)).reshape(-1).to(p.dtype) for p in bucket]
        flat.append(torch.cat(parts))
    # 1 for each gradient that this replica has.
    present = _to_device([float(parameter in gradients) for parameter in parameters], parameters[0].device)
    average([*flat, present])
    means = {
        parameter: mean.view(parameter.shape)
        for bucket, tensor in zip(buckets, flat, strict=True)
        for parameter, mean in zip(bucket, tensor.split([p.numel() for p in bucket]), strict=True)
    }
    if len(gradients) < len(parameters):
        # Only now, because it waits for the device.
        for parameter, share in zip(parameters, present.tolist(), strict=True):
            if share == 0.0:
                del means[parameter]
    return means


def _to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers as a tensor. Does not wait for the device."""
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters of one type and device, each with at most `BUCKET_BYTES` if possible."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for parameter in same:
            if bucket and size + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.nbytes
        yield bucket
