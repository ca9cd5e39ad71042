"""The training loop of a program with several optimizers, such as a GAN.

What the program does for one batch is one step: each optimizer makes at most one step of its own in it, the
first one exactly one. The optimizers change their parameters at once, as in a plain loop, so that the loss of
the second sees what the first has changed. If the step fails after that, because members are lost or a batch
does not fit, the state from the beginning of the step is put back, and the same samples are delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adascale_core.batch.plans import BatchPlan
from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import Accumulation
from adascale_worker.gradients.micro_batch_weights import MicroBatchWeights
from adascale_worker.gradients.model_set import ModelSet
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.loop.step_undo import StepUndo
from adascale_worker.loop.training_loop import TrainingLoop
from adascale_worker.membership.links import PeersLostError, StateNumber
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.optimizer_set import OptimizerSet
from adascale_worker.program.patching import MethodOverride, patch_step
from adascale_worker.state.program import load_model


class SeveralAccumulations(Accumulation):
    """Counts the micro-batches of a step, and has the gradients of each optimizer.

    Args:
        optimizers: of the program.
        models: of the program.
        group: the replicas.
    """

    def __init__(self, optimizers: OptimizerSet, models: ModelSet, group: ReplicaGroup) -> None:
        super().__init__(MicroBatchWeights(group))
        self._models = models
        self._group = group
        self.parts = [
            OptimizerGradients(name, adascale, group, models.average)
            for name, adascale in optimizers.parts.items()
        ]
        self.is_active: Callable[[], bool] = lambda: False
        """Whether the program is inside its data loop; other backward passes are left alone."""
        self.handles: Callable[[BaseException], bool] = lambda _: False
        """Whether an error means that the step is discarded."""
        self.batch = 0
        """The number of the present batch."""
        self._passes = 0
        """Backward passes for the present batch."""
        self._is_inside_pass = False

    def set_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use the accumulation of `plan` from the next step on.

        Args:
            plan: the new batch plan.
            scale: its scale S.
        """
        self._accumulation = plan.accumulation
        self.weights.set_plan(plan)
        for part in self.parts:
            part.adascale.set_num_gradients_to_accumulate(plan.accumulation)
            part.adascale.update_scale(scale, plan.replicas)
        self.restart_step()

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step; discard the gradients of an unfinished step."""
        self.micro_batch = 0
        self.weights.restart_step()
        for part in self.parts:
            try:
                part.discard()
            except RuntimeError as error:
                if not self._group.is_failure(error):
                    raise
                part.discard()

    def put_back(self) -> None:
        """Do nothing: no gradients are set aside."""

    def begin_generation(self) -> None:
        """Begin with other replicas. A collective call."""
        self.weights.begin_generation()

    def check_exchange(self) -> None:
        """Do nothing: the gradients are taken out of `.grad` before they are averaged."""

    def begin_batch(self) -> None:
        """Count a batch that the program gets."""
        super().begin_batch()
        self.batch += 1
        self._passes = 0

    # -- backward passes ----------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Let the gradients of the next pass come alone."""
        self._is_inside_pass = self.is_active()
        if not self._is_inside_pass:
            return
        self.weights.begin_pass()
        try:
            for part in self.parts:
                part.before_backward(completes_step=self.at_last_micro_batch)
        except RuntimeError as error:
            if not self.handles(error):
                raise

    def after_backward(self) -> None:
        """Add the gradients of a pass to those of the batch, and average them in the last micro-batch.

        In the last micro-batch this is a collective call, also for a pass without gradients on this replica.
        """
        if not self._is_inside_pass:
            return
        self._is_inside_pass = False
        models = self._models
        if self._group.has_failed:
            models.has_missed_exchange = True
        number, self._passes = self._passes, self._passes + 1
        try:
            for part in self.parts:
                if part.after_backward(self.batch, number):
                    self.weights.gradient_arrived()
            self.weights.end_pass()
            if self.at_last_micro_batch and not models.has_missed_exchange:
                self._average({part: part.awaits_average(number) for part in self.parts})
            else:
                for part in self.parts:
                    part.hide()
        except (RuntimeError, MemoryError, PeersLostError) as error:
            if not self.handles(error):
                raise

    def complete(self, part: OptimizerGradients) -> None:
        """Average what an optimizer has of earlier micro-batches, if no pass of the last one has reached it.

        A collective call.
        """
        if not self.at_first_micro_batch and not part.is_averaged:
            self._average({part: part.lacks_earlier})

    def _average(self, awaits: Mapping[OptimizerGradients, bool]) -> None:
        """Average the gradients of the optimizers for which a replica has some. A collective call.

        Args:
            awaits: for each optimizer, whether this replica has some.

        Raises:
            WorkerError: some micro-batches of the step have a weight, and others have none.
        """
        numbers = self._models.sum([*map(float, awaits.values()), *self.weights.sums()])
        self.weights.agree(numbers[len(awaits) :])
        for part, count in zip(awaits, numbers, strict=False):
            if count > 0.0:
                part.average(self._accumulation, self.weights.of_step, self.weights.factor)

    def zeroed(self, parameters: Sequence[Tensor]) -> None:
        """Record that the program has deleted the gradients of `parameters`."""
        try:
            for part in self.parts:
                part.zeroed(parameters)
        except RuntimeError as error:
            if not self.handles(error):
                raise


