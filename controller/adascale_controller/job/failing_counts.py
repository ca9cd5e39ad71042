"""Replica counts on which the program fails at once, although it has trained on fewer replicas.

An optimizer with parameters outside the model, or a layer that works in one process only, fails as soon as
there are several replicas. Such a count is given up like one that cannot be scheduled: training continues on
fewer replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from adascale_controller.formatting import plural
from adascale_core.failures import ExitClass, ProgramFailure, classify_exit, describe_exit
from adascale_core.views.jobs import JobView

MIN_STEPS = 10
"""Steps after which a program is taken to work on a replica count."""
MAX_GENERATIONS = 100
"""Generations whose replica count and steps are kept."""


@dataclass(frozen=True)
class FailingCount:
    """A replica count that is given up."""

    count: int
    limit: int  # the largest count below it on which the program has trained
    failure: str  # how the program has failed, for messages

    def __str__(self) -> str:
        return (
            f"the program failed at once on {plural(self.count, 'replica')} ({self.failure}), but trained on "
            f"{self.limit}"
        )


class FailingCounts:
    """The replica counts of a job that are given up: call `update` with each view of it."""

    def __init__(self, given_up: FailingCount | None = None) -> None:
        self.given_up = given_up
        """The smallest count that is given up; all larger counts are given up with it."""
        self._counts: dict[int, int] = {}
        self._first_steps: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._failed: set[int] = set()

    @property
    def limit(self) -> int | None:
        """The largest count that may be used; None if none is given up."""
        return self.given_up.limit if self.given_up is not None else None

    def update(self, view: JobView) -> None:
        """Record the generations and the steps in a view."""
        for allocation in (view.desired, view.active):
            if allocation is not None and allocation.replicas > 0:
                self._counts[allocation.generation] = allocation.replicas
        report = view.latest
        if report is not None:
            self._counts[report.generation] = report.replicas
            first = self._first_steps.setdefault(report.generation, report.step)
            self._steps[report.generation] = report.step - first + 1
        for old in sorted(self._counts)[:-MAX_GENERATIONS]:
            del self._counts[old]
            self._first_steps.pop(old, None)
            self._steps.pop(old, None)

    def fail(self, failure: ProgramFailure, view: JobView) -> FailingCount | None:
        """Record that the program has failed, and return the count that is given up for it."""
        generation = failure.generation
        # It would fail again, however many steps it has made.
        at_once = classify_exit(failure.exit_code) is ExitClass.SINGLE_REPLICA_PROGRAM
        if at_once and not generation and view.desired is not None:
            generation = view.desired.generation  # it has failed before it joined this one
        count = self._counts.get(generation)
        if generation in self._failed or count is None:
            return None
        self._failed.add(generation)
        if self._steps.get(generation, 0) >= MIN_STEPS and not at_once:
            return None
        if self.limit is not None and count > self.limit:
            return None
        measured = {step_time.replicas for step_time in view.step_times}
        trained = {self._counts[each] for each, steps in self._steps.items() if steps >= MIN_STEPS}
        works = max((each for each in measured | trained if each < count), default=None)
        if works is None:
            return None
        how = f"replica {failure.replica}: {describe_exit(failure.exit_code)}"
        self.given_up = FailingCount(count, works, how)
        return self.given_up
