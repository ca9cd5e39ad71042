"""The settings of the operator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adascale_controller.operator.types.workload import PodSettings
from adascale_core.names import DEFAULT_ACCELERATOR_LABEL


@dataclass(frozen=True)
class OperatorSettings:
    """The settings of the operator."""

    api_url: str  # base URL of the metrics service, as the operator reaches it
    pod_api_url: str | None = None  # base URL of the metrics service, as pods reach it. None for `api_url`.
    # file with the operator's token for the metrics service. It is read again for each call.
    token_file: Path | None = None
    namespace: str | None = None  # the only namespace to watch. None for all namespaces.
    # namespace of the lease that lets one operator run at a time. None for no lease.
    lease_namespace: str | None = None
    identity: str = "operator"  # the name of this operator in the lease and in Events
    liveness: str | None = None  # host and port of the liveness probe. None for no probe.
    # the label of nodes that names the type of their accelerators. Empty if types are not distinguished.
    accelerator_label: str = DEFAULT_ACCELERATOR_LABEL
    # whether replicas that do not fit are requested, so that an autoscaler adds nodes, where the spec of
    # a job does not say
    request_nodes: bool = False
    # of the weights of jobs in the decision, from 0 (short jobs first) to 1 (equal weights); None for the
    # default, which depends on the types of accelerators
    fairness: float | None = None
    fs_group: bool = True  # whether volumes get a group that may write to them, where a template sets none
    # namespace and name of the Secret with the certificate of the metrics service and that of its
    # authority. None if it has no TLS, or a certificate of an authority of the system.
    tls_secret: tuple[str, str] | None = None
    tls_external: bool = False  # whether another program makes and renews this Secret
    require_tls: bool = False  # whether pods that were made without TLS are replaced

    @property
    def pod_settings(self) -> PodSettings:
        """The settings that all pods get."""
        url = self.pod_api_url or self.api_url
        may_be_plain = url.startswith("https://") and not self.require_tls
        return PodSettings(
            url,
            self.accelerator_label,
            self.fs_group,
            has_authority=self.tls_secret is not None,
            plain_url=url.replace("https://", "http://", 1) if may_be_plain else None,
        )
