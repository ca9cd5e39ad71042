"""Tests of the transfer of state between members, and of the routes it takes."""

from __future__ import annotations

import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.spawn import spawn

from adascale_core.messages.allocation import Member
from adascale_core.messages.channel import Assignment
from adascale_worker.membership.links import Formation, PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from adascale_worker.state import transfer
from adascale_worker.state.transfer import CHUNK, SMALL, Route, routes

NODES = st.sampled_from(["a", "b", "c"])


@given(nodes=st.lists(NODES, min_size=1, max_size=24), data=st.data())
def test_each_receiver_gets_the_state_once_in_chains_of_equal_length(
    nodes: list[str], data: st.DataObject
) -> None:
    ranks = range(len(nodes))
    sources = sorted(data.draw(st.sets(st.sampled_from(ranks), min_size=1)))
    receivers = [rank for rank in ranks if rank not in sources]
    found = routes(sources, receivers, nodes)
    lengths, reached = [], []
    for source in sources:
        length, rank = 0, source
        while rank in found and (target := found[rank].target) is not None:
            assert found[target].source == rank
            reached.append(target)
            length, rank = length + 1, target
        lengths.append(length)
    assert sorted(reached) == receivers
    assert max(lengths) - min(lengths) <= 1
    assert all((found[rank].source is None) == (rank in sources) for rank in found)


def test_the_state_comes_from_the_same_node_where_it_can() -> None:
    found = routes([0, 1], [2, 3, 4, 5], ["x", "y", "y", "x", "x", "y"])
    assert found[0] == Route(None, 3)
    assert found[1] == Route(None, 2)
    assert found[3] == Route(0, 4)
    assert found[2] == Route(1, 5)


def large_state() -> dict[str, Any]:
    """A state whose tensors need several messages, one message, and a message together with others."""
    generator = torch.Generator().manual_seed(7)
    return {
        "weights": torch.randn(CHUNK // 4 * 2 + 5, generator=generator),
        "half": torch.randn(SMALL, generator=generator).to(torch.bfloat16),
        "scalars": [torch.tensor(float(index)) for index in range(300)],
        "nothing": [torch.empty(0), torch.empty(3, 0, dtype=torch.int64)],
        "flags": torch.arange(70) % 3 == 0,
        "step": 12,
    }


STATES: list[Any] = [large_state(), {"step": 3}, [torch.empty(0)] * 2]


def equal(one: Any, other: Any) -> bool:
    """Whether two trees have equal values, tensors and types."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


class Aborted:
    """A group whose messages on a GPU are aborted, which only the GPU knows at first."""

    transfer_device = torch.device("cpu")

    def send(self, *_: object) -> None:
        """Start a message."""

    def wait(self, _: None) -> None:
        """Let the GPU wait."""

    def wait_for_device(self) -> None:
        raise PeersLostError


def test_a_transfer_ends_when_a_gpu_has_made_it() -> None:
    with pytest.raises(PeersLostError):
        transfer.transfer(Aborted(), Route(None, 1), large_state, {})  # type: ignore[arg-type]


REPLICAS = 5
SOURCES = [0, 2]


def transfer_states(rank: int, folder: Path) -> None:
    """Take part in transfers of all states as one rank, and check what arrives."""
    torch.set_num_threads(1)
    host = torch.device("cpu")
    group = ReplicaGroup(RankAssignment(rank, REPLICAS, rank), host, is_elastic=True)
    store, store_port = group.open_store("127.0.0.1") if rank == 0 else (None, 0)
    address = folder / "port"
    if rank == 0:
        (folder / "new").write_text(str(store_port))
        (folder / "new").rename(address)
    while not address.exists():
        time.sleep(0.01)
    members = tuple(Member(replica, "", "127.0.0.1", 0) for replica in range(REPLICAS))
    group.form(Assignment(1, rank, members, "", {}), store, Formation(int(address.read_text()), ()), "secret")
    assert group.transfer_device == host
    receivers = [each for each in range(REPLICAS) if each not in SOURCES]
    route = routes(SOURCES, receivers, [""] * REPLICAS)[rank]
    for state in STATES:
        received = transfer.transfer(group, route, partial(deepcopy, state), {})
        assert (route.source is None) == (received is None)
        assert received is None or equal(received, state)
    # Those that receive have followed, and one of them has another tensor.
    own = large_state()
    if rank == 3:
        own["half"][7] += 1
    known = transfer.find_known(group, SOURCES, lambda: own, has_followed=rank not in SOURCES)
    assert known.keys() == {"weights"}
    received = transfer.transfer(group, route, large_state, known)
    assert received is None or equal(received, large_state())
    assert received is None or received["weights"] is known["weights"]
    assert transfer.find_known(group, SOURCES, lambda: own, has_followed=False) == {}
    group.sum([1.0])
    group.destroy_before_finalization()


@pytest.mark.slow
def test_all_receivers_have_the_state_of_the_sources(tmp_path: Path) -> None:
    spawn(transfer_states, (tmp_path,), nprocs=REPLICAS)
