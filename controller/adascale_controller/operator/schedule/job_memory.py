"""What the scheduler has observed of one job."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from adascale_controller.job.failing_counts import FailingCounts
from adascale_controller.job.placement_backoff import PlacementBackoff, startable
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import failed_pods, program_failures
from adascale_controller.operator.schedule.nodes import TypedDemands, pod_request
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.schedule.capacity_requests import CapacityRequests
from adascale_controller.schedule.measurements import JobMeasurements, TemplateMeasurements
from adascale_core.batch.plans import valid_replicas
from adascale_core.views.jobs import JobView


class JobMemory:
    """What the scheduler has observed of one job.

    A restarted operator measures it again. Only the count that is given up is read from the status, because
    trying it again would cost a failure of the program.
    """

    def __init__(self) -> None:
        self.measurements = JobMeasurements()
        self.backoff = PlacementBackoff()
        self.requests = CapacityRequests()
        self.failing_counts = FailingCounts()
        self._early_failures: set[str] = set()
        """The pods whose program has failed before it joined a generation."""
        self.digest: str | None = None
        """The digest of the template of `failing_counts`."""
        self.request: Mapping[str, int] = MappingProxyType({})
        """What a pod requests."""
        self.deadline: float | None = None
        """The deadline of the job on the monotonic clock; None if it has none, or if it has passed."""
        self._due: float | None = None
        """The deadline in seconds since 1970, of which `deadline` was computed."""
        self._generation = -1
        """The generation of the AdaScaleJob of whose template jobs are measured."""
        self._spec: ApiObject | None = None
        """The PodSpec of which `request` was computed."""

    def observe_spec(self, job: ObservedJob, templates: TemplateMeasurements) -> None:
        """Record what a pod of a job requests, and the template that it belongs to."""
        if self._spec is not job.pod_spec:
            self._spec, self.request = job.pod_spec, pod_request(job.pod_spec)
        if self._generation != job.resource.generation:
            self._generation = job.resource.generation
            self.measurements.template = templates.of(_program(job.resource))

    def observe(self, observed: ObservedJob, types: TypedDemands, fitting: Callable[[], int]) -> None:
        """Record the state of a job."""
        view = observed.view
        self.measurements.update(view, time.monotonic())
        if self.digest != observed.digest:
            # The program is another, or the operator has been restarted.
            self.failing_counts = FailingCounts(observed.recorded_failing_count)
            self.digest = observed.digest
        self._observe_deadline(observed)
        self._observe_failures(observed, view)
        self._observe_placement(observed, view, types, fitting)

    def _observe_deadline(self, observed: ObservedJob) -> None:
        due = observed.resource.deadline
        if due is not None and due <= observed.now:
            due = None
        if due != self._due:
            # Once, since the clocks differ a little at each reading.
            self.deadline = None if due is None else time.monotonic() + due - observed.now
            self._due = due

    def _observe_failures(self, observed: ObservedJob, view: JobView) -> None:
        self.failing_counts.update(view)
        self._early_failures &= {pod.uid for pod in observed.pods}
        ended = zip(failed_pods(observed.pods), program_failures(observed.pods), strict=True)
        for pod, failure in ended:
            if not failure.is_reported:
                continue
            if not failure.generation:
                # It names no count itself, so only news of the present program count.
                is_old = pod.uid in self._early_failures or pod.rank in observed.live_pods
                self._early_failures.add(pod.uid)
                if is_old or pod.template not in (None, observed.digest):
                    continue
            self.failing_counts.fail(failure, view)

    def _observe_placement(
        self, observed: ObservedJob, view: JobView, types: TypedDemands, fitting: Callable[[], int]
    ) -> None:
        current, spec = observed.current_allocation, observed.resource.valid_job.spec
        live, errors = observed.live_pods, observed.agent_errors
        spares = observed.spares
        ready = {rank for rank, pod in live.items() if pod.is_placed and rank not in errors}
        placed = startable(ready, spares)
        self.requests.update(placed, observed.now)
        if observed.admission.has_quota:
            self.backoff.allow(Reason.QUOTA_EXCEEDED, observed.admission.asked_at)
        if current is None or current.replicas == 0:
            return
        problem = observed.placement_problem(current.indices, spares)
        if (
            problem is not None
            and problem.reason is Reason.UNSCHEDULABLE
            and self.requests.active is not None
        ):
            # It does not fit yet, and that has a timeout of its own.
            problem = None
        if problem is not None and problem.reason in {Reason.QUEUED, Reason.SCHEDULING_GATED}:
            # It waits in a queue, as long as its quota allows it.
            problem = None

        def valid() -> list[int]:
            present = types.by_type[types.present].accelerator if types.present is not None else None
            accelerator = present.type if present is not None and present.required else None
            bounds = spec.bounds.with_limit(view.local_bsz_limit_on(accelerator))
            return [
                count for count in valid_replicas(bounds, spec.max_replicas) if count >= spec.min_replicas
            ]

        self.backoff.update(
            generation=current.generation,
            count=current.replicas,
            training=observed.training_replicas,
            problem=(problem.reason, problem.message) if problem is not None else None,
            placed=placed,
            valid=valid,
            capacity=fitting,
            now=observed.now,
        )


def _program(job: AdaScaleJob) -> str:
    """Return a key that is equal for jobs of a namespace that run the same program in the same way.

    Gradients are estimated for a batch size, so that is a part of the key. Jobs of another namespace do not
    influence the decision.
    """
    parts = [job.namespace, job.valid_job.spec.batch_size, job.template]
    text = json.dumps(parts, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()
