"""A real metrics service in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from adascale_core.messages.allocation import Allocation
from support.certificates import TlsFiles
from support.fast_python import Program
from support.launch import wait_until

TOKEN = "a-token-for-tests"


class Service:
    """A metrics service with its data in a folder, which can be killed and started again.

    Args:
        folder: the folder of its database and port file.
        job: the id of the job that the methods use. It may be changed.
        address: where it is reached; it listens on all addresses if this is not the default.
        tls: its certificate. None for a service without TLS.
    """

    def __init__(
        self,
        folder: Path,
        job: str = "default.test",
        *,
        address: str = "127.0.0.1",
        tls: TlsFiles | None = None,
    ) -> None:
        self._tls = tls
        self._folder = folder
        self._address = address
        self.job_id = job
        self._process: Program | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """The base URL."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"{'https' if self._tls is not None else 'http'}://{host}:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that an agent needs to reach the service."""
        environ = {"ADASCALE_API_URL": self.url, "ADASCALE_TOKEN": TOKEN, "ADASCALE_JOB_ID": self.job_id}
        return environ if self._tls is None else {**environ, "ADASCALE_CA_FILE": str(self._tls.ca)}

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not stopped."""
        return self._process is not None

    def start(self) -> None:
        """Start the service, on the same port as before."""
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        database = f"sqlite:///{self._folder / 'api.sqlite'}"
        options = ["--port", str(self.port), "--database", database, "--port-file", str(port_file)]
        if self._address != "127.0.0.1":
            options += ["--host", "::"]
        options += self._tls.options if self._tls is not None else ()
        environ = {**os.environ, "ADASCALE_TOKEN": TOKEN}
        log = self._folder / "api.log"
        process = self._process = Program(["-m", "adascale_api", *options], environ, log)
        wait_until(lambda: port_file.exists() or process.code is not None, "the start of the service")
        assert port_file.exists(), log.read_text()
        self.port = int(port_file.read_text())

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal, and wait for the service to exit."""
        if (process := self._process) is not None:
            self.send_signal(number)
            wait_until(lambda: process.code is not None, "the end of the service", 10)
            process.close()
            self._process = None

    def restart_without_data(self) -> None:
        """Kill the service, remove its database, and start it again."""
        self.stop(signal.SIGKILL)
        for path in self._folder.glob("api.sqlite*"):
            path.unlink()
        self.start()

    def send_signal(self, number: int) -> None:
        """Send a signal to the service."""
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def allocate(self, generation: int, replicas: int, spares: int = 0) -> None:
        """Set an allocation, as the controller does."""
        self.call("PUT", "/allocation", Allocation(generation, replicas, spares=spares).to_json())

    def job(self) -> dict[str, Any]:
        """Return the stored job."""
        stored: dict[str, Any] = self.call("GET", "")
        return stored

    def job_exists(self) -> bool:
        """Whether the job exists."""
        try:
            self.job()
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return False
        return True

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send a request for the job, and return the parsed answer."""
        request = urllib.request.Request(
            f"{self.url}/jobs/{self.job_id}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
        )
        context = ssl.create_default_context(cafile=self._tls.ca) if self._tls is not None else None
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return json.loads(answer.read())
