"""The CPU limit of the container, from its control group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Final

from adascale_worker.process.control_groups import OWN, ROOT, ControlGroup, control_groups

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def thread_variables(
    environ: Mapping[str, str], *, root: Path = ROOT, own: Path = OWN, processors: int | None = None
) -> dict[str, str]:
    """Return the variable by which torch starts no more threads than the CPU limit allows to run.

    By itself torch starts one for each processor of the machine. They use up the limit's share of each period
    at once, and all of them stand still for the rest of it.
    """
    if any(name in environ for name in _THREAD_VARIABLES):
        return {}
    limit = cpu_limit(root, own)
    available = processors or len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(int(limit), 1))} if limit < available else {}


def cpu_limit(root: Path = ROOT, own: Path = OWN) -> float:
    """Return how many processors a process may use on average, infinite if that is not limited.

    The limit of a control group holds for those in it, so it is the smallest one up to the root. Version 2
    and version 1 of control groups are read.
    """
    return min([inf, *map(_quota, control_groups("cpu", root, own))])


def _quota(group: ControlGroup) -> float:
    if group.version == 2:
        words = group.words("cpu.max")
        return _ratio(words[0], words[1]) if len(words) == 2 else inf
    quota, period = group.words("cpu.cfs_quota_us"), group.words("cpu.cfs_period_us")
    return _ratio(quota[0], period[0]) if quota and period else inf


def _ratio(quota: str, period: str) -> float:
    """Return a quota as a number of processors; `max` and -1 are no limit."""
    try:
        return int(quota) / int(period) if int(quota) > 0 else inf
    except (ValueError, ZeroDivisionError):
        return inf
