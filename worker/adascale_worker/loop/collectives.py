"""Collective calls of the program, which a lost replica does not end."""

from __future__ import annotations

import torch

from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.loop.program_loop import ProgramLoop
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup


class ProgramCollectives:
    """What a program exchanges with the other replicas.

    A call that fails, because a replica is lost, discards the step that the program works on. After a step
    was discarded nothing is exchanged, because the other replicas do not communicate any more.
    """

    def __init__(self, group: ReplicaGroup, failure: StepFailure, loop: ProgramLoop) -> None:
        self._group = group
        self._failure = failure
        self._loop = loop

    def average(self, tensor: torch.Tensor) -> bool:
        """Replace a tensor by its mean over the replicas, and return whether that was possible."""
        if self._group.has_failed or self._failure.is_discarded:
            return False
        try:
            self._group.average([tensor])
        except PeersLostError:
            if self._loop.trains:
                self._failure.discard()
            return False
        return True
