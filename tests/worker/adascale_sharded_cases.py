"""Training loops of models that FSDP shards, on two ranks."""

import copy
import math
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from adascale import Observation
from adascale.errors import UnsupportedOptimizerError
from adascale_worker.adascale import AdaScale
from adascale_worker.scaling.statistics.norms import local_shard
from support.training import placed_on
from worker.adascale_problem import (
    Groups,
    Loop,
    backward,
    batches,
    network,
    one_group,
    squared_error,
    train_step,
    two_groups,
)
from worker.reference import Batch, Reference

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def assert_sharded_matches_reference(
    loop: Loop = train_step,
    *,
    micro: int = 1,
    reductions: int | None = None,
    steps: int = 6,
    groups: Groups = one_group,
    dtype: torch.dtype = torch.float64,
    shape: tuple[int, ...] = (2,),
    frozen: bool = False,
    adam: bool = False,
    as_torchtitan: bool = False,
    has_meshes: bool = False,
    **arguments: Any,
) -> AdaScale:
    """As `assert_matches_reference`, for `fully_shard`.

    Args:
        micro: passes of a rank in a step.
        reductions: reduce-scatters of a rank in a step, each of one micro-gradient; `micro` if None.
        has_meshes: whether modules, and parameters of one, are sharded over meshes of other shapes.
        as_torchtitan: whether modules are sharded together, and gradients summed: the loop divides the loss.
    """
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = network().to(dtype)
    model.first.requires_grad_(not frozen)
    reference_model = copy.deepcopy(model)
    tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    options: dict[str, Any] = {}
    if has_meshes:
        beside = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
        fully_shard(model.first, mesh=beside)
        options["shard_placement_fn"] = placed_on(beside, [model.second.bias])
    elif as_torchtitan:
        fully_shard([model.first, model.second], mesh=mesh)
    elif groups is not by_kind:
        fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh, **options)
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    settings: dict[str, Any] = {"lr": 0.05, **({} if adam else {"momentum": 0.9})}
    if as_torchtitan:
        for module in (model, model.first, model.second):
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    optimizer = AdaScale(
        kind(groups(model), **settings),
        num_gradients_to_accumulate=micro,
        model=model,
        **arguments,
    )
    plain_optimizer = kind(groups(reference_model), **settings)
    reference = Reference(reference_model, plain_optimizer, squared_error, optimizer.scale)
    stream = iter([(x.to(dtype), y.to(dtype)) for x, y in batches(2 * micro * steps)])
    batches_per_reduction = micro // (reductions or micro)
    for _ in range(steps):
        step = [next(stream) for _ in range(2 * micro)]
        loop(optimizer, model, step[dist.get_rank() * micro :][:micro])
        reference.step(
            [joined(step[i : i + batches_per_reduction]) for i in range(0, len(step), batches_per_reduction)]
        )
        for number in (None, *range(len(optimizer.param_groups))):
            assert optimizer.gain(number) == pytest.approx(reference.gain(number), rel=tolerance)
    for ours, theirs in zip(model.parameters(), reference_model.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=tolerance, atol=tolerance)
    return optimizer


def joined(batches_: list[Batch]) -> Batch:
    """Return one batch, whose gradient is the mean of those of the batches."""
    return torch.cat([x for x, _ in batches_]), torch.cat([y for _, y in batches_])


@case
def fully_sharded_parameters() -> None:
    """FSDP2: local gradients are read from the input of the reduce-scatter."""
    for groups, dtype in (
        (one_group, torch.float32),
        (one_group, torch.float64),
        (two_groups, torch.float64),
        (by_kind, torch.float64),
    ):
        for micro in (1, 2):
            assert_sharded_matches_reference(micro=micro, groups=groups, dtype=dtype)


@case
def parameters_that_are_sharded_over_different_meshes() -> None:
    for adam in (False, True):
        assert_sharded_matches_reference(has_meshes=True, groups=two_groups, micro=2, adam=adam)


