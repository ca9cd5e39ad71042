"""Checks that the program's training loop makes steps, and of what the program has passed."""

from __future__ import annotations

import torch

from adascale_worker.errors import ReplicationError, WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.user_code import OneTimeWarnings
from adascale_worker.program.hyperparameters import HasGroups

MAX_BATCHES_WITHOUT_STEP = 1000
"""Batches without an optimizer step after which a warning is issued, because the epoch cannot end."""


class BatchChecks:
    """Finds a loop that makes no steps."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._batches = 0
        self._warnings = OneTimeWarnings()

    def stepped(self) -> None:
        """Record that a step was made or discarded, or a loop over batches begins."""
        self._batches = 0

    def delivered_batch(self) -> None:
        """Record that the program gets the next batch of `trainer.dataloader`."""
        self._batches += 1
        if self._batches == MAX_BATCHES_WITHOUT_STEP:
            found = (
                f"trainer.dataloader() has delivered {MAX_BATCHES_WITHOUT_STEP} batches since the last "
                "optimizer.step(): an epoch ends after its steps, so without steps it does not end. Call "
                "step() of the optimizer that was passed to program_reentry once per batch"
            )
            if self._group.replicas > 1:
                raise WorkerError(f"{found}, on all {self._group.replicas} replicas")
            self._warnings.warn("no step", found)


def check_optimizer_parameters(model: torch.nn.Module, optimizer: HasGroups, replicas: int) -> None:
    """Check that the optimizer has parameters of the model, and no others.

    The state that replicas exchange has no others. On one replica the program is warned, where it works. It
    is also warned of parameters of the model that require gradients, but are not trained.
    """
    own = {id(parameter) for parameter in model.parameters()}
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if own and not own & optimized:
        raise WorkerError(
            "the optimizer has no parameter of the model, so training would not change the model: make the "
            "optimizer from model.parameters(), after the last statement that replaces the model"
        )
    warn_of_parameters_outside(model, optimizer)
    shapes = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and id(parameter) not in own
    ]
    if not shapes:
        return
    found = (
        f"the optimizer has {len(shapes)} parameters that are not in the model (the first has shape "
        f"{shapes[0]})"
    )
    remedy = "Make them parameters of the model, for example with a module that contains both"
    if replicas > 1:
        raise ReplicationError(f"{found}, so a replica that joins would not get them. {remedy}")
    OneTimeWarnings().warn(
        "parameters", f"{found}. On 2 or more replicas, this stops training with an error. {remedy}"
    )


def warn_of_parameters_outside(model: torch.nn.Module, optimizer: HasGroups) -> None:
    """Warn of parameters of the model that require gradients, but are not in the optimizer."""
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        OneTimeWarnings().warn(
            "not optimized",
            f"parameter {left[0]!r}{more} of the model requires gradients, but is not in the optimizer, so "
            "it stays as it is: give it to the optimizer, or call requires_grad_(False) on it",
        )


def check_synchronized_norms(model: torch.nn.Module, device: torch.device) -> None:
    """Check that the device supports the model's layers of type `SyncBatchNorm`, if it has any.

    torch refuses them on a CPU where there is a process group, which a single replica has too.
    """
    if device.type != "cpu":
        return
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    if names:
        raise WorkerError(
            f"the model has the SyncBatchNorm {names[0]!r}, which torch supports on GPUs only, but this "
            "replica is on the CPU. Call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) only if "
            "trainer.device.type is 'cuda'; BatchNorm works everywhere, with the statistics of each "
            "replica's own batch"
        )
