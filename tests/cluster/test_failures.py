"""Jobs that can't start show why in their conditions. Jobs whose program fails end after `backoffLimit`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kubernetes import client

from adascale_controller.operator.types.settings import CHECKPOINT_FOLDER
from cluster.system import JobUnderTest, Manifest, System, Workspace, job_manifest, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FAIL_IN_ALL_PODS = f"{CHECKPOINT_FOLDER}/fail"
"""A file in the checkpoint claim that makes the program fail in all pods, later ones too."""
FAIL_IN_ONE_POD = "/tmp/fail"
"""A file that makes the program fail in one container."""


def fail(job: JobUnderTest, rank: int, file: str) -> None:
    """Create a file in the container of a rank that makes the program fail."""
    job.run_in(
        rank, f"import os, pathlib; pathlib.Path('{file}~').write_text('3'); os.rename('{file}~', '{file}')"
    )


def worker_of(manifest: Manifest) -> Manifest:
    """Return the worker's container in a job's template."""
    container: Manifest = manifest["spec"]["template"]["spec"]["containers"][0]
    return container


def single_replica(name: str, **spec: Any) -> Manifest:
    """Return a job with one replica and no restarts."""
    return job_manifest(name, **{"maxReplicas": 1, "backoffLimit": 0, **spec})


def failed_message(job: JobUnderTest, reason: str = "BackoffLimitExceeded") -> str:
    """Wait until a job has failed for a reason. Returns the message of the condition."""
    return str(job.wait_for_condition("Failed", reason)["message"])


def not_running_message(job: JobUnderTest, *reasons: str) -> str:
    """Wait until a job is not running for one of some reasons. Returns the message of the condition."""
    return str(job.wait_for_condition("Running", *reasons, status="False")["message"])


def test_a_failing_program_restarts_until_backoff_limit_is_exceeded(workspace: Workspace) -> None:
    """A generation counts once, whether one replica fails or both do."""
    manifest = job_manifest(minReplicas=2, maxReplicas=2, backoffLimit=2)
    worker_of(manifest)["env"].append({"name": "FAIL", "value": f"{FAIL_IN_ONE_POD}:{FAIL_IN_ALL_PODS}"})
    job = workspace.submit(manifest)
    job.wait_until_training(2)
    first = job.uids()
    saved = wait_until(lambda: job.saved_step(), "a checkpoint")

    fail(job, 1, FAIL_IN_ONE_POD)
    job.wait_for("failure", lambda status: status["failures"] == 1)
    status = job.wait_until_training(2)
    assert (status["failures"], status["disruptions"], status["restarts"]) == (1, 0, 1), job.report()
    assert job.entered() >= saved
    second = job.uids()
    assert second[0] == first[0]
    assert second[1] != first[1]

    fail(job, 0, FAIL_IN_ALL_PODS)
    job.wait_for("second failure", lambda status: status["failures"] == 2)
    message = failed_message(job)
    assert "The program has failed 3 times, backoffLimit (2) exceeded. Replica " in message
    assert "failed: exit code 3:\nenters generation " in message
    assert message.endswith("this program fails on purpose")
    status = job.status()
    assert (status["state"], status["failures"], status["disruptions"]) == ("Failed", 3, 0), job.report()
    assert status["completionTime"]
    wait_until(lambda: not job.pods(), "the end of all pods")
    assert not any(pod.metadata.finalizers for pod in job.pods(ended=True).values())
    # The pod that the message names still has its logs.
    [named] = re.findall(r"\(pod (.+?)\)", message)
    assert "this program fails on purpose" in job.kubectl("logs", named, "--tail=-1")
    reasons = job.wait_for_event("BackoffLimitExceeded")
    assert reasons.count("ProgramFailed") == 2
    assert reasons.count("BackoffLimitExceeded") == 1


def test_programs_that_end_before_training_fail_with_the_reason(workspace: Workspace) -> None:
    early = single_replica("early")
    worker_of(early)["command"] = ["python", "-c", "import sys; print('there is no data'); sys.exit(4)"]
    idle = single_replica("idle")
    worker_of(idle)["command"] = ["true"]
    missing = single_replica("missing")
    worker_of(missing)["command"] = ["no-such-program"]
    other_image = single_replica("other-image")
    # As in an image that is not built from the worker's.
    worker_of(other_image)["env"].append({"name": "PATH", "value": "/usr/local/bin:/usr/bin:/bin"})
    again = single_replica("again", backoffLimit=5)
    worker_of(again)["command"] = worker_of(early)["command"]
    jobs = [workspace.submit(manifest) for manifest in (early, idle, missing, other_image)]
    retried = workspace.submit(again)

    messages = [failed_message(job) for job in jobs]
    assert "exit code 4" in messages[0]
    assert "there is no data\n" in messages[0]
    assert messages[0].endswith("ended before it called program_reentry (exit code 4)")
    assert "true finished without calling program_reentry of an ElasticTrainer" in messages[1]
    assert "exit code 127" in messages[2]
    assert "'no-such-program' cannot be started: No such file or directory" in messages[2]
    assert "adascale-agent" in messages[3]
    assert [job.status()["failures"] for job in jobs] == [1, 1, 1, 1]
    # With backoffLimit left, it is retried once.
    message = failed_message(retried, "ProgramFailed")
    assert message.startswith("The program has failed twice in the same way before its first step. Replica 0")
    assert "there is no data\n" in message
    assert retried.status()["failures"] == 2, retried.report()


def shows_its_node(stuck: JobUnderTest) -> None:
    """Wait until a job says on which node its pod starts no container, or why."""
    condition = stuck.wait_for_condition(
        "Running", "ContainerCreating", "ContainerStartFailed", status="False", timeout=180
    )
    if condition["reason"] == "ContainerCreating":
        [pod] = stuck.pods().values()
        assert condition["message"].startswith(
            f"pod {pod.metadata.name} has been in ContainerCreating for more than "
        )
        assert f" on node {pod.spec.node_name}" in condition["message"]
    else:
        assert "second" in condition["message"] or "first" in condition["message"]


def test_what_keeps_pods_from_starting_is_in_the_condition(system: System, workspace: Workspace) -> None:
    unknown = single_replica("unknown-image")
    worker_of(unknown).update(image="adascale-worker:no-such-tag", imagePullPolicy="Never")
    invalid = single_replica("invalid-image")
    worker_of(invalid)["image"] = "Not//AnImage"
    unbound = single_replica("unbound", checkpoint={"storageClassName": "no-such-class"})
    missing = single_replica("missing-claim", checkpoint={"claimName": "later"})
    privileged = single_replica("privileged")
    worker_of(privileged)["securityContext"] = {"privileged": True}
    unset = single_replica("unset")
    worker_of(unset)["envFrom"] = [{"configMapRef": {"name": "no-such-map"}}]
    unmounted = single_replica("unmounted")
    unmounted["spec"]["template"]["spec"]["volumes"].append(
        {"name": "settings", "configMap": {"name": "no-such-volume-map"}}
    )
    worker_of(unmounted)["volumeMounts"].append({"name": "settings", "mountPath": "/settings"})
    unshared = job_manifest("unshared", checkpoint={"path": "/state"})
    # Two volumes of one claim in the user's template: before 1.37, the kubelet mounts only one of them.
    system.storage.claim(workspace.namespace, "twice")
    stuck = single_replica("stuck")
    for name in ("first", "second"):
        stuck["spec"]["template"]["spec"]["volumes"].append(
            {"name": name, "persistentVolumeClaim": {"claimName": "twice"}}
        )
        worker_of(stuck)["volumeMounts"].append({"name": name, "mountPath": f"/{name}"})
    mistaken = single_replica("mistaken")
    worker_of(mistaken)["volumeMounts"].append({"name": "no-such-volume", "mountPath": "/data"})

    jobs = {
        manifest["metadata"]["name"]: workspace.submit(manifest)
        for manifest in (
            unknown,
            invalid,
            unbound,
            missing,
            privileged,
            unset,
            unmounted,
            unshared,
            stuck,
            mistaken,
        )
    }
    assert "image adascale-worker:no-such-tag" in not_running_message(
        jobs["unknown-image"], "ImagePullFailed"
    )
    assert "image Not//AnImage" in not_running_message(jobs["invalid-image"], "ImagePullFailed")
    assert "unbound-checkpoints" in not_running_message(jobs["unbound"], "VolumeNotBound")
    assert "PersistentVolumeClaim later not found in" in not_running_message(
        jobs["missing-claim"], "VolumeNotFound"
    )
    assert "violates PodSecurity" in not_running_message(jobs["privileged"], "PodCreationFailed")
    assert "no-such-map" in not_running_message(jobs["unset"], "ContainerStartFailed")
    assert '"no-such-volume-map" not found' in not_running_message(jobs["unmounted"], "ContainerStartFailed")
    assert "worker mounts no volume at /state" in failed_message(jobs["unshared"], "InvalidSpec")
    assert "no-such-volume" in failed_message(jobs["mistaken"], "InvalidSpec")
    minor = client.VersionApi(system.api).get_code().minor
    if int(minor.rstrip("+")) < 37:
        shows_its_node(jobs["stuck"])
    else:
        jobs.pop("stuck").wait_until_training(1)
    for job in jobs.values():
        status = job.status()
        assert (status["replicas"], status["failures"], status["disruptions"]) == (0, 0, 0)

    # The jobs start once the claim exists and the template is corrected.
    system.storage.claim(workspace.namespace, "later")
    jobs["missing-claim"].wait_until_training(1)
    mistaken["spec"]["template"]["spec"]["volumes"].append({"name": "no-such-volume", "emptyDir": {}})
    jobs["mistaken"].edit(template=mistaken["spec"]["template"])
    jobs["mistaken"].wait_until_training(1)
