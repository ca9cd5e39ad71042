"""Tests of checkpoints in an object store: a real S3 server, also one that fails."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adascale import ElasticTrainer
from adascale_controller.local import state_dir
from adascale_core.checkpoint_manifest import manifest_number
from adascale_storage import (
    NameTakenError,
    StorageError,
    UnusableStorageError,
    is_url,
    object_store,
    open_storage,
)
from adascale_worker.errors import CheckpointError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from adascale_worker.state.file import Snapshot
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.store import CheckpointInfo, CheckpointStore
from support import s3
from support.fast_python import PYTHON
from support.training import FIXED, MakeTrainer, make_step, network, samples, sgd

pytest.importorskip("s3fs", reason="s3fs is not installed")

INFO = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=2, generation=3, finished=False, saved_at=9.5)
GROUP = ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"))
PART = 5 * 2**20
"""Smallest part of a multipart upload in S3."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="session")
def program() -> str:
    return s3.require_server()


@pytest.fixture
def server(program: str, tmp_path: Path) -> Iterator[s3.S3Server]:
    server = s3.S3Server(program, tmp_path / "objects")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def proxy(server: s3.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.FaultyProxy]:
    proxy = s3.FaultyProxy(server.port)
    for name, value in s3.environment(proxy.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "MULTIPART_BYTES", PART)
    options = {**object_store._OPTIONS["s3"]["config_kwargs"], "connect_timeout": 1, "read_timeout": 2}
    monkeypatch.setitem(object_store._OPTIONS, "s3", {"config_kwargs": options, "skip_instance_cache": True})
    yield proxy
    proxy.close()


@pytest.fixture
def store(proxy: s3.FaultyProxy) -> CheckpointStore:
    return CheckpointStore(open_storage(f"s3://{s3.BUCKET}/jobs/digits/"), chunk_bytes=2**20)


def state_of(number: int, elements: int = 1000) -> dict[str, Any]:
    return {"weights": torch.full((elements,), float(number)), "number": number}


LARGE = 3 * PART // 4 + 1000
"""Elements of a state that is uploaded in four parts."""


def save(store: CheckpointStore, number: int, elements: int = 1000, **changes: Any) -> None:
    snapshot = Snapshot()
    snapshot.copy(state_of(number, elements))
    store.save(snapshot, replace(INFO, **changes))


def loaded_number(store: CheckpointStore) -> int:
    loaded = store.load()
    assert loaded is not None
    state, _ = loaded
    assert torch.equal(state["weights"], torch.full_like(state["weights"], float(state["number"])))
    return int(state["number"])


@pytest.mark.parametrize("elements", [1, 1000, LARGE])
def test_checkpoints_are_saved_loaded_and_the_last_two_kept(
    store: CheckpointStore, elements: int, server: s3.S3Server
) -> None:
    assert store.load() is None
    for number in (1, 2, 3):
        save(store, number, elements)
    assert loaded_number(store) == 3
    assert store.numbers() == [2, 3]
    assert len([name for name in store.storage.names() if name.startswith("checkpoint-")]) == 4


