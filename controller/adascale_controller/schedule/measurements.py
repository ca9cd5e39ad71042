"""What the controller measures of a job from successive views of it: downtime, preparation and stability."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import exp, log, log2
from statistics import fmean, median
from weakref import WeakKeyDictionary

from adascale_controller.formatting import plural
from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import EfficiencyBound
from adascale_core.decision.job_utility import JobState
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.views.jobs import JobView

DEFAULT_DOWNTIME = 1.0
"""Seconds that training stands still for a change of replicas, until one has been measured."""
DEFAULT_PREPARATION = 5.0
"""Seconds that a change of replicas is prepared while training continues, until one has been measured."""
DEFAULT_MOVE = 60.0
"""Seconds that a move to another type of accelerator interrupts training, until one has been measured: its
replicas save their state and leave, and others start."""
SAME_TIME = 0.01
"""A step time that differs by less than this share counts as unchanged, so that the model that was fitted to
it is used again. Reports differ from each other by more."""

ESTIMATES_PER_OCTAVE = 4
"""Estimates of the gradients that are kept of a template for each doubling of progress."""


class TemplateMeasurements:
    """What jobs with the same template have reported: prior knowledge for the next of them.

    Two jobs have the same template if they run the same program in the same containers.
    """

    MAX_TEMPLATES = 10_000
    """How many templates are remembered: the templates that were used last."""

    def __init__(self) -> None:
        self._templates: dict[str, MeasuredTemplate] = {}
        self._ratios = TypeRatios()

    def of(self, template: str) -> MeasuredTemplate:
        """Return the measurements of a template."""
        found = self._templates.pop(template, None) or MeasuredTemplate(self._ratios)
        self._templates[template] = found
        if len(self._templates) > self.MAX_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        return found


class TypeRatios:
    """The ratios of step times on two types of accelerators, by the templates that ran on both."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, str], WeakKeyDictionary[MeasuredTemplate, float]] = {}
        """(type, other type) -> template -> its ratio, while the template is remembered."""
        self.version = 0
        """A number that changes with the ratios."""

    def add(self, template: MeasuredTemplate, times: Mapping[str, Sequence[StepTime]]) -> None:
        """Add what a template has measured, by type of accelerator."""
        for name, other in permutations(times, 2):
            ratio = _time_ratio(times[name], times[other])
            known = self._ratios.setdefault((name, other), WeakKeyDictionary())
            if ratio is not None and ratio != known.get(template):
                known[template] = ratio
                self.version += 1

    def of(self, name: str, other: str, template: MeasuredTemplate) -> tuple[float, str]:
        """Return the ratio of step times on a type to those on another, and where it is from, for people.

        That of the template itself if it was measured on both; else the mean of the others; 1 without any.
        """
        ratios: Mapping[MeasuredTemplate, float] = self._ratios.get((name, other), {})
        own = ratios.get(template)
        if own is not None:
            return own, "the ratio of one replica"
        if ratios:
            mean = exp(fmean(map(log, ratios.values())))
            return mean, f"the ratio of {plural(len(ratios), 'other program')}"
        return 1.0, "no ratio is known"


def _time_ratio(times: Sequence[StepTime], others: Sequence[StepTime]) -> float | None:
    """Return the ratio of the times of a micro-batch of the largest size that both have measured."""
    models = StepTimeModel.fit(times), StepTimeModel.fit(others)
    if models[0] is None or models[1] is None:
        return None
    size = min(max(each.local_bsz for each in group) for group in (times, others))
    return models[0].compute_time(size) / models[1].compute_time(size)


class MeasuredTemplate:
    """What the jobs of one template have reported."""

    GROWTH = 1.25
    """`step_times` changes when the number of measurements has grown by this factor, so that the models that
    are fitted to it can be used again."""
    MAX_JOBS = 32
    """Jobs whose step times of a plan are kept, the latest."""
    SETTLED_STEPS = 100
    """Steps of a job after which its estimate of the gradients no longer depends on a few steps."""

    def __init__(self, ratios: TypeRatios | None = None) -> None:
        self.ratios = ratios or TypeRatios()
        """The ratios that all templates have measured."""
        self.move_seconds: float | None = None
        """How long the last move of a job to another type interrupted training; None if none was measured."""
        self._times: dict[_MeasuredPlan, dict[str, StepTime]] = {}
        self._used = 0
        self.by_type: dict[str, Sequence[StepTime]] = {}
        """Type of accelerator -> the median over jobs of each plan and number of nodes."""
        self._accelerator = ""
        """The type of accelerator that was measured last."""
        self.first_estimate: GradientEstimate | None = None
        """An estimate from the beginning of a job of this template, after `SETTLED_STEPS` if there is one."""
        self._is_settled = False
        self._estimates: dict[bool, dict[int, tuple[float, GradientEstimate]]] = {False: {}, True: {}}
        """Whether progress counts samples -> part of an octave -> the progress and the estimate there."""

    def step_times(self, accelerator: str | None) -> Sequence[StepTime]:
        """Return the median over jobs of each plan and number of nodes."""
        return self.by_type.get(self._accelerator if accelerator is None else accelerator, ())

    @property
    def reported(self) -> tuple[object, ...]:
        """What the jobs have reported, to be compared with what they had reported before."""
        number = sum(map(len, self._estimates.values()))
        return self.by_type, self._accelerator, self.first_estimate, self.move_seconds, number

    def estimates_after(
        self, progress: float, *, counts_samples: bool = False
    ) -> tuple[tuple[float, GradientEstimate], ...]:
        """Return points of later progress, each with the estimate of the last job that was there."""
        estimates = self._estimates[counts_samples].values()
        return tuple(sorted(each for each in estimates if each[0] > progress))

    def add_estimate(
        self, estimate: GradientEstimate, step: int, progress: float, *, counts_samples: bool = False
    ) -> None:
        """Add what a job estimates of its gradients after a number of steps, at its progress."""
        if progress >= 1:
            octave = int(ESTIMATES_PER_OCTAVE * log2(progress))
            self._estimates[counts_samples][octave] = progress, estimate
        if self.first_estimate is None or (not self._is_settled and step >= self.SETTLED_STEPS):
            self.first_estimate = estimate
            self._is_settled = step >= self.SETTLED_STEPS

    def add(self, job: str, measured: Sequence[StepTime], accelerator: str = "") -> None:
        """Add the step times of a job."""
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
        self.by_type = {
            name: tuple(each for each in medians if each.accelerator == name) for name in sorted(types)
        }
        self.ratios.add(self, self.by_type)


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


