"""Cases for two replicas under torchrun; each replica writes its results to OUT/rank<rank>.json."""

import copy
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer
from adascale_worker.batches.order import SampleSequence
from adascale_worker.errors import WorkerError
from adascale_worker.state.schedule import Checkpointing
from support.records import digest
from worker import reference

OUT = Path(os.environ["OUT"])
generator = torch.Generator().manual_seed(1)
features = torch.randn(64, 6, generator=generator)
dataset = TensorDataset(features, (features.sum(1) > 0).long())


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


class ToType(nn.Module):
    """Converts its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def train(trainer: ElasticTrainer, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> int:
    """Train some epochs, and return the number of optimizer steps."""
    micro_batches = 0
    steps = 0
    for epoch in range(epochs):
        for x, y in trainer.dataloader(dataset):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            micro_batches += 1
            steps += micro_batches % trainer.accumulation == 0
        trainer.step(epoch)
    return steps


def model_with_unused_parameters() -> dict[str, Any]:
    trainer = ElasticTrainer(batch_size=8, max_batch_size=32, local_bsz_bounds=(4, 16))
    torch.manual_seed(10 + trainer.rank)
    model = Net()
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    frozen = [parameter.detach().clone() for parameter in model.frozen.parameters()]
    trainer.program_reentry(model, optimizer)
    trained = digest(model.never.parameters())
    steps = train(trainer, model, optimizer, 3)
    return {
        "weights": digest(model.parameters()),
        "same_names": names == list(model.state_dict()),
        "frozen_moved": trainer.rank == 0
        and not all(
            map(torch.equal, frozen, (parameter.detach() for parameter in model.frozen.parameters()))
        ),
        "never_moved": digest(model.never.parameters()) != trained,
        "progress": trainer.progress,
        "steps": steps,
        "gain": trainer.adascale.gain(),
        "scale": trainer.adascale.scale,
    }


def trained_with_twin() -> tuple[ElasticTrainer, nn.Module, torch.optim.Optimizer, nn.Module]:
    """Return a trainer with several micro-batches per step, a model, its optimizer, and a copy of it."""
    trainer = ElasticTrainer(batch_size=16, local_bsz_bounds=(2, 4))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer)
    return trainer, model, optimizer, twin


def step_by_hand(twin: nn.Module) -> None:
    """Step as SGD does; the step of a second optimizer beside a batch would be refused."""
    with torch.no_grad():
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)


def micro_batches() -> dict[str, Any]:
    """Compare accumulation with clipping on two replicas with one large batch."""
    trainer, model, optimizer, twin = trained_with_twin()
    plan = [trainer.replicas, trainer.get_local_bsz(), trainer.accumulation]
    largest = 0.0
    sequence = SampleSequence(len(dataset), seed=0)
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
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            largest = max(largest, (ours - theirs).abs().max().item())
    return {"plan": plan, "difference": largest, "weights_of_micro_batches": digest(model.parameters())}


def weighted_micro_batches() -> dict[str, Any]:
    """Compare micro-batches of unequal weight with one large batch, and estimates with the reference."""
    trainer, model, optimizer, twin = trained_with_twin()
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

    largest, estimates, begins, totals = 0.0, [], [], []
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
        both: list[Any] = [None, None]
        dist.all_gather_object(both, own[-trainer.accumulation :])
        weights, gradients = zip(*[gradient_of(each) for part in both for each in part], strict=True)
        totals.append([trainer.step_weight, sum(weights)])
        if trainer.steps == 1:
            estimates = [
                (trainer.adascale.grad_sqr, trainer.adascale.grad_var),
                reference.sample(gradients, trainer.adascale.scale, weights),
            ]
        gradient_of([index for part in both for each in part for index in each])
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        step_by_hand(twin)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            largest = max(largest, (ours - theirs).abs().max().item())
    return {
        "weighted_difference": largest,
        "weighted_steps": trainer.steps,
        "weighted_estimates": estimates,
        "begins_step": begins,
        "step_weights": totals,
    }


def weighted_losses_of_two_optimizers() -> dict[str, Any]:
    """Compare micro-batches of unequal weight with one large batch, with an optimizer for each layer."""
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
    differences = [
        float((ours - theirs).abs().max())
        for name, model in models.items()
        for ours, theirs in zip(model.parameters(), twins[name].parameters(), strict=True)
    ]
    return {"difference_of_two_optimizers": max(differences)}


def changes_gradients() -> dict[str, Any]:
    """Change gradients in hooks before they are averaged, and after backward(), which is not refused."""
    trainer = ElasticTrainer(batch_size=16, local_bsz_bounds=(2, 4))
    torch.manual_seed(3)
    first = nn.Linear(6, 16)
    model = nn.Sequential(first, nn.ReLU(), ToType(torch.bfloat16), nn.Linear(16, 2).to(torch.bfloat16))
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
    return {"steps_with_changed_gradients": trainer.steps}


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


def recomputes_in_the_backward_pass() -> dict[str, Any]:
    trainer = ElasticTrainer(batch_size=16, local_bsz_bounds=(2, 4))
    torch.manual_seed(3)
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer)
    train(trainer, model, optimizer, 1)
    return {"steps_with_recomputed_gradients": trainer.steps}


def copies_of_the_model() -> dict[str, Any]:
    trainer = ElasticTrainer(batch_size=8)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 2))
    trainer.program_reentry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    found: dict[str, Any] = {}
    for name, copied in {"copied": average, "saved_and_loaded": loaded}.items():
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        copied.eval()
        model.eval()
        found[name] = {
            "own": copied(features).abs().sum().item(),
            "original": model(features).abs().sum().item(),
        }
        copied.train()
        found[name]["training"] = copied(features).abs().sum().item()
    return {"copies": found}


def other_seeds() -> dict[str, Any]:
    """The ranks begin with another seed, and another state of a registered object."""
    trainer = ElasticTrainer(batch_size=8, seed=100 + int(os.environ["RANK"]))
    torch.manual_seed(7)
    model, average = nn.Sequential(nn.Linear(6, 2)), nn.Linear(6, 2)
    with torch.no_grad():
        average.weight.add_(trainer.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer, register={"average": average})
    indices: list[int] = []
    for index, x in trainer.dataloader(TensorDataset(torch.arange(48), features[:48])):
        indices += index.tolist()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {"indices": indices, "average": digest([average.weight])}


def evaluation_on_rank_0() -> dict[str, Any]:
    """Rank 0 evaluates, and rank 1 does not."""
    trainer = ElasticTrainer(batch_size=8)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 2))
    trainer.program_reentry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if trainer.is_main:
        with torch.no_grad():
            model(features)
        model.eval()
        model(features)
    return {}


def evaluation_on_all() -> dict[str, Any]:
    """Share out an evaluation whose batches and samples do not divide evenly; only rank 0 makes the last."""
    trainer = ElasticTrainer(batch_size=8)
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))
    trainer.program_reentry(model, torch.optim.SGD(model.parameters(), lr=0.1))
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

    shared = evaluate()
    alone = evaluate() if trainer.is_main else None
    next(trainer.dataloader(dataset))
    return {"evaluation": {"shared": shared, "alone": alone, "buffers": float(next(model.buffers())[0])}}


def sums_over_replicas() -> dict[str, Any]:
    """Add up numbers between steps, several times at the same place."""
    trainer = ElasticTrainer(batch_size=8)
    model = nn.Sequential(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer)
    found: list[dict[str, float]] = []
    for number, (x, y) in enumerate(trainer.dataloader(dataset)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for repeat in range(4):
            value = 10.0 * number + repeat + 0.1 * trainer.rank
            found.append(trainer.sum_over_replicas(value=value, replicas=1))
    trainer.step(0)
    names = {"a": 1.0, "b": 2.0} if trainer.is_main else {"a": 1.0}
    try:
        trainer.sum_over_replicas(**names)
    except WorkerError as error:
        refusal = str(error)
    return {"sums": found, "refusal_of_sums": refusal}


def skip_time(seconds: float) -> None:
    """Advance the clock of this process."""
    monotonic = time.monotonic
    time.monotonic = lambda: monotonic() + seconds


def saves() -> dict[str, Any]:
    """Make a checkpoint due once, and record the saves."""
    trainer = ElasticTrainer(batch_size=8, checkpoint_dir=OUT / "checkpoints", checkpoint_interval=10_000)
    model = nn.Sequential(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer)
    saved: list[int] = []
    writers: list[Checkpointing] = []
    own = Checkpointing.start

    def save(self: Checkpointing, state: dict[str, Any], *arguments: Any) -> Any:
        saved.append(state["progress"]["step"])
        writers.append(self)
        return own(self, state, *arguments)

    Checkpointing.start = save  # type: ignore[method-assign, assignment]
    for number, (x, y) in enumerate(trainer.dataloader(dataset)):
        if number == 2:
            for writer in writers:
                writer.wait()
            skip_time(20_000)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"saved": saved}


results: dict[str, Any] = {}
for case in (
    evaluation_on_all,
    sums_over_replicas,
    model_with_unused_parameters,
    micro_batches,
    weighted_micro_batches,
    weighted_losses_of_two_optimizers,
    changes_gradients,
    recomputes_in_the_backward_pass,
    copies_of_the_model,
    other_seeds,
    evaluation_on_rank_0,
    saves,
):
    results |= case()
(OUT / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
