"""`deploy/base/crd.yaml` is current, and its schema is that of `adascale validate`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "deploy"))

from crd import crd, crd_yaml

from adascale_controller.schema import (
    DEFAULT_ACCESS_MODE,
    DNS_LABEL,
    QUANTITY,
    AdaScaleJobSpec,
    Checkpoint,
)
from adascale_core import names
from adascale_core.views.job_summary import JobStateName

CHECKED_IN = Path(__file__).parents[2] / "deploy" / "base" / "crd.yaml"
CRD = crd()
(VERSION,) = CRD["spec"]["versions"]
ROOT: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
SPEC: dict[str, Any] = ROOT["properties"]["spec"]
STATUS: dict[str, Any] = ROOT["properties"]["status"]
OPEN = {"x-kubernetes-preserve-unknown-fields": True}


def fields_of(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a structural schema, with its path."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from fields_of(field, f"{path}.{name}")
    if "items" in schema:
        yield from fields_of(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from fields_of(schema["additionalProperties"], f"{path}.*")


FIELDS = dict(fields_of(SPEC, ".spec")) | dict(fields_of(STATUS, ".status"))


def test_the_checked_in_crd_is_current() -> None:
    assert CHECKED_IN.read_text() == crd_yaml(), "run `make crd`"


def test_the_table_of_the_fields_of_pods_is_current() -> None:
    root = CHECKED_IN.parents[2]
    generated = subprocess.check_output([sys.executable, root / "deploy" / "pod_fields.py"], text=True)
    checked_in = root / "controller" / "adascale_controller" / "pod_fields.json"
    assert checked_in.read_text() == generated, "run `make crd`"


# -- the schema of spec --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("batchSize", {"type": "integer", "format": "int32", "minimum": 1, "maximum": 2**20}),
        ("minReplicas", {"type": "integer", "format": "int32", "default": 1, "minimum": 1, "maximum": 1024}),
        ("replicaLimit", {"type": "integer", "format": "int32", "minimum": 0, "maximum": 1024}),
        (
            "scaleInvariantSteps",
            {"type": "integer", "format": "int64", "minimum": 1, "maximum": 2**53 - 1},
        ),
        (
            "efficiencyTarget",
            {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1},
        ),
        ("suspend", {"type": "boolean", "default": False}),
        ("checkpoint", {"type": "object", "default": {}}),
        ("checkpoint.storage", {"x-kubernetes-int-or-string": True, "maxLength": 32}),
        ("checkpoint.accessMode", {"type": "string", "enum": ["ReadWriteOnce", "ReadWriteMany"]}),
        ("localBszBounds", {"type": "object", "required": ["lower"]}),
        (
            "localBszBounds.upper",
            {"x-kubernetes-int-or-string": True, "default": "auto", "maxLength": 32},
        ),
        ("template.metadata.labels.*", {"type": "string"}),
        ("template.spec", {"type": "object", "required": ["containers"], **OPEN}),
        (
            "template.spec.containers",
            {
                "type": "array",
                "minItems": 1,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
        ),
        ("template.spec.containers[]", {"type": "object", "required": ["name", "image"], **OPEN}),
        ("template.spec.containers[].name", {"type": "string", "maxLength": 63, "pattern": DNS_LABEL}),
    ],
)
def test_a_field_has_the_limits_of_its_model(path: str, schema: dict[str, Any]) -> None:
    nested = ("description", "properties", "items", "additionalProperties", "x-kubernetes-validations")
    assert {key: value for key, value in FIELDS[f".spec.{path}"].items() if key not in nested} == schema


def test_each_field_of_the_models_is_in_the_crd() -> None:
    assert set(SPEC["properties"]) == {field.alias for field in AdaScaleJobSpec.model_fields.values()}
    checkpoint = SPEC["properties"]["checkpoint"]["properties"]
    assert set(checkpoint) == {field.alias for field in Checkpoint.model_fields.values()}


@pytest.mark.parametrize("path", FIELDS)
def test_each_field_is_structural(path: str) -> None:
    field = FIELDS[path]
    assert ("type" in field) != field.get("x-kubernetes-int-or-string", False)
    assert not field.keys() & {"$ref", "anyOf", "title", "const"}
    assert field.get("default", 0) is not None
    if field.get("type") == "integer":
        bits = {"int32": 31, "int64": 63}[field["format"]]
        assert field.get("maximum", 0) < 2**bits


@pytest.mark.parametrize("path", [path for path in FIELDS if not path.endswith(("[]", "*"))])
def test_each_field_is_described_in_sentences(path: str) -> None:
    description = FIELDS[path].get("description", "")
    assert description.endswith(".")
    assert "\n" not in description


# -- the rules that are written by hand ----------------------------------------------------------------


def test_the_name_of_a_job_is_limited_as_in_the_core() -> None:
    (rule,) = ROOT["x-kubernetes-validations"]
    longest, pattern = names.MAX_NAME_LENGTH, DNS_LABEL
    allowed = f"self.metadata.name.size() <= {longest} && self.metadata.name.matches('{pattern}')"
    assert rule["rule"] == allowed
    assert f"at most {longest} characters" in rule["messageExpression"]


def test_a_storage_size_has_the_pattern_of_its_model() -> None:
    (rule,) = SPEC["properties"]["checkpoint"]["properties"]["storage"]["x-kubernetes-validations"]
    assert f"self.matches('{QUANTITY}')" in rule["rule"]


def test_an_upper_bound_has_the_largest_number_of_its_model() -> None:
    (rule,) = SPEC["properties"]["localBszBounds"]["properties"]["upper"]["x-kubernetes-validations"]
    assert f"self <= {names.MAX_BATCH_SIZE} " in rule["rule"]
    assert f" to {names.MAX_BATCH_SIZE} " in rule["messageExpression"]


def test_the_rules_on_counts_try_every_count_and_every_divisor() -> None:
    """A divisor of `batchSize`, or its cofactor, is at most the root of the largest batch size."""
    rules = [rule["rule"] for rule in SPEC["x-kubernetes-validations"] if "exists" in rule["rule"]]
    assert len(rules) == 2
    for rule in rules:
        tens, ones = (
            [int(number) for number in found.split(",")] for found in re.findall(r"\[([0-9, ]+)]", rule)
        )
        assert sorted(32 * i + j for i in tens for j in ones) == list(range(1, names.MAX_REPLICAS + 1))
    assert names.MAX_REPLICAS**2 >= names.MAX_BATCH_SIZE


def test_the_first_access_mode_is_the_default() -> None:
    """The schema has no default for it: that would be set beside `claimName`, too."""
    assert SPEC["properties"]["checkpoint"]["properties"]["accessMode"]["enum"][0] == DEFAULT_ACCESS_MODE


# -- names, columns and subresources -------------------------------------------------------------------


def test_the_columns_show_fields_of_the_status() -> None:
    columns = VERSION["additionalPrinterColumns"]
    assert [column["name"] for column in columns if not column.get("priority")] == [
        "State", "Reason", "Replicas", "Desired", "Batch", "Gain", "Efficiency", "Progress", "Restarts",
        "Age",
    ]  # fmt: skip
    for column in columns:
        if column["jsonPath"].startswith(".status") and "[" not in column["jsonPath"]:
            assert FIELDS[column["jsonPath"]]["type"] == column["type"]


def test_the_states_have_the_names_of_all_other_lists() -> None:
    assert set(FIELDS[".status.state"]["enum"]) <= set(JobStateName)


def test_the_scale_subresource_has_fields_of_the_right_type() -> None:
    scale = VERSION["subresources"]["scale"]
    assert {path: FIELDS[path]["type"] for path in scale.values()} == {
        ".spec.replicaLimit": "integer",
        ".status.replicas": "integer",
        ".status.selector": "string",
    }
