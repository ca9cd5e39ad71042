"""Deadlines of the jobs of a workload, drawn as for ElasticFlow (Gu et al. 2023, section 6.1).

A deadline is the submission plus the time that the job takes on the replicas and with the batch size of the
workload, times a tightness that is uniform between two numbers. A job of a tightness below 1 has to run on
more replicas than it requests, or with a larger batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from adascale_controller.simulation.application import Application, Placement, fixed_plan
from adascale_controller.simulation.engine import Settings, Submission


def with_deadlines(
    submissions: Sequence[Submission], settings: Settings, tightness: tuple[float, float], seed: int
) -> list[Submission]:
    """Return the jobs with drawn deadlines, in seconds from the begin of the workload."""
    random = Random(seed)
    return [
        replace(each, deadline=each.time + random.uniform(*tightness) * requested_duration(each, settings))
        for each in submissions
    ]


def requested_duration(job: Submission, settings: Settings) -> float:
    """Return the seconds of a job on its requested replicas and batch size, with its start.

    On a cluster with several types of accelerators it is the mean over the types, each as often as it has
    GPUs.
    """
    total = 0.0
    for name, nodes in settings.nodes_by_type().items():
        sizes = [settings.nodes[node] for node in nodes]
        replicas = min(job.replicas, sum(sizes))
        seconds = training_seconds(
            job.by_type.get(name, job.application), packed(replicas, max(sizes)), job.batch_size
        )
        total += sum(sizes) * seconds
    return total / settings.total + (settings.restart if job.restart is None else job.restart)


def packed(replicas: int, node: int) -> Placement:
    """Return the placement of replicas on as few nodes of a size as hold them."""
    full, rest = divmod(replicas, node)
    return (node,) * full + ((rest,) if rest else ())


def step_seconds(application: Application, placement: Placement, batch_size: int) -> float:
    """Return the true seconds of a step with a batch size."""
    plan = fixed_plan(application, sum(placement), batch_size)
    step, sync = application.step_time(placement, plan.local_bsz)
    return step + (step - sync) * (plan.accumulation - 1)


def training_seconds(application: Application, placement: Placement, batch_size: int) -> float:
    """Return the seconds of all steps with a batch size."""
    steps = application.iterations(batch_size, len(application.epoch_ends) - 1)
    return steps * step_seconds(application, placement, batch_size)
