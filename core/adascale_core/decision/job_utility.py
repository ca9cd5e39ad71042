"""The state of a job, and what each replica count is worth to it.

The utility of a count is the logarithm of the job's predicted goodput, times the weight of the job, less the
cost of the change to it. `docs/scheduling.md` has the formula, with a reason for each of its terms.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import exp, inf, log, sqrt
from operator import attrgetter
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import (
    DEFAULT_EFFICIENCY,
    TOLERANCE,
    BatchBounds,
    EfficiencyBound,
    Prediction,
    is_valid_replicas,
)
from adascale_core.decision.deadline import DeadlineOutlook, Feasibility
from adascale_core.messages.reports import StepTime
from adascale_core.names import DEFAULT_FAIRNESS
from adascale_core.performance.goodput_table import Goodputs, candidate_counts, goodputs, smallest_scales
from adascale_core.performance.throughput import NOISE, Floats, StepTimeModel, fit_all


@dataclass(frozen=True)
class JobState:
    """The state of a job, as far as its replica count depends on it."""

    id: str
    arrival: float  # when it was created, in any unit; it orders the admission of jobs of equal priority
    bounds: BatchBounds
    min_replicas: int
    max_replicas: int
    replicas: int = 0  # its present replica count; 0 if it does not run
    # when training on the present count began, in seconds; None while a change is in progress
    stable_since: float | None = None
    largest: int = 0  # the largest count on which it was measured
    estimate: GradientEstimate | None = None  # None if not measured
    step_times: Sequence[StepTime] = ()
    efficiency: EfficiencyBound = DEFAULT_EFFICIENCY  # lower bound of the efficiency of its batches
    remaining: float | None = None  # progress that remains; None if unknown
    restart_seconds: float = 10.0  # how long a change of the count interrupts training
    prepare_seconds: float = 0.0  # how long a change is prepared while training continues
    # the largest count that could be scheduled, or that a quota holds; None if there is no limit. The
    # smallest valid count is always tried, since no smaller count is valid.
    limit: int | None = None
    template_step_times: Sequence[StepTime] = ()  # those of jobs with the same template
    accelerator: str | None = None  # the type to which it is tied; None if it is not tied
    priority: int = 0  # jobs of higher priority are admitted first, and take replicas from others
    # whether it takes replicas from running jobs of lower priority. If not, it waits behind them.
    preempts: bool = True
    limit_reason: str = ""  # empty if that is not known
    moves: bool = False  # whether its present replicas are on another type of accelerator than `accelerator`
    # how long a move to another type interrupts training; None for `restart_seconds`
    move_seconds: float | None = None
    # where `template_step_times` are from, for people; empty unless they were measured on another type
    assumption: str = ""
    # when the job should be complete, in seconds on the clock of `stable_since`; None if it has no
    # deadline, or if that has passed. Of jobs of equal priority, the earlier deadline is admitted first.
    deadline: float | None = None
    # (progress from now, estimate of the gradients there by jobs of the same template), ascending, all before
    # the end
    later_estimates: Sequence[tuple[float, GradientEstimate]] = ()

    @property
    def valid_counts(self) -> tuple[int, ...]:
        """The replica counts that a decision considers, ascending."""
        return candidate_counts(self.bounds, self.min_replicas, self.max_replicas)

    @property
    def counts_samples(self) -> bool:
        """Whether a step adds its scale to the progress, and not its gain."""
        return self.efficiency.counts_samples

    @property
    def admission_order(self) -> tuple[bool, int, float, float, str]:
        """The key by which jobs are admitted: by priority, then by deadline, then by arrival."""
        waits_behind = not self.preempts and not self.replicas
        deadline = inf if self.deadline is None else self.deadline
        return waits_behind, -self.priority, deadline, self.arrival, self.id


MIN_SPEEDUP = 1.05
"""The least factor of goodput for each doubling of the replicas, and for a larger count than those that were
measured."""
MOVE_MARGIN = 1.12
"""The least factor of goodput, beyond that of another change, for a move to another type of accelerator,
where it is less certain than on another count."""
MIN_CHANGE = exp(2 * sqrt(2) * NOISE)
"""The least factor of goodput for another change: two standard deviations of the ratio of two goodputs that
are as uncertain as a measured step time. A smaller factor may be noise, and the job would change back. A
larger count is measured once it is tried."""
MAX_GROWTH = 2
"""A job grows to at most this many times the largest count on which it was measured."""
HORIZON = 600.0
"""Seconds within which a change must pay off if the remaining time of the job is unknown."""
KEPT_EFFICIENCY = 0.9
"""A job whose length is in samples keeps its count while the efficiency of the smallest batch there is at
least this part of its bound, so it does not change back and forth at the bound."""
STABILIZATION_RESTARTS = 2.0
"""A change may follow another once the job has trained for this many times the duration of a restart..."""
STABILIZATION_SECONDS = 5.0
"""...and for this many seconds, so that the effect of the last change is measured first."""

SPEEDUP_EXPONENT = 0.5
"""The power of its replicas with which the goodput of a job grows, for the weights by remaining size."""

UTILITY_UNIT = 10**9
"""Utilities are integers, in this fraction of a natural logarithm: sums are exact, and equal is equal."""
FORCED_CHANGE_COST = 10**14
"""The cost of a change that is only made for lack of capacity: more than all utilities together."""
INEFFICIENT_COST = 3 * 10**13
"""The cost of the present count if a sample is worth too little on it: more than a deadline that is met is
worth, and less than a change while the last one is in progress."""


def stabilization_seconds(restart_seconds: float) -> float:
    """Return the seconds without a change after a change that interrupted training for `restart_seconds`."""
    return max(STABILIZATION_SECONDS, STABILIZATION_RESTARTS * restart_seconds)


def change_allowed_at(job: JobState) -> float:
    """Return when the last change of a job is no longer recent, on the clock of `JobState.stable_since`.

    Infinite while it is in progress.
    """
    return inf if job.stable_since is None else job.stable_since + stabilization_seconds(job.restart_seconds)


UtilityTables = tuple[Mapping[int, int], Mapping[int, int]]
"""Count -> utility, in `UTILITY_UNIT`, for replicas on one node, as far as they fit on it, and on several."""


@dataclass(frozen=True)
class Change:
    """What a change of the replica count has to be worth."""

    factor: float | None  # of the goodput; None if the count changes only for lack of capacity
    trial_factor: float | None  # the same for a larger count than those that were measured
    text: str  # why, with a placeholder for each value
    # the values. A decision needs the text of few jobs, so it is not formatted before.
    values: tuple[float, ...] = ()

    @property
    def reason(self) -> str:
        """Why."""
        return self.text.format(*self.values)


@dataclass
class _Memory:
    """What was computed from predictions, for later decisions with the same predictions."""

    # weight, costs of a change and of a trial, and what its deadline adds; and the utilities
    tables: tuple[tuple[object, ...], UtilityTables] | None = None
    # the remaining progress, its unit and the later estimates, and the seconds to the end on each count
    seconds: tuple[tuple[object, ...], Floats] | None = None


@dataclass(frozen=True)
class JobUtility:
    """A job with its candidate counts, and predictions for the counts that it may have next."""

    job: JobState
    counts: Sequence[int]  # valid counts within its bounds, ascending
    table: Goodputs | None  # the goodput of the counts that it may have next; None if it is not measured
    node_size: int | None = None  # how many replicas fit on a node; None if not known
    fills_nodes: bool = False  # whether only counts that divide a node or fill nodes are considered
    weight: float = 1.0  # of the logarithm of its goodput
    model: StepTimeModel | None = None  # its step times; None if it is not measured
    _memory: _Memory = field(default_factory=_Memory, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        job: JobState,
        node_size: int | None = None,
        *,
        fills_nodes: bool = False,
        before: JobUtility | None = None,
        model: StepTimeModel | None = None,
    ) -> JobUtility:
        """Return the candidate counts and predictions of `job`."""
        if before is not None and (before.node_size, before.fills_nodes) == (node_size, fills_nodes):
            if before.job is job:
                return before
            if _prediction_inputs(before.job) == _prediction_inputs(job):
                return before._with(job, before.weight)
        counts = job.valid_counts
        if job.limit is not None:
            counts = counts[: bisect_right(counts, job.limit)] or counts[:1]
        counts = _efficient_counts(job, counts)
        if node_size is not None and fills_nodes:
            counts = _filling_nodes(counts, node_size, job.replicas)
        model = model or StepTimeModel.fit(job.step_times, job.template_step_times)
        utility = cls(job, counts, None, node_size, fills_nodes, model=model)
        if job.estimate is None or model is None or not counts:
            return utility
        largest = utility.largest_measured
        next_larger = counts[bisect_right(counts, largest) :][:1]
        limit = max([MAX_GROWTH * largest, job.replicas, *counts[:1], *next_larger])
        return replace(utility, table=utility._table(counts[: bisect_right(counts, limit)], job.estimate))

    def _table(self, counts: tuple[int, ...], estimate: GradientEstimate) -> Goodputs:
        assert self.model is not None
        least = self.job.efficiency.least_at_goodput
        return goodputs(self.job.bounds, counts, estimate.cautious, self.model, least_efficiency=least)

    @property
    def present_count(self) -> int | None:
        """The present count if the job can keep it; None if it has none, moves, or it is no longer valid."""
        return self.job.replicas if self.job.replicas in self.counts and not self.job.moves else None

    @property
    def largest_measured(self) -> int:
        """The largest count on which the job or its template was measured; 0 if there is none."""
        job = self.job
        return max([job.largest, *(each.replicas for each in (*job.step_times, *job.template_step_times))])

    def goodput(self, count: int) -> float | None:
        """Return the goodput of a count on as few nodes as hold it; None if it is not predicted."""
        if self.table is None:
            return None
        return self._at(count, self.table.one_node, self.table.several_nodes)

    def seconds_left(self, count: int) -> float | None:
        """Return the seconds that the rest of the job takes on a count, with its present gradients.

        None if its end is not known, or the count is not predicted.
        """
        if self.job.remaining is None or self.table is None:
            return None
        speed = self._at(count, *self._progress_per_second(self.table))
        return None if speed is None else self.job.remaining / speed

    def _at(self, count: int, one_node: Floats, several_nodes: Floats) -> float | None:
        """Return the value of a count on as few nodes as hold it; None if it is not in the table."""
        assert self.table is not None
        index = bisect_left(self.table.counts, count)
        if self.table.counts[index : index + 1] != (count,):
            return None
        fits = self.node_size is None or count <= self.node_size
        return float((one_node if fits else several_nodes)[index])

    def _progress_per_second(self, table: Goodputs) -> tuple[Floats, Floats]:
        """Return the progress per second of each count of a table, on one node and on several."""
        return table.throughputs if self.job.counts_samples else (table.one_node, table.several_nodes)

    @property
    def remaining_seconds(self) -> float | None:
        """The seconds that the rest of the job takes on its smallest count; None if not known."""
        return self.seconds_left(self.counts[0]) if self.counts else None

    def _with(self, job: JobState, weight: float) -> JobUtility:
        """Return the same predictions for a later state of the job, and with a weight."""
        return JobUtility(
            job, self.counts, self.table, self.node_size, self.fills_nodes, weight, self.model, self._memory
        )

    def _log_goodputs(self) -> tuple[tuple[int, ...], Floats, Floats]:
        """Return counts, and the logarithms of their goodputs on one node and on several nodes."""
        if self.table is not None:
            one, several = np.log(self.table.one_node), np.log(self.table.several_nodes)
            if self.node_size is not None:
                fitting = bisect_right(self.table.counts, self.node_size)
                one = np.concatenate((one[:fitting], several[fitting:]))
            return self.table.counts, one, several
        # Without measurements the job does not grow, and shrinks only if it has to, by as little as
        # possible.
        upper = max(self.job.replicas, self.counts[0])
        counts = tuple(count for count in self.counts if count <= upper and self.job.replicas)
        counts = counts or (self.counts[0],)
        logs = np.log(np.array(counts, dtype=np.float64))
        return counts, logs, logs

    def utilities(self, now: float) -> UtilityTables:
        """Return count -> utility, in `UTILITY_UNIT`, of the counts that the job may have next.

        The first table is for replicas on one node, as far as they fit on it, the second for replicas on
        several nodes. Both are empty if no count is valid.
        """
        if not self.counts:
            return {}, {}
        costs = (0, 0)
        if self.present_count:
            change = self.change(now)
            costs = self._cost(change.factor), self._cost(change.trial_factor)
        outlook = self.deadline_outlook(now)
        bonus = 0 if outlook is None else round(UTILITY_UNIT * outlook.worth)
        met = outlook.met if outlook is not None and bonus else None
        key = self.weight, costs, bonus, None if met is None else met.tobytes()
        if self._memory.tables is None or self._memory.tables[0] != key:
            self._memory.tables = key, self._utilities(*costs, 0 if met is None else bonus * met)
        return self._memory.tables[1]

    def deadline_outlook(self, now: float) -> DeadlineOutlook | None:
        """Return how its counts compare with its deadline; None without one, or without a prediction."""
        job = self.job
        if job.deadline is None or job.remaining is None or self.table is None:
            return None
        key = job.remaining, job.counts_samples, job.later_estimates
        if self._memory.seconds is None or self._memory.seconds[0] != key:
            self._memory.seconds = key, self._training_seconds(job.remaining)
        counts, seconds = tuple(self.counts), self._memory.seconds[1]
        present = self.present_count or 0
        restart = job.move_seconds if job.moves and job.move_seconds is not None else job.restart_seconds
        seconds = seconds + np.where(np.array(counts) != present, restart, 0.0)
        # A job gives up replicas for no less than the uncertainty of the prediction.
        seconds = np.where(np.array(counts) < present, seconds * MIN_CHANGE, seconds)
        return DeadlineOutlook(job.deadline - now, counts, seconds, len(self.table.counts), present)

    def feasibility(self, now: float) -> Feasibility | None:
        """Return whether its deadline can be met; None without a deadline, or without a prediction."""
        outlook = self.deadline_outlook(now)
        if outlook is None:
            return None
        source = "its own step times" if self.job.step_times else "the step times of jobs of its template"
        return Feasibility(outlook.sufficient, self.job.assumption or source)

    def _training_seconds(self, remaining: float) -> Floats:
        """Return the seconds that the rest of the job takes on each count, of shape (2, counts).

        On one node as far as the counts fit there, and on several. Between two estimates of the gradients,
        the progress per second is their geometric mean.
        """
        job, counts = self.job, tuple(self.counts)
        assert job.estimate is not None
        estimates = ((0.0, job.estimate), *job.later_estimates)
        ends = [*(progress for progress, _ in job.later_estimates), remaining]
        fitting = len(counts) if self.node_size is None else bisect_right(counts, self.node_size)
        total, before = np.zeros((2, len(counts))), None
        for (begin, estimate), end in zip(reversed(estimates), reversed(ends), strict=True):
            table = self._table(counts, estimate)
            one, several = self._progress_per_second(table)
            present = 1 / np.array([np.concatenate((one[:fitting], several[fitting:])), several])
            total += (end - begin) * (present if before is None else np.sqrt(present * before))
            before = present
        return total

    def _utilities(self, change: int, trial: int, bonus: npt.NDArray[np.int64] | int) -> UtilityTables:
        counts, *logs = self._log_goodputs()
        present = self.present_count or self.counts[0]
        if self.job.moves:
            present = max(self.job.replicas, present)
        is_trial = np.array(counts) > max(self.largest_measured, present)
        costs = np.where(is_trial, trial, np.where(np.array(counts) != present, change, 0))
        values = np.array(logs) - _growth_penalty(counts, present)
        weighted = np.rint(UTILITY_UNIT * self.weight * values).astype(np.int64) - costs + bonus
        if self._leaves_present_count:
            weighted[:, counts.index(self.job.replicas)] -= INEFFICIENT_COST
        one, several = weighted.tolist()
        return dict(zip(counts, one, strict=True)), dict(zip(counts, several, strict=True))

    def _cost(self, factor: float | None) -> int:
        return FORCED_CHANGE_COST if factor is None else round(UTILITY_UNIT * self.weight * log(factor))

    def change(self, now: float) -> Change:
        """Return what a change from the present count has to be worth."""
        job = self.job
        if job.stable_since is None:
            return Change(None, None, "its last change is in progress")
        window, age = stabilization_seconds(job.restart_seconds), now - job.stable_since
        if age < window:
            return Change(
                None,
                None,
                "it changed {:.0f} s ago, and changes again after {:.0f} s at the earliest",
                (age, window),
            )
        if self.goodput(job.replicas) is None:
            return Change(None, None, "it is not measured yet")
        seconds = self.seconds_left(job.replicas)
        left = HORIZON if seconds is None else seconds - job.prepare_seconds
        if left <= job.restart_seconds:
            return Change(None, None, "it ends before a change would pay off")
        # The factor of goodput at which the job has made the same progress at its end as without the change.
        restart = 1 / (1 - job.restart_seconds / left)
        factor, trial_factor = max(restart, MIN_CHANGE), max(restart, MIN_SPEEDUP)
        return Change(
            factor,
            trial_factor,
            "a change interrupts training for {:.3g} s, and must be worth {:.2f} times the progress per "
            "second, or {:.2f} times on more replicas than were measured",
            (job.restart_seconds, factor, trial_factor),
        )

    def move_cost(self, now: float) -> int | None:
        """Return what a move to another type of accelerator costs; None if it may not move."""
        job = self.job
        if not job.replicas:
            return 0
        seconds = job.restart_seconds if job.move_seconds is None else job.move_seconds
        as_move = replace(self, job=replace(job, restart_seconds=seconds))
        return None if (factor := as_move.change(now).factor) is None else self._cost(factor * MOVE_MARGIN)

    def prediction(self, count: int) -> Prediction | None:
        """Return the prediction for a count; None if there is none."""
        if self.table is None or count not in self.table.counts:
            return None
        on_one_node = self.node_size is None or count <= self.node_size
        assert self.job.estimate is not None
        index = self.table.counts.index(count)
        return self.table.prediction(index, self.job.estimate, on_one_node=on_one_node)

    @cached_property
    def _leaves_present_count(self) -> bool:
        """Whether a sample is worth too little on the present count, beyond what may be noise."""
        job, count = self.job, self.present_count
        least = job.efficiency.least_at_goodput * KEPT_EFFICIENCY
        if not count or count == self.counts[0] or not least or job.estimate is None or self.table is None:
            return False
        (scale,) = smallest_scales(job.bounds, (count,))
        return job.estimate.cautious.efficiency(scale) < least

    @property
    def efficiency_limit(self) -> str | None:
        """Which counts have no batch within the bound of the efficiency, for people; None if all have."""
        job = self.job
        counts = job.valid_counts
        refused = set(counts).difference(_efficient_counts(replace(job, replicas=0), counts))
        return self._inefficient_on(min(refused)) if refused else None

    def _inefficient_on(self, count: int) -> str:
        return (
            f"the efficiency of every batch on {_replicas(count)} is below efficiencyTarget "
            f"{self.job.efficiency.least:g}, a bound for jobs whose length is in samples"
        )

    def reason(self, count: int) -> str:
        """Return why the job gets `count` replicas, for events and conditions."""
        job, before = self.job, self.job.replicas
        if not self.counts:
            if job.min_replicas > job.max_replicas:
                return f"minReplicas {job.min_replicas} is greater than maxReplicas {job.max_replicas}"
            return f"no replica count from {job.min_replicas} to {job.max_replicas} is valid"
        if count == 0:
            return f"Insufficient capacity for {_replicas(self.counts[0])}"
        if before == 0:
            return f"started on {_replicas(count)}"
        if job.moves:
            return f"moves to {_replicas(count)} of the type {job.accelerator}"
        if count == before:
            return "unchanged"
        if self.present_count is None:
            if job.limit is not None and before > job.limit and is_valid_replicas(job.bounds, before):
                return job.limit_reason or f"{_replicas(before)} could not be scheduled"
            return f"{_replicas(before)} {'is' if before == 1 else 'are'} no longer valid"
        if self._leaves_present_count:
            return self._inefficient_on(before)
        cause = "frees capacity for other jobs"
        old, new = self.prediction(before), self.prediction(count)
        if old is None or new is None:
            return cause
        effect = (
            f"predicted gain {_gain(old)} -> {_gain(new)}, step time {_step_time(old)} -> {_step_time(new)}, "
            f"{new.goodput / old.goodput:.1f} times the progress per second"
        )
        if new.goodput <= old.goodput:
            return f"{cause}: {effect}"
        return effect if count > before else f"fewer replicas are faster: {effect}"


def _efficient_counts(job: JobState, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest and the present count, and those with a batch within the bound of the efficiency.

    Where no batch of a count is within it, each sample would be worth less there than the job allows.
    """
    least = job.efficiency.least_at_goodput
    if not least or job.estimate is None:
        return counts
    estimate = job.estimate.cautious
    return tuple(
        count
        for count, scale in zip(counts, smallest_scales(job.bounds, counts), strict=True)
        if count in (counts[0], job.replicas) or estimate.efficiency(scale) >= least * (1 - TOLERANCE)
    )


