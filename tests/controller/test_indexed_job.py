"""Manifests of an AdaScaleJob: what is added to a pod template, and that nothing of it is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_controller.job_definition import CheckpointSettings, JobDefinition
from adascale_controller.operator.apply.indexed_job import (
    claim_manifest,
    indexed_job_manifest,
    resize_patch,
    template_warnings,
)
from adascale_controller.operator.apply.pod_template import TOKEN_FOLDER
from adascale_controller.operator.schedule.nodes import eligible_nodes, pod_request
from adascale_controller.operator.types.workload import (
    CHECKPOINT_FOLDER,
    ELASTIC_JOB,
    QUEUE_NAME,
    PodSettings,
    Queueing,
    Workload,
    template_digest,
)
from adascale_core import names
from adascale_core.failures import IGNORED_EXIT_CODES
from adascale_core.messages.job_spec import JobSpec

SPEC = JobSpec(4, 256, (4, 64), 1, 4, 1000)
JOB = JobDefinition("team.digits", SPEC)
OWNER = {
    "apiVersion": "adascale.dev/v1alpha1",
    "kind": "AdaScaleJob",
    "name": "digits",
    "uid": "b7d1",
    "controller": True,
    "blockOwnerDeletion": True,
}


# -- builders ----------------------------------------------------------------------------------------------


def container(name: str = "worker", **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "trainer:1", **fields}


def template(*containers: Mapping[str, Any], metadata: Any = None, **spec: Any) -> dict[str, Any]:
    made = {"spec": {"containers": list(containers or (container(),)), **spec}}
    return made if metadata is None else {"metadata": metadata} | made


def workload(made_of: Mapping[str, Any] | None = None, **of_job: Any) -> Workload:
    return Workload(
        name="digits",
        namespace="team",
        uid="b7d1",
        job=replace(JOB, **of_job),
        template=made_of or template(container(command=["python", "train.py"])),
        created_at=1_700_000_000,
        settings=PodSettings("http://adascale-api.adascale-system:8265"),
    )


def pod(made_of: Workload, single_node: bool = False) -> dict[str, Any]:
    manifest: dict[str, Any] = indexed_job_manifest(made_of, 2, suspend=False, single_node=single_node)[
        "spec"
    ]["template"]
    return manifest


def worker(made_of: Workload) -> dict[str, Any]:
    containers = pod(made_of)["spec"]["containers"]
    found: dict[str, Any] = next((item for item in containers if item["name"] == "worker"), containers[0])
    return found


def env(made_of: Workload) -> dict[str, Any]:
    variables = worker(made_of)["env"]
    found = {item["name"]: item.get("value", item.get("valueFrom")) for item in variables}
    assert len(found) == len(variables)
    return found


def mounts(made_of: Workload) -> dict[str, dict[str, Any]]:
    """The volume at each place of the worker."""
    volumes = {item["name"]: item for item in pod(made_of)["spec"]["volumes"]}
    return {item["mountPath"]: volumes[item["name"]] | item for item in worker(made_of)["volumeMounts"]}


# -- the Job -----------------------------------------------------------------------------------------------


def test_the_indexed_job_has_the_name_of_the_job_and_no_backoff_limit() -> None:
    made = indexed_job_manifest(workload(), 3, suspend=False, single_node=False)
    assert (made["apiVersion"], made["kind"]) == ("batch/v1", "Job")
    assert made["metadata"]["name"] == "digits"
    assert made["metadata"]["namespace"] == "team"
    assert made["metadata"]["ownerReferences"] == [OWNER]
    assert made["metadata"]["labels"][names.LABEL_JOB] == "digits"
    assert made["metadata"]["annotations"] == {
        names.ANNOTATION_TEMPLATE: template_digest(workload(), single_node=False)
    }
    spec = made["spec"]
    del spec["template"]
    assert spec == {
        "completionMode": "Indexed",
        "completions": 3,
        "parallelism": 3,
        "suspend": False,
        "backoffLimit": 2147483647,
        "backoffLimitPerIndex": 2147483647,
        "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "Ignore",
                    "onExitCodes": {
                        "containerName": "worker",
                        "operator": "In",
                        "values": list(IGNORED_EXIT_CODES),
                    },
                },
            ]
        },
    }


def test_the_indexed_job_has_the_deadline() -> None:
    made = indexed_job_manifest(workload(active_deadline_seconds=60), 1, suspend=False, single_node=False)
    assert made["spec"]["activeDeadlineSeconds"] == 60


def test_the_failure_policy_names_the_worker_container() -> None:
    made = indexed_job_manifest(
        workload(template(container("main"), container("logs"))), 1, suspend=False, single_node=False
    )
    rule = made["spec"]["podFailurePolicy"]["rules"][1]
    assert rule["onExitCodes"]["containerName"] == "main"


@pytest.mark.parametrize(("replicas", "size"), [(0, 1), (1, 1), (4, 4)])
def test_completions_and_parallelism_change_together_and_are_never_zero(replicas: int, size: int) -> None:
    made = indexed_job_manifest(workload(), replicas, suspend=True, single_node=False)["spec"]
    patch = resize_patch(replicas, suspend=True)["spec"]
    assert patch == {"completions": size, "parallelism": size, "suspend": True, "activeDeadlineSeconds": None}
    assert {name: value for name, value in patch.items() if value is not None}.items() <= made.items()


def test_the_resize_patch_has_the_deadline() -> None:
    assert resize_patch(2, suspend=False, active_deadline_seconds=60)["spec"]["activeDeadlineSeconds"] == 60


# -- how a replica is started ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"command": ["python", "t.py"]}, {"command": ["adascale-agent", "--", "python", "t.py"]}),
        (
            {"command": ["python"], "args": ["t.py", "--lr=1"]},
            {"command": ["adascale-agent", "--", "python", "t.py", "--lr=1"]},
        ),
        ({"args": ["python", "t.py"]}, {"args": ["python", "t.py"]}),
        ({}, {}),
        ({"command": [], "args": None}, {"command": [], "args": None}),
        (
            {"command": ["/opt/bin/adascale-agent", "--"], "args": ["python", "t.py"]},
            {"command": ["/opt/bin/adascale-agent", "--"], "args": ["python", "t.py"]},
        ),
    ],
)
def test_the_agent_starts_the_program(given_: dict[str, Any], expected: dict[str, Any]) -> None:
    started = worker(workload(template(container(**given_))))
    assert {key: started[key] for key in ("command", "args") if key in started} == expected


def test_only_the_worker_container_becomes_a_replica() -> None:
    made = workload(
        template(container("logs", command=["tail"]), container(), initContainers=[container("prepare")])
    )
    others = [pod(made)["spec"]["containers"][0], pod(made)["spec"]["initContainers"][0]]
    assert others[0]["command"] == ["tail"]
    assert not any("env" in item or "volumeMounts" in item for item in others)


def test_the_environment_of_a_replica() -> None:
    variables = env(workload())
    assert variables == {
        "ADASCALE_JOB_ID": "team.digits",
        "ADASCALE_API_URL": "http://adascale-api.adascale-system:8265",
        "ADASCALE_TOKEN_FILE": "/var/run/secrets/adascale/token",
        "ADASCALE_REPLICA": {
            "fieldRef": {
                "apiVersion": "v1",
                "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
            }
        },
        "ADASCALE_ADDRESS": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}},
        "ADASCALE_NODE_NAME": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}},
        "ADASCALE_CHECKPOINT_DIR": "/var/lib/adascale/checkpoints/team.digits",
        "ADASCALE_CHECKPOINT_INTERVAL": "30.0",
        "ADASCALE_INCARNATION": "1700000000",
        "ADASCALE_TERMINATION_LOG": "/dev/termination-log",
        "ADASCALE_TERMINATION_GRACE": "25",
        "ADASCALE_BATCH_SIZE": "4",
        "ADASCALE_MAX_BATCH_SIZE": "256",
        "ADASCALE_LOCAL_BSZ_BOUNDS": "4,64",
        "ADASCALE_SCALE_INVARIANT_STEPS": "1000",
    }


@pytest.mark.parametrize(("seconds", "left"), [(None, "25"), (120, "115"), (6, "1"), (3, "1"), (0, "1")])
def test_a_trainer_gets_the_grace_period_without_the_agents_share(seconds: int | None, left: str) -> None:
    made = workload(template(terminationGracePeriodSeconds=seconds))
    assert env(made)[names.ENV_TERMINATION_GRACE] == left


def test_the_agent_writes_the_termination_message_to_the_templates_path() -> None:
    made = workload(template(container(terminationMessagePath="/tmp/why")))
    assert env(made)[names.ENV_TERMINATION_LOG] == "/tmp/why"


def test_the_users_variables_come_after_ours_and_may_refer_to_them() -> None:
    theirs = [{"name": "RUN", "value": "$(ADASCALE_JOB_ID)"}, {"name": "A", "valueFrom": {"x": {}}}]
    made = worker(workload(template(container(env=theirs))))
    assert made["env"][-2:] == theirs


def test_a_variable_of_the_protocol_is_replaced_with_a_warning() -> None:
    made = workload(
        template(container(env=[{"name": "ADASCALE_REPLICA", "value": "7"}, {"name": "A", "value": "1"}]))
    )
    assert isinstance(env(made)["ADASCALE_REPLICA"], dict)
    assert env(made)["A"] == "1"
    assert template_warnings(made) == (
        "environment variable ADASCALE_REPLICA of spec.template is replaced: the operator sets it",
    )


def test_variables_in_a_path_are_not_expanded() -> None:
    """The kubelet would expand `$(A)`; `adascale run` does not."""
    made = workload(checkpoint=CheckpointSettings(path="/data/$(A)"))
    assert env(made)[names.ENV_CHECKPOINT_DIR] == "/data/$$(A)"


# -- what is mounted ---------------------------------------------------------------------------------------


def test_the_token_is_read_only_and_its_audience_names_the_job() -> None:
    token = mounts(workload())[TOKEN_FOLDER]
    assert token["readOnly"] is True
    assert token["projected"]["sources"] == [
        {
            "serviceAccountToken": {
                "audience": "adascale.dev/jobs/team.digits",
                "expirationSeconds": 3600,
                "path": "token",
            }
        }
    ]


@pytest.mark.parametrize(
    ("checkpoint", "claim", "folder", "own"),
    [
        (CheckpointSettings(), "digits-checkpoints", f"{CHECKPOINT_FOLDER}/team.digits", True),
        (CheckpointSettings(claim_name="shared"), "shared", f"{CHECKPOINT_FOLDER}/team.digits", False),
        (CheckpointSettings(path="/data/run"), None, "/data/run", False),
        (CheckpointSettings(url="s3://bucket/runs/"), None, "s3://bucket/runs/team.digits", False),
        (CheckpointSettings(url="s3://bucket//runs//"), None, "s3://bucket/runs/team.digits", False),
    ],
)
def test_checkpoints_are_saved_in_the_claim_or_path_of_the_spec(
    checkpoint: CheckpointSettings, claim: str | None, folder: str, own: bool
) -> None:
    made = workload(checkpoint=checkpoint)
    mounted = mounts(made).get(CHECKPOINT_FOLDER)
    assert (mounted and mounted["persistentVolumeClaim"]) == (claim and {"claimName": claim})
    assert env(made)[names.ENV_CHECKPOINT_DIR] == folder
    assert (claim_manifest(made) is not None) == own


def test_credentials_for_an_object_store_come_from_the_secret_before_the_users_own_variables() -> None:
    checkpoint = CheckpointSettings(url="s3://bucket", credentials_secret="s3")
    assert worker(workload(checkpoint=checkpoint))["envFrom"] == [{"secretRef": {"name": "s3"}}]
    own = {"configMapRef": {"name": "settings"}}
    made = workload(template(container(envFrom=[own])), checkpoint=checkpoint)
    assert worker(made)["envFrom"] == [{"secretRef": {"name": "s3"}}, own]
    assert "envFrom" not in worker(workload(checkpoint=CheckpointSettings(url="s3://bucket")))


def test_the_operators_claim_has_the_storage_of_the_spec() -> None:
    made = claim_manifest(workload())
    assert made is not None
    assert made["metadata"]["name"] == "digits-checkpoints"
    assert made["metadata"]["ownerReferences"] == [OWNER]
    assert made["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    }
    checkpoint = CheckpointSettings(storage="20Gi", storage_class_name="nfs", access_mode="ReadWriteMany")
    made = claim_manifest(workload(checkpoint=checkpoint))
    assert made is not None
    assert made["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "20Gi"}},
        "storageClassName": "nfs",
    }


def test_shared_memory_has_no_size_limit_of_its_own() -> None:
    assert mounts(workload())["/dev/shm"]["emptyDir"] == {"medium": "Memory"}


def test_a_shared_memory_volume_of_the_template_is_kept() -> None:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    made = workload(
        template(container(volumeMounts=[{"name": "shm", "mountPath": "/dev/shm/"}]), volumes=[shm])
    )
    assert "/dev/shm" not in mounts(made)
    assert mounts(made)["/dev/shm/"]["emptyDir"]["sizeLimit"] == "2Gi"


def test_a_container_with_a_read_only_root_gets_a_temporary_folder_and_a_home() -> None:
    made = workload(template(container(securityContext={"readOnlyRootFilesystem": True})))
    assert mounts(made)["/tmp"]["emptyDir"] == {}
    assert env(made)["HOME"] == "/tmp"
    assert "/tmp" not in mounts(workload())
    assert "HOME" not in env(workload())


@pytest.mark.parametrize(
    "fields",
    [
        {"env": [{"name": "HOME", "value": "/home/me"}]},
        {"envFrom": [{"configMapRef": {"name": "settings"}}]},
    ],
)
def test_a_home_that_the_template_sets_or_may_set_is_kept(fields: dict[str, Any]) -> None:
    made = workload(template(container(securityContext={"readOnlyRootFilesystem": True}, **fields)))
    assert env(made).get("HOME") != "/tmp"


def test_volumes_of_the_template_keep_their_names() -> None:
    theirs = {"name": "adascale-token", "emptyDir": {}}
    made = workload(
        template(container(volumeMounts=[{"name": "adascale-token", "mountPath": "/data"}]), volumes=[theirs])
    )
    assert mounts(made)["/data"]["emptyDir"] == {}
    assert mounts(made)[TOKEN_FOLDER]["name"] == "adascale-token-2"


def test_a_mount_at_one_of_our_paths_is_removed_with_a_warning() -> None:
    made = workload(
        template(
            container(volumeMounts=[{"name": "mine", "mountPath": f"{TOKEN_FOLDER}/"}]),
            volumes=[{"name": "mine", "emptyDir": {}}],
        )
    )
    assert "projected" in mounts(made)[TOKEN_FOLDER]
    assert f"{TOKEN_FOLDER}/" not in mounts(made)
    assert template_warnings(made) == (
        f"volume mount {TOKEN_FOLDER} of spec.template is removed: the operator mounts a volume of its own "
        "there",
    )


# -- checkpoints in a claim that the template mounts too
# ------------------------------------------------------


def template_with_claim(*, volume: dict[str, Any] | None = None, **mount: Any) -> dict[str, Any]:
    """Return a template whose worker mounts the claim `shared` at /data by a volume of its own."""
    source = {"claimName": "shared", **(volume or {})}
    return template(
        container(volumeMounts=[{"name": "data", "mountPath": "/data", **mount}]),
        container("exporter", volumeMounts=[{"name": "data", "mountPath": "/out"}]),
        initContainers=[container("fetch", volumeMounts=[{"name": "data", "mountPath": "/in"}])],
        volumes=[{"name": "data", "persistentVolumeClaim": source}],
    )


def claim_volumes(made_of: Workload, claim: str) -> list[str]:
    """Return the names of the pod's volumes of a claim."""
    return [
        volume["name"]
        for volume in pod(made_of)["spec"]["volumes"]
        if volume.get("persistentVolumeClaim", {}).get("claimName") == claim
    ]


