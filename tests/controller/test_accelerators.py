"""Types of accelerators on a cluster: capacity, placement and step times of each, and jobs that move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.apply.manifests import pod_manifest
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.reconcile.reconciler import reconcile
from adascale_controller.operator.schedule.nodes import eligible_nodes
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.actions import Actions, NewPod, Schedule
from adascale_controller.operator.types.kubernetes import ApiObject, ConditionType
from adascale_core import names
from adascale_core.decision.decide import Decision
from adascale_core.decision.type_choice import Accelerator
from adascale_core.messages.job_spec import JobSpec, LocalBszLimit
from adascale_core.messages.reports import StepTime
from adascale_core.views.jobs import JobView
from support.definitions import changed
from support.observed_jobs import (
    GPU,
    SPEC,
    condition,
    decided,
    job,
    new_job,
    node,
    observed,
    pod,
    report,
    view,
)

H200, L4, NO_LABEL = "NVIDIA-H200", "NVIDIA-L4", names.NO_ACCELERATOR_LABEL
WORKER = {"name": "worker", "image": "trainer:1"}
ON_GPUS: dict[str, Any] = {"containers": [WORKER | {"resources": {"limits": {GPU: "1"}}}]}
ON_CPUS: dict[str, Any] = {"containers": [WORKER | {"resources": {"requests": {"cpu": "1"}}}]}


def nodes(**gpus: int) -> list[ApiObject]:
    """Return the nodes `h200`, `l4` and `plain`, which has no label, with these numbers of accelerators."""
    labels = {"h200": {names.DEFAULT_ACCELERATOR_LABEL: H200}, "l4": {names.DEFAULT_ACCELERATOR_LABEL: L4}}
    return [node(name, count, labels.get(name, {})) for name, count in gpus.items()]


def waiting(name: str = "digits", spec: ApiObject = ON_GPUS, *, at_least: int = 1) -> ObservedJob:
    """Return a job that has not started."""
    return new_job(name, spec=replace(SPEC, min_replicas=at_least), template={"spec": spec})


def running(
    on: Sequence[str],
    *,
    required: str | None = None,
    recorded: str | None = None,
    step_times: Sequence[StepTime] = (),
    spec: ApiObject = ON_GPUS,
) -> ObservedJob:
    """Return a job that trains on one replica on each of these nodes."""
    number = len(on)
    status = {"accelerator": recorded} if recorded else None
    made = job((1, number), status=status, template={"spec": spec})
    pods: list[Pod] = [pod(rank, node=node, accelerator=required) for rank, node in enumerate(on)]
    accelerator = required or "a kind of device"
    service = replace(
        view((1, number), (1, number)),
        latest=replace(report(1, number), accelerator=accelerator),
        step_times=tuple(step_times),
    )
    return observed(made, service, pods)


def decide(*jobs: ObservedJob, on: Sequence[ApiObject] | None, label: str | None = None) -> list[Decision]:
    """Return the decisions about these jobs."""
    decisions = decided(Scheduler() if label is None else Scheduler(label), *jobs, nodes=on)
    return [decisions[each.resource.id] for each in jobs]


def accelerators(
    *jobs: ObservedJob, on: Sequence[ApiObject] | None, label: str | None = None
) -> list[object]:
    return [each.accelerator for each in decide(*jobs, on=on, label=label)]


@pytest.mark.parametrize(
    ("spec", "cluster", "expected"),
    [
        # a cluster with one type: recorded, and pods are as without types
        (ON_GPUS, nodes(h200=4), Accelerator(H200)),
        (ON_GPUS, nodes(h200=4, plain=0), Accelerator(H200)),
        # two types
        (ON_GPUS, nodes(h200=4, l4=8), Accelerator(L4, required=True)),
        (ON_GPUS, nodes(h200=8, l4=8), Accelerator(H200, required=True)),
        # accelerators without a label are a type too
        (ON_GPUS, nodes(h200=4, plain=8), Accelerator(NO_LABEL, required=True)),
        # only where its pods may run
        (ON_GPUS | {"nodeSelector": {names.DEFAULT_ACCELERATOR_LABEL: H200}}, nodes(h200=4, l4=8),
         Accelerator(H200)),
        # replicas without devices are not tied to a type, unless all nodes have one
        (ON_CPUS, nodes(h200=4, l4=8, plain=0), Accelerator()),
        (ON_CPUS, nodes(h200=4, l4=8), Accelerator(H200, required=True)),
        # no node can hold a replica
        (ON_GPUS, nodes(plain=0), Accelerator()),
        (ON_GPUS, None, None),
    ],
)  # fmt: skip
def test_the_type_on_which_a_job_starts(
    spec: ApiObject, cluster: Sequence[ApiObject] | None, expected: Accelerator | None
) -> None:
    assert accelerators(waiting(spec=spec), on=cluster) == [expected]


def test_types_are_not_told_apart_without_a_label() -> None:
    assert accelerators(waiting(), on=nodes(h200=4, l4=8), label="") == [Accelerator()]


@pytest.mark.parametrize(
    ("present", "cluster", "expected"),
    [
        # stays on its type, whether its pods require it or not
        (running(["h200"], required=H200), nodes(h200=4, l4=8), Accelerator(H200, required=True)),
        (running(["h200"], required=H200), nodes(h200=4), Accelerator(H200, required=True)),
        (running(["h200"], recorded=H200), nodes(h200=4, l4=8), Accelerator(H200)),
        (running(["h200"]), nodes(h200=4, l4=8), Accelerator(H200)),
        # its pods have to be created again
        (replace(running(["h200"], recorded=H200), pods=()), nodes(h200=4, l4=8),
         Accelerator(H200, required=True)),
        # pods that are on two types have to be kept on one
        (running(["h200", "l4"], recorded=H200), nodes(h200=4, l4=8), Accelerator(H200, required=True)),
        (running(["h200", "l4", "l4"]), nodes(h200=4, l4=8), Accelerator(L4, required=True)),
        # moves if no node of its type is left, and another type can run it
        (running([""], required=H200), nodes(l4=8), Accelerator(L4)),
        (running([""], required=H200), nodes(l4=8, plain=4), Accelerator(L4, required=True)),
        (running([""], required=H200), nodes(plain=0), Accelerator(H200, required=True)),
        # its nodes are gone from the operator's sight only
        (running(["h200"], required=H200), None, None),
    ],
)  # fmt: skip
def test_a_job_with_replicas_keeps_its_type_while_a_node_of_it_can_run_it(
    present: ObservedJob, cluster: Sequence[ApiObject] | None, expected: Accelerator | None
) -> None:
    assert accelerators(present, on=cluster) == [expected]


def test_each_type_has_a_capacity_of_its_own() -> None:
    jobs = [waiting("a", at_least=3), waiting("b", at_least=3), waiting("c", at_least=2)]
    decisions = decide(*jobs, on=nodes(h200=4, l4=4))
    assert [(each.replicas, each.waiting) for each in decisions] == [(3, False), (3, False), (0, True)]
    assert {each.accelerator for each in decisions[:2]} == {Accelerator(H200, True), Accelerator(L4, True)}


def test_a_job_grows_on_its_type_or_moves_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ratio of the types is known, so they are taken to be equally fast."""
    step_times = [
        StepTime(replicas, size, 1, seconds, accelerator=H200)
        for replicas in (1, 2)
        for size, seconds in ((4, 1.0), (16, 3.5))
    ]
    for running_on, free, replicas, kind in ((2, 4, 4, H200), (2, 3, 3, H200), (1, 1, 4, L4)):
        present = running(["h200"] * running_on, required=H200, step_times=step_times)
        # Each reading of the clock is after the stabilization window of what was measured before.
        monkeypatch.setattr("time.monotonic", count(0, 1000).__next__)
        (decision,) = decide(present, on=nodes(h200=free, l4=8))
        monkeypatch.undo()
        assert (decision.replicas, decision.accelerator) == (replicas, Accelerator(kind, required=True))


