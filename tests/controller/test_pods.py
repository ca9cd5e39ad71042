"""Pods as read from statuses that the scheduler, the kubelet and the eviction manager write."""

from __future__ import annotations

from typing import Any

import pytest

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.pods import Pod, PodExit, PodProblem, is_program_failure, read_pod
from adascale_controller.operator.types.settings import KUEUE_FINALIZER, KUEUE_GROUP, POD_GROUP
from adascale_core import names
from adascale_core.failures import TerminationMessage

# -- builders ----------------------------------------------------------------------------------------------


def raw(
    status: dict[str, Any] | None = None,
    *,
    node: str | None = "node1",
    metadata: dict[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    meta = {
        "name": "digits-1-2",
        "namespace": "team",
        "uid": "5a0d",
        "resourceVersion": "7",
        "creationTimestamp": "2026-03-01T10:00:00Z",
        "labels": {names.LABEL_REPLICA: "1", names.LABEL_ATTEMPT: "2"},
        "ownerReferences": [{"kind": "AdaScaleJob", "name": "digits", "uid": "b7d1", "controller": True}],
    }
    placed = {"nodeName": node} if node else {}
    containers = [{"name": "worker", "image": "trainer:1", "resources": {"requests": {"cpu": "500m"}}}]
    return {
        "metadata": meta | (metadata or {}),
        "spec": {"containers": containers} | placed | spec,
        "status": status or {},
    }


def condition(kind: str, status: str = "True", **more: str) -> dict[str, str]:
    return {"type": kind, "status": status} | more


def container(name: str = "worker", **state: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "image": "registry.example/trainer:1", "state": state, "restartCount": 0}


def terminated(exit_code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    return {"exitCode": exit_code, "reason": reason, "startedAt": "2026-03-01T10:00:01Z"} | more


def failed(*containers: dict[str, Any], **more: Any) -> PodExit:
    ended = read_pod(raw({"phase": "Failed", "containerStatuses": list(containers)} | more)).exit
    assert ended is not None
    return ended


def waiting(reason: str, message: str = "", **more: Any) -> PodProblem | None:
    state = {"reason": reason} | ({"message": message} if message else {})
    return read_pod(raw({"phase": "Pending", "containerStatuses": [container(waiting=state)]} | more)).problem


def unscheduled(message: str, **spec: Any) -> PodProblem | None:
    gate = condition("PodScheduled", "False", reason="Unschedulable", message=message)
    return read_pod(raw({"phase": "Pending", "conditions": [gate]}, node=None, **spec)).problem


# -- where it is -------------------------------------------------------------------------------------------


def test_a_running_pod() -> None:
    status = {"phase": "Running", "containerStatuses": [container(running={"startedAt": "x"})]}
    assert read_pod(raw(status)) == Pod(
        name="digits-1-2",
        uid="5a0d",
        attempt=2,
        controller=("AdaScaleJob", "digits", "b7d1"),
        rank=1,
        node="node1",
        phase="Running",
        created_at=1772359200.0,
        scheduled_at=1772359200.0,
        namespace="team",
        version=7,
        requests={"containers": [{"resources": {"requests": {"cpu": "500m"}}}], "initContainers": []},
    )


def test_a_new_pod_has_no_node_and_no_problem() -> None:
    pod = read_pod(raw(node=None))
    assert (pod.phase, pod.node, pod.scheduled_at) == ("Pending", None, None)
    assert pod.problem is None
    assert pod.exit is None


@pytest.mark.parametrize(
    ("begun", "status"),
    [
        (False, {}),
        (False, {"containerStatuses": [container(waiting={"reason": "ContainerCreating"})]}),
        (
            True,
            {
                "initContainerStatuses": [container("fetch", running={})],
                "containerStatuses": [container(waiting={"reason": "PodInitializing"})],
            },
        ),
        (True, {"containerStatuses": [container(running={})]}),
        (True, {"phase": "Failed", "reason": "Evicted"}),
    ],
)
def test_a_pod_has_started_when_one_of_its_containers_has(begun: bool, status: dict[str, Any]) -> None:
    assert read_pod(raw(status)).has_started == begun


def test_a_pod_with_the_finalizer_of_kueue_is_held_by_it() -> None:
    labels = {"labels": {POD_GROUP: "digits-b7d1"}}
    assert read_pod(raw(metadata=labels | {"finalizers": [KUEUE_FINALIZER]})).held_group == "digits-b7d1"
    assert read_pod(raw(metadata=labels | {"finalizers": ["example.com/other"]})).held_group is None


def test_the_deletion_deadline_includes_the_grace_period() -> None:
    """The API adds the grace period to the time of the deletion."""
    meta = {"deletionTimestamp": "2026-03-01T10:00:30Z", "deletionGracePeriodSeconds": 30}
    assert read_pod(raw(metadata=meta)).deletion_deadline == 1772359230.0


@pytest.mark.parametrize(
    ("metadata", "rank"),
    [
        ({}, 1),
        ({"labels": {names.LABEL_REPLICA: "12"}}, 12),
        ({"labels": None}, -1),
        ({"labels": {names.LABEL_REPLICA: "x"}}, -1),
    ],
)
def test_the_rank_is_in_a_label(metadata: dict[str, Any], rank: int) -> None:
    assert read_pod(raw(metadata=metadata)).rank == rank


# -- why a pod does not start -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available: 2 No preemption "
        "victims found for incoming pod.",
        "0/2 nodes are available: 1 node(s) were unschedulable, 1 node(s) had untolerated taint {gpu: }.",
        "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
    ],
)
def test_an_unschedulable_pod_has_the_schedulers_message(message: str) -> None:
    assert unscheduled(message) == PodProblem(Reason.UNSCHEDULABLE, message)


def test_a_pod_whose_scheduling_gates_are_gone_has_no_problem() -> None:
    gated = condition("PodScheduled", "False", reason="SchedulingGated", message="Scheduling is blocked")
    assert read_pod(raw({"phase": "Pending", "conditions": [gated]}, node=None)).problem is None


@pytest.mark.parametrize(
    ("gate", "reason", "message"),
    [
        (
            "example.com/gate",
            Reason.SCHEDULING_GATED,
            "waiting until scheduling gates are removed: example.com/gate",
        ),
        (f"{KUEUE_GROUP}/admission", Reason.QUEUED, "waiting for Kueue to reserve quota"),
    ],
)
def test_a_pod_with_a_scheduling_gate_waits(gate: str, reason: Reason, message: str) -> None:
    gated = condition("PodScheduled", "False", reason="SchedulingGated")
    waiting = raw({"phase": "Pending", "conditions": [gated]}, node=None)
    waiting["spec"]["schedulingGates"] = [{"name": gate}]
    assert read_pod(waiting).problem == PodProblem(reason, message)


@pytest.mark.parametrize(
    ("message", "names_the_claim"),
    [
        ('persistentvolumeclaim "digits-checkpoints" not found', True),
        ('0/2 nodes are available: persistentvolumeclaim "digits-checkpoints" not found. preemption: ', True),
        ('persistentvolumeclaim "digits-checkpoints" is being deleted', True),
        ("0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not eligible", False),
        ("0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind.", False),
        ("0/2 nodes are available: 2 node(s) unavailable due to one or more pvc(s) bound to x", False),
        ('running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded', False),
    ],
)
def test_the_message_about_an_unbound_volume_names_the_claim(message: str, names_the_claim: bool) -> None:
    volumes = [
        {"name": "a", "persistentVolumeClaim": {"claimName": "digits-checkpoints"}},
        {"name": "b", "emptyDir": {}},
    ]
    suffix = "" if names_the_claim else " (PersistentVolumeClaims of the pod: digits-checkpoints)"
    assert unscheduled(message, volumes=volumes) == PodProblem(Reason.VOLUME_NOT_BOUND, f"{message}{suffix}")


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("ErrImagePull", 'failed to pull: "trainer:1": not found', Reason.IMAGE_PULL_FAILED),
        ("ImagePullBackOff", 'Back-off pulling image "trainer:1"', Reason.IMAGE_PULL_FAILED),
        ("InvalidImageName", "couldn't parse image name", Reason.IMAGE_PULL_FAILED),
        ("ErrImageNeverPull", "Container image is not present with pull policy of Never",
         Reason.IMAGE_PULL_FAILED),
        ("RegistryUnavailable", "", Reason.IMAGE_PULL_FAILED),
        ("CreateContainerConfigError", 'secret "s" not found', Reason.CONTAINER_START_FAILED),
        ("CreateContainerError", "context deadline exceeded", Reason.CONTAINER_START_FAILED),
        ("RunContainerError", "exec failed", Reason.CONTAINER_START_FAILED),
        ("ContainerCreating", "", None),
        ("PodInitializing", "", None),
    ],
)  # fmt: skip
def test_a_container_that_does_not_start_has_a_reason(
    reason: str, message: str, expected: Reason | None
) -> None:
    problem = waiting(reason, message)
    assert (problem and problem.reason) == expected
    if problem is not None:
        assert problem.message.startswith("container worker")
        assert problem.message.endswith(f"{reason}: {message}" if message else reason)
        assert ("registry.example/trainer:1" in problem.message) == (expected is Reason.IMAGE_PULL_FAILED)


