"""Process groups of generations, formed by two processes."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adascale_core.messages.allocation import Member
from adascale_core.messages.channel import Assignment
from adascale_worker.errors import (
    CheckpointError,
    ReplicationError,
    StorageUnavailableError,
    UnusableCheckpointError,
    WorkerError,
)
from adascale_worker.loop.generations import SHARED_ERRORS
from adascale_worker.membership import gloo, process_group
from adascale_worker.membership.links import Formation, PeersLostError
from adascale_worker.membership.process_group import (
    ReplicaGroup,
    backend_of,
    described_error,
    exchange_values,
    shared_error,
)
from adascale_worker.process.device import gpu_names
from adascale_worker.process.environment import RankAssignment
from adascale_worker.torch_private.distributed import is_lost_peer
from support.fast_python import PYTHON
from support.launch import free_port
from worker.adascale_ranks import run_cases

PROGRAM = """
import datetime, socket, sys
import torch
from adascale_core.failures import EXIT_PEER_LOST
from adascale_worker.membership import gloo, process_group
from adascale_core.messages.allocation import Member
from adascale_core.messages.channel import Assignment
from adascale_worker.process.environment import RankAssignment
from adascale_worker.membership.links import Formation, PeersLostError
from torch.distributed import TCPStore

rank, port, failures = map(int, sys.argv[1:4])
members = tuple(Member(replica, "", "127.0.0.1", 0) for replica in range(2))
assignment = RankAssignment(rank, 2, rank)
group = process_group.ReplicaGroup(assignment, torch.device("cpu"), is_elastic=True)


def form(generation, port, timeout):
    process_group.FORMATION_TIMEOUT = datetime.timedelta(seconds=timeout)
    store = None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", port))
        port = listener.getsockname()[1]
        wait = process_group.FORMATION_TIMEOUT
        place = {"master_listen_fd": listener.detach(), "wait_for_workers": False}
        store = TCPStore("127.0.0.1", port, is_master=True, timeout=wait, **place)
    group.form(Assignment(generation, rank, members, "", {}), store, Formation(port, ()), sys.argv[4])


for generation in range(1, failures + 1):
    try:
        form(generation, 0, 0.5)
    except PeersLostError:
        group.destroy()
try:
    form(3, port, 30)
    print(*group.sum([rank + 1.0]))
    value = ["é", None, {"rank": rank}] if rank == 0 else ["longer", "than", "rank 0's", "value"]
    print(group.broadcast(value))
    print(group.gather(None if rank == 0 else "a reason"))
finally:
    group.destroy_before_finalization()
"""


def start_two(*arguments: tuple[str, str]) -> list[subprocess.Popen[str]]:
    """Start a process for each rank, with its number of failures and its secret."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [*PYTHON, "-c", PROGRAM, str(rank), port, *each],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, each in enumerate(arguments)
    ]


@pytest.mark.slow
def test_a_process_that_does_not_know_the_secret_gets_nothing() -> None:
    processes = start_two(("0", "secret"), ("0", "guessed"))
    for rank, (output, errors) in enumerate([process.communicate(timeout=100) for process in processes]):
        assert f"rank {1 - rank} of generation 3 does not know the secret" in errors
        assert errors.splitlines()[-1].endswith("PeersLostError")
        assert "3.0" not in output


@pytest.mark.slow
def test_a_member_forms_a_group_with_a_new_one_after_formations_that_have_failed() -> None:
    """They exchange numbers and values of JSON."""
    processes = start_two(("2", "secret"), ("0", "secret"))
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    # Gloo writes lines of its own with some versions of torch.
    expected = ["3.0", "['é', None, {'rank': 0}]", "[None, 'a reason']"]
    assert [output.splitlines()[-3:] for output in outputs] == [expected, expected]


@pytest.mark.parametrize(
    ("device", "share_a_gpu", "backend"),
    [
        ("cpu", False, "gloo"),
        ("cuda", False, "cpu:gloo,cuda:nccl"),
        ("cuda", True, "cpu:gloo,cuda:gloo"),  # NCCL refuses two ranks on one GPU
    ],
)
def test_the_backend_suits_the_devices(device: str, share_a_gpu: bool, backend: str) -> None:
    assert backend_of(torch.device(device), share_a_gpu=share_a_gpu) == backend


