"""The metrics service that shows live and ended runs, for `adascale ui` and for commands about ended runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adascale_controller.local.run_list import RunList
from adascale_controller.local.service_process import ServiceProcess, listen
from adascale_controller.local.state_dir import StateDir


class RunsService:
    """A service that shows the runs in state folders, and its list of them."""

    def __init__(self, runs: RunList, process: ServiceProcess) -> None:
        self.runs = runs
        self.process = process


@contextmanager
def runs_service(
    root: Path | None, port: int, *, required: bool, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[RunsService | None]:
    """Start a service that shows the runs, and stop it at the end; yield None if cancelled
    before it listens.
    """
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
