"""Decisions of the scheduler about some jobs, as a cycle makes them."""

from __future__ import annotations

from collections.abc import Mapping

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.schedule.scheduler import Answer, Scheduler
from adascale_core.decision import Decision


def decided(scheduler: Scheduler, *jobs: ObservedJob) -> Mapping[str, Decision]:
    """Return the decisions about these jobs, which are all that may run, without nodes."""
    answer = answered(scheduler, *jobs)
    return {job_id: answer.decisions[job_id] for job_id in answer.decisions}


def answered(scheduler: Scheduler, *jobs: ObservedJob) -> Answer:
    """Decide about these jobs, which are all that may run, without nodes, and adopt it."""
    scheduler.retain({job.resource.uid for job in jobs})
    scheduler.set_resources(None, ())
    for job in jobs:
        scheduler.update(job)
    answer = scheduler.solve(scheduler.question())
    scheduler.adopt(answer, jobs[0].now if jobs else 0.0)
    return answer
