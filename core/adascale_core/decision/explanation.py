"""Why a job has its replica count, from the same inputs as the decision.

For each count: the predicted goodput and end, which other jobs would have to give up replicas for it, and why
it was not chosen. The replicas of other jobs are taken where they cost the least utility per replica, one job
after the other; this is near the cheapest way, not always the cheapest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import log2

from adascale_core.decision.decide import DecisionProblem, Solution
from adascale_core.decision.job_utility import MAX_GROWTH, MIN_SPEEDUP, JobUtility
from adascale_core.views.decision import CountView, DecisionView, GivenReplicas, LimitKind, LimitView, Verdict

MAX_COUNTS = 24
"""Counts in an explanation."""
MAX_TRIES = 8
"""Packings of unlike replicas that are tried for a count."""
MAX_GIVING = 8
"""Jobs that would have to give up replicas for a count; a count that needs more is explained without them."""
MAX_NAMED = 2
"""Jobs that are named in a text, which has at most 500 characters."""


def explain(solution: Solution, now: float, time: float, jobs: Collection[str]) -> dict[str, DecisionView]:
    """Return the explanations of the decisions about some jobs, by job id.

    `now` is on the clock of `JobState.stable_since`, `time` is the same moment in seconds since 1970.
    """
    found: dict[str, DecisionView] = {}
    for problem in solution.problems:
        if wanted := [utility for utility in problem.queue if utility.job.id in jobs]:
            explainer = _Explainer(problem, solution, now)
            found |= {utility.job.id: explainer.explain(utility, time) for utility in wanted}
    return found


class _Explainer:
    def __init__(self, problem: DecisionProblem, solution: Solution, now: float) -> None:
        self.problem = problem
        self._types: dict[str, list[JobUtility]] = {}
        """Job id -> its utilities on each type of accelerator, if there are several."""
        for (job, _), utility in () if solution.choice is None else solution.choice.known.items():
            self._types.setdefault(job, []).append(utility)
        self._now = now
        self._decisions = solution.decisions
        self._counts = {each.job.id: self._decisions[each.job.id].replicas for each in problem.queue}
        self._total = problem.bound.total_for(problem.valid)
        """How many replicas fit in any shares; None if no such number exists."""
        self._utilities = {utility.job.id: utility.utilities(now)[0] for utility in problem.queue}
        self._running = [each for each in problem.queue if each.counts and self._counts[each.job.id]]
        self._needed = list(accumulate(utility.counts[0] for utility in self._running))
        """How many replicas the running jobs need at least, up to each of them."""
        self._steps: list[tuple[float, str, int]] = []
        for job, count in self._counts.items():
            self._push_step(self._steps, job, count)

    def explain(self, utility: JobUtility, time: float) -> DecisionView:
        """Return the explanation of the decision about a job."""
        job, decision = utility.job, self._decisions[utility.job.id]
        reason = decision.reason
        if utility.counts and decision.replicas == job.replicas and decision.replicas:
            change = utility.change(self._now)
            why = change.reason if change.factor is None else "no other count is worth a change"
            reason = f"{reason}: {why}" if reason == "unchanged" else reason
        return DecisionView(
            job=job.id,
            replicas=decision.replicas,
            present=job.replicas,
            waiting=decision.waiting,
            reason=reason,
            time=time,
            counts=tuple(self._count_views(utility, decision.replicas)),
            limits=tuple(self._limits(utility, decision.replicas)),
        )

    def _count_views(self, utility: JobUtility, chosen: int) -> Iterable[CountView]:
        job = utility.job
        counts, steps = dict(self._counts), list(self._steps)
        given: dict[str, int] | None = {}
        for count in _shown(utility, chosen):
            if given is not None and count > chosen:
                counts[job.id] = count
                given = self._make_room(job.id, counts, steps)
            goodput = utility.goodput(count)
            seconds_left = utility.seconds_left(count)
            if seconds_left is not None and count != job.replicas:
                seconds_left += job.restart_seconds
            verdict, reason = self._verdict(utility, chosen, count, given)
            prediction = utility.prediction(count)
            gains = () if prediction is None else (prediction.gain, *prediction.gain_range)
            yield CountView(
                count,
                goodput,
                seconds_left,
                tuple(GivenReplicas(name, replicas) for name, replicas in sorted((given or {}).items())),
                verdict,
                reason,
                *gains,
            )

    def _make_room(
        self, job: str, counts: dict[str, int], steps: list[tuple[float, str, int]]
    ) -> dict[str, int] | None:
        """Lower `counts` of other jobs until all fit; return job id -> replicas to give up.

        None if all do not fit, or if it would take too many steps.
        """
        tries = MAX_TRIES
        while not self._fits(counts):
            # Where replicas are not alike, each attempt packs the replicas of all jobs.
            tries -= self._total is None
            if not steps or not tries:
                return None
            _, other, count = heappop(steps)
            if other != job:
                counts[other] = count
                self._push_step(steps, other, count)
        given = {
            other: self._counts[other] - count
            for other, count in counts.items()
            if count < self._counts[other]
        }
        return given if len(given) <= MAX_GIVING else None

    def _fits(self, counts: Mapping[str, int]) -> bool:
        if self._total is not None:
            return sum(counts.values()) <= self._total
        return self.problem.bound.fits(counts)

    def _push_step(self, steps: list[tuple[float, str, int]], job: str, present: int) -> None:
        """Add the step down from a count that loses the least utility per replica."""
        table = self._utilities[job]
        if present in table:
            losses = [
                ((table[present] - table[count]) / (present - count), job, count)
                for count in table
                if count < present
            ]
            if losses:
                heappush(steps, min(losses))

    def _verdict(
        self, utility: JobUtility, chosen: int, count: int, given: Mapping[str, int] | None
    ) -> tuple[Verdict, str]:
        table = self._utilities[utility.job.id]
        if count == chosen:
            return Verdict.CHOSEN, "chosen"
        if count not in table:
            return Verdict.NOT_MEASURED, _not_measured(utility)
        if chosen == 0 or given is None:
            return Verdict.NO_CAPACITY, "does not fit beside the smallest counts of the other jobs"
        change = utility.change(self._now)
        if utility.present_count == chosen and change.factor is None:
            return Verdict.NO_CHANGE, change.reason
        if chosen not in table or table[count] <= table[chosen]:
            return Verdict.NOT_WORTH, self._not_worth(utility, chosen, count)
        if given:
            return Verdict.OTHER_JOBS, "other jobs would lose more than this job would gain"
        return Verdict.NODES, "the free places on the nodes do not allow it, or make it slower"

    def _not_worth(self, utility: JobUtility, chosen: int, count: int) -> str:
        before, after = utility.goodput(chosen), utility.goodput(count)
        if before is None or after is None:
            return "it is not measured yet"
        factor = f"{after / before:.2f} times the progress per second"
        if after <= before:
            return f"not faster: {factor}"
        needed = float(MIN_SPEEDUP ** max(log2(count / chosen), 0.0))
        if utility.present_count == chosen:
            change, is_trial = utility.change(self._now), count > max(utility.largest_measured, chosen)
            needed *= (change.trial_factor if is_trial else change.factor) or 1.0
        return f"{factor}: the change and its replicas must be worth {needed:.2f} times"

    def _limits(self, utility: JobUtility, count: int) -> Iterable[LimitView]:
        job, counts = utility.job, utility.counts
        if not counts:
            yield LimitView(LimitKind.BOUNDS, utility.reason(0))
            return
        size = job.bounds.local_bsz_limit
        memory = "" if size is None else f", and memory holds local batches of at most {size}"
        yield LimitView(LimitKind.BOUNDS, f"{counts[0]} to {counts[-1]} replicas are valid{memory}")
        if job.limit is not None:
            limit = f"at most {job.limit} replicas may be scheduled at present"
            reason = f": {job.limit_reason}" if job.limit_reason else ""
            yield LimitView(LimitKind.SCHEDULING, limit + reason)
        if efficiency := utility.efficiency_limit:
            yield LimitView(LimitKind.EFFICIENCY, efficiency)
        if self._total is not None:
            free = max(self._total - sum(self._counts.values()), 0)
            yield LimitView(LimitKind.CAPACITY, f"{free} of {self._total} replicas are free")
        if self._decisions[job.id].waiting:
            yield LimitView(LimitKind.CAPACITY, self._waits_for(utility))
        if job.accelerator is not None:
            yield LimitView(LimitKind.NODES, f"it runs on accelerators of the type {job.accelerator}")
        yield from self._type_limits(utility, count)
        if (size := self.problem.filled_nodes) is not None:
            text = f"a node holds {size}: only counts that divide or fill nodes are considered"
            yield LimitView(LimitKind.NODES, text)
        if max(self._utilities[job.id]) < counts[-1]:
            yield LimitView(LimitKind.MEASUREMENTS, _not_measured(utility))
        if (outlook := utility.deadline_outlook(self._now)) is not None:
            yield LimitView(LimitKind.DEADLINE, f"it has a deadline {outlook}")
        if count and utility.present_count:
            yield LimitView(LimitKind.CHANGE, utility.change(self._now).reason)

    def _type_limits(self, utility: JobUtility, count: int) -> Iterable[LimitView]:
        """Yield what each type of accelerator is worth to a job, those with the highest goodput first."""
        types = self._types.get(utility.job.id, [])
        if len(types) < 2:
            return
        for each in sorted(types, key=lambda each: -(each.goodput(each.counts[0]) or 0.0)):
            job = each.job
            chosen = job.accelerator == utility.job.accelerator
            text = f"on {job.accelerator}{', which was chosen' if chosen else ''}: {_worth(each, count)}"
            if job.moves:
                seconds = job.restart_seconds if job.move_seconds is None else job.move_seconds
                text += f"; a move interrupts training for {seconds:.3g} s"
            yield LimitView(LimitKind.TYPES, f"{text}; {job.assumption}" if job.assumption else text)

    def _waits_for(self, utility: JobUtility) -> str:
        """Return which jobs leave too little capacity for a job that waits."""
        earlier = bisect_left(
            self._running, utility.job.admission_order, key=lambda each: each.job.admission_order
        )
        if not earlier:
            return f"it needs {utility.counts[0]} at least, which do not fit even if no other job runs"
        named = [f"{each.job.id}: {each.counts[0]}" for each in self._running[: min(earlier, MAX_NAMED)]]
        if earlier > MAX_NAMED:
            named.append(f"{earlier - MAX_NAMED} more")
        has_higher = self._running[0].job.priority > utility.job.priority
        before = "have a higher priority or arrived before it" if has_higher else "arrived before it"
        return (
            f"it needs {utility.counts[0]} at least, and waits for jobs to end that {before} and "
            f"need {self._needed[earlier - 1]} at least ({', '.join(named)})"
        )


def _worth(utility: JobUtility, count: int) -> str:
    """Return the goodput of the smallest count on a type, and of the count nearest to `count`."""
    smallest = utility.goodput(utility.counts[0])
    if smallest is None or utility.table is None:
        return "it is not measured, and so not compared"
    nearest = min(utility.table.counts, key=lambda each: (abs(each - count), each))
    text = f"{smallest:.3g} steps per second on {utility.counts[0]}"
    if nearest != utility.counts[0]:
        text += f", {utility.goodput(nearest):.3g} on {nearest}"
    return text


def _shown(utility: JobUtility, chosen: int) -> Sequence[int]:
    """Return at most `MAX_COUNTS` of the candidate counts, ascending, with the most important ones."""
    counts = utility.counts
    if len(counts) <= MAX_COUNTS:
        return counts
    kept = {counts[0], counts[-1], *(each for each in (chosen, utility.job.replicas) if each in counts)}
    if utility.table is not None:
        kept.add(utility.table.counts[-1])
    rest = MAX_COUNTS - len(kept)
    ratio = len(counts) ** (1 / rest)
    for i in range(rest):
        kept.add(counts[min(int(ratio**i), len(counts) - 1)])
    return sorted(kept)


def _not_measured(utility: JobUtility) -> str:
    if utility.table is None:
        return "it is not measured yet, so it does not grow"
    reach = utility.table.counts[-1]
    return (
        f"it grows step by step, to at most {MAX_GROWTH} times the largest measured count: {reach} at present"
    )
