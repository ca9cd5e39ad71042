"""The metrics service that shows live and ended runs, for `adascale ui` and for commands about ended runs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adascale_controller.local.local_jobs import LocalJob, find_jobs, read_checkpoint, state_after_run
from adascale_controller.local.service_process import ServiceProcess, listen
from adascale_controller.local.state_dir import StateDir, replace_file
from adascale_core.views.job_summary import JobStateName, RunEntry, RunView


class RunList:
    """The runs in state folders, written to a file when they change."""

    def __init__(self, root: Path | None, file: Path) -> None:
        self._root = root
        self._file = file
        self._written = ""
        self._ended: dict[Path, tuple[object, RunEntry]] = {}

    def update(self) -> None:
        """Find the runs, and write the file if it has others."""
        text = json.dumps([self._entry(job).to_json() for job in find_jobs(self._root)])
        if text != self._written:
            replace_file(self._file, text.encode())
            self._written = text

    def _entry(self, job: LocalJob) -> RunEntry:
        if job.process is not None:
            self._ended.pop(job.folder.path, None)
            return _entry_of(job, None, {}, job.service.url if job.service else None)
        # The checkpoints of an ended run may be in an object store, so they are read once.
        status = job.folder.history_file.stat()
        key = (status.st_size, status.st_mtime_ns)
        known = self._ended.get(job.folder.path)
        if known is None or known[0] != key:
            known = (key, _ended_entry(job))
            self._ended[job.folder.path] = known
        return known[1]


def _ended_entry(job: LocalJob) -> RunEntry:
    checkpoint, error = read_checkpoint(job)
    result = dict(checkpoint.result) if checkpoint is not None else {}
    return _entry_of(job, state_after_run(job, checkpoint, error), result, None)


def _entry_of(
    job: LocalJob, state: JobStateName | None, result: dict[str, float | str], url: str | None
) -> RunEntry:
    first, last = job.runs[0], job.runs[-1]
    folder = job.folder.path.absolute()
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    view = RunView(
        folder=str(folder),
        url=url,
        began_at=first.began,
        ended_at=None if state is None else last.ended,
        reason=last.reason if state is JobStateName.FAILED else "",
        result=result,
        versions=last.versions,
    )
    return RunEntry(
        id=f"{job.id}~{digest}",
        job=job.id,
        database=str(job.folder.database.absolute()),
        logs=str(job.folder.logs.absolute()),
        state=state,
        began_at=last.began,
        run=view,
    )


@dataclass(frozen=True)
class RunsService:
    """A service that shows the runs in state folders, and its list of them."""

    runs: RunList
    process: ServiceProcess


@contextmanager
def runs_service(
    root: Path | None, port: int, *, required: bool, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[RunsService | None]:
    """Yield a service that shows the runs, and stop it at the end; None if cancelled before it listens."""
    with (
        tempfile.TemporaryDirectory(prefix="adascale-ui-") as temporary,
        listen(port, required=required) as listener,
    ):
        folder = StateDir(Path(temporary))
        folder.logs.mkdir()
        file = folder.path / "runs.json"
        runs = RunList(root, file)
        runs.update()
        process = ServiceProcess(folder, ["--runs", str(file)], os.environ, listener)
        try:
            yield RunsService(runs, process) if process.start(cancelled) else None
        finally:
            process.stop()