@pytest.mark.parametrize("mount", [{}, {"subPath": "train"}, {"readOnly": True}])
def test_checkpoints_use_the_users_volume_of_the_same_claim(mount: dict[str, Any]) -> None:
    """The kubelet never mounts a second volume of one claim: the pod stays in ContainerCreating."""
    made = workload(template_with_claim(**mount), checkpoint=CheckpointSettings(claim_name="shared"))
    assert claim_volumes(made, "shared") == ["data"]
    assert {"name": "data", "mountPath": "/data", **mount} in worker(made)["volumeMounts"]
    assert {"name": "data", "mountPath": CHECKPOINT_FOLDER} in worker(made)["volumeMounts"]
    assert template_warnings(made) == ()


def test_checkpoints_use_the_users_volume_of_the_jobs_own_claim() -> None:
    volumes = [{"name": "state", "persistentVolumeClaim": {"claimName": "digits-checkpoints"}}]
    made = workload(template(container(), volumes=volumes))
    assert claim_volumes(made, "digits-checkpoints") == ["state"]
    assert mounts(made)[CHECKPOINT_FOLDER]["name"] == "state"


def test_a_volume_of_another_claim_is_not_used_for_checkpoints() -> None:
    made = workload(template_with_claim(), checkpoint=CheckpointSettings(claim_name="other"))
    assert claim_volumes(made, "shared") == ["data"]
    assert claim_volumes(made, "other") == ["adascale-checkpoints"]


