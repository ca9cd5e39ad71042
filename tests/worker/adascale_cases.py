"""Training loops on two ranks. Each compares what it does with the reference twin."""

import copy
import functools
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adascale_worker.adascale import AdaScale
from adascale_worker.supported_optimizers import UnsupportedOptimizerError
from worker.adascale_problem import (
    PUBLIC_VALUES,
    Net,
    backward,
    batches,
    network,
    one_group,
    squared_error,
    two_groups,
)
from worker.reference import Batch, Reference

Wrapped = DistributedDataParallel
Groups = Callable[[nn.Module], list[dict[str, Any]]]
Loop = Callable[[AdaScale, nn.Module, list[Batch]], None]

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def plain(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
    for number, batch in enumerate(step):
        last = number == len(step) - 1
        with nullcontext() if last or not isinstance(model, Wrapped) else model.no_sync():
            backward(squared_error(model, batch) / len(step))
    optimizer.step()
    optimizer.zero_grad()


def compare(
    loop: Loop = plain,
    *,
    micro: int = 1,
    steps: int = 8,
    groups: Groups = one_group,
    known: bool = True,
    model: nn.Module | None = None,
    twin_model: nn.Module | None = None,
    wrap: Callable[[nn.Module], nn.Module] = Wrapped,
    sgd: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    tolerance: float = 1e-9,
    data: Callable[[int], list[Batch]] = batches,
    **arguments: Any,
) -> AdaScale:
    """Train by `loop` on all ranks and by the reference, and require the same after every step."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = network() if model is None else model
    twin_model = copy.deepcopy(model) if twin_model is None else twin_model
    settings = {"lr": 0.05, "momentum": 0.9, **(options or {})}
    wrapped = wrap(model)
    optimizer = AdaScale(
        sgd(groups(model), **settings),
        num_gradients_to_accumulate=micro,
        model=wrapped if known else None,
        **arguments,
    )
    twin = Reference(
        twin_model,
        torch.optim.SGD(groups(twin_model), **settings),
        squared_error,
        optimizer.scale,
        smoothing=optimizer.smoothing,
        clip=clip,
    )
    everything = iter(data(steps * micro * ranks))
    for _ in range(steps):
        step = [next(everything) for _ in range(micro * ranks)]
        loop(optimizer, wrapped, step[rank * micro : (rank + 1) * micro])
        twin.step(step)
        same(optimizer, model, twin, tolerance)
    return optimizer


def same(optimizer: AdaScale, model: nn.Module, twin: Reference, tolerance: float = 1e-9) -> None:
    """Require the reference's gains and weights, and all ranks' gains to be equal to the bit."""
    for number in (None, *range(len(optimizer.param_groups))):
        assert optimizer.gain(number) == pytest.approx(twin.gain(number), rel=tolerance)
    for ours, theirs in zip(model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    gains = torch.tensor([optimizer.gain()], dtype=torch.float64)
    every = [torch.zeros_like(gains) for _ in range(dist.get_world_size())]
    dist.all_gather(every, gains)
    assert all(torch.equal(gain, gains) for gain in every)


@case
def public_values() -> None:
    variants: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]
    for known in (True, False):
        for options in variants:
            for one, other, gain in PUBLIC_VALUES:
                model = Wrapped(nn.Linear(2, 2), **options)
                sgd = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = AdaScale(sgd, model=model if known else None)
                backward(model(torch.tensor((one, other)[dist.get_rank()])).sum())
                if dist.get_rank() == 0:  # asking is no collective
                    assert optimizer.gain() == pytest.approx(gain, abs=1e-6)
                optimizer.step()
                assert optimizer.gain() == pytest.approx(gain, abs=1e-6)


@case
def ddp_with_the_model_known() -> None:
    compare()
    compare(groups=two_groups)


@case
def ddp_with_the_model_unknown() -> None:
    compare(known=False)
    compare(known=False, groups=two_groups)


@case
def ddp_options() -> None:
    options: dict[str, Any]
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-5},
    ):
        for known in (True, False):
            for micro in (1, 2):
                if micro == 2 and "static_graph" in options:
                    continue  # DDP itself does not allow no_sync() in the first step of a static graph
                compare(wrap=functools.partial(Wrapped, **options), known=known, micro=micro, steps=4)


@case
def zero_grad_in_place() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        optimizer.zero_grad(set_to_none=False)
        for batch in step:
            backward(squared_error(model, batch))
        optimizer.step()

    for view in (True, False):
        compare(loop, wrap=functools.partial(Wrapped, gradient_as_bucket_view=view))


@case
def accumulation_with_no_sync() -> None:
    for known in (True, False):
        for micro in (2, 3):
            compare(micro=micro, known=known)


@case
def accumulation_without_no_sync() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch) / len(step))
        optimizer.step()
        optimizer.zero_grad()

    compare(loop, micro=2)
    compare(loop, micro=2, wrap=functools.partial(Wrapped, gradient_as_bucket_view=True))


@case
def accumulation_of_a_summed_loss() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        assert isinstance(model, Wrapped)
        for number, batch in enumerate(step):
            with nullcontext() if number == len(step) - 1 else model.no_sync():
                backward(squared_error(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    compare(loop, micro=2, is_scaled_loss=False)


@case
def a_closure() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = squared_error(model, step[0])
            backward(loss)
            return loss.item()

        optimizer.step(closure)

    compare(loop)


@case
def clipping() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        backward(squared_error(model, step[0]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()

    compare(loop, clip=0.2)
    compare(loop, clip=0.2, known=False)


class Partly(Net):
    """Uses its second layer for some batches only."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.second(hidden) if float(x[0, 0].detach()) > 0 else hidden[:, :2]
        return out


@case
def unused_parameters() -> None:
    """Some steps use a layer on one rank only, some on none."""
    for known in (True, False):
        compare(
            model=Partly().double(),
            wrap=functools.partial(Wrapped, find_unused_parameters=True),
            groups=two_groups,
            known=known,
            options={"momentum": 0.0},
            steps=12,
        )


@case
def frozen_parameters() -> None:
    model = network()
    model.first.bias.requires_grad_(False)
    compare(model=model)


@case
def activation_checkpointing() -> None:
    class Checkpointed(Net):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            hidden = checkpoint(lambda v: torch.tanh(self.first(v)), x, use_reentrant=self.reentrant)
            out: Tensor = self.second(hidden)
            return out

    for reentrant in (False, True):
        for static in (False, True):
            for known in (False, True):
                torch.manual_seed(0)
                compare(
                    model=Checkpointed(reentrant=reentrant).double(),
                    twin_model=network(),
                    wrap=functools.partial(Wrapped, static_graph=static),
                    known=known,
                )


@case
def compression_hooks() -> None:
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):

        def wrap(model: nn.Module, hook: Any = hook) -> nn.Module:
            wrapped = Wrapped(model)
            wrapped.register_comm_hook(None, hook)
            return wrapped

        compare(wrap=wrap, model=network().float(), tolerance=0.02, data=floats)


