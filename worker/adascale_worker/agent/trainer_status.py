"""What a trainer has reported to its agent."""

from __future__ import annotations

from dataclasses import dataclass, replace

from adascale_core.messages.channel import (
    Exiting,
    Finished,
    Holding,
    Limited,
    Ready,
    Running,
    SavedElsewhere,
    Stalled,
    Stepped,
    Terminated,
    TrainerMessage,
    TrainingSaved,
)
from adascale_core.messages.registration import ReplicaState
from adascale_core.names import MAX_ACCELERATOR_LENGTH, MAX_STALL_LENGTH


@dataclass(frozen=True)
class TrainerStatus:
    """The state of a trainer, from its messages."""

    port: int | None = None  # where it listens for other members; None before it is ready for a generation
    # its process id, which is not that of the agent's child process if a shell has started it. None
    # before it is ready, or if unknown.
    pid: int | None = None
    state: ReplicaState = ReplicaState.WAITING  # WAITING before its first generation, RUNNING or HOLDING
    generation: int = 0  # the generation that it runs in or has held for; 0 before the first
    step: int | None = None  # while it holds, the step of its state; None if it has no state
    lost: tuple[int, ...] = ()  # while it holds, the indices of the replicas whose loss it has noticed
    stepped: int = 0  # the newest generation in which it has finished a step; 0 if none
    final: bool = False  # whether the end of training is saved. The program may still evaluate.
    finished: bool = False  # whether training is finished, and the program ends by itself
    terminated: bool = False  # whether it was requested to save and exit
    # while no step ends: where it is, or that it waits for the others. Empty while steps end.
    stall: str = ""
    accelerator: str = ""  # the type of accelerator that it computes on; empty if unknown
    # the largest local batch size that it can still try, because a larger one did not fit into memory;
    # None if none has failed in its generation
    local_bsz_limit: int | None = None
    # the generation of the checkpoint that it cannot replace, because it runs in an earlier one
    saved: int = 0
    # the exit code with which it ends. None if it runs, was killed or has ended by os._exit.
    exit_code: int | None = None

    def after(self, message: TrainerMessage) -> TrainerStatus:
        """Return the status after a message."""
        match message:
            case Ready(port, accelerator, pid):
                return replace(self, port=port, accelerator=accelerator[:MAX_ACCELERATOR_LENGTH], pid=pid)
            case Running(generation):
                return replace(
                    self,
                    state=ReplicaState.RUNNING,
                    generation=generation,
                    step=None,
                    lost=(),
                    stall="",
                    local_bsz_limit=None,
                )
            case Holding(generation, step, lost):
                return replace(
                    self,
                    state=ReplicaState.HOLDING,
                    generation=generation,
                    step=step,
                    lost=tuple(sorted(set(lost))),
                )
            case Stepped(generation):
                return replace(self, stepped=max(self.stepped, generation))
            case Limited(limit):
                return replace(self, local_bsz_limit=limit)
            case SavedElsewhere(generation):
                return replace(self, saved=max(self.saved, generation))
            case Stalled(stall):
                return replace(self, stall=stall[:MAX_STALL_LENGTH])
            case TrainingSaved():
                return replace(self, final=True)
            case Finished():
                return replace(self, finished=True)
            case Terminated():
                return replace(self, terminated=True)
            case Exiting(code):
                return replace(self, exit_code=code)