def test_the_step_times_of_another_type_are_used_until_a_job_was_on_a_type() -> None:
    """It was measured on up to 4 replicas of one type, and no ratio of the types is known."""
    step_times = [
        StepTime(replicas, size, 1, seconds, accelerator=H200)
        for replicas in (1, 4)
        for size, seconds in ((4, 1.0), (16, 1.1))
    ]
    new = waiting()
    service = replace(
        JobView.empty(new.resource.id),
        step_times=tuple(step_times),
        latest=replace(report(), accelerator=H200),
    )
    for cluster, kind in ((nodes(h200=8, l4=2), H200), (nodes(h200=2, l4=8), L4)):
        (decision,) = decide(replace(new, service=service), on=cluster)
        assert (decision.replicas, decision.accelerator) == (8, Accelerator(kind, required=True))


LIMITED = JobSpec(8, 64, (5, 16), 1, 8, 1000)
"""One replica needs a local batch of 8, more replicas at least 5."""


def with_limits(present: ObservedJob, spec: JobSpec = LIMITED, /, **limits: int) -> ObservedJob:
    """Return a job with these limits of the local batch size on `h200` and `l4`."""
    types = {"h200": H200, "l4": L4}
    assert present.service is not None
    service = replace(
        present.service,
        local_bsz_limits=[LocalBszLimit(types[name], size) for name, size in limits.items()],
        local_bsz_limit=min(limits.values()),
    )
    resource = replace(present.resource, job=changed(present.resource.valid_job, spec))
    return replace(present, resource=resource, service=service)


