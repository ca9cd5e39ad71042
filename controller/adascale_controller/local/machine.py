"""What this machine has to offer."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

MIN_ON_CPU = 4
"""Replicas that run at once at most where there is no GPU, however few cores there are."""


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Asked of the driver's own tool, for importing torch here would cost more time than all else.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        devices = [device.strip() for device in chosen.split(",")]
        # As CUDA does: what follows an invalid name doesn't count.
        end = next((i for i, device in enumerate(devices) if device in ("", "-1")), len(devices))
        return devices[:end]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)", listed, flags=re.MULTILINE)


def default_capacity(devices: Sequence[str]) -> int:
    """How many replicas run at once, where the user doesn't say."""
    return len(devices) or max(MIN_ON_CPU, cores())
