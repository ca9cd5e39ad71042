"""Job files: the jobs that valid files specify, and the errors in invalid ones."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_controller.jobfile import JobFileError, load_job, parse_job
from adascale_controller.schema import Checkpoint
from adascale_core.messages.job_spec import JobSpec
from support.observed_jobs import checkpoint_settings

VALID: dict[str, Any] = {
    "apiVersion": "adascale.dev/v1alpha1",
    "kind": "AdaScaleJob",
    "metadata": {"name": "digits"},
    "spec": {
        "batchSize": 32,
        "maxReplicas": 8,
        "template": {"spec": {"containers": [{"name": "worker", "command": ["python", "train.py"]}]}},
    },
}


def job(*, without: str = "", **changes: Any) -> str:
    """The valid job as YAML, with changes to its spec."""
    document = copy.deepcopy(VALID)
    document["spec"].update(changes)
    document["spec"].pop(without, None)
    return yaml.safe_dump(document, sort_keys=False)


def container(**fields: Any) -> str:
    """The valid job as YAML, with changes to its container."""
    return job(template={"spec": {"containers": [{"name": "worker", "command": ["python"], **fields}]}})


def errors_in(text: str) -> list[str]:
    """The errors in a text, without their lines."""
    with pytest.raises(JobFileError) as raised:
        parse_job(text, "job.yaml")
    assert raised.value.exit_code == 2
    return [str(error) for error in raised.value.errors]


def test_unset_fields_have_defaults() -> None:
    parsed = parse_job(job())
    assert parsed.id == "default.digits"
    assert parsed.short_id == "digits"
    assert parsed.declaration == JobSpec(batch_size=32, min_replicas=1, max_replicas=8)
    assert parsed.worker.command == ["python", "train.py"]
    assert (parsed.spec.suspend, parsed.spec.backoff_limit) == (False, 3)
    assert parsed.spec.active_deadline_seconds is None
    assert parsed.spec.replica_limit is None
    assert parsed.spec.checkpoint == checkpoint_settings(
        claim_name=None,
        path=None,
        storage=None,
        storage_class_name=None,
        access_mode=None,
        interval_seconds=30.0,
    )


def test_spares_are_refused_where_kueue_admits_the_job() -> None:
    document = copy.deepcopy(VALID)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "a"}
    assert parse_job(yaml.safe_dump(document)).spec.spare_replicas == 0
    document["spec"]["spareReplicas"] = 1
    with pytest.raises(JobFileError) as raised:
        parse_job(yaml.safe_dump(document))
    assert "spec.spareReplicas: must be 0 with the label kueue.x-k8s.io/queue-name" in str(raised.value)


def test_a_job_may_end_by_samples() -> None:
    parsed = parse_job(job(trainSamples=96_001), "job.yaml")
    assert (parsed.spec.scale_invariant_steps, parsed.spec.train_samples, parsed.declaration.steps) == (
        None,
        96_001,
        3001,
    )


def test_every_field_is_read() -> None:
    document = copy.deepcopy(VALID)
    document["metadata"] = {"name": "digits", "namespace": "team", "labels": {"a": "b"}}
    document["status"] = {"replicas": 2}
    document["spec"].update(
        maxBatchSize=512,
        localBszBounds={"lower": 16, "upper": 128},
        minReplicas=2,
        replicaLimit=4,
        scaleInvariantSteps=20000,
        efficiencyTarget=1,
        elasticSingleReplica=True,
        processesPerReplica=2,
        suspend=True,
        backoffLimit=0,
        activeDeadlineSeconds=60,
        completionDeadlineSeconds=3600,
        stepTimeoutSeconds=90,
        ttlSecondsAfterFinished=0,
        checkpoint={"claimName": "state", "intervalSeconds": 5},
        template={
            "metadata": {"annotations": {"x": "y"}},
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {"name": "sidecar", "command": ["sleep"]},
                    {
                        "name": "worker",
                        "image": "ours",
                        "command": ["python", "train.py"],
                        "args": ["--lr", "0.1"],
                        "workingDir": "/app",
                        "env": [{"name": "A", "value": "1"}, {"name": "B"}],
                        "resources": {"limits": {"nvidia.com/gpu": 1}},
                    },
                ],
            },
        },
    )
    parsed = parse_job(yaml.safe_dump(document))
    assert parsed.id == "team.digits"
    assert parsed.declaration == JobSpec(
        32, 512, (16, 128), 2, 8, 20000, 1.0, elastic_single_replica=True, processes_per_replica=2
    )
    assert parsed.environment["ADASCALE_PROCESSES_PER_REPLICA"] == "2"
    assert (parsed.worker.name, parsed.gpus) == ("worker", 1)
    assert (parsed.spec.suspend, parsed.spec.backoff_limit, parsed.spec.active_deadline_seconds) == (
        True,
        0,
        60,
    )
    assert parsed.spec.completion_deadline_seconds == 3600
    assert parsed.spec.step_timeout_seconds == 90
    assert parsed.environment["ADASCALE_STEP_TIMEOUT"] == "90"
    assert parsed.spec.ttl_seconds_after_finished == 0
    assert parsed.spec.checkpoint == checkpoint_settings(claim_name="state", interval_seconds=5.0)
    assert parsed.spec.replica_limit == 4


@pytest.mark.parametrize("upper", [{"upper": "auto"}, {"upper": None}, {}])
def test_the_upper_bound_of_the_local_batch_is_found_in_training_unless_set(upper: dict[str, Any]) -> None:
    parsed = parse_job(job(maxBatchSize=512, localBszBounds={"lower": 16, **upper}))
    assert parsed.declaration.local_bsz_bounds == (16, "auto")
    assert parsed.environment["ADASCALE_LOCAL_BSZ_BOUNDS"] == "16,auto"


@pytest.mark.parametrize(
    ("checkpoint", "parsed"),
    [
        ({"path": "/state"}, checkpoint_settings(path="/state")),
        (
            {"url": "s3://bucket/prefix", "credentialsSecret": "s3"},
            checkpoint_settings(url="s3://bucket/prefix", credentials_secret="s3"),
        ),
        ({"storage": "10Gi"}, checkpoint_settings(storage="10Gi")),
        ({"storage": 10**9}, checkpoint_settings(storage=10**9)),
        ({"storageClassName": "", "storage": None}, checkpoint_settings(storage_class_name="")),
        (
            {"storageClassName": "nfs", "accessMode": "ReadWriteMany"},
            checkpoint_settings(storage_class_name="nfs", access_mode="ReadWriteMany"),
        ),
    ],
)
def test_checkpoint_settings_are_read(checkpoint: dict[str, Any], parsed: Checkpoint) -> None:
    assert parse_job(job(checkpoint=checkpoint)).spec.checkpoint == parsed


def test_a_null_field_counts_as_unset() -> None:
    assert parse_job(job(maxBatchSize=None, suspend=None, activeDeadlineSeconds=None)) == parse_job(job())
    template = {**VALID["spec"]["template"], "metadata": {"labels": {"a": None}, "annotations": None}}
    assert parse_job(job(template=template)) == parse_job(job())


TWO = [{"name": "a", "command": ["a"]}, {"name": "b", "command": ["b"]}]


def test_an_annotation_names_the_container_that_trains() -> None:
    metadata = {"annotations": {"kubectl.kubernetes.io/default-container": "b"}}
    assert parse_job(job(template={"metadata": metadata, "spec": {"containers": TWO}})).worker.command == [
        "b"
    ]


def test_of_several_containers_the_one_that_trains_is_not_guessed() -> None:
    with pytest.raises(JobFileError) as error:
        parse_job(job(template={"spec": {"containers": TWO}}))
    assert str(error.value).endswith(
        "spec.template: of the 2 containers (a, b) none is named worker: give the container that trains this "
        "name, or name it in the annotation kubectl.kubernetes.io/default-container of spec.template.metadata"
    )


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({}, "set the training program, such as [python, train.py]"),
        ({"command": []}, "set the training program, such as [python, train.py]"),
        (
            {"args": ["python", "a.py"]},
            "move args ['python', 'a.py'] to it, if they are the training program",
        ),
    ],
)
def test_a_job_file_needs_a_command(fields: dict[str, Any], fix: str) -> None:
    sidecar = {"name": "sidecar", "command": ["sleep"]}
    text = job(template={"spec": {"containers": [sidecar, {"name": "worker", **fields}]}})
    assert errors_in(text) == [
        "spec.template.spec.containers[1].command: is required, since this machine does not run the image's "
        f"entry point: {fix}"
    ]


NOT_A_JOB = [
    ("", "is empty; it must contain one YAML document"),
    ("# only a comment\n---\n", "is empty; it must contain one YAML document"),
    (job() + "---\n" + job(), "contains 2 YAML documents; it must contain one"),
    ("a: [1, 2", "is not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("a: b: c", "is not valid YAML: mapping values are not allowed here"),
    ("\tkey: 1", "is not valid YAML: found character '\\t' that cannot start any token"),
    ("a: 1\na: 2", "is not valid YAML: duplicate field 'a'"),
    ("a: !!python/object:os.system 1", "is not valid YAML: could not determine a constructor for the tag"),
    ("a: 2026-99-99", "is not valid YAML: month must be in 1..12"),
    ("a: \x07", "is not valid YAML: unacceptable character #x0007: special characters are not allowed"),
    ("[" * 1000, "is not valid YAML: it is nested too deeply"),
    ("just words", "must be an object with apiVersion, kind, metadata and spec, got the string 'just words'"),
    ("- a\n- b", "must be an object with apiVersion, kind, metadata and spec, got a list of 2"),
    (job().replace("AdaScaleJob", "Job"), "kind: must be AdaScaleJob, got the string 'Job'"),
    (
        job().replace("adascale.dev/v1alpha1", "batch/v1"),
        "apiVersion: must be adascale.dev/v1alpha1, got the string 'batch/v1'",
    ),
    (
        job().replace("apiVersion:", "apiversion:"),
        "apiVersion: is required and must be adascale.dev/v1alpha1; found 'apiversion', which is not the "
        "same",
    ),
]


@pytest.mark.parametrize(("text", "message"), NOT_A_JOB)
def test_a_document_that_is_no_job_is_an_error(text: str, message: str) -> None:
    (error,) = errors_in(text)
    assert error.startswith(message)


INVALID_FIELDS = [
    (job(max_batch_size=64), "spec.max_batch_size: unknown field; did you mean maxBatchSize?"),
    (job(batchsize=None), "spec.batchsize: unknown field; did you mean batchSize?"),
    (job(replicas=4), "spec.replicas: unknown field; did you mean minReplicas?"),
    (job(replicaLimit=-1), "spec.replicaLimit: must be at least 0, got -1"),
    (
        job(localBszBounds={"lower": 1, "uper": 2, "upper": 2}),
        "spec.localBszBounds.uper: unknown field; did you mean upper?",
    ),
    (
        job(checkpoint={"zebra": 1}),
        "spec.checkpoint.zebra: unknown field; the fields of spec.checkpoint are "
        "claimName, path, url, credentialsSecret, storage, storageClassName, accessMode, intervalSeconds",
    ),
    (job(without="batchSize"), "spec.batchSize: is required"),
    (job(batchSize=2**20 + 1), "spec.batchSize: must be at most 1048576, got 1048577"),
    (job(batchSize="32"), "spec.batchSize: must be an integer, got the string '32'"),
    (job(batchSize=32.0), "spec.batchSize: must be an integer, got 32.0"),
    (job(batchSize=True), "spec.batchSize: must be an integer, got true"),
    (job(suspend="yes"), "spec.suspend: must be true or false, got the string 'yes'"),
    (job(efficiencyTarget=0), "spec.efficiencyTarget: must be greater than 0, got 0"),
    (job(efficiencyTarget=float("nan")), "spec.efficiencyTarget: must be a finite number, got nan"),
    *(
        (
            job(maxBatchSize=64, localBszBounds={"lower": 4, "upper": upper}),
            f"spec.localBszBounds.upper: must be an integer from 1 to 1048576 or auto, got {described}",
        )
        for upper, described in (
            ("Auto", "the string 'Auto'"),
            ("64", "the string '64'"),
            (0, "0"),
        )
    ),
    (job(localBszBounds=[16, 128]), "spec.localBszBounds: must be an object, got a list of 2"),
    (
        job(spareReplicas=1, opportunistic={"priorityClassName": "low"}),
        "spec: spareReplicas and opportunistic are both set, which was not tried; set at most one of them",
    ),
    (job(opportunistic={}), "spec.opportunistic.priorityClassName: is required"),
    (job(opportunistic={"priorityClassName": "Spot"}), "spec.opportunistic.priorityClassName: must match "),
    (
        job(opportunistic={"priorityClassName": "spot", "queue": "team"}),
        "spec.opportunistic.queue: unknown field; did you mean queueName?",
    ),
    (
        job(spareReplicas=1021),
        "spec.spareReplicas: must be at most 1016 with maxReplicas 8, since replicas and spares together are "
        "at most 1024, got 1021",
    ),
    (
        job(checkpoint={"claimName": "a", "path": "/b"}),
        "spec.checkpoint: claimName and path are both set; set at most one of them",
    ),
    (
        job(checkpoint={"path": "/b", "url": "s3://bucket"}),
        "spec.checkpoint: path and url are both set; set at most one of them",
    ),
    (
        job(checkpoint={"credentialsSecret": "s3"}),
        "spec.checkpoint: credentialsSecret applies only to url: set url, or remove credentialsSecret",
    ),
    (
        job(checkpoint={"url": "s3://key:secret@bucket/prefix"}),
        "spec.checkpoint.url: must match ^[a-z]",
    ),
    (
        job(checkpoint={"url": "/bucket"}),
        "spec.checkpoint.url: must match ^[a-z]",
    ),
    (
        job(checkpoint={"path": "/b", "storage": "1Gi"}),
        "spec.checkpoint: storage applies only to a PersistentVolumeClaim that the operator creates, but "
        "path is set: remove storage or path",
    ),
    (
        job(checkpoint={"claimName": "a", "accessMode": "ReadWriteMany"}),
        "spec.checkpoint: accessMode applies only to a PersistentVolumeClaim that the operator creates, but "
        "claimName is set: remove accessMode or claimName",
    ),
    (
        job(checkpoint={"path": "b"}),
        "spec.checkpoint.path: must be an absolute path such as /state, got the string 'b'",
    ),
    (
        job(checkpoint={"claimName": "State"}),
        "spec.checkpoint.claimName: must match ^[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    ),
    (
        job(checkpoint={"claimName": "a" * 254}),
        "spec.checkpoint.claimName: must have at most 253 characters, got 254",
    ),
    *(
        (
            job(checkpoint={"storage": storage}),
            f"spec.checkpoint.storage: must be a positive quantity such as 10Gi, got {got}",
        )
        for storage, got in [
            (0, "0"),
            ("0.0Gi", "the string '0.0Gi'"),
            ("1 Gi", "the string '1 Gi'"),
            (1.5, "1.5"),
        ]
    ),
    (
        job(checkpoint={"accessMode": "ReadOnly"}),
        "spec.checkpoint.accessMode: must be ReadWriteOnce or ReadWriteMany, got the string 'ReadOnly'",
    ),
    (job(template={"spec": {"containers": []}}), "spec.template.spec.containers: must not be empty"),
    (job(template={"spec": {"containers": [{}]}}), "spec.template.spec.containers[0].name: is required"),
    (
        job(template={"spec": {"containers": [{"name": "a"}, {"name": "a"}]}}),
        "spec.template.spec.containers: container names must be unique; a is used twice",
    ),
    (
        job(template={"metadata": {"labels": {"a": 1}}, "spec": {"containers": [{"name": "a"}]}}),
        'spec.template.metadata.labels.a: must be a string, got 1: write "1"',
    ),
    (
        job(template={"metadata": {"labels": [1]}, "spec": {"containers": [{"name": "a"}]}}),
        "spec.template.metadata.labels: must be an object, got a list of 1",
    ),
    (
        job(template={"specs": {}, "spec": {"containers": [{"name": "a"}]}}),
        "spec.template.specs: unknown field; did you mean spec?",
    ),
    (
        container(enviroment=[{"name": "LR", "value": "1"}]),
        "spec.template.spec.containers[0].enviroment: unknown field; did you mean env?",
    ),
    (
        container(volumeMounts=[{"name": "data", "mountpath": "/data"}]),
        "spec.template.spec.containers[0].volumeMounts[0].mountpath: unknown field; did you mean mountPath?",
    ),
    (
        job(template={"metadata": {"lables": {}}, "spec": {"containers": [{"name": "a", "command": ["a"]}]}}),
        "spec.template.metadata.lables: unknown field; did you mean labels?",
    ),
    (
        container(securityContext={"zebra": True, "capabilities": {"add": "ALL"}, "seccompProfile": [1]}),
        "spec.template.spec.containers[0].securityContext.zebra: unknown field; the fields of "
        "spec.template.spec.containers[0].securityContext are allowPrivilegeEscalation, appArmorProfile, "
        "capabilities, privileged, procMount, readOnlyRootFilesystem, runAsGroup, runAsNonRoot, runAsUser, "
        "seLinuxOptions, seccompProfile, windowsOptions",
    ),
    (
        container(command="python train.py"),
        "spec.template.spec.containers[0].command: must be a list, got the string 'python train.py': write "
        "[python, train.py]",
    ),
    (
        container(args=["--lr", 0.1]),
        'spec.template.spec.containers[0].args[1]: must be a string, got 0.1: write "0.1"',
    ),
    (
        container(env=[{"name": "A", "value": 1}]),
        'spec.template.spec.containers[0].env[0].value: must be a string, got 1: write "1"',
    ),
    (job().replace("name: digits", "name: Digits"), "metadata.name: must consist of lower case letters"),
    (
        job().replace("name: digits", f"name: {'a' * 59}"),
        "metadata.name: must consist of lower case letters, digits and '-', start and end with a letter or "
        f"digit, and have at most 58 characters, got the string '{'a' * 37}...'",
    ),
    (
        job().replace("name: digits", "name: digits\n  namespace: a.b"),
        "metadata.namespace: job namespace 'a.b' is not valid",
    ),
    (
        job(processesPerReplica=3),
        "spec.batchSize: 32 is not a multiple of processesPerReplica 3: the processes of a replica divide "
        "its batches equally, so change one of them",
    ),
    (
        job(processesPerReplica=4, localBszBounds={"lower": 5, "upper": 7}),
        "spec.localBszBounds: 5 to 7 have no multiple of processesPerReplica 4: the processes of a replica "
        "divide its local batch equally, so widen the bounds",
    ),
    (
        job(processesPerReplica=2, minReplicas=17, maxReplicas=32),
        "spec: no replica count from 17 to 32 is valid with batchSize 32, replicas of 2 processes: widen",
    ),
    # The core's checks, with the names of the YAML.
    (
        job(maxBatchSize=16),
        "spec.maxBatchSize: 16 is less than batchSize 32: raise maxBatchSize, or lower batchSize",
    ),
    (
        job(localBszBounds={"lower": 4}),
        "spec.localBszBounds: upper is auto, which needs maxBatchSize: set maxBatchSize, or an integer as "
        "upper",
    ),
    (
        job(localBszBounds={"lower": 128, "upper": 16}),
        "spec.localBszBounds: lower 128 is greater than upper 16: lower must be at most upper",
    ),
    (
        job(minReplicas=9),
        "spec.minReplicas: 9 is greater than maxReplicas 8: lower minReplicas, or raise maxReplicas",
    ),
    (
        job(minReplicas=6, maxReplicas=7),
        "spec: no replica count from 6 to 7 is valid with batchSize 32: widen the bounds, or change "
        "minReplicas and maxReplicas",
    ),
    (
        job(minReplicas=11, maxReplicas=12, maxBatchSize=1000, localBszBounds={"lower": 100, "upper": 200}),
        "spec: no replica count from 11 to 12 is valid with batchSize 32, maxBatchSize 1000, "
        "localBszBounds 100 to 200",
    ),
]


@pytest.mark.parametrize(("text", "message"), INVALID_FIELDS)
def test_an_invalid_field_is_reported_with_its_path_and_value(text: str, message: str) -> None:
    (error,) = errors_in(text)
    assert error.startswith(message)


def test_all_errors_are_reported_with_their_lines() -> None:
    text = """\
