"""What a trainer has reported to its agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from adascale_core.messages.registration import ReplicaState
from adascale_core.names import MAX_ACCELERATOR_LENGTH, MAX_STALL_LENGTH


@dataclass(frozen=True)
class TrainerStatus:
    """The state of a trainer, from its messages.

    Args:
        port: where it listens for other members; None before it is ready for a generation.
        pid: its process id, which is not that of the agent's child process if a shell has started it.
            None before it is ready, or if unknown.
        state: WAITING before its first generation, RUNNING or HOLDING.
        generation: the generation that it runs in or has held for; 0 before the first.
        step: while it holds, the step of its state; None if it has no state.
        lost: while it holds, the indices of the replicas whose loss it has noticed.
        stepped: the newest generation in which it has finished a step; 0 if none.
        final: whether the end of training is saved. The program may still evaluate.
        finished: whether training is finished, and the program ends by itself.
        terminated: whether it was requested to save and exit.
        stall: while no step ends: where it is, or that it waits for the others. Empty while steps end.
        accelerator: the type of accelerator that it computes on; empty if unknown.
        local_bsz_limit: the largest local batch size that it can still try, because a larger one did not fit
            into memory; None if none has failed in its generation.
        saved: the generation of the checkpoint that it cannot replace, because it runs in an earlier one.
        exit_code: the exit code with which it ends. None if it runs, was killed or has ended by os._exit.
    """

    port: int | None = None
    pid: int | None = None
    state: ReplicaState = ReplicaState.WAITING
    generation: int = 0
    step: int | None = None
    lost: tuple[int, ...] = ()
    stepped: int = 0
    final: bool = False
    finished: bool = False
    terminated: bool = False
    stall: str = ""
    accelerator: str = ""
    local_bsz_limit: int | None = None
    saved: int = 0
    exit_code: int | None = None

    def after(self, message: Mapping[str, Any]) -> TrainerStatus:
        """Return the status after a message. Messages of unknown types are ignored."""
        match message:
            case {"type": "ready", "port": int(port)}:
                accelerator = str(message.get("accelerator", ""))[:MAX_ACCELERATOR_LENGTH]
                pid = message.get("pid")
                return replace(
                    self, port=port, accelerator=accelerator, pid=pid if type(pid) is int else None
                )
            case {"type": "running", "generation": int(generation)}:
                return replace(
                    self,
                    state=ReplicaState.RUNNING,
                    generation=generation,
                    step=None,
                    lost=(),
                    stall="",
                    local_bsz_limit=None,
                )
            case {"type": "holding", "generation": int(generation), "step": step, "lost": [*lost]}:
                return replace(
                    self,
                    state=ReplicaState.HOLDING,
                    generation=generation,
                    step=None if step is None else int(step),
                    lost=tuple(sorted(set(map(int, lost)))),
                )
            case {"type": "stepped", "generation": int(generation)}:
                return replace(self, stepped=max(self.stepped, generation))
            case {"type": "limited", "local_bsz_limit": int(limit)}:
                return replace(self, local_bsz_limit=limit)
            case {"type": "saved", "generation": int(generation)}:
                return replace(self, saved=max(self.saved, generation))
            case {"type": "stalled", "stall": str(stall)}:
                return replace(self, stall=stall[:MAX_STALL_LENGTH])
            case {"type": "final"}:
                return replace(self, final=True)
            case {"type": "finished"}:
                return replace(self, finished=True)
            case {"type": "terminated"}:
                return replace(self, terminated=True)
            case {"type": "exiting", "code": int(code)}:
                return replace(self, exit_code=code)
            case _:
                return self
