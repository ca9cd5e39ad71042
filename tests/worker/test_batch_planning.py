"""The batch plan of a trainer before and in its generations."""

from __future__ import annotations

import pytest
import torch

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import DEFAULT_EFFICIENCY, BatchBounds, BatchPlan, EfficiencyBound
from adascale_core.errors import InvalidJobError
from adascale_worker.adascale import AdaScale
from adascale_worker.batches.planning import BatchPlanner
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from adascale_worker.program.parts import Optimizers
from adascale_worker.reporting.progress import StepTimer
from support.job_states import OF_SAMPLES


def group(replicas: int, rank: int = 0, *, is_elastic: bool) -> ReplicaGroup:
    assignment = RankAssignment(rank, replicas)
    return ReplicaGroup(assignment, torch.device("cpu"), is_elastic=is_elastic)


def test_a_trainer_starts_with_bounds_that_are_older_than_the_number_of_replicas() -> None:
    """A pod's environment has the bounds of the time when the pod's job was created."""
    old = BatchBounds(4, 8, (4, 4))
    planner = BatchPlanner(old, group(3, is_elastic=True), DEFAULT_EFFICIENCY)
    assert planner.plan.replicas == 2
    planner.begin(BatchBounds(4, 16, (4, 4)))
    assert (planner.plan.replicas, planner.plan.local_bsz) == (3, 4)
    with pytest.raises(InvalidJobError, match="3 replicas are not valid"):
        planner.begin(old)


def test_a_number_of_replicas_that_no_agent_assigns_must_be_valid_at_once() -> None:
    with pytest.raises(InvalidJobError, match="3 replicas are not valid"):
        BatchPlanner(BatchBounds(4, 8, (4, 4)), group(3, is_elastic=False), DEFAULT_EFFICIENCY)


def test_all_ranks_use_the_plan_of_rank_0_in_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member may not have got the last plan, because others were lost while it was shared."""
    bounds = BatchBounds(8, 64, (1, 32))
    model = torch.nn.Linear(1, 1)
    optimizer = Optimizers({"": AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))})
    shared: list[list[int]] = []

    def broadcast(group: ReplicaGroup, numbers: list[int]) -> list[int]:
        if group.rank == 0:
            shared.append(numbers)
        return shared[-1]

    monkeypatch.setattr(ReplicaGroup, "broadcast", broadcast)
    planners = []
    for rank, local_bsz in enumerate((16, 4)):
        planner = BatchPlanner(bounds, group(2, rank, is_elastic=True), DEFAULT_EFFICIENCY)
        planner.load_state_dict(
            {"batch_size": bounds.batch_size, "plan": [2, local_bsz, 1], "fitting": local_bsz}
        )
        planner.adapt(bounds, optimizer, StepTimer())
        planners.append(planner)
    assert [planner.plan for planner in planners] == [BatchPlan(2, 16, 1)] * 2


@pytest.mark.parametrize(
    ("efficiency", "local_bsz"),
    [(DEFAULT_EFFICIENCY, 32), (OF_SAMPLES, 8)],  # with k = 3, gain / S is 4 / (3 + S): 0.8 at S = 2
)
def test_a_larger_batch_that_is_faster_is_used_within_the_efficiency_of_a_length_in_samples(
    monkeypatch: pytest.MonkeyPatch, efficiency: EfficiencyBound, local_bsz: int
) -> None:
    monkeypatch.setattr(ReplicaGroup, "broadcast", lambda _, numbers: numbers)
    monkeypatch.setattr(AdaScale, "estimate", GradientEstimate(1.0, 3.0))
    optimizer = Optimizers({"": AdaScale(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))})
    step_timer = StepTimer()
    for second in range(8):  # a step of either batch takes a second
        step_timer.step(BatchPlan(2, 4 if second < 4 else 32), float(second))
    planner = BatchPlanner(BatchBounds(8, 64, (1, 32)), group(2, is_elastic=True), efficiency)
    planner.finished_step()
    planner.replan(optimizer, step_timer)
    assert planner.plan == BatchPlan(2, local_bsz)
