"""The errors of the metrics service's client.

ServiceError
├── ServiceUnreachableError    no answer, or an answer that is not the metrics service's
└── ServiceRefusedError        an answer with an error status
"""

from __future__ import annotations

from adascale_core.errors import AdaScaleError
from adascale_core.failures.exit_codes import EXIT_SERVICE_UNAVAILABLE


class ServiceError(AdaScaleError):
    """A call of the metrics service failed."""


class ServiceUnreachableError(ServiceError):
    """The metrics service does not answer, or another program answers at its address."""

    exit_code = EXIT_SERVICE_UNAVAILABLE


class ServiceRefusedError(ServiceError):
    """The metrics service answers with an error status.

    Args:
        message: the reason that the service gives.
        status: the HTTP status.
        retry_after: seconds after which the answer may differ; None if the service does not say.
    """

    def __init__(self, message: str, status: int, retry_after: float | None = None) -> None:
        super().__init__(f"the metrics service answers {status}: {message}")
        self.status = status
        self.retry_after = retry_after
