"""Tests of data parallelism in place."""

import copy
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from adascale_worker.gradients.data_parallel import DataParallelModel, warm_up
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from support.memory import release_free_memory
from worker.adascale_ranks import run_cases

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
    nn.Sequential.forward(model, x).sum().backward()  # type: ignore[no-untyped-call]
    assert gradients[3] is None
    for gradient, parameter in zip(gradients[:3], model.parameters(), strict=False):
        assert gradient is not None
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad)
    # A generation with one replica needs no DDP.
    parallel.connect()
    assert parallel.ddp is None


# -- two ranks ---------------------------------------------------------------------------------------------


def two_forward_passes_before_a_backward_pass_with_batch_normalization() -> None:
    """The gradients are the means over the ranks, and the statistics are those of rank 0 afterwards."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    group = ReplicaGroup(RankAssignment(dist.get_rank(), 2, 0, None, None), torch.device("cpu"))
    parallel = DataParallelModel(model, torch.device("cpu"), group)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        x, y = torch.randn(2, 5, 3)
        (model(x) - model(y)).pow(2).mean().backward()
        parallel.end_backward()
        (twin(x) - twin(y)).pow(2).mean().backward()
    for own, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None
        assert plain.grad is not None
        dist.all_reduce(plain.grad)
        torch.testing.assert_close(own.grad, plain.grad / 2)
    # The next forward pass begins with the statistics of rank 0, which has updated them itself.
    same = torch.ones(5, 3)
    for each in (model, twin):
        each(same)
    for buffer, expected in zip(model.buffers(), twin.buffers(), strict=True):
        dist.broadcast(expected, 0)
        torch.testing.assert_close(buffer, expected)


RANKS: dict[str, Callable[[], None]] = {
    case.__name__: case for case in [two_forward_passes_before_a_backward_pass_with_batch_normalization]
}


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    failures = run_cases("worker.test_data_parallel", "RANKS", 2, tmp_path)
    assert not failures[name], "\n".join(failures[name])
