"""A metrics service in a process of its own, with one job."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from adascale_core.messages.allocation import Allocation
from api.client import TOKEN, ServiceProcess
from support.certificates import TlsFiles


class Service(ServiceProcess):
    """A metrics service with a job.

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
        self._address = address
        self.job_id = job
        listens = () if address == "127.0.0.1" else ("--host", "::")
        super().__init__(folder, *listens, *(() if tls is None else tls.options))

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

    def restart_without_data(self) -> None:
        """Kill the service, remove its database, and start it again."""
        self.kill()
        for path in self.folder.glob("service.db*"):
            path.unlink()
        self.start()

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
