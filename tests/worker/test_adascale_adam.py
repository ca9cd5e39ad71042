"""The optimizer over Adam, AdamW and optimizers with a second moment, in one process."""

import copy
import io
import math
from collections.abc import Mapping
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adascale import AdaScale, SecondMomentOptimizer
from adascale.errors import UnsupportedOptimizerError
from adascale_worker.scaling.rules import UNIT, AdamRule, SecondMoment, adam_hyperparameters
from adascale_worker.scaling.statistics import metric, norms
from worker import adascale_problem
from worker.adascale_problem import Net, backward, batches, network, squared_error, train_step, two_groups
from worker.reference import Batch

TOLERANCE = 1e-6
"""torch counts the steps of Adam in float32."""

Kind = type[torch.optim.Adam] | type[torch.optim.AdamW]
KINDS: list[Kind] = [torch.optim.Adam, torch.optim.AdamW]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"amsgrad": True},
    {"weight_decay": 0.3},
    {"betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.3},
]


def learnable_batches(count: int) -> list[Batch]:
    """Data whose true gradient is about as large as its noise."""
    return [(x, 0.5 * y + x[:, :2] + 1.0) for x, y in batches(count)]


assert_matches_reference = partial(
    adascale_problem.assert_matches_reference, data=learnable_batches, tolerance=TOLERANCE
)


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize(("kind", "options"), list(zip(cycle(KINDS), OPTIONS, strict=False)), ids=str)
def test_gains_and_weights_are_those_of_the_reference(kind: Kind, options: dict[str, Any]) -> None:
    assert_matches_reference(kind=kind, options={"lr": 0.02, **options}, micro=3, scale=12.0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_group_has_its_own_gain(kind: Kind) -> None:
    optimizer = assert_matches_reference(
        kind=kind, options={"lr": 0.02, "weight_decay": 0.1}, micro=4, groups=two_groups
    )
    assert optimizer.gain(0) != optimizer.gain(1)


@pytest.mark.usefixtures("reading")
def test_one_replica_measures_the_difference_of_consecutive_gradients() -> None:
    optimizer = assert_matches_reference(kind=torch.optim.AdamW, options={"lr": 1e-3}, scale=2.0)
    assert optimizer.estimate is not None
    assert optimizer.estimate.biased


@pytest.mark.parametrize("rescale", [3.0, 48.0])
def test_a_change_of_scale_changes_the_hyperparameters(rescale: float) -> None:
    options = {"lr": 0.02, "weight_decay": 0.1}
    assert_matches_reference(kind=torch.optim.AdamW, options=options, micro=3, scale=12.0, rescale=rescale)


def test_clipping_does_not_change_the_statistics() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch) / len(step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()

    clipped, plain = network(), network()
    ours, other = (
        AdaScale(torch.optim.AdamW(each.parameters(), lr=0.0), num_gradients_to_accumulate=3)
        for each in (clipped, plain)
    )
    data = learnable_batches(6)
    for step in (data[:3], data[3:]):
        loop(ours, clipped, step)
        train_step(other, plain, step)
    # The second moments are those of the clipped gradients: a unit that the gain does not depend on.
    assert ours.gain() == pytest.approx(other.gain(), rel=1e-4)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_reported_factor_is_that_of_the_learning_rate_in_the_step(
    kind: type[torch.optim.Optimizer],
) -> None:
    model = network()
    inner = kind(model.parameters(), lr=0.02)  # type: ignore[call-arg]
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2, scale=8.0)
    seen: list[float] = []
    inner.register_step_pre_hook(lambda *_: seen.append(inner.param_groups[0]["lr"]))
    data = learnable_batches(8)
    for start in range(0, 8, 2):
        train_step(optimizer, model, data[start : start + 2])
    lr_factor = optimizer.statistics.rule.lr_factor(optimizer.gain())
    assert lr_factor > 1.1
    assert 0.02 * lr_factor == pytest.approx(seen[-1])


