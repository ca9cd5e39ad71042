"""Containers that run on beside the worker, and containers that admission puts before it."""

from __future__ import annotations

from typing import Any

from adascale_controller.operator.types.kubernetes import Resource
from support.world import World

Object = dict[str, Any]
SIDECAR = {"name": "istio-proxy", "image": "proxy:1"}


def inject(pod: Object) -> Object:
    """Put a container before all others, as some webhooks do."""
    return {**pod, "spec": {**pod["spec"], "containers": [SIDECAR, *pod["spec"]["containers"]]}}


def end_worker(world: World, code: int) -> str:
    """End the container that trains, called trainer, while the sidecar runs on. Returns the pod's name."""
    (name,) = world.agents
    raw = world.objects[Resource.PODS][name]
    statuses = [
        {"name": "istio-proxy", "state": {"running": {}}},
        {"name": "trainer", "state": {"terminated": {"exitCode": code, "reason": "Error"}}},
    ]
    world.write(Resource.PODS, {**raw, "status": {"phase": "Running", "containerStatuses": statuses}})
    world.agents.pop(name)
    return name


def trained() -> World:
    """Return a world with a job that trains in a container called trainer behind an injected container."""
    world = World(admit=inject)
    container = {"name": "trainer", "image": "trainer:1", "command": ["python", "train.py"]}
    world.submit(template={"spec": {"containers": [container]}})
    world.run_cycles()
    return world


def test_the_agent_starts_the_worker_and_not_what_stands_first() -> None:
    world = trained()
    (pod,) = world.live_pods
    sidecar, worker = pod["spec"]["containers"]
    assert sidecar == SIDECAR
    assert worker["command"] == ["adascale-agent", "--", "python", "train.py"]


def test_a_killed_worker_is_replaced_though_its_sidecar_runs_on() -> None:
    world = trained()
    name = end_worker(world, 137)
    world.deliver()
    world.cycle()
    assert f"end pod {name}" in world.writes
    (event,) = [event for event in world.events if event.reason == "SidecarRunsOn"]
    assert "container istio-proxy runs on" in event.message
    world.deliver()
    world.cycle()
    assert f"end pod {name}" not in world.writes, "it is ended once"


def test_a_job_whose_worker_has_finished_is_complete_and_frees_its_pods() -> None:
    world = trained()
    end_worker(world, 0)
    world.run_cycles()
    assert world.status["state"] == "Complete"
    assert world.live_pods == []
    assert "SidecarRunsOn" in [event.reason for event in world.events]
    assert world.writes == []