class Replica:
    """Two processes that share one copy of a model, alone."""

    def add_shards(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def add_replicas(self, tensor: Tensor) -> None:
        pass


@case
def each_element_of_a_replica_counts_once() -> None:
    """Whether its parameter is sharded, copied, plain, or an expert that one of the processes has."""
    rank = dist.get_rank()
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    dense = init_device_mesh("cpu", (2,))
    shapes = {"dense": (4, 3), "copied": (5,), "plain": (3, 2), "experts": (2, 3)}
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}

    def part(name: str, whole: Tensor) -> Tensor:
        if name == "dense":
            return distribute_tensor(whole, dense, [Shard(0)])
        if name == "copied":
            return distribute_tensor(whole, copies, [Replicate(), Shard(0)])
        if name == "experts":
            return DTensor.from_local(whole[rank : rank + 1], copies["shards"], [Shard(0)])
        return whole.clone()

    for accumulation, adam in product((1, 2), (False, True)):
        initial, steps = draw(), [[draw() for _ in range(accumulation)] for _ in range(5)]
        kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
        gains: list[list[float]] = []
        for shards in (None, Replica()):
            own = part if shards else lambda _, whole: whole.clone()
            parameters = {name: nn.Parameter(own(name, whole)) for name, whole in initial.items()}
            optimizer = AdaScale(
                kind([{"params": [p]} for p in parameters.values()], lr=0.1),
                world_size=1,
                num_gradients_to_accumulate=accumulation,
                is_scaled_loss=False,
                observes_backward=False,
                shards=shards,
            )
            found: list[float] = []
            for step in steps:
                for number, micro in enumerate(step):
                    for group, (name, parameter) in enumerate(parameters.items()):
                        gradient = own(name, micro[name])
                        optimizer.statistics.reader.read(group, [parameter], [local_shard(gradient)])
                        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                    if number < accumulation - 1:
                        optimizer.statistics.reader.end(1.0)
                optimizer.statistics.measure(1.0)
                found += [optimizer.grad_sqr, optimizer.grad_var, *(optimizer.gain(n) for n in range(4))]
                optimizer.step()
                optimizer.zero_grad()
            gains.append(found)
        assert gains[1] == pytest.approx(gains[0], rel=1e-9)
        assert max(gains[0]) > 0.0


@case
def fully_sharded_parameters_with_a_frozen_module() -> None:
    assert_sharded_matches_reference(frozen=True)
    assert_sharded_matches_reference(synchronised(False, True), micro=2, reductions=1, frozen=True)


def synchronised(*passes: bool, scaled: bool = True, flag: str = "set_requires_gradient_sync") -> Loop:
    """A loop whose passes synchronise gradients or not; asserts that the step does not change the gain."""

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch, synchronises in zip(step, passes, strict=True):
            getattr(model, flag)(synchronises)
            backward(squared_error(model, batch) / (len(step) if scaled else 1))
        before = optimizer.gain()
        optimizer.step()
        assert optimizer.gain() == before
        optimizer.zero_grad()

    return loop


@case
def fully_sharded_parameters_with_passes_that_are_not_synchronised() -> None:
    """A reduce-scatter takes the sum over some passes: one micro-gradient of their batches together."""
    for groups in (one_group, two_groups, by_kind):
        assert_sharded_matches_reference(synchronised(False, True), micro=2, reductions=1, groups=groups)
    assert_sharded_matches_reference(
        synchronised(False, False, True), micro=3, reductions=1, dtype=torch.float32
    )
    assert_sharded_matches_reference(synchronised(False, True, False, True), micro=4, reductions=2)
    for micro, reductions in ((2, 1), (4, 2)):
        flags = [number % 2 == 1 for number in range(micro)]
        assert_sharded_matches_reference(
            synchronised(*flags, scaled=False), micro=micro, reductions=reductions, is_scaled_loss=False
        )


@case
def fully_sharded_replicas_whose_all_reduce_waits_for_the_last_pass() -> None:
    """HSDP, with a reduce-scatter on each pass."""
    loop = synchronised(False, False, True, flag="set_requires_all_reduce")
    assert_sharded_matches_reference(loop, micro=3, shape=(1, 2))
    assert_sharded_matches_reference(synchronised(False, True), micro=2, reductions=1, shape=(1, 2))


