"""Averages gradients over the replicas without `DistributedDataParallel`, and checks averages in first steps.

Code that the trainer does not know can hook into the backward pass and divide or average the gradients once
more: another data parallelism, for example. The weights then stay equal on all replicas, and nothing else
shows it. What the program does between `backward()` and `optimizer.step()`, such as clipping, comes later
and is not compared, nor is what its hooks on the parameters do before the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import ReplicationError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.torch_private.autograd import (
    accumulates_gradient,
    has_post_accumulate_hooks,
    remove_tensor_hook,
)

BUCKET_BYTES = 32 << 20
"""Bytes of gradients that are averaged together."""


def averaged(
    parameters: Sequence[Tensor],
    gradients: Mapping[Tensor, Tensor],
    average: Callable[[Sequence[Tensor]], None],
) -> dict[Tensor, Tensor]:
    """Return the means over the replicas of the gradients of `parameters`. A collective call.

    A gradient that some replicas have and others do not have counts as zero where it is missing. A parameter
    without a gradient on any replica is left out.
    """
    buckets = list(_buckets(parameters))
    flat = []
    for bucket in buckets:
        parts = [gradients.get(p, torch.zeros_like(p)).reshape(-1).to(p.dtype) for p in bucket]
        flat.append(torch.cat(parts))
    # 1 for each gradient that this replica has.
    present = _to_device([float(parameter in gradients) for parameter in parameters], parameters[0].device)
    average([*flat, present])
    means = {
        parameter: mean.view(parameter.shape)
        for bucket, tensor in zip(buckets, flat, strict=True)
        for parameter, mean in zip(bucket, tensor.split([p.numel() for p in bucket]), strict=True)
    }
    if len(gradients) < len(parameters):
        # Only now, because it waits for the device.
        for parameter, share in zip(parameters, present.tolist(), strict=True):
            if share == 0.0:
                del means[parameter]
    return means


def _to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers as a tensor. Does not wait for the device."""
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters of one type and device, each with at most `BUCKET_BYTES` if possible."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for parameter in same:
            if bucket and size + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.nbytes
        yield bucket


CHECKED_STEPS = 3
"""Steps of a generation in which gradients are compared."""

MAX_NONFINITE_STEPS = 20
"""Steps of a generation whose gradients are not finite, after which none are compared any more."""

PROBES = 8
"""Elements of each gradient that are compared."""

TOLERANCE = 0.02
"""Difference, relative to the mean gradient, that is accepted. The smallest that is searched is a half."""

ROUNDING = 4.0
"""Rounding errors that are accepted, in units of the last place of the replicas' gradients."""


