"""The names of Kueue, and the settings of the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
POD_GROUP_VERSION: Final = "scheduling.k8s.io/v1beta1"
"""The API group and version of Kubernetes' own PodGroups."""
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

    @property
    def url_in_pods(self) -> str:
        """The base URL of the metrics service, as pods reach it."""
        return self.pod_api_url or self.api_url