def test_hyperparameters_are_restored_after_the_step() -> None:
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2, scale=8.0)
    seen: list[tuple[Any, ...]] = []

    def look(*_: Any) -> None:
        group = inner.param_groups[0]
        seen.append((group["lr"], group["betas"], group["eps"], group["weight_decay"]))

    inner.register_step_pre_hook(look)
    data = learnable_batches(8)
    for start in range(0, 8, 2):
        train_step(optimizer, model, data[start : start + 2])
    gain = optimizer.gain()
    assert gain > 1.5
    root = math.sqrt(gain)
    assert seen[-1][0] == pytest.approx(0.02 * root)
    assert seen[-1][1] == pytest.approx((max(0.8**gain, 0.6), 0.95**gain))
    assert seen[-1][2:] == pytest.approx((1e-6 / root, 0.1 * root))
    look()
    assert seen[-1] == (0.02, (0.8, 0.95), 1e-6, 0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_with_a_gain_of_one_the_weights_are_those_of_the_inner_optimizer(kind: Kind, *, fused: bool) -> None:
    model = network()
    plain_model = copy.deepcopy(model)
    optimizer = AdaScale(kind(model.parameters(), lr=0.02, weight_decay=0.1, fused=fused))
    plain = kind(plain_model.parameters(), lr=0.02, weight_decay=0.1, fused=fused)
    for batch in batches(6):
        train_step(optimizer, model, [batch])
        backward(squared_error(plain_model, batch))
        plain.step()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_state_of_a_plain_optimizer_that_the_inner_one_loads_counts_in_steps() -> None:
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2, smoothing=0.0, scale=2.0)
    data = learnable_batches(10)
    plain = copy.deepcopy(inner.state_dict())
    for number in range(4):
        train_step(optimizer, model, data[2 * number : 2 * number + 2])
    assert optimizer.gain() > 1.0
    inner.load_state_dict(plain)
    assert all(group.get(UNIT, 1.0) == 1.0 for group in optimizer.param_groups)


def test_a_state_of_the_inner_optimizer_that_is_saved_and_restored_changes_nothing() -> None:
    models = [network(), network()]
    optimizers = [
        AdaScale(torch.optim.AdamW(model.parameters(), lr=0.02), num_gradients_to_accumulate=2, scale=8.0)
        for model in models
    ]
    data = learnable_batches(24)
    for number in range(12):
        for restores, (optimizer, model) in enumerate(zip(optimizers, models, strict=True)):
            train_step(optimizer, model, data[2 * number : 2 * number + 2])
            if restores:
                optimizer.optimizer.load_state_dict(copy.deepcopy(optimizer.optimizer.state_dict()))
    assert optimizers[0].gain() > 1.0
    assert optimizers[1].gain() == optimizers[0].gain()
    assert all(map(torch.equal, *(list(model.parameters()) for model in models)))


@pytest.mark.filterwarnings("ignore:the loaded state has no AdaScale part")
def test_a_state_of_the_inner_optimizer_that_adascale_loads_keeps_the_unit_of_its_steps() -> None:
    model = network()
    optimizer = AdaScale(torch.optim.AdamW(model.parameters(), lr=0.02), num_gradients_to_accumulate=2)
    data = learnable_batches(12)
    for number in range(6):
        train_step(optimizer, model, data[2 * number : 2 * number + 2])
    unit = optimizer.param_groups[0][UNIT]
    assert unit != 1.0
    resumed = AdaScale(torch.optim.AdamW(model.parameters(), lr=0.02), num_gradients_to_accumulate=2)
    resumed.load_state_dict(copy.deepcopy(optimizer.optimizer.state_dict()))
    assert resumed.param_groups[0][UNIT] == unit


