"""The settings of the operator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adascale_core.names import DEFAULT_ACCELERATOR_LABEL


@dataclass(frozen=True)
class OperatorSettings:
    """The settings of the operator.

    Args:
        api_url: base URL of the metrics service, as the operator reaches it.
        pod_api_url: base URL of the metrics service, as pods reach it. None for `api_url`.
        token_file: file with the operator's token for the metrics service. It is read again for each call.
        namespace: the only namespace to watch. None for all namespaces.
        lease_namespace: namespace of the lease that lets one operator run at a time. None for no lease.
        identity: the name of this operator in the lease and in Events.
        liveness: host and port of the liveness probe. None for no probe.
        accelerator_label: the label of nodes that names the type of their accelerators. Empty if types are
            not distinguished.
    """

    api_url: str
    pod_api_url: str | None = None
    token_file: Path | None = None
    namespace: str | None = None
    lease_namespace: str | None = None
    identity: str = "operator"
    liveness: str | None = None
    accelerator_label: str = DEFAULT_ACCELERATOR_LABEL