def floats(count: int) -> list[Batch]:
    return [(x.float(), y.float()) for x, y in batches(count)]


@case
def power_sgd() -> None:
    """Statistics are of the true gradients, while the steps are made with the approximation."""
    model = wide_network()
    twin_model = copy.deepcopy(model)
    wrapped = Wrapped(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = AdaScale(sgd, model=wrapped)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    # Registered after AdaScale was made: the order does not matter.
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    twin = Reference(twin_model, torch.optim.SGD(twin_model.parameters(), lr=0.0), squared_error, 2.0)
    everything = iter(batches(16))
    for _ in range(8):
        step = [next(everything), next(everything)]
        plain(optimizer, wrapped, [(step[dist.get_rank()][0].float(), step[dist.get_rank()][1].float())])
        twin.step([(x.float(), y.float()) for x, y in step])
        same(optimizer, model, twin, 1e-4)
    assert state.total_numel_after_compression > 0


def wide_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))


@case
def zero_redundancy_optimizer() -> None:
    def sharded(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
        first, *others = groups
        optimizer = ZeroRedundancyOptimizer(first["params"], torch.optim.SGD, **settings)
        for group in others:
            optimizer.add_param_group(group)
        return optimizer

    compare(sgd=sharded)
    optimizer = compare(sgd=sharded, groups=two_groups)
    inner = optimizer.optimizer
    assert isinstance(inner, ZeroRedundancyOptimizer)
    inner.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert "adascale" in optimizer.state_dict()


def compare_sharded(
    loop: Loop = plain,
    *,
    micro: int = 1,
    parts: int | None = None,
    steps: int = 6,
    groups: Groups = one_group,
    dtype: torch.dtype = torch.float64,
    shape: tuple[int, ...] = (2,),
    frozen: bool = False,
    **arguments: Any,
) -> AdaScale:
    """As `compare`, for `fully_shard`: a rank's passes in `parts` reduce-scatters, each a micro-gradient."""
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = network().to(dtype)
    model.first.requires_grad_(not frozen)
    twin_model = copy.deepcopy(model)
    tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    if groups is not by_kind:
        fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    optimizer = AdaScale(
        torch.optim.SGD(groups(model), **settings),
        num_gradients_to_accumulate=micro,
        model=model,
        **arguments,
    )
    sgd = torch.optim.SGD(groups(twin_model), **settings)
    twin = Reference(twin_model, sgd, squared_error, optimizer.scale)
    everything = iter([(x.to(dtype), y.to(dtype)) for x, y in batches(2 * micro * steps)])
    together = micro // (parts or micro)
    for _ in range(steps):
        step = [next(everything) for _ in range(2 * micro)]
        loop(optimizer, model, step[dist.get_rank() * micro :][:micro])
        twin.step([joined(step[i : i + together]) for i in range(0, len(step), together)])
        for number in (None, *range(len(optimizer.param_groups))):
            assert optimizer.gain(number) == pytest.approx(twin.gain(number), rel=tolerance)
    for ours, theirs in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=tolerance, atol=tolerance)
    return optimizer


