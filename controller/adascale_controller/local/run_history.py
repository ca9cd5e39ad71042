"""The runs on this machine: those of a state folder, and the state folders of this user's runs.

A state folder has a file with a line of JSON for each start and end of a run. The folders are in the file
`adascale/state-dirs` in the folder for state of the XDG Base Directory Specification, `~/.local/state` unless
XDG_STATE_HOME names another. `adascale run` adds its folder, so that `adascale list` and `adascale ui` find
each run from any folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from adascale_controller.local.state_dir import StateDir, replace_file
from adascale_core.errors import UsageError
from adascale_core.job_id import InvalidJobIdError, parse_job_id
from adascale_core.messages.reports import GainReport

MAX_NUMBER = 10**12
"""The largest valid time or number of steps. A folder may be that of another program."""


def _number_or_none(value: Any, check: ValidatorFunctionWrapHandler) -> float | None:
    """Return a number that a program has reported; None for one like the loss of a program that diverged."""
    try:
        return check(value)  # type: ignore[no-any-return]
    except ValidationError:
        return None


Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Reported = Annotated[Number | None, WrapValidator(_number_or_none)]
Whole = Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]


@dataclass(frozen=True)
class RunRecord:
    """A run."""

    job: Annotated[str, AfterValidator(parse_job_id)]
    began: Number  # when it started, in seconds since 1970
    steps: Whole | None = None  # the progress at which the job ends by its spec; None if unset
    # the folder or URL of the job's checkpoints; None for the folder in the state folder
    checkpoints: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # of the packages that matter for it, by name
    exit_code: Whole | None = None  # its exit code; None if it runs or was killed
    ended: Number | None = None  # when it ended, in seconds since 1970; None if it runs or was killed
    reason: str = ""  # why it has failed; empty if it has not
    target: Reported = None  # the progress at which the program would end; None if unknown
    loss: Reported = None  # the last that it has reported; None if there is none
    comparison: str = ""  # what it has taken beside one replica; empty if that can't be estimated


_RUN_RECORD: Final = TypeAdapter(RunRecord)


def require_folder_of(folder: StateDir, job: str) -> None:
    """Check that a state folder has no state of another job than `job`, which is its id."""
    other = next((run.job for run in read_runs(folder) if run.job != job), None)
    if other is not None:
        raise UsageError(
            f"{folder.path} contains the state of job {other}, not of {job}: use another folder with "
            "--state-dir"
        )


def record_start(folder: StateDir, run: RunRecord) -> list[float]:
    """Record the start of a run, and return the starts of all runs in the folder, this one last."""
    runs = read_runs(folder)
    members = ("job", "began", "steps", "checkpoints", "versions")
    _append(folder.history_file, {name: getattr(run, name) for name in members})
    return [*(earlier.began for earlier in runs), run.began]


def record_end(
    folder: StateDir,
    exit_code: int,
    ended: float,
    reason: str = "",
    latest: GainReport | None = None,
    comparison: str = "",
) -> None:
    """Record the end of the last run: when it was, why it has failed, its last report, and what it took."""
    end = {"exit_code": exit_code, "ended": ended, "reason": reason, "comparison": comparison}
    known = {} if latest is None else {"target": latest.target, "loss": latest.loss}
    _append(folder.history_file, end | {name: value for name, value in known.items() if value is not None})


def read_runs(folder: StateDir) -> list[RunRecord]:
    """Return the runs in a state folder, the latest last; empty if it is no state folder.

    Lines that a crash cut off or another program wrote are skipped.
    """
    try:
        text = folder.history_file.read_text("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    runs: list[RunRecord] = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError, InvalidJobIdError):
            members = json.loads(line)
            if not isinstance(members, dict):
                continue
            if "began" in members:
                runs.append(_RUN_RECORD.validate_python(members))
            elif runs:
                runs[-1] = _RUN_RECORD.validate_python(asdict(runs[-1]) | members)
    return runs


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        # The line break comes first, in case a crash cut off the last line.
        file.write("\n" + json.dumps(line))


def registry_file() -> Path:
    """Return the file."""
    home = os.environ.get("XDG_STATE_HOME")
    # The specification ignores relative paths.
    base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "state"
    return base / "adascale" / "state-dirs"


def register_folder(folder: Path) -> None:
    """Add a state folder."""
    if b"\n" in os.fsencode(folder.absolute()):
        raise ValueError("its path contains a line break")
    _change(add=folder.absolute(), remove=folder.absolute())


def deregister_folder(folder: Path) -> None:
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
            replace_file(path, b"".join(os.fsencode(each) + b"\n" for each in changed))
    finally:
        os.close(folder)


def _read(path: Path) -> list[Path]:
    """Return the folders in the file; empty if there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [Path(os.fsdecode(line)) for line in lines if line.startswith(b"/")]