def test_estimates_are_unbiased_in_the_metric_of_the_steps_before() -> None:
    """The mean over all pairs of micro-batches is exact, because v does not depend on them."""
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2, smoothing=0.0, scale=2.0)
    data = learnable_batches(10)
    train_step(optimizer, model, data[:2])
    state = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    v = torch.cat([inner.state[p]["exp_avg_sq"].flatten() for p in model.parameters()]) / (1 - 0.999)
    divisor = (v + 1e-3 * v.mean() + 1e-8**2).sqrt()

    def gradient(batch: Batch) -> Tensor:
        found = torch.autograd.grad(squared_error(model, batch), list(model.parameters()))
        return torch.cat([each.flatten() for each in found]) / divisor

    population = data[2:]
    gradients = torch.stack([gradient(batch) for batch in population])
    found = []
    # All ordered pairs with replacement: two independent draws from the population.
    for first in population:
        for second in population:
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
            train_step(optimizer, model, [first, second])
            estimate = optimizer.estimate
            assert estimate is not None
            found.append((estimate.grad_sqr, estimate.grad_var))
    mean = gradients.mean(0)
    sqr, var = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
    assert sqr == pytest.approx(mean.square().sum().item(), rel=1e-6)
    assert var == pytest.approx((gradients - mean).square().sum(1).mean().item(), rel=1e-6)


