"""The metrics service of a local run is killed while it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from adascale_controller.local import service_process
from adascale_controller.local.processes import ChildProcess
from adascale_controller.local.service_process import (
    MAX_KILLED_STARTS,
    ServiceProcess,
    ServiceProcessError,
    listen,
)
from adascale_controller.local.state_dir import StateDir


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    """Start a service that is killed `kills` times at once after its start, and use it."""
    started: list[ChildProcess] = []

    def start_and_kill(*arguments: Any) -> ChildProcess:
        started.append(ChildProcess(*arguments))
        if len(started) <= kills:
            started[-1].kill()
        return started[-1]

    monkeypatch.setattr(service_process, "ChildProcess", start_and_kill)
    folder = StateDir(tmp_path)
    folder.logs.mkdir()
    with listen(0, required=False) as listener, (tmp_path / "lock").open("w") as lock:
        options = ["--database", f"sqlite:///{folder.database}"]
        service = ServiceProcess(folder, options, dict(os.environ), listener, [lock.fileno()])
        try:
            assert service.start(lambda: False)
            with urlopen(f"{service.url}/healthz") as answer:
                assert answer.status == 200
        finally:
            service.stop()
    assert len(started) == kills + 1


def test_a_service_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, monkeypatch, 2)


def test_a_service_that_is_killed_at_each_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServiceProcessError, match=r"did not start \(killed by SIGKILL\)"):
        start(tmp_path, monkeypatch, MAX_KILLED_STARTS + 1)
