"""What keeps a job from training is told at once; where the program itself fails, the job is given up."""

from __future__ import annotations

import re
from typing import Any

import pytest

from adascale_controller.operator.types.workload import CHECKPOINT_FOLDER
from cluster.system import JobUnderTest, Manifest, System, Workspace, job_manifest, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EVERYWHERE = f"{CHECKPOINT_FOLDER}/fail"
"""A file that makes the program fail in all pods, and in those that come after them."""
HERE = "/tmp/fail"
"""A file that makes the program fail in one container."""


def fail(job: JobUnderTest, rank: int, file: str) -> None:
    """Make the program fail."""
    job.run_in(
        rank, f"import os, pathlib; pathlib.Path('{file}~').write_text('3'); os.rename('{file}~', '{file}')"
    )


def worker_of(manifest: Manifest) -> Manifest:
    """The container that trains."""
    found: Manifest = manifest["spec"]["template"]["spec"]["containers"][0]
    return found


def on_one_replica(name: str, **more: Any) -> Manifest:
    """A job that never has more than one replica."""
    return job_manifest(name, **{"maxReplicas": 1, "backoffLimit": 0, **more})


def failed(job: JobUnderTest, reason: str = "BackoffLimitExceeded") -> str:
    """What the job says of its failure, once it has failed for a reason."""
    return str(job.wait_for_condition("Failed", reason)["message"])


def hindered(job: JobUnderTest, reason: str) -> str:
    """What the job says of why it does not run, once it is for a reason."""
    return str(job.wait_for_condition("Running", reason, "False")["message"])


def test_a_program_that_fails_is_started_again_and_then_given_up(workspace: Workspace) -> None:
    """A generation counts once, whether one replica fails, which the other follows, or both do."""
    manifest = job_manifest(minReplicas=2, maxReplicas=2, backoffLimit=2)
    worker_of(manifest)["env"].append({"name": "FAIL", "value": f"{HERE}:{EVERYWHERE}"})
    job = workspace.submit(manifest)
    job.wait_until_training(2)
    first = job.uids()
    saved = wait_until(lambda: job.saved_step(), "a checkpoint")

    fail(job, 1, HERE)
    job.wait_for("failure", lambda status: status["failures"] == 1)
    status = job.wait_until_training(2)
    assert (status["failures"], status["disruptions"], status["restarts"]) == (1, 0, 1), job.story()
    assert job.entered() >= saved
    second = job.uids()
    assert second[0] == first[0]
    assert second[1] != first[1]

    fail(job, 0, EVERYWHERE)
    job.wait_for("second failure", lambda status: status["failures"] == 2)
    message = failed(job)
    assert message.startswith("3 failures of the program, backoffLimit is 2. Replica ")
    assert "failed: exit code 3:\nenters generation " in message
    assert message.endswith("this program fails on purpose")
    status = job.status()
    assert (status["state"], status["failures"], status["disruptions"]) == ("Failed", 3, 0), job.story()
    assert status["completionTime"]
    wait_until(lambda: not job.pods(), "the end of all pods")
    [batch] = job.batch_jobs()
    assert batch.spec.suspend
    # Nobody is needed for their end, such as a Job controller that makes no more of them.
    wait_until(lambda: not any(pod.metadata.finalizers for pod in job.pods(ended=True).values()), "free pods")
    # The one that the message names has failed before the others were taken away.
    [named] = re.findall(r"\(pod (.+?)\)", message)
    assert "this program fails on purpose" in job.kubectl("logs", named, "--tail=-1")
    reasons = [reason for reason, _ in job.events()]
    assert reasons.count("ProgramFailed") == 2
    assert reasons.count("BackoffLimitExceeded") == 1


def test_programs_that_never_come_to_train_fail_with_words(workspace: Workspace) -> None:
    early = on_one_replica("early")
    worker_of(early)["command"] = ["python", "-c", "import sys; print('there is no data'); sys.exit(4)"]
    idle = on_one_replica("idle")
    worker_of(idle)["command"] = ["true"]
    missing = on_one_replica("missing")
    worker_of(missing)["command"] = ["no-such-program"]
    other_image = on_one_replica("other-image")
    # As in an image that was not built from the worker's.
    worker_of(other_image)["env"].append({"name": "PATH", "value": "/usr/local/bin:/usr/bin:/bin"})
    jobs = [workspace.submit(one) for one in (early, idle, missing, other_image)]

    told = [failed(job) for job in jobs]
    assert "exit code 4" in told[0]
    assert "there is no data\n" in told[0]
    assert told[0].endswith("ended before it made an ElasticTrainer (exit code 4)")
    assert "true finished without making an ElasticTrainer" in told[1]
    assert "exit code 127" in told[2]
    assert "'no-such-program' cannot be started: No such file or directory" in told[2]
    assert "adascale-agent" in told[3]
    assert [job.status()["failures"] for job in jobs] == [1, 1, 1, 1]


