"""The batch plan of a trainer before and in its generations."""

from __future__ import annotations

import pytest
import torch

from adascale_core.batch import BatchBounds
from adascale_core.errors import InvalidJobError
from adascale_worker.batch_planning import BatchPlanner
from adascale_worker.environment import RankAssignment
from adascale_worker.process_group import ReplicaGroup


def group(replicas: int, *, is_elastic: bool) -> ReplicaGroup:
    assignment = RankAssignment(rank=0, replicas=replicas, local_rank=0, master_addr=None, master_port=None)
    return ReplicaGroup(assignment, torch.device("cpu"), is_elastic=is_elastic)


def test_a_trainer_starts_with_bounds_that_are_older_than_the_number_of_replicas() -> None:
    """A pod's environment has the bounds of the time when the pod's job was created."""
    old = BatchBounds(4, 8, (4, 4))
    planner = BatchPlanner(old, group(3, is_elastic=True), 0.5)
    assert planner.plan.replicas == 2
    planner.begin(BatchBounds(4, 16, (4, 4)))
    assert (planner.plan.replicas, planner.plan.local_bsz) == (3, 4)
    with pytest.raises(InvalidJobError, match="3 replicas are not valid"):
        planner.begin(old)


def test_a_number_of_replicas_that_no_agent_assigns_must_be_valid_at_once() -> None:
    with pytest.raises(InvalidJobError, match="3 replicas are not valid"):
        BatchPlanner(BatchBounds(4, 8, (4, 4)), group(3, is_elastic=False), 0.5)
