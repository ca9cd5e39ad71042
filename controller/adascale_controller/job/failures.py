"""The failures of a job's program, and the end of a job that does not go on after them.

`FailureCount` has the rule for counting. It is kept together with what is counted, so that each failure
counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from adascale_controller.formatting import plural
from adascale_controller.job.reasons import Reason
from adascale_controller.schema import JobDefinition
from adascale_core.failures import (
    FailureCount,
    ProgramFailure,
    classify_exit,
    describe_exit,
    failure_cause,
    is_permanent,
    repeats_early_failure,
)
from adascale_core.messages.allocation import Allocation
from adascale_core.views.jobs import JobView

LOG_LINES: Final = 20
"""How many lines of the program's output the description of a failure holds."""


def restart_pause(number: int, first: float, longest: float) -> float:
    """Return the seconds before a replica is restarted that has ended so often: they double up to a limit."""
    # The exponent is bounded, because floats overflow.
    return min(first * 2.0 ** min(number - 1, 30), longest)


@dataclass(frozen=True)
class Failures:
    """The failures of a job's program, and what decides whether they count."""

    recorded: FailureCount  # those that are counted already
    seen: Sequence[ProgramFailure]  # of the replicas that are known, in the order of their starts
    view: JobView | None  # the job in the metrics service. None if that does not answer.
    allocation: Allocation | None  # the newest one
    spares: int = 0  # so many may fail before they train without keeping the others from training
    finished: bool = False  # whether the program has finished on rank 0: others that fail do not count

    @cached_property
    def count(self) -> FailureCount:
        """The failures, with those that are seen for the first time."""
        if self.finished:
            return self.recorded
        counted = self.recorded.with_generations({each.generation for each in self.seen})
        starts = self._false_starts.values()
        if self.spares and self._all_train:
            return counted.without_false_starts(starts)
        return counted.with_false_starts(starts, spares=self.spares)

    @property
    def is_permanent(self) -> bool:
        """Whether the program has failed in a way that a restart would repeat."""
        return any(
            each.is_reported and is_permanent(classify_exit(each.exit_code), self._measured)
            for each in self._final
        )

    @property
    def is_repeated(self) -> bool:
        """Whether the program has failed twice in the same way before its first step."""
        if self.view is None:
            return False
        latest = self.view.latest.generation if self.view.latest is not None else 0
        replicas = self.allocation.replicas if self.allocation is not None else None
        reported = (each for each in self._final if each.is_reported)
        return repeats_early_failure(reported, latest, replicas, self._measured)

    @property
    def last(self) -> str:
        """A description of the latest failure with the last lines of output; empty without any."""
        if not self.seen:
            return ""
        failure = self.seen[-1]
        place = f" ({failure.place})" if failure.place else ""
        text = f"Replica {failure.replica}{place} failed: {describe_exit(failure.exit_code)}"
        lines = failure.log.rstrip().splitlines()[-LOG_LINES:]
        return "\n".join([f"{text}:", *lines]) if lines else text

    def describe(self, limit: int) -> str:
        """Return which failure the latest one is, of a job with this `backoffLimit`."""
        return f"Failure {self.count.count} of the program (backoffLimit {limit}). {self.last}"

    @cached_property
    def _false_starts(self) -> Counter[int]:
        """Replica -> how often it has failed before it trained."""
        return Counter(each.replica for each in self.seen if each.generation == 0)

    @property
    def _all_train(self) -> bool:
        """Whether as many replicas as allocated have made a step together, whichever starts failed before."""
        view, current = self.view, self.allocation
        if view is None or view.broken or view.active is None or view.latest is None or current is None:
            return False
        return 0 < current.replicas <= view.active.replicas and (
            view.latest.generation >= view.active.generation
        )

    @property
    def _measured(self) -> set[int]:
        """The replica counts with measured step times. One replica is assumed without the service."""
        return {each.replicas for each in self.view.step_times} if self.view is not None else {1}

    @property
    def _final(self) -> list[ProgramFailure]:
        """The failures that show whether the program would fail again.

        Those before training, of as many replicas as there are spares, do not show it: another replica takes
        their place. Nor do those that are counted already: the job continued after them.
        """
        if self.finished:
            return []
        starts = self._false_starts
        excused = set(sorted(starts, key=lambda rank: (-starts[rank], -rank))[: self.spares])
        excused |= {rank for rank, count in starts.items() if count <= self.recorded.false_starts}
        return [each for each in self.seen if each.generation or each.replica not in excused]


@dataclass(frozen=True)
class End:
    """The end of a job that has failed for good."""

    reason: Reason
    message: str  # begins with the error of the program if it is known
    failure: str = ""  # the latest failure of the program, with the last lines of its output

    def __str__(self) -> str:
        return ". ".join(filter(None, (self.message, self.failure)))

    @property
    def summary(self) -> str:
        """The end without the lines of output."""
        return str(self).split("\n")[0].rstrip(":")


def deadline(job: JobDefinition, started_at: float | None) -> float | None:
    """Return when `activeDeadlineSeconds` has passed; None while it does not count, as before the start."""
    seconds = job.spec.active_deadline_seconds
    return None if seconds is None or started_at is None else started_at + seconds


def find_end(
    job: JobDefinition,
    failures: Failures,
    started_at: float | None,
    now: float,
    *,
    restarts_before: int = 0,
    out_of_memory: bool = False,
) -> End | None:
    """Return the end of a job; None if it goes on.

    `started_at` is on the clock of `now`, and None before the start. `restarts_before` restarts without
    progress do not count. `out_of_memory`: a replica was ended at its memory limit.
    """
    due = deadline(job, started_at)
    if due is not None and now >= due:
        message = f"activeDeadlineSeconds ({job.spec.active_deadline_seconds}) exceeded"
        return End(Reason.DEADLINE_EXCEEDED, message)
    count, limit = failures.count, job.spec.backoff_limit
    if count.exceeds(limit):
        message = f"The program has failed {plural(count.count, 'time')}, backoffLimit ({limit}) exceeded"
        return _with_cause(Reason.BACKOFF_LIMIT_EXCEEDED, message, failures)
    most, view = job.spec.max_restarts_without_progress, failures.view
    restarts = view.restarts_without_progress - restarts_before if view is not None else 0
    if view is not None and restarts > most:
        return End(
            Reason.NO_PROGRESS,
            f"The trainers were lost {plural(restarts, 'time')} without a step in between, "
            f"maxRestartsWithoutProgress ({most}) exceeded{_ends(view, out_of_memory=out_of_memory)}",
        )
    if failures.is_permanent:
        message = "The program is not restarted, because it would fail again"
        return _with_cause(Reason.PROGRAM_FAILED, message, failures)
    if failures.is_repeated:
        message = "The program has failed twice in the same way before its first step"
        return _with_cause(Reason.PROGRAM_FAILED, message, failures)
    return None


def _with_cause(reason: Reason, message: str, failures: Failures) -> End:
    last = failures.last
    return End(reason, ". ".join(filter(None, (failure_cause(last), message))), last)


def _ends(view: JobView, *, out_of_memory: bool) -> str:
    """Return how trainers have ended, in brackets; empty if no replica has registered it."""
    codes = {replica.exit_code for replica in view.replicas if replica.exit_code is not None}
    ends = [*(["OOMKilled"] if out_of_memory else []), *map(describe_exit, sorted(codes))]
    return f" ({', '.join(ends)})" if ends else ""