def test_a_read_only_volume_of_the_same_claim_becomes_writable_for_checkpoints_only() -> None:
    read_only = template_with_claim(volume={"readOnly": True})
    made = workload(read_only, checkpoint=CheckpointSettings(claim_name="shared"))
    assert claim_volumes(made, "shared") == ["data"]
    spec = pod(made)["spec"]
    volume = next(each for each in spec["volumes"] if each["name"] == "data")
    assert "readOnly" not in volume["persistentVolumeClaim"]
    users_mounts = [
        mount
        for each in [*spec["containers"], *spec["initContainers"]]
        for mount in each["volumeMounts"]
        if mount["mountPath"] in ("/data", "/out", "/in")
    ]
    assert [mount.get("readOnly") for mount in users_mounts] == [True, True, True]
    assert {"name": "data", "mountPath": CHECKPOINT_FOLDER} in worker(made)["volumeMounts"]
    assert template_warnings(made) == (
        "readOnly of volume data of spec.template is moved to its volume mounts: checkpoints are saved in "
        "PersistentVolumeClaim shared too",
    )


def test_the_users_own_mount_of_the_claim_at_the_checkpoint_folder_is_kept_without_a_warning() -> None:
    made_of = template(
        container(volumeMounts=[{"name": "data", "mountPath": f"{CHECKPOINT_FOLDER}/"}]),
        volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}],
    )
    made = workload(made_of, checkpoint=CheckpointSettings(claim_name="shared"))
    assert mounts(made)[CHECKPOINT_FOLDER]["name"] == "data"
    assert template_warnings(made) == ()


