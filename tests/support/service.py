"""A real metrics service, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.launch import wait_until

TOKEN = "a-token-for-tests"


class Service:
    """The metrics service, with its data in a folder; may be killed and started again.

    Args:
        folder: for its database and port.
        job: the job that the helpers below speak of.
    """

    def __init__(self, folder: Path, job: str = "default.test") -> None:
        self._folder = folder
        self._job = job
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """What an agent has to be told of it."""
        return {"ADASCALE_API_URL": self.url, "ADASCALE_TOKEN": TOKEN, "ADASCALE_JOB_ID": self._job}

    def start(self) -> None:
        """Start it, on the port that it had before."""
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        with (self._folder / "api.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "adascale_api", "--port", str(self.port)),
                    *(
                        "--database",
                        f"sqlite:///{self._folder / 'api.sqlite'}",
                        "--port-file",
                        str(port_file),
                    ),
                ],
                env={**os.environ, "ADASCALE_TOKEN": TOKEN},
                stdout=log,
                stderr=log,
            )
        process = self._process
        wait_until(lambda: port_file.exists() or process.poll() is not None, "the service's start")
        assert port_file.exists(), (self._folder / "api.log").read_text()
        self.port = int(port_file.read_text())

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None

    def allocate(self, generation: int, replicas: int) -> None:
        """Write an allocation, as the controller does."""
        self.call("PUT", "/allocation", {"generation": generation, "replicas": replicas})

    def job(self) -> dict[str, Any]:
        """All that it knows of the job."""
        known: dict[str, Any] = self.call("GET", "")
        return known

    def knows_job(self) -> bool:
        """Whether it has heard of the job."""
        try:
            self.job()
        except urllib.error.HTTPError as refusal:
            if refusal.code != 404:
                raise
            return False
        return True

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Call it about the job."""
        request = urllib.request.Request(
            f"{self.url}/jobs/{self._job}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())
