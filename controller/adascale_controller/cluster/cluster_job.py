"""An AdaScaleJob as the commands show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adascale_controller.cluster.api import ApiObject
from adascale_controller.job_summary import JobDetails, JobSummary
from adascale_controller.operator.types.conditions import (
    Condition,
    ConditionType,
    Reason,
    condition_of,
)
from adascale_controller.operator.types.kubernetes import seconds
from adascale_core import names
from adascale_core.job_id import job_id
from adascale_core.messages.job_spec import steps_of
from adascale_core.views.job_summary import JobStateName
from adascale_core.views.jobs import JobView

_EXPECTED = {Reason.STARTING, Reason.REENTERING, Reason.SUSPENDED}
"""The reasons for which a job does not train and nothing is to be done."""
_WITHOUT_REPLICAS = {JobStateName.SUSPENDED, JobStateName.COMPLETE, JobStateName.FAILED}


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
    def own_claim(self) -> str | None:
        """The claim for its checkpoints that is deleted with it; None if they outlive it."""
        checkpoint = self.spec.get("checkpoint") or {}
        if {"claimName", "path", "url"} & set(checkpoint):
            return None
        return str(self.status.get("claim") or f"{self.name}-checkpoints")

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints are, for people."""
        checkpoint = self.spec.get("checkpoint") or {}
        if "url" in checkpoint:
            return f"{str(checkpoint['url']).rstrip('/')}/{self.id}"
        if "path" in checkpoint:
            return f"folder {checkpoint['path']} of its pods"
        return f"PersistentVolumeClaim {checkpoint.get('claimName') or self.own_claim}"

    @property
    def condition(self) -> Condition | None:
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

    def summary(self) -> JobSummary:
        """Return what `adascale status` shows of it, as of a job on this machine."""
        status = self.status
        return JobSummary(
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
        )

    def details(self, view: JobView | None, context: str) -> JobDetails:
        """Return what `adascale status` shows in addition."""
        condition = self.condition
        explained = condition is not None and condition.message and not self.reason
        return JobDetails(
            state=f"{self.state} ({condition.message})" if explained and condition else self.state,
            runs=self.runs,
            stall=(view.stall if view else None) or "",
            slow=view.slowness if view else "",
            checkpoint=self.checkpoints,
            places=[
                ("accelerator", str(self.status.get("accelerator") or "")),
                ("context", context),
                ("pods", f"{names.LABEL_JOB}={self.name}"),
            ],
            replicas=view.replicas if view else (),
        )
