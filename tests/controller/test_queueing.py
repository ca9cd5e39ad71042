"""A job that Kueue queues: the pods of its smallest count are a group, and the others are admitted alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.job.phase import JobPhase
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import ObservedJob, QueueView
from adascale_controller.operator.observe.pods import Pod, PodProblem
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.schedule.quota import quota_limit
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.kubernetes import ConditionType, Resource
from adascale_controller.operator.types.settings import (
    KUEUE_FINALIZER,
    KUEUE_GROUP,
    POD_GROUP,
    POD_GROUP_SIZE,
    QUEUE_NAME,
    Queueing,
)
from adascale_core.messages.allocation import Allocation
from support.fake_cluster import FakeCluster
from support.observed_jobs import (
    ON_CPU,
    SPEC,
    actions_for,
    condition,
    decided,
    failed_pod,
    finished_pod,
    job,
    observed,
    pod,
    training_job,
    view,
    writes,
)

QUEUED = Queueing({QUEUE_NAME: "gpus"})
GATED = PodProblem(Reason.QUEUED, "waiting for Kueue to reserve quota")
TWO = replace(SPEC, min_replicas=2)


def queued_job(recorded: tuple[int, int] | None = None, **spec: Any) -> AdaScaleJob:
    return replace(job(recorded, **spec), queueing=QUEUED)


def queued(*ranks: int, **changes: Any) -> list[Pod]:
    """Return pods that Kueue manages."""
    return [pod(rank, queue="gpus", **changes) for rank in ranks]


def gated(*ranks: int, **changes: Any) -> list[Pod]:
    """Return pods that wait for quota."""
    waiting = {"node": None, "phase": "Pending", "has_started": False, "problem": GATED}
    return queued(*ranks, **waiting, **changes)


def running_job(recorded: tuple[int, int] = (1, 2), **changes: Any) -> ObservedJob:
    """Return a job that trains and that Kueue has admitted."""
    built = observed(queued_job(recorded), view(recorded, recorded), queued(*range(recorded[1])))
    return replace(built, **changes)


# -- before admission ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "sizes"), [(SPEC, [0]), (TWO, [2, 2])])
def test_a_queued_job_waits_with_the_pods_of_its_smallest_count_and_no_allocation(
    spec: Any, sizes: Sequence[int]
) -> None:
    actions = actions_for(observed(queued_job(spec=spec), view()))
    assert [(each.rank, each.group_size) for each in actions.create_pods] == list(enumerate(sizes))
    assert (actions.allocate, actions.status["state"]) == (None, "Pending")
    running = condition(actions, ConditionType.RUNNING)
    assert (running.status, running.reason) == (False, Reason.QUEUED)
    assert running.message == "Waiting to be admitted by Kueue, in LocalQueue gpus"
    assert [event.reason for event in actions.events] == ["Queued"]
    waiting = observed(queued_job(spec=spec), view(), gated(*range(len(sizes)), group_size=sizes[-1]))
    said = replace(waiting, queue=QueueView(message="couldn't assign flavors"))
    actions = actions_for(said)
    assert writes(actions) == {}
    assert condition(actions, ConditionType.RUNNING).message.endswith("gpus: couldn't assign flavors")


def test_a_queued_job_whose_pods_are_refused_says_so() -> None:
    refusal = PodProblem(Reason.QUOTA_EXCEEDED, "exceeded quota: pods")
    actions = actions_for(observed(queued_job(), view(), refusal=refusal))
    running = condition(actions, ConditionType.RUNNING)
    assert (running.status, running.reason, running.message) == (False, refusal.reason, refusal.message)
    assert (actions.status["state"], [event.warning for event in actions.events]) == ("Pending", [True])
    assert writes(actions) == {"create": [0]}, "it is tried again"


def test_a_job_without_a_queue_name_does_not_wait() -> None:
    assert assess(observed(job(), view())).phase is JobPhase.RUNNABLE


def test_a_group_is_admitted_once_all_of_its_pods_are() -> None:
    half = observed(queued_job(spec=TWO), view(), [*queued(0, group_size=2), *gated(1, group_size=2)])
    assert assess(half).phase is JobPhase.QUEUED
    whole = replace(half, pods=queued(0, 1, group_size=2))
    assert actions_for(whole, 2).allocate == Allocation(1, 2)


@pytest.mark.parametrize(("decided", "allocated"), [(4, 4), (2, 2), (0, 1)])
def test_an_admitted_job_gets_what_is_decided_and_at_least_its_smallest_count(
    decided: int, allocated: int
) -> None:
    actions = actions_for(observed(queued_job(), view(), queued(0)), decided)
    assert actions.allocate == Allocation(1, allocated)
    assert [(each.rank, each.group_size) for each in actions.create_pods] == [
        (rank, 0) for rank in range(1, allocated)
    ]


# -- admitted --------------------------------------------------------------------------------------------


def test_gated_pods_are_shown_with_the_reason_while_training_goes_on() -> None:
    growing = observed(queued_job((2, 3)), view((2, 3), (1, 2)), [*queued(0, 1), *gated(2)])
    actions = actions_for(growing, 3)
    rescaling = condition(actions, ConditionType.RESCALING)
    assert (rescaling.status, rescaling.reason) == (True, Reason.QUEUED)
    assert rescaling.message.startswith("2 -> 3: waiting for Kueue")
    assert rescaling.message.endswith("training continues on 2 replicas")
    assert (actions.status["replicas"], writes(actions)) == (2, {})


def test_the_pods_that_kueue_takes_wait_again_while_the_others_train() -> None:
    taken = running_job((1, 3), pods=queued(0), service=view((1, 3), (2, 1)))
    assert assess(taken).phase is JobPhase.RUNNABLE
    assert writes(actions_for(taken, 3)) == {"create": [1, 2]}


def test_a_job_of_which_kueue_takes_all_pods_waits_with_its_smallest_count() -> None:
    evicted = running_job((1, 4), service=view((1, 4)), pods=queued(2, 3))
    actions = actions_for(evicted)
    assert actions.allocate == Allocation(2, 0)
    assert writes(actions)["create"] == [0]
    assert writes(actions)["delete"] == ["digits-2", "digits-3"]
    assert condition(actions, ConditionType.RUNNING).reason == Reason.QUEUED


def test_a_lost_pod_of_a_group_is_replaced_in_it_while_the_group_is_admitted() -> None:
    """Also after an edit of the smallest count: Kueue admits no group of another size beside it."""
    spec = replace(SPEC, min_replicas=3)
    lost = running_job((1, 3), resource=queued_job((1, 3), spec=spec))
    lost = replace(lost, service=view((1, 3), (1, 3), spec=spec), pods=queued(0, group_size=2))
    made = actions_for(lost, 3).create_pods
    assert [(each.rank, each.group_size) for each in made] == [(1, 2), (2, 0)]


def test_a_pod_that_was_admitted_alone_stays_when_the_smallest_count_grows() -> None:
    growing = running_job((1, 1), resource=queued_job((1, 1), spec=TWO))
    growing = replace(growing, service=view((1, 1), (1, 1), spec=TWO))
    assert assess(growing).phase is JobPhase.RUNNABLE
    made = actions_for(growing, 2).create_pods
    assert [(each.rank, each.group_size) for each in made] == [(1, 0)]


@pytest.mark.parametrize("is_held", [True, False])
def test_a_queued_job_that_its_user_stops_gives_its_quota_back(is_held: bool) -> None:
    pods = queued(0, 1, group_size=2, held_group="digits-uid" if is_held else None)
    stopped = running_job(resource=queued_job((1, 2), suspend=True, spec=TWO), pods=pods)
    assert writes(actions_for(stopped)) == {"allocate": Allocation(2, 0)}, "its replicas save their state"
    left = writes(actions_for(replace(stopped, service=view((2, 0), (2, 0)))))
    assert left == {"delete": ["digits-0", "digits-1"], **({"delete_group": True} if is_held else {})}
    alone = replace(stopped, service=view((2, 0), (2, 0)), pods=queued(0, held_group="digits-uid"))
    assert writes(actions_for(alone)) == {"delete": ["digits-0"]}


@pytest.mark.parametrize("end", [finished_pod(0), failed_pod(0, 1)])
def test_a_group_whose_job_has_ended_is_given_up_and_its_pods_stay(end: Pod) -> None:
    pods = [replace(end, queue="gpus", group_size=2, held_group="digits-uid")]
    ended = running_job((1, 1), resource=queued_job((1, 1), backoff_limit=0), pods=pods)
    found = writes(actions_for(ended, 1))
    assert (found["delete_group"], "delete" in found) == (True, False)


def test_another_queue_takes_other_pods() -> None:
    moved = replace(queued_job((1, 2)), queueing=Queueing({QUEUE_NAME: "others"}))
    before = observed(moved, view((1, 2), (1, 2)), queued(0, 1))
    assert assess(before).reason is Reason.QUEUE_CHANGED
    left = replace(before, service=view((2, 0), (2, 0)))
    assert writes(actions_for(left)) == {"delete": ["digits-0", "digits-1"]}


# -- quota -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "limit"),
    [
        pytest.param(QueueView(2, room=1), 3, id="what is reserved and what is left"),
        pytest.param(QueueView(2, room=0), 2, id="nothing is left"),
        pytest.param(QueueView(2, room=100), 8, id="not above maxReplicas"),
        pytest.param(QueueView(2), 3, id="may not be read, so one step at a time"),
    ],
)
def test_the_quota_of_kueue_is_capacity(queue: QueueView | None, limit: int) -> None:
    spec = replace(SPEC, local_bsz_bounds=(1, 16))
    job_ = queued_job((1, 2), spec=spec)
    assert quota_limit(running_job(resource=job_, queue=queue))[0] == limit


def test_without_a_queue_there_is_no_limit_by_quota() -> None:
    assert quota_limit(training_job()) == (None, "")


def test_a_growth_that_is_pending_is_not_followed_by_another() -> None:
    growing = observed(
        queued_job((2, 3)), view((2, 3), (1, 2)), [*queued(0, 1), *gated(2)], queue=QueueView(2)
    )
    assert quota_limit(growing) == (3, "Kueue is asked for 3 replicas first")


def test_the_admitted_flavor_selects_the_nodes_of_all_pods() -> None:
    flavor = {
        "nodeSelector": {"zone": "a", "gpu": "h100"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
    }
    template = {"spec": {"nodeSelector": {"zone": "a"}, "containers": []}}
    admitted = running_job(
        resource=queued_job((1, 2), template=template),
        pods=[*gated(0, scheduling={"nodeSelector": {"zone": "a"}}), *queued(1, scheduling=flavor)],
    )
    spec = admitted.placement_spec
    assert (spec["nodeSelector"], spec["tolerations"]) == (flavor["nodeSelector"], flavor["tolerations"])
    assert "tolerations" not in admitted.pod_spec
    (third,) = (each for each in actions_for(admitted, 3).create_pods if each.rank == 2)
    assert third.scheduling == flavor


def test_a_decision_stays_within_the_quota_and_says_so() -> None:
    scheduler = Scheduler()
    loses = running_job((1, 4), resource=queued_job((1, 4), template=ON_CPU))
    limited = replace(loses, queue=QueueView(2, room=0, cluster_queue="team"))
    decision = decided(scheduler, limited)[loses.resource.id]
    assert (decision.replicas, decision.reason) == (2, "the quota of ClusterQueue team holds 2 replicas")
    (explained,) = scheduler.explain()
    limits = [limit.reason for limit in explained.limits]
    assert (
        "at most 2 replicas may be scheduled at present: the quota of ClusterQueue team holds 2 replicas"
        in limits
    )


# -- in a cluster with Kueue ---------------------------------------------------------------------------------


class Kueue:
    """Gates the pods of a cluster, and admits them by a quota: those of a group together."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster, self.quota = cluster, 0
        cluster.admit = self._gate

    @staticmethod
    def _gate(raw: dict[str, Any]) -> dict[str, Any]:
        gates = [{"name": f"{KUEUE_GROUP}/admission"}]
        return {**raw, "spec": {**raw["spec"], "schedulingGates": gates}}

    def run(self, cycles: int = 15) -> None:
        for _ in range(cycles):
            self._admit()
            self.cluster.run_cycles(1)

    def take(self, *ranks: int) -> None:
        """Delete pods, as Kueue does if it preempts them."""
        for raw in self.cluster.live_pods:
            if int(raw["metadata"]["name"].split("-")[1]) in ranks:
                self.cluster.terminate_pod(raw["metadata"]["name"])

    def _admit(self) -> None:
        pods = self.cluster.live_pods
        waiting = [raw for raw in pods if raw["spec"]["schedulingGates"]]
        used = len(pods) - len(waiting)
        while waiting:
            size = int(waiting[0]["metadata"]["annotations"].get(POD_GROUP_SIZE, "1"))
            members, waiting = waiting[:size], waiting[size:]
            if len(members) == size and used + size <= self.quota:
                used += size
                for raw in members:
                    self.cluster.write(Resource.PODS, {**raw, "spec": {**raw["spec"], "schedulingGates": []}})


