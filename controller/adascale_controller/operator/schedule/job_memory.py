"""What the scheduler has observed of one job."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from adascale_controller.failing_counts import FailingCounts
from adascale_controller.measurements import JobMeasurements, TemplateMeasurements
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.failed_pods import failed_pods
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.schedule.accelerator_types import TypedDemands
from adascale_controller.operator.schedule.nodes import pod_request
from adascale_controller.operator.schedule.placement_backoff import PlacementBackoff
from adascale_core.batch.plans import valid_replicas
from adascale_core.failures.exit_codes import ExitClass, classify_exit, describe_exit
from adascale_core.views.jobs import JobView


class JobMemory:
    """What the scheduler has observed of one job.

    A restarted operator measures it again. Only the count that is given up is read from the status, because
    trying it again would cost a failure of the program.
    """

    def __init__(self) -> None:
        self.measurements = JobMeasurements()
        self.backoff = PlacementBackoff()
        self.failing_counts = FailingCounts()
        self.digest: str | None = None
        """The digest of the template of `failing_counts`."""
        self.request: Mapping[str, int] = MappingProxyType({})
        """What a pod requests."""
        self._generation = -1
        """The generation of the AdaScaleJob of which `request` was computed."""

    def observe_spec(self, job: AdaScaleJob, templates: TemplateMeasurements) -> None:
        """Record what a pod of a job requests, and the template that it belongs to."""
        if self._generation != job.generation:
            self._generation, self.request = job.generation, pod_request(job.template["spec"])
            self.measurements.template = templates.of(_program(job))

    def observe(self, observed: ObservedJob, types: TypedDemands, fitting: Callable[[], int]) -> None:
        """Record the state of a job.

        Args:
            observed: the job.
            types: the types of accelerators that it may run on.
            fitting: returns how many of its replicas seem to fit.
        """
        view = observed.service or JobView.empty()
        self.measurements.update(view, time.monotonic())
        if self.digest != observed.digest:
            # The program is another, or the operator has been restarted.
            self.failing_counts = FailingCounts(observed.recorded_failing_count)
            self.digest = observed.digest
        self._observe_failures(observed, view)
        self._observe_placement(observed, view, types, fitting)

    def _observe_failures(self, observed: ObservedJob, view: JobView) -> None:
        self.failing_counts.update(view)
        for pod in failed_pods(observed.own_pods):
            end = pod.exit
            if end is not None and end.exit_code is not None and end.termination is not None:
                failure = f"replica {pod.rank}: {describe_exit(end.exit_code)}"
                single = classify_exit(end.exit_code) is ExitClass.SINGLE_REPLICA_PROGRAM
                self.failing_counts.fail(end.termination.generation, view, failure, at_once=single)

    def _observe_placement(
        self, observed: ObservedJob, view: JobView, types: TypedDemands, fitting: Callable[[], int]
    ) -> None:
        current, spec = observed.current_allocation, observed.resource.valid_job.spec
        if current is None or current.replicas == 0:
            return
        problem = observed.placement_problem(range(current.replicas))
        live, refusals = observed.live_pods, observed.refusals
        placed = 0
        while placed in live and live[placed].is_placed and placed not in refusals:
            placed += 1

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
