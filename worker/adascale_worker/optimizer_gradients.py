"""The gradients of one of several optimizers, from the backward passes to its step.

A backward pass can reach the parameters of several optimizers: the loss of a GAN's generator is computed by
the discriminator, whose gradients of this pass nobody uses. So the gradients of each pass are taken out of
`.grad` and belong to an optimizer only until it has made its step for the present batch. What comes later is
deleted, and so is what the program deletes by `zero_grad()`.

In the last micro-batch of a step, `.grad` becomes the mean gradient over all micro-batches and replicas after
each backward pass; in the others it is None, as in a program with one optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from adascale_worker.adascale import AdaScale
from adascale_worker.errors import WorkerError
from adascale_worker.gradient_exchange import averaged
from adascale_worker.loop_checks import CHECKED_STEPS
from adascale_worker.process_group import ReplicaGroup


class OptimizerGradients:
    """The gradients of the parameters of one optimizer.

    Args:
        name: of the optimizer, for messages.
        adascale: around the optimizer; it measures the gradients that are passed to it.
        group: the replicas.
        average: replaces tensors by their means over the replicas.

    Attributes:
        has_stepped: whether the program has called `step()` for the present batch.
    """

    def __init__(
        self,
        name: str,
        adascale: AdaScale,
        group: ReplicaGroup,
        average: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.name = name
        self.adascale = adascale
        self._group = group
        self._average_over_replicas = average
        self._parameters = [p for each in adascale.param_groups for p in each["params"] if p.requires_grad]
        self._earlier: dict[Tensor, Tensor] = {}
        """The sums over the earlier micro-batches of this step."""
        self._local: dict[Tensor, Tensor] = {}
        """The gradients of the present micro-batch, on this replica."""
        self._hidden: dict[Tensor, Tensor | None] = {}
        self._batches: set[int] = set()
        """The batches whose backward passes have contributed since the last step."""
        self._micro_batches = 0
        """Earlier micro-batches of this step for which the program has called `step()`."""
        self._steps_without_gradients = 0
        self._is_stale = False
        self.has_stepped = False

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that require gradients."""
        return self._parameters

    @property
    def has_gradients(self) -> bool:
        """Whether backward passes for the present batch have made gradients, and no step has used them."""
        return bool(self._local)

    # -- a backward pass ----------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Take the gradients out of `.grad`, so that those of the next pass come alone."""
        if all(parameter.grad is None for parameter in self._parameters):
            self._is_stale = False
        for parameter in self._parameters:
            self._hidden[parameter] = parameter.grad
            parameter.grad = None

    def after_backward(self, batch: int, *, completes_step: bool) -> None:
        """Add the gradients of a pass to those of this batch. A collective call if it completes a step.

        Args:
            batch: the number of the present batch.
            completes_step: whether this is the last micro-batch of a step.
        """
        found = {p: p.grad for p in self._parameters if p.grad is not None}
        hidden, self._hidden = self._hidden, {}
        if self.has_stepped or not found:
            for parameter, gradient in hidden.items():
                parameter.grad = gradient
            return
        self._batches.add(batch)
        for parameter, gradient in found.items():
            if gradient.is_sparse:
                raise WorkerError(
                    f"a parameter of the optimizer {self.name!r} got a sparse gradient, which the trainer "
                    "does not average: use sparse=False"
                )
            parameter.grad = None
        _add(self._local, found)
        if completes_step:
            self._average()

    def _average(self) -> None:
        total = dict(self._earlier)
        _add(total, self._local)
        if self._group.replicas > 1:
            total = averaged(self._parameters, total, self._average_over_replicas)
        elif self._micro_batches > 0:
            # The sums are divided in place, and may be needed for another backward pass.
            total = {parameter: gradient.clone() for parameter, gradient in total.items()}
        for parameter, gradient in total.items():
            parameter.grad = gradient
        self.adascale.measure(self._local)
        self.adascale.scale_grad_by_num_grads_to_accum()

    # -- what the program does ----------------------------------------------------------------------------

    def zeroed(self, parameters: Iterable[Tensor]) -> None:
        """Delete the gradients of the present micro-batch, because the program has deleted them."""
        for parameter in parameters:
            self._local.pop(parameter, None)
        if not self._local:
            self._is_stale = False
            self._batches.clear()
            self.adascale.discard_measurement()

    def check_step(self, micro_batch: int) -> None:
        """Check a call of `step()`, and count it for the present batch.

        Args:
            micro_batch: index of the present micro-batch in its step.

        Raises:
            WorkerError: the loop does not make its steps as the trainer requires.
        """
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
        self._steps_without_gradients = 0 if self._local else self._steps_without_gradients + 1
        if self._steps_without_gradients == CHECKED_STEPS:
            raise WorkerError(
                f"step() of the optimizer {self.name!r} was called {CHECKED_STEPS} times without gradients, "
                "which changes nothing: call loss.backward() before it, for the same batch, and after the "
                "last zero_grad()"
            )
        self.has_stepped = True

    def check_micro_batches(self, micro_batch: int) -> None:
        """Check that the program has called `step()` for all micro-batches of this step, or for none.

        Args:
            micro_batch: how many there were.

        Raises:
            WorkerError: it has not.
        """
        if self._micro_batches != micro_batch and (self._micro_batches or self.has_stepped or self._local):
            raise WorkerError(
                f"step() of the optimizer {self.name!r} was called for {self._micro_batches} of the first "
                f"{micro_batch} micro-batches of a step: an optimizer that does not make each step must "
                "decide by trainer.steps, which is the same for all micro-batches of a step"
            )

    def finish_micro_batch(self) -> None:
        """Keep the gradients of a micro-batch that does not complete a step."""
        self.adascale.read_micro_gradient(self._local)
        _add(self._earlier, self._local)
        self._local = {}
        self._batches.clear()
        self._micro_batches += 1

    def finish_step(self) -> None:
        """Delete what the step has used, except `.grad`."""
        self._earlier, self._local = {}, {}
        self._batches.clear()
        self._micro_batches = 0
        self._is_stale = True

    def discard(self) -> None:
        """Delete all gradients, because the step is discarded.

        Raises:
            RuntimeError: a collective call that was started has failed; the next call succeeds.
        """
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
