"""The control groups of this process, and how much memory it may use before the kernel ends processes.

The limits of all control groups around a process hold for it. Versions 1 and 2 are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path("/sys/fs/cgroup")
"""Where the control groups are mounted."""
OWN: Final = Path("/proc/self/cgroup")
"""The file that names the control groups of this process."""


class ControlGroup(NamedTuple):
    """A control group."""

    version: int
    folder: Path

    def words(self, name: str) -> list[str]:
        """Return the words in a file; none if it cannot be read."""
        try:
            return (self.folder / name).read_text().split()
        except OSError:
            return []


def control_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[ControlGroup]:
    """Yield the control groups of this process, and those around them up to the root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            yield from (ControlGroup(2, folder) for folder in _folders(root, path))
        elif controller in controllers.split(","):
            for mount in (root / controllers, root / controller):
                yield from (ControlGroup(1, folder) for folder in _folders(mount, path))


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

    On the machine: what is free, less the difference between the peak and the present use of this process. In
    a control group: its limit less its own peak.
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
        # The kernel releases what it keeps of files when memory is needed, but counts it in the peak.
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
