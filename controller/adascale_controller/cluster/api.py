"""The calls of the API server that the commands make, as a protocol, and the paths of its objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from adascale_core import names

ApiObject = dict[str, Any]
Query = Sequence[tuple[str, str]]

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply. JSON is a part of YAML."""
FIELD_MANAGER = "adascale"
"""The owner of the fields that the commands set."""
CALL_TIMEOUT = 15.0
"""Seconds to wait for an answer."""


@dataclass(frozen=True)
class ClusterTarget:
    """The cluster and the namespace that a command is for, as kubectl's options of these names
    select them.
    """

    context: str | None = None  # the context of the kubeconfig; None for its current context
    namespace: str | None = None  # the namespace; None for that of the context
    kubeconfig: Path | None = None  # the file; None for those in KUBECONFIG, or else ~/.kube/config


class Api(Protocol):
    """The API server, with the rights of the user. Threads may share it.

    Calls raise a `ClusterError`.
    """

    @property
    def context(self) -> str:
        """The context of the kubeconfig, for messages; empty inside a pod."""

    @property
    def namespace(self) -> str:
        """The namespace of jobs that are named without one."""

    def call(
        self,
        method: str,
        path: str,
        query: Query = (),
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
        timeout: float = CALL_TIMEOUT,
    ) -> Any:
        """Make a call, and return the parsed JSON of the answer; None if it has no body."""

    def lines(self, path: str, query: Query = ()) -> AbstractContextManager[Iterator[bytes]]:
        """Yield the lines of an answer as they arrive, without their line breaks."""


def jobs_path(namespace: str | None) -> str:
    """Return the path of the AdaScaleJobs of a namespace; None for those of all namespaces."""
    scope = "" if namespace is None else f"/namespaces/{quote(namespace, safe='')}"
    return f"/apis/{names.GROUP_VERSION}{scope}/{names.PLURAL}"


def job_path(namespace: str, name: str) -> str:
    """Return the path of an AdaScaleJob."""
    return f"{jobs_path(namespace)}/{quote(name, safe='')}"


def pods_path(namespace: str) -> str:
    """Return the path of the pods of a namespace."""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"


def events_path(namespace: str) -> str:
    """Return the path of the Events of a namespace."""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
