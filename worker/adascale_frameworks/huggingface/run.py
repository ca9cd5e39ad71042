"""One training of a framework's trainer: its progress, and the callbacks that are called once per step."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_callback import CallbackHandler, ProgressCallback, TrainerControl, TrainerState

from adascale_frameworks.common import crossed
from adascale_frameworks.huggingface.data import TrainingData
from adascale_frameworks.huggingface.state import FrameworkState, LossSums
from adascale_worker.errors import WorkerError
from adascale_worker.program.hyperparameters import Choice
from adascale_worker.trainer import ElasticTrainer

STATE_NAME = "huggingface"
"""The name under which the state is registered with `program_reentry`."""


class TrainingRun(CallbackHandler):  # type: ignore[misc]
    """The progress of a training in the framework's terms, and its callbacks, which are called once per step.

    A step that is worth three at the initial batch size calls `on_step_end` three times, with a `global_step`
    that rises by one. `control` has what any of these calls has requested.
    """

    def __init__(self, trainer: Any, elastic: ElasticTrainer, hyperparameters: Choice) -> None:
        self.__dict__.update(vars(trainer.callback_handler))
        self._trainer = trainer
        self.elastic = elastic
        self._hyperparameters = hyperparameters
        self.losses = LossSums()
        self.data: TrainingData | None = None  # None before `train`
        self.is_entered = False
        """Whether the replicas have exchanged the state of training."""
        self._only_finite = True
        self.is_inside_step = False
        """Whether the last micro-batch has not completed its step."""
        self._progress = 0.0
        self._was_main: bool | None = None
        self._tokens = 0
        """Input tokens of all replicas at the last log."""

    # -- the beginning ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Make model, optimizer and scheduler elastic, and restore the state of training."""
        trainer = self._trainer
        if trainer.model_wrapped is not trainer.model:
            raise WorkerError(
                f"the Trainer has wrapped its model in {type(trainer.model_wrapped).__name__}, but the "
                "trainer makes the model data-parallel itself: leave out what wraps it"
            )
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        state = self.elastic.program_reentry(
            trainer.model,
            optimizer,
            trainer.lr_scheduler,
            register={STATE_NAME: FrameworkState(trainer, self.losses)},
            hyperparameters=self._hyperparameters,
        )
        self.is_entered = True
        self._only_finite = trainer.args.logging_nan_inf_filter
        if state.restored:
            trainer.args.eval_on_start = False
        self._progress = self.elastic.progress
        self._tokens = trainer.state.num_input_tokens_seen
        self.follow_rank()

    # -- steps ------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Prepare for the next micro-batch."""
        self.follow_rank()
        if self.elastic.begins_step:
            self.losses.begin_step()

    def _set_counts(self, state: TrainerState) -> None:
        """Set the whole steps at the initial batch size, at most as many as training has, and the epochs."""
        assert self.data is not None
        state.global_step = min(math.floor(self._progress), int(state.max_steps))
        state.epoch = self._progress / self.data.steps_per_epoch

    def stop_if_requested(self, control: TrainerControl) -> None:
        """End training on all replicas, if a callback has requested it.

        Inside an epoch the loop goes on until the replicas have agreed, after the next step. Between two
        epochs all replicas leave the loop at once.
        """
        elastic, data = self.elastic, self.data
        if data is None or elastic.finished or not control.should_training_stop:
            return
        elastic.finish("a callback of the Trainer has set should_training_stop")
        if data.is_open and not self.elastic.finished:
            control.should_training_stop = False

    def end(self) -> None:
        """End the last epoch, which saves the end of training."""
        if self.data is not None and self.elastic.finished:
            self.data.begin_epoch()

    # -- all replicas -----------------------------------------------------------------------------------

    def follow_rank(self) -> None:
        """Let the framework know the present rank of this replica, which says who writes files and logs."""
        trainer = self._trainer
        rank, is_main = self.elastic.rank, self.elastic.is_main
        for state in (trainer.args.distributed_state, trainer.accelerator.state):
            state.process_index = state.local_process_index = rank
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = is_main
        if is_main and self._was_main is False:
            # Progress bars begin on a replica that has become the one which shows them.
            for callback in self.callbacks:
                if isinstance(callback, ProgressCallback):
                    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
        self._was_main = is_main

    def synchronize(self) -> None:
        """Add up over the replicas what each has counted since the last call, on all of them alike."""
        trainer, state = self._trainer, self._trainer.state
        sums = self.elastic.sum_over_replicas(
            **self.losses.take(),
            tokens=float(state.num_input_tokens_seen - self._tokens),
            operations=float(trainer.current_flos),
        )
        self._tokens += round(sums["tokens"])
        state.num_input_tokens_seen = self._tokens
        trainer.current_flos = sums["operations"]
        self.losses.add_sums(sums["loss"], sums["steps"])

    # -- callbacks ----------------------------------------------------------------------------------------

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Begin a step, with its first micro-batch. What callbacks have requested inside a step stays."""
        if self.is_inside_step:
            return control
        self.is_inside_step = True
        return super().on_step_begin(args, state, control, **kwargs)

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call the callbacks for an event, if it is one of the elastic training too."""
        elastic = self.elastic
        match event:
            case "on_train_begin":
                # The state of training is restored before.
                self.enter()
            case "on_epoch_begin":
                self.follow_rank()
                if elastic.finished:
                    return control
            case "on_pre_optimizer_step" if not elastic.completes_step:
                return control
            case "on_optimizer_step" if not elastic.made_step:
                return control
            case "on_step_end":
                return self._end_micro_batch(args, state, control, **kwargs)
            case "on_epoch_end" if not self._leave_epoch(control):
                return control
            case "on_train_end":
                # The end of training is saved before.
                self.end()
                self.follow_rank()
        return super().call_event(event, args, state, control, **kwargs)

    def _end_micro_batch(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Count a micro-batch, and after the last one of a step its steps at the initial batch size."""
        if not self.elastic.made_step:
            # The loop has counted the micro-batch as a step.
            self._set_counts(state)
            return self.on_substep_end(args, state, control, **kwargs)
        self.is_inside_step = False
        self.losses.finish_step(self.elastic.step_weight, only_finite=self._only_finite)
        before, self._progress = self._progress, self.elastic.progress
        self._set_counts(state)
        completed = crossed(1, before, self._progress)
        for step in range(completed.start, min(completed.stop, state.max_steps + 1)):
            state.global_step = step
            control = super().call_event("on_step_end", args, state, control, **kwargs)
        return control

    def _leave_epoch(self, control: TrainerControl) -> bool:
        """Leave an epoch, stop after the last one, and return whether this replica has trained in it."""
        data, finished = self.data, self.elastic.finished
        assert data is not None
        data.leave()
        self.follow_rank()
        if not data.has_delivered:
            # This replica has joined at the end of an epoch. The loop takes that for the end of all data.
            control.should_training_stop = False
        control.should_training_stop = control.should_training_stop or finished
        return data.has_delivered or not finished
