"""The real operator as a process that counts its calls.

python operator_process.py --count FILE -- OPTIONS OF THE OPERATOR
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


class OperatorProcess:
    """The operator in a process of its own.

    Args:
        kubeconfig: the kubeconfig of the cluster.
        api_url, token_file: the metrics service, and the operator's token for it.
        folder: the folder for its log and its counts.
        options: command line options of the operator.
    """

    def __init__(
        self,
        kubeconfig: str,
        api_url: str,
        token_file: Path,
        folder: Path,
        *options: str,
    ) -> None:
        self._counts = folder / "calls.json"
        self._log = folder / "operator.log"
        self._counts.unlink(missing_ok=True)
        arguments = ["--api-url", api_url, "--token-file", str(token_file), *options]
        environ: Mapping[str, str] = {**os.environ, "KUBECONFIG": kubeconfig}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--count", str(self._counts), "--", *arguments],
                stdout=log,
                stderr=log,
                env=environ,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def calls(self) -> Counter[str]:
        """The number of its calls, by kind."""
        return Counter(json.loads(self._counts.read_text())) if self._counts.exists() else Counter()

    @property
    def memory(self) -> int:
        """Its resident memory, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    @property
    def cpu(self) -> float:
        """Its processor time, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal and wait until it has ended. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


# -- in the process -----------------------------------------------------------------------------------------


class _Calls:
    """Counts the calls of the process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def record(self, server: str, method: str, url: str) -> None:
        """Record a call before it is made."""
        path = urlsplit(url)
        kind = "WATCH" if "watch=true" in path.query.lower() else method
        with self._lock:
            self._counts[f"{server} {kind} {_resource(path.path)}"] += 1
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self._counts))
            new.rename(self._file)


def _resource(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    if "namespaces" in parts[:-2]:
        parts = parts[parts.index("namespaces") + 2 :]
        return "/".join([parts[0], *parts[2:]])
    return parts[-1] if parts[:1] != ["jobs"] else "/".join(["jobs", *parts[2:]])


def _count_calls(calls: _Calls) -> None:
    """Record all HTTP calls: those of kopf, of `KubernetesCluster` and of the metrics service's client."""
    import aiohttp
    import urllib3

    request, urlopen = aiohttp.ClientSession._request, urllib3.PoolManager.urlopen

    async def counted_request(self: Any, method: str, url: Any, **options: Any) -> Any:
        parameters = options.get("params") or {}
        query = "&".join(f"{key}={value}" for key, value in dict(parameters).items())
        calls.record("cluster", method.upper(), f"{url}{'&' if '?' in str(url) else '?'}{query}")
        return await request(self, method, url, **options)

    def counted_urlopen(self: Any, method: str, url: str, *rest: Any, **options: Any) -> Any:
        calls.record("service", method, url)
        return urlopen(self, method, url, *rest, **options)

    setattr(aiohttp.ClientSession, "_request", counted_request)  # noqa: B010, setattr avoids repeating the types
    setattr(urllib3.PoolManager, "urlopen", counted_urlopen)  # noqa: B010


def main() -> None:
    """Run the operator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=Path, required=True)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    _count_calls(_Calls(arguments.count))
    from adascale_controller.cli import main as adascale

    sys.argv = ["adascale", "operator", *arguments.options]
    adascale()


if __name__ == "__main__":
    main()
