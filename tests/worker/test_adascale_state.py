"""AdaScale: numbers of all kinds, what it leaves unchanged, mistakes, and its state."""

import copy
import functools
import gc
import io
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adascale.errors import UnsupportedOptimizerError
from adascale_worker.adascale import AdaScale
from worker.adascale_problem import (
    Loop,
    Net,
    assert_matches_reference,
    backward,
    batches,
    network,
    squared_error,
    train_step,
    two_groups,
)
from worker.reference import Batch, Reference

# -- numbers of all kinds ----------------------------------------------------------------------------------


def test_norms_of_float16_gradients_do_not_overflow() -> None:
    weight = nn.Parameter(torch.zeros(50, dtype=torch.float16))
    optimizer = AdaScale(torch.optim.SGD([weight], lr=1e-8), num_gradients_to_accumulate=2)
    for sign in (1.0, -0.5):
        backward((weight * (sign * 1e4) / 2).sum())
    # L = 50 * 6.25e7, M = 50 * 6.25e6: grad_sqr < 0, so the gain is S
    assert optimizer.gain() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_gradients_of_any_dtype(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = AdaScale(torch.optim.SGD([weight], lr=0.1), num_gradients_to_accumulate=2)
    for x in ([1.0, 2.0, 2.0], [2.0, 2.0, 1.0]):
        product = (weight * torch.tensor(x, dtype=dtype) / 2).sum()
        backward(product.real if dtype.is_complex else product)
    optimizer.step()
    # L = 9 and M = |(3/2, 2, 3/2)|^2 = 8.5
    assert optimizer.grad_sqr == pytest.approx(2 * 8.5 - 9, rel=1e-5)
    assert optimizer.grad_var == pytest.approx((9 - 8.5) * 2, rel=1e-5)


@pytest.mark.parametrize(("micro", "bad"), [(1, math.nan), (2, math.inf)])
def test_gradients_that_are_not_finite_do_not_change_the_estimate(*, micro: int, bad: float) -> None:
    model = network()
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=micro, scale=4.0
    )
    data = batches(10 * micro)
    for i in range(4):
        train_step(optimizer, model, data[i * micro : (i + 1) * micro])
    estimate_before = optimizer.estimate
    assert estimate_before is not None
    weights = copy.deepcopy(model.state_dict())
    x, y = data[0]
    train_step(optimizer, model, [(x * bad, y)] * micro)
    assert optimizer.estimate == estimate_before
    model.load_state_dict(weights)
    for i in range(4, 6):
        train_step(optimizer, model, data[i * micro : (i + 1) * micro])
    assert optimizer.estimate is not None
    assert optimizer.estimate != estimate_before
    assert math.isfinite(optimizer.gain())


class Scaler(torch.amp.GradScaler):
    """A GradScaler on the CPU that starts at a given scale."""

    def __init__(self, scale: float, interval: int = 3) -> None:
        super().__init__("cpu", init_scale=scale, growth_interval=interval)


@pytest.mark.parametrize(("micro", "scaler_given"), [(1, True), (2, False)])
def test_a_grad_scaler_does_not_change_the_statistics(*, micro: int, scaler_given: bool) -> None:
    """The loss scale grows during the test."""
    scaler = Scaler(2.0**10)

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(scaler.scale(squared_error(model, batch) / len(step)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert_matches_reference(loop, micro=micro, scale=4.0, grad_scaler=scaler if scaler_given else None)
    assert scaler.get_scale() > 2.0**10


@pytest.mark.parametrize(("micro", "zero_by_optimizer"), [(1, True), (2, False)])
def test_a_step_skipped_by_a_grad_scaler_changes_nothing(*, micro: int, zero_by_optimizer: bool) -> None:
    scaler = Scaler(2.0**10, interval=1000)
    model = network()
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        num_gradients_to_accumulate=micro,
        scale=4.0,
    )
    plain = network()
    reference = Reference(
        plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), squared_error, optimizer.scale
    )

    def train(step: list[Batch]) -> None:
        for batch in step:
            backward(scaler.scale(squared_error(model, batch) / len(step)))
        scaler.step(optimizer)
        scaler.update()
        (optimizer if zero_by_optimizer else model).zero_grad()

    data = iter(batches(20 * micro))
    for number in range(10):
        step = [next(data) for _ in range(micro)]
        if number == 5:
            weights, estimate_before = copy.deepcopy(model.state_dict()), optimizer.estimate
            train([(x * math.nan, y) for x, y in step])
            torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
            assert optimizer.estimate == estimate_before
            if micro == 1:  # no difference to a step that was skipped
                reference.previous = None
            continue
        train(step)
        reference.step(step)
        assert optimizer.gain() == pytest.approx(reference.gain(), rel=1e-9)


