"""The folder with the state of a job on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from adascale_controller.local.checkpoints import delete_checkpoints
from adascale_controller.local.lock_folder import lock_folder
from adascale_core.errors import AdaScaleError

DEFAULT_ROOT = Path(".adascale")
IGNORE_ALL = "*\n"
"""The content of the .gitignore of a state folder."""


class StateDirError(AdaScaleError):
    """A state folder that this run cannot use."""

    exit_code = 2


@dataclass(frozen=True)
class StateDir:
    """The paths in a state folder."""

    path: Path

    @property
    def database(self) -> Path:
        """The metrics service's database."""
        return lock_folder(self.path) / "api.sqlite"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, unless the job sets another."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder with the output of all processes."""
        return self.path / "logs"

    @property
    def service_log(self) -> Path:
        """The output of the metrics service."""
        return self.logs / "api.log"

    @property
    def port_file(self) -> Path:
        """The file in which the metrics service writes its port."""
        return self.path / "api.port"

    @property
    def service_file(self) -> Path:
        """The file with the address of the metrics service, during a run."""
        return self.path / "service.json"

    @property
    def stop_lock_file(self) -> Path:
        """The file that `adascale stop` locks while it stops the run."""
        return lock_folder(self.path) / "stop.lock"

    @property
    def scale_request_file(self) -> Path:
        """The file in which `adascale scale` requests another limit of replicas."""
        return self.path / "scale-request.json"

    @property
    def scale_answer_file(self) -> Path:
        """The file in which the run answers the request."""
        return self.path / "scale-answer.json"

    @property
    def history_file(self) -> Path:
        """The file with the starts and ends of the runs."""
        return self.path / "runs.jsonl"

    @property
    def lock_file(self) -> Path:
        """The file that the processes of a run lock."""
        return lock_folder(self.path) / "lock"

    @property
    def local_folder(self) -> Path | None:
        """The folder for files that need file locks, if this folder has none."""
        folder = lock_folder(self.path)
        return None if folder == self.path else folder

    @property
    def ignore_file(self) -> Path:
        """The file that keeps the folder out of a repository of Git."""
        return self.path / ".gitignore"

    def replica_log(self, rank: int) -> Path:
        """The output of the replica of `rank`."""
        return self.logs / f"replica-{rank}.log"

    def create(self) -> None:
        """Create the folder, with a .gitignore for all its files."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            if (elsewhere := self.local_folder) is not None:
                elsewhere.mkdir(mode=0o700, parents=True, exist_ok=True)
                if elsewhere.parent.stat().st_uid != os.getuid():
                    raise StateDirError(
                        f"the folder {elsewhere.parent} for file locks belongs to another user: set TMPDIR "
                        "to another folder, or use a state folder on a local disk with --state-dir"
                    )
            if not self.ignore_file.exists():
                self.ignore_file.write_text(IGNORE_ALL)
        except OSError as error:
            raise StateDirError(
                f"cannot create the state folder {self.path}: {error.strerror}; use another with --state-dir"
            ) from None

    def delete_saved_state(self, checkpoints: Path | str) -> None:
        """Delete the files of previous runs, and no files of others."""
        delete_checkpoints(checkpoints)
        self.delete_records()

    def delete_records(self) -> None:
        """Delete what previous runs have recorded, and keep their checkpoints."""
        for database in self.database.parent.glob("api.sqlite*"):
            database.unlink()
        self.service_log.unlink(missing_ok=True)
        for log in self.logs.glob("replica-*.log"):
            log.unlink()
        self.history_file.unlink(missing_ok=True)