def test_a_rare_coordinate_does_not_outweigh_the_others() -> None:
    """An embedding whose words are rare has second moments near zero, and rare large gradients."""
    torch.manual_seed(0)
    model = nn.Embedding(64, 4)
    optimizer = AdaScale(
        torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.9)), num_gradients_to_accumulate=2
    )
    for number in range(30):
        for word in (number % 2, 63 if number == 29 else number % 3):
            backward(model(torch.tensor([word])).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.grad_var < 1e5


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize(("micro", "at"), [(1, 0), (2, 1), (1, 5)])
def test_training_after_save_and_load_is_equal_to_the_bit(*, micro: int, at: int) -> None:
    def make() -> tuple[Net, AdaScale]:
        model = network()
        inner = torch.optim.AdamW(two_groups(model), lr=0.02, weight_decay=0.1)
        return model, AdaScale(inner, num_gradients_to_accumulate=micro, scale=8.0)

    data = learnable_batches(10 * micro)
    model, optimizer = make()
    buffer = io.BytesIO()
    for number in range(10):
        if number == at:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        train_step(optimizer, model, data[number * micro : (number + 1) * micro])
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed, again = make()
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    for number in range(at, 10):
        train_step(again, resumed, data[number * micro : (number + 1) * micro])
    assert again.gain() == optimizer.gain()
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_state_without_a_gradient_of_16_bits_continues_to_the_bit() -> None:
    """Before the first step, gradients are compared in 16 bits, and divided by the second moment in 32."""

    def make() -> tuple[Net, AdaScale]:
        model = network().bfloat16()
        return model, AdaScale(torch.optim.AdamW(model.parameters()), scale=8.0, disjoint_pairs=True)

    data = [(x.bfloat16(), y.bfloat16()) for x, y in learnable_batches(12)]
    model, optimizer = make()
    for number in range(4):
        train_step(optimizer, model, data[number : number + 1])
    assert not optimizer.statistics.awaits_comparison
    resumed, again = make()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(4, 12):
        train_step(optimizer, model, data[number : number + 1])
        train_step(again, resumed, data[number : number + 1])
        assert again.gain() == optimizer.gain()


@pytest.mark.parametrize(("micro", "scale"), [(1, 2.0), (4, 16.0), (2, 128.0)])
def test_a_state_that_is_loaded_at_another_size_continues_as_the_state_in_memory(
    micro: int, scale: float
) -> None:
    model = network()
    inner = torch.optim.AdamW(two_groups(model), lr=0.02, weight_decay=0.1)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2, scale=8.0)
    data = learnable_batches(10 + 8 * micro)
    for start in range(0, 10, 2):
        train_step(optimizer, model, data[start : start + 2])
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    optimizer.set_num_gradients_to_accumulate(micro)
    optimizer.set_scale(scale)
    resumed = network()
    inner = torch.optim.AdamW(two_groups(resumed), lr=0.02, weight_decay=0.1)
    again = AdaScale(inner, num_gradients_to_accumulate=micro, scale=scale)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    for start in range(10, len(data), micro):
        train_step(optimizer, model, data[start : start + micro])
        train_step(again, resumed, data[start : start + micro])
    assert again.gain() == optimizer.gain() > 1.0
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture(params=["one by one", "together, as on a GPU"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the tensors of the CPU are read."""
    if request.param != "one by one":
        monkeypatch.setattr(norms, "SEPARATELY_READ", ())


@pytest.mark.usefixtures("reading")
def test_norms_are_the_same_in_pieces_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are divided in pieces; several small ones together, on the CPU and on a GPU."""
    results = []
    for size in (1 << 24, 100):
        monkeypatch.setattr(metric, "CHUNK", size)
        monkeypatch.setattr(norms, "MAX_ELEMENTS_TOGETHER", size)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 80), nn.Tanh(), nn.Linear(80, 3))
        optimizer = AdaScale(torch.optim.AdamW(model.parameters(), lr=1e-3), num_gradients_to_accumulate=2)
        for _ in range(3):
            for _ in range(2):
                backward(model(torch.randn(5, 30)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        results.append((optimizer.grad_sqr, optimizer.grad_var))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("factors", [(3.0, 3.0), (3.0, 0.5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("limit", [10, 1 << 24])
def test_gradients_are_divided_by_the_roots_of_their_second_moments(
    factors: tuple[float, float], dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against sums in double precision. The third parameter has no second moment yet."""
    monkeypatch.setattr(norms, "MAX_ELEMENTS_TOGETHER", limit)
    monkeypatch.setattr(metric, "CHUNK", limit)
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(2, 3), (5,), (4, 1)]]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    values = [real(torch.randn_like(each)).square().view(real(each).shape) for each in gradients]
    values = [torch.view_as_complex(v) if dtype.is_complex else v for v in values]
    moments = [SecondMoment(value, factor) for value, factor in zip(values[:2], factors, strict=True)]

    class Rule(AdamRule):
        def second_moments(self, number: int) -> dict[int, SecondMoment]:
            return {id(p): moment for p, moment in zip(parameters, moments, strict=False)}

    inner = torch.optim.AdamW(parameters)
    measured = metric.Metric(Rule(inner))
    second = [real(v).double() * factor for v, factor in zip(values, factors, strict=False)]
    mean = float(torch.cat([each.flatten() for each in second]).mean())
    second.append(torch.full(real(parameters[2]).shape, mean, dtype=torch.float64))
    added = mean * metric.FLOOR + 1e-8**2
    expected = [real(g).double() / (v + added).sqrt() for g, v in zip(gradients, second, strict=True)]
    approximately = partial(pytest.approx, rel=1e-5, abs=1e-6)
    divided = measured.divided(0, parameters, gradients)
    for found, each, gradient in zip(divided, expected, gradients, strict=True):
        assert found.shape == gradient.shape
        assert real(found).flatten().tolist() == approximately(each.flatten().tolist())
    sqr_norm = sum(float(each.square().sum()) for each in expected)
    total = measured.sqr_norm(0, parameters, gradients, torch.device("cpu"))
    assert total.item() == approximately(sqr_norm)
    assert [measured.norm(0, *pair).item() for pair in zip(parameters, gradients, strict=True)] == (
        approximately([float(each.norm()) for each in expected])
    )


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("shapes", [[(5,)], [(200, 100)], [(5,), (0,), (200, 100)]])
def test_measuring_changes_neither_gradients_nor_second_moments(shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    inner = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    inner.step()
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    moments = [inner.state[parameter]["exp_avg_sq"] for parameter in parameters]
    before = copy.deepcopy([*gradients, *moments])
    measured = metric.Metric(AdamRule(inner))
    pairs = list(zip(parameters, gradients, strict=True))
    found = [measured.norm(0, *pair).item() for pair in pairs]
    divided = measured.divided(0, parameters, gradients)
    assert found == pytest.approx([each.norm().item() for each in divided], rel=1e-4)
    together = measured.sqr_norm(0, parameters, gradients, torch.device("cpu")).item()
    assert together == pytest.approx(sum(norm**2 for norm in found), rel=1e-4)
    assert all(map(torch.equal, before, [*gradients, *moments]))


def test_a_gradient_that_is_not_finite_in_the_first_step_is_noticed() -> None:
    model = network()
    optimizer = AdaScale(torch.optim.AdamW(model.parameters(), lr=1e-3), num_gradients_to_accumulate=2)
    for batch in batches(2):
        backward(squared_error(model, batch) * math.inf)
    optimizer.step()
    assert optimizer.statistics.gradients_are_finite() is False
    assert optimizer.gain() == 1.0


def test_a_tensor_lr_stays_a_tensor() -> None:
    model = network()
    lr = torch.tensor(0.02)
    inner = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2)
    data = learnable_batches(4)
    train_step(optimizer, model, data[:2])
    train_step(optimizer, model, data[2:])
    assert inner.param_groups[0]["lr"] is lr
    assert float(lr) == pytest.approx(0.02)


class Rms(torch.optim.Optimizer):
    """RMSprop without options, as a user would write it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "beta": 0.9, "eps": 1e-8})

    def second_moment(self, parameter: Tensor) -> Tensor | None:
        moment: Tensor | None = self.state[parameter].get("v")
        return moment

    def hyperparameters_at(self, group: Mapping[str, Any], gain: float) -> Mapping[str, Any]:
        return {"lr": group["lr"] * math.sqrt(gain), "beta": group["beta"] ** gain}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p].setdefault("v", p.grad.square())
                v.lerp_(p.grad.square(), 1 - group["beta"])
                p -= group["lr"] * p.grad / (v.sqrt() + group["eps"])


def test_an_optimizer_with_a_second_moment_needs_two_methods() -> None:
    model = network()
    inner = Rms(model.parameters())
    assert isinstance(inner, SecondMomentOptimizer)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2)
    data = learnable_batches(6)
    for start in (0, 2, 4):
        train_step(optimizer, model, data[start : start + 2])
    assert 1.0 < optimizer.gain() <= 2.0
    assert inner.param_groups[0]["lr"] == 0.01


def test_the_hyperparameters_of_adam_are_public() -> None:
    group = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    values = adam_hyperparameters(group, 4.0)
    assert values == {"lr": 0.02, "betas": (0.9**4, 0.99**4), "eps": 0.5e-8}


@pytest.mark.parametrize(
    ("beta1", "gain", "expected"),
    [
        (0.9, 1.0, 0.9),
        (0.9, 4.0, 0.9**4),
        (0.9, 5.0, 0.6),
        (0.9, 500.0, 0.6),
        (0.5, 8.0, 0.5),
        (0.0, 8.0, 0.0),
    ],
)
def test_the_first_beta_does_not_fall_below_a_bound(beta1: float, gain: float, expected: float) -> None:
    group: dict[str, Any] = {"lr": 0.01, "betas": (beta1, 0.99), "eps": 1e-8}
    assert adam_hyperparameters(group, gain)["betas"] == (expected, 0.99**gain)
    group["betas"] = (torch.tensor(beta1), torch.tensor(0.99))
    torch.testing.assert_close(adam_hyperparameters(group, gain)["betas"][0], torch.tensor(expected))


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_other_optimizers_are_refused_with_what_works(kind: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(
        UnsupportedOptimizerError,
        match=rf"got {kind.__name__}; .*SGD.*Adam, .*AdamW and .*Muon.*second_moment",
    ):
        AdaScale(kind(network().parameters(), lr=0.1))  # type: ignore[call-arg]