def test_mig_instances_of_a_gpu_have_ids_of_their_own_and_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(uuid: str, bus: int) -> tuple[str, str]:
        found = SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        return gpu_names(torch.device("cuda", 0))

    (one, its_place), (other, same_place), (_, another_place) = names("a", 1), names("b", 1), names("c", 2)
    assert (one, other) == ("a", "b")
    assert its_place == same_place != another_place


@pytest.mark.parametrize(("device", "has_result"), [("cpu", True), ("cuda", False)])
def test_a_collective_on_a_gpu_that_was_aborted_has_no_result(device: str, has_result: bool) -> None:
    """Gloo raises an error itself, and what it has exchanged before counts."""
    group = ReplicaGroup(RankAssignment(0, 2), torch.device(device), is_elastic=True)

    def all_reduce(*_: object, **__: object) -> SimpleNamespace:
        group._failed = True
        return SimpleNamespace(wait=lambda: True)

    group._lane = cast(Any, SimpleNamespace(allreduce=all_reduce))
    if has_result:
        assert group.sum([1.0]) == [1.0]
    else:
        with pytest.raises(PeersLostError):
            group.sum([1.0])


def test_a_group_fails_also_if_its_communicator_cannot_be_aborted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ReplicaGroup(RankAssignment(0, 2), torch.device("cuda"), is_elastic=True)
    group._formed, group._share_a_gpu = True, False
    monkeypatch.setattr(process_group, "abort_process_group", lambda _: torch.ones(2) + torch.ones(3))
    group.fail()
    assert group.has_failed
    assert "NCCL was not aborted: The size of tensor a (2)" in capsys.readouterr().err


def test_a_failure_that_is_noticed_late_ends_no_later_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ReplicaGroup(RankAssignment(0, 2), torch.device("cpu"), is_elastic=True)
    lost: list[int] = []
    group.observe(lost.append)
    group.generation = 3

    def form_the_next(*_: object) -> None:
        group.generation = 4

    monkeypatch.setattr(gloo, "shut_down", form_the_next)
    group.fail(2)
    assert (group.has_failed, lost) == (False, [])
    group.fail(3)
    assert (group.has_failed, lost) == (True, [3])


def test_a_communicator_is_not_destroyed_while_it_is_aborted_nor_aborted_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = ReplicaGroup(RankAssignment(0, 2), torch.device("cuda"), is_elastic=True)
    group._formed, group._share_a_gpu = True, False
    events: list[str] = []

    def abort(_: object) -> None:
        destroys.start()
        destroys.join(0.1)
        events.append("aborted")

    destroys = threading.Thread(target=group.destroy)
    monkeypatch.setattr(process_group, "abort_process_group", abort)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: events.append("destroyed"))
    group.fail()
    destroys.join()
    group._failed = False
    group.fail()
    assert events == ["aborted", "destroyed"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:12345", True),
        ("NCCL Async Error: remote process exited or there was a network error \nNCCL Last Error: ", True),
        ("NCCL communicator was aborted after a previous error", True),
        ("NCCL Init failed: invalid usage \nNCCL Last Error: Duplicate GPU detected", False),
        ("Connection closed by peer", False),
    ],
)
def test_a_lost_peer_is_recognized_by_the_message(message: str, expected: bool) -> None:
    assert is_lost_peer(RuntimeError(message)) == expected


