"""The GPUs, CPU cores and address of this machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from adascale_core import names
from adascale_core.views.jobs import JobView

ADDRESS = "127.0.0.1"
"""The address at which the processes of a run reach each other."""
VISIBLE_DEVICES: Final = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The variables that limit which GPUs a process sees. On ROCm, the first has precedence if it is set."""
DEVICE_FILES: Final = ("nvidia[0-9]*", "kfd", "dxg")
"""Those of NVIDIA and AMD, and of both under WSL."""
TORCH_PROBE: Final = (
    sys.executable,
    "-P",
    "-c",
    "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)",
)
PROBE_TIMEOUT: Final = 120.0
"""Seconds for the import of torch, from a slow disk too."""
CONTENTION_SECONDS: Final = 0.5
"""Seconds for which it is observed how long a trainer waits for a processor core."""
MIN_CONTENTION: Final = 0.1
"""The share of time spent waiting for a core from which this is the cause of slow steps."""
MIN_CPU_REPLICAS = 4
"""The default limit of replicas without a GPU is not lower than this, even with fewer cores."""


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter for a run, by name."""
    versions = {"python": platform.python_version()}
    for package in (names.DISTRIBUTION, "torch", "numpy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_contention(view: JobView) -> str:
    """Return that a replica is slow because more processes compute than there are cores; empty if not."""
    slow = view.replica(view.slow.replica) if view.slow is not None else None
    if slow is None:
        return ""
    before = _seconds_waiting(slow.pid)
    time.sleep(CONTENTION_SECONDS)
    share = (_seconds_waiting(slow.pid) - before) / CONTENTION_SECONDS
    if share < MIN_CONTENTION:
        return ""
    return (
        f"Replica {slow.replica} is slow because more processes compute than this machine has cores "
        f"({cpu_cores()}): it waits for a core {min(share, 1.0):.0%} of the time. Slow replicas are not "
        "reported while that is so"
    )


def _seconds_waiting(pid: int) -> float:
    """Return how long the threads of a process were ready and had no core; 0 if it is not known."""
    nanoseconds = 0
    for thread in Path("/proc").glob(f"{pid}/task/*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            nanoseconds += int(thread.read_text().split()[1])
    return nanoseconds / 1e9


def visible_gpus(
    environ: Mapping[str, str], device_files: Path = Path("/dev"), probe: Sequence[str] = TORCH_PROBE
) -> list[str]:
    """Return the GPUs that this process may use, as values for the variables `VISIBLE_DEVICES`.

    They are listed by nvidia-smi, because importing torch takes seconds. Containers with compute capability
    only and ROCm lack it, so torch is asked in a child process if there is a device file of a GPU.
    """
    visible = next((environ[name] for name in VISIBLE_DEVICES if name in environ), None)
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
        listed = ""
    found = re.findall(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)", listed, flags=re.MULTILINE)
    if found or not any(any(device_files.glob(pattern)) for pattern in DEVICE_FILES):
        return found
    return [str(number) for number in range(_count_gpus(environ, probe))]


def gpu_environment(environ: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the variables that show GPUs to a process."""
    names = [name for name in VISIBLE_DEVICES if name in environ] or ["CUDA_VISIBLE_DEVICES"]
    return dict.fromkeys(names, device)


def _count_gpus(environ: Mapping[str, str], probe: Sequence[str]) -> int:
    """Return the number that `probe` prints; 0 if it fails, as without torch."""
    try:
        printed = subprocess.run(
            probe, env=dict(environ), capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=True
        ).stdout
        return int(printed)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def default_replica_limit(devices: Sequence[str]) -> int:
    """Return the most replicas at once if the user does not limit them."""
    return len(devices) or max(MIN_CPU_REPLICAS, cpu_cores())
