"""What a program passes to the trainer, and what is refused of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, WeightedRandomSampler

from adascale.errors import UnsupportedOptimizerError
from adascale_worker.errors import DatasetError, WorkerError
from support.training import (
    ACCUMULATING,
    FIXED,
    MakeTrainer,
    adamw,
    entered,
    equal,
    learn,
    make_step,
    network,
    parameters_of,
    samples,
    sgd,
)


@pytest.mark.parametrize("seed", [1.5, "1", True, 2**64])
def test_a_seed_that_is_no_integer_of_64_bits_is_an_error(make_trainer: MakeTrainer, seed: object) -> None:
    with pytest.raises(WorkerError, match="it must be an integer of 64 bits"):
        make_trainer(**FIXED, seed=seed)


# -- the data set ---------------------------------------------------------------------------------------


class Doubled:
    """A collate_fn that pickle supports."""

    def __call__(self, items: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[int], Tensor, Tensor]:
        index, x, y = zip(*items, strict=True)
        return [int(i) for i in index], 2 * torch.stack(x), torch.stack(y)


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_passes_its_options_to_torch(make_trainer: MakeTrainer, workers: int) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    data = samples()
    batches: list[int] = []
    for index, x, y in trainer.dataloader(data, num_workers=workers, collate_fn=Doubled(), pin_memory=False):
        assert torch.equal(x, 2 * data.tensors[1][index])
        make_step(model, optimizer, x, y)
        batches += index
    assert sorted(batches) == list(range(48))


@pytest.mark.parametrize("option", ["batch_size", "sampler", "batch_sampler", "drop_last", "generator"])
def test_options_that_choose_the_batches_are_an_error(make_trainer: MakeTrainer, option: str) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    trainer.program_reentry(model, sgd(model))
    with pytest.raises(DatasetError, match=f"got {option}, but the trainer chooses the batches"):
        trainer.dataloader(samples(), shuffle=True, **{option: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "sampler"),
    [
        ("sampler", WeightedRandomSampler([1.0] * 48, 48)),
        ("batch_sampler", BatchSampler(SequentialSampler(range(48)), 8, drop_last=False)),
    ],
)
def test_a_sampler_is_refused_with_a_line_that_works(
    make_trainer: MakeTrainer, option: str, sampler: Any
) -> None:
    trainer, model = make_trainer(**FIXED), network()
    trainer.program_reentry(model, sgd(model))
    data = samples()
    with pytest.raises(DatasetError, match=rf"got {option}={type(sampler).__name__}\(\.\.\.\)") as error:
        trainer.dataloader(data, **{option: sampler})
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]
    names = {"trainer": trainer, "torch": torch, "dataset": data, "weights": torch.ones(48)}
    for line in lines:
        assert eval(line, {**names, "lengths": range(48)}) is not None
    assert len(lines) == 2


class Unmeasured(Dataset[int]):
    """Has no length."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("bounds", "data", "message"),
    [
        (FIXED, samples(7), r"has 7 samples, fewer than batch_size \(8\)"),
        (
            {"batch_size": 8, "max_batch_size": 64},
            samples(48),
            r"has 48 samples, fewer than max_batch_size \(64\)",
        ),
        (
            {"batch_size": 8, "local_bsz_bounds": (4, 64)},
            samples(7),
            r"has 7 samples, fewer than batch_size \(8\)",
        ),
        (
            {"batch_size": 8, "max_batch_size": 64},
            samples(7),
            r"fewer than max_batch_size \(64\): set batch_size and max_batch_size to at most 7",
        ),
        (
            {"batch_size": 8},
            samples(1),
            r"has 1 sample, fewer .* set batch_size to at most 1, in the job file if there is one, or",
        ),
        ({"batch_size": 8, "max_batch_size": 64}, samples(0), r"\(type TensorDataset\) has 0 samples: check"),
        (FIXED, DataLoader(samples(48)), r"got a DataLoader in place of a data set, but the trainer makes"),
        (FIXED, 3, r"\(type int\) has no length"),
        (FIXED, Unmeasured(), r"\(type Unmeasured\) has no length"),
    ],
)
def test_an_unsuitable_data_set_is_an_error(
    make_trainer: MakeTrainer, bounds: dict[str, Any], data: Any, message: str
) -> None:
    trainer = make_trainer(**bounds)
    model = network()
    trainer.program_reentry(model, sgd(model))
    with pytest.raises(DatasetError, match=message):
        trainer.dataloader(data)


def test_a_data_set_of_another_length_is_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    trainer.program_reentry(model, sgd(model))
    trainer.dataloader(samples(48))
    for allow_other_length in (False, True):
        with pytest.raises(DatasetError, match="has 40 samples, but had 48 before: a job trains on one data"):
            trainer.dataloader(samples(40), allow_other_length=allow_other_length)


def test_dataloader_before_program_reentry_is_an_error(make_trainer: MakeTrainer) -> None:
    with pytest.raises(WorkerError, match="call program_reentry"):
        make_trainer(**FIXED).dataloader(samples())


# -- invalid calls --------------------------------------------------------------------------------------