_prediction_inputs = attrgetter(
    "bounds",
    "efficiency",
    "min_replicas",
    "max_replicas",
    "limit",
    "replicas",
    "largest",
    "estimate",
    "step_times",
    "template_step_times",
    "moves",
)
"""All of a job's state that its counts and their goodputs depend on."""


def utilities_of(
    jobs: Sequence[JobState],
    node_sizes: Sequence[int | None],
    *,
    fills_nodes: bool = False,
    before: Mapping[str, JobUtility] = MappingProxyType({}),
) -> list[JobUtility]:
    """Return `JobUtility.of` for each job."""
    known = [before.get(job.id) for job in jobs]
    is_same = [
        each is not None and (each.job is job or _measured(each.job) == _measured(job))
        for job, each in zip(jobs, known, strict=True)
    ]
    # Fitting takes most of the time of a first decision.
    fitted = iter(fit_all([_measured(job) for job, same in zip(jobs, is_same, strict=True) if not same]))
    return [
        JobUtility.of(
            job,
            size,
            fills_nodes=fills_nodes,
            before=each,
            model=each.model if same and each is not None else next(fitted),
        )
        for job, size, each, same in zip(jobs, node_sizes, known, is_same, strict=True)
    ]


_measured = attrgetter("step_times", "template_step_times")


