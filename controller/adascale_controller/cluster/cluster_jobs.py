"""The jobs of a cluster, as the commands show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adascale_controller.cluster.api import (
    Api,
    ApiObject,
    RejectedError,
    job_path,
    jobs_path,
)
from adascale_controller.job.reasons import Reason
from adascale_controller.job_overview import JobOverview, NoSuchJobError
from adascale_controller.operator.types.conditions import (
    ConditionType,
    JobCondition,
    condition_of,
)
from adascale_controller.operator.types.kubernetes import seconds
from adascale_core import names
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import job_id
from adascale_core.messages.job_spec import steps_of
from adascale_core.views.job_summary import JobStateName
from adascale_core.views.jobs import JobView

_EXPECTED = {Reason.STARTING, Reason.REENTERING, Reason.SUSPENDED}
"""The reasons for which a job does not train and nothing is to be done."""
_WITHOUT_REPLICAS = {JobStateName.SUSPENDED, JobStateName.COMPLETE, JobStateName.FAILED}


PAGE_SIZE = 200
"""Jobs in one answer of a list."""
INTERVAL = 0.5
"""Seconds between two reads of a job that is waited for."""
MAX_NAMED = 10
"""Jobs that a message names."""


@dataclass(frozen=True)
class ClusterJob:
    """A job of a cluster."""

    raw: ApiObject

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.raw["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self.raw["metadata"]["namespace"])

    @property
    def id(self) -> str:
        """`<namespace>.<name>`."""
        return job_id(self.name, self.namespace)

    @property
    def spec(self) -> Mapping[str, Any]:
        """Its spec."""
        return dict(self.raw.get("spec") or {})

    @property
    def status(self) -> Mapping[str, Any]:
        """Its status; empty before the operator has written it."""
        return dict(self.raw.get("status") or {})

    @property
    def state(self) -> JobStateName:
        """What it does."""
        return JobStateName(self.status.get("state") or JobStateName.PENDING)

    @property
    def runs(self) -> bool:
        """Whether it has replicas, or waits for them."""
        return self.state not in _WITHOUT_REPLICAS

    @property
    def progress(self) -> float | None:
        """Progress, in steps at `batchSize`; None if unknown."""
        found = self.status.get("progress")
        return None if found is None else float(found)

    @property
    def steps(self) -> int | None:
        """The progress at which its spec ends it; None if the program decides."""
        samples = self.spec.get("trainSamples")
        if samples is not None:
            return steps_of(samples, self.spec["batchSize"])
        return self.spec.get("scaleInvariantSteps")

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints are, for people."""
        checkpoint = self.spec.get("checkpoint") or {}
        if "url" in checkpoint:
            return f"{str(checkpoint['url']).rstrip('/')}/{self.id}"
        if "path" in checkpoint:
            return f"folder {checkpoint['path']} of its pods"
        own_claim = self.status.get("claim") or f"{self.name}-checkpoints"
        return f"PersistentVolumeClaim {checkpoint.get('claimName') or own_claim}"

    @property
    def condition(self) -> JobCondition | None:
        """The condition that explains its state; None before the operator has written one."""
        kinds = (ConditionType.FAILED, ConditionType.COMPLETE, ConditionType.RUNNING)
        found = [condition_of(self.status, kind) for kind in kinds]
        return next((each for each in found if each is not None), None)

    @property
    def reason(self) -> str:
        """Why it has failed, or does not train; empty if that is as its user expects."""
        condition = self.condition
        if condition is None or condition.reason in _EXPECTED or self.state is JobStateName.COMPLETE:
            return ""
        if condition.type is ConditionType.RUNNING and condition.status:
            return ""
        return f"{condition.reason}: {condition.message}" if condition.message else condition.reason

    def summary(self, view: JobView | None = None, context: str = "") -> JobOverview:
        """Return what `adascale status` shows of it, as of a job on this machine."""
        status, condition = self.status, self.condition
        explained = condition.message if condition is not None and not self.reason else ""
        return JobOverview(
            name=self.name,
            namespace=self.namespace,
            shown_name=self.name,
            state=self.state,
            replicas=int(status.get("replicas") or 0),
            desired=int(status.get("desiredReplicas") or 0),
            spares=int(status.get("spareReplicas") or 0),
            began=seconds(self.raw["metadata"]["creationTimestamp"]) or 0.0,
            batch_size=status.get("batchSize"),
            local_batch_limit=status.get("localBatchLimit"),
            gain=status.get("gain"),
            efficiency=status.get("efficiency"),
            progress=self.progress,
            total=self.steps,
            progress_text=str(status.get("progressText") or ""),
            restarts=status.get("restarts"),
            reason=self.reason,
            view=view,
            explained=f" ({explained})" if explained else "",
            runs=self.runs,
            checkpoint=self.checkpoints,
            places=[
                ("accelerator", str(self.status.get("accelerator") or "")),
                ("context", context),
                ("pods", f"{names.LABEL_JOB}={self.name}"),
            ],
        )


class AmbiguousNamespaceError(AdaScaleError):
    """A job whose namespace is given twice, differently."""

    exit_code = 2


class ClusterJobs:
    """The jobs of a cluster."""

    def __init__(self, api: Api, namespace_option: str | None = None) -> None:
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

    def find(self, name: str) -> ClusterJob:
        """Return the job `name`, which is `<namespace>.<name>`, or a bare name."""
        namespace, dot, bare = name.rpartition(".")
        if dot and self._option not in (None, namespace):
            raise AmbiguousNamespaceError(
                f"job {name} is in namespace {namespace}, but --namespace is {self._option}: omit one of them"
            )
        namespace = namespace if dot else self._api.namespace
        job_id(bare, namespace)  # raises if no job can have this name
        try:
            return ClusterJob(self._api.get(job_path(namespace, bare)))
        except RejectedError as error:
            if error.status != 404:
                raise
        raise NoSuchJobError(self._no_job(bare, namespace))

    def _no_job(self, name: str, namespace: str) -> str:
        others = self.names(namespace)
        named = ", ".join(others[:MAX_NAMED])
        named += f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        context = f" of context {self._api.context}" if self._api.context else ""
        hint = f"the jobs there are {named}" if others else "it has no jobs; choose another with --namespace"
        return f"no job {name} in namespace {namespace}{context}: {hint}"
