"""The HTTP client of the metrics service, for workers and the controller.

This package may import `adascale_core` and urllib3. It makes no decisions: every call sends one request,
parses the answer into a message of the core, or raises a `ServiceError`. Retrying is the caller's choice.
"""

from adascale_client.client import JobClient, MetricsServiceClient
from adascale_client.errors import ServiceError, ServiceRefusedError, ServiceUnreachableError

__all__ = [
    "JobClient",
    "MetricsServiceClient",
    "ServiceError",
    "ServiceRefusedError",
    "ServiceUnreachableError",
]
