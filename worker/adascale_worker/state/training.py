"""The contents of a checkpoint: all that a trainer needs to continue bit for bit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from adascale_core.batch.plans import BatchPlan
from adascale_worker.errors import UnusableCheckpointError
from adascale_worker.state.checkpoints.store import CheckpointInfo
from adascale_worker.state.components import TrainerComponents
from adascale_worker.state.program import ProgramState, load_model
from adascale_worker.state.tree import tensor_numbers


class TrainingState:
    """The state of a training program and of its trainer.

    Args:
        trainer: the parts of the trainer.
        program: the parts of the program.
    """

    def __init__(self, trainer: TrainerComponents, program: ProgramState) -> None:
        self._trainer = trainer
        self._program = program
        self.replaced: Mapping[str, Any] = {}
        """Parts that are saved in place of those in memory, such as from before an unfinished step."""

    def info(self) -> CheckpointInfo:
        """Return the description of a checkpoint of the current state."""
        trainer, progress = self._trainer, self._trainer.progress
        return CheckpointInfo(
            step=progress.step,
            progress=progress.progress,
            epoch=progress.epoch,
            replicas=trainer.group.replicas,
            generation=trainer.generation,
            finished=trainer.finished,
            saved_at=time.time(),
            incarnation=trainer.incarnation,
            finish_reason=progress.finish_reason or "",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its tensors are those of the program, not copies."""
        trainer, plan = self._trainer, self._trainer.planner.plan
        return {
            "program": self._program.state_dict(),
            # Not with the program, whose state is copied in each step of several optimizers.
            "parameters": self._program.parameter_names(),
            "trained": self._program.trained.state_dict(),
            "progress": trainer.progress.state_dict(),
            "plan": [plan.replicas, plan.local_bsz, plan.accumulation],
            "fitting_local_bsz": trainer.planner.fitting,
            "batch_size": trainer.settings.bounds.batch_size,
            "data": trainer.feed.state_dict(),
            "step_times": trainer.telemetry.step_timer.state_dict(),
            **self.replaced,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state.

        The batch plan is the saved one; `BatchPlanner.adapt` makes it valid for the present replicas.

        Raises:
            UnusableCheckpointError: the state was saved with another batch size or by another program.
        """
        trainer = self._trainer
        batch_size = trainer.settings.bounds.batch_size
        if state["batch_size"] != batch_size:
            raise UnusableCheckpointError(
                f"the checkpoint was saved with batch_size {state['batch_size']}, but batch_size is now "
                f"{batch_size}: progress counts steps at batch_size, so it cannot change. Set it back to "
                f"{state['batch_size']}, or start from scratch (adascale run --fresh, or another checkpoint "
                "folder)"
            )
        load_model(self._program.model, state["program"]["model"])
        self._program.load_state_dict(state["program"])
        # Earlier versions have not saved them.
        self._program.require_parameters(state.get("parameters", []))
        self._program.load_trained(state.get("trained"))
        trainer.progress.load_state_dict(state["progress"])
        trainer.feed.load_state_dict(state["data"])
        trainer.telemetry.step_timer.load_state_dict(state["step_times"])
        trainer.planner.restore(BatchPlan(*state["plan"]), int(state["fitting_local_bsz"]))


def model_tensor_numbers(spec: bytes) -> dict[str, int]:
    """Return the numbers of the tensors of the model in a flattened state, by their names.

    Args:
        spec: the structure of what `TrainingState.state_dict` returns, see `tree.flatten`.

    Raises:
        InvalidSpecError: it is another structure.
    """
    return tensor_numbers(spec, ["program", "model"])
