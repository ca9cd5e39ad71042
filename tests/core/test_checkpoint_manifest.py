"""File names of checkpoints, and the JSON of a manifest."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.checkpoint_manifest import (
    SHARDED_FORMAT,
    InvalidManifestError,
    Manifest,
    StateFile,
    UnsupportedFormatError,
    checkpoint_number,
    draft_file_name,
    manifest_file_name,
    manifest_number,
    normalized_url,
    state_file_name,
)

MANIFEST = Manifest(
    number=2, state="checkpoint-00000002-00ff00ff.safetensors", bytes=12, header_bytes=8, chunk_bytes=4,
    sha256=["00ff", "ff00"], step=7, progress=21.5, epoch=1, replicas=2, generation=3,
    saved_at=1_700_000_009.5, finished=True, result={"accuracy": 0.97}, incarnation=1_700_000_000,
)  # fmt: skip


SHARDED = replace(
    MANIFEST,
    format=SHARDED_FORMAT,
    shards=(StateFile("checkpoint-00000002-00ff00ff-2-of-2.safetensors", 9, 5, ["f00f", "0ff0"]),),
)


@pytest.mark.parametrize("manifest", [MANIFEST, SHARDED], ids=["one file", "a file per process"])
def test_a_manifest_is_equal_after_a_round_trip_through_json(manifest: Manifest) -> None:
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"shards": None}, "shards must be of type list, got None"),
        ({"shards": ["name"]}, "shards must be JSON objects, got 'name'"),
        ({"shards": [{"state": "name"}]}, "bytes is missing"),
        ({"shards": [{"state": 7}]}, "state must be of type str, got 7"),
        ({"shards": []}, "its checksum does not match its members"),
    ],
)
def test_invalid_files_of_processes_are_rejected(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidManifestError, match=complaint):
        Manifest.from_json(SHARDED.to_json() | change)


@pytest.mark.parametrize(
    "change", [{"step": 6}, {"result": {"accuracy": 0.98}}, {"sha256": ["00ff", "ff01"]}, {"later": 1}]
)
def test_a_changed_or_added_member_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidManifestError, match="its checksum does not match its members"):
        Manifest.from_json(MANIFEST.to_json() | change)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"step": None}, "step must be of type int, got None"),
        ({"step": True}, "step must be of type int, got True"),
        ({"progress": "9"}, "progress must be of type int or float, got '9'"),
        ({"finished": 1}, "finished must be of type bool, got 1"),
        ({"sha256": "0"}, "sha256 must be of type list, got '0'"),
        ({"result": []}, r"result must be of type dict, got \[\]"),
    ],
)
def test_a_member_of_the_wrong_type_is_rejected(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidManifestError, match=complaint):
        Manifest.from_json(MANIFEST.to_json() | change)


@pytest.mark.parametrize("name", ["number", "sha256", "bytes", "step", "progress", "generation", "format"])
def test_a_missing_member_is_rejected(name: str) -> None:
    members = MANIFEST.to_json()
    del members[name]
    with pytest.raises(InvalidManifestError, match=f"{name} is missing"):
        Manifest.from_json(members)


@pytest.mark.parametrize("document", [None, [], "checkpoint", 7])
def test_a_document_other_than_an_object_is_rejected(document: object) -> None:
    with pytest.raises(InvalidManifestError, match="must be a JSON object"):
        Manifest.from_json(document)


def test_another_format_is_rejected_with_both_numbers() -> None:
    with pytest.raises(
        UnsupportedFormatError, match="format 2 is not supported: this version reads the formats 6 and 7"
    ):
        Manifest.from_json(MANIFEST.to_json() | {"format": 2})


@given(st.integers(1, 10**10))
def test_file_names_carry_the_number(number: int) -> None:
    names = [
        state_file_name(number, "0123abcd"),
        state_file_name(number, "0123abcd", 1, 16),
        manifest_file_name(number),
    ]
    assert [checkpoint_number(name) for name in names] == [number] * 3
    assert [checkpoint_number(draft_file_name(name, "00000000")) for name in names] == [number] * 3
    assert [manifest_number(name) for name in names] == [None, None, number]
    assert manifest_number(draft_file_name(manifest_file_name(number), "00000000")) is None


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-best.safetensors",
        "checkpoint-00000001.safetensors",
        "checkpoint-00000001.draft",
        "checkpoint-00000001.txt",
        "checkpoint-1.json",
        "checkpoint-00000001.json\n",
    ],
)
def test_files_of_the_user_are_no_checkpoints(name: str) -> None:
    assert checkpoint_number(name) is None
    assert manifest_number(name) is None


@pytest.mark.parametrize(
    ("url", "normalized"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket//jobs///default.digits/", "s3://bucket/jobs/default.digits"),
        ("file:///folder//jobs", "file:///folder/jobs"),
    ],
)
def test_a_url_is_normalized(url: str, normalized: str) -> None:
    assert normalized_url(url) == normalized
