"""A training program whose loop is written in the way that LOOP names.

Environment: STATE, the checkpoint folder (optional); STEPS, the scale-invariant steps (default 60); EPOCHS,
the epochs of a program that requires no steps.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

from adascale import ElasticTrainer
from adascale_worker.program import weight_checks
from support.gan import Gan, noise_of
from support.training import samples

loop = os.environ["LOOP"]
if loop.startswith("Accelerate"):
    from accelerate import Accelerator
steps = int(os.environ.get("STEPS", "60"))


class Net(nn.Module):
    """Has its loss in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"head": nn.Linear(6, 2)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts["head"](x)
        return self.parts["norm"](out) if "norm" in self.parts else out

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.parts["head"](x), y)


trainer = ElasticTrainer(
    batch_size=8,
    local_bsz_bounds=(1, 2) if "micro-batch" in loop else None,
    scale_invariant_steps=None if "EPOCHS" in os.environ else steps,
    checkpoint_dir=os.environ.get("STATE"),
    checkpoint_interval=0.0,
    max_nonfinite_steps=int(os.environ.get("MAX_NONFINITE_STEPS", "10")),
)
if loop == "GAN":
    # Other initial weights on each replica: those of rank 0 count.
    gan = Gan(norm=True, seed=os.getpid())
    state = gan.enter(trainer)
    for epoch in range(state.epoch, steps):
        for index, x, _ in trainer.dataloader(samples()):
            gan.learn(x, noise_of(index))
            gan.step_schedulers()
        trainer.step(epoch)
        if trainer.finished:
            break
    print(f"trained {trainer.steps} batches")
    raise SystemExit(0)
model: Any = Net()
if loop == "unused parameters":
    model.parts["unused"] = nn.Linear(6, 2)
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
outside = nn.Parameter(torch.zeros(2))
if loop == "parameter outside the model":
    optimizer.add_param_group({"params": [outside]})
if loop == "begins with other parameters on one rank" and trainer.rank == 1:
    model.parts["head"].weight.requires_grad_(False)
if loop.startswith("unfreezes"):
    model.parts["head"].bias.requires_grad_(False)
state = trainer.program_reentry(model, optimizer)
if loop == "Accelerate without a wrapper":
    model = Accelerator(cpu=True).prepare_model(model, evaluation_mode=True)
critic = Net()
second = torch.optim.Adam(critic.parameters(), lr=0.01)
if loop in ("changes weights on one rank", "changes lr on one rank"):
    weight_checks.COMPARISON_INTERVAL = 0.0
if loop == "evaluation mode":
    model.eval()
count = 0
for epoch in range(state.epoch, int(os.environ.get("EPOCHS", steps))):
    if trainer.finished:
        break
    for _, x, y in trainer.dataloader(samples()):
        count += 1
        if loop.startswith("unfreezes") and count == 5 and trainer.rank == 0:
            model.parts["head"].bias.requires_grad_(True)
        if loop == "unfreezes others on one rank" and count == 5 and trainer.rank == 1:
            model.parts["head"].weight.requires_grad_(False)
            model.parts["head"].bias.requires_grad_(True)
        loss = model.loss(x, y) if loop == "method" else nn.functional.cross_entropy(model(x), y)
        if loop == "backward twice, forward twice":
            optimizer.zero_grad()
            loss.backward()
            (0.1 * nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
            continue
        if loop == "steps on rank 0":
            if trainer.is_main:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            continue
        if "leaves out a batch" in loop and count % 5 == 2 and (trainer.rank == 0 or "on all" in loop):
            if loop.startswith("steps"):  # as Lightning does after a training_step that returns None
                optimizer.step()
            continue
        if loop == "skips and sets gradients to None" and count % 3 == 0:
            # As a GradScaler does after gradients that are not finite.
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
            continue
        if "micro-batch" in loop:
            # The first micro-batch of a step on rank 1, or its last, such as one without valid tokens.
            if "weighted" in loop:
                loss = trainer.weighted(loss, 2 + trainer.rank)
            optimizer.zero_grad()
            if not (trainer.rank == 1 and trainer.completes_step == ("last" in loop)):
                loss.backward()
            optimizer.step()
            continue
        if loop == "second optimizer":
            second.zero_grad()
            nn.functional.cross_entropy(critic(x), y).backward()
            second.step()
        optimizer.zero_grad()
        if loop == "NaN" and count >= 20:
            loss = loss * float("nan")
        if loop == "NaN gradients are replaced" and count % 5 == 0:
            loss = loss * float("nan")
        loss.backward()
        if loop == "NaN gradients are replaced":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(0.0)
        optimizer.step()
        if loop == "steps twice":
            optimizer.step()
        if loop.startswith("changes weights") and count == 5 and trainer.rank == 1:
            with torch.no_grad():
                model.parts["head"].bias.add_(1.0)
        if loop == "changes lr on one rank" and count == 5 and trainer.rank == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
    trainer.step(epoch)
print(f"trained {count} batches")
