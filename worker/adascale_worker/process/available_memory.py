"""How much memory this process can use before the kernel ends processes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Final

from adascale_worker.process.control_groups import OWN, ROOT, ControlGroup, control_groups

_MACHINE: Final = Path("/proc/meminfo")
_PROCESS: Final = Path("/proc/self/status")
_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.max", "memory.current", "memory.peak"),
}
"""Limit, usage and its peak of a control group, by version. Linux before 5.19 has no peak in version 2."""


def unused_memory(
    root: Path = ROOT, own: Path = OWN, machine: Path = _MACHINE, process: Path = _PROCESS
) -> float:
    """Return how many bytes of this machine and of the control groups of this process were never used so far.

    These are those that are left, less what this process has used at most beyond its present use; and the
    limit of a control group less its own peak. What the kernel keeps of files on disk counts as left: it is
    released when memory is needed. The kernel counts it in the peak, from which what it keeps now is taken
    off.
    """
    status = _kibibytes(process)
    more = max(status.get("VmHWM", 0.0) - status.get("VmRSS", 0.0), 0.0)
    left = [_left_in(group, more) for group in control_groups("memory", root, own)]
    return min([_kibibytes(machine).get("MemAvailable", inf) - more, *left])


def _left_in(group: ControlGroup, more: float) -> float:
    limit, usage, peak = map(group.words, _FILES[group.version])
    statistics = group.words("memory.stat")
    try:
        values = {name: int(value) for name, value in zip(statistics[::2], statistics[1::2], strict=True)}
        cached = sum(values.get(f"{prefix}_file", 0) for prefix in ("active", "inactive"))
        used = max(int(usage[0]) + more, _number(peak))
        return int(limit[0]) - used + cached
    except (ValueError, IndexError):
        return inf


def _number(words: Sequence[str]) -> int:
    return int(words[0]) if words else 0


def _kibibytes(file: Path) -> dict[str, float]:
    """Return the values in kB of a file of /proc, in bytes."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {
        words[0].rstrip(":"): float(words[1]) * 1024
        for words in lines
        if len(words) == 3 and words[2] == "kB"
    }
