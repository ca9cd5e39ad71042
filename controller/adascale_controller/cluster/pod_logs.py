"""Prints the output of a job's replicas, each line with the index of its replica."""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO
from urllib.parse import quote

from adascale_controller.cluster.api import Api, ApiObject, Query, pods_path
from adascale_controller.cluster.cluster_job import ClusterJob
from adascale_controller.cluster.cluster_jobs import NoSuchJobError
from adascale_controller.cluster.errors import ApiServerUnreachableError, ClusterError, RejectedError
from adascale_controller.operator.types.kubernetes import replica_index
from adascale_controller.worker_container import DEFAULT_CONTAINER
from adascale_core import names
from adascale_core.errors import AdaScaleError

INTERVAL = 1.0
"""Seconds between two reads of the pods of a job."""
_MAX_QUEUED = 10_000
"""Lines that are read ahead of the output."""


class NoLogError(AdaScaleError):
    """A job or a replica without output."""


@dataclass(frozen=True)
class ReplicaPod:
    """A pod of a job."""

    raw: ApiObject

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Its uid."""
        return str(self.raw["metadata"]["uid"])

    @property
    def replica(self) -> int:
        """The index of its replica: that of the pod, after those of the core if it is an extra pod."""
        return replica_index(self.raw["metadata"])

    @property
    def created(self) -> str:
        """When it was created."""
        return str(self.raw["metadata"]["creationTimestamp"])

    @property
    def container(self) -> str:
        """The container that trains."""
        annotations = self.raw["metadata"]["annotations"]
        for name in (names.ANNOTATION_WORKER, DEFAULT_CONTAINER):
            if name in annotations:
                return str(annotations[name])
        containers = [str(each["name"]) for each in self.raw["spec"]["containers"]]
        return names.WORKER_CONTAINER if names.WORKER_CONTAINER in containers else containers[0]

    @property
    def state(self) -> str:
        """The state of that container: `waiting`, `running` or `terminated`."""
        statuses = self.raw.get("status", {}).get("containerStatuses") or ()
        states: Any = next((each.get("state") for each in statuses if each["name"] == self.container), None)
        return next(iter(states), "waiting") if states else "waiting"


class PodLogs:
    """The output of the replicas of a job."""

    def __init__(
        self, api: Api, namespace: str, name: str, output: TextIO, replica: int | None, tail: int | None
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._output = output
        self._replica = replica
        self._tail = tail

    def pods(self) -> list[ReplicaPod]:
        """Return the pods of the replicas, those of earlier attempts included, by creation."""
        query = [("labelSelector", f"{names.LABEL_JOB}={self._name}")]
        items = self._api.call("GET", pods_path(self._namespace), query)["items"]
        pods = [ReplicaPod(raw) for raw in items if replica_index(raw["metadata"]) >= 0]
        return sorted(pods, key=lambda pod: (pod.created, pod.replica))

    def print_present(self) -> None:
        """Print what there is, by time."""
        pods = self._chosen(self.pods())
        with ExitStack() as stack:
            opened = []
            for pod in pods:
                lines = self.open_lines(stack, pod, self.query(pod, follow=False, tail=self._tail))
                if lines is not None:
                    opened.append(_of_replica(pod.replica, lines))
            if not opened:
                raise NoLogError(self._without_output(pods))
            # The lines of a pod are in order of their times, which the kubelet writes with a fixed width.
            for _, replica, text in heapq.merge(*opened, key=lambda line: line[0]):
                self._print(replica, text)
        self._output.flush()

    def follow(self, find_job: Callable[[], ClusterJob]) -> None:
        """Print what there is, and what the replicas print, until the job has ended or has stopped.

        Pods that are created later are followed too.
        """
        lines: queue.Queue[tuple[int, bytes]] = queue.Queue(_MAX_QUEUED)
        streams: dict[str, _Stream] = {}
        first = True
        while True:
            # Asked before the pods: what they print before the end is printed.
            ended = not _may_print(find_job)
            for pod in self._chosen(self.pods()):
                stream = streams.get(pod.uid)
                if pod.state == "waiting" or (stream is not None and not stream.lacks_lines):
                    continue
                streams[pod.uid] = stream = stream or _Stream(self, pod, lines, self._tail if first else None)
                stream.start(pod)
            first = False
            self._drain(lines, until_empty=False)
            running = [stream for stream in streams.values() if stream.is_alive]
            if ended and not running:
                self._drain(lines, until_empty=True)
                self._raise_failure(streams)
                return
            self._raise_failure(streams)

    def _drain(self, lines: queue.Queue[tuple[int, bytes]], *, until_empty: bool) -> None:
        """Print queued lines for about an interval, or until there are no more."""
        deadline = time.monotonic() + INTERVAL
        while True:
            left = 0.0 if until_empty else deadline - time.monotonic()
            try:
                replica, text = lines.get(timeout=left) if left > 0 else lines.get_nowait()
            except queue.Empty:
                self._output.flush()
                return
            self._print(replica, text)
            if lines.empty():
                self._output.flush()

    def _raise_failure(self, streams: dict[str, _Stream]) -> None:
        for stream in streams.values():
            if stream.failure is not None:
                raise stream.failure

    def open_lines(
        self, stack: ExitStack, pod: ReplicaPod, query: Query
    ) -> Iterator[tuple[bytes, bytes]] | None:
        """Return the lines of a pod with their times; None if it has no output (yet, or any more)."""
        path = f"{pods_path(self._namespace)}/{quote(pod.name, safe='')}/log"
        try:
            lines = stack.enter_context(self._api.lines(path, query))
        except RejectedError as error:
            # The container has not started, or the pod was deleted.
            if error.status in {400, 404}:
                return None
            raise
        return _timed(lines)

    def query(self, pod: ReplicaPod, *, follow: bool, tail: int | None, since: bytes = b"") -> Query:
        """Return the query for the lines of a pod, with their times."""
        query = [("container", pod.container), ("timestamps", "true")]
        if follow:
            query.append(("follow", "true"))
        if since:
            query.append(("sinceTime", since.decode()))
        elif tail is not None:
            query.append(("tailLines", str(tail)))
        return query

    def _chosen(self, pods: list[ReplicaPod]) -> list[ReplicaPod]:
        return [pod for pod in pods if self._replica in (None, pod.replica)]

    def _print(self, replica: int, text: bytes) -> None:
        prefix = f"[{replica}] " if self._replica is None else ""
        self._output.write(f"{prefix}{text.decode(errors='replace')}\n")

    def _without_output(self, pods: list[ReplicaPod]) -> str:
        job = f"job {self._name} in namespace {self._namespace}"
        if self._replica is not None:
            replicas = sorted({pod.replica for pod in self.pods()})
            hint = (
                f"the replicas with pods are {', '.join(map(str, replicas))}"
                if replicas
                else "it has no pods"
            )
            return f"replica {self._replica} of {job} has no output; {hint}"
        if pods:
            return f"{job} has no output: no container has started; `adascale status` shows why"
        return f"{job} has no pods: they were deleted with their output, or none has been created"


class _Stream:
    """Reads the output of a pod in a thread, while its container runs."""

    def __init__(
        self, logs: PodLogs, pod: ReplicaPod, lines: queue.Queue[tuple[int, bytes]], tail: int | None
    ) -> None:
        self._logs = logs
        self._replica = pod.replica
        self._lines = lines
        self._tail = tail
        self._thread: threading.Thread | None = None
        self._last = b""
        self._complete = False
        self.failure: ClusterError | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it reads."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def lacks_lines(self) -> bool:
        """Whether it has to be started: it does not read, and the container may have printed more."""
        return not self.is_alive and not self._complete and self.failure is None

    def start(self, pod: ReplicaPod) -> None:
        """Read in a thread, from the last line that was read."""
        # What is read after the container has ended is all.
        final = pod.state == "terminated"
        self._thread = threading.Thread(target=self._read, args=(pod, final), daemon=True)
        self._thread.start()

    def _read(self, pod: ReplicaPod, final: bool) -> None:
        since = self._last
        query = self._logs.query(pod, follow=True, tail=self._tail, since=since_time(since))
        try:
            with ExitStack() as stack:
                for at, text in self._logs.open_lines(stack, pod, query) or ():
                    if at > since:
                        self._last = at
                        self._lines.put((self._replica, text))
            self._complete = final
        except ApiServerUnreachableError:
            pass  # It is read again, from the last line.
        except ClusterError as error:
            self.failure = error


def _may_print(find_job: Callable[[], ClusterJob]) -> bool:
    """Whether a job may start replicas that print something, or has replicas that do."""
    try:
        job = find_job()
    except NoSuchJobError:
        return False
    return not job.has_ended and not (job.is_stopped and job.is_observed and not job.runs)


def _timed(lines: Iterator[bytes]) -> Iterator[tuple[bytes, bytes]]:
    for line in lines:
        at, _, text = line.partition(b" ")
        yield at, text


def _of_replica(replica: int, lines: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, int, bytes]]:
    for at, text in lines:
        yield at, replica, text


def since_time(at: bytes) -> bytes:
    """Return the time of a line as `sinceTime` accepts it; empty for none.

    Lines have the time zone of their node.
    """
    if not at:
        return b""
    return datetime.fromisoformat(at.decode()).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
