"""Decides the replica counts of all jobs at once, with the room that there is."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adascale_controller.operator.apart import Apart
from adascale_controller.operator.capacity import free_nodes
from adascale_controller.operator.looking import Look
from adascale_controller.operator.stage import Kind as StageKind
from adascale_core.batch import valid_replicas
from adascale_core.capacity import Capacity, NodeCapacity, ReplicaCapacity
from adascale_core.decision import Decision, decide
from adascale_core.job_state import JobState
from adascale_core.views import JobView

Raw = Mapping[str, Any]
"""An object of the Kubernetes API, as its JSON."""


def decide_all(
    looks: Iterable[Look], nodes: Sequence[Raw] | None, pods: Sequence[Raw], apart: Apart
) -> dict[str, Decision]:
    """The replica counts of all jobs that may run.

    Args:
        looks: all jobs.
        nodes: all nodes; none: they may not be read.
        pods: all pods.
        apart: keeps what goes wrong with one job from the others.
    """
    running = {look.seen.job.id: look for look in looks if look.stage.kind is StageKind.RUN}
    room = _room(running.values(), nodes, pods)
    states = []
    for name, look in running.items():
        with apart.job(name):
            states.append(_state(look, room))
    # Durations are measured on a clock that never goes back, and so is the time of the decision.
    decisions = decide(states, room, time.monotonic())
    for state in states:
        wish, decision = running[state.id].seen.job.valid.replicas, decisions[state.id]
        if wish is not None and state.limit == wish and decision.replicas < state.replicas:
            decisions[state.id] = replace(decision, reason=f"spec.replicas is {wish}")
    return decisions


def _room(looks: Collection[Look], nodes: Sequence[Raw] | None, pods: Sequence[Raw]) -> Capacity:
    if nodes is None:
        return ReplicaCapacity(sum(look.seen.job.valid.spec.max_replicas for look in looks))
    demands = {look.seen.job.id: look.demand for look in looks if look.demand is not None}
    return NodeCapacity(free_nodes(nodes, pods, demands), demands)


def _state(look: Look, room: Capacity) -> JobState:
    """A job as the decision has to know it."""
    seen, memory = look.seen, look.memory
    job, view = seen.job.valid, seen.service or JobView.empty()
    memory.measurements.update(view, time.monotonic())
    state = memory.measurements.job_state(job, view, job.spec.scale_invariant_steps)
    standing = seen.standing
    at_work = view.desired == standing and seen.training > 0
    most = room.max_replicas(job.id)
    _try(look, most)
    limits = [limit for limit in (job.replicas, memory.trials.limit(most, seen.now)) if limit is not None]
    return replace(
        state,
        arrival=float(seen.job.created_at),
        replicas=standing.replicas if standing is not None else 0,
        stable_since=state.stable_since if at_work else None,
        limit=min(limits, default=None),
    )


def _try(look: Look, most: int) -> None:
    """Take in how the present allocation fares."""
    seen, standing = look.seen, look.seen.standing
    if standing is None or standing.replicas == 0:
        return
    problem = seen.problem(range(standing.replicas))
    present = seen.present
    placed = 0
    while placed in present and present[placed].scheduled and present[placed].problem is None:
        placed += 1
    spec = seen.job.valid.spec
    look.memory.trials.see(
        generation=standing.generation,
        count=standing.replicas,
        training=seen.training,
        problem=(problem.reason, problem.message) if problem is not None else None,
        placed=placed,
        valid=[one for one in valid_replicas(spec.bounds, spec.max_replicas) if one >= spec.min_replicas],
        room=most,
        now=seen.now,
    )
