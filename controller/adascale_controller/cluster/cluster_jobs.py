"""The jobs of a cluster, as the commands show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from pydantic.alias_generators import to_camel

from adascale_client import MetricsServiceClient
from adascale_controller.cluster.api import ApiObject, ClusterTarget, RejectedError
from adascale_controller.cluster.kubernetes_api import KubernetesApi, connect
from adascale_controller.cluster.metrics_service import ProxyTransport
from adascale_controller.job.reasons import Reason
from adascale_controller.job_overview import JobOverview
from adascale_controller.operator.types.kubernetes import ConditionType, JobCondition, condition_of, seconds
from adascale_core import names
from adascale_core.errors import AdaScaleError, UsageError
from adascale_core.job_id import job_id
from adascale_core.messages.job_spec import steps_of
from adascale_core.views.job_summary import JobStateName

_EXPECTED = {Reason.STARTING, Reason.REENTERING, Reason.SUSPENDED}
"""The reasons for which a job does not train and nothing is to be done."""
_WITHOUT_REPLICAS = {JobStateName.SUSPENDED, JobStateName.COMPLETE, JobStateName.FAILED}


_STATUS = (
    *("replicas", "desired_replicas", "spare_replicas", "batch_size", "local_batch_limit", "gain"),
    *("efficiency", "progress", "progress_text", "restarts"),
)
"""What is shown of the status of an AdaScaleJob as it is."""
PAGE_SIZE = 200
"""Jobs in one answer of a list."""
MAX_NAMED = 10
"""Jobs that a message names."""


def jobs_path(namespace: str, name: str = "") -> str:
    """Return the path of the AdaScaleJobs of a namespace, or of one of them."""
    path = f"/apis/{names.GROUP_VERSION}/namespaces/{quote(namespace, safe='')}/{names.PLURAL}"
    return path + (f"/{quote(name, safe='')}" if name else "")


def overview_of(raw: ApiObject, context: str = "") -> JobOverview:
    """Return what `adascale status` shows of an AdaScaleJob, as of a job on this machine."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    name, namespace = str(meta["name"]), str(meta["namespace"])
    state = JobStateName(status.get("state") or JobStateName.PENDING)
    condition = _explaining_condition(status)
    reason = _reason(state, condition)
    explained = condition.message if condition is not None and not reason else ""
    samples = spec.get("trainSamples")
    return JobOverview(
        **{name: status[to_camel(name)] for name in _STATUS if to_camel(name) in status},
        name=name,
        namespace=namespace,
        state=state,
        start_time=seconds(meta["creationTimestamp"]) or 0.0,
        total=spec.get("scaleInvariantSteps") if samples is None else steps_of(samples, spec["batchSize"]),
        reason=reason,
        explained=f" ({explained})" if explained else "",
        runs=state not in _WITHOUT_REPLICAS,
        checkpoint=_checkpoints(job_id(name, namespace), name, spec.get("checkpoint") or {}, status),
        places=[
            ("accelerator", str(status.get("accelerator") or "")),
            ("context", context),
            ("pods", f"{names.LABEL_JOB}={name}"),
        ],
    )


def _explaining_condition(status: ApiObject) -> JobCondition | None:
    """Return the condition that explains the state; None before the operator has written one."""
    kinds = (ConditionType.FAILED, ConditionType.COMPLETE, ConditionType.RUNNING)
    found = [condition_of(status, kind) for kind in kinds]
    return next((each for each in found if each is not None), None)


def _reason(state: JobStateName, condition: JobCondition | None) -> str:
    """Return why a job has failed, or does not train; empty if that is as its user expects."""
    if condition is None or condition.reason in _EXPECTED or state is JobStateName.COMPLETE:
        return ""
    if condition.type is ConditionType.RUNNING and condition.status:
        return ""
    return f"{condition.reason}: {condition.message}" if condition.message else condition.reason


def _checkpoints(job: str, name: str, checkpoint: ApiObject, status: ApiObject) -> str:
    """Return where the checkpoints of a job are, for people: their URL if they have one."""
    if "url" in checkpoint:
        return f"{str(checkpoint['url']).rstrip('/')}/{job}"
    if "path" in checkpoint:
        return f"folder {checkpoint['path']} of its pods"
    own_claim = status.get("claim") or f"{name}-checkpoints"
    return f"PersistentVolumeClaim {checkpoint.get('claimName') or own_claim}"


class ClusterJobs:
    """The jobs of a cluster."""

    def __init__(self, api: KubernetesApi, namespace_option: str | None) -> None:
        self._api = api
        self._option = namespace_option

    def names(self, namespace: str | None = None) -> list[str]:
        """Return the names of the jobs of a namespace, by default that of the options."""
        path = jobs_path(namespace or self._api.namespace)
        found: list[str] = []
        query = [("limit", str(PAGE_SIZE))]
        while True:
            page = self._api.get(path, query)
            found += [str(raw["metadata"]["name"]) for raw in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return sorted(found)
            query = [("limit", str(PAGE_SIZE)), ("continue", token)]

    def find(self, name: str) -> JobOverview:
        """Return the job `name`, which is `<namespace>.<name>`, or a bare name."""
        namespace, dot, bare = name.rpartition(".")
        if dot and self._option not in (None, namespace):
            raise UsageError(
                f"job {name} is in namespace {namespace}, but --namespace is {self._option}: omit one of them"
            )
        namespace = namespace if dot else self._api.namespace
        job_id(bare, namespace)  # raises if no job can have this name
        try:
            return overview_of(self._api.get(jobs_path(namespace, bare)), self._api.context)
        except RejectedError as error:
            if error.status != 404:
                raise
        raise AdaScaleError(self._no_job(bare, namespace))

    def metrics(self, system_namespace: str) -> MetricsServiceClient:
        """Return the client of the metrics service through the API server, for reads."""
        transport = ProxyTransport(self._api, system_namespace)
        return MetricsServiceClient(transport.url, transport=transport)

    def _no_job(self, name: str, namespace: str) -> str:
        others = self.names(namespace)
        named = ", ".join(others[:MAX_NAMED])
        named += f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        context = f" of context {self._api.context}" if self._api.context else ""
        hint = f"the jobs there are {named}" if others else "it has no jobs; choose another with --namespace"
        return f"no job {name} in namespace {namespace}{context}: {hint}"


@contextmanager
def open_cluster(target: ClusterTarget) -> Iterator[ClusterJobs]:
    """Yield the jobs of a cluster."""
    with connect(target) as api:
        yield ClusterJobs(api, target.namespace)
