"""The choice of a replica's device."""

from __future__ import annotations

import torch


def select_device(requested: torch.device | str | None, local_rank: int) -> torch.device:
    """Return the device of a replica.

    Args:
        requested: the program's choice. "cuda" without an index means the replica's own GPU. None means the
            replica's own GPU, or the CPU if there is no GPU.
        local_rank: index of the replica on its machine; replica n uses GPU n modulo the number of GPUs.
    """
    if requested is not None:
        device = torch.device(requested)
        if device.type != "cuda" or device.index is not None:
            return device
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))


def gpu_id(device: torch.device) -> str:
    """Return what identifies a GPU among all of a cluster, in every process that uses it."""
    return str(torch.cuda.get_device_properties(device).uuid)