@dataclass(frozen=True)
class UsableTimes:
    """The step times that are used of a job and its template on a type of accelerator."""

    own: Sequence[StepTime]  # of the job
    template: Sequence[StepTime]  # of its template, and scaled ones of another type
    largest: int  # the largest replica count of all
    assumption: str = ""  # where those of another type are from, for people; empty if there are none


class JobMeasurements:
    """Measures a job: call `update` with each view of it, then `job_state` for the decision's input.

    `job_state` changes nothing.
    """

    def __init__(
        self,
        template: MeasuredTemplate | None = None,
        downtime: float = DEFAULT_DOWNTIME,
        preparation: float = DEFAULT_PREPARATION,
        move: float = DEFAULT_MOVE,
    ) -> None:
        self.template = template or MeasuredTemplate()
        """What other jobs of the same template have reported."""
        self._default_downtime = downtime
        self._default_preparation = preparation
        self._default_move = move
        self._reported_plans = 0
        self._step_times: dict[_MeasuredPlan, StepTime] = {}
        self._usable: dict[str | None, tuple[object, UsableTimes]] = {}
        """Type of accelerator -> what its usable times depend on, and these."""
        self._first_generation = 0
        self._last_report: GainReport | None = None
        self._downtimes: list[float] = []
        self._preparations: list[float] = []
        self._desired: tuple[int, float] | None = None
        self._stable: tuple[int, float] | None = None
        self._losses = 0
        self._paused_in = 0
        """The newest generation without replicas."""
        self._idle_since: float | None = None
        """Since when no replica trains, as desired; None while replicas train or are desired."""
        self._idle = 0.0
        """Seconds without replicas, as desired, since the last report."""
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
            self.template.add_estimate(
                report.estimate, report.step, report.progress, counts_samples=report.counts_samples
            )
            if len(view.step_times) > self._reported_plans:
                self._reported_plans = len(view.step_times)
                self.template.add(view.id, view.step_times, report.accelerator)

    def update(self, view: JobView, now: float) -> GainReport | None:
        """Measure the change since the previous view. Returns the first report of each generation, once."""
        self.add_reported(view)
        if view.desired is not None and (self._desired is None or self._desired[0] != view.generation):
            self._desired = (view.generation, now)
        if view.desired is not None and view.desired.replicas == 0:
            self._paused_in = view.generation
        self._measure_idle(view, now)
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
        idle, self._idle = self._idle, 0.0
        has_moved = previous is not None and previous.accelerator != report.accelerator
        if has_moved and previous is not None and losses == self._losses:
            # Its replicas leave before others start. A job that was suspended, or waited, has no replicas for
            # longer than that.
            self.template.move_seconds = max(_downtime(previous, report) - idle, 0.0)
        # The time without replicas, as of a suspended job, is not that of a change.
        if previous is not None and previous.generation < self._paused_in:
            previous = None
        self.last_downtime = None if previous is None else _downtime(previous, report)
        # The downtime of a loss includes its detection, which a planned change does not need.
        if self.last_downtime is not None and losses == self._losses and not has_moved:
            self._downtimes.append(self.last_downtime)
            if self._desired is not None and self._desired[0] == report.generation:
                self._preparations.append(max(now - self._desired[1] - self.last_downtime, 0.0))
        return report

    def _measure_idle(self, view: JobView, now: float) -> None:
        """Measure for how long no replicas are desired, and those before have left."""
        none_desired = view.desired is not None and view.desired.replicas == 0
        is_idle = none_desired and not view.training_replicas
        if is_idle and self._idle_since is None:
            self._idle_since = now
        elif not is_idle and self._idle_since is not None:
            self._idle += now - self._idle_since
            self._idle_since = None

    def job_state(
        self,
        job_id: str,
        spec: JobSpec,
        view: JobView,
        total: float | None,
        accelerator: str | None = None,
    ) -> JobState:
        """Return the decision's input, from what `update` or `add_reported` has measured.

        `accelerator` is the type that the operator has chosen; None for the type that was measured last.
        """
        report = view.latest
        progress = report.progress if report else 0.0
        bounds = spec.bounds.with_limit(view.local_bsz_limit_on(accelerator))
        estimate = report.estimate if report else None
        # A program may set its length itself.
        counts_samples = spec.train_samples is not None or (report is not None and report.counts_samples)
        is_chosen = accelerator is not None
        if accelerator is None and report is not None:
            accelerator = report.accelerator
        usable = self._usable_times(accelerator, compares_types=is_chosen)
        stable_since = None
        if self._stable is not None and self._stable[0] == view.generation and not view.broken:
            stable_since = self._stable[1]
        return JobState(
            id=job_id,
            arrival=0.0,
            bounds=bounds,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            replicas=view.desired.replicas if view.desired else 0,
            stable_since=stable_since,
            largest=usable.largest,
            estimate=estimate or self.template.first_estimate,
            step_times=usable.own,
            template_step_times=usable.template,
            assumption=usable.assumption,
            move_seconds=self._default_move
            if self.template.move_seconds is None
            else self.template.move_seconds,
            efficiency=EfficiencyBound(spec.efficiency_target, counts_samples),
            remaining=None if total is None else max(total - progress, 0.0),
            later_estimates=()
            if total is None
            else tuple(
                (each - progress, later)
                for each, later in self.template.estimates_after(progress, counts_samples=counts_samples)
                if each < total
            ),
            restart_seconds=fmean(self._downtimes) if self._downtimes else self._default_downtime,
            prepare_seconds=(fmean(self._preparations) if self._preparations else self._default_preparation),
        )

    def _usable_times(self, accelerator: str | None, *, compares_types: bool) -> UsableTimes:
        """Return the step times of the job and of its template on a type of accelerator.

        To compare types, those of another type are scaled by the ratio of both if they are on more replicas.
        """
        template = self.template
        times = tuple(self._step_times.values())
        ratios = template.ratios.version if compares_types else None
        question = times, template.step_times(accelerator), ratios
        known = self._usable.get(accelerator)
        if known is None or known[0] != question:
            own = tuple(each for each in times if each.accelerator == accelerator)
            of_template = question[1]
            largest = _largest((*own, *of_template))
            borrowed, assumption = self._borrowed(accelerator or "", largest) if compares_types else ((), "")
            usable = UsableTimes(own, (*of_template, *borrowed), max(largest, _largest(borrowed)), assumption)
            known = self._usable[accelerator] = question, usable
        return known[1]

    def _borrowed(self, accelerator: str, largest: int) -> tuple[Sequence[StepTime], str]:
        """Return scaled step times of another type on more than `largest` replicas, and their source."""
        others = dict(self.template.by_type)
        for each in self._step_times.values():
            if each.accelerator not in self.template.by_type:
                others[each.accelerator] = (*others.get(each.accelerator, ()), each)
        others.pop(accelerator, None)
        others = {name: times for name, times in others.items() if _largest(times) > largest}
        if not others:
            return (), ""
        name = max(others, key=lambda name: (_largest(others[name]), name))
        ratio, origin = self.template.ratios.of(accelerator, name, self.template)
        scaled = [
            replace(
                each,
                step_time=each.step_time * ratio,
                sync_time=None if each.sync_time is None else each.sync_time * ratio,
                accelerator=accelerator,
            )
            for each in others[name]
            if each.replicas > largest
        ]
        text = f"more than {largest} replicas were not measured" if largest else "it was not measured"
        return scaled, (
            f"on {accelerator} {text}: step times on {name or 'an unnamed type'} times {ratio:.2f} are used "
            f"({origin})"
        )


def _largest(times: Iterable[StepTime]) -> int:
    return max((each.replicas for each in times), default=0)


def _is_same(before: StepTime, after: StepTime) -> bool:
    if (before.sync_time is None) != (after.sync_time is None):
        return False
    sync = abs((before.sync_time or 0.0) - (after.sync_time or 0.0))
    return max(abs(before.step_time - after.step_time), sync) < SAME_TIME * before.step_time


def training_target(spec: JobSpec, view: JobView) -> float | None:
    """Return the progress at which a job ends: that of its spec, or what its trainers report.

    None if the program decides, or before the first report.
    """
    if spec.steps is not None:
        return spec.steps
    return view.latest.target if view.latest is not None else None


def _downtime(before: GainReport, after: GainReport) -> float:
    """Return the seconds from the last step of a generation to the first step of the next.

    `after` may be some steps into its generation; the time of those steps is subtracted.
    """
    steps_since_start = max(after.step - before.step - 1, 0)
    return max(after.time - steps_since_start * after.step_time - before.time, 0.0)
