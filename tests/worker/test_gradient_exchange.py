"""The exchange of gradients in buckets."""

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from adascale_worker.gradients import exchange as module
from adascale_worker.gradients.exchange import GradientExchange
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from support.memory import release_free_memory
from worker.adascale_ranks import run_cases

SIZE = 3000
"""Of a square matrix with over 32 MiB, for which glibc always maps new memory."""


def resident_bytes() -> int:
    """Return how much memory of this process is mapped."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def group_of(rank: int, replicas: int) -> ReplicaGroup:
    return ReplicaGroup(RankAssignment(rank, replicas), torch.device("cpu"))


def test_the_memory_of_gradients_is_mapped_before_the_first_step_and_no_gradient_is_set() -> None:
    model = nn.Linear(SIZE, SIZE)
    exchange = GradientExchange(list(model.parameters()), group_of(0, 2))
    release_free_memory()
    before = resident_bytes()
    exchange.prepare((True, True))
    assert exchange._mapping is not None
    exchange._mapping.join()
    assert resident_bytes() - before >= 0.95 * model.weight.nbytes
    assert [parameter.grad for parameter in model.parameters()] == [None] * 2


# -- two ranks ---------------------------------------------------------------------------------------------


class Exchanged:
    """A model of several buckets, and the means of its gradients over two ranks."""

    def __init__(self, layers: int = 3) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
        self.parameters: list[Tensor] = list(self.model.parameters())
        self.exchange = GradientExchange(self.parameters, group_of(dist.get_rank(), 2))
        self.exchange.use(tuple(True for _ in self.parameters))
        self.began: list[int] = []
        self.before_flush = 0

    def take(self, positions: Sequence[int]) -> list[Tensor | None]:
        self.began += positions
        taken = [self.parameters[position].grad for position in positions]
        for position in positions:
            self.parameters[position].grad = None
        return taken

    def means(self, backward: Callable[[], None], *, keeps_means: bool = False) -> list[Tensor | None]:
        self.began.clear()
        self.exchange.begin(self.take, is_early=True, keeps_means=keeps_means)
        backward()
        self.before_flush = len(self.began)
        self.exchange.flush()
        means = dict(self.exchange.means())
        return [means.get(position) for position in range(len(self.parameters))]


def expected(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
    means = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        mean = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        dist.all_reduce(mean)
        means.append(mean / 2)
    return means


def buckets_begin_in_the_pass() -> None:
    """All but the last, whose first parameters get their gradients last."""
    module.BUCKET_BYTES = 170
    each = Exchanged()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    local = torch.autograd.grad(each.model(x).pow(2).sum(), each.parameters)
    for _ in range(2):
        means = each.means(lambda: each.model(x).pow(2).sum().backward())
        assert each.before_flush == 4
        for mean, right in zip(means, expected(local, each.parameters), strict=True):
            assert mean is not None
            torch.testing.assert_close(mean, right)


def a_parameter_has_a_gradient_where_a_replica_has_used_it() -> None:
    module.BUCKET_BYTES = 170
    each = Exchanged()
    layers = list(each.model)
    x = torch.ones(2, 6)

    def backward() -> None:
        (layers[0](x).sum() if dist.get_rank() else layers[1](x).sum()).backward()

    means = each.means(backward)
    assert [mean is None for mean in means] == [False] * 4 + [True] * 2
    for mean, right in zip(means[:4], [torch.ones(6, 6), torch.ones(6)] * 2, strict=True):
        assert mean is not None
        torch.testing.assert_close(mean, right)


def a_replica_without_a_backward_pass_gets_the_means() -> None:
    each = Exchanged()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    local = torch.autograd.grad(each.model(x).pow(2).sum(), each.parameters)
    for _ in range(2):
        means = each.means(lambda: None if dist.get_rank() else each.model(x).pow(2).sum().backward())
        for mean, gradient in zip(means, local, strict=True):
            assert mean is not None
            torch.testing.assert_close(mean, gradient / 2)


def means_that_are_still_used_keep_their_memory() -> None:
    each = Exchanged(1)
    first = each.means(lambda: each.model(torch.ones(2, 6)).sum().backward())
    kept = [mean.clone() for mean in first if mean is not None]
    each.means(lambda: each.model(3 * torch.ones(2, 6)).sum().backward(), keeps_means=True)
    assert all(map(torch.equal, kept, [mean for mean in first if mean is not None]))


def gradients_have_the_layout_of_their_parameters() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    exchange = GradientExchange([parameter], group_of(dist.get_rank(), 2))
    exchange.use((True,))
    gradient = torch.randn(4, 3, 5, 5)
    exchange.begin(lambda _: [gradient], is_early=False, keeps_means=False)
    exchange.flush()
    ((_, mean),) = exchange.means()
    assert mean.stride() == parameter.stride()
    torch.testing.assert_close(mean.contiguous(), expected([gradient], [parameter.detach()])[0].contiguous())


RANKS: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in [
        buckets_begin_in_the_pass,
        a_parameter_has_a_gradient_where_a_replica_has_used_it,
        a_replica_without_a_backward_pass_gets_the_means,
        means_that_are_still_used_keep_their_memory,
        gradients_have_the_layout_of_their_parameters,
    ]
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What has failed on two ranks, by the name of the case."""
    return run_cases("worker.test_gradient_exchange", "RANKS", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[name], "\n".join(failures[name])