def joined(parts: list[Batch]) -> Batch:
    """One batch, whose gradient is the mean of theirs."""
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


@case
def fully_sharded_parameters() -> None:
    """FSDP2: local gradients are read as they go into the reduce-scatter."""
    for groups, dtype in (
        (one_group, torch.float32),
        (one_group, torch.float64),
        (two_groups, torch.float64),
        (by_kind, torch.float64),
    ):
        for micro in (1, 2):
            compare_sharded(micro=micro, groups=groups, dtype=dtype)


@case
def fully_sharded_parameters_of_which_a_unit_is_frozen() -> None:
    compare_sharded(frozen=True)
    compare_sharded(synchronised(False, True), micro=2, parts=1, frozen=True)


def synchronised(*passes: bool, scaled: bool = True, flag: str = "set_requires_gradient_sync") -> Loop:
    """A loop whose passes synchronise gradients or not; the gain is known from the last pass on."""

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch, one in zip(step, passes, strict=True):
            getattr(model, flag)(one)
            backward(squared_error(model, batch) / (len(step) if scaled else 1))
        before = optimizer.gain()
        optimizer.step()
        assert optimizer.gain() == before
        optimizer.zero_grad()

    return loop


@case
def fully_sharded_parameters_with_passes_that_are_not_synchronised() -> None:
    """A reduce-scatter takes the sum over some passes: a micro-gradient of as large a batch."""
    for groups in (one_group, two_groups, by_kind):
        compare_sharded(synchronised(False, True), micro=2, parts=1, groups=groups)
    compare_sharded(synchronised(False, False, True), micro=3, parts=1, dtype=torch.float32)
    compare_sharded(synchronised(False, True, False, True), micro=4, parts=2)
    for micro, parts in ((2, 1), (4, 2)):
        every = [number % 2 == 1 for number in range(micro)]
        compare_sharded(synchronised(*every, scaled=False), micro=micro, parts=parts, is_scaled_loss=False)


@case
def fully_sharded_replicas_whose_all_reduce_waits_for_the_last_pass() -> None:
    """HSDP, with a reduce-scatter on each pass."""
    loop = synchronised(False, False, True, flag="set_requires_all_reduce")
    compare_sharded(loop, micro=3, shape=(1, 2))
    compare_sharded(synchronised(False, True), micro=2, parts=1, shape=(1, 2))


@case
def sharded_steps_that_do_not_show_their_micro_gradients() -> None:
    """Left out, with a warning."""
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
        assert len([one for one in caught if "left out of the estimates" in str(one.message)]) == 1, shape


@case
def a_wrong_number_of_passes_of_a_sharded_model() -> None:
    for passes in ((True,), (False, True), (True, True, True, True)):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = AdaScale(sgd, num_gradients_to_accumulate=3, model=model)
        with pytest.warns(RuntimeWarning, match=f"got {len(passes)} backward passes in a step"):
            synchronised(*passes)(optimizer, model, batches(len(passes)))
        assert optimizer.estimate is None


@case
def a_step_of_a_sharded_model_that_is_skipped() -> None:
    """As a GradScaler does it. The next step is left out without a warning, the one after it is measured."""
    for first in (True, False):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = AdaScale(sgd, num_gradients_to_accumulate=2, model=model)
        loop = synchronised(first, True)
        loop(optimizer, model, batches(2))
        known = optimizer.estimate
        for x, y in batches(2):
            backward(squared_error(model, (x * math.nan, y)))
        model.zero_grad()
        loop(optimizer, model, batches(2, seed=2))
        assert optimizer.estimate == known is not None
        loop(optimizer, model, batches(2, seed=3))
        assert optimizer.estimate != known