# -- what every pod has ------------------------------------------------------------------------------------


def test_pods_meet_the_restricted_standard() -> None:
    spec = pod(workload(template(container(), container("logs"), initContainers=[container("init")])))["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    for item in (*spec["containers"], *spec["initContainers"]):
        assert item["securityContext"]["allowPrivilegeEscalation"] is False
        assert item["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("context", "kept"),
    [
        ({"privileged": True}, {"privileged": True, "capabilities": {"drop": ["ALL"]}}),
        (
            {"capabilities": {"add": ["SYS_ADMIN"]}},
            {"capabilities": {"add": ["SYS_ADMIN"], "drop": ["ALL"]}},
        ),
        (
            {"capabilities": {"drop": ["KILL"]}, "allowPrivilegeEscalation": True},
            {"capabilities": {"drop": ["KILL"]}, "allowPrivilegeEscalation": True},
        ),
    ],
)
def test_the_security_settings_of_a_template_are_kept(context: dict[str, Any], kept: dict[str, Any]) -> None:
    assert worker(workload(template(container(securityContext=context))))["securityContext"] == kept


@pytest.mark.parametrize(
    "made_of",
    [
        template(securityContext={"runAsUser": 0}),
        template(container(securityContext={"runAsUser": 0})),
    ],
)
def test_a_template_that_runs_as_root_does_not_get_run_as_non_root(made_of: dict[str, Any]) -> None:
    assert "runAsNonRoot" not in pod(workload(made_of))["spec"]["securityContext"]


@pytest.mark.parametrize(
    ("volumes", "is_set"),
    [
        ([], False),
        ([{"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {"name": "c"}}], False),
        ([{"name": "a", "persistentVolumeClaim": {"claimName": "data"}}], True),
        ([{"name": "a", "ephemeral": {}}], True),
    ],
)
def test_pods_have_a_group_only_where_a_volume_belongs_to_root(volumes: list[Any], is_set: bool) -> None:
    made = workload(template(volumes=volumes), checkpoint=CheckpointSettings(url="s3://bucket/prefix"))
    assert ("fsGroup" in pod(made)["spec"]["securityContext"]) == is_set


def test_pods_have_no_group_where_the_operator_must_not_set_it() -> None:
    made = workload()
    made = replace(made, settings=replace(made.settings, fs_group=False))
    assert "fsGroup" not in pod(made)["spec"]["securityContext"]
    built = indexed_job_manifest(workload(), 1, suspend=False, single_node=False, fs_group=False)
    assert "fsGroup" not in built["spec"]["template"]["spec"]["securityContext"]


def test_an_fs_group_of_the_template_keeps_its_change_policy() -> None:
    context = pod(workload(template(securityContext={"fsGroup": 7})))["spec"]["securityContext"]
    assert context["fsGroup"] == 7
    assert "fsGroupChangePolicy" not in context


@pytest.mark.parametrize(
    ("field", "value", "ours", "word"),
    [
        ("restartPolicy", "Always", "Never", "restartPolicy Always"),
        ("automountServiceAccountToken", True, False, "automountServiceAccountToken"),
    ],
)
def test_fields_that_the_operator_sets_are_replaced_with_a_warning(
    field: str, value: Any, ours: Any, word: str
) -> None:
    made = workload(template(**{field: value}))
    assert pod(made)["spec"][field] == ours
    assert [word in item for item in template_warnings(made)] == [True]
    quiet = workload(template(**{field: ours}))
    assert pod(quiet)["spec"][field] == ours
    assert template_warnings(quiet) == ()


@pytest.mark.parametrize(
    ("theirs", "added"),
    [
        ([], ["not-ready", "unreachable"]),
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], ["not-ready", "unreachable"]),
        (
            [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 60,
              "effect": "NoExecute"}],
            ["unreachable"],
        ),
        (
            [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoSchedule"}],
            ["not-ready", "unreachable"],
        ),
        ([{"operator": "Exists"}], []),
    ],
)  # fmt: skip
def test_pods_leave_a_lost_node_soon_unless_the_template_tolerates_it(
    theirs: list[dict[str, Any]], added: list[str]
) -> None:
    tolerations = pod(workload(template(tolerations=theirs)))["spec"]["tolerations"]
    assert tolerations[: len(theirs)] == theirs
    assert tolerations[len(theirs) :] == [
        {
            "key": f"node.kubernetes.io/{item}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 5,
        }
        for item in added
    ]


def test_replicas_share_a_node_if_only_one_node_can_mount_the_claim() -> None:
    term = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "zone"}
    theirs = {
        "nodeAffinity": {"x": 1},
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
    }
    made = workload(template(affinity=theirs))
    assert pod(made)["spec"]["affinity"] == theirs
    assert pod(made, single_node=True)["spec"]["affinity"] == {
        "nodeAffinity": {"x": 1},
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                term,
                {
                    "labelSelector": {"matchLabels": {names.LABEL_JOB: "digits"}},
                    "topologyKey": "kubernetes.io/hostname",
                },
            ]
        },
    }


