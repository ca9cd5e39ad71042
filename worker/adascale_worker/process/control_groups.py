"""The control groups of this process, whose limits all hold for it. Versions 1 and 2 are read."""

from __future__ import annotations

from collections.abc import Iterator
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