@case
def sharded_steps_with_unreadable_micro_gradients_are_left_out() -> None:
    shape: tuple[int, ...]
    for shape, flag, passes in (
        ((2,), "set_requires_gradient_sync", (True, False, True)),
        ((2,), "set_requires_gradient_sync", (True, True, False)),
        ((1, 2), "set_requires_all_reduce", (True, True, False)),
        ((2, 1), "set_requires_gradient_sync", (True, True, True)),
    ):
        model = network()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        fully_shard(model, mesh=mesh)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = AdaScale(sgd, num_gradients_to_accumulate=3, model=model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in range(3):
                synchronised(*passes, flag=flag)(optimizer, model, batches(3, seed=seed))
        assert optimizer.estimate is None
        assert sum("left out of the estimates" in str(warning.message) for warning in caught) == 1, shape


@case
def a_wrong_number_of_passes_of_a_sharded_model_is_left_out() -> None:
    for passes in ((True,), (False, True), (True, True, True, True)):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = AdaScale(sgd, num_gradients_to_accumulate=3, model=model)
        with pytest.warns(RuntimeWarning, match=f"got {len(passes)} backward passes in a step"):
            synchronised(*passes)(optimizer, model, batches(len(passes)))
        assert optimizer.estimate is None


@case
def a_skipped_step_of_a_sharded_model() -> None:
    """Skipped as by a GradScaler. The next step is left out without a warning, the following is measured."""
    for first in (True, False):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = AdaScale(sgd, num_gradients_to_accumulate=2, model=model)
        loop = synchronised(first, True)
        loop(optimizer, model, batches(2))
        estimate = optimizer.estimate
        for x, y in batches(2):
            backward(squared_error(model, (x * math.nan, y)))
        model.zero_grad()
        loop(optimizer, model, batches(2, seed=2))
        assert optimizer.estimate == estimate is not None
        loop(optimizer, model, batches(2, seed=3))
        assert optimizer.estimate != estimate


@case
def shards_that_cannot_be_measured_raise() -> None:
    """Tensor parallelism, with and without `fully_shard`, and `fully_shard` without the model argument."""
    plan: dict[str, ParallelStyle] = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallel = parallelize_module(network(), init_device_mesh("cpu", (2,)), plan)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shards", "tensor"))
    both = parallelize_module(network(), mesh["tensor"], plan)
    fully_shard(both, mesh=mesh["shards"])
    sharded = network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for model, model_argument in ((parallel, None), (parallel, parallel), (both, both), (sharded, None)):
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(UnsupportedOptimizerError, match=r"4 DTensors .*Shard.*model=model"):
            AdaScale(sgd, model=model_argument)
    experts = network()
    fully_shard(experts, mesh=mesh["tensor"])
    sgd = torch.optim.SGD(experts.parameters(), lr=0.05)
    with pytest.raises(UnsupportedOptimizerError, match=r"4 DTensors .* over all ranks"):
        AdaScale(sgd, model=experts)
    partly: Any = network()
    fully_shard(partly.second, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(partly, mesh=init_device_mesh("cpu", (2,)), ignored_params={partly.first.weight})
    sgd = torch.optim.SGD(partly.parameters(), lr=0.05)
    with pytest.raises(
        UnsupportedOptimizerError, match=r"got 1 parameters? that fully_shard did not shard.*root"
    ):
        AdaScale(sgd, model=partly)


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases in two groups, as for weight decay."""
    return [
        {"params": [p for name, p in model.named_parameters() if kind in name]} for kind in ("weight", "bias")
    ]


@case
def fully_sharded_parameters_of_adam() -> None:
    """The squares of the local gradients are reduce-scattered, because a rank has its second moments only."""
    for groups in (one_group, two_groups):
        for micro in (1, 2):
            assert_sharded_matches_reference(micro=micro, groups=groups, adam=True)
    assert_sharded_matches_reference(adam=True, dtype=torch.float32)
    assert_sharded_matches_reference(adam=True, frozen=True)


@case
def fully_sharded_parameters_that_are_observed() -> None:
    """The weights are those without AdaScale, and the estimates those of AdaScale in charge at a lr of 0."""
    weights: list[Tensor] = []
    gains: list[float] = []
    for lr, observes in ((0.05, False), (0.05, True), (0.0, False), (0.0, True)):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        plain_optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        seen: list[Observation] = []
        if observes or lr == 0.0:
            observe = seen.append if observes else False
            adascale = AdaScale(plain_optimizer, model=model, observe=observe, observe_every=1)
        optimizer = adascale if lr == 0.0 and not observes else plain_optimizer
        for number, batch in enumerate(batches(4)):
            if number % 2 == dist.get_rank():
                backward(squared_error(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        weights.append(torch.cat([p.full_tensor().flatten() for p in model.parameters()]))  # type: ignore[attr-defined]
        if lr == 0.0:
            gains.append(adascale.gain())
        if observes and dist.get_rank() == 0:
            assert [each.step for each in seen] == [2], "AdamW has no second moments before the first step"
    assert torch.equal(weights[0], weights[1])
    assert gains[0] == pytest.approx(gains[1], rel=1e-9)


@case
def fully_sharded_gradients_that_are_summed() -> None:
    """The loss of torchtitan is the sum over the tokens of a rank, divided by the tokens of all ranks."""

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch) / (2 * len(step)))
        optimizer.step()
        optimizer.zero_grad()

    for adam in (False, True):
        assert_sharded_matches_reference(loop, as_torchtitan=True, adam=adam, micro=2, dtype=torch.float32)