@pytest.mark.parametrize("theirs", [{}, {"affinity": None}, {"affinity": {"nodeAffinity": {"x": 1}}}])
def test_replicas_prefer_the_nodes_of_the_other_replicas(theirs: dict[str, Any]) -> None:
    affinity = pod(workload(template(**theirs)))["spec"]["affinity"]
    assert affinity.get("nodeAffinity") == ((theirs.get("affinity") or {}).get("nodeAffinity"))
    selector = {"matchLabels": {names.LABEL_JOB: "digits"}}
    assert affinity["podAffinity"] == {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": topology}}
            for topology, weight in (
                ("kubernetes.io/hostname", 100),
                ("nvidia.com/gpu.product", 50),
                ("topology.kubernetes.io/zone", 10),
            )
        ]
    }


@pytest.mark.parametrize(
    "theirs",
    [
        {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}},
        {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{}]}}},
        {"topologySpreadConstraints": [{"maxSkew": 1}]},
    ],
)
def test_a_template_that_places_its_pods_is_left_as_it_is(theirs: dict[str, Any]) -> None:
    spec = pod(workload(template(**theirs)))["spec"]
    assert {key: spec[key] for key in theirs} == theirs
    assert spec.get("affinity") == theirs.get("affinity")


def test_labels_and_annotations_of_the_template_are_kept() -> None:
    metadata = {"labels": {"team": "a", "app.kubernetes.io/name": "mine"}, "annotations": {"b": "c"}}
    made = pod(workload(template(metadata=metadata)))["metadata"]
    digest = made["annotations"].pop(names.ANNOTATION_TEMPLATE)
    assert len(digest) == 32
    assert made["annotations"] == {
        "b": "c",
        "adascale.dev/worker-container": "worker",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "true",
        "kubectl.kubernetes.io/default-container": "worker",
    }
    assert made["labels"] == {
        "team": "a",
        "app.kubernetes.io/name": "mine",
        "app.kubernetes.io/instance": "digits",
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/managed-by": "adascale-operator",
        names.LABEL_JOB: "digits",
        names.LABEL_JOB_UID: workload().uid,
    }


