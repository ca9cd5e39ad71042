"""The CPU limit of the container, from its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def thread_variables(
    environ: Mapping[str, str], *, root: Path = _CGROUP, own: Path = _OWN, processors: int | None = None
) -> dict[str, str]:
    """Return the variable by which torch starts no more threads than the CPU limit allows to run.

    By itself torch starts one for each processor of the machine. They use up the limit's share of each period
    at once, and all of them stand still for the rest of it.

    Args:
        environ: the environment of the agent. Empty if the user has set a number of threads.
        root: where the control groups are mounted.
        own: the file that names the control groups of this process.
        processors: how many processors this process may use. None for what the system says.
    """
    if any(name in environ for name in _THREAD_VARIABLES):
        return {}
    limit = cpu_limit(root, own)
    available = processors or len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(int(limit), 1))} if limit < available else {}


def cpu_limit(root: Path = _CGROUP, own: Path = _OWN) -> float:
    """Return how many processors a process may use on average, infinite if that is not limited.

    The limit of a control group holds for those in it, so it is the smallest one up to the root. Version 2
    and version 1 of control groups are read.

    Args:
        root, own: as for `thread_variables`.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return inf
    limits = [inf]
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            limits += [_quota_v2(folder) for folder in _folders(root, path)]
        elif "cpu" in controllers.split(","):
            for mount in (root / controllers, root / "cpu"):
                limits += [_quota_v1(folder) for folder in _folders(mount, path)]
    return min(limits)


def _folders(root: Path, path: str) -> Iterator[Path]:
    """Yield the folder of a control group, and those of the control groups around it.

    In a container the path may be that on the machine, of which only the container's own group is mounted, as
    the root.
    """
    folder = root / path.strip("/")
    while folder != root:
        # The path may lead out of what is mounted: `/../other`.
        if ".." not in folder.parts:
            yield folder
        folder = folder.parent
    yield root


def _quota_v2(folder: Path) -> float:
    words = _words(folder / "cpu.max")
    return _ratio(words[0], words[1]) if len(words) == 2 else inf


def _quota_v1(folder: Path) -> float:
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    return _ratio(quota[0], period[0]) if quota and period else inf


def _ratio(quota: str, period: str) -> float:
    """Return a quota as a number of processors; `max` and -1 are no limit."""
    try:
        return int(quota) / int(period) if int(quota) > 0 else inf
    except (ValueError, ZeroDivisionError):
        return inf


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
