"""Tests of method overrides: they apply to the program's own objects, and not to copies of them."""

import copy
import io

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from support.training import ACCUMULATING, MakeTrainer, learn, network, samples, sgd


def enter(make_trainer: MakeTrainer) -> tuple[nn.Module, torch.optim.SGD, LRScheduler]:
    """Return a program between the first two micro-batches of a step."""
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, step_size=1)
    trainer.program_reentry(model, optimizer, scheduler)
    _, x, y = next(trainer.dataloader(samples()))
    learn(model, x, y)
    optimizer.step()
    return model, optimizer, scheduler


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_a_copy_of_the_model_zeroes_its_own_gradients(make_trainer: MakeTrainer) -> None:
    model, _, _ = enter(make_trainer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for twin in (copy.deepcopy(model), save_and_load(model)):
        for parameter in twin.parameters():
            parameter.grad = torch.ones_like(parameter)
        twin.zero_grad()
        assert all(parameter.grad is None for parameter in twin.parameters())
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_copy_of_the_optimizer_steps_by_itself(make_trainer: MakeTrainer) -> None:
    _, optimizer, _ = enter(make_trainer)
    twin = copy.deepcopy(optimizer)
    parameter = twin.param_groups[0]["params"][0]
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert not torch.equal(parameter, before)


def test_state_dicts_are_those_of_unpatched_objects(make_trainer: MakeTrainer) -> None:
    model, optimizer, scheduler = enter(make_trainer)
    twin = network()
    twin_optimizer = sgd(twin)
    twin_scheduler = StepLR(twin_optimizer, step_size=1)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert optimizer.state_dict().keys() == twin_optimizer.state_dict().keys()
    assert scheduler.state_dict().keys() == twin_scheduler.state_dict().keys()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    assert len(torch.load(file, weights_only=True)) == 3


def test_patched_methods_keep_their_names_and_docstrings(make_trainer: MakeTrainer) -> None:
    _, optimizer, scheduler = enter(make_trainer)
    assert optimizer.step.__name__ == "step"
    assert scheduler.step.__doc__ == LRScheduler.step.__doc__