def test_pods_say_which_job_template_and_accelerator_they_are_of() -> None:
    made = indexed_job_manifest(workload(), 2, suspend=False, single_node=False, accelerator="h200")
    metadata = made["spec"]["template"]["metadata"]
    for name in (names.ANNOTATION_TEMPLATE, names.ANNOTATION_ACCELERATOR):
        assert metadata["annotations"][name] == made["metadata"]["annotations"][name]
    assert metadata["labels"][names.LABEL_JOB_UID] == workload().uid
    assert "selector" not in made["spec"]


def test_a_job_that_takes_over_pods_selects_those_of_its_adascalejob() -> None:
    spec = indexed_job_manifest(workload(), 2, suspend=False, single_node=False, adopts=True)["spec"]
    assert spec["manualSelector"] is True
    selected = spec["selector"]["matchLabels"]
    assert selected == {names.LABEL_JOB_UID: workload().uid}
    labels = spec["template"]["metadata"]["labels"]
    assert selected.items() <= labels.items()
    assert labels["job-name"] == labels["batch.kubernetes.io/job-name"] == "digits"


def test_the_job_label_is_replaced_with_a_warning() -> None:
    made = workload(template(metadata={"labels": {names.LABEL_JOB: "other"}}))
    assert pod(made)["metadata"]["labels"][names.LABEL_JOB] == "digits"
    assert len(template_warnings(made)) == 1


# -- the digest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of_job",
    [
        {"spec": replace(SPEC, max_batch_size=512)},
        {"spec": replace(SPEC, local_bsz_bounds=(4, 32))},
        {"spec": replace(SPEC, batch_size=8)},
        {"spec": replace(SPEC, max_replicas=8, efficiency_target=0.7, scale_invariant_steps=5)},
        {"suspend": True, "backoff_limit": 9, "active_deadline_seconds": 5, "ttl_seconds_after_finished": 5},
        {"checkpoint": CheckpointSettings(storage="9Gi")},
    ],
)
def test_changes_without_new_pods_keep_the_digest(of_job: dict[str, Any]) -> None:
    assert template_digest(workload(**of_job), single_node=False) == template_digest(
        workload(), single_node=False
    )


@pytest.mark.parametrize(
    "made",
    [
        workload(template(container(image="trainer:2", command=["python", "train.py"]))),
        workload(checkpoint=CheckpointSettings(claim_name="shared")),
        workload(checkpoint=CheckpointSettings(path="/data")),
        workload(checkpoint=CheckpointSettings(interval_seconds=5.0)),
        workload(step_timeout_seconds=60),
        replace(workload(), settings=PodSettings("http://elsewhere")),
    ],
)
def test_changes_that_need_new_pods_change_the_digest(made: Workload) -> None:
    assert template_digest(made, single_node=False) != template_digest(workload(), single_node=False)


def test_sharing_a_node_changes_the_digest() -> None:
    assert template_digest(workload(), single_node=True) != template_digest(workload(), single_node=False)


def test_the_digest_is_the_same_as_in_earlier_versions() -> None:
    """Jobs of an operator before an upgrade carry it; another value here would restart them all."""
    assert template_digest(workload(), single_node=False) == "9e9aa2eeed5f97d5796c8bdbfc5767c2"


