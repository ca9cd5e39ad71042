"""Two replicas under torchrun, which run all cases one after the other: this file is their program."""

from __future__ import annotations

import copy
import io
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer
from adascale_worker.batches.order import shuffled
from adascale_worker.errors import WorkerError
from adascale_worker.state.schedule import Checkpointing
from support.launch import PROGRAMS, run_python
from support.records import digest
from worker import reference

generator = torch.Generator().manual_seed(1)
features = torch.randn(64, 6, generator=generator)
dataset = TensorDataset(features, (features.sum(1) > 0).long())


def of_both(value: Any) -> list[Any]:
    """Return the values of both replicas."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, value)
    return found


class Net(nn.Module):
    """Has batch normalization, a frozen layer, a layer used in every second step, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 2)
        self.frozen = nn.Linear(6, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.seldom = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden: Tensor = torch.relu(self.norm(self.frozen(x)))
        if self.calls % 2:
            hidden = hidden + self.seldom(hidden)
        out: Tensor = self.last(hidden)
        return out


def train(trainer: ElasticTrainer, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train one epoch."""
    for x, y in trainer.dataloader(dataset):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def entered(model: nn.Module, **options: Any) -> tuple[ElasticTrainer, torch.optim.Optimizer]:
    """Return a trainer that has entered training, and an optimizer of the model."""
    trainer = ElasticTrainer(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer)
    return trainer, optimizer


def weights_and_gains_are_equal_and_frozen_and_unused_parameters_unchanged() -> None:
    trainer = ElasticTrainer(batch_size=8, max_batch_size=32, local_bsz_bounds=(4, 16))
    torch.manual_seed(10 + trainer.rank)
    model = Net()
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    frozen = [parameter.detach().clone() for parameter in model.frozen.parameters()]
    trainer.program_reentry(model, optimizer)
    never = digest(model.never.parameters())
    for epoch in range(3):
        train(trainer, model, optimizer)
        trainer.step(epoch)
    assert names == list(model.state_dict())
    if trainer.rank == 0:
        assert all(map(torch.equal, frozen, model.frozen.parameters()))
    assert digest(model.never.parameters()) == never
    ours, theirs = of_both((digest(model.parameters()), trainer.progress, trainer.adascale.gain()))
    assert ours == theirs
    assert 1 <= trainer.adascale.gain() <= trainer.adascale.scale
    assert trainer.progress >= 24
    assert trainer.steps <= trainer.progress


def layers() -> nn.Sequential:
    """Return a model with the same weights on both replicas."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def step_by_hand(twin: nn.Module) -> None:
    """Step as SGD does; the step of a second optimizer beside a batch would be refused."""
    with torch.no_grad():
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)


def require_equal(model: nn.Module, twin: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours - theirs).abs().max().item() < 1e-6


def micro_batches_equal_a_step_with_the_large_batch() -> None:
    model = layers()
    twin = copy.deepcopy(model)
    trainer, optimizer = entered(model, batch_size=16, local_bsz_bounds=(2, 4))
    assert (trainer.replicas, trainer.get_local_bsz(), trainer.accumulation) == (2, 4, 2)
    sequence = shuffled(len(dataset), 0)
    batches = trainer.dataloader(dataset)
    for start in range(0, 64, 16):
        order = torch.tensor(sequence[start : start + 16])
        for _ in range(trainer.accumulation):
            x, y = next(batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        twin.zero_grad()
        nn.functional.cross_entropy(twin(features[order]), dataset.tensors[1][order]).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        step_by_hand(twin)
        require_equal(model, twin)
    ours, theirs = of_both(digest(model.parameters()))
    assert ours == theirs


def micro_batches_of_unequal_weight_equal_a_step_with_the_large_batch() -> None:
    """Their estimates are those of the reference."""
    model = layers()
    twin = copy.deepcopy(model)
    trainer, optimizer = entered(model, batch_size=16, local_bsz_bounds=(2, 4))
    labels = torch.where(torch.arange(64) % 5 < 3, dataset.tensors[1], -1)
    labels[:3] = -1
    own: list[list[int]] = []

    def learn(model: nn.Module, indices: list[int], *, alone: bool) -> float:
        targets = labels[indices]
        weight = int((targets != -1).sum())
        output = model(features[indices])
        losses = nn.functional.cross_entropy(output, targets, ignore_index=-1, reduction="sum")
        loss = losses / max(weight, 1)
        (loss if alone else trainer.weighted(loss, weight)).backward()
        return weight

    def gradient_of(indices: list[int]) -> tuple[float, list[float]]:
        twin.zero_grad()
        weight = learn(twin, indices, alone=True)
        gradients = [p.grad.flatten() for p in twin.parameters() if p.grad is not None]
        return weight, torch.cat(gradients).tolist()

    begins = []
    indexed = TensorDataset(torch.arange(64), features)
    for indices, _ in trainer.dataloader(indexed, shuffle=False):
        begins.append(trainer.begins_step)
        own.append(indices.tolist())
        optimizer.zero_grad()
        learn(model, own[-1], alone=False)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if not trainer.made_step:
            continue
        both = of_both(own[-trainer.accumulation :])
        weights, gradients = zip(*[gradient_of(each) for part in both for each in part], strict=True)
        assert trainer.step_weight == pytest.approx(sum(weights))
        if trainer.steps == 1:
            estimates = trainer.adascale.grad_sqr, trainer.adascale.grad_var
            expected = reference.sample(gradients, trainer.adascale.scale, weights)
            assert estimates == pytest.approx(expected, rel=1e-4)
        gradient_of([index for part in both for each in part for index in each])
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        step_by_hand(twin)
        require_equal(model, twin)
    assert trainer.steps == 4
    assert begins == [True, False] * 4


def weighted_losses_of_two_optimizers_equal_a_step_with_the_large_batch() -> None:
    """Each layer has an optimizer."""
    trainer = ElasticTrainer(batch_size=16, local_bsz_bounds=(2, 4))
    torch.manual_seed(3)
    models = {"first": nn.Linear(6, 4), "last": nn.Linear(4, 2)}
    twins = copy.deepcopy(models)
    optimizers, plain = (
        {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in each.items()}
        for each in (models, twins)
    )
    trainer.program_reentry(dict(models), dict(optimizers))

    def learn(models: dict[str, nn.Linear], indices: Tensor, *, alone: bool) -> None:
        labels = torch.where(indices % 5 < 3, dataset.tensors[1][indices], -1)
        output = models["last"](models["first"](features[indices]))
        weight = int((labels != -1).sum())
        loss = nn.functional.cross_entropy(output, labels, ignore_index=-1, reduction="sum") / max(weight, 1)
        (loss if alone else trainer.weighted(loss, weight)).backward()

    for indices, _ in trainer.dataloader(TensorDataset(torch.arange(64), features), shuffle=False):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        learn(models, indices, alone=False)
        for optimizer in optimizers.values():
            optimizer.step()
    for start in range(0, 64, 16):
        learn(twins, torch.arange(start, start + 16), alone=True)
        for optimizer in plain.values():
            optimizer.step()
            optimizer.zero_grad()
    for name, model in models.items():
        require_equal(model, twins[name])


class ToBfloat16(nn.Module):
    """Converts its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


def a_program_may_change_gradients_before_they_are_averaged_and_after_backward() -> None:
    torch.manual_seed(3)
    first = nn.Linear(6, 16)
    model = nn.Sequential(first, nn.ReLU(), ToBfloat16(), nn.Linear(16, 2).to(torch.bfloat16))
    trainer = ElasticTrainer(batch_size=16, local_bsz_bounds=(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    trainer.program_reentry(model, optimizer, register={"scaler": scaler})

    def clamp(bias: Tensor) -> None:
        assert bias.grad is not None
        bias.grad.clamp_(-0.01, 0.01)

    first.weight.register_hook(lambda gradient: 2.0 * gradient)
    first.bias.register_post_accumulate_grad_hook(clamp)
    for x, y in trainer.dataloader(dataset):
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x).float(), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    assert trainer.steps == 4


class Recomputed(torch.autograd.Function):
    """Computes a layer again in the backward pass, and its gradients with `torch.autograd.grad`."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
        ctx.layer, ctx.x = layer, x
        with torch.no_grad():
            out: Tensor = layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        return None, *torch.autograd.grad(out, [x, *ctx.layer.parameters()], gradients)


class Checkpointed(nn.Module):
    """Has a layer that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Recomputed.apply(self.last, self.first(x), *self.last.parameters())
        return out


def a_program_may_call_torch_autograd_grad_in_the_backward_pass() -> None:
    model = Checkpointed()
    trainer, optimizer = entered(model, batch_size=16, local_bsz_bounds=(2, 4))
    train(trainer, model, optimizer)
    assert trainer.steps == 4


def a_copy_of_the_model_uses_its_own_parameters() -> None:
    """Averaging of weights and `torch.save(model)` require this."""
    model = nn.Sequential(nn.Linear(6, 2))
    entered(model, batch_size=8)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        copied.eval()
        model.eval()
        assert not copied(features).any()
        assert model(features).any()
        copied.train()
        assert not copied(features).any()


def all_ranks_begin_with_the_seed_and_the_registered_objects_of_rank_0() -> None:
    trainer = ElasticTrainer(batch_size=8, seed=100 + int(os.environ["RANK"]))
    model, average = nn.Sequential(nn.Linear(6, 2)), nn.Linear(6, 2)
    with torch.no_grad():
        average.weight.fill_(trainer.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer, register={"average": average})
    indices: list[int] = []
    for index, x in trainer.dataloader(TensorDataset(torch.arange(48), features[:48])):
        indices += index.tolist()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    ours, theirs = of_both(indices)
    assert sorted(ours + theirs) == list(range(48))
    assert not average.weight.any()


def rank_0_may_evaluate_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    trainer, _ = entered(model, batch_size=8)
    if trainer.is_main:
        with torch.no_grad():
            model(features)
        model.eval()
        model(features)


def an_evaluation_is_shared_out_without_padding_and_has_the_same_result_on_all_replicas() -> None:
    """Its batches and samples do not divide evenly."""
    model = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))
    trainer, _ = entered(model, batch_size=8)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(trainer.rank)
    model.eval()

    def evaluate() -> tuple[dict[str, float], dict[str, float], list[int]]:
        evaluation = trainer.evaluation(TensorDataset(torch.arange(43), features[:43]), batch_size=5)
        delivered = []
        with torch.no_grad():
            for index, x in evaluation:
                delivered += index.tolist()
                output = model(x)
                evaluation.add(loss=output.sum(), samples=len(x), positive=(output > 0).sum())
        return evaluation.sums, evaluation.means, delivered

    *results, delivered = evaluate()
    if trainer.is_main:
        # One replica that evaluates alone gets all samples, and the same numbers to the last bit.
        *alone, all_samples = evaluate()
        assert alone == results
        assert sorted(all_samples) == list(range(43))
    next(trainer.dataloader(dataset))
    (ours, own), (theirs, others) = of_both((results, delivered))
    assert ours == theirs
    assert (len(own), len(others)) == (23, 20)
    assert sorted(own + others) == list(range(43))
    assert results[0]["samples"] == 43
    assert isinstance(results[0]["positive"], int)
    assert float(next(model.buffers())[0]) == 0.0, "that of rank 0"


def sums_over_replicas_are_the_same_on_all_of_them() -> None:
    """Several of them are made at the same place, between steps."""
    model = nn.Sequential(nn.Linear(6, 2))
    trainer, optimizer = entered(model, batch_size=8)
    found: list[dict[str, float]] = []
    for number, (x, y) in enumerate(trainer.dataloader(dataset)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for repeat in range(4):
            value = 10.0 * number + repeat + 0.1 * trainer.rank
            found.append(trainer.sum_over_replicas(value=value, replicas=1))
    trainer.step(0)
    expected = [20.0 * number + 2 * repeat + 0.1 for number in range(8) for repeat in range(4)]
    assert [sums["value"] for sums in found] == pytest.approx(expected)
    assert {sums["replicas"] for sums in found} == {2.0}
    ours, theirs = of_both(found)
    assert ours == theirs
    with pytest.raises(WorkerError, match="with the same names on all replicas"):
        trainer.sum_over_replicas(**({"a": 1.0, "b": 2.0} if trainer.is_main else {"a": 1.0}))


def a_checkpoint_is_saved_at_the_first_step_and_once_when_it_is_due() -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    folder = Path(os.environ["OUT"]) / "checkpoints"
    trainer, optimizer = entered(model, batch_size=8, checkpoint_dir=folder, checkpoint_interval=10_000)
    saved: list[int] = []
    writers: list[Checkpointing] = []
    with pytest.MonkeyPatch.context() as patched:
        start, monotonic = Checkpointing.start, time.monotonic

        def save(self: Checkpointing, state: dict[str, Any], *arguments: Any) -> Any:
            saved.append(state["progress"]["step"])
            writers.append(self)
            return start(self, state, *arguments)

        patched.setattr(Checkpointing, "start", save)
        for number, (x, y) in enumerate(trainer.dataloader(dataset)):
            if number == 2:
                for writer in writers:
                    writer.wait()
                patched.setattr(time, "monotonic", lambda: monotonic() + 20_000)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if trainer.is_main:
        first, second = saved
        assert first == 1
        assert second >= 3
    else:
        assert saved == []


CASES: tuple[Callable[[], None], ...] = (
    an_evaluation_is_shared_out_without_padding_and_has_the_same_result_on_all_replicas,
    sums_over_replicas_are_the_same_on_all_of_them,
    weights_and_gains_are_equal_and_frozen_and_unused_parameters_unchanged,
    micro_batches_equal_a_step_with_the_large_batch,
    micro_batches_of_unequal_weight_equal_a_step_with_the_large_batch,
    weighted_losses_of_two_optimizers_equal_a_step_with_the_large_batch,
    a_program_may_change_gradients_before_they_are_averaged_and_after_backward,
    a_program_may_call_torch_autograd_grad_in_the_backward_pass,
    a_copy_of_the_model_uses_its_own_parameters,
    all_ranks_begin_with_the_seed_and_the_registered_objects_of_rank_0,
    rank_0_may_evaluate_alone,
    a_checkpoint_is_saved_at_the_first_step_and_once_when_it_is_due,
)


def run_cases(folder: Path) -> None:
    """Run all cases on this replica, and write the traceback of each that fails."""
    for case in CASES:
        try:
            case()
        except Exception:  # noqa: BLE001 (reported as the result of the case)
            with (folder / case.__name__).open("a") as file:
                file.write(traceback.format_exc())


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the tracebacks of the cases that have failed."""
    folder = tmp_path_factory.mktemp("ranks")
    run_python(__file__, replicas=2, OUT=folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_replicas(case: Callable[[], None], failures: Path) -> None:
    file = failures / case.__name__
    assert not file.exists(), file.read_text()


@pytest.mark.slow
def test_three_restarted_replicas_round_like_replicas_that_continue() -> None:
    undisturbed, *disturbed = run_python(PROGRAMS / "buckets.py", replicas=3).split()
    assert disturbed == [undisturbed] * 2


if __name__ == "__main__":
    run_cases(Path(os.environ["OUT"]))
