"""How long a job takes in an isolated cluster of its fair share, with the policy of the simulation.

The finish-time fairness of a job (Mahajan et al. 2020, Themis, section 3.1) is its completion time divided
by that in an isolated cluster of N / C GPUs. N is the number of GPUs of the shared cluster, and C the
contention: the mean number of jobs in it, this one included, over the life of the job. With several types of
accelerators the isolated cluster has one type, and its time is the expectation over the types, each as
probable as it has GPUs (Jayaram Subramanya et al. 2023, Sia, section 5.5).

As in Sia's artifact (`sia-simulator/ftf_simulator.py` of github.com/siasosp23/artifacts), the job is
simulated alone with the same policy: it waits for a decision, restarts and grows as in the shared cluster.
Between two whole numbers of GPUs the time is interpolated. A share of less than the job needs takes the time
on what it needs, multiplied by the ratio of both. The artifact divides by the mean of the times over the
types, and so does this project. Equation 3 of the paper has the mean of the ratios, which is never less.

The measured step times have no noise there, and a job that is submitted between two decisions takes as long
as one that is submitted at the second of them, and the time until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, floor, inf
from typing import Any

from adascale_controller.simulation.engine import Policy, SimulationSettings, Submission, simulate


class IsolatedCluster:
    """Completion times of jobs that are alone on their fair shares."""

    def __init__(
        self, settings: SimulationSettings, new_policy: Callable[[], Policy], *, fixed_size: bool
    ) -> None:
        self._settings = settings
        self._new_policy = new_policy
        self._fixed_size = fixed_size
        self._sizes = {
            name: sorted((settings.nodes[node] for node in nodes), reverse=True)
            for name, nodes in settings.nodes_by_type().items()
        }
        self._memory: dict[tuple[object, ...], float] = {}

    def completion_time(self, job: Submission, contention: float) -> float:
        """Return the seconds from submission to completion on `1 / contention` of the GPUs."""
        share = self._settings.total / contention
        return (
            sum(
                sum(sizes) * self._on(name, job, min(share, sum(sizes)))
                for name, sizes in self._sizes.items()
            )
            / self._settings.total
        )

    def _on(self, name: str, job: Submission, share: float) -> float:
        """Return the seconds on a share of a type of accelerator."""
        least = job.replicas if self._fixed_size else job.application.min_replicas
        wait = self._wait(job)
        if share < least:
            return (wait + self._alone(name, job, least)) * least / share
        low, high = self._alone(name, job, floor(share)), self._alone(name, job, ceil(share))
        return wait + low + (high - low) * (share - floor(share))

    def _wait(self, job: Submission) -> float:
        """Return the seconds from the submission of a job to the next decision."""
        return -job.time % self._settings.interval

    def _alone(self, name: str, job: Submission, replicas: int) -> float:
        """Return the seconds on at most some replicas of a type, if the job is submitted at a decision."""
        application = job.by_type.get(name, job.application)
        deadline = None if job.deadline is None else job.deadline - job.time - self._wait(job)
        key = name, application.name, job.replicas, job.batch_size, deadline, replicas
        if key not in self._memory:
            sizes = self._sizes[name]
            settings = replace(self._settings, nodes=_first_nodes(sizes, replicas), types=(), max_time=inf)
            alone = replace(
                job, time=0.0, application=limited_to(application, replicas), by_type={}, deadline=deadline
            )
            (result,) = simulate([alone], self._new_policy(), settings)
            assert result.completed_at is not None
            self._memory[key] = result.completed_at
        return self._memory[key]


def limited_to(application: Any, replicas: int) -> Any:
    """Return the same program, which can use at most some replicas."""
    return replace(application, max_replicas=min(replicas, application.max_replicas or replicas))


def _first_nodes(sizes: Sequence[int], replicas: int) -> list[int]:
    """Return the sizes of as few whole nodes as hold some replicas, the largest first."""
    nodes: list[int] = []
    while sum(nodes) < replicas:
        nodes.append(sizes[len(nodes)])
    return nodes