def test_a_second_program_reentry_is_an_error(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    with pytest.raises(WorkerError, match="was called before"):
        trainer.program_reentry(model, optimizer)


def test_another_optimizer_is_an_error(make_trainer: MakeTrainer) -> None:
    model = network()
    with pytest.raises(UnsupportedOptimizerError, match=r"got Adagrad; .*torch.optim.SGD"):
        make_trainer(**FIXED).program_reentry(model, torch.optim.Adagrad(model.parameters()))


def test_a_list_of_models_is_an_error_that_shows_the_dicts(make_trainer: MakeTrainer) -> None:
    models: Any = [network(), network()]
    optimizers: Any = [sgd(each) for each in models]
    with pytest.raises(WorkerError, match=r"of type list: .*program_reentry\(\{name: model, \.\.\.\}"):
        make_trainer(**FIXED).program_reentry(models, optimizers)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_closure_that_computes_the_gradients_is_called_once_for_each_micro_batch(
    make_trainer: MakeTrainer, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    def trained(*, by_closure: bool) -> tuple[list[Tensor], list[float], int]:
        trainer, model, losses = make_trainer(**ACCUMULATING), network(), []
        optimizer = make_optimizer(model)
        trainer.program_reentry(model, optimizer)

        batches = []
        for _, x, y in trainer.dataloader(samples()):

            def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
                batches.append(x)
                optimizer.zero_grad()
                return learn(model, x, y)

            if by_closure:
                with torch.no_grad():  # torch's optimizers compute gradients here too
                    loss: Any = optimizer.step(compute)  # type: ignore[arg-type]
            else:
                loss = compute()
                optimizer.step()
            losses.append(float(loss.detach()))
        trainer.step(0)
        assert trainer.steps == 4
        trainer.close()
        return parameters_of(model), losses, len(batches)

    weights, losses, calls = trained(by_closure=True)
    same_weights, same_losses, _ = trained(by_closure=False)
    assert calls == 12
    assert losses == same_losses
    assert equal(weights, same_weights)


def test_lbfgs_is_refused_by_name(make_trainer: MakeTrainer) -> None:
    model = network()
    with pytest.raises(
        UnsupportedOptimizerError, match="got LBFGS, which computes the gradients of one step"
    ):
        make_trainer(**FIXED).program_reentry(model, torch.optim.LBFGS(model.parameters()))


class MuonWithAdam(torch.optim.AdamW):
    """As programs write it: AdamW, and another step for matrices."""


class Muon(torch.optim.Optimizer):
    """Of another package than torch."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})


class Lion(torch.optim.SGD):
    """A subclass of a supported optimizer with another step."""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Muon, "whose step has singular values of 1"),
        (MuonWithAdam, "whose step has singular values of 1"),
        (Lion, "whose step is the sign of its momentum"),
        (torch.optim.Adafactor, "which keeps no second moment of each parameter"),
    ],
)
def test_optimizers_without_a_measured_rule_are_refused_by_name_also_beside_another(
    make_trainer: MakeTrainer, kind: type[torch.optim.Optimizer], reason: str
) -> None:
    matrix, rest = nn.Linear(6, 6, bias=False), nn.Linear(6, 2)
    optimizer = kind(matrix.parameters(), lr=0.01)  # type: ignore[call-arg]
    message = rf"got {kind.__name__}, {reason}.*Use torch\.optim\.AdamW for all parameters, or beside "
    with pytest.raises(UnsupportedOptimizerError, match=message):
        make_trainer(**FIXED).program_reentry(matrix, optimizer)
    others = {"matrices": optimizer, "rest": torch.optim.AdamW(rest.parameters())}
    with pytest.raises(UnsupportedOptimizerError, match=message):
        make_trainer(**FIXED).program_reentry({"all": nn.Sequential(matrix, rest)}, others)


@pytest.mark.parametrize("begin_at", [(0, -1), (True, 3), (1, 2.0), (3,), 5])
def test_a_begin_that_is_no_place_is_an_error(make_trainer: MakeTrainer, begin_at: Any) -> None:
    model = network()
    with pytest.raises(WorkerError, match=r"begin_at=.*: it must be \(epoch, steps\)"):
        make_trainer(**FIXED).program_reentry(model, sgd(model), begin_at=begin_at)


# -- values that cannot be saved or reported ------------------------------------------------------------


def test_registering_a_value_without_state_is_an_error_at_once(make_trainer: MakeTrainer) -> None:
    model = network()
    with pytest.raises(WorkerError, match=r"register\['best'\] is of type float, .*register_buffer\('best'"):
        make_trainer(**FIXED).program_reentry(model, sgd(model), register={"best": 0.0})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"got no value: call trainer\.log\(loss=loss"),
        ({"lr": "0.1"}, "got a str for lr: pass a number or a tensor"),
        ({"best": True}, "got a bool for best"),
        ({"loss": torch.zeros(0)}, "got an empty or complex tensor for loss"),
        ({"genauigkeit_ü": 1.0}, "got the name 'genauigkeit_ü': use at most 64 of a-z"),
        ({f"m{number}": 1.0 for number in range(17)}, "a job has at most 16, the loss included"),
    ],
)
def test_logging_what_cannot_be_reported_is_an_error(
    make_trainer: MakeTrainer, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        make_trainer(**FIXED).log(**values)


def test_at_most_16_metrics_are_logged_in_one_call_or_several(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    for _ in range(2):
        for number in range(15):
            trainer.log(**{f"m{number}": number})
        trainer.log(loss=torch.ones(2))
    with pytest.raises(WorkerError, match="got accuracy, loss after 15 other metrics"):
        trainer.log(accuracy=1.0, loss=1.0)
