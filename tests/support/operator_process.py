"""The real operator as a process, whose calls are counted, or which dies before one of its writes.

python operator_process.py [--count FILE] [--die-before N] -- OPTIONS OF THE OPERATOR
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
NO_CHANGE = ("/selfsubjectaccessreviews", "/leases")
"""What is written without a change of anything that belongs to a job."""


class OperatorProcess:
    """The operator, started on its own.

    Args:
        kubeconfig: of the cluster.
        api_url, token_file: the metrics service, and the operator's token for it.
        folder: for its log and its counts.
        options: of the operator.
        die_before: before which of its writes, from 0, it dies.
    """

    def __init__(
        self,
        kubeconfig: str,
        api_url: str,
        token_file: Path,
        folder: Path,
        *options: str,
        die_before: int | None = None,
    ) -> None:
        self._counts = folder / "calls.json"
        self._log = folder / "operator.log"
        self._counts.unlink(missing_ok=True)
        fate = [] if die_before is None else ["--die-before", str(die_before)]
        told = ["--api-url", api_url, "--token-file", str(token_file), *options]
        environ: Mapping[str, str] = {**os.environ, "KUBECONFIG": kubeconfig}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--count", str(self._counts), *fate, "--", *told],
                stdout=log,
                stderr=log,
                env=environ,
            )

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    @property
    def calls(self) -> Counter[str]:
        """How often it has made each kind of call."""
        return Counter(json.loads(self._counts.read_text())) if self._counts.exists() else Counter()

    @property
    def memory(self) -> int:
        """Bytes of memory that it has."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    @property
    def cpu(self) -> float:
        """Seconds of processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


# -- in the process -----------------------------------------------------------------------------------------


class _Calls:
    """Counts the calls of the process, and ends it before one of its writes."""

    def __init__(self, file: Path, die_before: int | None) -> None:
        self._file = file
        self._die_before = die_before
        self._counts: Counter[str] = Counter()
        self._writes = 0
        self._lock = Lock()

    def take_in(self, where: str, method: str, url: str) -> None:
        """One call is about to be made."""
        path = urlsplit(url)
        kind = "WATCH" if "watch=true" in path.query.lower() else method
        with self._lock:
            self._counts[f"{where} {kind} {_resource(path.path)}"] += 1
            if method in WRITES and not any(part in path.path for part in NO_CHANGE):
                if self._writes == self._die_before:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._writes += 1
            beside = self._file.with_suffix(".new")
            beside.write_text(json.dumps(self._counts))
            beside.rename(self._file)


def _resource(path: str) -> str:
    """The kind of thing that a path is about."""
    parts = [part for part in path.split("/") if part]
    if "namespaces" in parts[:-2]:
        parts = parts[parts.index("namespaces") + 2 :]
        return "/".join([parts[0], *parts[2:]])
    return parts[-1] if parts[:1] != ["jobs"] else "/".join(["jobs", *parts[2:]])


def _spy(calls: _Calls) -> None:
    """Have all calls over the network counted: kopf's, those of `Cluster`, those to the service."""
    import aiohttp
    import urllib3

    asked, sent = aiohttp.ClientSession._request, urllib3.PoolManager.urlopen

    async def ask(self: Any, method: str, url: Any, **options: Any) -> Any:
        parameters = options.get("params") or {}
        query = "&".join(f"{key}={value}" for key, value in dict(parameters).items())
        calls.take_in("cluster", method.upper(), f"{url}{'&' if '?' in str(url) else '?'}{query}")
        return await asked(self, method, url, **options)

    def send(self: Any, method: str, url: str, *rest: Any, **options: Any) -> Any:
        calls.take_in("service", method, url)
        return sent(self, method, url, *rest, **options)

    setattr(aiohttp.ClientSession, "_request", ask)  # noqa: B010, since the types are not to be repeated
    setattr(urllib3.PoolManager, "urlopen", send)  # noqa: B010


def main() -> None:
    """Run the operator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=Path, required=True)
    parser.add_argument("--die-before", type=int)
    parser.add_argument("options", nargs="*")
    told = parser.parse_args()
    _spy(_Calls(told.count, told.die_before))
    from adascale_controller.cli import main as adascale

    sys.argv = ["adascale", "operator", *told.options]
    adascale()


if __name__ == "__main__":
    main()
