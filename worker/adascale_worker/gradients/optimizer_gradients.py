"""The gradients of one optimizer, from the backward passes to its step.

A backward pass can reach the parameters of several optimizers: the loss of a GAN's generator is computed by
the discriminator, whose gradients of this pass nobody uses. So the gradients of each pass are taken out of
`.grad` and belong to an optimizer only until it has made its step for the present batch. What comes later is
deleted, and so is what the program deletes by `zero_grad()`.

In the last micro-batch of a step, each backward pass adds to `.grad` the mean of its gradients over all
micro-batches and replicas, and the first one those of the earlier micro-batches too. In the others `.grad` is
None. A gradient that a replica or a micro-batch does not have counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from adascale_worker.adascale import AdaScale
from adascale_worker.errors import WorkerError
from adascale_worker.gradients.exchange import GradientExchange
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.trained_parameters import Flags
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.scaling.statistics.steps import StepWeights
from adascale_worker.torch_private.autograd import add_in_place

MAX_STEPS_WITHOUT_GRADIENTS = 3
"""Steps after which a program without gradients is refused."""

CHECKED_STEPS = 3
"""First steps in which gradients from before a backward pass are read, which waits for the device."""

Gradients = dict[int, Tensor]
"""Gradients by the position of their parameter."""


class OptimizerGradients:
    """The gradients of the parameters of one optimizer, and of others that the program clips with them."""

    def __init__(
        self,
        name: str,
        adascale: AdaScale,
        parameters: Iterable[Tensor],
        group: ReplicaGroup,
        *,
        has_several_passes: bool,  # for a batch, at the beginning
    ) -> None:
        self.name = name
        self.adascale = adascale
        self.statistics = adascale.statistics
        self._group = group
        number_of = {id(p): n for n, each in enumerate(adascale.param_groups) for p in each["params"]}
        optimized = (p for each in adascale.param_groups for p in each["params"])
        self._parameters = list({id(p): p for p in (*parameters, *optimized)}.values())
        self._number_of = [number_of.get(id(parameter)) for parameter in self._parameters]
        # Of a sharded model, this process has a part of each parameter and its gradient.
        self._is_sharded = any(hasattr(parameter, "placements") for parameter in self._parameters)
        shards = [local_shard(p) if self._is_sharded else p for p in self._parameters]
        self.exchange = GradientExchange(shards, group)
        self._has_several_passes = has_several_passes
        self._trained: Flags | None = None
        """Whether each parameter required gradients in a pass of this step; the same on all replicas."""
        self._earlier: Gradients = {}
        """The sums over the earlier micro-batches of this step."""
        self._local: Gradients = {}
        """The gradients of the present micro-batch on this replica, where they are needed again."""
        self._passes = 0
        """Backward passes for the present micro-batch that have reached the optimizer."""
        self._included: set[int] = set()
        """The positions of parameters whose `.grad` includes the gradients of the earlier micro-batches."""
        self._first_pass = 0
        """The number of the first backward pass for a batch that has reached the optimizer."""
        self._hidden: Gradients = {}
        """What was in `.grad` before the present backward pass."""
        self._taken: Gradients = {}
        """What `.grad` of sharded parameters was after it."""
        self._divisor = 1.0
        self._batches: set[int] = set()
        """The batches whose backward passes have contributed since the last step."""
        self._micro_batches = 0
        """Earlier micro-batches of this step for which the program has called `step()`."""
        self._has_had_gradients = False
        self._steps = 0
        self._may_be_stale = self._is_stale = False
        self.is_averaged = False
        """Whether `.grad` is the mean over the replicas. The same on all of them."""
        self.has_stepped = False
        """Whether the program has called `step()` for the present batch."""

    @property
    def parameters(self) -> set[Tensor]:
        """The parameters."""
        return set(self._parameters)

    # -- which parameters are trained ---------------------------------------------------------------------

    def note_trained(self) -> bool:
        """Record which parameters are trained now, and return whether buckets have to be made for them."""
        if self._group.replicas == 1:
            return False
        trained = tuple([parameter.requires_grad for parameter in self._parameters])
        if self._trained is None:
            self._trained = trained
        elif trained != self._trained:
            self._trained = tuple(map(max, trained, self._trained))
        return not self.exchange.covers(self._trained)

    def prepare(self) -> None:
        """Make buckets before they are needed, and map their memory."""
        self.exchange.prepare(tuple([parameter.requires_grad for parameter in self._parameters]))

    def begin_generation(self, trained: Callable[[Sequence[Tensor]], Flags]) -> None:
        """Make the buckets of the other replicas, for the parameters that all of them train now."""
        if self._group.replicas > 1:
            self.exchange.use(trained(self._parameters))
        else:
            self.exchange.forget()

    # -- a backward pass ----------------------------------------------------------------------------------

    def before_backward(self, *, completes_step: bool, is_early: bool) -> None:
        """Take the gradients out of `.grad`, so that the next pass does not add to them.

        If it is early, the exchange of the gradients may begin in the pass.
        """
        hidden = self._present()
        if self._may_be_stale and not self.has_stepped:
            self._may_be_stale = self._is_stale = self._steps <= CHECKED_STEPS and any(
                bool(local_shard(gradient).any())
                for position, gradient in hidden.items()
                if self._number_of[position] is not None
            )
        if completes_step and self._passes:
            # The program may delete gradients without a method that the trainer replaces.
            deleted = {position for position in (*self._local, *self._included) if position not in hidden}
            if deleted or not hidden:
                self.zeroed(deleted, is_whole=not hidden)
        for position in hidden:
            self._parameters[position].grad = None
        self._hidden = hidden
        if completes_step:
            is_early = is_early and not (self._has_several_passes or self._passes or self.has_stepped)
            self._begin(is_early=is_early)

    def _present(self) -> Gradients:
        """Return the gradients that are there."""
        return {n: gradient for n, p in enumerate(self._parameters) if (gradient := p.grad) is not None}

    def _begin(self, *, is_early: bool) -> None:
        if self._group.replicas > 1:
            if self._trained is not None and not self.exchange.covers(self._trained):
                self.exchange.use(self._trained)
            self.exchange.begin(self._take, is_early=is_early, keeps_means=bool(self._hidden))

    def after_backward(self, batch: int, number: int) -> bool:
        """Find the gradients of a pass, and return whether there are any."""
        is_reached = self.exchange.has_begun or any(p.grad is not None for p in self._parameters)
        if self.has_stepped or not is_reached:
            return False
        self._require_dense(parameter.grad for parameter in self._parameters)
        self._batches.add(batch)
        if not self._passes:
            self._first_pass = number
        self._passes += 1
        return True

    def _require_dense(self, gradients: Iterable[Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.layout is not torch.strided:
                raise WorkerError(
                    f"a parameter of shape {tuple(gradient.shape)}{self._owner} got a gradient of layout "
                    f"{gradient.layout}, which the trainer does not average: use sparse=False"
                )

    def restore(self) -> None:
        """Put back what was in `.grad` before the pass, whose own gradients do not count."""
        hidden, self._hidden = self._hidden, {}
        for position, parameter in enumerate(self._parameters):
            if parameter.grad is not None or position in hidden:
                parameter.grad = hidden.get(position)

    def set_aside(self) -> None:
        """Let the program find no gradients, in a micro-batch that does not complete a step."""
        hidden, self._hidden = self._hidden, {}
        for found in (hidden, self._present()):
            for position in found:
                self._parameters[position].grad = None
            _add(self._local, {position: local_shard(gradient) for position, gradient in found.items()})

    @property
    def lacks_earlier(self) -> bool:
        """Whether `.grad` does not include the gradients of an earlier micro-batch of this step."""
        return not self._included.issuperset(self._earlier)

    def awaits_average(self, number: int) -> bool:
        """Whether a pass of the last micro-batch has to be followed by an average, without new gradients.

        Gradients of earlier micro-batches are averaged with the first pass that reaches the optimizer, or
        with the pass that was the first in the micro-batch before: perhaps none reaches it in this one.
        """
        return number >= self._first_pass and self.lacks_earlier

    @property
    def has_more(self) -> bool:
        """Whether this replica has gradients of the step that no average has included."""
        return self.lacks_earlier or bool(self._present())

    def prepare_without_pass(self) -> None:
        """Prepare for an average of what is there without a backward pass."""
        self.note_trained()
        self._begin(is_early=False)

    def begin_average(self) -> None:
        """Begin with the exchange of the new gradients. A collective call, which does not wait."""
        if self.is_averaged:
            self.statistics.discard_measurement()
            if not self._has_several_passes:
                # The micro-gradient is the sum of several passes, of which the first were not kept.
                self.statistics.leave_out_step()
                self._has_several_passes = True
        if self._group.replicas > 1:
            self.exchange.flush()

    @torch.no_grad()
    def finish_average(self, accumulation: int, weights: StepWeights | None, weight: float) -> None:
        """Add the mean over micro-batches and replicas of new gradients to `.grad`, and measure it."""
        self._divisor = float(accumulation) if weights is None else weights.divisor
        if self._group.replicas > 1:
            self._set_means(self.exchange.means())
        elif self._hidden or self._earlier or self._has_several_passes or self.statistics.reads_gradients:
            every = range(len(self._parameters))
            pairs = zip(every, self._take(every), strict=True)
            self._set_means((position, mean) for position, mean in pairs if mean is not None)
        self.is_averaged = True
        if self._has_several_passes and self.statistics.reads_gradients:
            self._read(list(self._local), list(self._local.values()))
        if weights is not None:
            self.statistics.weigh_step(weights)
        self.statistics.measure(weight)
        self.adascale.scale_grad_by_num_grads_to_accum()

    def _take(self, positions: Sequence[int]) -> list[Tensor | None]:
        """Return the new gradients of parameters, with those of the earlier micro-batches."""
        parameters = self._parameters
        found = [parameters[position].grad for position in positions]
        self._require_dense(found)
        if self._is_sharded:
            self._taken.update(_present(positions, found))
        for position in positions:
            parameters[position].grad = None
        if self._is_sharded or any(g is not None and g.requires_grad for g in found):
            found = [None if gradient is None else local_shard(gradient) for gradient in found]
        if self._has_several_passes:
            _add(self._local, _present(positions, found))
        elif self.statistics.reads_gradients:
            self._read(positions, found)
        # `.grad` is divided in place.
        copies = self._divisor != 1.0 and self._group.replicas == 1
        if copies and self._has_several_passes:
            found = [None if gradient is None else gradient.clone() for gradient in found]
        return self._with_earlier(positions, found, copies=copies) if self._earlier else found

    def _with_earlier(
        self, positions: Sequence[int], found: Sequence[Tensor | None], *, copies: bool
    ) -> list[Tensor | None]:
        """Return gradients with those of the earlier micro-batches, where `.grad` does not include them."""
        sums = _present(positions, found)
        missing = {n: self._earlier[n] for n in positions if n in self._earlier and n not in self._included}
        self._included.update(missing)
        both = [position for position in missing if position in sums]
        if self._has_several_passes:
            sums.update({n: missing[n] + sums[n] for n in both})
        else:
            add_in_place([sums[n] for n in both], [missing[n] for n in both])
        sums.update({n: each.clone() if copies else each for n, each in missing.items() if n not in sums})
        return [sums.get(position) for position in positions]

    def _set_means(self, means: Iterable[tuple[int, Tensor]]) -> None:
        """Add means to what was in `.grad`, which is divided already."""
        parameters, divisor = self._parameters, self._divisor
        hidden, self._hidden, taken, self._taken = self._hidden, {}, self._taken, {}
        for position, mean in means:
            if hidden and (before := hidden.pop(position, None)) is not None:
                mean = torch.add(mean, local_shard(before), alpha=divisor)
            if self._is_sharded:
                gradient = taken.get(position)
                gradient = torch.zeros_like(parameters[position]) if gradient is None else gradient
                parameters[position].grad = gradient
                if (shard := local_shard(gradient)).data_ptr() != mean.data_ptr():
                    shard.copy_(mean)
            else:
                parameters[position].grad = mean
        for position, before in hidden.items():
            parameters[position].grad = before * divisor if divisor != 1.0 else before

    def _read(self, positions: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Read the squared norms of gradients of this replica for the statistics."""
        groups: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for position, gradient in zip(positions, gradients, strict=True):
            number = self._number_of[position]
            if gradient is not None and number is not None:
                parameters, found = groups.setdefault(number, ([], []))
                parameters.append(self._parameters[position])
                found.append(gradient)
        for number, own in groups.items():
            self.statistics.reader.read(number, *own)

    # -- what the program does ----------------------------------------------------------------------------

    def positions_of(self, parameters: Iterable[Tensor]) -> tuple[set[int], bool]:
        """Return the positions of those of `parameters` that it has, and whether they are all of its own."""
        deleted = set(map(id, parameters))
        positions = {n for n, parameter in enumerate(self._parameters) if id(parameter) in deleted}
        own = {n for n, number in enumerate(self._number_of) if number is not None}
        return positions, own <= positions

    def zeroed(self, positions: set[int], *, is_whole: bool) -> None:
        """Delete the gradients of the present micro-batch, because the program has deleted them."""
        if is_whole:
            self._may_be_stale = self._is_stale = False
        if not (positions or is_whole) or not (self._passes or self._local or self._included):
            return
        for position in positions:
            self._local.pop(position, None)
        self._included -= positions
        self.is_averaged = False
        if is_whole or not self._local:
            self._is_stale = False
            self._passes = 0
            self._batches.clear()
            self.statistics.discard_measurement()

    def check_step(self, micro_batch: int, *, is_inside: bool) -> None:
        """Check a call of `step()`, inside the data loop or not, and count it for the present batch."""
        if not is_inside:
            raise WorkerError(
                f"{self._step} was called outside of the loop over trainer.dataloader(), which counts the "
                "samples of a step: make steps for the batches that it delivers"
            )
        if self.has_stepped:
            raise WorkerError(
                f"{self._step} was called twice for one batch: call it at most once "
                "for each batch that trainer.dataloader() delivers, because a step counts its samples"
            )
        if self._is_stale:
            raise WorkerError(
                f"the gradients of the step before{self._owner} were not deleted, so this "
                "step would make it again: call its zero_grad() before loss.backward()"
            )
        if len(self._batches) > 1:
            raise WorkerError(
                f"{self._step} was called after backward passes on "
                f"{len(self._batches)} batches: the trainer accumulates gradients itself. Call zero_grad(), "
                "loss.backward() and step() for the same batch, and do not divide the loss. The upper bound "
                "of local_bsz_bounds decides how many micro-batches a step has"
            )
        self.check_micro_batches(micro_batch)
        self.has_stepped = True

    @property
    def _step(self) -> str:
        return f"step(){self._owner}" if self.name else "optimizer.step()"

    @property
    def _owner(self) -> str:
        """Which of several optimizers this is, for a message."""
        return f" of the optimizer {self.name!r}" if self.name else ""

    def check_gradients(self, *, is_restored: bool) -> None:
        """Check that the first steps of the optimizer have gradients.

        A later step may have none, as that of a task of which the batch has no samples. It is not measured.
        """
        has_gradients = any(parameter.grad is not None for parameter in self._parameters)
        self._has_had_gradients = self._has_had_gradients or has_gradients or is_restored
        if not self.is_averaged:
            self.statistics.discard_step()
        self._steps += 1
        if not self._has_had_gradients and self._steps == MAX_STEPS_WITHOUT_GRADIENTS:
            raise WorkerError(
                f"the first {MAX_STEPS_WITHOUT_GRADIENTS} steps{self._owner} had no "
                "gradients, which changes nothing: call loss.backward() before step(), for the same batch, "
                "and after the last zero_grad()"
            )

    def check_micro_batches(self, micro_batch: int) -> None:
        """Check that the program has called `step()` for all micro-batches of this step, or for none."""
        if self._micro_batches != micro_batch and (self._micro_batches or self.has_stepped or self._passes):
            raise WorkerError(
                f"{self._step} was called for {self._micro_batches} of the first "
                f"{micro_batch} micro-batches of a step: an optimizer that does not make each step must "
                "decide by trainer.steps, which is the same for all micro-batches of a step"
            )

    def finish_micro_batch(self, weight: float) -> None:
        """Keep the gradients of a micro-batch that does not complete a step."""
        self.set_aside()
        if self.statistics.reads_gradients:
            self._read(list(self._local), list(self._local.values()))
            self.statistics.reader.end(weight)
        known = [position for position in self._local if position in self._earlier]
        add_in_place([self._earlier[n] for n in known], [self._local[n] for n in known])
        self._earlier = {**self._local, **self._earlier}
        self._local, self._passes = {}, 0
        self.is_averaged = False
        self._batches.clear()
        self._micro_batches += 1

    def drop_frozen(self, changed: Iterable[Tensor]) -> None:
        """Delete the gradients of parameters that were frozen in this step or since the last."""
        for parameter in changed:
            if not parameter.requires_grad:
                parameter.grad = None
        for parameter, was_trained in zip(self._parameters, self._trained or (), strict=False):
            if was_trained and not parameter.requires_grad:
                parameter.grad = None

    def finish_step(self) -> None:
        """Delete what the step has used, except `.grad`."""
        self._earlier, self._local, self._passes = {}, {}, 0
        self._included.clear()
        if self._trained is not None and self._trained != self.exchange.trained:
            self.exchange.forget()
        self._trained = None
        self.is_averaged = False
        self._batches.clear()
        self._micro_batches = 0
        self._may_be_stale = True

    def discard(self) -> None:
        """Delete all gradients, because the step is discarded."""
        for parameter in self._parameters:
            parameter.grad = None
        self.exchange.discard()
        self.finish_step()
        self._hidden, self._taken = {}, {}
        self._may_be_stale = self._is_stale = self.has_stepped = False
        self.statistics.discard_step()


def _present(positions: Sequence[int], gradients: Sequence[Tensor | None]) -> Gradients:
    """Return the gradients that are there."""
    return {p: gradient for p, gradient in zip(positions, gradients, strict=True) if gradient is not None}


def _add(sums: Gradients, gradients: Gradients) -> None:
    """Add gradients to sums, without changing a tensor."""
    for position, gradient in gradients.items():
        earlier = sums.get(position)
        sums[position] = gradient if earlier is None else earlier + gradient
