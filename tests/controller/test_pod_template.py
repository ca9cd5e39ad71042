"""What is added to a pod template: how a replica is started, what is mounted, and what every pod has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.apply.manifests import TOKEN_FOLDER, claim_manifest
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.types.settings import CHECKPOINT_FOLDER, OperatorSettings
from adascale_controller.schema import Checkpoint
from adascale_core import names
from support.observed_jobs import checkpoint_settings
from support.pod_templates import OWNER, container, env, mounts, pod, template, worker, workload

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
        "ADASCALE_REPLICA": "0",
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
    assert env(workload(step_timeout_seconds=60)) == variables | {names.ENV_STEP_TIMEOUT: "60"}


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


def test_a_variable_of_the_protocol_is_replaced() -> None:
    made = workload(
        template(container(env=[{"name": "ADASCALE_REPLICA", "value": "7"}, {"name": "A", "value": "1"}]))
    )
    assert env(made)["ADASCALE_REPLICA"] == "0"
    assert env(made)["A"] == "1"


def test_variables_in_a_path_are_not_expanded() -> None:
    """The kubelet would expand `$(A)`; `adascale run` does not."""
    made = workload(checkpoint=checkpoint_settings(path="/data/$(A)"))
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
        (checkpoint_settings(), "digits-checkpoints", f"{CHECKPOINT_FOLDER}/team.digits", True),
        (checkpoint_settings(claim_name="shared"), "shared", f"{CHECKPOINT_FOLDER}/team.digits", False),
        (checkpoint_settings(path="/data/run"), None, "/data/run", False),
        (checkpoint_settings(url="s3://bucket/runs/"), None, "s3://bucket/runs/team.digits", False),
        (checkpoint_settings(url="s3://bucket//runs//"), None, "s3://bucket/runs/team.digits", False),
    ],
)
def test_checkpoints_are_saved_in_the_claim_or_path_of_the_spec(
    checkpoint: Checkpoint, claim: str | None, folder: str, own: bool
) -> None:
    made = workload(checkpoint=checkpoint)
    mounted = mounts(made).get(CHECKPOINT_FOLDER)
    assert (mounted and mounted["persistentVolumeClaim"]) == (claim and {"claimName": claim})
    assert env(made)[names.ENV_CHECKPOINT_DIR] == folder
    assert (claim_manifest(made) is not None) == own


def test_credentials_for_an_object_store_come_from_the_secret_before_the_users_own_variables() -> None:
    checkpoint = checkpoint_settings(url="s3://bucket", credentials_secret="s3")
    assert worker(workload(checkpoint=checkpoint))["envFrom"] == [{"secretRef": {"name": "s3"}}]
    own = {"configMapRef": {"name": "settings"}}
    made = workload(template(container(envFrom=[own])), checkpoint=checkpoint)
    assert worker(made)["envFrom"] == [{"secretRef": {"name": "s3"}}, own]
    assert "envFrom" not in worker(workload(checkpoint=checkpoint_settings(url="s3://bucket")))


def test_the_operators_claim_has_the_storage_of_the_spec() -> None:
    made = claim_manifest(workload())
    assert made is not None
    assert made["metadata"]["name"] == "digits-checkpoints"
    assert made["metadata"]["ownerReferences"] == [OWNER]
    assert made["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    }
    checkpoint = checkpoint_settings(storage="20Gi", storage_class_name="nfs", access_mode="ReadWriteMany")
    made = claim_manifest(workload(checkpoint=checkpoint))
    assert made is not None
    assert made["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "20Gi"}},
        "storageClassName": "nfs",
    }
    made = claim_manifest(workload(checkpoint=checkpoint_settings(storage=10**9)))
    assert made is not None
    assert made["spec"]["resources"] == {"requests": {"storage": "1000000000"}}


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


def test_a_mount_at_one_of_our_paths_is_removed() -> None:
    made = workload(
        template(
            container(volumeMounts=[{"name": "mine", "mountPath": f"{TOKEN_FOLDER}/"}]),
            volumes=[{"name": "mine", "emptyDir": {}}],
        )
    )
    assert "projected" in mounts(made)[TOKEN_FOLDER]
    assert f"{TOKEN_FOLDER}/" not in mounts(made)


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


def claim_volumes(made_of: AdaScaleJob, claim: str) -> list[str]:
    """Return the names of the pod's volumes of a claim."""
    return [
        volume["name"]
        for volume in pod(made_of)["spec"]["volumes"]
        if volume.get("persistentVolumeClaim", {}).get("claimName") == claim
    ]