class ExchangeCheck:
    """Compares a few elements of each gradient before and after its exchange."""

    def __init__(self, model: torch.nn.Module, group: ReplicaGroup) -> None:
        self._model = model
        self._group = group
        self._given: dict[str, Tensor] = {}
        """Probes of what this replica gives to the exchange, by the parameter's name."""
        self._found: dict[str, Tensor] = {}
        """Probes of what it gets from the exchange."""
        self._hooks: list[tuple[Tensor, RemovableHandle]] = []
        self._has_arrived = False
        """Whether a gradient has arrived in the pass that is read."""
        self._steps = self._nonfinite_steps = 0
        """Steps that are still compared, and steps that could not be compared."""
        self.begin_generation()

    def begin_generation(self) -> None:
        """Compare the gradients of the next steps, if there are several replicas."""
        self.discard()
        self._steps = CHECKED_STEPS if self._group.replicas > 1 else 0
        self._nonfinite_steps = 0

    def discard(self) -> None:
        """Discard what was read."""
        self._remove_hooks()
        self._given.clear()
        self._found.clear()
        self._has_arrived = False

    def begin_pass(self) -> None:
        """Read the gradients of the next backward pass, the first that exchanges those of the step.

        `.grad` is the sum over the micro-batches before.
        """
        if self._steps == 0 or self._found:
            return
        self.discard()
        for name, parameter in self._model.named_parameters():
            # Hooks on the accumulated gradient may change it after ours have read it.
            if parameter.requires_grad and not has_post_accumulate_hooks(parameter):
                self._given[name] = _probe(parameter, parameter.grad)
                # The last hook, so it gets what the program's own hooks return.
                self._hooks.append((parameter, parameter.register_hook(_ArrivalHook(self, name, parameter))))

    def end_pass(self) -> None:
        """Read the gradients after the exchange, unless the pass has not reached the model."""
        self._remove_hooks()
        if self._has_arrived and not self._found:
            parameters = dict(self._model.named_parameters())
            self._found = {name: _probe(parameters[name], parameters[name].grad) for name in self._given}

    def arrived(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a parameter that arrives in a backward pass, perhaps in parts."""
        self._given[name] += _probe(parameter, gradient)
        self._has_arrived = True

    def compare(self) -> None:
        """Compare the gradients of this step. A collective call in the first steps."""
        if not self._found:
            return
        given, found = (torch.stack(list(each.values())) for each in (self._given, self._found))
        names = list(self._given)
        self.discard()
        means = torch.stack([given, found, given.abs()])
        self._group.average([means])
        means, found = means.cpu(), found.cpu()
        if not means.isfinite().all():  # Such gradients have no mean.
            self._nonfinite_steps += 1
            if self._nonfinite_steps == MAX_NONFINITE_STEPS:
                self._steps = 0
            return
        self._steps -= 1
        mean_given, mean_found, _ = means
        # Gradients that are not averaged at all have the right mean, so each replica compares its own.
        _, greatest = self._group.extremes((found - mean_given).norm(dim=1))
        numbers = torch.cat([means.norm(dim=2), (mean_found - mean_given).norm(dim=1)[None], greatest[None]])
        for name, (before, after, size, of_mean, of_any) in zip(names, numbers.T.tolist(), strict=True):
            limits = torch.finfo(self._model.get_parameter(name).dtype)
            allowed = TOLERANCE * before + ROUNDING * limits.eps * size + PROBES * limits.tiny
            replicas = self._group.replicas
            if of_mean > allowed:
                ratio = f"{after / before:.3g} times the mean" if before > 0.0 else "not the mean"
                raise ReplicationError(
                    f"the gradient of the parameter {name!r} is {ratio} over the {replicas} "
                    "replicas at the end of backward(), so something else divides or averages it once more: "
                    "data parallelism of a framework or of the program around the model, or a hook. The "
                    "trainer averages gradients itself, so remove the other, or run this program with one "
                    "replica (maxReplicas: 1)"
                )
            if of_any > allowed:
                raise ReplicationError(
                    f"the gradient of the parameter {name!r} is not the same on the {replicas} replicas at "
                    "the end of backward(), but it has to be their mean: something changes it after the "
                    "trainer has averaged it, or keeps it from being averaged, such as a hook. Change "
                    "gradients between backward() and optimizer.step(), in the same way on all replicas, or "
                    "run this program with one replica (maxReplicas: 1)"
                )

    def _remove_hooks(self) -> None:
        for parameter, handle in self._hooks:
            remove_tensor_hook(parameter, handle)
        self._hooks.clear()


class _ArrivalHook:
    """Reads a gradient that arrives, and does not change it."""

    observes_only = True
    """See `BackwardObserver.observe`."""

    def __init__(self, check: ExchangeCheck, name: str, parameter: Tensor) -> None:
        self._check = check
        self._name = name
        self._parameter = parameter

    def __call__(self, gradient: Tensor) -> None:
        # torch.autograd.grad calls the same hook, also inside a backward pass.
        if accumulates_gradient(self._parameter):
            self._check.arrived(self._name, self._parameter, gradient)


def _probe(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a few elements of a gradient, evenly spaced, padded by zeros: shape (PROBES,), float32."""
    probes = torch.zeros(PROBES, device=parameter.device)
    if gradient is not None:
        flat = gradient.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        found = flat[:: max(1, len(flat) // PROBES)][:PROBES]
        probes[: len(found)] = found
    return probes
