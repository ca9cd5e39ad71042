"""The settings of the operator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adascale_controller.operator.types.workload import PodSettings
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
        request_nodes: whether replicas that do not fit are requested, so that an autoscaler adds nodes, where
            the spec of a job does not say.
        fairness: of the weights of jobs in the decision, from 0 (short jobs first) to 1 (equal weights); None
            for the default, which depends on the types of accelerators.
        fs_group: whether volumes get a group that may write to them, where a template sets none.
        tls_secret: namespace and name of the Secret with the certificate of the metrics service and that of
            its authority. None if it has no TLS, or a certificate of an authority of the system.
        tls_external: whether another program makes and renews this Secret.
        require_tls: whether pods that were made without TLS are replaced.
    """

    api_url: str
    pod_api_url: str | None = None
    token_file: Path | None = None
    namespace: str | None = None
    lease_namespace: str | None = None
    identity: str = "operator"
    liveness: str | None = None
    accelerator_label: str = DEFAULT_ACCELERATOR_LABEL
    request_nodes: bool = False
    fairness: float | None = None
    fs_group: bool = True
    tls_secret: tuple[str, str] | None = None
    tls_external: bool = False
    require_tls: bool = False

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
