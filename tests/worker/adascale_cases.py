"""Training loops on two ranks. Most are compared with `worker.reference`."""

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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adascale.errors import UnsupportedOptimizerError
from adascale_worker.adascale import AdaScale
from worker import adascale_problem
from worker.adascale_problem import (
    PUBLIC_VALUES,
    Net,
    assert_equal,
    backward,
    batches,
    matrices,
    network,
    squared_error,
    train_step,
    two_groups,
    with_empty_groups,
)
from worker.reference import Batch, Reference

CASES: dict[str, Callable[[], None]] = {}
Wrapped = DistributedDataParallel
assert_matches_reference = functools.partial(
    adascale_problem.assert_matches_reference, wrap=Wrapped, model_given=True, steps=5
)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


@case
def public_values() -> None:
    variants: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]
    for model_given in (True, False):
        for options in variants:
            for first, second, gain in PUBLIC_VALUES:
                model = Wrapped(nn.Linear(2, 2), **options)
                sgd = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = AdaScale(sgd, model=model if model_given else None)
                backward(model(torch.tensor((first, second)[dist.get_rank()])).sum())
                if dist.get_rank() == 0:  # reading the gain is no collective
                    assert optimizer.gain() == pytest.approx(gain, abs=1e-6)
                optimizer.step()
                assert optimizer.gain() == pytest.approx(gain, abs=1e-6)


@case
def ddp_with_model_argument() -> None:
    assert_matches_reference()
    assert_matches_reference(groups=two_groups)


@case
def groups_without_parameters() -> None:
    for model_given in (True, False):
        assert_matches_reference(model_given=model_given, groups=with_empty_groups)


@case
def ddp_without_model_argument() -> None:
    assert_matches_reference(model_given=False)
    assert_matches_reference(model_given=False, groups=two_groups)


@case
def ddp_options() -> None:
    options: dict[str, Any]
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-5},
    ):
        wrap = functools.partial(Wrapped, **options)
        assert_matches_reference(wrap=wrap, steps=4)
        assert_matches_reference(wrap=wrap, model_given=False, steps=4)
        # DDP forbids no_sync() in the first step of a static graph.
        if "static_graph" not in options:
            assert_matches_reference(wrap=wrap, micro=2, steps=4)


@case
def zero_grad_in_place() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        optimizer.zero_grad(set_to_none=False)
        for batch in step:
            backward(squared_error(model, batch))
        optimizer.step()

    for view in (True, False):
        assert_matches_reference(loop, wrap=functools.partial(Wrapped, gradient_as_bucket_view=view))


@case
def accumulation_with_no_sync() -> None:
    assert_matches_reference(micro=2)
    assert_matches_reference(micro=3, model_given=False)


@case
def accumulation_without_no_sync() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch) / len(step))
        optimizer.step()
        optimizer.zero_grad()

    assert_matches_reference(loop, micro=2)
    assert_matches_reference(loop, micro=2, wrap=functools.partial(Wrapped, gradient_as_bucket_view=True))