@pytest.mark.parametrize(
    ("limits", "spec", "cluster", "expected"),
    [
        # what did not fit on the type where it starts, and on the other
        ({"l4": 7}, LIMITED, nodes(h200=4, l4=8), (L4, 2)),
        ({"l4": 7}, LIMITED, nodes(h200=8, l4=4), (H200, 1)),
        ({"h200": 7, "l4": 9}, LIMITED, nodes(h200=4, l4=8), (L4, 1)),
        # a type is chosen for the smallest count that its memory allows
        ({"l4": 7}, LIMITED, nodes(h200=1, l4=1), (H200, 1)),
        ({"h200": 7}, LIMITED, nodes(h200=1, l4=1), (L4, 1)),
        # no count is valid on one of them
        ({"l4": 7}, replace(LIMITED, max_replicas=1), nodes(h200=4, l4=8), (H200, 1)),
        # with one type, pods are as without types, and so may get any device
        ({"l4": 7}, LIMITED, nodes(h200=4), (H200, 2)),
    ],
)
def test_a_job_starts_with_the_limit_of_the_local_batch_size_of_its_type(
    limits: dict[str, int], spec: JobSpec, cluster: Sequence[ApiObject], expected: tuple[str, int]
) -> None:
    (decision,) = decide(with_limits(waiting(), spec, **limits), on=cluster)
    assert decision.accelerator is not None
    assert (decision.accelerator.type, decision.replicas) == expected


def test_a_job_leaves_a_type_whose_memory_allows_no_count() -> None:
    spec = replace(LIMITED, max_replicas=1)
    (decision,) = decide(with_limits(running(["l4"], required=L4), spec, l4=7), on=nodes(h200=1, l4=8))
    assert (decision.accelerator, decision.replicas) == (Accelerator(H200, required=True), 1)


def test_a_decision_holds_while_only_the_limit_of_another_type_changes() -> None:
    scheduler, cluster = Scheduler(), nodes(h200=8, l4=4)
    scheduler.set_resources(cluster, ())
    new = with_limits(waiting(), h200=9, l4=7)
    scheduler.update(new)
    scheduler.adopt(scheduler.solve(scheduler.decision_input()), 0.0)
    assert new.service is not None
    started = replace(new, service=replace(new.service, local_bsz_limit=9))
    for seen in (started, with_limits(new, h200=9, l4=5)):
        scheduler.update(seen)
        assert not scheduler.is_due(0.0)
    scheduler.update(with_limits(new, h200=7, l4=7))
    assert scheduler.is_due(0.0)


# -- what is done about it ------------------------------------------------------------------------------