@case
def shards_that_cannot_be_measured_are_refused() -> None:
    """Tensor parallelism, with and without `fully_shard`, and shards of a model that is not told."""
    plan: dict[str, ParallelStyle] = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallel = parallelize_module(network(), init_device_mesh("cpu", (2,)), plan)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shards", "tensor"))
    both = parallelize_module(network(), mesh["tensor"], plan)
    fully_shard(both, mesh=mesh["shards"])
    sharded = network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for model, told in ((parallel, None), (parallel, parallel), (both, both), (sharded, None)):
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(UnsupportedOptimizerError, match=r"4 DTensors .*Shard.*model=model"):
            AdaScale(sgd, model=told)
    partly: Any = network()
    fully_shard(partly.second, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(partly, mesh=init_device_mesh("cpu", (2,)), ignored_params={partly.first.weight})
    sgd = torch.optim.SGD(partly.parameters(), lr=0.05)
    with pytest.raises(
        UnsupportedOptimizerError, match=r"got 1 parameters? that fully_shard did not shard.*root"
    ):
        AdaScale(sgd, model=partly)


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases apart, as for weight decay."""
    return [
        {"params": [p for name, p in model.named_parameters() if kind in name]} for kind in ("weight", "bias")
    ]


@case
def gradients_averaged_by_hand() -> None:
    """Without DistributedDataParallel: an all-reduce between backward and step."""

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch) / len(step))
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()

    compare(loop, wrap=lambda model: model, known=False)
    compare(loop, wrap=lambda model: model, known=False, micro=2)


@case
def a_grad_scaler() -> None:
    for told in (True, False):
        for known in (True, False):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

            def loop(
                optimizer: AdaScale,
                model: nn.Module,
                step: list[Batch],
                scaler: torch.amp.GradScaler = scaler,
            ) -> None:
                backward(scaler.scale(squared_error(model, step[0])))
                scaler.step(optimizer)
                scaler.update()
                model.zero_grad()

            compare(loop, known=known, grad_scaler=scaler if told else None)


@case
def a_step_that_a_grad_scaler_skips() -> None:
    for known in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        model = network()
        twin_model = copy.deepcopy(model)
        wrapped = Wrapped(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = AdaScale(sgd, model=wrapped if known else None)
        twin = Reference(twin_model, torch.optim.SGD(twin_model.parameters(), lr=0.05), squared_error, 2.0)
        everything = iter(batches(20))
        for number in range(8):
            step = [next(everything), next(everything)]
            x, y = step[dist.get_rank()]
            bad = number == 4 and dist.get_rank() == 1
            backward(scaler.scale(squared_error(wrapped, (x * math.nan if bad else x, y))))
            scaler.step(optimizer)
            scaler.update()
            wrapped.zero_grad()
            if number != 4:
                twin.step(step)
            same(optimizer, model, twin)


@case
def flags_are_summed_on_the_same_steps() -> None:
    model = network()
    wrapped = Wrapped(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = AdaScale(sgd, model=wrapped, sample_every=3)
    sums = []
    for number in range(8):
        optimizer.flags = (float(number), float(dist.get_rank()))
        plain(optimizer, wrapped, [batches(2, seed=number)[dist.get_rank()]])
        sums.append(optimizer.flags_sum)
    assert sums == [(0.0, 1.0), None, None, (6.0, 1.0), None, None, (12.0, 1.0), None]


@case
def ranks_stay_equal_when_fewer_steps_are_measured() -> None:
    """By default: all of the first hundred steps, then every 16th; the weights stay the same to the bit."""
    model = network()
    wrapped = Wrapped(model)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model=wrapped)
    optimizer.flags = (1.0,)
    heard = []
    for number in range(150):
        plain(optimizer, wrapped, [batches(2, seed=number)[dist.get_rank()]])
        if optimizer.flags_sum is not None:
            assert optimizer.flags_sum == (2.0,)
            heard.append(number)
    assert heard == [*range(100), 112, 128, 144]
    for parameter in model.parameters():
        every = [torch.zeros_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.detach())
        assert all(torch.equal(one, parameter) for one in every)


@case
def one_small_all_reduce_a_step() -> None:
    """Counted with the profiler, beside plain DDP."""

    def reductions(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
        with torch.profiler.profile() as profile:
            for number in range(4):
                backward(squared_error(model, batches(1, seed=number)[0]))
                optimizer.step()
                optimizer.zero_grad()
        return sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")

    plain_model = Wrapped(network())
    expected = reductions(torch.optim.SGD(plain_model.parameters(), lr=0.01), plain_model)
    model = Wrapped(network())
    groups = two_groups(model.module)
    ours = reductions(AdaScale(torch.optim.SGD(groups, lr=0.01), model=model), model)
    assert ours == expected + 4
    model = Wrapped(network())
    seldom = AdaScale(torch.optim.SGD(model.parameters(), lr=0.01), model=model, sample_every=4)
    assert reductions(seldom, model) == expected + 1


@case
def gradients_are_what_ddp_makes_them() -> None:
    for view in (True, False):
        ours, theirs = (Wrapped(network(), gradient_as_bucket_view=view) for _ in range(2))
        optimizer = AdaScale(torch.optim.SGD(ours.parameters(), lr=0.05), model=ours)
        for number in range(3):
            batch = batches(2, seed=number)[dist.get_rank()]
            for model in (ours, theirs):
                backward(squared_error(model, batch))
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert torch.equal(one.grad, other.grad)
            optimizer.zero_grad()
            theirs.zero_grad()


@case
def uneven_inputs() -> None:
    """Rank 1 runs out of data first. Its peer's last steps are left out of the estimates."""
    model = network()
    twin_model = copy.deepcopy(model)
    wrapped = Wrapped(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = AdaScale(sgd, model=wrapped)
    twin = Reference(twin_model, torch.optim.SGD(twin_model.parameters(), lr=0.05), squared_error, 2.0)
    everything = batches(24)
    known = []
    with Join([wrapped, optimizer]):
        for batch in everything[dist.get_rank() :: 2][: 6 - 2 * dist.get_rank()]:
            plain(optimizer, wrapped, [batch])
            known.append(optimizer.estimate)
    for number in range(4):
        twin.step(everything[2 * number : 2 * number + 2])
    assert known[3] is not None
    assert optimizer.estimate == known[3]
    assert (known[3].grad_sqr, known[3].grad_var) == pytest.approx(twin.estimate(), rel=1e-9)
    # Afterwards all ranks measure the same steps again.
    plain(optimizer, wrapped, [batches(2)[dist.get_rank()]])
    assert optimizer.estimate != known[3]


@case
def uneven_inputs_that_adascale_is_not_told_of() -> None:
    model = network()
    wrapped = Wrapped(model)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), model=wrapped)
    with warnings.catch_warnings(record=True) as caught, wrapped.join():
        warnings.simplefilter("always")
        for batch in batches(6 - 2 * dist.get_rank()):
            plain(optimizer, wrapped, [batch])
    assert [str(warning.message) for warning in caught if "Join([model, optimizer])" in str(warning.message)]
    assert optimizer.estimate is None