apiVersion: adascale.dev/v1alpha1
kind: AdaScaleJob
metadata:
  name: digits
spec:
  batchSize: 32
  maxReplicas: "8"          # line 7
  bakoffLimit: 3            # line 8
  template:
    spec:
      containers:
        - name: worker
          command: [1]      # line 13
"""
    with pytest.raises(JobFileError) as raised:
        parse_job(text, "jobs/digits.yaml")
    assert str(raised.value).splitlines() == [
        "jobs/digits.yaml:7: spec.maxReplicas: must be an integer, got the string '8'",
        "jobs/digits.yaml:8: spec.bakoffLimit: unknown field; did you mean backoffLimit?",
        "jobs/digits.yaml:13: spec.template.spec.containers[0].command[0]: must be a string, got 1: "
        'write "1"',
    ]


def test_an_invalid_size_is_one_error() -> None:
    """The bounds would need it, if it were not given."""
    with pytest.raises(JobFileError) as raised:
        parse_job(job(maxBatchSize="1k", localBszBounds={"lower": 4}), "job.yaml")
    assert len(raised.value.errors) == 1


def test_a_yaml_error_is_reported_with_its_line() -> None:
    with pytest.raises(JobFileError) as raised:
        parse_job("a: 1\nb: [\nc: 2\n", "job.yaml")
    assert str(raised.value) == (
        "job.yaml:4: is not valid YAML: expected ',' or ']', but got '<stream end>', "
        "while parsing a flow sequence that begins in line 2"
    )


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"absent\.yaml: no such file"):
        load_job(tmp_path / "absent.yaml")
    with pytest.raises(JobFileError, match=r"cannot be read: Is a directory"):
        load_job(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\x89PNG\xff")
    with pytest.raises(JobFileError, match=r"is not valid UTF-8"):
        load_job(binary)


def test_the_example_job_is_valid() -> None:
    example = load_job(Path(__file__).parents[2] / "deploy" / "adascalejob.yaml")
    assert example.id == "default.digits"
    assert example.worker.command == ["python", "examples/digits.py"]


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text() | st.sampled_from(list(VALID["spec"])), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_spec_is_a_job_or_a_job_file_error(spec: Any) -> None:
    document = {**VALID, "spec": {**VALID["spec"], **spec} if isinstance(spec, dict) else spec}
    with contextlib.suppress(JobFileError):
        parse_job(yaml.safe_dump(document))
