"""Tests of data parallelism in place."""

import mmap
from pathlib import Path

import torch
from torch import nn

from adascale_worker.gradients.data_parallel import DataParallelModel, warm_up
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from support.memory import release_free_memory

SIZE = 3000
"""Of a square matrix with over 32 MiB, for which glibc always maps new memory."""


def resident_bytes() -> int:
    """Return how much memory of this process is mapped."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_the_memory_of_gradients_is_mapped_before_the_first_step_and_no_gradient_is_set() -> None:
    torch.manual_seed(0)
    first = nn.Linear(SIZE, SIZE)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(SIZE, 2))
    model[2].bias.requires_grad = False
    group = ReplicaGroup(RankAssignment(0, 1, 0, None, None), torch.device("cpu"), is_elastic=True)
    parallel = DataParallelModel(model, torch.device("cpu"), group)
    warm_up()
    release_free_memory()
    before = resident_bytes()
    parallel.prepare()
    assert resident_bytes() - before >= 0.95 * first.weight.nbytes
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    ddp = parallel.ddp
    assert ddp is not None
    x = torch.randn(2, SIZE)
    ddp(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    parallel.original_forward(x).sum().backward()
    assert gradients[3] is None
    for gradient, parameter in zip(gradients[:3], model.parameters(), strict=False):
        assert gradient is not None
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad)
    # A generation with one replica needs no DDP.
    parallel.connect()
    assert parallel.ddp is None