def test_the_problem_of_an_init_container_comes_first() -> None:
    statuses = {
        "phase": "Pending",
        "initContainerStatuses": [container("prepare", waiting={"reason": "ImagePullBackOff"})],
        "containerStatuses": [container(waiting={"reason": "PodInitializing"})],
    }
    problem = read_pod(raw(statuses)).problem
    assert problem is not None
    assert problem.message == "init container prepare, image registry.example/trainer:1: ImagePullBackOff"


def test_a_pod_that_has_ended_has_no_problem() -> None:
    pod = read_pod(raw({"phase": "Failed", "containerStatuses": [container(waiting={"reason": "E"})]}))
    assert pod.problem is None
    assert pod.exit is not None


# -- how it has ended --------------------------------------------------------------------------------------


def test_a_succeeded_pod_is_not_a_failure() -> None:
    status = {
        "phase": "Succeeded",
        "containerStatuses": [container(terminated=terminated(0, "Completed", message="accuracy 97%"))],
    }
    ended = read_pod(raw(status)).exit
    assert ended == PodExit(0, "Completed", "accuracy 97%")
    assert not is_program_failure(ended)


def test_the_termination_message_has_the_generation_of_a_failure() -> None:
    termination = TerminationMessage(3, 1, "ZeroDivisionError: division by zero")
    ended = failed(container(terminated=terminated(1, message=termination.to_text())))
    assert ended == PodExit(1, "Error", termination.to_text(), termination)
    assert is_program_failure(ended)


