"""The parameters of an optimizer, and where their gradients and learning rates are."""

from typing import Any

import torch
from torch import Tensor

from adascale_worker.errors import SparseGradientError
from adascale_worker.scaling.statistics.norms import accumulation_dtype, is_first_copy, local_shard

HOST = torch.device("cpu")


def require_dense(gradient: Tensor) -> Tensor:
    """Return a gradient whose layout is checked."""
    if gradient.layout is not torch.strided:
        raise SparseGradientError(
            f"got a gradient of layout {gradient.layout} for a parameter of shape {tuple(gradient.shape)}; "
            "AdaScale needs dense gradients: make the layer with sparse=False, or give the parameter to "
            "another optimizer"
        )
    return gradient


class OptimizerParameters:
    """The parameter groups of an optimizer. Read each time, because groups may be added or replaced."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_sharded: bool = False) -> None:
        self._optimizer = optimizer
        self.is_sharded = is_sharded
        """Whether this process has only its part of averaged gradients."""
        self._trainable: list[bool] | None = None
        """Whether each group had a parameter that was not frozen in the last step; None before it."""

    def groups(self) -> list[list[Tensor]]:
        """Return the parameters by parameter group."""
        return [group["params"] for group in self._optimizer.param_groups]

    def measures(self, parameter: Tensor) -> bool:
        """Whether this process measures its part of a gradient, which others may have too."""
        return not self.is_sharded or is_first_copy(parameter)

    def measured(self) -> list[list[Tensor]]:
        """Return the parameters whose gradients this process measures, by parameter group."""
        groups = self.groups()
        return [list(filter(is_first_copy, group)) for group in groups] if self.is_sharded else groups

    def with_gradients(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return the measured parameters that have gradients, and these, by parameter group.

        For DTensors, the gradients are the shards of this rank.
        """
        found = []
        for group in self.measured():
            gradients = [parameter.grad for parameter in group]
            present = [p for p, gradient in zip(group, gradients, strict=True) if gradient is not None]
            found.append((present, [local_shard(require_dense(g)) for g in gradients if g is not None]))
        return found

    def trainable(self) -> list[bool]:
        """Return whether each group has a parameter that is not frozen."""
        return [any(p.requires_grad for p in group) for group in self.groups()]

    def record_trainable(self) -> None:
        """Use the parameters that are not frozen now for `trained`, because the optimizer makes a step.

        Later, the program may freeze them while it trains parameters of another optimizer.
        """
        self._trainable = self.trainable()

    def trained(self) -> list[bool]:
        """Return whether each group is trained now, so that its gradients count in the gain of all groups.

        A group is trained if it had a parameter that was not frozen in the last step, and its lr is not 0. If
        the lr of all such groups is 0, as in the first step of a warm-up, all of them count.
        """
        trainable = self._last_trainable()
        rates = {
            id(group["lr"]) for group, has in zip(self._optimizer.param_groups, trainable, strict=True) if has
        }
        if len(rates) == 1:  # All of them are 0, or none is.
            return trainable
        trained = self._trainable_with_lr()
        return trained if any(trained) else trainable

    @property
    def has_trained(self) -> bool:
        """Whether a group is trained now, with a lr that is not 0."""
        return any(self._trainable_with_lr())

    @property
    def device(self) -> torch.device:
        """Where the gradients are; the host if there are no parameters."""
        return next((p.device for group in self.groups() for p in group), HOST)

    @property
    def statistics_options(self) -> dict[str, Any]:
        """The dtype and device of statistics, as arguments of a tensor's constructor."""
        device = self.device
        return {"dtype": accumulation_dtype(device), "device": device}

    def _last_trainable(self) -> list[bool]:
        known, current = self._trainable or [], self.trainable()
        flags = [*known, *current[len(known) :]]  # The program may have added groups.
        return flags if any(flags) else [True] * len(flags)

    def _trainable_with_lr(self) -> list[bool]:
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        return [has and lr != 0.0 for has, lr in zip(self._last_trainable(), rates, strict=True)]
