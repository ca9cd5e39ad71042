"""An API server over HTTP with the objects of the command line, whose answers are those of a real one.

It stores AdaScaleJobs, pods with their output and Events, merges patches, and checks rights and tokens. It
has no CustomResourceDefinition: `tests/cluster/test_command_line.py` has the commands with a real API server.
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

    Args:
        service: the address of the metrics service behind it; None if it cannot be reached.
    """

    def __init__(self, service: str | None = None) -> None:
        self.service = service
        self.jobs: dict[tuple[str, str], Object] = {}
        self.pods: list[Object] = []
        self.logs: dict[str, list[str]] = {}
        self.events: list[Object] = []
        self.denied: set[tuple[str, str]] = set()
        """Pairs of a verb and a resource."""
        self.token = TOKEN
        self.installed = True
        self.answers: dict[tuple[str, str], tuple[int, Object]] = {}
        """Answers to requests by method and path, in place of its own."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.changed = threading.Condition()
        self._numbers = 0
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
                {"name": "here", "cluster": {"server": self.url}},
                {"name": "away", "cluster": {"server": "http://127.0.0.1:9"}},
            ],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
        }
        file.write_text(yaml.safe_dump(document))
        return file

    def number(self) -> str:
        """Return a number that it has not returned before."""
        self._numbers += 1
        return str(self._numbers)

    def add_job(
        self, name: str, namespace: str = "default", *, status: Object | None = None, **spec: Any
    ) -> Object:
        """Add a job, with a status that is for its spec."""
        job: Object = {
            "apiVersion": names.GROUP_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": name, "namespace": namespace, "uid": f"uid-{self.number()}", "generation": 1,
                "creationTimestamp": CREATED,
            },
            "spec": {"batchSize": 4, "maxReplicas": 4, **spec},
            "status": {"observedGeneration": 1, **(status or {})},
        }  # fmt: skip
        self.jobs[namespace, name] = job
        return job

    def set_status(self, name: str, namespace: str = "default", **status: Any) -> None:
        """Write the status of a job, as the operator does."""
        job = self.jobs[namespace, name]
        observed = {"observedGeneration": job["metadata"]["generation"]}
        job["status"] = {**job["status"], **observed, **status}

    def add_pod(self, job: str, replica: int, lines: list[str], state: str = "running") -> Object:
        """Add a pod of a job in the namespace `default`, with its output: times and texts."""
        pod: Object = {
            "metadata": {
                "name": f"{job}-{replica}-{self.number()}", "uid": f"uid-{self.number()}",
                "creationTimestamp": CREATED,
                "labels": {names.LABEL_JOB: job},
                "annotations": {"batch.kubernetes.io/job-completion-index": str(replica)},
            },
            "spec": {"containers": [{"name": "sidecar"}, {"name": "worker"}]},
            "status": {"containerStatuses": [{"name": "worker", "state": {state: {}}}]},
        }  # fmt: skip
        self.pods.append(pod)
        self.logs[pod["metadata"]["name"]] = lines
        return pod

    def print_line(self, pod: Object, line: str) -> None:
        """Add a line to the output of a pod."""
        with self.changed:
            self.logs[pod["metadata"]["name"]].append(line)
            self.changed.notify_all()

    def end(self, pod: Object) -> None:
        """End the container of a pod."""
        with self.changed:
            pod["status"]["containerStatuses"][0]["state"] = {"terminated": {}}
            self.changed.notify_all()

    def add_event(self, job: Object, message: str, kind: str = "Normal") -> None:
        """Add an Event about a job."""
        self.events.append(
            {
                "metadata": {"uid": f"uid-{self.number()}", "creationTimestamp": CREATED},
                "involvedObject": {"kind": names.KIND, "uid": job["metadata"]["uid"]},
                "reason": "Rescaling", "message": message, "type": kind, "lastTimestamp": CREATED,
            }
        )  # fmt: skip


@contextmanager
def serving(service: str | None = None) -> Iterator[ApiServer]:
    """An API server, for the duration of the context."""
    server = ApiServer(service)
    try:
        yield server
    finally:
        server.stop()


class _StatusError(Exception):
    """An answer with an error status, of the kind Status."""

    def __init__(self, code: int, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.body = {"kind": "Status", "code": code, "message": message, "details": details}


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _answer(self) -> None:
        target = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        self.api.requests.append((self.command, target.path, query))
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        try:
            if self.headers.get("authorization") != f"Bearer {self.api.token}":
                raise _StatusError(401, "Unauthorized")
            prepared = self.api.answers.get((self.command, target.path))
            if prepared is not None:
                self._send(*prepared)
                return
            self._route(target.path.strip("/").split("/"), query, body)
        except _StatusError as error:
            self._send(error.code, error.body)

    def _route(self, path: list[str], query: dict[str, str], body: Any) -> None:
        if path[:3] == ["apis", names.API_GROUP, names.API_VERSION]:
            if not self.api.installed:
                self._send_bytes(404, b"404 page not found\n", "text/plain")
                return
            rest = path[3:]
            namespace = rest[1] if rest[0] == "namespaces" else None
            rest = rest[2:] if namespace else rest
            if len(rest) == 1:
                self._check("list", names.PLURAL, names.API_GROUP, namespace)
                self._send(200, {"metadata": {}, "items": self._jobs(namespace)})
                return
            assert namespace is not None
            self._job(namespace, rest[1], rest[2:], query, body)
        elif path[4] == "pods":
            self._pods(path[3], path[5:], query)
        elif path[4] == "events":
            self._check("list", "events", "", path[3])
            self._send(200, {"items": [*self.api.events]})
        elif path[4] == "services":
            self._check("get", "services/proxy", "", path[3])
            self._proxy(path[5], "/".join(path[7:]))

    def _jobs(self, namespace: str | None) -> list[Object]:
        return [job for (where, _), job in sorted(self.api.jobs.items()) if namespace in (None, where)]

    def _job(self, namespace: str, name: str, rest: list[str], query: dict[str, str], body: Any) -> None:
        resource = "/".join([names.PLURAL, *rest])
        verb = self.command.lower()
        self._check(verb, resource, names.API_GROUP, namespace)
        job = self.api.jobs.get((namespace, name))
        content_type = self.headers["content-type"]
        if job is None and content_type == "application/apply-patch+yaml":
            job = self.api.add_job(name, namespace)
            job["spec"], job["status"] = {}, {}
            job["metadata"]["generation"] = 0
        if job is None:
            message = f'{names.PLURAL}.{names.API_GROUP} "{name}" not found'
            raise _StatusError(404, message, name=name)
        if verb == "patch":
            spec = {"replicaLimit": body["spec"]["replicas"]} if rest == ["scale"] else body["spec"]
            self._check_uid(job, body.get("metadata") or {})
            before = dict(job["spec"])
            job["spec"] = {field: value for field, value in {**before, **spec}.items() if value is not None}
            job["metadata"]["generation"] += job["spec"] != before
        elif verb == "delete":
            self._check_uid(job, body["preconditions"])
            del self.api.jobs[namespace, name]
        self._send(200, job)

    def _check_uid(self, job: Object, expected: Object) -> None:
        if expected.get("uid", job["metadata"]["uid"]) != job["metadata"]["uid"]:
            raise _StatusError(409, "the UID in the precondition differs")

    def _pods(self, namespace: str, rest: list[str], query: dict[str, str]) -> None:
        if not rest:
            self._check("list", "pods", "", namespace)
            label, _, job = query["labelSelector"].partition("=")
            pods = [pod for pod in self.api.pods if pod["metadata"]["labels"].get(label) == job]
            self._send(200, {"items": pods})
            return
        self._check("get", "pods/log", "", namespace)
        (pod,) = [pod for pod in self.api.pods if pod["metadata"]["name"] == rest[0]]
        (status,) = pod["status"]["containerStatuses"]
        if "waiting" in status["state"] or query["container"] != "worker":
            raise _StatusError(400, "container is waiting to start: ContainerCreating")
        self._stream(pod, query)

    def _stream(self, pod: Object, query: dict[str, str]) -> None:
        lines = self.api.logs[pod["metadata"]["name"]]
        first = max(len(lines) - int(query["tailLines"]), 0) if "tailLines" in query else 0
        if "sinceTime" in query:
            since = query["sinceTime"].removesuffix("Z")
            first = next((i for i, line in enumerate(lines) if line[: len(since)] >= since), len(lines))
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while True:
            with self.api.changed:
                ended = "terminated" in pod["status"]["containerStatuses"][0]["state"]
                new, first = lines[first:], len(lines)
                if not new and query.get("follow") == "true" and not ended:
                    self.api.changed.wait(10)
                    continue
            if not new:
                break
            content = "".join(f"{line}\n" for line in new).encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

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

    def _check(self, verb: str, resource: str, group: str, namespace: str | None) -> None:
        if (verb, resource) not in self.api.denied:
            return
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        raise _StatusError(
            403,
            f'{resource} is forbidden: User "{USER}" cannot {verb} resource "{resource}" in API group '
            f'"{group}" {where}',
        )

    def _send(self, code: int, body: Object) -> None:
        self._send_bytes(code, json.dumps(body).encode(), "application/json")

    def _send_bytes(self, code: int, content: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
