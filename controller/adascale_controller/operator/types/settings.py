"""The names of Kueue, and the settings of the operator and of the pods that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_core import names

KUEUE_GROUP: Final = "kueue.x-k8s.io"
QUEUE_NAME: Final = names.LABEL_QUEUE
KUEUE_FINALIZER: Final = f"{KUEUE_GROUP}/managed"
"""The finalizer of a pod until Kueue no longer counts it."""
POD_GROUP: Final = f"{KUEUE_GROUP}/pod-group-name"
"""Label of pods that Kueue admits together, and the name of their Workload."""
POD_GROUP_SIZE: Final = f"{KUEUE_GROUP}/pod-group-total-count"
"""Annotation of these pods: their number."""
_PREFIXES: Final = (f"{KUEUE_GROUP}/", f"provreq.{KUEUE_GROUP}/")


@dataclass(frozen=True)
class Queueing:
    """The labels and annotations of Kueue on an AdaScaleJob.

    Kueue knows pods, and not AdaScaleJobs. So they are carried to the pods, which Kueue gates.
    """

    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def read(cls, metadata: ApiObject) -> Self:
        """Return those in the metadata of an object."""
        return cls(_of_kueue(metadata.get("labels") or {}), _of_kueue(metadata.get("annotations") or {}))

    @property
    def queue(self) -> str | None:
        """The LocalQueue. None if the job is not queued."""
        return self.labels.get(QUEUE_NAME) or None


def _of_kueue(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(fields.items()) if name.startswith(_PREFIXES)}


CHECKPOINT_FOLDER: Final = "/var/lib/adascale/checkpoints"
"""The mount path of the checkpoint claim. Each job has its own folder in it."""


@dataclass(frozen=True)
class PodSettings:
    """Settings that all pods get."""

    api_url: str  # base URL of the metrics service, as pods reach it
    # the label of nodes that names the type of their accelerators; empty if types are not distinguished
    accelerator_label: str = names.DEFAULT_ACCELERATOR_LABEL
    fs_group: bool = True  # whether volumes get a group that may write to them, where a template sets none
    has_authority: bool = False  # whether pods get the certificate of the authority of the metrics service
    # base URL of the metrics service without TLS, which the pods of a job may keep that were made with
    # it. None if they may not.
    plain_url: str | None = None

    def without_tls(self) -> PodSettings | None:
        """Return the settings of the pods that were made before TLS was turned on. None if there are none."""
        if self.plain_url is None:
            return None
        return replace(self, api_url=self.plain_url, has_authority=False, plain_url=None)


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
    accelerator_label: str = names.DEFAULT_ACCELERATOR_LABEL
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
