"""The GPUs, CPU cores and address of this machine."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

ADDRESS = "127.0.0.1"
"""The address at which the processes of a run reach each other."""
MIN_CPU_REPLICAS = 4
"""The default limit of replicas without a GPU is not lower than this, even with fewer cores."""


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, as values for CUDA_VISIBLE_DEVICES.

    They are listed by nvidia-smi, because importing torch takes seconds.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = [device.strip() for device in visible.split(",")]
        # Like CUDA, ignore the devices after the first invalid one.
        end = next((i for i, device in enumerate(devices) if device in ("", "-1")), len(devices))
        return devices[:end]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)", listed, flags=re.MULTILINE)


def default_replica_limit(devices: Sequence[str]) -> int:
    """Return the most replicas at once if the user does not limit them."""
    return len(devices) or max(MIN_CPU_REPLICAS, cpu_cores())