@pytest.mark.parametrize("gpus", ["abc", "aba", "a"])
def test_all_ranks_learn_which_gpu_each_has(gpus: str) -> None:
    wait = timedelta(seconds=100)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)

    def answer(rank: int) -> list[str]:
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=wait)
        return exchange_values(store, "generation-3/gpu", rank, len(gpus), f"GPU-{gpus[rank]}")

    with ThreadPoolExecutor(len(gpus)) as ranks:
        assert list(ranks.map(answer, range(len(gpus)))) == [[f"GPU-{gpu}" for gpu in gpus]] * len(gpus)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnusableCheckpointError("damaged"), UnusableCheckpointError),
        (StorageUnavailableError("away"), StorageUnavailableError),
        (CheckpointError("full"), CheckpointError),
        (ReplicationError("other"), WorkerError),
    ],
)
def test_another_replica_ends_with_the_error_of_rank_0(error: WorkerError, kind: type[WorkerError]) -> None:
    found = shared_error(described_error(error, SHARED_ERRORS), SHARED_ERRORS, WorkerError)
    assert (type(found), str(found)) == (kind, str(error))


# -- a single replica --------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[ReplicaGroup]:
    """A replica under an agent, in its first generation."""
    group = ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"), is_elastic=True)
    enter(group, 1)
    yield group
    group.destroy()


def enter(group: ReplicaGroup, generation: int) -> None:
    group.destroy()
    members = (Member(0, "", "127.0.0.1", 0),)
    group.form(Assignment(generation, 0, members, "", {}), None, Formation(0, ()), "")


def sum_of_ones(group: dist.ProcessGroup | None = None) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return ones.item()


def test_a_single_replica_is_the_default_process_group_and_other_hosts_cannot_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "an interface")
    hook, before = sys.excepthook, gloo.open_sockets()
    group = ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"))
    group.form_from_environment()
    try:
        assert (dist.get_rank(), dist.get_world_size(), sum_of_ones()) == (0, 1, 1)
        assert group.process_group is dist.group.WORLD
        addresses = []
        for descriptor, _ in gloo.open_sockets() - before:
            with socket.socket(fileno=os.dup(descriptor)) as opened:
                if opened.family in (socket.AF_INET, socket.AF_INET6):
                    addresses.append(opened.getsockname()[0])
        assert set(addresses) <= {"127.0.0.1", "::1"}, addresses
        assert (os.environ["GLOO_SOCKET_IFNAME"], sys.excepthook) == ("an interface", hook)
    finally:
        group.destroy()
    assert not dist.is_initialized()
    with pytest.raises(WorkerError, match=r"trainer\.replica_group is known after program_reentry"):
        group.process_group  # noqa: B018


@pytest.mark.parametrize(
    "call",
    [
        sum_of_ones,
        lambda group: dist.all_gather([torch.zeros(1)], torch.ones(1), group=group),
        lambda group: dist.broadcast(torch.ones(1), 0, group=group),
        lambda group: dist.barrier(group=group),
        dist.get_world_size,
    ],
)
def test_groups_of_an_earlier_generation_are_refused(
    alone: ReplicaGroup, call: Callable[[dist.ProcessGroup], object]
) -> None:
    own, default = dist.new_group(), alone.process_group
    assert isinstance(own, dist.ProcessGroup)
    call(own)
    call(default)
    enter(alone, 2)
    for ended in (own, default):
        with pytest.raises(WorkerError, match=r"again .* when trainer\.generation has changed"):
            call(ended)
    call(alone.process_group)
    assert sum_of_ones() == 1


def test_a_group_that_the_program_has_initialized_for_itself_is_replaced() -> None:
    """As a framework does under `torchrun --nproc-per-node 1`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    before = dist.group.WORLD
    group = ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"), is_elastic=True)
    enter(group, 1)
    try:
        assert sum_of_ones() == 1
        with pytest.raises(WorkerError, match="of an earlier generation"):
            sum_of_ones(before)
    finally:
        group.destroy()


def a_default_group_of_several_processes_is_refused() -> None:
    group = ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"), is_elastic=True)
    with pytest.raises(WorkerError, match=r"of 2 processes, .* leave out torch\.distributed\.init_process"):
        enter(group, 1)
    assert sum_of_ones() == 2


RANKS: dict[str, Callable[[], None]] = {
    case.__name__: case for case in [a_default_group_of_several_processes_is_refused]
}


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    failures = run_cases("worker.test_process_group", "RANKS", 2, tmp_path)
    assert not failures[name], "\n".join(failures[name])
