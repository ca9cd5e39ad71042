"""What a list shows of a job."""

from dataclasses import replace

import pytest

from adascale_core.messages.allocation import ActiveAllocation, Allocation, SlowReplacement
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.rendezvous.rendezvous import Rendezvous
from adascale_core.views.job_summary import JobStateName, summarize

REPORT = GainReport(
    generation=2, step=100, progress=400.0, epoch=0, replicas=2, local_bsz=8, accumulation=1, scale=4.0,
    gain=2.0, grad_sqr=0.5, grad_var=1.5, step_time=0.1, time=1.76e9, goodput=20.0, target=600.0,
)  # fmt: skip


DESIRED = Allocation(2, 2)


def a_state(
    desired: Allocation | None = DESIRED,
    active: int | None = 2,
    states: tuple[ReplicaState, ...] = (ReplicaState.RUNNING, ReplicaState.RUNNING),
    broken: bool = False,
    complete: bool = False,
) -> Rendezvous:
    replicas = {
        index: Registration(index, f"a{index}.1", state, active or 0, "127.0.0.1", 4000)
        for index, state in enumerate(states)
    }
    allocation = None if active is None else ActiveAllocation(active, 2)
    return Rendezvous(desired=desired, active=allocation, replicas=replicas, broken=broken, complete=complete)


@pytest.mark.parametrize(
    ("rendezvous", "state", "replicas"),
    [
        (a_state(None, None, ()), JobStateName.PENDING, 0),
        (a_state(active=None, states=(ReplicaState.WAITING,)), JobStateName.STARTING, 0),
        (a_state(states=(ReplicaState.WAITING, ReplicaState.WAITING)), JobStateName.STARTING, 0),
        (a_state(), JobStateName.RUNNING, 2),
        (a_state(Allocation(3, 4)), JobStateName.RESCALING, 2),
        (a_state(broken=True, states=(ReplicaState.HOLDING,)), JobStateName.RECOVERING, 0),
        (a_state(broken=True, states=(ReplicaState.FAILED, ReplicaState.FAILED)), JobStateName.FAILED, 0),
        (a_state(Allocation(3, 0)), JobStateName.RESCALING, 2),
        (a_state(Allocation(3, 0), states=()), JobStateName.STOPPED, 0),
        (a_state(Allocation(3, 0, failed=True), states=()), JobStateName.FAILED, 0),
        (a_state(Allocation(3, 0, failed=True), broken=True, states=()), JobStateName.FAILED, 0),
        (a_state(Allocation(3, 0, failed=True), complete=True), JobStateName.COMPLETE, 0),
        (a_state(complete=True), JobStateName.COMPLETE, 0),
    ],
)
def test_the_state_follows_from_the_generations_and_replicas(
    rendezvous: Rendezvous, state: JobStateName, replicas: int
) -> None:
    summary = summarize("a.b", None, rendezvous, None, 0.0)
    assert (summary.state, summary.replicas) == (state, replicas)


@pytest.mark.parametrize(
    ("steps", "latest", "state", "left"),
    [
        (None, REPORT, a_state(), 10.0),  # 200 steps at 20 per second, to the target of the report
        (1400, REPORT, a_state(), 50.0),  # to the declared target
        (None, replace(REPORT, progress=700.0), a_state(), 0.0),
        (None, replace(REPORT, target=None), a_state(), None),
        (None, replace(REPORT, goodput=None), a_state(), None),
        (None, REPORT, a_state(complete=True), None),
        (None, None, a_state(), None),
    ],
)
def test_the_time_left_is_that_of_the_present_goodput(
    steps: int | None, latest: GainReport | None, state: Rendezvous, left: float | None
) -> None:
    summary = summarize("a.b", JobSpec(8, scale_invariant_steps=steps), state, latest, 0.0)
    assert summary.seconds_left == (None if left is None else pytest.approx(left))


def test_a_slow_replica_is_named_and_a_spare_in_its_place_without_the_node() -> None:
    slow = replace(REPORT, slow_replica=1, slow_factor=1.25)
    assert summarize("a.b", None, a_state(), slow, 0.0).slowness.startswith("replica 1 is slow: ")
    assert summarize("a.b", None, a_state(broken=True), slow, 0.0).slowness == ""
    replacement = SlowReplacement(1, "a1.1", "node1", 1.25, 2)
    active = ActiveAllocation(2, 2, slow_replacement=replacement)
    named = summarize("a.b", None, replace(a_state(), active=active), REPORT, 0.0).slowness
    assert named.startswith("replica 1 was slow, ")


def test_the_time_left_of_a_job_of_samples_is_that_of_its_throughput() -> None:
    """Its trainers report the samples over the batch size as progress, and so as goodput."""
    summary = summarize("a.b", JobSpec(8, train_samples=1400 * 8), a_state(), REPORT, 0.0)
    assert summary.target == 1400
    assert summary.seconds_left == pytest.approx(50.0)
