"""The gradients of one of several optimizers, from the backward passes to its step.

A backward pass can reach the parameters of several optimizers: the loss of a GAN's generator is computed by
the discriminator, whose gradients of this pass nobody uses. So the gradients of each pass are taken out of
`.grad` and belong to an optimizer only until it has made its step for the present batch. What comes later is
deleted, and so is what the program deletes by `zero_grad()`.

In the last micro-batch of a step, each backward pass adds to `.grad` the mean of its gradients over all
micro-batches and replicas, and the first one those of the earlier micro-batches too. In the others `.grad` is
None, as in a program with one optimizer. A gradient that a replica or a micro-batch does not have counts as
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from adascale_worker.errors import WorkerError
from adascale_worker.gradients.exchange import averaged
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.scaling.statistics.steps import StepWeights

MAX_STEPS_WITHOUT_GRADIENTS = 3
"""Steps after which a program without gradients is refused."""


class OptimizerGradients:
    """The gradients of the parameters of one optimizer."""

    def __init__(
        self,
        name: str,
        adascale: ElasticAdaScale,
        group: ReplicaGroup,
        average: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.name = name
        self.adascale = adascale
        self._group = group
        self._average_over_replicas = average
        self._parameters = [p for each in adascale.param_groups for p in each["params"]]
        self.parameters = set(self._parameters)
        self._trained: set[Tensor] = set()
        """Parameters that required gradients in a backward pass of this step; the same on all replicas."""
        self._earlier: dict[Tensor, Tensor] = {}
        """The sums over the earlier micro-batches of this step."""
        self._local: dict[Tensor, Tensor] = {}
        """The gradients of the present micro-batch, on this replica."""
        self._found: dict[Tensor, Tensor] = {}
        """The gradients of the last backward pass, until they are averaged."""
        self._included: set[Tensor] = set()
        """The parameters whose `.grad` includes the gradients of the earlier micro-batches."""
        self._first_pass = 0
        """The number of the first backward pass for a batch that has reached the optimizer."""
        self._hidden: dict[Tensor, Tensor | None] = {}
        self._batches: set[int] = set()
        """The batches whose backward passes have contributed since the last step."""
        self._micro_batches = 0
        """Earlier micro-batches of this step for which the program has called `step()`."""
        self._has_had_gradients = False
        self._steps = 0
        self._is_stale = False
        self.is_averaged = False
        """Whether `.grad` is the mean over the replicas. The same on all of them."""
        self.has_stepped = False
        """Whether the program has called `step()` for the present batch."""

    # -- a backward pass ----------------------------------------------------------------------------------

    def before_backward(self, *, completes_step: bool) -> None:
        """Take the gradients out of `.grad`, so that the next pass does not add to them."""
        if all(parameter.grad is None for parameter in self._parameters):
            self._is_stale = False
        if completes_step:
            # The program may delete gradients without a method that the trainer replaces.
            self.zeroed([p for p in (*self._local, *self._included) if p.grad is None])
        self._trained.update(parameter for parameter in self._parameters if parameter.requires_grad)
        for parameter in self._parameters:
            self._hidden[parameter] = parameter.grad
            parameter.grad = None

    def after_backward(self, batch: int, number: int) -> bool:
        """Add the gradients of a pass to those of this batch, and return whether there are any."""
        found = {p: p.grad for p in self._parameters if p.grad is not None}
        hidden, self._hidden = self._hidden, {}
        for parameter, gradient in hidden.items():
            parameter.grad = gradient
        if self.has_stepped or not found:
            return False
        for gradient in found.values():
            if gradient.is_sparse:
                raise WorkerError(
                    f"a parameter of the optimizer {self.name!r} got a sparse gradient, which the trainer "
                    "does not average: use sparse=False"
                )
        self._batches.add(batch)
        if not self._local:
            self._first_pass = number
        _add(self._local, found)
        self._found = found
        return True

    def hide(self) -> None:
        """Let the program find no gradients, in a micro-batch that does not complete a step."""
        if self._found:
            self._found = {}
            for parameter in self._parameters:
                parameter.grad = None

    def awaits_average(self, number: int) -> bool:
        """Whether this replica has gradients to average after a pass of the last micro-batch.

        Gradients of earlier micro-batches are averaged with the first pass that reaches the optimizer, or
        with the pass that was the first in the micro-batch before: perhaps none reaches it in this one.
        """
        return bool(self._found) or (number >= self._first_pass and self.lacks_earlier)

    @property
    def lacks_earlier(self) -> bool:
        """Whether `.grad` does not include the gradients of an earlier micro-batch of this step."""
        return bool(self._missing_earlier())

    def _missing_earlier(self) -> dict[Tensor, Tensor]:
        """Return the gradients of earlier micro-batches that `.grad` does not include."""
        return {p: gradient for p, gradient in self._earlier.items() if p not in self._included}

    def average(self, accumulation: int, weights: StepWeights | None = None, weight: float = 1.0) -> None:
        """Add the mean over micro-batches and replicas of new gradients to `.grad`. A collective call."""
        divisor = float(accumulation) if weights is None else weights.divisor
        new, self._found = self._found, {}
        missing = self._missing_earlier()
        _add(new, missing)
        self._included.update(missing)
        if self._group.replicas > 1 and self._trained:
            parameters = [parameter for parameter in self._parameters if parameter in self._trained]
            new = averaged(parameters, new, self._average_over_replicas)
        for parameter in self._parameters:
            before, gradient = parameter.grad, new.get(parameter)
            # AdaScale measures the sum over the micro-batches, and divides it in place.
            if gradient is not None:
                is_shared = divisor != 1.0 and self._group.replicas == 1
                added = gradient.clone() if is_shared else gradient
                parameter.grad = added if before is None else torch.add(gradient, before, alpha=divisor)
            elif before is not None and divisor != 1.0:
                parameter.grad = before * divisor
        self.is_averaged = True
        if weights is not None:
            self.adascale.weigh_step(weights)
        self.adascale.measure(self._local, weight)
        self.adascale.scale_grad_by_num_grads_to_accum()

    # -- what the program does ----------------------------------------------------------------------------

    def zeroed(self, parameters: Iterable[Tensor]) -> None:
        """Delete the gradients of the present micro-batch, because the program has deleted them."""
        deleted = self.parameters.intersection(parameters)
        if not deleted:
            return
        for parameter in deleted:
            self._local.pop(parameter, None)
        self._included -= deleted
        self.is_averaged = False
        if not self._local:
            self._is_stale = False
            self._batches.clear()
            self.adascale.discard_measurement()

    def check_step(self, micro_batch: int) -> None:
        """Check a call of `step()`, and count it for the present batch."""
        if self.has_stepped:
            raise WorkerError(
                f"step() of the optimizer {self.name!r} was called twice for one batch: call it at most once "
                "for each batch that trainer.dataloader() delivers"
            )
        if self._is_stale:
            raise WorkerError(
                f"the gradients of the step before of the optimizer {self.name!r} were not deleted, so this "
                "step would make it again: call its zero_grad() before loss.backward()"
            )
        if len(self._batches) > 1:
            raise WorkerError(
                f"step() of the optimizer {self.name!r} was called after backward passes on "
                f"{len(self._batches)} batches: the trainer accumulates gradients itself. Call zero_grad(), "
                "loss.backward() and step() for the same batch, and do not divide the loss"
            )
        self.check_micro_batches(micro_batch)
        self.has_stepped = True

    def check_gradients(self, *, is_restored: bool) -> None:
        """Check that the first steps of the optimizer have gradients.

        A later step may have none, as that of a task of which the batch has no samples. It is not measured.
        """
        self._has_had_gradients = self._has_had_gradients or self.is_averaged or is_restored
        if not self.is_averaged:
            self.adascale.discard_step()
        self._steps += 1
        if not self._has_had_gradients and self._steps == MAX_STEPS_WITHOUT_GRADIENTS:
            raise WorkerError(
                f"the first {MAX_STEPS_WITHOUT_GRADIENTS} steps of the optimizer {self.name!r} had no "
                "gradients of a backward pass: call loss.backward() before step(), for the same batch, and "
                "after the last zero_grad(). Gradients that are computed by torch.autograd.grad and assigned "
                "to .grad are not supported with several optimizers, because the trainer does not average "
                "them"
            )

    def check_micro_batches(self, micro_batch: int) -> None:
        """Check that the program has called `step()` for all micro-batches of this step, or for none."""
        if self._micro_batches != micro_batch and (self._micro_batches or self.has_stepped or self._local):
            raise WorkerError(
                f"step() of the optimizer {self.name!r} was called for {self._micro_batches} of the first "
                f"{micro_batch} micro-batches of a step: an optimizer that does not make each step must "
                "decide by trainer.steps, which is the same for all micro-batches of a step"
            )

    def finish_micro_batch(self, weight: float = 1.0) -> None:
        """Keep the gradients of a micro-batch that does not complete a step."""
        self.adascale.read_micro_gradient(self._local, weight)
        _add(self._earlier, self._local)
        self._local = {}
        self.is_averaged = False
        self._batches.clear()
        self._micro_batches += 1

    def finish_step(self) -> None:
        """Delete what the step has used, except `.grad`."""
        self._earlier, self._local, self._found = {}, {}, {}
        self._included.clear()
        self._trained.clear()
        self.is_averaged = False
        self._batches.clear()
        self._micro_batches = 0
        self._is_stale = True

    def discard(self) -> None:
        """Delete all gradients, because the step is discarded."""
        for parameter in self._parameters:
            parameter.grad = None
        self.finish_step()
        self._hidden.clear()
        self._is_stale = self.has_stepped = False
        self.adascale.discard_step()


def _add(sums: dict[Tensor, Tensor], gradients: dict[Tensor, Tensor]) -> None:
    """Add gradients to sums, without changing a tensor."""
    for parameter, gradient in gradients.items():
        earlier = sums.get(parameter)
        sums[parameter] = gradient if earlier is None else earlier + gradient
