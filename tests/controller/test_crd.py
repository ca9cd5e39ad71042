"""What the API server is told of an AdaScaleJob (`deploy/base/crd.yaml`) is what a job file may contain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from adascale_controller.schema import DEFAULT_ACCESS_MODE, DEFAULT_STORAGE, DNS_LABEL, AdaScaleJobDocument
from adascale_core import names

FILE = Path(__file__).parents[2] / "deploy" / "base" / "crd.yaml"
CRD: dict[str, Any] = yaml.safe_load(FILE.read_text())
(VERSION,) = CRD["spec"]["versions"]
ROOT: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
SPEC: dict[str, Any] = ROOT["properties"]["spec"]
STATUS: dict[str, Any] = ROOT["properties"]["status"]

LIMITS = ("minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "enum")

Leaf = dict[str, Any]


# -- both schemas in one form: for each field its type, limits, default, and what it requires -----------


def of_the_cluster(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Leaf]]:
    """The fields of a structural schema."""
    either = schema.get("x-kubernetes-int-or-string", False)
    leaf = _leaf(schema, "integer or string" if either else schema["type"])
    if schema.get("exclusiveMinimum"):
        leaf["more than"] = leaf.pop("minimum")
    leaf["open"] = schema.get("x-kubernetes-preserve-unknown-fields", False)
    yield path, leaf
    for name, field in schema.get("properties", {}).items():
        yield from of_the_cluster(field, f"{path}.{name}")
    if "items" in schema:
        yield from of_the_cluster(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from of_the_cluster(schema["additionalProperties"], f"{path}.*")


def of_the_file(schema: dict[str, Any], path: str, definitions: dict[str, Any]) -> Iterator[tuple[str, Leaf]]:
    """The fields of pydantic's JSON schema; that a field may be null is the same as that it may be absent."""
    default = {"default": schema["default"]} if schema.get("default") is not None else {}
    choices = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    schema = {name: value for one in choices for name, value in _resolved(one, definitions).items()} | default
    leaf = _leaf(schema, "integer or string" if len(choices) == 2 else schema["type"])
    if "exclusiveMinimum" in schema:
        leaf["more than"] = schema["exclusiveMinimum"]
    rest = schema.get("additionalProperties", False)
    leaf["open"] = rest is True
    yield path, leaf
    for name, field in schema.get("properties", {}).items():
        yield from of_the_file(field, f"{path}.{name}", definitions)
    if "items" in schema:
        yield from of_the_file(schema["items"], f"{path}[]", definitions)
    if isinstance(rest, dict):
        yield from of_the_file(rest, f"{path}.*", definitions)


def _leaf(schema: dict[str, Any], type_: str) -> Leaf:
    leaf = {limit: schema[limit] for limit in LIMITS if limit in schema}
    leaf |= {"type": type_, "required": set(schema.get("required", []))}
    # The default of a section is left to those of its fields.
    return leaf if type_ == "object" else leaf | {"default": schema.get("default")}


