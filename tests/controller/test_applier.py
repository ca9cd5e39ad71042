"""Writes of the operator, as the applier carries them out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from adascale_controller.operator.apply.applier import TELEMETRY_INTERVAL, Applier
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.types.actions import Actions
from adascale_controller.operator.types.kubernetes import Resource
from support.fake_cluster import FakeCluster
from support.observed_jobs import actions_for, training_job
from support.world import World


def test_of_more_telemetry_than_a_cycle_writes_the_oldest_is_written_first() -> None:
    world = World()
    applier = Applier(FakeCluster(world), world.service, lambda *_: None, "operator")
    actions = replace(actions_for(training_job(), 2), allocate=None, status_changed=False)
    jobs = [telemetry_of(world, f"job-{number}") for number in range(5)]
    rounds: list[set[str]] = []
    for number in range(5):
        later = [replace(job, now=job.now + number * TELEMETRY_INTERVAL) for job in jobs]
        due = [(job, actions) for job in later if applier.telemetry_due(job, actions)]
        chosen = applier.oldest_telemetry(due, 2)
        rounds.append({job.resource.name for job, _ in chosen})
        asyncio.run(write(applier, chosen))
    assert all(len(names) == 2 for names in rounds)
    assert rounds[0] | rounds[1] | rounds[2] == {job.resource.name for job in jobs}


def telemetry_of(world: World, name: str) -> ObservedJob:
    """Return a job that trains, whose AdaScaleJob is in the cluster."""
    raw = world.create(Resource.ADASCALEJOBS, {"metadata": {"name": name}, "spec": {}})
    job = training_job()
    return replace(job, resource=replace(job.resource, name=name, uid=raw["metadata"]["uid"]))


async def write(applier: Applier, chosen: list[tuple[ObservedJob, Actions]]) -> None:
    for job, actions in chosen:
        await applier.apply(job, actions)