@pytest.mark.parametrize(
    ("code", "reason", "is_failure"),
    [
        (1, "Error", True),
        (75, "Error", False),
        (137, "Error", False),
        (1, "OOMKilled", False),
        (137, "OOMKilled", False),
    ],
)
def test_exit_codes_count_as_the_core_says_except_for_out_of_memory(
    code: int, reason: str, is_failure: bool
) -> None:
    ended = failed(container(terminated=terminated(code, reason)))
    assert (ended.reason, is_program_failure(ended)) == (reason, is_failure)


def test_a_program_that_can_not_be_started_is_a_failure() -> None:
    message = 'exec: "pyton": executable file not found in $PATH'
    ended = failed(container(terminated=terminated(128, "StartError", message=message)))
    assert (ended.exit_code, ended.reason, ended.message) == (128, "StartError", message)
    assert is_program_failure(ended)


@pytest.mark.parametrize(
    "why",
    ["EvictionByEvictionAPI", "DeletionByTaintManager", "TerminationByKubelet", "PreemptionByScheduler"],
)
def test_a_disruption_is_not_a_failure_of_the_program(why: str) -> None:
    ended = failed(
        container(terminated=terminated(1)), conditions=[condition("DisruptionTarget", reason=why)]
    )
    assert ended.disruption
    assert not is_program_failure(ended)


def test_an_evicted_pod_has_the_message_of_its_eviction() -> None:
    message = "The node was low on resource: ephemeral-storage."
    status = {"reason": "Evicted", "message": message, "conditions": [condition("DisruptionTarget")]}
    ended = failed(container(terminated=terminated(137)), **status)
    assert (ended.reason, ended.message, ended.exit_code) == ("Evicted", message, 137)
    ended = failed(**status)
    assert (ended.reason, ended.message, ended.exit_code) == ("Evicted", message, None)
    assert not is_program_failure(ended)


@pytest.mark.parametrize("reason", ["OutOfcpu", "UnexpectedAdmissionError", "NodeAffinity", "NodeLost"])
def test_a_rejected_pod_is_not_a_failure_of_the_program(reason: str) -> None:
    """As when devices of a node went away between the scheduler's choice and the start."""
    ended = failed(reason=reason, message="Pod was rejected")
    assert (ended.exit_code, ended.reason, ended.message) == (None, reason, "Pod was rejected")
    assert not is_program_failure(ended)


def test_a_failed_init_container_is_a_failure() -> None:
    ended = failed(
        container(waiting={"reason": "PodInitializing"}),
        initContainerStatuses=[
            container("fetch", terminated=terminated(0, "Completed")),
            container("prepare", terminated=terminated(69, message="no space left on device")),
        ],
    )
    assert ended == PodExit(69, "Error", "container prepare: no space left on device", None, of_worker=False)
    assert is_program_failure(ended)


