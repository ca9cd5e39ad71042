"""The HTTP client of the metrics service, for workers and the controller.

This package may import `adascale_core` and urllib3. It makes no decisions: every call sends one request,
parses the answer into a message of the core, or raises a `ServiceError`. Callers choose whether to retry,
after the times that `Backoff` gives.
"""

from adascale_client.client import MetricsServiceClient
from adascale_client.transport import (
    Backoff,
    ServiceError,
    ServiceRefusedError,
    ServiceTransport,
    ServiceUnreachableError,
)

__all__ = [
    "Backoff",
    "MetricsServiceClient",
    "ServiceError",
    "ServiceRefusedError",
    "ServiceTransport",
    "ServiceUnreachableError",
]
