"""What the replicas agree on between two steps, and how they learn that one has left its loop.

Each replica requests, the requests of all are summed after the same steps, and all read the same sums. So
they save, exit or replan at the same step.

A loop that `break`, `return` or an exit ends on some replicas only would let the others wait in their next
step without end. So each replica announces that it has left a loop, or left out a batch. One that has left
early waits for the others before it does what needs all; one whose step does not end reads who has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Final

from adascale_worker.membership.process_group import FAILED, ReplicaGroup, Values, raise_failure


@dataclass
class Requests:
    """What one replica requests for the next step boundary, or what all have agreed on."""

    exit: bool = False  # save and exit
    save: bool = False  # save a checkpoint
    replan: bool = False  # choose the batch plan again at the end of the epoch
    finish: bool = False  # end training
    compare_weights: bool = False  # compare the weights of the replicas
    change: bool = False  # enter a newer generation

    def flags(self) -> tuple[float, ...]:
        """Return the requests as numbers to be summed over the replicas."""
        return tuple(map(float, astuple(self)))

    def add(self, sums: Sequence[float], replicas: int) -> None:
        """Agree on the summed requests of all replicas, until they are fulfilled.

        A request of any replica counts, except for `change`, which all have to request: a replica that does
        not know of the newer generation yet would keep the others waiting.
        """
        for each, total in zip(fields(self), sums, strict=True):
            is_agreed = total > (replicas - 0.5 if each.name == "change" else 0.0)
            setattr(self, each.name, is_agreed or getattr(self, each.name))


REQUESTS: Final = len(fields(Requests))
"""Number of requests of a replica."""


_LEFT = "left"

_LEFT_LOOP = (
    "left its loop over trainer.dataloader()",
    "Leave the loop on all replicas after the same step: send the decision of one to the others with "
    "torch.distributed.broadcast. To end training early, call trainer.finish(reason) on any of them and "
    "continue the loop, which then ends on all",
)
_LEFT_BATCH = (
    "made no backward pass for a batch",
    "Leave out a batch on all replicas or on none, by the sum of their decisions: "
    'trainer.sum_over_replicas(bad=float(is_bad))["bad"] > 0. Or call backward(), and leave out '
    "optimizer.step() if the gradients are not finite, which is the same on all replicas",
)
"""What a replica has done, and what to do."""


@dataclass(frozen=True)
class Departure:
    """The place of a replica among the data loops of the program."""

    epoch: int = 0
    loops: int = 0  # loops of this epoch that it has left
    batches: int = 0  # batches that it has left out since then
    step: int = 0  # the number of its last step when it left
    line: str = ""  # the line of the program that has left the loop or batch; empty if unknown
    # The others need not be warned: this replica has called `finish`, so they end too, or an error ends its
    # program, so they lose it.
    expected: bool = False

    @property
    def place(self) -> tuple[int, int, int]:
        """Which loops and batches it has left, for comparisons."""
        return self.epoch, self.loops, self.batches


class LoopDepartures:
    """Announces when this replica leaves a data loop, and knows when the others have."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._own = Departure()
        self._left_early = self._fails = False

    def begin_generation(self, epoch: int, *, inside: bool) -> None:
        """Announce to the new members whether this replica is inside a loop of `epoch`, or before it."""
        self._announce(Departure(epoch, 0 if inside else 1, step=self._own.step, line=self._own.line))

    def leave(self, epoch: int, step: int, line: str, *, early: bool, expected: bool) -> None:
        """Announce that this replica has left a loop."""
        loops = self._own.loops + 1 if epoch == self._own.epoch else 1
        self._left_early = early and self._group.replicas > 1
        self._announce(Departure(epoch, loops, step=step, line=line, expected=expected or self._fails))

    def leave_out(self, step: int, line: str) -> None:
        """Announce that this replica has left out a batch, and wait until the others have left it out too."""
        if self._group.replicas > 1:
            self._left_early = True
            self._announce(replace(self._own, batches=self._own.batches + 1, step=step, line=line))
            self.wait()

    def fail(self) -> None:
        """Announce that an error or an exit code ends the program of this replica, which may take it long."""
        self._left_early, self._fails = False, True
        self._announce(replace(self._own, expected=True))

    def wait(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """If this replica has left its last loop or batch early, wait until the others have left it too."""
        if not self._left_early:
            return
        group = self._group
        for left, failed in group.poll(_LEFT, FAILED, is_over=lambda: group.has_failed or is_interrupted()):
            if all(other.place >= self._own.place for other in self._others(left).values()):
                self._left_early = False
                return
            self._left_early = not failed
            raise_failure(failed)

    def find_failure(self, step: int) -> str | None:
        """Return an error message if others have left the loop that this replica is in, else None.

        Call it in a step that does not end. The others raise the same error.
        """
        for rank, other in self._others(self._group.announced(_LEFT)).items():
            if other.place > self._own.place and other.step <= step and not other.expected:
                line = f" ({other.line})" if other.line else ""
                left, remedy = _LEFT_LOOP if other.place[:2] > self._own.place[:2] else _LEFT_BATCH
                failure = (
                    f"rank {rank} {left}{line} after step {other.step}, but rank {self._group.rank} is in "
                    f"step {step + 1}, which needs all {self._group.replicas} replicas. {remedy}"
                )
                self._group.announce(FAILED, failure)
                return failure
        return None

    def _announce(self, own: Departure) -> None:
        self._own = own
        self._group.announce(_LEFT, astuple(own))

    def _others(self, left: Values | None) -> dict[int, Departure]:
        """Return the places of the other replicas; of none if the store is gone."""
        if left is None:
            return {}
        others = (rank for rank in range(self._group.replicas) if rank != self._group.rank)
        return {rank: Departure(*left.get(rank, ())) for rank in others}
