"""The cluster that a command is for, and the errors of its API server.

Apart from `kubernetes_api`, so that commands for this machine import no Kubernetes client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adascale_core.errors import AdaScaleError
from adascale_core.failures import EXIT_SERVICE_UNAVAILABLE

ApiObject = dict[str, Any]
Query = Sequence[tuple[str, str]]
CALL_TIMEOUT = 15.0
"""Seconds to wait for an answer."""


class ClusterAccessError(AdaScaleError):
    """A call to the API server failed."""


class KubeconfigError(ClusterAccessError):
    """No configuration names a cluster that can be used."""

    exit_code = 2


class ApiServerUnreachableError(ClusterAccessError):
    """The API server does not answer."""

    exit_code = EXIT_SERVICE_UNAVAILABLE


class RejectedError(ClusterAccessError):
    """The API server answers with another error status.

    Args:
        message: its message.
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(f"the API server answers {status}: {message}")
        self.message = message
        self.status = status


@dataclass(frozen=True)
class ClusterTarget:
    """The cluster and the namespace that a command is for: kubectl's options of these names."""

    context: str | None = None  # the context of the kubeconfig; None for its current context
    namespace: str | None = None  # the namespace; None for that of the context
    kubeconfig: Path | None = None  # the file; None for those in KUBECONFIG, or else ~/.kube/config
