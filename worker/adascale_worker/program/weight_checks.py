"""Checks of the weights during training: equal on all replicas, and finite."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from adascale_worker.errors import NonFiniteWeightsError, ReplicationError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.user_code import warn_once
from adascale_worker.program.hyperparameters import HasGroups
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.torch_private.distributed import reshard

COMPARISON_INTERVAL = 10.0
"""Seconds between two comparisons of the replicas' weights."""

TOLERANCE = 1e-4
"""Difference of weights, relative to the largest one compared of the same parameter, that is accepted.

Replicas on the same hardware have the same weights, bit for bit. Different processors may round differently.
"""

PROBES = 8
"""Weights of each parameter that are compared."""


class WeightComparison:
    """Compares a few weights of each parameter and the learning rates over the replicas, at an interval."""

    def __init__(self, model: torch.nn.Module, optimizer: HasGroups, group: ReplicaGroup) -> None:
        self._model = model
        self._optimizer = optimizer
        self._group = group
        self._compared_at = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether the interval since the last comparison has passed. Always False on one replica."""
        return self._group.replicas > 1 and time.monotonic() - self._compared_at >= COMPARISON_INTERVAL

    def compare(self, step: int) -> None:
        """Compare the weights. A collective call, which raises on all replicas or on none."""
        self._compared_at = time.monotonic()
        reshard(self._model)
        named = [
            (name, p)
            for name, p in self._model.named_parameters()
            if p.requires_grad and local_shard(p).numel()
        ]
        if not named:
            return
        probes = [
            ("learning rates", "", _CAUSE_OF_RATES, torch.tensor([float(group["lr"])]))
            for group in self._optimizer.param_groups
        ]
        probes += [("weights", f"a weight of {name!r} is ", _CAUSE, _probe(each)) for name, each in named]
        device, sizes = probes[-1][-1].device, [len(values) for *_, values in probes]
        # From a GPU at once, and not for each parameter.
        least, greatest = self._group.extremes(torch.cat([values.to(device) for *_, values in probes]))
        for (what, where, cause, _), low, high in zip(
            probes, least.split(sizes), greatest.split(sizes), strict=True
        ):
            magnitude = torch.maximum(low.abs(), high.abs()).max()
            difference, index = (high - low).max(dim=0)
            if difference > TOLERANCE * magnitude:
                raise ReplicationError(
                    f"the {what} of the {self._group.replicas} replicas differ after step {step}: "
                    f"{where}{low[index]:.6g} on one and {high[index]:.6g} on another. {cause}"
                )


_CAUSE = "Code that changes weights or gradients has to do the same on all replicas"
"""What a program has to change so that its weights do not differ."""

_CAUSE_OF_RATES = (
    "Code that changes them has to do the same on all replicas: pass ReduceLROnPlateau a metric that is "
    "equal on all, such as one of evaluation.means"
)


def _probe(parameter: Tensor) -> Tensor:
    """Return a few weights, evenly spaced, as float32; a weight that is not finite as 0."""
    flat = local_shard(parameter).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return torch.nan_to_num(flat[:: max(1, len(flat) // PROBES)].float(), posinf=0.0, neginf=0.0)


UNMEASURED_STEPS = 32
"""Steps whose gradients are not measured, after which weights are read, since that takes time."""


class FiniteWeights:
    """Warns of weights that are not finite, and ends training after a number of steps with them.

    Weights are read only after a step whose gradients were not finite, after `UNMEASURED_STEPS` steps whose
    gradients were not measured, and before a checkpoint.
    """

    def __init__(self, optimizer: HasGroups, max_steps: int, group: ReplicaGroup) -> None:
        self._optimizer = optimizer
        self._max_steps = max_steps
        self._group = group
        self._steps = 0
        self._unmeasured_steps = 0
        self._warned: set[str] = set()
        if any(weight.is_cuda for weight in self.weights()):
            # CUDA loads a kernel when it is used first, and then waits for all that runs on the GPU. Later
            # that can be a collective call that does not end, beside which the state is saved.
            self.are_finite()

    def check_step(self, step: int, *, gradients_are_finite: bool | None) -> None:
        """Check the weights if gradients were not finite, or not measured (None) for several steps."""
        self._unmeasured_steps = self._unmeasured_steps + 1 if gradients_are_finite is None else 0
        if self._steps == 0 and gradients_are_finite is not False:
            if self._unmeasured_steps < UNMEASURED_STEPS:
                return
            self._unmeasured_steps = 0
        if self.are_finite():
            self._steps = 0
            return
        self._steps += 1
        if self._steps >= self._max_steps:
            raise NonFiniteWeightsError(
                f"weights are NaN or infinite after each of {self._steps} consecutive steps, up to step "
                f"{step}: training stops, and the last checkpoint is from before. Use a lower learning rate, "
                "clip gradients, or check the data; ElasticTrainer(max_nonfinite_steps=...) sets the number "
                "of steps"
            )
        if self._group.is_main:
            warn_once(
                self._warned,
                "weights",
                f"weights are NaN or infinite after step {step}. No checkpoint is saved with them, and "
                f"training stops after {self._max_steps} such steps in a row",
            )

    def are_finite(self) -> bool:
        """Whether all weights are finite. Reads all of them."""
        return self._group.own.all(all_finite(self.weights()))

    def weights(self) -> list[Tensor]:
        """Return the weights that are checked."""
        return [
            local_shard(parameter)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]


def nonfinite_message(step: int) -> str:
    """Return why no checkpoint is saved after `step`."""
    return (
        f"weights are NaN or infinite after step {step}: no checkpoint is saved, so that none with finite "
        "weights is replaced"
    )


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements are finite."""
    # A sum is several times faster than `isfinite`, and finite only if all elements are; it may overflow.
    # The transfer of the results waits for a device once, not for each tensor.
    if not tensors or _are_all(torch.isfinite(tensor.sum()) for tensor in tensors):
        return True
    return _are_all(torch.isfinite(tensor).all() for tensor in tensors)


def _are_all(results: Iterable[Tensor]) -> bool:
    finite = list(results)
    return all(torch.stack([each.to(finite[0].device) for each in finite]).tolist())