def test_clipping_between_backward_and_step_does_not_change_the_statistics() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch) / len(step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()

    for micro in (1, 2):
        assert_matches_reference(loop, micro=micro, scale=4.0, clip=0.3)


def clipped_and_scaled(scaler: Scaler) -> Loop:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(scaler.scale(squared_error(model, batch) / len(step)))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return loop


def test_clipping_with_a_given_grad_scaler() -> None:
    scaler = Scaler(2.0**16)
    assert_matches_reference(clipped_and_scaled(scaler), micro=2, clip=0.3, grad_scaler=scaler)


def test_clipping_with_an_unknown_grad_scaler_is_left_out_with_a_warning() -> None:
    model = network()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2)
    loop = clipped_and_scaled(Scaler(2.0**16))
    with pytest.warns(RuntimeWarning, match=r"GradScaler and by clipping.*grad_scaler=scaler"):
        loop(optimizer, model, batches(2))
    loop(optimizer, model, batches(2))
    assert optimizer.estimate is None


@pytest.mark.parametrize("micro", [1, 2])
def test_autocast_with_bfloat16(micro: int) -> None:
    def mixed(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squared_error(model, (x.float(), y))

    model = network().float()
    reference_model = copy.deepcopy(model)
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=micro, scale=4.0
    )
    reference = Reference(reference_model, torch.optim.SGD(reference_model.parameters(), lr=0.05), mixed, 4.0)
    data = iter(batches(8 * micro))
    for _ in range(8):
        step = [next(data) for _ in range(micro)]
        for batch in step:
            backward(mixed(model, batch) / micro)
        optimizer.step()
        optimizer.zero_grad()
        reference.step(step)
        assert optimizer.gain() == pytest.approx(reference.gain(), rel=0.02)


# -- state of the program is not changed ---------------------------------------------------------------------


def test_gradients_are_the_same_as_without_adascale() -> None:
    for micro in (1, 3):
        model, plain = network(), network()
        optimizer = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=micro, scale=4.0
        )
        for _ in range(3):
            for batch in batches(micro):
                backward(squared_error(model, batch))
                backward(squared_error(plain, batch))
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    assert ours.grad is not None
                    assert theirs.grad is not None
                    assert torch.equal(ours.grad, theirs.grad)
            optimizer.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("tensor", [True, False])
def test_the_lr_is_restored_if_the_step_raises(*, tensor: bool) -> None:
    model = network()
    lr = torch.tensor(0.05, dtype=torch.float64) if tensor else 0.05
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    rates = []

    def broken_step() -> None:
        rates.append(float(sgd.param_groups[0]["lr"]))
        raise OSError("the step failed")

    sgd.step = broken_step  # type: ignore[method-assign, assignment]
    optimizer = AdaScale(sgd, num_gradients_to_accumulate=2)
    for batch in batches(2):
        backward(squared_error(model, batch) / 2)
    with pytest.raises(OSError, match="the step failed"):
        optimizer.step()
    assert rates == [pytest.approx(0.05 * optimizer.gain())]
    assert rates[0] > 0.05
    assert optimizer.param_groups[0]["lr"] is lr


def test_gradients_of_torch_autograd_grad_are_not_measured() -> None:
    """A gradient penalty calls torch.autograd.grad on the parameters between backward passes."""

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            torch.autograd.grad(squared_error(model, batch), list(model.parameters()))
            backward(squared_error(model, batch) / len(step))
        optimizer.step()
        optimizer.zero_grad()

    for micro in (1, 2):
        assert_matches_reference(loop, micro=micro, scale=4.0)


def test_a_wrong_number_of_backward_passes_is_left_out_with_a_warning() -> None:
    model = network()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2)
    with pytest.warns(RuntimeWarning, match="got 3 backward passes in a step, where 2 are expected"):
        train_step(optimizer, model, batches(3))
    assert optimizer.estimate is None
    train_step(optimizer, model, batches(2))
    assert optimizer.estimate is not None


