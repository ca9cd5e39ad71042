"""What the controller measures of a job from successive views of it: downtime, preparation and stability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from adascale_controller.job import Job
from adascale_core.batch.gain import GradientEstimate
from adascale_core.decision.job_state import JobState
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.views.jobs import JobView

DEFAULT_DOWNTIME = 1.0
"""Seconds that training stands still for a change of replicas, until one has been measured."""
DEFAULT_PREPARATION = 5.0
"""Seconds that a change of replicas is prepared while training continues, until one has been measured."""
SAME_TIME = 0.01
"""A step time that differs by less than this share of it is taken for unchanged, so that the model that is
fitted to it can be used again. Reports differ by more than that from each other."""


class TemplateMeasurements:
    """What jobs with the same template have reported: prior knowledge for the next of them.

    Two jobs have the same template if they run the same program in the same containers.
    """

    MAX_TEMPLATES = 10_000
    """How many templates are remembered: the templates that were used last."""

    def __init__(self) -> None:
        self._templates: dict[str, MeasuredTemplate] = {}

    def of(self, template: str) -> MeasuredTemplate:
        """Return the measurements of a template."""
        found = self._templates.pop(template, None) or MeasuredTemplate()
        self._templates[template] = found
        if len(self._templates) > self.MAX_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        return found


class MeasuredTemplate:
    """What the jobs of one template have reported."""

    GROWTH = 1.25
    """`step_times` changes when the number of measurements has grown by this factor, so that the models that
    are fitted to it can be used again."""
    MAX_JOBS = 32
    """Jobs whose step times of a plan are kept, the latest."""
    SETTLED_STEPS = 100
    """Steps of a job after which its estimate of the gradients no longer depends on a few steps."""

    def __init__(self) -> None:
        self._times: dict[_MeasuredPlan, dict[str, StepTime]] = {}
        self._used = 0
        self._step_times: dict[str, Sequence[StepTime]] = {}
        """Type of accelerator -> the median over jobs of each plan and number of nodes."""
        self._accelerator = ""
        """The type of accelerator that was measured last."""
        self.first_estimate: GradientEstimate | None = None
        """An estimate from the beginning of a job of this template, after `SETTLED_STEPS` if there is one."""
        self._is_settled = False

    def step_times(self, accelerator: str | None) -> Sequence[StepTime]:
        """Return the median over jobs of each plan and number of nodes.

        Args:
            accelerator: the type of accelerator. None for the type that was measured last.
        """
        return self._step_times.get(self._accelerator if accelerator is None else accelerator, ())

    @property
    def reported(self) -> tuple[object, ...]:
        """What the jobs have reported, to be compared with what they had reported before."""
        return self._step_times, self._accelerator, self.first_estimate

    def add_estimate(self, estimate: GradientEstimate, step: int) -> None:
        """Add what a job estimates of its gradients after a number of steps."""
        if self.first_estimate is None or (not self._is_settled and step >= self.SETTLED_STEPS):
            self.first_estimate = estimate
            self._is_settled = step >= self.SETTLED_STEPS

    def add(self, job: str, measured: Sequence[StepTime], accelerator: str = "") -> None:
        """Add the step times of a job.

        Args:
            job: the job id.
            measured: its step times, on any types of accelerators.
            accelerator: the type on which it was measured last.
        """
        self._accelerator = accelerator
        for each in measured:
            plan = _measured_plan(each)
            times = self._times.setdefault(plan, {})
            times[job] = each
            if len(times) > self.MAX_JOBS:
                del times[next(iter(times))]
        if len(self._times) < self.GROWTH * self._used:
            return
        self._used = len(self._times)
        medians = [_median_of_jobs(list(times.values())) for _, times in sorted(self._times.items())]
        types = {each.accelerator for each in medians}
        self._step_times = {
            name: tuple(each for each in medians if each.accelerator == name) for name in types
        }


_MeasuredPlan = tuple[str, int, int, int, int]


def _measured_plan(measured: StepTime) -> _MeasuredPlan:
    """Return a key of the type of accelerator, the batch plan and the number of nodes of a measurement."""
    return (
        measured.accelerator,
        measured.replicas,
        measured.nodes,
        measured.local_bsz,
        measured.accumulation,
    )


def _median_of_jobs(measured: Sequence[StepTime]) -> StepTime:
    sync = [each.sync_time for each in measured if each.sync_time is not None]
    return replace(
        measured[0],
        step_time=median(each.step_time for each in measured),
        reports=len(measured),
        sync_time=median(sync) if sync else None,
    )


_UsableTimes = tuple[
    tuple[Sequence[StepTime], Sequence[StepTime], str | None],
    tuple[Sequence[StepTime], Sequence[StepTime], int],
]
"""The step times of a job and its template and the type of accelerator, and those that are used of them."""


class JobMeasurements:
    """Measures a job: call `update` with each view of it, then `job_state` for the decision's input.

    `job_state` changes nothing.

    Args:
        template: what other jobs of the same template have reported; it is extended by this job.
        downtime: seconds that training stands still for a change, until one has been measured.
        preparation: seconds that a change is prepared, until one has been measured.
    """

    def __init__(
        self,
        template: MeasuredTemplate | None = None,
        downtime: float = DEFAULT_DOWNTIME,
        preparation: float = DEFAULT_PREPARATION,
    ) -> None:
        self.template = template or MeasuredTemplate()
        """What other jobs of the same template have reported."""
        self._default_downtime = downtime
        self._default_preparation = preparation
        self._reported_plans = 0
        self._step_times: dict[_MeasuredPlan, StepTime] = {}
        self._usable: _UsableTimes | None = None
        self._first_generation = 0
        self._last_report: GainReport | None = None
        self._downtimes: list[float] = []
        self._preparations: list[float] = []
        self._desired: tuple[int, float] | None = None
        self._stable: tuple[int, float] | None = None
        self._losses = 0
        self._paused_in = 0
        """The newest generation without replicas."""
        self.last_downtime: float | None = None
        """Seconds from the last step before the newest generation to its first step; None if not measured."""

    def ignore_before(self, generation: int) -> None:
        """Ignore reports of generations before this one, the first of a run."""
        self._first_generation = generation

    def latest(self, view: JobView) -> GainReport | None:
        """Return the newest report, unless it is of a generation before the first one of this run."""
        report = view.latest
        return report if report is not None and report.generation >= self._first_generation else None

    def add_reported(self, view: JobView) -> None:
        """Add the step times and the estimate of the gradients in a view to the job and to its template."""
        before = self._step_times
        self._step_times = {}
        for each in view.step_times:
            plan = _measured_plan(each)
            used = before.get(plan)
            self._step_times[plan] = used if used is not None and _is_same(used, each) else each
        report = view.latest
        if report is not None:
            self.template.add_estimate(GradientEstimate(report.grad_sqr, report.grad_var), report.step)
            if len(view.step_times) > self._reported_plans:
                self._reported_plans = len(view.step_times)
                self.template.add(view.id, view.step_times, report.accelerator)

    def update(self, view: JobView, now: float) -> GainReport | None:
        """Measure the change since the previous view.

        Args:
            view: the newest view of the job.
            now: seconds on a monotonic clock.

        Returns:
            the first report of the active generation, the first time that a view has it; else None.
        """
        self.add_reported(view)
        if view.desired is not None and (self._desired is None or self._desired[0] != view.generation):
            self._desired = (view.generation, now)
        if view.desired is not None and view.desired.replicas == 0:
            self._paused_in = view.generation
        report = self.latest(view)
        if report is None:
            return None
        previous, self._last_report = self._last_report, report
        active = view.active.generation if view.active is not None else None
        stable = self._stable[0] if self._stable is not None else None
        if report.generation != active or report.generation == stable:
            return None
        self._stable = (report.generation, now)
        losses, self._losses = self._losses, view.failures + view.disruptions
        # The time without replicas, as of a suspended job, is not that of a change.
        if previous is not None and previous.generation < self._paused_in:
            previous = None
        self.last_downtime = None if previous is None else _downtime(previous, report)
        # The downtime of a loss includes its detection, which a planned change does not need.
        if self.last_downtime is not None and losses == self._losses:
            self._downtimes.append(self.last_downtime)
            if self._desired is not None and self._desired[0] == report.generation:
                self._preparations.append(max(now - self._desired[1] - self.last_downtime, 0.0))
        return report

    def job_state(
        self, job: Job, view: JobView, total: float | None, accelerator: str | None = None
    ) -> JobState:
        """Return the decision's input, from what `update` or `add_reported` has measured.

        Args:
            job: the job as it is specified now.
            view: the newest view of it.
            total: the progress at which it ends; None if unbounded.
            accelerator: the type of accelerator that the operator has chosen. None for the type on which it
                was measured last, and the limit of the types that its replicas have. Measurements and limits
                of other types are not used.
        """
        spec, report = job.spec, view.latest
        bounds = spec.bounds.with_limit(view.local_bsz_limit_on(accelerator))
        estimate = GradientEstimate(report.grad_sqr, report.grad_var) if report else None
        if accelerator is None and report is not None:
            accelerator = report.accelerator
        step_times, template_step_times, largest = self._usable_times(accelerator)
        stable_since = None
        if self._stable is not None and self._stable[0] == view.generation and not view.broken:
            stable_since = self._stable[1]
        return JobState(
            id=job.id,
            arrival=0.0,
            bounds=bounds,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            replicas=view.desired.replicas if view.desired else 0,
            stable_since=stable_since,
            largest=largest,
            estimate=estimate or self.template.first_estimate,
            step_times=step_times,
            template_step_times=template_step_times,
            efficiency_target=spec.efficiency_target,
            remaining=None if total is None else max(total - (report.progress if report else 0.0), 0.0),
            restart_seconds=fmean(self._downtimes) if self._downtimes else self._default_downtime,
            prepare_seconds=(fmean(self._preparations) if self._preparations else self._default_preparation),
        )

    def _usable_times(self, accelerator: str | None) -> tuple[Sequence[StepTime], Sequence[StepTime], int]:
        """Return the step times on a type of accelerator, and the largest count on which they were measured.

        They are those of the job, and those of its template.
        """
        template = self.template.step_times(accelerator)
        question = tuple(self._step_times.values()), template, accelerator
        if self._usable is None or self._usable[0] != question:
            step_times = tuple(each for each in question[0] if each.accelerator == accelerator)
            largest = max((each.replicas for each in (*step_times, *template)), default=0)
            self._usable = question, (step_times, template, largest)
        return self._usable[1]


def _is_same(before: StepTime, after: StepTime) -> bool:
    if (before.sync_time is None) != (after.sync_time is None):
        return False
    sync = abs((before.sync_time or 0.0) - (after.sync_time or 0.0))
    return max(abs(before.step_time - after.step_time), sync) < SAME_TIME * before.step_time


def training_target(job: Job, view: JobView) -> float | None:
    """Return the progress at which a job ends: its scaleInvariantSteps, or what its trainers report.

    None if the program decides, or before the first report.
    """
    if job.spec.scale_invariant_steps is not None:
        return job.spec.scale_invariant_steps
    return view.latest.target if view.latest is not None else None


def _downtime(before: GainReport, after: GainReport) -> float:
    """Return the seconds from the last step of a generation to the first step of the next.

    `after` may be some steps into its generation; the time of those steps is subtracted.
    """
    steps_since_start = max(after.step - before.step - 1, 0)
    return max(after.time - steps_since_start * after.step_time - before.time, 0.0)