@pytest.mark.parametrize("elements", [1000, LARGE])
def test_a_store_that_refuses_the_checksums_of_clients_is_used_without(
    proxy: s3.FaultyProxy, store: CheckpointStore, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.refuses_checksums = True
    options = {**object_store._OPTIONS_OF_PERSON["s3"], "skip_instance_cache": True}
    monkeypatch.setitem(object_store._OPTIONS_OF_PERSON, "s3", options)
    url = f"s3://{s3.BUCKET}/jobs/digits"
    for number in (1, 2, 3):
        save(store, number, elements)
    assert loaded_number(store) == 3
    assert state_dir.newest_manifest(url) is not None
    state_dir.delete_checkpoints(url)
    assert state_dir.newest_manifest(url) is None
    assert proxy.refusals == 0


def test_a_store_that_refuses_checksums_refuses_those_that_clients_have_by_default(
    proxy: s3.FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.refuses_checksums = True
    monkeypatch.setitem(object_store._OPTIONS, "s3", {"skip_instance_cache": True})
    with pytest.raises(CheckpointError, match="NotImplemented"):
        save(CheckpointStore(open_storage(f"s3://{s3.BUCKET}/jobs/digits/")), 1)
    assert proxy.refusals > 0


def test_only_one_writer_creates_a_name(store: CheckpointStore) -> None:
    store.storage.create("checkpoint-00000001.json", b"first")
    with pytest.raises(NameTakenError):
        store.storage.create("checkpoint-00000001.json", b"second")
    assert store.storage.read("checkpoint-00000001.json") == b"first"


def test_a_generation_that_is_replaced_while_it_uploads_cannot_save(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    write = store.storage.write

    def write_slowly(name: str, *arguments: Any, **options: Any) -> None:
        write(name, *arguments, **options)
        monkeypatch.setattr(store.storage, "write", write)
        save(store, 2, generation=4)

    monkeypatch.setattr(store.storage, "write", write_slowly)
    with pytest.raises(CheckpointError, match=r"generation 4 has saved in s3://.* but this is generation 3"):
        save(store, 3)
    assert loaded_number(store) == 2


def test_a_store_that_ignores_conditions_is_refused(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = store.storage._fs.pipe_file  # type: ignore[attr-defined]

    def ignore(path: str, content: bytes, mode: str = "overwrite") -> None:
        pipe(path, content)

    monkeypatch.setattr(store.storage._fs, "pipe_file", ignore)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="ignores the condition If-None-Match"):
        save(store, 1)
    assert store.storage.names() == [object_store.CONDITION_PROBE], "no state is uploaded"


# -- faults ---------------------------------------------------------------------------------------------


def test_a_server_that_is_down_is_an_error_until_it_is_up_again(
    store: CheckpointStore, server: s3.S3Server
) -> None:
    save(store, 1)
    server.stop()
    with pytest.raises(CheckpointError, match="s3://checkpoints/jobs/digits cannot be read"):
        save(store, 2)
    with pytest.raises(CheckpointError, match="s3://checkpoints/jobs/digits cannot be read"):
        store.load()
    server.start()
    save(store, 3)
    assert loaded_number(store) == 3


def test_a_server_that_does_not_answer_is_an_error_until_it_answers(
    store: CheckpointStore, proxy: s3.FaultyProxy
) -> None:
    save(store, 1)
    proxy.fault = "silent"
    with pytest.raises(CheckpointError, match="cannot be read"):
        save(store, 2)
    proxy.fault = None
    save(store, 3)
    assert loaded_number(store) == 3


def test_a_request_is_repeated_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt may take 30 s, and both s3fs and its client repeat it."""
    monkeypatch.setitem(object_store._OPTIONS["s3"]["config_kwargs"], "read_timeout", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        for name, value in s3.environment(silent.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StorageError, match=r"[Tt]imeout"):
            open_storage("s3://bucket/jobs").names()
        silent.settimeout(0)
        attempts = []
        with suppress(BlockingIOError):
            while True:
                attempts.append(silent.accept()[0])
        for attempt in attempts:
            attempt.close()
    assert 2 <= len(attempts) <= 4


def test_a_multipart_upload_that_is_cut_off_leaves_the_last_checkpoint(
    store: CheckpointStore, proxy: s3.FaultyProxy
) -> None:
    save(store, 1)
    proxy.fault = "cut"
    with pytest.raises(
        CheckpointError, match=r"cannot be saved in s3://.*; the last checkpoint, of step 7, is unchanged"
    ):
        save(store, 2, LARGE)
    proxy.fault = None
    assert loaded_number(store) == 1
    save(store, 3, LARGE)
    assert loaded_number(store) == 3


def test_an_upload_that_cannot_be_completed_leaves_no_parts(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = store.storage._fs  # type: ignore[attr-defined]
    call = client.call_s3

    def refuse_completion(method: str, *arguments: Any, **options: Any) -> Any:
        if method == "complete_multipart_upload":
            raise OSError("refused by the test")
        return call(method, *arguments, **options)

    monkeypatch.setattr(client, "call_s3", refuse_completion)
    with pytest.raises(CheckpointError, match="refused by the test"):
        save(store, 1, LARGE)
    assert client.list_multipart_uploads(s3.BUCKET) == []


def test_wrong_credentials_are_an_error_that_names_them(
    proxy: s3.FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another secret")
    store = CheckpointStore(open_storage(f"s3://{s3.BUCKET}/jobs"))
    with pytest.raises(CheckpointError, match=r"cannot be read: \w*(Permission|Client)Error: .*signature"):
        store.load()


def test_a_bucket_that_does_not_exist_is_an_error(proxy: s3.FaultyProxy) -> None:
    store = CheckpointStore(open_storage("s3://no-such-bucket/jobs"))
    with pytest.raises(CheckpointError, match="bucket"):
        save(store, 1)


# -- training under faults --------------------------------------------------------------------------------


class Training:
    """A trainer on one replica that saves as often as it can, step by step."""

    def __init__(
        self, trainer: ElasticTrainer, model: nn.Module, objects: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._objects = objects
        self._capsys = capsys
        self._steps = self._train(trainer, model)
        self.output = ""

    def _train(self, trainer: ElasticTrainer, model: nn.Module) -> Iterator[None]:
        optimizer = sgd(model, lr=0.001)
        trainer.program_reentry(model, optimizer)
        for epoch in count():
            for _, x, y in trainer.dataloader(samples()):
                make_step(model, optimizer, x, y)
                yield
            trainer.step(epoch)

    def step(self) -> None:
        next(self._steps)
        self.output += self._capsys.readouterr().out

    def until(self, condition: Callable[[], object]) -> None:
        """Make steps until a condition holds."""
        while not condition():
            self.step()

    def newest(self) -> int:
        """The number of the newest checkpoint; 0 without one."""
        # Not by glob, which fails if a folder of a multipart upload is removed at the same moment.
        names = [name for _, _, files in os.walk(self._objects) for name in files]
        return max((manifest_number(name) or 0 for name in names), default=0)


@pytest.fixture
def begin_training(
    proxy: s3.FaultyProxy, make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[nn.Module], Training]:
    """Begins to train a model, and returns after the first checkpoint."""

    def begin(model: nn.Module) -> Training:
        trainer = make_trainer(**FIXED, checkpoint_dir=f"s3://{s3.BUCKET}/jobs", checkpoint_interval=0)
        training = Training(trainer, model, tmp_path / "objects", capsys)
        training.until(training.newest)
        return training

    return begin


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (503, "SlowDown"), (500, "InternalError")]
)
def test_a_trainer_continues_while_writes_are_refused_and_saves_again_later(
    begin_training: Callable[[nn.Module], Training], proxy: s3.FaultyProxy, status: int, code: str
) -> None:
    training = begin_training(network())
    proxy.fault = s3.Refusal(status, code)
    training.until(lambda: "training continues without this checkpoint" in training.output)
    assert re.search(
        rf"the checkpoint cannot be saved in s3://checkpoints/jobs: .*{code}.*: refused by the test; "
        r"the last checkpoint, of step \d+, is unchanged\. Check that .*; training continues without",
        training.output,
    ), training.output
    last, refusals = training.newest(), proxy.refusals
    training.until(lambda: proxy.refusals > 2 * refusals)
    assert training.newest() == last
    proxy.fault = None
    training.until(lambda: "checkpoints are saved again, the last one at step " in training.output)
    assert training.newest() > last


# -- kills ------------------------------------------------------------------------------------------------

KILLED = """
import json, os, signal, sys
from types import SimpleNamespace
import torch
from adascale_worker.state.store import CheckpointInfo, CheckpointStore
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.file import Snapshot
from adascale_storage import object_store, open_storage

object_store.MULTIPART_BYTES = 5 * 2**20
store = CheckpointStore(open_storage(sys.argv[1]), 2**20)
snapshot = Snapshot()
snapshot.copy({"weights": torch.full((4_000_000,), 3.0), "number": 3})
info = CheckpointInfo(step=8, progress=21.5, epoch=1, replicas=2, generation=3, finished=False, saved_at=9.5)
action, operation, survived = json.loads(sys.argv[2])
client = store.storage._fs
client.write_part = lambda: False

def kill_before_operation():
    run = getattr(client, operation)

    def run_or_kill(*arguments, **options):
        global survived
        survived -= 1
        if survived < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*arguments, **options)

    setattr(client, operation, run_or_kill)

if action == "save":
    kill_before_operation()
manifest = store.save(snapshot, info, is_cancelled=lambda: client.write_part())
if action == "annotate":
    kill_before_operation()
    store.annotate(manifest, {"accuracy": 0.75})
"""


@pytest.mark.parametrize(
    ("action", "operation", "survived", "number", "result"),
    [
        pytest.param("save", "write_part", 9, 2, {}, id="upload"),
        pytest.param("save", "pipe_file", 0, 2, {}, id="before the probe for conditional writes"),
        pytest.param("save", "pipe_file", 1, 2, {}, id="between the two requests of the probe"),
        pytest.param("save", "pipe_file", 2, 2, {}, id="before the manifest"),
        pytest.param("save", "rm_file", 0, 3, {}, id="before the deletion of the manifest"),
        pytest.param("save", "rm_file", 1, 3, {}, id="between the deletions of the manifest and the state"),
        pytest.param("annotate", "pipe_file", 0, 3, {}, id="before the annotated manifest"),
        pytest.param("annotate", "rm_file", 0, 3, {"accuracy": 0.75}, id="after the annotated manifest"),
    ],
)
def test_a_kill_during_a_save_leaves_a_complete_checkpoint(
    store: CheckpointStore,
    action: str,
    operation: str,
    survived: int,
    number: int,
    result: dict[str, float],
) -> None:
    """A probe that was cut off, and what was not deleted, do not disturb the next writer."""
    save(store, 1)
    save(store, 2)
    store.storage.delete(object_store.CONDITION_PROBE)
    killed = subprocess.run(
        [*PYTHON, "-c", KILLED, str(store.storage), json.dumps([action, operation, survived])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=120,
    )
    assert killed.returncode == -9
    loaded = store.load()
    assert loaded is not None
    assert (loaded[0]["number"], loaded[1].result) == (number, result)
    assert torch.equal(loaded[0]["weights"], torch.full_like(loaded[0]["weights"], float(number)))
    successor = CheckpointStore(open_storage(str(store.storage)))
    save(successor, 4)
    assert loaded_number(successor) == 4
    save(successor, 5)
    save(successor, 6)
    assert len([name for name in store.storage.names() if name.startswith("checkpoint-")]) == 4


# -- locations --------------------------------------------------------------------------------------------


def test_urls_are_distinguished_from_folders() -> None:
    assert is_url("s3://bucket/prefix")
    assert is_url("gs://bucket")
    assert not is_url("/var/lib/adascale")
    assert not is_url("folder")
    assert not is_url(Path("s3:/bucket"))


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("s3://", "has no bucket: use a URL such as s3://bucket/prefix"),
        (
            "s3://key:secret@bucket/prefix",
            "URL of the checkpoints contains credentials, .*: use s3://bucket/prefix, and",
        ),
        ("nothing://bucket/prefix", "nothing://bucket/prefix cannot be used: .*[Pp]rotocol"),
    ],
)
def test_an_unusable_url_is_an_error(url: str, complaint: str) -> None:
    with pytest.raises(UnusableStorageError, match=complaint) as raised:
        open_storage(url)
    assert "secret" not in str(raised.value)
    with pytest.raises(CheckpointError, match=complaint):
        Checkpointing(url, 1.0, GROUP)


def test_a_client_that_is_not_installed_is_an_error_that_names_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        UnusableStorageError,
        match=r"s3:// is not installed: run `pip install 'adascale-operator\[s3\]'`, in",
    ):
        open_storage("s3://bucket/prefix")


def test_a_url_with_empty_parts_is_that_without(store: CheckpointStore) -> None:
    """Servers that keep objects in folders would not list them."""
    other = CheckpointStore(open_storage(f"s3://{s3.BUCKET}/jobs//digits//"))
    for number in (1, 2, 3):
        save(other, number)
    assert str(other.storage) == str(store.storage)
    assert loaded_number(store) == 3
