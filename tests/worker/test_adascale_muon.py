"""The optimizer over Muon, and over Muon for some parameters and AdamW for the rest."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adascale import AdaScale
from adascale.errors import UnsupportedOptimizerError
from adascale_worker.scaling.rules import MuonRule
from adascale_worker.scaling.statistics.matrix_metric import WINDOW, MatrixMetric
from support.training import ACCUMULATING, FIXED, MakeTrainer, equal, learn, network, samples
from worker import adascale_problem
from worker.adascale_problem import batches, matrices, train_step
from worker.reference import Batch, MatrixMoments

OPTIONS: list[dict[str, Any]] = [
    {},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"weight_decay": 0.3, "momentum": 0.5, "nesterov": False},
]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, second = model.parameters()
    return [{"params": [first]}, {"params": [second], "lr": 0.02}]


def learnable_batches(count: int) -> list[Batch]:
    """Data whose true gradient is about as large as its noise."""
    return [(x, 0.5 * y + x[:, :2]) for x, y in batches(count)]


assert_matches_reference = partial(
    adascale_problem.assert_matches_reference, kind=torch.optim.Muon, data=learnable_batches, tolerance=1e-6
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gains_and_weights_are_those_of_the_reference(options: dict[str, Any]) -> None:
    assert_matches_reference(model=matrices(), options={"lr": 0.02, **options}, micro=3, scale=12.0, steps=30)


def test_each_group_has_its_own_gain() -> None:
    optimizer = assert_matches_reference(model=matrices(), micro=4, groups=two_groups)
    assert optimizer.gain(0) != optimizer.gain(1)


def test_one_replica_measures_the_difference_of_consecutive_gradients() -> None:
    optimizer = assert_matches_reference(model=matrices(), options={"lr": 1e-3}, scale=2.0)
    assert optimizer.estimate is not None
    assert optimizer.estimate.biased


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    steps=st.integers(1, 2 * WINDOW),
    unit=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_the_norm_is_that_of_the_gradient_times_the_inverse_root_of_its_second_moment(
    rows: int, columns: int, steps: int, unit: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, rows, columns, dtype=torch.float64, generator=generator)
    parameter = nn.Parameter(draw())
    metric, moments = MatrixMetric(MuonRule(torch.optim.Muon([parameter]))), MatrixMoments([[parameter]])
    for _ in range(steps):
        parameter.grad = draw() * unit
        metric.end_step()
        moments.add()
    gradient = draw() * unit
    expected = sum(x * x for x in moments.measured(gradient.flatten().tolist(), [parameter]))
    assert metric.sqr_norm(0, [parameter], [gradient], gradient.device).item() == pytest.approx(expected)
    assert metric.norm(0, parameter, gradient).item() ** 2 == pytest.approx(expected)
    (divided,) = metric.divided(0, [parameter], [gradient])
    assert divided.square().sum().item() == pytest.approx(expected)


def test_the_unit_of_the_loss_changes_no_gain() -> None:
    gains = []
    for unit in (1e-4, 1.0):
        model = matrices()
        optimizer = AdaScale(torch.optim.Muon(model.parameters(), lr=0.0), num_gradients_to_accumulate=2)
        for first in range(0, 12, 2):
            for x, y in learnable_batches(12)[first : first + 2]:
                loss: Any = (model(x) - y).square().mean() * unit
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        gains.append(optimizer.gain())
    assert gains[0] == pytest.approx(gains[1], rel=1e-9)
    assert 1.0 < gains[0] < 2.0


def test_a_matrix_that_is_used_later_counts_from_its_second_gradient_on() -> None:
    late = nn.Parameter(torch.zeros(2, 2))
    metric = MatrixMetric(MuonRule(torch.optim.Muon([late])))
    gradient = torch.ones(2, 2)
    assert metric.defined_groups() == []
    assert metric.norm(0, late, gradient).item() == 0.0
    assert metric.norm(0, late, gradient * float("inf")).isnan()
    late.grad = gradient
    metric.end_step()
    assert metric.defined_groups() == [0]
    assert metric.norm(0, late, gradient).item() > 0.0


def test_training_after_save_and_load_is_equal_to_the_bit() -> None:
    data = learnable_batches(24)

    def resumed(at: int) -> tuple[list[Tensor], float]:
        model = matrices()
        options: dict[str, Any] = {"num_gradients_to_accumulate": 2, "scale": 8.0}
        optimizer = AdaScale(torch.optim.Muon(model.parameters(), lr=0.02), **options)
        for step in range(12):
            if step == at:
                saved, state = optimizer.state_dict(), model.state_dict()
                model = matrices()
                model.load_state_dict(state)
                optimizer = AdaScale(torch.optim.Muon(model.parameters(), lr=0.02), **options)
                optimizer.load_state_dict(saved)
            train_step(optimizer, model, data[2 * step : 2 * step + 2])
        return [p.detach() for p in model.parameters()], optimizer.gain()

    (weights, gain), (resumed_weights, resumed_gain) = resumed(99), resumed(6)
    assert all(map(torch.equal, weights, resumed_weights))
    assert gain == resumed_gain > 1.0


class Shards:
    """A replica of one process, for a model that is not sharded."""

    def add_shards(self, tensor: Tensor) -> None: ...

    def add_replicas(self, tensor: Tensor) -> None: ...


def test_a_sharded_model_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"got Muon over a sharded model.* whole matrices"):
        AdaScale(torch.optim.Muon(matrices().parameters()), shards=Shards())


def network_with_optimizers() -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    model = network()
    matrix, *rest = model.parameters()
    return model, {"matrix": torch.optim.Muon([matrix], lr=0.01), "rest": torch.optim.AdamW(rest, lr=0.01)}


def make_steps(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer], x: Tensor, y: Tensor) -> None:
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    learn(model, x, y)
    for optimizer in optimizers.values():
        optimizer.step()


def test_muon_beside_adamw_trains_as_a_plain_loop_at_the_fixed_size(make_trainer: MakeTrainer) -> None:
    (model, optimizers), (plain, others) = network_with_optimizers(), network_with_optimizers()
    trainer = make_trainer(**FIXED)
    trainer.program_reentry({"model": model}, optimizers)
    indices = []
    for index, x, y in trainer.dataloader(samples()):
        make_steps(model, optimizers, x, y)
        indices.append(index)
    trainer.close()
    for index in indices:
        make_steps(plain, others, *samples()[index][1:])
    assert equal(list(model.parameters()), list(plain.parameters()))


def test_muon_and_adamw_are_measured_each_by_its_rule(make_trainer: MakeTrainer) -> None:
    model, optimizers = network_with_optimizers()
    trainer = make_trainer(**ACCUMULATING)
    trainer.program_reentry({"model": model}, optimizers)
    for _, x, y in trainer.dataloader(samples()):
        make_steps(model, optimizers, x, y)
    parts = trainer._require_training().optimizer.parts
    assert all(part.estimate is not None and part.grad_var > 0.0 for part in parts.values())
    assert isinstance(parts["matrix"].statistics.rule, MuonRule)
