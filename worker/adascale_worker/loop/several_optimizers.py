"""The steps of a program with several optimizers, such as a GAN.

What the program does for one batch is one step: each optimizer makes at most one step of its own in it, the
first one exactly one. The optimizers change their parameters at once, as in a plain loop, so that the loss of
the second sees what the first has changed. If the step fails after that, because members are lost or a batch
does not fit, the state from the beginning of the step is put back, and the same samples are delivered again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import ZeroGrad
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.loop.steps import StepStrategy
from adascale_worker.membership.links import PeersLostError
from adascale_worker.program.optimizers import OptimizerSet
from adascale_worker.program.patching import patch_step
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.state.program import ProgramState, load_model
from adascale_worker.state.tree import Tree


class StepUndo:
    """Puts the state of training back if a step fails after one of several optimizers has made its part.

    It copies the state before each step, on the devices of its tensors. The memory of one copy is used for
    the next, so the state needs twice its memory.
    """

    def __init__(self, program: ProgramState, progress: TrainingProgress) -> None:
        self._program = program
        self._progress = progress
        self._memory: list[Tensor] = []
        self.state: Tree | None = None  # None between two steps

    def record(self) -> None:
        """Copy the state, at the beginning of a step."""
        copier = _Copier(self._memory)
        self.state = copier.copied(
            {
                "program": self._program.state_dict(),
                "progress": self._progress.state_dict(),
                "trained": self._program.trained.state_dict(),
            }
        )
        self._memory = copier.used

    def forget(self) -> None:
        """Keep the changes, because the step is complete."""
        self.state = None

    def revert_progress(self) -> None:
        """Put the progress back, which the program can read; `restore` puts the rest back later."""
        if self.state is not None:
            self._progress.load_state_dict(self.state["progress"])

    def restore(self) -> None:
        """Put the state back, if it was copied."""
        if self.state is not None:
            # The optimizer uses the tensors of the copy from now on.
            self._memory = []
            load_model(self._program.model, self.state["program"]["model"])
            self._program.load_state_dict(self.state["program"])
            self._progress.load_state_dict(self.state["progress"])
            self._program.trained.undo(self.state["trained"])
            # Only now, so that it can be put back again after an error, such as a lack of memory.
            self.state = None


class _Copier:
    """Copies a tree of dicts, lists and values. Tensors are copied into memory that fits."""

    def __init__(self, memory: list[Tensor]) -> None:
        self._memory = memory
        self.used: list[Tensor] = []

    def copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach())
        if isinstance(value, dict):
            # A subclass, such as that of a model's state_dict, keeps its type and its attributes.
            made = copy.copy(value)
            for key, member in value.items():
                made[key] = self.copied(member)
            return made
        if type(value) in (list, tuple):
            return type(value)(self.copied(member) for member in value)
        if isinstance(value, numpy.ndarray | set | bytearray) or hasattr(value, "maxlen"):
            return copy.copy(value)
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        number = len(self.used)
        memory = self._memory[number] if number < len(self._memory) else None
        fits = (
            memory is not None
            and memory.shape == tensor.shape
            and memory.dtype == tensor.dtype
            and memory.device == tensor.device
            and memory.stride() == tensor.stride()
        )
        if memory is None or not fits:
            memory = torch.empty_like(tensor)
        self.used.append(memory.copy_(tensor))
        return memory


@dataclass(eq=False, kw_only=True)
class SeveralOptimizers(StepStrategy):
    """Makes steps with several optimizers. A step is counted when the first of them makes its own."""

    optimizer: OptimizerSet
    undo: StepUndo
    _finished_in: int | None = field(default=None, init=False)
    """The number of the batch for which the program has called `finish`."""

    # -- steps ------------------------------------------------------------------------------------------

    def patch(self, observe: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Replace `step` and `zero_grad` of the program's optimizers, and `zero_grad` of its models."""
        optimizers = self.parts.optimizers.values()
        owners: list[tuple[Any, Iterable[Tensor]]] = [
            *((each, [p for group in each.param_groups for p in group["params"]]) for each in optimizers),
            *((model, model.parameters()) for model in self.parts.models),
        ]
        for owner, parameters in owners:
            owner.zero_grad = ZeroGrad(owner.zero_grad, parameters, self.accumulation)
        for part, optimizer in zip(self.accumulation.parts, optimizers, strict=True):
            patch_step(optimizer, partial(observe(self.step_of), part))

    @property
    def made_step(self) -> bool:
        """Whether the last `step()` has changed the weights, and its step is not discarded since."""
        return self.counter.made_step and not self.failure.is_discarded

    def step_of(self, part: OptimizerGradients) -> None:
        """Count a micro-batch of one optimizer, and in the last one of a step update its parameters."""
        self.counter.begin_call()
        if not self.loop.has_batch:
            raise WorkerError(
                f"step() of the optimizer {part.name!r} was called outside of the loop over "
                "trainer.dataloader(): with several optimizers, the steps for a batch are counted together, "
                "so make them inside that loop"
            )
        if self.failure.is_discarded:
            return
        lacks_pass = not self.accumulation.passes and not self.accumulation.has_stepped
        part.check_step(self.accumulation.kept_micro_batches)
        leads = part.adascale is self.optimizer.lead
        if leads:
            self._checks.stepped()
        if not self.accumulation.at_last_micro_batch:
            part.finish_micro_batch(self.accumulation.micro_weight)
            return
        if lacks_pass:
            self._agree_without_pass()
        flags = self.counter.agreement.flags()
        if leads:
            self.optimizer.lead.flags = flags
        try:
            self.accumulation.complete(part)
            part.check_gradients(is_restored=self.state.was_restored)
            # The exchange must have succeeded before anything is changed.
            part.adascale.exchange_statistics()
            self.group.wait_for_device()
            part.adascale.restart_statistics(self.program.trained.follow(self.progress.step, part.parameters))
            self.checkpointing.before_step()
            part.adascale.step()
        except (RuntimeError, PeersLostError) as error:
            if not self.failure.peers_lost(error):
                raise
            return
        part.finish_step()
        self.counter.made_step = True
        if leads:
            self.counter.count(flags)
        if self._finished_in == self.accumulation.batch:
            self._save_end_again()

    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step of an optimizer whose gradients are not finite. See `StepStrategy`."""
        for part in self.accumulation.parts:
            if part.adascale.optimizer is optimizer:
                part.check_step(self.accumulation.kept_micro_batches)
                part.finish_step()
                part.adascale.discard_step()
                if part.adascale is self.optimizer.lead:
                    self.counter.count_skipped()

    def begin_step(self) -> None:
        """Copy the state, after the replicas have agreed on the trained parameters. A collective call."""
        # Gradients are averaged for the trained parameters, which have to be the same on all replicas.
        self.program.trained.agree(self.progress.step)
        # The buffers of rank 0, such as BatchNorm's statistics, count on all replicas.
        self._copy_buffers(self.parts.model.buffers())
        self.undo.record()

    def begin_batch(self) -> None:
        """Prepare for a batch, which the program gets next."""
        super().begin_batch()
        self.times.begin_step()

    def end_batch(self) -> None:
        """Complete the step if this was its last micro-batch. See `StepStrategy`."""
        super().end_batch()
        for part in self.accumulation.parts:
            part.has_stepped = False

    def _complete_batch(self) -> None:
        parts, accumulation = self.accumulation.parts, self.accumulation
        if parts[0].has_stepped:
            if accumulation.at_last_micro_batch:
                for part in parts:
                    if not part.has_stepped:
                        part.check_micro_batches(0)
            if accumulation.advance():
                self.undo.forget()
                self.planner.finished_step()
        elif stepped := [part.name for part in parts if part.has_stepped]:
            raise WorkerError(
                f"the optimizer {stepped[0]!r} made a step for a batch for which the first one, "
                f"{parts[0].name!r}, made none: a step is counted when the first optimizer makes its "
                "own, so it has to make one for each batch. Pass the optimizer that makes the most steps "
                "as the first"
            )
        elif accumulation.is_later_and_last and any(part.is_averaged for part in parts):
            # The program does not want the mean gradients, which are the same on all replicas.
            accumulation.restart_step()

    def discard(self) -> None:
        """Put the state from before the step back."""
        super().discard()
        self._is_open = self.counter.made_step = False

    # -- the end of a loop and of training ----------------------------------------------------------------

    def leave(self) -> None:
        """Put a failed step back: the loop, which would do so before its next batch, has ended."""
        if self.failure.is_discarded:
            self.discard()

    def mark_finish(self) -> None:
        """Save the end of training again if the present batch has other steps."""
        self._finished_in = self.accumulation.batch if self._is_open else None

    def end_epoch(self) -> None:
        """Keep the last step: one without its last micro-batch has changed no weights."""
        self.undo.forget()

    def _save_end_again(self) -> None:
        """Replace what `finish` has saved between the steps of two optimizers."""
        if self.group.replicas > 1:
            self.finish_request.save()
        else:
            self.state.save(final=True)
