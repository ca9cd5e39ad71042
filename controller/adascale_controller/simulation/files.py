"""Text files of a simulation, with errors that say what to do."""

from __future__ import annotations

from pathlib import Path

from adascale_controller.simulation.application import ProfileError


def read_text(path: Path) -> str:
    """Return the content of a text file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ProfileError(f"{path} does not exist: check the path, and --profiles") from error
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{path} is not a text file in UTF-8: a workload or profile is CSV or JSON"
        ) from error
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror or error}: check the path") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"cannot write {path}: {error.strerror or error}: choose another path") from error