def weights_by_size(
    sizes: Mapping[str, float | None], fairness: float = DEFAULT_FAIRNESS
) -> dict[str, float]:
    """Return the weights of jobs by remaining size.

    A fairness of 0 gives the lowest mean completion time, 1 gives equal weights (proportionally fair, Kelly
    1997), and in between the weights are the weighted mean of both. A job of unknown size has the weight 1.
    """
    # Of m jobs, the i-th largest has the weight m * ((i / m)^q - ((i - 1) / m)^q) with q = 1 / (1 - p), for
    # goodput that grows with the power p of the replicas (heSRPT, Berg, Vesilo and Harchol-Balter 2020,
    # theorem 4). The weights are 1 on average.
    ranked = sorted(((size, name) for name, size in sizes.items() if size is not None), reverse=True)
    number, exponent = len(ranked), 1 / (1 - SPEEDUP_EXPONENT)
    weights = {
        name: number * ((i / number) ** exponent - ((i - 1) / number) ** exponent)
        for i, (_, name) in enumerate(ranked, 1)
    }
    return {name: (1 - fairness) * weights.get(name, 1.0) + fairness for name in sizes}


def weighted(
    jobs: Sequence[JobUtility], weights: Mapping[str, float] | None = None, fairness: float = DEFAULT_FAIRNESS
) -> list[JobUtility]:
    """Return the jobs with weights."""
    if weights is None:
        weights = weights_by_size({utility.job.id: utility.remaining_seconds for utility in jobs}, fairness)
    return [
        each if each.weight == weights[each.job.id] else each._with(each.job, weights[each.job.id])
        for each in jobs
    ]


@lru_cache(maxsize=4096)
def _growth_penalty(counts: tuple[int, ...], before: int) -> Floats:
    """Return the logarithm of what each count has to be worth for its growth from `before`."""
    penalty: Floats = log(MIN_SPEEDUP) * np.maximum(np.log2(np.array(counts) / before), 0.0)
    return penalty


@lru_cache(maxsize=4096)
def _filling_nodes(counts: tuple[int, ...], node_size: int, present: int) -> tuple[int, ...]:
    """Return the counts that leave no room on nodes that others can't use, and the ends and the present one.

    Counts that divide a node, or fill nodes, can be packed without splitting a job that fits on a node.
    """
    kept = {counts[0], counts[-1], present} if counts else set()
    return tuple(
        count for count in counts if count % node_size == 0 or node_size % count == 0 or count in kept
    )


def _gain(prediction: Prediction) -> str:
    """Return a gain, and between which it is if that makes a difference."""
    least, most = (f"{gain:.1f}" for gain in prediction.gain_range)
    gain = f"{prediction.gain:.1f}"
    return gain if least == most else f"{gain} ({least} to {most})"


def _step_time(prediction: Prediction) -> str:
    seconds = prediction.step_time
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