def test_with_tls_pods_get_the_authority_of_the_metrics_service_beside_their_token() -> None:
    plain = workload()
    url = "https://adascale-api.adascale-system:8265"
    secure = replace(plain, settings=PodSettings(url, has_authority=True))
    assert env(secure)[names.ENV_API_URL] == url
    assert env(secure)[names.ENV_CA_FILE] == f"{TOKEN_FOLDER}/ca.crt"
    token, authority = mounts(secure)[TOKEN_FOLDER]["projected"]["sources"]
    assert [token] == mounts(plain)[TOKEN_FOLDER]["projected"]["sources"]
    assert authority == {"configMap": {"name": "adascale-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    assert names.ENV_CA_FILE not in env(plain)


# -- properties of any template -----------------------------------------------------------------------------

words = st.text("abcxyz", min_size=1, max_size=3)
scalars = st.one_of(words, st.integers(0, 99), st.booleans(), st.none())


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects in which each field is there, null, or absent."""
    return st.fixed_dictionaries({}, optional={key: st.none() | value for key, value in fields.items()})


labels = st.dictionaries(
    st.one_of(words, st.sampled_from([names.LABEL_JOB, "app.kubernetes.io/name"])), words
)
places = st.sampled_from(["/dev/shm", "/dev/shm/", "/tmp", "/data", TOKEN_FOLDER, CHECKPOINT_FOLDER])
security = maybe(
    runAsUser=st.integers(0, 2),
    runAsNonRoot=st.booleans(),
    readOnlyRootFilesystem=st.booleans(),
    privileged=st.booleans(),
    allowPrivilegeEscalation=st.booleans(),
    capabilities=maybe(
        add=st.lists(st.sampled_from(["SYS_ADMIN", "NET_RAW"])), drop=st.lists(st.just("ALL"))
    ),
    fsGroup=st.integers(0, 9),
    seccompProfile=st.just({"type": "Localhost"}),
)
containers = st.builds(
    lambda name, fields: {"name": name, "image": "i"} | fields,
    st.sampled_from(["worker", "logs", "main"]),
    maybe(
        command=st.lists(st.sampled_from(["python", "adascale-agent", "--"]), max_size=3),
        args=st.lists(words, max_size=2),
        env=st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["A", "HOME", names.ENV_REPLICA, names.ENV_BATCH_SIZE])},
                optional={"value": words},
            ),
            unique_by=lambda item: item["name"],
        ),
        envFrom=st.just([{"secretRef": {"name": "s"}}]),
        volumeMounts=st.lists(
            st.fixed_dictionaries({"name": st.just("v"), "mountPath": places}),
            unique_by=str,
        ),
        securityContext=security,
        resources=st.just({"limits": {"cpu": "1"}}),
        terminationMessagePolicy=st.just("File"),
        ports=scalars,
    ),
)
templates = st.builds(
    lambda metadata, spec, mains: {"metadata": metadata, "spec": spec | {"containers": mains}},
    st.none() | maybe(labels=labels, annotations=st.dictionaries(words, words)),
    maybe(
        initContainers=st.lists(containers, max_size=2),
        volumes=st.just([{"name": "v", "emptyDir": {}}]),
        tolerations=st.lists(
            maybe(
                key=st.sampled_from(["gpu", "node.kubernetes.io/not-ready"]),
                effect=st.sampled_from(["NoSchedule", "NoExecute"]),
            ),
            max_size=3,
        ),
        affinity=maybe(podAffinity=maybe(requiredDuringSchedulingIgnoredDuringExecution=st.just([{"a": 1}]))),
        restartPolicy=st.sampled_from(["Never", "Always"]),
        automountServiceAccountToken=st.booleans(),
        enableServiceLinks=st.booleans(),
        terminationGracePeriodSeconds=st.integers(0, 99),
        securityContext=security,
        hostname=words,
        nodeSelector=st.dictionaries(words, words),
    ),
    st.lists(containers, min_size=1, max_size=3),
)

OURS = ("restartPolicy", "automountServiceAccountToken")
"""What is never the template's."""


def kept(theirs: Any, made: Any, place: str = "") -> None:
    """That `made` has all that is in `theirs`: members of objects, items of lists in order."""
    if theirs is None:
        return
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            kept(value, made.get(key), f"{place}.{key}")
    elif isinstance(theirs, list):
        assert len(made) >= len(theirs), place
        rest = iter(made)
        for item in theirs:
            assert any(holds(item, item) for item in rest), (place, item, made)
    else:
        assert made == theirs, place


def holds(theirs: Any, made: Any) -> bool:
    try:
        kept(theirs, made)
    except (AssertionError, KeyError, TypeError):
        return False
    return True


def without_ours(made_of: dict[str, Any], warned: str) -> dict[str, Any]:
    """The template less what may be replaced, each of which must have been warned of."""
    rest = copy.deepcopy(made_of)
    for field in OURS:
        rest["spec"].pop(field, None)
    job_label = ((rest.get("metadata") or {}).get("labels") or {}).pop(names.LABEL_JOB, "digits")
    assert job_label == "digits" or names.LABEL_JOB in warned
    mains = rest["spec"]["containers"]
    main = next((item for item in mains if item["name"] == "worker"), mains[0])
    command, args = main.pop("command", None), main.pop("args", None)
    started = main | {"command": ["adascale-agent", "--", *command, *(args or [])]} if command else main
    if command and command[0] == "adascale-agent":
        started = main | {"command": command, "args": args}
    main.update(started)
    for variable in list(main.get("env") or []):
        if variable["name"] in (names.ENV_REPLICA, names.ENV_BATCH_SIZE):
            assert variable["name"] in warned
            main["env"].remove(variable)
    for mount in list(main.get("volumeMounts") or []):
        if mount["mountPath"] in (TOKEN_FOLDER, CHECKPOINT_FOLDER):
            assert mount["mountPath"] in warned
            main["volumeMounts"].remove(mount)
    return rest


@given(templates, st.booleans())
def test_everything_that_a_template_sets_is_kept(made_of: dict[str, Any], single_node: bool) -> None:
    before = copy.deepcopy(made_of)
    made = workload(made_of)
    manifest = indexed_job_manifest(made, 2, suspend=False, single_node=single_node)
    assert made_of == before
    assert json.loads(json.dumps(manifest)) == manifest
    kept(without_ours(made_of, "\n".join(template_warnings(made))), manifest["spec"]["template"])


@given(templates, st.booleans())
def test_every_template_gets_the_operators_fields(made_of: dict[str, Any], single_node: bool) -> None:
    made = pod(workload(made_of), single_node)
    spec = made["spec"]
    assert made["metadata"]["labels"][names.LABEL_JOB] == "digits"
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    volumes = [item["name"] for item in spec["volumes"]]
    assert len(set(volumes)) == len(volumes)
    found = worker(workload(made_of))
    places = [item["mountPath"].rstrip("/") for item in found["volumeMounts"]]
    assert {TOKEN_FOLDER, CHECKPOINT_FOLDER, "/dev/shm"} <= set(places)
    variables = [item["name"] for item in found["env"]]
    assert len(set(variables)) == len(variables)


NODE = {
    "metadata": {"name": "node1", "labels": {"a": "1"}},
    "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}
junk = st.one_of(
    st.integers(), words, st.just([1]), st.just([["a"]]), st.just([{}]), st.just({"a": 1}), st.just({})
)
open_places = [
    ("securityContext",), ("tolerations",), ("affinity",), ("affinity", "podAffinity"), ("volumes",),
    ("initContainers",), ("terminationGracePeriodSeconds",), ("restartPolicy",), ("nodeSelector",),
    ("resources",), ("overhead",), ("affinity", "nodeAffinity"), ("nodeName",),
    ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
    ("affinity", "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
    ("securityContext", "runAsUser"), ("securityContext", "capabilities"),
]  # fmt: skip
of_containers = [
    ("securityContext",), ("securityContext", "capabilities"), ("securityContext", "capabilities", "add"),
    ("volumeMounts",), ("resources",), ("resources", "requests"), ("envFrom",), ("terminationMessagePath",),
]  # fmt: skip


def put(section: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    for key in place[:-1]:
        if not isinstance(section.get(key), dict):
            section[key] = {}
        section = section[key]
    section[place[-1]] = copy.deepcopy(value)


@given(
    st.lists(st.tuples(st.sampled_from(open_places), junk), max_size=3),
    st.lists(st.tuples(st.sampled_from(of_containers), junk), max_size=3),
)
def test_an_invalid_pod_template_is_left_for_the_api_server_to_reject(
    of_pod: list[tuple[tuple[str, ...], Any]], of_worker: list[tuple[tuple[str, ...], Any]]
) -> None:
    """The schema leaves most of a PodSpec open, and no mistake in it may stop the operator."""
    made_of = template(container(command=["python"]))
    for place, value in of_pod:
        put(made_of["spec"], place, value)
    for place, value in of_worker:
        put(made_of["spec"]["containers"][0], place, value)
    before = copy.deepcopy(made_of)
    manifest = indexed_job_manifest(workload(made_of), 2, suspend=False, single_node=True)
    assert made_of == before
    json.dumps(manifest)
    pod_request(made_of["spec"])
    eligible_nodes(made_of["spec"], [NODE])


# -- the network of the node -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, "Default"),
        ({}, None),
    ],
)
def test_pods_in_the_network_of_their_node_find_services(spec: dict[str, Any], policy: str | None) -> None:
    assert pod(workload(template(**spec)))["spec"].get("dnsPolicy") == policy


def test_the_indexed_job_of_a_queued_job_has_the_labels_and_annotations_of_kueue() -> None:
    queueing = Queueing.read(
        {
            "labels": {QUEUE_NAME: "gpus", "kueue.x-k8s.io/priority-class": "low", "team": "vision"},
            "annotations": {ELASTIC_JOB: "true", "note": "mine"},
        }
    )
    manifest = indexed_job_manifest(
        replace(workload(), queueing=queueing), 2, suspend=True, single_node=False
    )
    meta = manifest["metadata"]
    assert meta["labels"].items() >= {QUEUE_NAME: "gpus", "kueue.x-k8s.io/priority-class": "low"}.items()
    assert (
        meta["annotations"].items() >= {ELASTIC_JOB: "true", names.ANNOTATION_QUEUE: "gpus,elastic"}.items()
    )
    assert not {"team", "note"} & (meta["labels"].keys() | meta["annotations"].keys())
    plain = indexed_job_manifest(workload(), 2, suspend=False, single_node=False)["metadata"]
    assert plain["annotations"].keys() == {names.ANNOTATION_TEMPLATE}


@pytest.mark.parametrize("suspend", [True, False, None])
def test_a_resize_leaves_suspension_as_it_is_unless_it_is_meant(suspend: bool | None) -> None:
    patch = resize_patch(2, suspend=suspend)
    assert patch["spec"].get("suspend") is suspend
    mark = {True: "true", False: None}
    annotations = patch.get("metadata", {}).get("annotations", {})
    assert annotations == ({} if suspend is None else {names.ANNOTATION_SUSPENDED: mark[suspend]})
