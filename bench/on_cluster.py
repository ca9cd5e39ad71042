"""How long an elastic job takes to start and to change its size on a Kubernetes cluster.

    KUBECONFIG=... .venv/bin/python bench/on_cluster.py [--rounds N]

Installs the operator as the tests do, and measures by a job whose steps take 50 ms:

- from `kubectl apply` to the first optimizer step;
- from a decision (the allocation in the job's status) to the first step at the new size, up and down;
- the downtime within that time: from the last step before the change to the first step after it;
- from the moment when the node of one of two replicas is frozen, so that its connections stay open and
  silent, to the next step of the other. It contains ADASCALE_PEER_TIMEOUT (5 s). This needs two nodes, and a
  command in ADASCALE_TEST_NODE that is called with NAME freeze|thaw.

Times of steps are those of the workers' own reports, of decisions those at which this program saw them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kubernetes import config

from cluster.conftest import fresh_namespace, run_kubectl
from cluster.system import JobUnderTest, System, Workspace, job_manifest, wait_until
from cluster.test_outages import SPREAD, frozen, run_operator_beside_service

SIZES = [1, 2, 4, 2, 1]
PACE = 0.05


def history(system: System, job: JobUnderTest) -> list[dict[str, Any]]:
    """All reports so far."""
    points: list[dict[str, Any]] = system.get(f"/jobs/{job.id}/gain/history?points=5000")["points"]
    return points


def first_step(system: System, job: JobUnderTest, generation: int) -> tuple[float, float | None]:
    """When the first step of a generation was done, and how long training stood still before it."""

    def reported() -> bool:
        try:
            return bool(system.get(f"/jobs/{job.id}/gain")["generation"] >= generation)
        except AssertionError:
            return False

    wait_until(reported, f"a report of generation {generation}", patience=180)
    points = history(system, job)
    first = next(point for point in points if point["generation"] >= generation)
    earlier = [point for point in points if point["generation"] < generation]
    if not earlier:
        return first["time"] - (first["step"] - 1) * first["step_time"], None
    last = earlier[-1]
    # The first report may be some steps late; the time of these steps is not part of the change.
    late = (first["step"] - last["step"] - 1) * max(first["step_time"], PACE)
    return first["time"] - late, max(first["time"] - late - last["time"], 0.0)


def is_decided(job: JobUnderTest, current: int) -> bool:
    """Whether the status has a newer allocation."""
    return bool(job.status()["allocation"]["generation"] > current)


def one_round(system: System, namespace: str, found: dict[str, list[float]]) -> None:
    """Start a job, and change its replica count to each size in turn."""
    workspace = Workspace(system, namespace)
    applied = time.time()
    job = workspace.submit(job_manifest(pace=PACE, minReplicas=SIZES[0], maxReplicas=SIZES[0]))
    began, _ = first_step(system, job, 1)
    found["apply -> first step"].append(began - applied)
    for before, after in pairwise(SIZES):
        job.wait_until_training(before)
        current = job.status()["allocation"]["generation"]
        job.edit(minReplicas=after, maxReplicas=after)
        wait_until(partial(is_decided, job, current), "a decision")
        decided = time.time()
        stepped, downtime = first_step(system, job, job.status()["allocation"]["generation"])
        found[f"{before} -> {after}: decision -> first step"].append(stepped - decided)
        found[f"{before} -> {after}: downtime within it"].append(downtime or 0.0)
    job.delete()


def one_loss(system: System, namespace: str, command: str, found: dict[str, list[float]]) -> None:
    """Freeze the node of one of two replicas."""
    nodes = [node.metadata.name for node in system.core.list_node().items]
    job = Workspace(system, namespace).submit(job_manifest(pace=PACE, pod=SPREAD, maxReplicas=2))
    silent = run_operator_beside_service(system, nodes[:2])
    job.wait_until_training(2, timeout=180)
    generation = job.view()["active"]["generation"]
    wait_until(lambda: job.view()["latest"]["generation"] == generation, "reports of both replicas")
    begun = time.time()
    with frozen(partial(run_command, command), silent):
        stepped, _ = first_step(system, job, generation + 1)
    found["node frozen -> next step of the other"].append(stepped - begun)
    job.delete()


def run_command(command: str, *arguments: str) -> None:
    """Run a command with more arguments."""
    subprocess.run([*shlex.split(command), *arguments], check=True, timeout=120)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    node_command = os.environ.get("ADASCALE_TEST_NODE")
    kubeconfig = os.environ.get("KUBECONFIG") or sys.exit("set KUBECONFIG to a cluster for tests")
    with config.new_client_from_config(config_file=kubeconfig) as api:
        system = System(api, partial(run_kubectl, kubeconfig))
        system.install()
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            with fresh_namespace(api) as namespace:
                one_round(system, namespace, found)
            if node_command:
                with fresh_namespace(api) as namespace:
                    one_loss(system, namespace, node_command, found)
    width = max(map(len, found))
    print(f"{'seconds':{width}}  median    min    max")
    for what, values in found.items():
        print(f"{what:{width}}  {statistics.median(values):6.2f} {min(values):6.2f} {max(values):6.2f}")


if __name__ == "__main__":
    main()
