"""Parts of a local run that read files and ports."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from adascale_controller.local.processes import tail
from adascale_controller.local.service_process import listen
from adascale_controller.local.state_dir import (
    CheckpointStorageError,
    delete_checkpoints,
    location,
    newest_manifest,
)
from adascale_core.errors import UsageError
from adascale_storage import object_store
from support import s3
from support.manifests import make_manifest


def test_the_newest_readable_manifest_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert newest_manifest(folder) is None
    folder.mkdir()
    manifest = make_manifest(10, step=70, progress=12.5, finished=True, result={"accuracy": 0.9})
    (folder / "checkpoint-00000009.json").write_text(json.dumps(replace(manifest, number=9).to_json()))
    (folder / "checkpoint-00000010.json").write_text(json.dumps(manifest.to_json()))
    (folder / "checkpoint-00000011-0123abcd.safetensors").touch()
    assert newest_manifest(folder) == manifest
    (folder / "checkpoint-00000012.json").write_text("{")
    assert newest_manifest(folder) == manifest


def test_a_port_in_use_is_an_error_only_if_it_is_required() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with listen(port, required=False) as other:
            assert other.getsockname()[1] not in (0, port)
        with pytest.raises(
            UsageError, match=f"cannot listen on port {port}: address already in use"
        ) as raised:
            listen(port, required=True)
        assert raised.value.exit_code == 2


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert tail(log, 2) == "line 998\nline 999"
    message = f"adascale: {'x' * 1000}"
    log.write_text(f"line 1\n{message}\n")
    assert tail(log, 1) == message


def test_checkpoints_at_a_url_are_read_and_deleted(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"file://{tmp_path}/runs"
    assert location(None, tmp_path) == tmp_path
    assert location(str(tmp_path), Path("other")) == tmp_path
    assert location(url, tmp_path) == url
    assert newest_manifest(url) is None
    (tmp_path / "runs").mkdir()
    newest = make_manifest(2, step=70)
    for each in (make_manifest(1), newest):
        (tmp_path / "runs" / f"checkpoint-{each.number:08d}.json").write_text(json.dumps(each.to_json()))
    (tmp_path / "runs" / "checkpoint-00000003.json").write_text("{")
    (tmp_path / "runs" / "notes.txt").touch()
    assert newest_manifest(url) == newest
    delete_checkpoints(url)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["notes.txt"]


def test_an_object_store_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person waits for each attempt to end."""
    pytest.importorskip("s3fs")
    limits = object_store._OPTIONS_OF_PERSON["s3"]["config_kwargs"]
    monkeypatch.setitem(limits, "read_timeout", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in s3.environment(silent.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CheckpointStorageError, match=r"s3://bucket/job cannot be read: .*[Tt]imeout"):
            newest_manifest("s3://bucket/job")
        silent.settimeout(0)
        attempts = [silent.accept()[0]]
        with pytest.raises(BlockingIOError):
            silent.accept()
        attempts[0].close()


def test_an_object_that_a_trainer_deletes_meanwhile_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    client = fsspec.filesystem("file")
    manifest = make_manifest(1)
    (tmp_path / "checkpoint-00000001.json").write_text(json.dumps(manifest.to_json()))
    names = [str(tmp_path / f"checkpoint-0000000{number}.json") for number in (1, 2)]
    monkeypatch.setattr(client, "ls", lambda *_, **__: names)
    assert newest_manifest(f"file://{tmp_path}") == manifest


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    message = f"{file} cannot be read: Not a directory. Check that the folder can be read"
    with pytest.raises(CheckpointStorageError, match=message):
        newest_manifest(file)


def test_a_url_without_a_client_is_an_error() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(CheckpointStorageError, match=r"nothing://bucket cannot be used: .*[Pp]rotocol"):
        newest_manifest("nothing://bucket")
