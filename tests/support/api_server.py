"""An API server over HTTP with the AdaScaleJobs that the command line reads, which answers as a real one.

It checks rights and tokens. `tests/cluster/test_command_line.py` has the commands with a real API server.
"""

from __future__ import annotations

import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from adascale_core import names

Object = dict[str, Any]
TOKEN = "a-token-of-a-user"
USER = "jane"
CREATED = "2026-11-27T04:00:00Z"


class ApiServer:
    """An API server.

    Attributes:
        service: the address of the metrics service behind it; None if it cannot be reached.
    """

    def __init__(self) -> None:
        self.service: str | None = None
        self.jobs: dict[tuple[str, str], Object] = {}
        self.denied: set[tuple[str, str]] = set()
        """Pairs of a verb and a resource."""
        self.token = TOKEN
        self.installed = True
        self.answers: dict[tuple[str, str], tuple[int, Object]] = {}
        """Answers to requests by method and path, in place of its own."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def write_kubeconfig(self, file: Path, namespace: str | None = None) -> Path:
        """Write a kubeconfig for this server."""
        return write_kubeconfig(file, self.url, namespace)

    def add_job(
        self, name: str, namespace: str = "default", *, status: Object | None = None, **spec: Any
    ) -> Object:
        """Add a job, with a status that is for its spec."""
        job: Object = {
            "apiVersion": names.GROUP_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": name, "namespace": namespace, "uid": f"uid-{len(self.jobs)}", "generation": 1,
                "creationTimestamp": CREATED,
            },
            "spec": {"batchSize": 4, "maxReplicas": 4, **spec},
            "status": {"observedGeneration": 1, **(status or {})},
        }  # fmt: skip
        self.jobs[namespace, name] = job
        return job


def write_kubeconfig(file: Path, server: str, namespace: str | None = None) -> Path:
    """Write a kubeconfig with the context `prod`, and one of another cluster, `away`."""
    context = {"cluster": "here", "user": "me", **({"namespace": namespace} if namespace else {})}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "prod",
        "contexts": [
            {"name": "prod", "context": context},
            {"name": "away", "context": {"cluster": "away", "user": "me"}},
        ],
        "clusters": [
            {"name": "here", "cluster": {"server": server}},
            {"name": "away", "cluster": {"server": "http://127.0.0.1:9"}},
        ],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
    }
    file.write_text(yaml.safe_dump(document))
    return file


@contextmanager
def serving() -> Iterator[ApiServer]:
    """An API server, for the duration of the context."""
    server = ApiServer()
    try:
        yield server
    finally:
        server.stop()


class _StatusError(Exception):
    """An answer with an error status, of the kind Status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.body = {"kind": "Status", "code": code, "message": message}


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer()

    def _answer(self) -> None:
        target = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        self.api.requests.append((self.command, target.path, query))
        try:
            if self.headers.get("authorization") != f"Bearer {self.api.token}":
                raise _StatusError(401, "Unauthorized")
            prepared = self.api.answers.get((self.command, target.path))
            if prepared is not None:
                self._send(*prepared)
                return
            self._route(target.path.strip("/").split("/"))
        except _StatusError as error:
            self._send(error.code, error.body)

    def _route(self, path: list[str]) -> None:
        if path[:3] == ["apis", names.API_GROUP, names.API_VERSION] and self.api.installed:
            namespace, name = path[4], path[6:]
            self._check("get" if name else "list", names.PLURAL, names.API_GROUP, namespace)
            if not name:
                items = [job for (where, _), job in sorted(self.api.jobs.items()) if where == namespace]
                self._send(200, {"metadata": {}, "items": items})
                return
            job = self.api.jobs.get((namespace, name[0]))
            if job is None:
                message = f'{names.PLURAL}.{names.API_GROUP} "{name[0]}" not found'
                raise _StatusError(404, message)
            self._send(200, job)
        elif path[4:5] == ["services"]:
            self._check("get", "services/proxy", "", path[3])
            self._proxy(path[5], "/".join(path[7:]))
        else:
            self._send_bytes(404, b"404 page not found\n", "text/plain")

    def _proxy(self, service: str, path: str) -> None:
        if service.removeprefix("https:") != f"{names.API_SERVICE}:{names.DEFAULT_API_PORT}":
            raise _StatusError(404, f'services "{service}" not found')
        if self.api.service is None:
            raise _StatusError(
                503, "error trying to reach service: dial tcp 10.0.0.7:8265: connect: no route"
            )
        if service.startswith("https:") and self.api.service.startswith("http:"):
            message = "error trying to reach service: tls: first record does not look like a TLS handshake"
            raise _StatusError(503, message)
        try:
            # Without the authorization of the user, and without verifying a certificate, as a real one.
            context = ssl._create_unverified_context()
            with urllib.request.urlopen(f"{self.api.service}/{path}", timeout=10, context=context) as answer:
                self._send_bytes(200, answer.read(), "application/json")
        except urllib.error.HTTPError as error:
            self._send_bytes(error.code, error.read(), "application/json")

    def _check(self, verb: str, resource: str, group: str, namespace: str) -> None:
        if (verb, resource) not in self.api.denied:
            return
        raise _StatusError(
            403,
            f'{resource} is forbidden: User "{USER}" cannot {verb} resource "{resource}" in API group '
            f'"{group}" in the namespace "{namespace}"',
        )

    def _send(self, code: int, body: Object) -> None:
        self._send_bytes(code, json.dumps(body).encode(), "application/json")

    def _send_bytes(self, code: int, content: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
