"""Decisions of the scheduler about some jobs, as a cycle makes them."""

from __future__ import annotations

from collections.abc import Mapping

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.schedule.scheduler import DecisionResult, Scheduler
from adascale_core.decision.decide import Decision


def decided(scheduler: Scheduler, *jobs: ObservedJob) -> Mapping[str, Decision]:
    """Return the decisions about these jobs, which are all that may run, without nodes."""
    result = result_of(scheduler, *jobs)
    return dict(result.decisions)


def result_of(scheduler: Scheduler, *jobs: ObservedJob) -> DecisionResult:
    """Decide about these jobs, which are all that may run, without nodes, and adopt it."""
    scheduler.retain({job.resource.uid for job in jobs})
    scheduler.set_resources(None, ())
    for job in jobs:
        scheduler.update(job)
    result = scheduler.solve(scheduler.decision_input())
    scheduler.adopt(result, jobs[0].now if jobs else 0.0)
    return result