@pytest.mark.usefixtures("decided")
def test_a_job_waits_for_the_quota_of_its_smallest_count_grows_loses_pods_and_all_and_comes_back() -> None:
    cluster = FakeCluster()
    kueue = Kueue(cluster)
    cluster.submit(minReplicas=2)
    cluster.enter_queue()
    for quota, taken, replicas in ((1, (), 0), (2, (), 2), (4, (), 4), (2, (2, 3), 2), (4, (), 4)):
        kueue.quota = quota
        kueue.take(*taken)
        kueue.run()
        assert (cluster.status["replicas"], len(cluster.agents)) == (replicas, replicas)
    kueue.quota = 0
    kueue.take(0, 1, 2, 3)
    kueue.run()
    assert (cluster.status["state"], cluster.condition()["reason"], cluster.agents) == (
        "Pending",
        "Queued",
        {},
    )
    kueue.quota = 4
    kueue.run()
    assert (cluster.status["replicas"], cluster.status["failures"]) == (4, 0)


def test_the_group_of_a_job_that_is_deleted_is_given_up() -> None:
    cluster = FakeCluster()
    kueue = Kueue(cluster)
    cluster.submit(minReplicas=2)
    cluster.enter_queue()
    kueue.quota = 2
    kueue.run()
    for raw in cluster.live_pods:
        cluster.write(
            Resource.PODS, {**raw, "metadata": {**raw["metadata"], "finalizers": [KUEUE_FINALIZER]}}
        )
    group = {raw["metadata"]["labels"][POD_GROUP] for raw in cluster.live_pods}
    cluster.remove(Resource.ADASCALEJOBS, "digits")
    cluster.deliver()
    cluster.cycle()
    assert {f"delete Workload {name}" for name in group} <= set(cluster.writes)