@case
def accumulation_of_a_summed_loss() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        assert isinstance(model, Wrapped)
        for number, batch in enumerate(step):
            with nullcontext() if number == len(step) - 1 else model.no_sync():
                backward(squared_error(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    assert_matches_reference(loop, micro=2, is_scaled_loss=False)


@case
def a_closure() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = squared_error(model, step[0])
            backward(loss)
            return loss.item()

        optimizer.step(closure)

    assert_matches_reference(loop)


@case
def clipping() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        backward(squared_error(model, step[0]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()

    assert_matches_reference(loop, clip=0.2)
    assert_matches_reference(loop, clip=0.2, model_given=False)


class SometimesUsed(Net):
    """Uses its second layer only for some batches."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.second(hidden) if float(x[0, 0].detach()) > 0 else hidden[:, :2]
        return out


@case
def unused_parameters() -> None:
    """Some steps use a layer on one rank only, others on no rank."""
    for model_given in (True, False):
        assert_matches_reference(
            model=SometimesUsed().double(),
            wrap=functools.partial(Wrapped, find_unused_parameters=True),
            groups=two_groups,
            model_given=model_given,
            options={"momentum": 0.0},
            steps=12,
        )


@case
def frozen_parameters() -> None:
    model = network()
    model.first.bias.requires_grad_(False)
    assert_matches_reference(model=model)


@case
def activation_checkpointing() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            hidden = checkpoint(lambda v: torch.tanh(self.first(v)), x, use_reentrant=False)
            out: Tensor = self.second(hidden)
            return out

    for static in (False, True):
        torch.manual_seed(0)
        assert_matches_reference(
            model=Checkpointed().double(),
            reference_model=network(),
            wrap=functools.partial(Wrapped, static_graph=static),
            model_given=not static,
        )


@case
def compression_hooks() -> None:
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):

        def wrap(model: nn.Module, hook: Any = hook) -> nn.Module:
            wrapped = Wrapped(model)
            wrapped.register_comm_hook(None, hook)
            return wrapped

        assert_matches_reference(wrap=wrap, model=network().float(), tolerance=0.02, data=floats)


def floats(count: int) -> list[Batch]:
    return [(x.float(), y.float()) for x, y in batches(count)]


@case
def steps_with_power_sgd_are_left_out() -> None:
    """Its gradients are not the mean of those of the ranks."""
    model = network()
    wrapped = Wrapped(model)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.0), model=wrapped)
    # Registered after AdaScale was constructed: the order does not matter.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with pytest.warns(RuntimeWarning, match="fp16_compress_hook"):
        train_step(optimizer, wrapped, [batches(2)[dist.get_rank()]])
    assert optimizer.estimate is None


@case
def adam() -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for model_given in (True, False):
            is_fused = model_given == (kind is torch.optim.Adam)
            options = {"weight_decay": 0.1, "fused": True} if is_fused else {}
            assert_matches_reference(
                kind=kind, options=options, model_given=model_given, groups=two_groups, tolerance=1e-6
            )
    assert_matches_reference(kind=torch.optim.AdamW, micro=3, tolerance=1e-6)
    views: list[dict[str, Any]] = [{"gradient_as_bucket_view": True}, {"static_graph": True}]
    for view in views:
        wrap = functools.partial(Wrapped, **view)
        assert_matches_reference(kind=torch.optim.AdamW, wrap=wrap, tolerance=1e-6)


@case
def muon() -> None:
    for micro in (1, 3):
        assert_matches_reference(kind=torch.optim.Muon, model=matrices(), micro=micro, tolerance=1e-6)


@case
def muon_of_shards_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"got ZeroRedundancyOptimizer of Muon, whose step"):
        AdaScale(ZeroRedundancyOptimizer(matrices().parameters(), torch.optim.Muon, lr=0.1))


@case
def adam_of_shards_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"got ZeroRedundancyOptimizer of AdamW; .*SGD"):
        AdaScale(ZeroRedundancyOptimizer(network().parameters(), torch.optim.AdamW, lr=0.1))


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

    assert_matches_reference(kind=sharded)
    optimizer = assert_matches_reference(kind=sharded, groups=two_groups)
    inner = optimizer.optimizer
    assert isinstance(inner, ZeroRedundancyOptimizer)
    inner.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert "adascale" in optimizer.state_dict()


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

    assert_matches_reference(loop, wrap=lambda model: model, model_given=False)
    assert_matches_reference(loop, wrap=lambda model: model, model_given=False, micro=2)


@case
def a_grad_scaler_with_adam() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        backward(scaler.scale(squared_error(model, step[0])))
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()

    for options in ({}, {"fused": True}):
        assert_matches_reference(loop, kind=torch.optim.AdamW, options=options, tolerance=1e-6)


@case
def a_grad_scaler() -> None:
    for scaler_given in (True, False):
        for model_given in (True, False):
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

            assert_matches_reference(
                loop, model_given=model_given, grad_scaler=scaler if scaler_given else None
            )


@case
def a_step_skipped_by_a_grad_scaler() -> None:
    for model_given in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        model = network()
        reference_model = copy.deepcopy(model)
        wrapped = Wrapped(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = AdaScale(sgd, model=wrapped if model_given else None)
        reference = Reference(
            reference_model, torch.optim.SGD(reference_model.parameters(), lr=0.05), squared_error, 2.0
        )
        stream = iter(batches(20))
        for number in range(8):
            step = [next(stream), next(stream)]
            x, y = step[dist.get_rank()]
            bad = number == 4 and dist.get_rank() == 1
            backward(scaler.scale(squared_error(wrapped, (x * math.nan if bad else x, y))))
            scaler.step(optimizer)
            scaler.update()
            wrapped.zero_grad()
            if number != 4:
                reference.step(step)
            assert_equal(optimizer, model, reference)


@case
def ranks_stay_equal_when_fewer_steps_are_measured() -> None:
    """By default: all of the first 100 steps, then every 16th; the weights stay equal to the bit."""
    model = network()
    wrapped = Wrapped(model)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model=wrapped)
    measured_steps = []
    for number in range(150):
        train_step(optimizer, wrapped, [batches(2, seed=number)[dist.get_rank()]])
        if optimizer.statistics.gradients_are_finite() is not None:
            measured_steps.append(number)
    assert measured_steps == [*range(100), 112, 128, 144]
    for parameter in model.parameters():
        every = [torch.zeros_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.detach())
        assert all(torch.equal(other, parameter) for other in every)


@case
def one_small_all_reduce_a_step() -> None:
    """Counted by the process group, and compared with plain DDP.

    The profiler misses some: gloo ends the event of a collective on its own thread, after the future.
    """

    def collectives(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
        group: Any = dist.group.WORLD
        before: int = group._get_sequence_number_for_group()
        for number in range(4):
            backward(squared_error(model, batches(1, seed=number)[0]))
            optimizer.step()
            optimizer.zero_grad()
        after: int = group._get_sequence_number_for_group()
        return after - before

    plain_model = Wrapped(network())
    expected = collectives(torch.optim.SGD(plain_model.parameters(), lr=0.01), plain_model)
    model = Wrapped(network())
    groups = two_groups(model.module)
    ours = collectives(AdaScale(torch.optim.SGD(groups, lr=0.01), model=model), model)
    assert ours == expected + 4
    model = Wrapped(network())
    sampled = AdaScale(torch.optim.SGD(model.parameters(), lr=0.01), model=model, sample_every=4)
    assert collectives(sampled, model) == expected + 1


@case
def gradients_are_what_ddp_makes_them() -> None:
    for view in (True, False):
        ours, theirs = (Wrapped(network(), gradient_as_bucket_view=view) for _ in range(2))
        optimizer = AdaScale(torch.optim.SGD(ours.parameters(), lr=0.05), model=ours)
        for number in range(3):
            batch = batches(2, seed=number)[dist.get_rank()]
            for model in (ours, theirs):
                backward(squared_error(model, batch))
            for own, plain_ddp in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert own.grad is not None
                assert plain_ddp.grad is not None
                assert torch.equal(own.grad, plain_ddp.grad)
            optimizer.zero_grad()
            theirs.zero_grad()


@case
def nothing_is_measured_of_uneven_inputs() -> None:
    model = network()
    wrapped = Wrapped(model)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), model=wrapped)
    with warnings.catch_warnings(record=True) as caught, wrapped.join():
        warnings.simplefilter("always")
        for batch in batches(6 - 2 * dist.get_rank()):
            train_step(optimizer, wrapped, [batch])
    assert any("uneven inputs" in str(warning.message) for warning in caught)
    assert optimizer.estimate is None


@case
def state_saved_by_two_ranks_loads_on_one() -> None:
    optimizer = assert_matches_reference(micro=2)
    model = network()
    single = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), world_size=1, scale=8.0)
    single.load_state_dict(optimizer.state_dict())
    assert single.estimate == optimizer.estimate
    assert single.gain() == optimizer.predict_gain(8.0)
    for batch in batches(3):
        backward(squared_error(model, batch))
        single.step()
        single.zero_grad()
    assert single.estimate is not None
    assert single.estimate.biased

    again = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    again.load_state_dict(single.state_dict())
    assert again.scale == 2.0
    wrapped = Wrapped(model)
    train_step(again, wrapped, [batches(2)[dist.get_rank()]])
    assert again.estimate is not None
    assert not again.estimate.biased


@case
def a_change_of_replicas_keeps_the_estimate() -> None:
    """As the elastic trainer does it: the estimate stays, the number of micro-gradients changes."""
    model = network()
    wrapped = Wrapped(model)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), world_size=1, scale=4.0, model=wrapped)
    optimizer.statistics.change_options(scale=4.0, world_size=2)
    optimizer.set_num_gradients_to_accumulate(2)
    train_step(optimizer, wrapped, batches(4)[2 * dist.get_rank() :][:2])
    estimate = optimizer.estimate
    assert estimate is not None
    assert not estimate.biased
    optimizer.statistics.change_options(scale=16.0, world_size=2)
    assert optimizer.estimate == estimate
    assert optimizer.gain() == estimate.gain(16.0)