def test_two_backward_passes_for_a_step_with_one_gradient_are_left_out_with_a_warning() -> None:
    """The gradient is read after the first."""
    model = network()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), scale=8.0)
    with pytest.warns(RuntimeWarning, match="got 2 backward passes in a step, where 1 are expected"):
        train_step(optimizer, model, batches(2))
    for number in range(3):
        train_step(optimizer, model, batches(2, seed=number))
    assert optimizer.estimate is None
    for number in range(2):
        train_step(optimizer, model, batches(1, seed=number))
    assert optimizer.estimate is not None


@pytest.mark.parametrize("micro", [1, 2])
def test_a_hook_that_the_program_adds_later_changes_what_is_measured(micro: int) -> None:
    def run(*, later: bool) -> AdaScale:
        model = network()

        def add_hooks() -> None:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: 0.1 * gradient)

        if not later:
            add_hooks()
        optimizer = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=micro, smoothing=0.0
        )
        if later:
            train_step(optimizer, model, batches(micro, seed=99))
            add_hooks()
        for number in range(3):
            train_step(optimizer, model, batches(micro, seed=number))
        return optimizer

    before, later = run(later=False), run(later=True)
    assert before.estimate is not None
    assert later.grad_sqr == pytest.approx(before.grad_sqr, rel=1e-9)
    assert later.grad_var == pytest.approx(before.grad_var, rel=1e-9)


def test_the_step_of_the_inner_optimizer_may_call_ours() -> None:
    """As the elastic trainer does with the program's own optimizer."""
    model, other = network(), network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 3, 0.5)
    optimizer = AdaScale(sgd, num_gradients_to_accumulate=2)
    sgd.step = functools.wraps(sgd.step)(lambda: optimizer.step())  # type: ignore[method-assign, assignment]
    reference = Reference(other, torch.optim.SGD(other.parameters(), lr=0.05), squared_error, 2.0)
    data = iter(batches(16))
    for _ in range(8):
        step = [next(data), next(data)]
        for batch in step:
            backward(squared_error(model, batch) / 2)
        sgd.step()
        sgd.zero_grad()
        reference.sgd.param_groups[0]["lr"] = sgd.param_groups[0]["lr"]
        reference.step(step)
        scheduler.step()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_hooks_are_removed_when_the_optimizer_is_deleted() -> None:
    model = network()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    assert model.first.weight._backward_hooks
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert not model.first.weight._backward_hooks
    assert not model.first.weight._post_accumulate_grad_hooks


def test_unhook_keeps_the_gain() -> None:
    model = network()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    data = batches(4)
    train_step(optimizer, model, data[:2])
    gain = optimizer.gain()
    optimizer.unhook()
    train_step(optimizer, model, data[2:])
    assert optimizer.gain() == gain
    assert not model.first.weight._backward_hooks


# -- mistakes ----------------------------------------------------------------------------------------------


def test_other_optimizers_raise() -> None:
    model = network()
    with pytest.raises(
        UnsupportedOptimizerError, match=r"got Adagrad; .*torch\.optim\.SGD.*torch\.optim\.AdamW"
    ):
        AdaScale(torch.optim.Adagrad(model.parameters()))
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="got an AdaScale optimizer"):
        AdaScale(optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size=0; it must be an integer, at least 1"),
        ({"num_gradients_to_accumulate": 0}, "num_gradients_to_accumulate=0"),
        ({"scale": -1.0}, "scale -1.0; it must be positive"),
        ({"smoothing": 1.0}, "smoothing 1.0; it must be at least 0 and below 1"),
        ({"sample_every": 0}, "sample_every=0; it must be at least 1"),
    ],
)
def test_arguments_out_of_range_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaScale(torch.optim.SGD(network().parameters(), lr=0.1), **arguments)


def test_settings_out_of_range_raise() -> None:
    optimizer = AdaScale(torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="got scale 0"):
        optimizer.set_scale(0.0)
    with pytest.raises(ValueError, match="got num_gradients_to_accumulate=0"):
        optimizer.set_num_gradients_to_accumulate(0)
    with pytest.raises(ValueError, match="got scale nan"):
        optimizer.predict_gain(math.nan)


