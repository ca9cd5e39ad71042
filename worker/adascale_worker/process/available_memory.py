"""How much memory this process can use before the kernel ends processes."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Final

from adascale_worker.process.control_groups import OWN, ROOT, ControlGroup, control_groups

_MACHINE: Final = Path("/proc/meminfo")
_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""Limit and usage of a control group, by version."""


def available_memory(root: Path = ROOT, own: Path = OWN, machine: Path = _MACHINE) -> float:
    """Return how many bytes are left on this machine, and in the control groups of this process.

    What the kernel keeps of files on disk counts as left: it is released when memory is needed.

    Args:
        root, own: as for `control_groups`.
        machine: the file with the memory of the machine.
    """
    left = [_left_in(group) for group in control_groups("memory", root, own)]
    return min([_left_on(machine), *left])


def _left_in(group: ControlGroup) -> float:
    limit, usage = map(group.words, _FILES[group.version])
    statistics = group.words("memory.stat")
    try:
        values = {name: int(value) for name, value in zip(statistics[::2], statistics[1::2], strict=True)}
        cached = sum(values.get(f"{prefix}_file", 0) for prefix in ("active", "inactive"))
        return int(limit[0]) - int(usage[0]) + cached
    except (ValueError, IndexError):
        return inf


def _left_on(machine: Path) -> float:
    try:
        lines = machine.read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return inf