def test_what_keeps_pods_from_starting_is_told_at_once(system: System, workspace: Workspace) -> None:
    unknown = on_one_replica("unknown-image")
    worker_of(unknown).update(image="adascale-worker:no-such-tag", imagePullPolicy="Never")
    invalid = on_one_replica("invalid-image")
    worker_of(invalid)["image"] = "Not//AnImage"
    unbound = on_one_replica("unbound", checkpoint={"storageClassName": "no-such-class"})
    missing = on_one_replica("missing-claim", checkpoint={"claimName": "later"})
    privileged = on_one_replica("privileged")
    worker_of(privileged)["securityContext"] = {"privileged": True}
    unset = on_one_replica("unset")
    worker_of(unset)["envFrom"] = [{"configMapRef": {"name": "no-such-map"}}]
    unmounted = on_one_replica("unmounted")
    pod = unmounted["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "settings", "configMap": {"name": "no-such-volume-map"}})
    worker_of(unmounted)["volumeMounts"].append({"name": "settings", "mountPath": "/settings"})
    unshared = job_manifest("unshared", checkpoint={"path": "/state"})
    mistaken = on_one_replica("mistaken")
    worker_of(mistaken)["volumeMounts"].append({"name": "no-such-volume", "mountPath": "/data"})

    jobs = {
        one["metadata"]["name"]: workspace.submit(one)
        for one in (
            unknown,
            invalid,
            unbound,
            missing,
            privileged,
            unset,
            unmounted,
            unshared,
            mistaken,
        )
    }
    assert "image adascale-worker:no-such-tag" in hindered(jobs["unknown-image"], "ImagePullFailed")
    assert "image Not//AnImage" in hindered(jobs["invalid-image"], "ImagePullFailed")
    assert "unbound-checkpoints" in hindered(jobs["unbound"], "VolumeNotBound")
    assert "no PersistentVolumeClaim later in" in hindered(jobs["missing-claim"], "VolumeNotFound")
    assert "violates PodSecurity" in hindered(jobs["privileged"], "PodCreationFailed")
    assert "no-such-map" in hindered(jobs["unset"], "ContainerStartFailed")
    assert '"no-such-volume-map" not found' in hindered(jobs["unmounted"], "ContainerStartFailed")
    assert "worker mounts no volume at /state" in failed(jobs["unshared"], "InvalidSpec")
    assert "no-such-volume" in failed(jobs["mistaken"], "InvalidSpec")
    for job in jobs.values():
        status = job.status()
        assert (status["replicas"], status["failures"], status["disruptions"]) == (0, 0, 0)

    # What was missing comes, or what was wrong is put right.
    system.storage.claim(workspace.namespace, "later")
    jobs["missing-claim"].wait_until_training(1)
    mistaken["spec"]["template"]["spec"]["volumes"].append({"name": "no-such-volume", "emptyDir": {}})
    jobs["mistaken"].edit(template=mistaken["spec"]["template"])
    jobs["mistaken"].wait_until_training(1)


def test_a_job_trains_on_as_many_replicas_as_a_quota_lets_it_have(
    system: System, workspace: Workspace
) -> None:
    quota = {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": "2"}}}
    system.core.create_namespaced_resource_quota(workspace.namespace, quota)
    job = workspace.submit(job_manifest())
    job.wait_until_training(2)
    told = job.wait_for_condition("Rescaling", "QuotaExceeded")["message"]
    assert told.startswith("2 -> ")
    assert "exceeded quota: pods" in told
    assert told.endswith("training continues on 2 replicas")
    status = job.status()
    assert (status["replicas"], status["disruptions"], status["failures"]) == (2, 0, 0)
    assert job.condition("Running")["reason"] == "Training"

    late = workspace.submit(on_one_replica("late"))
    assert "exceeded quota: pods" in hindered(late, "QuotaExceeded")
    hard: Manifest = {"spec": {"hard": {"pods": "10"}}}
    system.core.patch_namespaced_resource_quota("pods", workspace.namespace, hard)
    late.wait_until_training(1, patience=300)
    job.wait_until_training(4, patience=300)
    assert job.status()["disruptions"] == 0