# -- state -------------------------------------------------------------------------------------------------


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(("micro", "at"), [(3, 1), (1, 5), (3, 117)])
def test_training_after_save_and_load_is_equal_to_the_bit(*, micro: int, at: int) -> None:
    """Also if only some steps are measured, and between two steps that are compared."""

    def program() -> tuple[Net, AdaScale]:
        model = network()
        sgd = torch.optim.SGD(two_groups(model), lr=0.05, momentum=0.9)
        return model, AdaScale(sgd, num_gradients_to_accumulate=micro, scale=4.0)

    data = batches((at + 12) * micro)
    steps = [data[i * micro : (i + 1) * micro] for i in range(at + 12)]
    model, optimizer = program()
    for step in steps[:at]:
        train_step(optimizer, model, step)
    state = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for step in steps[at:]:
        train_step(optimizer, model, step)

    other, again = program()
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    for step in steps[at:]:
        train_step(again, other, step)

    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert again.estimate == optimizer.estimate
    assert again.state_dict()["adascale"]["averages"] == optimizer.state_dict()["adascale"]["averages"]


def test_the_gradient_of_the_last_step_can_be_left_out_of_the_state() -> None:
    def tensors(value: Any) -> int:
        if isinstance(value, dict):
            return sum(map(tensors, value.values()))
        return sum(map(tensors, value)) if isinstance(value, list) else isinstance(value, Tensor)

    model = network()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), scale=1.0)
    first, second = batches(2)
    train_step(optimizer, model, [first])
    assert tensors(optimizer.state_dict()) == len(list(model.parameters())), (
        "for the comparison with the next"
    )
    optimizer.statistics.discard_comparison()
    assert tensors(optimizer.state_dict()) == 0
    assert not optimizer.statistics.awaits_comparison
    train_step(optimizer, model, [second])
    assert optimizer.estimate is None, "this step had nothing to compare with"


def test_groups_and_state_are_still_shared_after_loading() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = AdaScale(sgd, num_gradients_to_accumulate=2)
    train_step(optimizer, model, batches(2))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is sgd.param_groups
    assert optimizer.state is sgd.state
    sgd.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups is sgd.param_groups
    assert optimizer.state is sgd.state
    assert set(optimizer.state) == set(model.parameters())


def test_the_state_of_a_plain_sgd_loads_with_a_warning() -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.07)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2)
    train_step(optimizer, model, batches(2))
    with pytest.warns(UserWarning, match="no AdaScale part"):
        optimizer.load_state_dict(plain.state_dict())
    assert optimizer.gain() == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.07


def test_state_of_another_version_raises() -> None:
    optimizer = AdaScale(torch.optim.SGD(network().parameters(), lr=0.05))
    state = optimizer.state_dict()
    state["adascale"]["version"] = 99
    with pytest.raises(ValueError, match="version 99; this release reads 4: load it with the release"):
        optimizer.load_state_dict(state)


def test_a_copy_is_refused() -> None:
    optimizer = AdaScale(torch.optim.SGD(network().parameters(), lr=0.05))
    with pytest.raises(TypeError, match=r"can not be copied.*load_state_dict"):
        copy.deepcopy(optimizer)


# -------------------------------------------------------------------------


def test_a_change_of_scale_keeps_the_estimate() -> None:
    model = network()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2)
    for i in range(20):
        train_step(optimizer, model, batches(2, seed=i))
    estimate_before, predicted = optimizer.estimate, optimizer.predict_gain(32.0)
    optimizer.set_scale(32.0)
    assert optimizer.estimate == estimate_before
    assert optimizer.gain() == predicted
    optimizer.set_scale(2.0)
    optimizer.set_num_gradients_to_accumulate(2)
    assert optimizer.estimate == estimate_before


def test_smoothing_follows_the_scale_unless_it_was_chosen() -> None:
    sgd = torch.optim.SGD(network().parameters(), lr=0.05)
    optimizer = AdaScale(sgd, scale=100.0)
    assert optimizer.smoothing == pytest.approx(0.9)
    optimizer.set_scale(500.0)
    assert optimizer.smoothing == pytest.approx(0.5)
    chosen = AdaScale(sgd, scale=100.0, smoothing=0.3)
    chosen.set_scale(500.0)
    assert chosen.smoothing == 0.3
    chosen.set_num_gradients_to_accumulate(4, update_smoothing=False)
    assert chosen.smoothing == 0.3
    chosen.set_num_gradients_to_accumulate(4)
    assert chosen.smoothing == pytest.approx(0.5)


@pytest.mark.parametrize("every", [1, 3])
def test_steps_that_are_not_measured_have_no_hooks(every: int) -> None:
    model = network()
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2, sample_every=every
    )
    hooked = []
    for i in range(6):
        hooked.append(bool(model.first.weight._backward_hooks))
        train_step(optimizer, model, batches(2, seed=i))
    assert hooked == [number % every == 0 for number in range(6)]