def _resolved(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return definitions[reference.rpartition("/")[2]] if reference else schema


def file_fields() -> dict[str, Leaf]:
    whole = AdaScaleJobDocument.model_json_schema(by_alias=True)
    return dict(of_the_file(whole["properties"]["spec"], "spec", whole["$defs"]))


CLUSTER_FIELDS = dict(of_the_cluster(SPEC, "spec"))


def test_both_have_the_same_fields() -> None:
    assert set(CLUSTER_FIELDS) == set(file_fields())


@pytest.mark.parametrize("path", CLUSTER_FIELDS)
def test_a_field_is_the_same_in_both(path: str) -> None:
    told = file_fields()[path]
    if path == "spec.template.spec.containers[]":
        # What runs on one machine runs there without an image.
        told["required"] = told["required"] | {"image"}
    assert CLUSTER_FIELDS[path] == told


# -- names, and numbers that only stand in text --------------------------------------------------------


def test_the_names_are_those_of_the_core() -> None:
    spec = CRD["spec"]
    assert spec["group"] == names.API_GROUP
    assert spec["names"]["kind"] == names.KIND
    assert spec["names"]["plural"] == names.PLURAL
    assert VERSION["name"] == names.API_VERSION
    assert CRD["metadata"]["name"] == f"{names.PLURAL}.{names.API_GROUP}"


def test_the_name_of_a_job_may_be_as_long_as_the_core_says() -> None:
    (rule,) = ROOT["x-kubernetes-validations"]
    most, pattern = names.MAX_NAME_LENGTH, DNS_LABEL
    assert rule["rule"] == f"self.metadata.name.size() <= {most} && self.metadata.name.matches('{pattern}')"
    assert f"at most {most} of them" in rule["messageExpression"]


def test_the_rules_look_at_every_count_that_may_matter() -> None:
    """They look for a count, or for a divisor of batchSize: of two that make it, one is not over its root."""
    looking = [rule["rule"] for rule in SPEC["x-kubernetes-validations"] if "exists" in rule["rule"]]
    assert len(looking) == 2
    for rule in looking:
        tens, ones = (
            [int(number) for number in found.split(",")] for found in re.findall(r"\[([^]]*)]", rule)
        )
        assert sorted(32 * i + j for i in tens for j in ones) == list(range(1, names.MAX_REPLICAS + 1))
    assert names.MAX_REPLICAS**2 >= names.MAX_BATCH_SIZE


def test_what_the_operator_takes_for_a_claim_is_told() -> None:
    """The schema has no defaults for these: they would be there beside a claimName, too."""
    fields = SPEC["properties"]["checkpoint"]["properties"]
    assert f"{DEFAULT_STORAGE} where not given" in fields["storage"]["description"]
    assert (
        f"With {DEFAULT_ACCESS_MODE}, which is taken where it is not given"
        in (fields["accessMode"]["description"])
    )
    assert fields["accessMode"]["enum"][0] == DEFAULT_ACCESS_MODE


# -- what users see ------------------------------------------------------------------------------------


def every_field(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from every_field(field, f"{path}.{name}")
    if "items" in schema:
        yield from every_field(schema["items"], f"{path}[]")


FIELDS = dict(every_field(SPEC, ".spec")) | dict(every_field(STATUS, ".status"))


@pytest.mark.parametrize("path", [path for path in FIELDS if not path.endswith("[]")])
def test_each_field_is_described(path: str) -> None:
    description = FIELDS[path].get("description", "")
    assert description.endswith(".")
    assert "\n" not in description


@pytest.mark.parametrize("path", [path for path, field in FIELDS.items() if field.get("type") == "integer"])
def test_whole_numbers_fit_their_format(path: str) -> None:
    bits = {"int32": 31, "int64": 63}[FIELDS[path]["format"]]
    assert FIELDS[path].get("maximum", 0) < 2**bits


def test_the_columns_tell_how_a_job_is_doing() -> None:
    columns = VERSION["additionalPrinterColumns"]
    assert [column["name"] for column in columns if not column.get("priority")] == [
        "State", "Replicas", "Desired", "Batch", "Gain", "Efficiency", "Progress", "Restarts", "Age",
    ]  # fmt: skip
    for column in columns:
        if column["jsonPath"].startswith(".status") and "[" not in column["jsonPath"]:
            assert FIELDS[column["jsonPath"]]["type"] == column["type"]


def test_a_job_can_be_scaled() -> None:
    scale = VERSION["subresources"]["scale"]
    assert {path: FIELDS[path]["type"] for path in scale.values()} == {
        ".spec.replicas": "integer",
        ".status.replicas": "integer",
        ".status.selector": "string",
    }


def test_the_rules_say_what_is_wrong_in_one_line() -> None:
    rules = [rule for _, field in FIELDS.items() for rule in field.get("x-kubernetes-validations", [])]
    assert len(rules) == 11
    for rule in rules:
        assert "\n" not in rule["rule"]
        assert "\n" not in (rule.get("message") or rule["messageExpression"])