@case
def state_saved_by_two_ranks_loads_on_one() -> None:
    optimizer = compare(micro=2)
    model = network()
    alone = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), world_size=1, scale=8.0)
    alone.load_state_dict(optimizer.state_dict())
    assert alone.estimate == optimizer.estimate
    assert alone.gain() == optimizer.predict_gain(8.0)
    for batch in batches(3):
        backward(squared_error(model, batch))
        alone.step()
        alone.zero_grad()
    assert alone.estimate is not None
    assert alone.estimate.biased

    again = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    again.load_state_dict(alone.state_dict())
    assert again.scale == 2.0
    wrapped = Wrapped(model)
    plain(again, wrapped, [batches(2)[dist.get_rank()]])
    assert again.estimate is not None
    assert not again.estimate.biased


@case
def fewer_and_more_replicas_on_the_way() -> None:
    """As the elastic trainer tells it: the estimate stays, the number of micro-gradients changes."""
    model = network()
    wrapped = Wrapped(model)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), world_size=1, scale=4.0, model=wrapped)
    optimizer.update_scale(4.0, 2)
    optimizer.set_num_gradients_to_accumulate(2)
    plain(optimizer, wrapped, batches(4)[2 * dist.get_rank() :][:2])
    known = optimizer.estimate
    assert known is not None
    assert not known.biased
    optimizer.update_scale(16.0, 2)
    assert optimizer.estimate == known
    assert optimizer.gain() == known.gain(16.0)