@pytest.mark.parametrize("mount", [{}, {"subPath": "train"}, {"readOnly": True}])
def test_checkpoints_use_the_users_volume_of_the_same_claim(mount: dict[str, Any]) -> None:
    """The kubelet never mounts a second volume of one claim: the pod stays in ContainerCreating."""
    made = workload(template_with_claim(**mount), checkpoint=checkpoint_settings(claim_name="shared"))
    assert claim_volumes(made, "shared") == ["data"]
    assert {"name": "data", "mountPath": "/data", **mount} in worker(made)["volumeMounts"]
    assert {"name": "data", "mountPath": CHECKPOINT_FOLDER} in worker(made)["volumeMounts"]


def test_checkpoints_use_the_users_volume_of_the_jobs_own_claim() -> None:
    volumes = [{"name": "state", "persistentVolumeClaim": {"claimName": "digits-checkpoints"}}]
    made = workload(template(container(), volumes=volumes))
    assert claim_volumes(made, "digits-checkpoints") == ["state"]
    assert mounts(made)[CHECKPOINT_FOLDER]["name"] == "state"


def test_a_volume_of_another_claim_is_not_used_for_checkpoints() -> None:
    made = workload(template_with_claim(), checkpoint=checkpoint_settings(claim_name="other"))
    assert claim_volumes(made, "shared") == ["data"]
    assert claim_volumes(made, "other") == ["adascale-checkpoints"]


def test_a_read_only_volume_of_the_same_claim_becomes_writable_for_checkpoints_only() -> None:
    read_only = template_with_claim(volume={"readOnly": True})
    made = workload(read_only, checkpoint=checkpoint_settings(claim_name="shared"))
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


def test_the_users_own_mount_of_the_claim_at_the_checkpoint_folder_is_kept() -> None:
    made_of = template(
        container(volumeMounts=[{"name": "data", "mountPath": f"{CHECKPOINT_FOLDER}/"}]),
        volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}],
    )
    made = workload(made_of, checkpoint=checkpoint_settings(claim_name="shared"))
    assert mounts(made)[CHECKPOINT_FOLDER]["name"] == "data"


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
    made = workload(template(volumes=volumes), checkpoint=checkpoint_settings(url="s3://bucket/prefix"))
    assert ("fsGroup" in pod(made)["spec"]["securityContext"]) == is_set


def test_pods_have_no_group_where_the_operator_must_not_set_it() -> None:
    made = workload()
    made = replace(made, settings=replace(made.settings, fs_group=False))
    assert "fsGroup" not in pod(made)["spec"]["securityContext"]


def test_an_fs_group_of_the_template_keeps_its_change_policy() -> None:
    context = pod(workload(template(securityContext={"fsGroup": 7})))["spec"]["securityContext"]
    assert context["fsGroup"] == 7
    assert "fsGroupChangePolicy" not in context


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
        names.LABEL_REPLICA: "0",
        names.LABEL_ATTEMPT: "0",
    }


def test_with_tls_pods_get_the_authority_of_the_metrics_service_beside_their_token() -> None:
    plain = workload()
    url = "https://adascale-api.adascale-system:8265"
    secure = replace(plain, settings=OperatorSettings(url, tls_secret=("system", "tls")))
    assert env(secure)[names.ENV_API_URL] == url
    assert env(secure)[names.ENV_CA_FILE] == f"{TOKEN_FOLDER}/ca.crt"
    token, authority = mounts(secure)[TOKEN_FOLDER]["projected"]["sources"]
    assert [token] == mounts(plain)[TOKEN_FOLDER]["projected"]["sources"]
    assert authority == {"configMap": {"name": "adascale-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    assert names.ENV_CA_FILE not in env(plain)


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
