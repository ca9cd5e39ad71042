"""The choice of a replica's device."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Has the same content in all containers of a host."""


def select_device(requested: torch.device | str | None, local_rank: int) -> torch.device:
    """Return the device of a replica."""
    if requested is not None:
        device = torch.device(requested)
        if device.type != "cuda" or device.index is not None:
            return device
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))


def gpu_names(device: torch.device) -> tuple[str, str]:
    """Return what identifies a GPU in every process of a cluster: its id, and its host and address there.

    The MIG instances of a GPU have ids of their own, and the same address. NCCL takes them for one GPU.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    address = f"{properties.pci_domain_id:x}:{properties.pci_bus_id:x}:{properties.pci_device_id:x}"
    return str(properties.uuid), f"{socket.gethostname()} {boot} {address}"


def describe_shared_gpu(device: str, own: str, used: Sequence[str], visible: Mapping[str, str]) -> str | None:
    """Return the warning about a replica that shares its GPU although others are free, else None."""
    free = [name for name, each in visible.items() if each not in used]
    if used.count(own) < 2 or not free:
        return None
    return (
        f"{used.count(own)} replicas share the GPU {device} and exchange gradients through the memory of "
        f"the host, but no replica uses {', '.join(free)}: give each replica a GPU of its own, with "
        "CUDA_VISIBLE_DEVICES or ElasticTrainer(device=...)"
    )
