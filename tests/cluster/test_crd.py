"""The API server accepts exactly the jobs that `adascale validate` accepts; changes of jobs, and kubectl."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client

from adascale_controller.schema import JobDefinition
from adascale_controller.validation import validate_document
from adascale_core import names
from cluster.adascalejobs import GROUP_VERSION, TEMPLATE, VALID, Jobs, RejectedError, document, valid
from cluster.conftest import Kubectl
from support.examples import examples

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]

EXAMPLE = Path(__file__).parents[2] / "deploy" / "adascalejob.yaml"


LIMITS = [1, 2, 2**20 - 1, 2**20]
small = st.integers(1, 40)
sizes = small | st.sampled_from([0, -1, 2**20 + 1, *LIMITS, 97, 128, 1021, 1024, 1031, 1031 * 1013])
counts = st.integers(1, 12) | st.sampled_from([0, 63, 64, 1023, 1024, 1025])
near = st.sampled_from([-1, 0, 0, 1])


@st.composite
def sized(draw: st.DrawFn) -> dict[str, Any]:
    """Valid and invalid sizes and counts, many of them near the limits."""
    spec: dict[str, Any] = {"batchSize": draw(sizes)}
    lower = 1
    if draw(st.booleans()):
        lower = max(draw(sizes | st.just(spec["batchSize"])) + draw(near), 0)
        upper = draw(sizes | small.map(lambda more: lower + more - 2) | st.just("auto"))
        spec["localBszBounds"] = {"lower": lower, "upper": upper}
    fewest = draw(counts)
    if draw(st.booleans()):
        around = [spec["batchSize"], lower * max(fewest, 2), lower * 2]
        spec["maxBatchSize"] = draw(sizes | st.sampled_from(around)) + draw(near)
    if draw(st.booleans()):
        spec["minReplicas"] = fewest
    spec["maxReplicas"] = draw(counts | st.integers(0, 3).map(lambda more: fewest + more))
    if draw(st.booleans()):
        spec["processesPerReplica"] = draw(st.sampled_from([0, 1, 2, 2, 3, 4, 8, 1024, 1025]))
        if draw(st.booleans()):
            spec["batchSize"] *= spec["processesPerReplica"]
    return spec


# Without numbers such as 32.0, which kubectl converts to 32.
anything = st.sampled_from(
    [None, True, "8", "", "x", 0, 1, -1, 1.5, 2**31, 2**53, 10**30, [], [1], {}, {"a": 1}]
)
durations = st.sampled_from([None, -1, 0, 1, 2**31 - 1, 2**31])
texts = st.sampled_from(
    ["", "a", "A", "a.b", "a-", "-a", "a..b", "a/b", "/a", "/", "a" * 63, "a" * 64, "a" * 254]
)
checkpoints = st.fixed_dictionaries(
    {},
    optional={
        "claimName": texts | anything,
        "path": texts | st.sampled_from(["/" * 4096, "/" * 4097]) | anything,
        "storage": st.sampled_from(
            ["1Gi", "0Gi", "1.5G", ".5G", "1.", "-1Gi", "1e3", "1m", "9" * 32, "9" * 33, 2**63]
        )
        | anything,
        "storageClassName": texts | anything,
        "accessMode": st.sampled_from(["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]) | anything,
        "intervalSeconds": st.sampled_from([0, 1, 0.5, -1, 1e-300, 1e300]) | anything,
        "interval": anything,
    },
)
variables = st.fixed_dictionaries(
    {"name": texts | st.sampled_from(["A", "A=", "A B", "é", "\t"]) | anything},
    optional={"value": texts | anything, "valueFrom": anything},
)
containers = st.fixed_dictionaries(
    {"name": st.sampled_from(["worker", "other"]) | texts | anything, "image": st.just("x")},
    optional={
        "command": st.lists(texts | anything, max_size=2) | anything,
        "args": anything,
        "env": st.lists(variables | anything, max_size=2) | anything,
        "envFrom": anything,
        "workingDir": anything,
        "ports": st.just([{"containerPort": 1}]),
    },
)
templates = st.fixed_dictionaries(
    {"spec": st.fixed_dictionaries({"containers": st.lists(containers, max_size=3)}) | anything},
    optional={
        "metadata": st.fixed_dictionaries(
            {}, optional={"labels": anything, "annotations": anything, "name": texts}
        )
        | anything,
        "status": anything,
    },
)
fields: dict[str, st.SearchStrategy[Any]] = {
    "batchSize": anything,
    "maxBatchSize": anything,
    "localBszBounds": anything | st.dictionaries(st.sampled_from(["lower", "upper", "most"]), anything),
    "minReplicas": anything,
    "maxReplicas": anything,
    "replicaLimit": st.sampled_from([0, 1, 1024, 1025]) | anything,
    "scaleInvariantSteps": st.sampled_from([1, 2**53 - 1]) | anything,
    "elasticSingleReplica": anything,
    "processesPerReplica": st.sampled_from([0, 1, 1024, 1025]) | anything,
    "efficiencyTarget": st.sampled_from([0, 1e-9, 0.5, 1, 1.0001]) | anything,
    "suspend": anything,
    "backoffLimit": durations | anything,
    "activeDeadlineSeconds": durations | anything,
    "completionDeadlineSeconds": durations | anything,
    "ttlSecondsAfterFinished": durations | anything,
    "checkpoint": checkpoints | anything,
    "template": templates | anything,
    "batchsize": anything,
}


@st.composite
def shaped(draw: st.DrawFn) -> dict[str, Any]:
    """A valid spec in which at most two fields have any value."""
    spec = valid()
    for field in draw(st.lists(st.sampled_from(list(fields)), max_size=2)):
        spec[field] = draw(fields[field])
    if draw(st.integers(0, 9)) == 9:
        spec.pop(draw(st.sampled_from(list(VALID))), None)
    return spec


def agree(jobs: Jobs, sent: dict[str, Any]) -> bool:
    """Whether the API server and `validate_document` both accept a job, as the same job."""
    validated = validate_document(sent)
    stored, rejected = None, None
    try:
        stored = jobs.create(sent)
    except RejectedError as error:
        rejected = error
    if stored is None:
        assert rejected is not None
        assert rejected.reason in ("Invalid", "BadRequest"), rejected.message
        assert isinstance(validated, list), f"only the API server rejects it: {rejected.message}"
        return False
    assert not isinstance(validated, list), f"only validate_document rejects it: {validated}"
    again = validate_document({**sent, "spec": stored["spec"]})
    assert not isinstance(again, list), f"validate_document rejects what the API server stores: {again}"
    assert _read(again) == _read(validated)
    return True


def _read(job: JobDefinition) -> tuple[object, ...]:
    fields = {"command", "args", "env", "env_from", "working_dir"}
    return job.spec.model_dump(exclude={"template"}), job.worker.model_dump(include=fields), job.gpus


many = settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@many
@given(sized())
def test_sizes_and_counts_are_validated_as_in_the_core(dry_run_jobs: Jobs, spec: dict[str, Any]) -> None:
    agree(dry_run_jobs, document({**spec, "template": TEMPLATE}))


@many
@given(shaped())
def test_fields_are_validated_as_in_a_job_file(dry_run_jobs: Jobs, spec: dict[str, Any]) -> None:
    agree(dry_run_jobs, document(spec))


@pytest.mark.parametrize(
    "name",
    ["a", "a-b", "0", "a" * 58, "a" * 59, "a" * 253, "a" * 254, "a.b", "A", "a_b", "-a", "a-", "ä", ""],
)
def test_names_are_validated_as_in_a_job_file(dry_run_jobs: Jobs, name: str) -> None:
    assert agree(dry_run_jobs, document(valid(), name)) == (name in ("a", "a-b", "0", "a" * 58))


EDGES = [
    # One replica processes the batch in equal micro-batches, within the bounds.
    (True, {"batchSize": 2**20, "maxReplicas": 1, "localBszBounds": {"lower": 1024, "upper": 1024}}),
    (True, {"batchSize": 2**20, "maxReplicas": 1, "localBszBounds": {"lower": 1, "upper": 1}}),
    (True, {"batchSize": 2**20 - 3, "maxReplicas": 1, "localBszBounds": {"lower": 1, "upper": 2**20 - 4}}),
    (False, {"batchSize": 2**20 - 3, "maxReplicas": 1, "localBszBounds": {"lower": 2, "upper": 2**20 - 4}}),
    (True, {"batchSize": 1021 * 1019, "maxReplicas": 1, "localBszBounds": {"lower": 1020, "upper": 1021}}),
    (False, {"batchSize": 1021 * 1019, "maxReplicas": 1, "localBszBounds": {"lower": 1020, "upper": 1020}}),
    (True, {"batchSize": 2**20, "maxReplicas": 1, "localBszBounds": {"lower": 1025, "upper": 2048}}),
    (False, {"batchSize": 2**20, "maxReplicas": 1, "localBszBounds": {"lower": 1025, "upper": 2047}}),
    # Two and more replicas divide at most maxBatchSize.
    (True, {"batchSize": 7, "maxBatchSize": 16, "maxReplicas": 4,
            "localBszBounds": {"lower": 8, "upper": 8}}),
    (False, {"batchSize": 7, "maxBatchSize": 15, "maxReplicas": 4,
             "localBszBounds": {"lower": 8, "upper": 8}}),
    (True, {"batchSize": 7, "maxBatchSize": 2**20, "minReplicas": 1024, "maxReplicas": 1024,
            "localBszBounds": {"lower": 1024, "upper": 1024}}),
    (False, {"batchSize": 7, "maxBatchSize": 2**20 - 1, "minReplicas": 1024, "maxReplicas": 1024,
             "localBszBounds": {"lower": 1024, "upper": 1024}}),
    (True, {"batchSize": 7, "minReplicas": 2, "maxReplicas": 2, "localBszBounds": {"lower": 9, "upper": 9}}),
    (True, {"batchSize": 7, "maxBatchSize": 7, "maxReplicas": 1}),
    # Without bounds the replicas divide batchSize.
    (True, {"batchSize": 1021, "minReplicas": 2, "maxReplicas": 1021}),
    (False, {"batchSize": 1021, "minReplicas": 2, "maxReplicas": 1020}),
    (True, {"batchSize": 2**20, "minReplicas": 1024, "maxReplicas": 1024}),
    (False, {"batchSize": 2**20, "minReplicas": 1023, "maxReplicas": 1023}),
    # The processes of a replica divide its batches.
    (True, {"batchSize": 2042, "minReplicas": 2, "maxReplicas": 1021, "processesPerReplica": 2}),
    (False, {"batchSize": 2042, "minReplicas": 2, "maxReplicas": 1020, "processesPerReplica": 2}),
    (True, {"batchSize": 2042, "maxReplicas": 1, "processesPerReplica": 2,
            "localBszBounds": {"lower": 3, "upper": 2042}}),
    (False, {"batchSize": 2042, "maxReplicas": 1, "processesPerReplica": 2,
             "localBszBounds": {"lower": 3, "upper": 2041}}),
    (True, {"batchSize": 8, "maxBatchSize": 16, "minReplicas": 4, "maxReplicas": 4, "processesPerReplica": 4,
            "localBszBounds": {"lower": 3, "upper": 4}}),
    (False, {"batchSize": 8, "maxBatchSize": 16, "minReplicas": 4, "maxReplicas": 4, "processesPerReplica": 4,
             "localBszBounds": {"lower": 5, "upper": 8}}),
]  # fmt: skip


@pytest.mark.parametrize(("accepted", "sizes"), EDGES)
def test_limits_of_sizes_and_counts(dry_run_jobs: Jobs, accepted: bool, sizes: dict[str, Any]) -> None:
    assert agree(dry_run_jobs, document({**sizes, "template": TEMPLATE})) == accepted


def test_the_example_job_is_accepted(dry_run_jobs: Jobs) -> None:
    assert agree(dry_run_jobs, yaml.safe_load(EXAMPLE.read_text()))


def test_an_image_is_only_needed_on_a_cluster(dry_run_jobs: Jobs) -> None:
    spec = valid(template={"spec": {"containers": [{"name": "worker", "command": ["python"]}]}})
    assert not isinstance(validate_document(document(spec)), list)
    with pytest.raises(RejectedError, match=r"spec\.template\.spec\.containers\[0]\.image: Required value"):
        dry_run_jobs.create(document(spec))


def test_unset_fields_get_their_defaults(dry_run_jobs: Jobs) -> None:
    stored = dry_run_jobs.create(document(valid(suspend=None, maxBatchSize=None)))["spec"]
    assert stored == valid(
        minReplicas=1,
        elasticSingleReplica=False,
        suspend=False,
        backoffLimit=names.DEFAULT_BACKOFF_LIMIT,
        spareReplicas=0,
        maxRestartsWithoutProgress=names.DEFAULT_MAX_RESTARTS_WITHOUT_PROGRESS,
        checkpoint={"intervalSeconds": names.DEFAULT_CHECKPOINT_INTERVAL},
    )


def test_unlisted_fields_of_the_pod_template_are_kept(dry_run_jobs: Jobs) -> None:
    template = copy.deepcopy(TEMPLATE)
    template["metadata"] = {"labels": {"team": "a"}, "finalizers": ["a/b"]}
    template["spec"] |= {"nodeSelector": {"disk": "fast"}, "volumes": [{"name": "data", "emptyDir": {}}]}
    template["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    assert dry_run_jobs.create(document(valid(template=template)))["spec"]["template"] == template


# -- messages: those of a job file -------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"maxBatchSize": 16}, ""),
        ({"localBszBounds": {"lower": 128, "upper": 16}}, ""),
        ({"localBszBounds": {"lower": 4}}, ""),
        ({"maxBatchSize": 64, "localBszBounds": {"lower": 4, "upper": "64"}}, ""),
        ({"maxBatchSize": 64, "localBszBounds": {"lower": 4, "upper": 2**20 + 1}}, ""),
        ({"minReplicas": 9}, ""),
        ({"minReplicas": 6, "maxReplicas": 7}, "valid are the divisors of batchSize"),
        (
            {
                "minReplicas": 11,
                "maxReplicas": 12,
                "maxBatchSize": 1000,
                "localBszBounds": {"lower": 99, "upper": 200},
            },
            "no count above 10 is valid",
        ),
        ({"maxReplicas": 1, "localBszBounds": {"lower": 33, "upper": 64}}, "valid are 2 and more"),
        ({"processesPerReplica": 3}, ""),
        ({"processesPerReplica": 4, "localBszBounds": {"lower": 5, "upper": 7}}, ""),
        (
            {"processesPerReplica": 2, "minReplicas": 17, "maxReplicas": 32},
            "valid are the divisors of batchSize / 2",
        ),
        (
            {
                "processesPerReplica": 2,
                "minReplicas": 4,
                "maxReplicas": 8,
                "maxBatchSize": 35,
                "localBszBounds": {"lower": 9, "upper": 12},
            },
            "no count above 3 is valid",
        ),
        ({"spareReplicas": 1, "opportunistic": {"priorityClassName": "low"}}, ""),
        ({"spareReplicas": 1024, "maxReplicas": 8}, ""),
        ({"checkpoint": {"claimName": "a", "path": "/b", "storage": "1Gi"}}, ""),
        ({"checkpoint": {"claimName": "a", "accessMode": "ReadWriteMany"}}, ""),
        ({"checkpoint": {"path": "/a", "storageClassName": "fast", "storage": 1}}, ""),
        ({"checkpoint": {"path": "state"}}, ""),
        ({"checkpoint": {"storage": "big"}}, ""),
        ({"checkpoint": {"storage": 0}}, ""),
    ],
)
def test_an_error_has_the_field_and_message_of_a_job_file(
    dry_run_jobs: Jobs, changes: dict[str, Any], counts: str
) -> None:
    """`test_jobfile.py` has these messages. Those about replica counts end with other valid counts."""
    sent = document(valid(**changes))
    validated = validate_document(sent)
    assert isinstance(validated, list)
    (expected,) = validated
    with pytest.raises(RejectedError) as rejected:
        dry_run_jobs.create(sent)
    ((field, reported),) = rejected.value.errors
    assert field == expected.field
    # Kubernetes puts the value, or its type, before the message.
    assert reported.startswith("Invalid value: ")
    message = f"{expected.message.partition(';')[0]}; {counts}" if counts else expected.message
    assert reported.endswith(f": {message}")


def test_all_errors_are_reported_at_once(dry_run_jobs: Jobs) -> None:
    changes = {"maxBatchSize": 16, "localBszBounds": {"lower": 9, "upper": 8}, "minReplicas": 9}
    with pytest.raises(RejectedError) as rejected:
        dry_run_jobs.create(document(valid(**changes)))
    assert {field for field, _ in rejected.value.errors} == {
        "spec.maxBatchSize", "spec.localBszBounds", "spec.minReplicas"
    }  # fmt: skip


def test_an_invalid_name_is_an_error(dry_run_jobs: Jobs) -> None:
    with pytest.raises(RejectedError) as rejected:
        dry_run_jobs.create(document(valid(), "a" * 59))
    ((field, message),) = rejected.value.errors
    assert field == "metadata.name"
    assert message.endswith(
        "must consist of lower case letters, digits and '-', start and end with a letter or digit, and "
        f"have at most 58 characters, got the string '{'a' * 59}'"
    )


# -- changes of a job -------------------------------------------------------------------------

SUSPENDED = valid(suspend=True, minReplicas=1)


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (
            {"batchSize": 64},
            "spec.batchSize",
            "field is immutable: cannot change from 32 to 64; create a new job instead",
        ),
        *(
            (
                {"checkpoint": change},
                "spec.checkpoint",
                "field is immutable: the saved state would not be found; create a new job instead",
            )
            for change in ({"path": "/a"}, {"storage": "2Gi"}, {"intervalSeconds": 5})
        ),
    ],
)
def test_batch_size_and_checkpoint_are_immutable(
    adascalejobs: Jobs, change: dict[str, Any], field: str, message: str
) -> None:
    adascalejobs.create(document(SUSPENDED), dry_run=False)
    with pytest.raises(RejectedError) as rejected:
        adascalejobs.patch("digits", {"spec": change})
    ((reported_field, reported),) = rejected.value.errors
    assert reported_field == field
    assert reported.endswith(f": {message}")


def test_all_other_fields_can_be_changed(adascalejobs: Jobs) -> None:
    adascalejobs.create(document(SUSPENDED), dry_run=False)
    changes: dict[str, Any] = {
        "maxBatchSize": 512,
        "localBszBounds": {"lower": 4, "upper": 64},
        "minReplicas": 2,
        "maxReplicas": 4,
        "replicaLimit": 3,
        "scaleInvariantSteps": 1000,
        "elasticSingleReplica": True,
        "processesPerReplica": 2,
        "efficiencyTarget": 0.7,
        "suspend": False,
        "backoffLimit": 0,
        "activeDeadlineSeconds": 60,
        "ttlSecondsAfterFinished": 0,
        "template": {"metadata": {"labels": {"a": "b"}}},
    }
    stored = adascalejobs.patch("digits", {"spec": changes})["spec"]
    assert {field: stored[field] for field in changes} == {
        **changes, "template": {**TEMPLATE, **changes["template"]}
    }  # fmt: skip
    with pytest.raises(RejectedError, match=r"spec\.minReplicas: .*: 9 is greater than maxReplicas 8"):
        adascalejobs.patch("digits", {"spec": {"minReplicas": 9}})


# -- kubectl -----------------------------------------------------------------------------------


def test_kubectl_get_shows_the_status(
    api_client: client.ApiClient, adascalejobs: Jobs, namespace: str
) -> None:
    adascalejobs.create(document(SUSPENDED), dry_run=False)
    condition = {
        "type": "Running", "status": "True", "reason": "Training", "message": "on 2 replicas",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    status = {
        "state": "Running", "replicas": 2, "desiredReplicas": 4, "batchSize": 64, "gain": 1.84,
        "efficiency": 0.92, "efficiencyText": "92%", "progressText": "45%", "restarts": 3,
        "accelerator": "NVIDIA-H100-80GB-HBM3",
        "conditions": [{**condition, "type": "Suspended", "status": "False", "reason": "No"}, condition],
    }  # fmt: skip
    answer = client.CustomObjectsApi(api_client).patch_namespaced_custom_object_status(
        *GROUP_VERSION, namespace, names.PLURAL, "digits", {"status": status},
        field_validation="Strict", dry_run="All", _content_type="application/merge-patch+json",
        _headers={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"},
    )  # fmt: skip
    table = cast(dict[str, Any], answer)
    (row,) = table["rows"]
    cells = dict(zip((column["name"] for column in table["columnDefinitions"]), row["cells"], strict=True))
    assert cells.pop("Age")
    assert list(cells.items()) == [
        ("Name", "digits"), ("State", "Running"), ("Reason", "Training"), ("Replicas", 2), ("Desired", 4),
        ("Batch", 64), ("Gain", 1.84), ("Efficiency", "92%"), ("Progress", "45%"), ("Restarts", 3),
        ("Queue", None), ("Accelerator", "NVIDIA-H100-80GB-HBM3"), ("Extra", None),
        ("Spares", None), ("Message", "on 2 replicas"),
    ]  # fmt: skip


def test_kubectl_get_all_lists_jobs(adascalejobs: Jobs, namespace: str, kubectl: Kubectl) -> None:
    adascalejobs.create(document(SUSPENDED), dry_run=False)
    assert "adascalejob.adascale.dev/digits" in kubectl("-n", namespace, "get", "all", "-o", "name").stdout