def test_a_killed_init_container_is_not_a_failure() -> None:
    assert not is_program_failure(
        failed(initContainerStatuses=[container("fetch", terminated=terminated(143))])
    )


def test_the_workers_exit_code_takes_precedence_over_those_of_sidecars() -> None:
    ended = failed(
        container("logs", terminated=terminated(1)),
        container(terminated=terminated(75)),
        initContainerStatuses=[container("proxy", terminated=terminated(143))],
    )
    assert (ended.exit_code, ended.of_worker) == (75, True)
    assert not is_program_failure(ended)


def test_a_failed_sidecar_of_a_finished_worker_is_a_failure() -> None:
    ended = failed(
        container(terminated=terminated(0, "Completed")), container("logs", terminated=terminated(1))
    )
    assert (ended.exit_code, ended.of_worker, ended.message) == (1, False, "container logs")
    assert is_program_failure(ended)


@pytest.mark.parametrize(
    "message",
    [
        "container has runAsNonRoot and image will run as root",
        "container has runAsNonRoot and image has non-numeric user (app), cannot verify user is non-root",
    ],
)
def test_an_image_that_runs_as_root_has_a_remedy(message: str) -> None:
    problem = waiting("CreateContainerConfigError", message)
    assert problem == PodProblem(
        Reason.CONTAINER_START_FAILED,
        f"container worker: CreateContainerConfigError: {message}. Set "
        "spec.template.spec.securityContext.runAsUser to the number of a user of the image other than 0, or, "
        "where the namespace allows root, spec.template.spec.securityContext.runAsNonRoot to false",
    )


# -- containers beside the worker --------------------------------------------------------------------------

SIDECAR_RUNS = container("istio-proxy", running={})
NAMED = {"annotations": {"adascale.dev/worker-container": "trainer"}}


def test_the_end_of_the_worker_is_the_end_of_the_replica_whatever_else_runs() -> None:
    statuses = [SIDECAR_RUNS, container("trainer", terminated=terminated(137, "OOMKilled"))]
    pod = read_pod(raw({"phase": "Running", "containerStatuses": statuses}, metadata=NAMED))
    assert pod.exit == PodExit(137, reason="OOMKilled", others=("istio-proxy",))
    assert not pod.has_ended


def test_a_replica_whose_sidecar_has_ended_runs_on() -> None:
    statuses = [container("istio-proxy", terminated=terminated(0)), container("trainer", running={})]
    assert read_pod(raw({"phase": "Running", "containerStatuses": statuses}, metadata=NAMED)).exit is None


def test_native_sidecars_end_by_themselves() -> None:
    status = {
        "phase": "Running",
        "initContainerStatuses": [SIDECAR_RUNS],
        "containerStatuses": [container("trainer", terminated=terminated(0))],
    }
    assert read_pod(raw(status, metadata=NAMED)).exit is None


@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
def test_a_sidecar_that_fails_again_and_again_is_no_problem_while_the_worker_runs(kind: str) -> None:
    fails = container("istio-proxy", waiting={"reason": "CrashLoopBackOff"})
    runs = container("trainer", running={})
    status: dict[str, Any] = {"phase": "Running", "containerStatuses": [runs]}
    status[kind] = [*status.get(kind, ()), fails]
    assert read_pod(raw(status, metadata=NAMED)).problem is None
    status["containerStatuses"][0] = container("trainer", waiting={"reason": "PodInitializing"})
    problem = read_pod(raw(status, metadata=NAMED)).problem
    assert problem is not None
    assert problem.reason is Reason.CONTAINER_START_FAILED


@pytest.mark.parametrize(("policy", "named"), [({}, "fetch"), ({"restartPolicy": "Always"}, None)])
def test_the_init_container_that_runs_is_known(policy: dict[str, str], named: str | None) -> None:
    status = {
        "phase": "Pending",
        "initContainerStatuses": [container("fetch", running={})],
        "containerStatuses": [container(waiting={"reason": "PodInitializing"})],
    }
    assert read_pod(raw(status, initContainers=[{"name": "fetch", **policy}])).init_container == named


def test_a_pod_that_the_operator_has_ended_keeps_the_end_of_its_worker() -> None:
    status = {
        "phase": "Failed",
        "reason": "DeadlineExceeded",
        "containerStatuses": [
            container("istio-proxy", terminated=terminated(0)),
            container("trainer", terminated=terminated(137, "OOMKilled")),
        ],
    }
    pod = read_pod(raw(status, metadata=NAMED, activeDeadlineSeconds=1))
    assert (pod.exit, pod.is_ending) == (PodExit(137, reason="OOMKilled"), True)
