"""AdaScale that observes an optimizer, and changes nothing."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adascale import AdaScale, Observation
from adascale.errors import UnsupportedOptimizerError
from worker.adascale_problem import backward, batches, network, one_group, squared_error

MICRO = 4
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 10, closes: bool = False
) -> None:
    """Accumulate `MICRO` gradients for each step, with `step(closure)` if it `closes`."""
    stream = iter(batches(steps * MICRO))
    for _ in range(steps):

        def gradients() -> float:
            optimizer.zero_grad()
            losses = [squared_error(model, next(stream)) / MICRO for _ in range(MICRO)]
            for loss in losses:
                backward(loss)
            return sum(loss.item() for loss in losses)

        if closes:
            optimizer.step(gradients)
        else:
            gradients()
            optimizer.step()


def observed(
    kind: Any, options: dict[str, Any], *, closes: bool = False, of_inner: bool = True
) -> tuple[nn.Module, list[Observation]]:
    """Train with an observed optimizer. The program steps the optimizer itself, or that of AdaScale."""
    seen: list[Observation] = []
    model = network()
    inner = kind(one_group(model), **options)
    adascale = AdaScale(
        inner, num_gradients_to_accumulate=MICRO, sample_every=1, observe=seen.append, observe_every=1
    )
    optimizer = inner if of_inner else adascale
    del adascale
    train(model, optimizer, closes=closes)
    return model, seen


@pytest.mark.parametrize("of_inner", [True, False], ids=["the program's optimizer", "AdaScale"])
@pytest.mark.parametrize("closes", [False, True], ids=["step", "closure"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, SGD), (torch.optim.AdamW, {"lr": 0.01})],
    ids=["SGD", "AdamW"],
)
def test_training_is_that_of_the_plain_optimizer(
    kind: Any, options: dict[str, Any], *, closes: bool, of_inner: bool
) -> None:
    plain = network()
    train(plain, kind(one_group(plain), **options), closes=closes)
    model, seen = observed(kind, options, closes=closes, of_inner=of_inner)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    first = 1 if kind is torch.optim.SGD else 2  # AdamW has no second moments before
    assert [each.step for each in seen] == list(range(first, 11))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.0}), (torch.optim.AdamW, {"lr": 0.0})],
    ids=["SGD", "AdamW"],
)
def test_the_estimates_are_those_of_adascale_in_charge(kind: Any, options: dict[str, Any]) -> None:
    """With a lr of 0, for equal weights in all steps."""
    model = network()
    in_charge = AdaScale(kind(one_group(model), **options), num_gradients_to_accumulate=MICRO, sample_every=1)
    train(model, in_charge, steps=2 if kind is torch.optim.AdamW else 10)
    _, seen = observed(kind, options)
    last = next(each for each in seen if each.step == 2) if kind is torch.optim.AdamW else seen[-1]
    assert last.gain == pytest.approx(in_charge.gain(), rel=1e-9)
    assert last.grad_sqr == pytest.approx(max(in_charge.grad_sqr, 0.0), rel=1e-9)
    assert last.grad_var == pytest.approx(in_charge.grad_var, rel=1e-9)


def test_a_critical_batch_has_an_efficiency_of_a_half() -> None:
    _, seen = observed(torch.optim.SGD, SGD)
    for each in seen:
        assert each.scale == MICRO
        assert each.efficiency == each.gain / MICRO
        if each.grad_sqr > 0.0:
            s = each.critical_batch
            gain = (each.grad_var + each.grad_sqr) / (each.grad_var / s + each.grad_sqr)
            assert gain / s == pytest.approx(0.5)


def test_observations_are_written_to_a_file_or_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gain.csv"
    for _ in range(2):  # a second run appends
        model = network()
        inner = torch.optim.SGD(one_group(model), **SGD)
        AdaScale(inner, num_gradients_to_accumulate=MICRO, observe=path, observe_every=5)
        train(model, inner)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["step"] for row in rows] == ["5", "10"] * 2
    assert all(1.0 <= float(row["gain"]) <= MICRO for row in rows)
    model = network()
    inner = torch.optim.SGD(one_group(model), **SGD)
    AdaScale(inner, num_gradients_to_accumulate=MICRO, observe=True, observe_every=5)
    train(model, inner)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:40] for line in lines] == [
        f"adascale: step {n}: a batch of 4 is worth "[:40] for n in (5, 10)
    ]


def test_training_goes_on_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    model = network()
    inner = torch.optim.SGD(one_group(model), **SGD)
    AdaScale(inner, num_gradients_to_accumulate=MICRO, observe=tmp_path, observe_every=5)  # a folder
    with pytest.warns(RuntimeWarning, match="observations can not be written to"):
        train(model, inner)


def test_an_optimizer_without_a_metric_is_observed_in_the_euclidean_norm() -> None:
    seen: list[Observation] = []
    model = nn.Linear(3, 2)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    with pytest.warns(RuntimeWarning, match="observes RMSprop in the Euclidean norm"):
        AdaScale(optimizer, num_gradients_to_accumulate=2, observe=seen.append, observe_every=1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            (model(torch.randn(4, 3)).square().mean() / 2).backward()
        optimizer.step()
    assert [each.step for each in seen] == [1, 2, 3]


def test_what_cannot_be_observed_is_an_error(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
        AdaScale(torch.optim.LBFGS(model.parameters()), observe=True)
    with pytest.raises(ValueError, match=r"there is no folder .*absent: create it before"):
        AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), observe=tmp_path / "absent" / "gain.csv")
    with pytest.raises(ValueError, match="got observe_every=0"):
        AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), observe=True, observe_every=0)
