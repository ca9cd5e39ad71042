"""What the operator is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class OperatorSettings:
    """Settings of the operator.

    Args:
        api_url: base URL of the metrics service, as the operator and the pods reach it.
        pod_api_url: as the pods reach it, where that is another one.
        token_file: the operator's own token for it, if it asks for one; read again as it is renewed.
        namespace: the only namespace to look at; none: all.
        lease_namespace: where the lease is that lets one operator work at a time; none: without.
        identity: the name of this operator among others.
        liveness: host and port of the liveness probe; none: without.
    """

    api_url: str
    pod_api_url: str | None = None
    token_file: Path | None = None
    namespace: str | None = None
    lease_namespace: str | None = None
    identity: str = "operator"
    liveness: str | None = None
