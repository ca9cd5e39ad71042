"""The parameters of an optimizer, and where their gradients and learning rates are."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from adascale_worker.errors import SparseGradientError
from adascale_worker.scaling.statistics.norms import accumulation_dtype, is_first_copy, local_shard
from adascale_worker.torch_private.autograd import version_of

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


class TensorVersion:
    """A tensor as it is now. Equal to a later one of the same tensor if that has not been changed since.

    Reads no value, which would wait for the device of the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # Kept, because its id might become that of another tensor.
        self._changes = version_of(tensor)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorVersion)
            and self._tensor is other._tensor
            and self._changes == other._changes
        )

    def __hash__(self) -> int:
        return hash((id(self._tensor), self._changes))


def lr_versions(groups: Iterable[Mapping[str, Any]]) -> list[object]:
    """Return the learning rates of parameter groups, to find changes: numbers, or versions of tensors."""
    rates = (group["lr"] for group in groups)
    return [TensorVersion(lr) if isinstance(lr, Tensor) else lr for lr in rates]


class OptimizerParameters:
    """The parameter groups of an optimizer. Read each time, because groups may be added or replaced."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, scales_lr_alone: bool, is_sharded: bool = False
    ) -> None:
        self._optimizer = optimizer
        self.is_sharded = is_sharded
        """Whether this process has only its part of averaged gradients."""
        # Other hyperparameters, such as the betas of Adam, must be numbers on the host.
        self._scales_lr_alone = scales_lr_alone
        self._trainable: list[bool] | None = None
        """Whether each group had a parameter that was not frozen in the last step; None before it."""
        self._cached: tuple[tuple[list[bool], torch.device], Tensor] | None = None
        self._with_lr: tuple[list[object], list[bool]] | None = None
        """Whether the lr of each group is not 0, with the versions of the learning rates."""

    def groups(self) -> list[list[Tensor]]:
        """Return the parameters by parameter group."""
        return [group["params"] for group in self._optimizer.param_groups]

    def measures(self, parameter: Tensor) -> bool:
        """Whether this process measures its part of a gradient, which others may have too."""
        return not self.is_sharded or is_first_copy(parameter)

    def measured(self) -> list[list[Tensor]]:
        """Return the parameters whose gradients this process measures, by parameter group."""
        return [list(filter(self.measures, group)) for group in self.groups()]

    def with_gradients(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return the measured parameters that have gradients, and these, by parameter group.

        For DTensors, the gradients are the shards of this rank.
        """
        present = [[p for p in group if p.grad is not None] for group in self.measured()]
        return [
            (group, [local_shard(require_dense(p.grad)) for p in group if p.grad is not None])
            for group in present
        ]

    def has_trainable(self, device: torch.device) -> Tensor:
        """Return whether each group has a parameter that is not frozen: shape (groups,), on `device`."""
        return self._on_device(self._trainable_groups(), device)

    def record_trainable(self) -> None:
        """Use the parameters that are not frozen now for `trained`, because the optimizer makes a step.

        Later, the program may freeze them while it trains parameters of another optimizer.
        """
        self._trainable = self._trainable_groups()

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

    def trained_tensor(self) -> Tensor:
        """Return `trained` as a tensor on `lr_device`, shape (groups,), without waiting for the device."""
        if not self.lr_is_on_device:
            return torch.tensor(self.trained(), dtype=torch.bool)
        trainable = self._on_device(self._last_trainable(), self.device)
        rates = torch.stack([group["lr"].reshape(()) for group in self._optimizer.param_groups])
        trained = trainable & (rates != 0.0)
        return torch.where(trained.any(), trained, trainable)

    @property
    def device(self) -> torch.device:
        """Where the gradients are; the host if there are no parameters."""
        return next((p.device for group in self.groups() for p in group), HOST)

    @property
    def lr_is_on_device(self) -> bool:
        """Whether all learning rates are tensors on the device of the gradients.

        Then no number has to be read back to the host to make a step, if the lr is all that a gain changes.
        """
        if not self._scales_lr_alone:
            return False
        device, rates = self.device, (group["lr"] for group in self._optimizer.param_groups)
        return all(isinstance(rate, Tensor) and rate.device == device for rate in rates)

    @property
    def lr_device(self) -> torch.device:
        """Where estimates and gains are computed: on the device of the learning rates."""
        return self.device if self.lr_is_on_device else HOST

    @property
    def statistics_options(self) -> dict[str, Any]:
        """The dtype and device of statistics, as arguments of a tensor's constructor."""
        device = self.device
        return {"dtype": accumulation_dtype(device), "device": device}

    def _trainable_groups(self) -> list[bool]:
        return [any(p.requires_grad for p in group) for group in self.groups()]

    def _last_trainable(self) -> list[bool]:
        known, current = self._trainable or [], self._trainable_groups()
        flags = [*known, *current[len(known) :]]  # The program may have added groups.
        return flags if any(flags) else [True] * len(flags)

    def _trainable_with_lr(self) -> list[bool]:
        return [has and lr for has, lr in zip(self._last_trainable(), self._groups_with_lr(), strict=True)]

    def _groups_with_lr(self) -> list[bool]:
        versions = lr_versions(self._optimizer.param_groups)
        if self._with_lr is None or self._with_lr[0] != versions:
            rates = [group["lr"] for group in self._optimizer.param_groups]
            if all(isinstance(lr, Tensor) and lr.device == rates[0].device for lr in rates):
                # Waits for a GPU once.
                rates = torch.stack([lr.reshape(()) for lr in rates]).tolist() if rates else []
            self._with_lr = versions, [float(lr) != 0.0 for lr in rates]
        return self._with_lr[1]

    def _on_device(self, flags: list[bool], device: torch.device) -> Tensor:
        if self._cached is None or self._cached[0] != (flags, device):
            # Cached, because the transfer to a GPU waits for it.
            self._cached = (flags, device), torch.tensor(flags, dtype=torch.bool, device=device)
        return self._cached[1]
