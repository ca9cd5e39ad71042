"""The jobs that the tests of the page show: one that trains, one that waits, and one that has failed."""

from __future__ import annotations

from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.views.decision import CountView, DecisionView, GivenReplicas, LimitKind, LimitView, Verdict
from api.client import Client, a_registration, a_report

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def fill(client: Client) -> None:
    client.put("/jobs/team.digits", JobSpec(8, 256, (4, 64), 1, 4, 20_000).to_json())
    client.put("/jobs/team.queued", JobSpec(8, max_replicas=4).to_json())
    client.put("/jobs/team.digits/allocation", {"generation": 1, "replicas": 1})
    client.register("team.digits", a_registration(0, node="<b>node</b>"))
    client.register("team.digits", running(0, 1, 1))
    client.post_gain(
        "team.digits", *(a_report(step, progress=2.0 * step, time=1.76e9 + step) for step in range(50))
    )
    client.put("/jobs/team.digits/allocation", {"generation": 2, "replicas": 2})
    client.register("team.digits", a_registration(1))
    client.register("team.digits", running(0, 2, 2))
    client.register("team.digits", running(1, 2, 2))
    later = (
        a_report(step, generation=2, progress=100 + 4.0 * (step - 50), replicas=2, time=1.76e9 + step)
        for step in range(50, 100)
    )
    client.post_gain("team.digits", *later)
    counts = (
        CountView(1, 10.0, 50.0, (), Verdict.NOT_WORTH, "slower", 1.0, 1.0, 1.0),
        CountView(2, 15.0, 40.0, (), Verdict.CHOSEN, "chosen", 5.71, 4.7, 6.0),
        CountView(4, 25.0, 30.0, (GivenReplicas("team.queued", 2),), Verdict.OTHER_JOBS, HOSTILE),
    )
    limits = (LimitView(LimitKind.CAPACITY, "0 of 2 replicas are free"),)
    reason = "predicted goodput is 1.5 times that of 1"
    decision = DecisionView("team.digits", 2, 1, False, reason, 1.76e9, counts, limits)
    client.put("/jobs/team.digits/decision", decision.to_json())
    waiting = DecisionView("team.queued", 0, 0, True, "needs 1, free are 0", 1.76e9, (), limits)
    client.put("/jobs/team.queued/decision", waiting.to_json())
    client.put("/jobs/team.failed/allocation", {"generation": 1, "replicas": 1})
    client.register("team.failed", a_registration())
    failed = a_registration(replica_state=ReplicaState.FAILED, generation=1, log=HOSTILE, exit_code=1)
    client.register("team.failed", failed)


def running(rank: int, generation: int, replicas: int) -> Registration:
    generations = dict.fromkeys(("generation", "assigned", "stepped"), generation)
    return a_registration(rank, ReplicaState.RUNNING, **generations, replicas=replicas)