class SeveralOptimizersLoop(TrainingLoop):
    """The training loop of a program with several optimizers.

    The arguments are those of `TrainingLoop`.
    """

    adascale: OptimizerSet
    _model: ModelSet
    _accumulation: SeveralAccumulations

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._undo = StepUndo(self._undo_state, self._load_undo_state)
        self._is_open = False
        """Whether the program works on a batch, or its steps for the last batch are not counted yet."""
        self._finished_in: int | None = None
        """The number of the batch for which the program has called `finish`."""
        self._model.on_discard = self._revert_progress
        self._accumulation.is_active = lambda: self._inside_epoch and not self.evaluations.is_evaluating
        self._accumulation.handles = self.handle_backward_error

    # -- steps ------------------------------------------------------------------------------------------

    def patch(
        self, optimizers: Mapping[str, torch.optim.Optimizer], models: Iterable[torch.nn.Module]
    ) -> None:
        """Replace `step` and `zero_grad` of the program's optimizers, and `zero_grad` of its models."""
        owners: list[Any] = [*optimizers.values(), *models]
        for owner in owners:
            groups = owner.param_groups if isinstance(owner, torch.optim.Optimizer) else None
            parameters = (
                list(owner.parameters()) if groups is None else [p for g in groups for p in g["params"]]
            )
            owner.zero_grad = _ZeroGrad(owner.zero_grad, parameters, self._accumulation)
        for part, optimizer in zip(self._accumulation.parts, optimizers.values(), strict=True):
            step = self._rates.observe_optimizer(self.step_of, lambda: self.inside_epoch)
            patch_step(optimizer, partial(step, part))

    def step_of(self, part: OptimizerGradients) -> None:
        """Count a micro-batch of one optimizer, and in the last one of a step update its parameters.

        Raises:
            StaleBatchSizeError: the program has not read the current local batch size.
            WorkerError: the loop does not make its steps as the trainer requires, or the weights of the
                replicas differ or are not finite.
        """
        self._begin_call()
        if not self._inside_epoch:
            raise WorkerError(
                f"step() of the optimizer {part.name!r} was called outside of the loop over "
                "trainer.dataloader(): with several optimizers, the steps for a batch are counted together, "
                "so make them inside that loop"
            )
        if self._model.has_missed_exchange:
            return
        part.check_step(self._accumulation.micro_batch)
        leads = part.adascale is self.adascale.lead
        if leads:
            self._checks.check_step(inside_epoch=True)
        if not self._accumulation.at_last_micro_batch:
            part.finish_micro_batch(self._accumulation.weights.factor)
            return
        group, flags = self._trainer.group, self._requests().flags()
        if leads:
            self.adascale.flags = flags
        try:
            self._accumulation.complete(part)
            part.check_gradients(is_restored=self.was_restored)
            # The exchange must have succeeded before anything is changed.
            part.adascale.exchange_statistics()
            group.wait_for_device()
            part.adascale.restart_statistics(self._program.trained.follow(self.steps, part.parameters))
            self._trainer.checkpointing.before_step()
            part.adascale.step()
        except (RuntimeError, PeersLostError) as error:
            if not self.handle_communication_error(error):
                raise
            return
        part.finish_step()
        self.made_step = True
        if leads:
            self._count_step(flags)
        if self._finished_in == self._accumulation.batch:
            self._save_end_again()

    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step of an optimizer whose gradients are not finite, without making it.

        Raises:
            WorkerError: see `step_of`.
            NonFiniteWeightsError: too many steps in a row are skipped.
        """
        for part in self._accumulation.parts:
            if part.adascale.optimizer is optimizer:
                part.check_step(self._accumulation.micro_batch)
                part.finish_step()
                part.adascale.discard_step()
                if part.adascale is self.adascale.lead:
                    self._count_skipped_step()

    def _begin_step(self) -> None:
        # Gradients are averaged for the trained parameters, which have to be the same on all replicas.
        self._program.trained.agree(self.steps)
        # The buffers of rank 0, such as BatchNorm's statistics, count on all replicas.
        self._trainer.group.copy_from_rank_0(list(self._program.model.buffers()))
        self._undo.record()

    def _begin_batch(self) -> None:
        self._is_open = True
        self._accumulation.begin_batch()
        self._model.begin_step()

    def _end_batch(self) -> None:
        """Complete the step if this was its last micro-batch."""
        if not self._is_open:
            return
        self._is_open = False
        parts, accumulation = self._accumulation.parts, self._accumulation
        if not self._model.has_missed_exchange:
            if parts[0].has_stepped:
                if accumulation.at_last_micro_batch:
                    for part in parts:
                        if not part.has_stepped:
                            part.check_micro_batches(0)
                if accumulation.advance():
                    self._undo.forget()
                    self._trainer.planner.finished_step()
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
        for part in parts:
            part.has_stepped = False

    # -- the end of a loop and of training ----------------------------------------------------------------

    def end_epoch(self, epoch: int) -> None:
        """End the current epoch, as `TrainingLoop.end_epoch`, after the last step is completed or undone.

        Args:
            epoch: number of the current epoch, from 0.

        Raises:
            WorkerError: see `TrainingLoop.end_epoch`.
            ReplicationError: see there.
            CheckpointError: see there.
        """
        self._end_batch()
        self._leave_loop(early=True)
        # A step without its last micro-batch has changed no weights.
        self._undo.forget()
        super().end_epoch(epoch)

    def _leave_loop(self, *, early: bool) -> None:
        if self._model.has_missed_exchange:
            # The loop, which would put the state back before its next batch, has ended.
            self._discard_step()
        super()._leave_loop(early=early)

    def finish(self, reason: str) -> None:
        """End training, as `TrainingLoop.finish`; the step of the present batch may not be complete."""
        if self._model.has_missed_exchange:
            self._discard_step()
        super().finish(reason)
        self._finished_in = self._accumulation.batch if self._is_open else None

    def _save_end_again(self) -> None:
        """Replace what `finish` has saved between the steps of two optimizers."""
        if self._trainer.group.replicas > 1:
            self._finish_request.save()
        else:
            self._saving.save(final=True)

    # -- steps that fail ----------------------------------------------------------------------------------

    @property
    def state_number(self) -> StateNumber | None:
        """The number of the state in memory, as it is after an unfinished step is undone."""
        if self._state_generation is None or self._undo.state is None:
            return super().state_number
        progress = self._undo.state["progress"]
        return self._state_generation, progress["step"], progress["consumed"]

    def _undo_state(self) -> dict[str, Any]:
        return {
            "program": self._program.state_dict(),
            "progress": self._trainer.progress.state_dict(),
            "trained": self._program.trained.state_dict(),
        }

    def _load_undo_state(self, state: dict[str, Any]) -> None:
        load_model(self._program.model, state["program"]["model"])
        self._program.load_state_dict(state["program"])
        self._trainer.progress.load_state_dict(state["progress"])
        self._program.trained.undo(state["trained"])

    def _revert_progress(self) -> None:
        """Take back what the program can read of the present step; the state follows at its next batch."""
        self.made_step = False
        if self._undo.state is not None:
            self._trainer.progress.load_state_dict(self._undo.state["progress"])
            self._position_after_step = min(self._position_after_step, self._trainer.progress.consumed)

    def _restore_step(self) -> None:
        self._undo.restore()
        self._is_open = False

    def _save_in_thread(self) -> bool:
        """Save the state from before the present step: the main thread cannot leave a collective call."""
        undone = self._undo.state
        if undone is None:
            return super()._save_in_thread()
        if self._state_generation is None or not self._trainer.checkpointing.enabled:
            return False
        self._trainer.progress.load_state_dict(undone["progress"])
        self._state.replaced = undone
        return self._saving.save_alone()


class _ZeroGrad(MethodOverride):
    """Zeroes gradients, and lets the trainer know which."""

    def __init__(
        self, original: Callable[..., Any], parameters: list[Tensor], gradients: SeveralAccumulations
    ) -> None:
        super().__init__(original)
        self._parameters = parameters
        self._gradients = gradients

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.original(*args, **kwargs)
        self._gradients.zeroed(self._parameters)
