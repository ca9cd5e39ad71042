"""The state folders of this user's runs on this machine: a file with a line for each.

It is `adascale/state-dirs` in the folder for state of the XDG Base Directory Specification, which is
`~/.local/state` unless XDG_STATE_HOME names another. `adascale run` adds its folder, so that `adascale list`
and `adascale ui` find each run from any folder.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def registry_file() -> Path:
    """Return the file."""
    home = os.environ.get("XDG_STATE_HOME")
    # The specification ignores relative paths.
    base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "state"
    return base / "adascale" / "state-dirs"


def register(folder: Path) -> None:
    """Add a state folder."""
    if b"\n" in os.fsencode(folder.absolute()):
        raise ValueError("its path contains a line break")
    _change(add=folder.absolute(), remove=folder.absolute())


def deregister(folder: Path) -> None:
    """Remove a state folder."""
    if registry_file().exists():
        _change(add=None, remove=folder.absolute())


def registered_folders() -> list[Path]:
    """Return the state folders that exist, in the order of their latest runs; empty if none is known."""
    try:
        return [path for path in _read(registry_file()) if os.path.isdir(path)]  # noqa: PTH112 (raises nothing)
    except (OSError, RuntimeError):  # without a home folder, for example
        return []


def _change(*, add: Path | None, remove: Path) -> None:
    path = registry_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Of two runs that begin together, the second one reads what the first one has written.
        fcntl.flock(folder, fcntl.LOCK_EX)
        known = _read(path)
        changed = [each for each in known if each != remove] + ([add] if add is not None else [])
        if changed != known:
            # A full disk, or a process that is killed, leaves the file as it was.
            draft = path.with_suffix(".draft")
            draft.write_bytes(b"".join(os.fsencode(each) + b"\n" for each in changed))
            draft.replace(path)
    finally:
        os.close(folder)


def _read(path: Path) -> list[Path]:
    """Return the folders in the file; empty if there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [Path(os.fsdecode(line)) for line in lines if line.startswith(b"/")]
