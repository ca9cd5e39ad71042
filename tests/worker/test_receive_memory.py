"""Tests of the memory that a new replica prepares for the state of the others."""

import ctypes
import mmap
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from adascale_worker.state.transfer import SMALL, ReceiveMemory, expected_sizes
from adascale_worker.state.tree import TensorLayout, flatten
from support.memory import release_free_memory

LARGE = TensorLayout(torch.float32, (1024, 9001))
"""Over 32 MiB, for which glibc always maps new memory: smaller tensors may lie in pages used before."""


def resident_pages(tensor: torch.Tensor) -> int:
    """Return how many of the pages that lie within a tensor are in memory."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    pages = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE - first
    found = (ctypes.c_ubyte * pages)()
    address, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(address, length, found) == 0
    return sum(each & 1 for each in found)


def prepared_bytes(memory: ReceiveMemory) -> int:
    """Return how many bytes are prepared and not used."""
    return sum(each.numel() for free in memory._free.values() for each in free)


def test_each_part_is_mapped_before_it_is_used_and_used_once() -> None:
    release_free_memory()
    memory = ReceiveMemory([LARGE.bytes, LARGE.bytes, SMALL])
    assert prepared_bytes(memory) == 2 * LARGE.bytes
    first, second, third = (memory.tensor(LARGE) for _ in range(3))
    assert len({each.data_ptr() for each in (first, second, third)}) == 3
    for tensor in (first, second):
        assert resident_pages(tensor) >= tensor.nbytes // mmap.PAGESIZE - 1
    assert resident_pages(third) < third.nbytes // mmap.PAGESIZE // 2
    for tensor in (first, second, third):
        assert (tensor.shape, tensor.dtype) == (LARGE.shape, LARGE.dtype)
        tensor.fill_(2.5)
    assert torch.equal(first, second)
    assert prepared_bytes(memory) == 0


def test_another_size_gets_memory_of_its_own() -> None:
    memory = ReceiveMemory([LARGE.bytes])
    assert memory.tensor(TensorLayout(torch.int64, (3,))).shape == (3,)
    assert memory.tensor(TensorLayout(torch.uint8, (LARGE.bytes + 1,))).numel() == LARGE.bytes + 1
    assert prepared_bytes(memory) == LARGE.bytes
    memory.clear()
    assert prepared_bytes(memory) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    ],
    ids=["SGD", "momentum", "AdamW", "AMSGrad"],
)
def test_the_expected_sizes_are_those_after_a_step(
    make: Callable[[object], torch.optim.Optimizer],
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 2))
    model[2].bias.requires_grad = False
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    expected = expected_sizes(model, optimizer)
    model(torch.ones(4, 600)).sum().backward()
    optimizer.step()
    _, tensors = flatten({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    # Adam counts its steps in a tensor of one number.
    assert sorted(expected) == sorted(
        tensor.nbytes for tensor in tensors if tensor.shape or tensor.nbytes == 8
    )


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of four processes, of which this is the second; the others do not exist, and nothing is exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_memory_is_prepared_for_the_shards_of_this_process_alone(mesh: DeviceMesh) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1200, 1200), torch.nn.Linear(1200, 1200))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shards = [value.to_local().nbytes for value in model.state_dict().values()]
    assert sorted(expected_sizes(model, optimizer)) == sorted(3 * shards)