def actions(present: ObservedJob, accelerator: Accelerator | None, replicas: int = 1) -> Actions:
    decision = Decision(replicas, "by the test", accelerator=accelerator)
    return reconcile(present, assess(present), Schedule(decision))


@pytest.mark.parametrize(
    ("required", "accelerator", "stays"),
    [
        (None, None, True),
        (None, Accelerator(), True),
        (None, Accelerator(H200), True),
        (None, Accelerator(H200, required=True), False),
        (H200, None, True),
        (H200, Accelerator(H200), True),
        (H200, Accelerator(H200, required=True), True),
        (H200, Accelerator(L4), False),
        (H200, Accelerator(L4, required=True), False),
        (H200, Accelerator(), False),
    ],
)
def test_a_job_stops_if_its_pods_can_not_run_on_its_type(
    required: str | None, accelerator: Accelerator | None, stays: bool
) -> None:
    found = actions(running(["h200"], required=required), accelerator)
    assert not found.stop_pods
    if stays:
        assert found.allocate is None
        return
    assert found.allocate is not None
    assert found.allocate.replicas == 0
    rescaling = condition(found, ConditionType.RUNNING)
    assert rescaling.status, "its state is not saved yet"
    saved = observed(job((2, 0)), view((2, 0)), [pod(0, accelerator=required)])
    found = actions(saved, accelerator)
    assert ([each.name for each in found.stop_pods], found.allocate) == (["digits-0"], None)
    assert condition(found, ConditionType.RUNNING).reason == Reason.ACCELERATOR_CHANGED


def test_the_type_is_recorded_while_the_job_has_replicas() -> None:
    new = waiting()
    found = actions(new, Accelerator(H200, required=True), 2)
    assert [each.accelerator for each in found.create_pods] == [H200, H200]
    assert found.status["accelerator"] == H200
    found = actions(new, Accelerator(H200), 2)
    assert [each.accelerator for each in found.create_pods] == [None, None]
    assert found.status["accelerator"] == H200
    assert "accelerator" not in actions(new, Accelerator(H200, required=True), 0).status
    assert "accelerator" not in actions(new, Accelerator(), 1).status
    present = running(["h200"], recorded=H200)
    assert actions(present, None).status["accelerator"] == H200, "it is not known at the moment"


TERM = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
CLUSTER = nodes(h200=4, l4=4, plain=4)


@pytest.mark.parametrize("accelerator", [None, H200, L4, NO_LABEL])
@pytest.mark.parametrize(
    ("terms", "zones"),
    [(None, "abb"), ([TERM], "aab"), ([TERM, {"matchFields": []}, TERM], "baa"), ([{}], "aaa")],
)
def test_pods_require_their_type_besides_what_the_template_requires(
    accelerator: str | None, terms: list[Mapping[str, Any]] | None, zones: str
) -> None:
    spec = dict(ON_GPUS)
    if terms is not None:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        spec["affinity"] = {"nodeAffinity": required}
    cluster = []
    for each, zone in zip(CLUSTER, zones, strict=True):
        labels = each["metadata"]["labels"] | {"zone": zone}
        cluster.append({**each, "metadata": each["metadata"] | {"labels": labels}})
    made = waiting(spec=spec).resource

    def pod_spec(kind: str | None) -> dict[str, Any]:
        manifest = pod_manifest(made, NewPod(0, 0, accelerator=kind))
        assert manifest["metadata"]["annotations"].get(names.ANNOTATION_ACCELERATOR) == kind
        found: dict[str, Any] = manifest["spec"]
        return found

    found = pod_spec(accelerator)
    types = {H200: {"h200"}, L4: {"l4"}, NO_LABEL: {"plain"}, None: {"h200", "l4", "plain"}}
    assert eligible_nodes(found, cluster) == eligible_nodes(spec, cluster) & types[accelerator]
    variables = {each["name"]: each.get("value") for each in found["containers"][0]["env"]}
    assert variables.get(names.ENV_ACCELERATOR) == accelerator
    if accelerator is None:
        assert found["affinity"].get("nodeAffinity") == spec.get("affinity", {}).get("nodeAffinity")
