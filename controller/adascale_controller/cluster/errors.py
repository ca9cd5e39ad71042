"""The errors of calls to the API server.

ClusterError
├── NoClusterError             no kubeconfig, or no such context
├── ApiServerUnreachableError  the API server does not answer
├── CredentialsError           it does not know the user: missing or expired credentials
├── NotPermittedError          the user lacks a right
├── NotInstalledError          the cluster does not know AdaScaleJobs
└── RejectedError              another answer with an error status
"""

from __future__ import annotations

from adascale_core.errors import AdaScaleError
from adascale_core.failures import EXIT_SERVICE_UNAVAILABLE


class ClusterError(AdaScaleError):
    """A call to the API server failed."""


class NoClusterError(ClusterError):
    """No configuration names a cluster that can be used."""

    exit_code = 2


class ApiServerUnreachableError(ClusterError):
    """The API server does not answer."""

    exit_code = EXIT_SERVICE_UNAVAILABLE


class CredentialsError(ClusterError):
    """The API server does not know the user."""


class NotPermittedError(ClusterError):
    """The user lacks a right."""


class NotInstalledError(ClusterError):
    """The cluster does not know AdaScaleJobs."""


class RejectedError(ClusterError):
    """The API server answers with another error status.

    Args:
        message: its message.
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(f"the API server answers {status}: {message}")
        self.message = message
        self.status = status
