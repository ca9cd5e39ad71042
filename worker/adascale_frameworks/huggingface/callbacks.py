"""The callbacks of the framework, called once per step although its loop runs once per micro-batch."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from adascale_frameworks.huggingface.run import TrainingRun


class ElasticCallbackHandler(CallbackHandler):  # type: ignore[misc]
    """Calls the callbacks of a trainer.

    `on_step_end` is called once for each step at the initial batch size: a step that is worth three of them
    calls it three times, with a `global_step` that rises by one. So what a callback does at multiples of a
    number is done once for each multiple, and `control` has what any of these calls has requested.
    """

    def __init__(self, original: CallbackHandler, trainer: Any, run: TrainingRun) -> None:
        self.__dict__.update(vars(original))
        self._trainer = trainer
        self._run = run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Restore the state of training before the callbacks are called."""
        self._run.enter(self._trainer)
        return super().on_train_begin(args, state, control, **kwargs)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Begin an epoch, unless training was finished before."""
        self._run.follow_rank(self._trainer)
        if self._run.elastic.finished:
            control.should_epoch_stop = False
            return control
        return super().on_epoch_begin(args, state, control, **kwargs)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Begin a step, with its first micro-batch."""
        if self._run.is_inside_step:
            return control
        self._run.is_inside_step = True
        return super().on_step_begin(args, state, control, **kwargs)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The gradients are those of the step."""
        if not self._run.elastic.completes_step:
            return control
        return super().on_pre_optimizer_step(args, state, control, **kwargs)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The optimizer has changed the weights."""
        if not self._run.elastic.made_step:
            return control
        return super().on_optimizer_step(args, state, control, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Count a micro-batch, and after the last one of a step its steps at the initial batch size."""
        run = self._run
        if not run.elastic.made_step:
            # The loop has counted the micro-batch as a step.
            state.global_step, state.epoch = run.global_step(state), run.epoch()
            return self.on_substep_end(args, state, control, **kwargs)
        run.is_inside_step = False
        completed = run.advance(state)
        state.global_step, state.epoch = run.global_step(state), run.epoch()
        for step in completed:
            state.global_step = step
            control = super().on_step_end(args, state, control, **kwargs)
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Leave the epoch, and stop after the last one."""
        data, finished = self._run.data, self._run.elastic.finished
        assert data is not None
        data.leave()
        self._run.follow_rank(self._trainer)
        if not data.has_delivered:
            # This replica has joined at the end of an epoch. The loop takes that for the end of all data.
            control.should_training_stop = False
        if finished:
            control.should_training_stop = True
            if not data.has_delivered:
                return control
        return super().on_epoch_end(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save the end of training before the callbacks are called."""
        self._run.end()
        self._run.follow_rank(self._trainer)
        return super().on_train_end(args, state, control, **kwargs)
