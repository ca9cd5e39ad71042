"""One training of a framework's trainer: losses, state, and callbacks that are called once per step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer_callback import (
    CallbackHandler,
    ExportableState,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from adascale_frameworks.common import ElasticRun, TrainingLoader
from adascale_frameworks.sharding import Sharding, place_of
from adascale_worker.errors import WorkerError
from adascale_worker.program.hyperparameters import Choice
from adascale_worker.trainer import ElasticTrainer


class LossSums:
    """The mean loss of the steps since the last log and since the beginning, weighted as the gradient is.

    This replica adds up its part of it on its device. The parts of all replicas are added when the framework
    logs, evaluates or saves.
    """

    def __init__(self) -> None:
        self._micro_batches: Tensor | float = 0.0
        """Of the present step: the sum of the losses times their weights."""
        self._weight = 0.0
        """Of these micro-batches."""
        self._steps: Tensor | float = 0.0
        """The sum of the losses of the steps that are not exchanged yet, the part of this replica."""
        self._parts = 0.0
        """The sum of the parts of these steps that this replica has made."""
        self.sums = {name: {"loss": 0.0, "steps": 0.0} for name in ("interval", "total")}
        """Since the last log, and since the beginning: of all replicas."""

    def begin_step(self) -> None:
        """Delete the losses of a step that was not completed."""
        self._micro_batches, self._weight = 0.0, 0.0

    def add(self, loss: Tensor, weight: float) -> None:
        """Add the mean loss of a micro-batch of this replica. Does not wait for the device."""
        if weight:
            self._micro_batches = loss.detach().double().mean() * weight + self._micro_batches
            self._weight += weight

    def finish_step(self, weight: float, *, only_finite: bool) -> None:
        """Add the loss of a step whose micro-batches on all replicas have the sum of weights `weight`.

        A loss that is not finite counts as zero if `only_finite`. Does not wait for the device.
        """
        if weight:
            loss = torch.as_tensor(self._micro_batches) / weight
            if only_finite:
                loss = torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
            self._steps = loss + self._steps
            self._parts += self._weight / weight
        self.begin_step()

    def exchange(self, elastic: ElasticTrainer, **others: float) -> dict[str, float]:
        """Add what all replicas have added since the last call, and return the sums of other numbers.

        Waits for the device.
        """
        found = elastic.sum_over_replicas(loss=float(self._steps), steps=self._parts, **others)
        self._steps, self._parts = 0.0, 0.0
        for sums in self.sums.values():
            for name in sums:
                sums[name] += found[name]
        return found

    def mean(self, since: str) -> float:
        """Return the mean loss of the steps of the "interval" since the last log, or of the "total"."""
        sums = self.sums[since]
        return sums["loss"] / sums["steps"] if sums["steps"] else 0.0


_OF_THIS_REPLICA = frozenset({"is_local_process_zero", "is_world_process_zero", "stateful_callbacks"})
"""Attributes of `TrainerState` that are not restored."""


def _has_state_dict(callback: object) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _state_of(callback: Any) -> dict[str, Any]:
    return dict(callback.state_dict() if _has_state_dict(callback) else callback.state()["attributes"])


def _restore(callback: Any, state: dict[str, Any]) -> None:
    if _has_state_dict(callback):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


class TrainingRun(ElasticRun, CallbackHandler):  # type: ignore[misc]
    """The progress of a training in the framework's terms, and its callbacks, which are called once per step.

    A step that is worth three at the initial batch size calls `on_step_end` three times, with a `global_step`
    that rises by one. `control` has what any of these calls has requested.
    """

    def __init__(
        self, trainer: Any, elastic: ElasticTrainer, hyperparameters: Choice, sharding: Sharding | None
    ) -> None:
        self.__dict__.update(vars(trainer.callback_handler))
        super().__init__(elastic)
        self._trainer = trainer
        self.hyperparameters = hyperparameters
        self._sharding = sharding
        self.losses = LossSums()
        self.data: TrainingLoader | None = None  # None before `train`
        self._epochs: Iterator[int] | None = None
        self.has_delivered = False
        """Whether the present epoch, or the last one, has had a batch."""
        self.is_entered = False
        """Whether the replicas have exchanged the state of training."""
        self.is_inside_step = False
        """Whether the last micro-batch has not completed its step."""
        self.resumes = False
        """Whether the framework loads a folder of a Trainer, before the state of the job."""
        self.missing: Any = None
        """The argument of `train` that names no folder of a Trainer."""
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
        register: dict[str, Any] = {"huggingface": self}
        if trainer.accelerator.scaler is not None:
            register["scaler"] = trainer.accelerator.scaler
        state = self.elastic.program_reentry(
            trainer.model,
            optimizer,
            trainer.lr_scheduler,
            register=register,
            hyperparameters=self.hyperparameters,
            begin_at=self._begin_at(),
        )
        self.is_entered = True
        if self.missing is not None and not state.restored:
            raise WorkerError(
                f"train() got resume_from_checkpoint={self.missing!r}, and the job has no state of its own: "
                "pass a folder that a Trainer has written, such as output_dir/checkpoint-500, which has "
                "trainer_state.json, or leave it out to begin from the start"
            )
        if "scaler" in register:
            # With a scaler, the wrapper of accelerate calls a method that it has kept.
            trainer.optimizer.__setstate__({})
        if state.restored:
            trainer.args.eval_on_start = False
        self._progress = self.elastic.progress
        self._tokens = trainer.state.num_input_tokens_seen
        self.follow_rank()

    def _begin_at(self) -> tuple[int, int]:
        """Return the epoch and the steps of the folder that the framework has loaded."""
        steps, data = self._trainer.state.global_step, self.data
        assert data is not None
        return (0 if data.samples is None else int(steps / data.steps_per_epoch)), steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer and its callbacks, without what belongs to this replica.

        Callbacks have state if they are an `ExportableState`, as early stopping is, or have `state_dict` and
        `load_state_dict`.
        """
        trainer_state = asdict(self._trainer.state)
        return {
            "trainer": {name: value for name, value in trainer_state.items() if name not in _OF_THIS_REPLICA},
            "last_logged": self._trainer._globalstep_last_logged,
            "losses": deepcopy(self.losses.sums),
            "callbacks": [[type(each).__name__, _state_of(each)] for each in self._stateful()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        callbacks = self._stateful()
        names = [type(each).__name__ for each in callbacks]
        saved = [name for name, _ in state["callbacks"]]
        if names != saved:
            raise ValueError(
                f"the callbacks with state are {', '.join(names) or 'none'}, and were "
                f"{', '.join(saved) or 'none'}"
            )
        known = {field.name for field in fields(TrainerState)}
        for name, value in state["trainer"].items():
            if name in known:
                setattr(self._trainer.state, name, value)
        self._trainer._globalstep_last_logged = state["last_logged"]
        self.losses.sums = deepcopy(state["losses"])
        for callback, (_, callback_state) in zip(callbacks, state["callbacks"], strict=True):
            _restore(callback, callback_state)

    def _stateful(self) -> list[TrainerCallback]:
        return [each for each in self.callbacks if isinstance(each, ExportableState) or _has_state_dict(each)]

    # -- steps ------------------------------------------------------------------------------------------

    def iterate(self, data: TrainingLoader) -> Iterator[Any]:
        """Yield the micro-batches of an epoch, until the epoch of the trainer ends, or training."""
        self.leave()
        self.has_delivered = False
        if self._begin_epoch():
            yield from self.deliver(data, self._begin_batch)

    def _begin_epoch(self) -> bool:
        """End the epoch before, and return whether there is another one."""
        if self._epochs is None:
            self._epochs = self.elastic.epochs()
        return next(self._epochs, None) is not None

    def _begin_batch(self) -> None:
        self.has_delivered = True
        self.follow_rank()
        if self.elastic.begins_step:
            self.losses.begin_step()

    def _set_counts(self, state: TrainerState) -> None:
        """Set the whole steps at the initial batch size, at most as many as training has, and the epochs."""
        assert self.data is not None
        state.global_step = min(math.floor(self._progress), int(state.max_steps))
        # As the framework does for data without a length, one epoch has all steps.
        length = state.max_steps if self.data.samples is None else self.data.steps_per_epoch
        state.epoch = self._progress / length

    def stop_if_requested(self, control: TrainerControl) -> None:
        """End training on all replicas, if a callback has requested it.

        Inside an epoch the loop goes on until the replicas have agreed, after the next step. Between two
        epochs all replicas leave the loop at once.
        """
        if self.data is None or not control.should_training_stop:
            return
        has_ended = self.request_end("a callback of the Trainer has set should_training_stop")
        control.should_training_stop = has_ended or self.batches is None

    # -- all replicas -----------------------------------------------------------------------------------

    def follow_rank(self) -> None:
        """Let the framework know the present rank of this replica, which says who writes files and logs."""
        trainer = self._trainer
        index, is_main = self._place[0], self.elastic.is_main
        for state in (trainer.args.distributed_state, trainer.accelerator.state):
            state.process_index = state.local_process_index = index
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = is_main
        if is_main and self._was_main is False:
            # Progress bars begin on a replica that has become the one which shows them.
            for callback in self.callbacks:
                if isinstance(callback, ProgressCallback):
                    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
        self._was_main = is_main

    @property
    def _place(self) -> tuple[int, int]:
        """The index of this process, and the number of processes of all replicas."""
        return place_of(self.elastic, is_sharded=self._sharding is not None)

    @property
    def processes(self) -> int:
        """The number of processes of all replicas."""
        return self._place[1]

    def synchronize(self) -> None:
        """Add up over the replicas what each has counted since the last call, on all of them alike."""
        trainer, state = self._trainer, self._trainer.state
        sums = self.losses.exchange(
            self.elastic,
            tokens=float(state.num_input_tokens_seen - self._tokens),
            operations=float(trainer.current_flos),
        )
        state.num_input_tokens_seen = self._tokens = self._tokens + round(sums["tokens"])
        trainer.current_flos = sums["operations"]

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
                if self.elastic.finished:
                    self._begin_epoch()
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
        self.losses.finish_step(self.elastic.step_weight, only_finite=args.logging_nan_inf_filter)
        before, self._progress = self._progress, self.elastic.progress
        self._set_counts(state)
        for step in range(math.floor(before) + 1, state.global_step + 1):
            state.global_step = step
            control = super().call_event("on_step_end", args, state, control, **kwargs)
        return control

    def _leave_epoch(self, control: TrainerControl) -> bool:
        """Leave an epoch, stop after the last one, and return whether this replica has trained in it."""
        finished = self.elastic.finished
        self.leave()
        self.follow_rank()
        if not self.has_delivered:
            # This replica has joined at the end of an epoch. The loop takes that for the end of all data.
            control.should_training_stop = False
        control.should_training_stop = control.should_training_stop or finished
        return self.has_delivered or not finished
