"""Which parameters of the model are trained: the same in each step on all replicas.

A program may freeze and unfreeze parameters while it trains. The buckets in which gradients are exchanged
and the statistics are made for the parameters that are trained. So all replicas have to change them between
the same two steps. That costs nothing while nothing changes: a replica whose program has changed them
announces it in the store of the process group, and waits for the others to do the same before its next
forward pass or the step of its optimizer. One whose program has not changed them waits in its step instead,
and finds the announcement there.

What is trained in a step is what requires gradients when the optimizer makes it. A change inside a step that
is undone before that, such as for adversarial examples, changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from adascale_worker.errors import ReplicationError
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import FAILED, INIT_TIMEOUT, ReplicaGroup, Values, raise_failure
from adascale_worker.program.hyperparameters import Choice, difference

Flags = tuple[bool, ...]
"""Whether each of some parameters requires gradients."""

Frozen = frozenset[str]
"""The names of the parameters that require no gradients."""


class TrainedParameters:
    """The parameters of the program's model that require gradients."""

    def __init__(self, model: torch.nn.Module, group: ReplicaGroup) -> None:
        self._parameters = dict(model.named_parameters())
        self._names = frozenset(self._parameters)
        self._group = group
        self._initial = self._last = self._recorded = self._agreed = self.current()
        # `_last` is what was frozen in the last step, for which the statistics are; of several optimizers,
        # for the parameters of each in its own last step.
        self._changes = 0
        """Changes that the members of this generation have agreed on."""

    def current(self) -> Frozen:
        """Return what is frozen now."""
        return frozenset([name for name, each in self._parameters.items() if not each.requires_grad])

    def agreed_of(self, parameters: Sequence[Tensor]) -> Flags:
        """Return whether each of `parameters` is trained on all replicas of this generation."""
        agreed = {id(each): name not in self._agreed for name, each in self._parameters.items()}
        return tuple([agreed.get(id(parameter), parameter.requires_grad) for parameter in parameters])

    # -- the state ----------------------------------------------------------------------------------------

    def record(self) -> None:
        """Use the parameters that are trained now in the state. Called between two steps.

        Inside a step, the program may freeze parameters for one of several backward passes.
        """
        self._recorded = self.current()

    def state_dict(self) -> dict[str, list[str]]:
        """Return the names of the frozen parameters: from the next step on, in the last one, and at first."""
        return {
            "frozen": sorted(self._recorded),
            "frozen_before": sorted(self._last),
            "initially_frozen": sorted(self._initial),
        }

    def load_state_dict(self, state: Mapping[str, Sequence[str]], choice: Choice) -> list[str]:
        """Freeze what is frozen in a saved state, unfreeze the rest; return what the program has changed."""
        saved = frozenset(state["initially_frozen"])
        differences = [
            difference(f"requires_grad of {name!r}", name not in saved, name not in self._initial)
            for name in self._ordered(saved ^ self._initial)
        ]
        if not (differences and choice == "program"):
            # The next checkpoint contains them again, so that a later run reports the same differences.
            self._initial = saved
            frozen = frozenset(state["frozen"])
            for name, parameter in self._parameters.items():
                parameter.requires_grad_(name not in frozen)
        self.record()
        self.undo(state)
        return differences

    def undo(self, state: Mapping[str, Sequence[str]]) -> None:
        """Put back what was frozen in the last step. The program freezes the parameters itself again."""
        self._last = frozenset(state["frozen_before"])

    # -- changes ------------------------------------------------------------------------------------------

    def agree(self, step: int) -> None:
        """Wait until all replicas train the parameters that are trained now."""
        self._agree(self.current(), step)

    def follow(self, step: int, own: Collection[Tensor] | None = None) -> list[Tensor]:
        """Use the parameters that are trained now for a step, and return those changed since the last one.

        Waits until the programs of all replicas have changed them. `own` are the parameters of the optimizer
        that makes the step; None for all.
        """
        names = self._names
        if own is not None:
            names = frozenset(name for name, each in self._parameters.items() if each in own)
        frozen = self.current() & names
        self._agree((self._agreed - names) | frozen, step)
        before, self._last = self._last, (self._last - names) | frozen
        return [self._parameters[name] for name in self._ordered(before ^ self._last)]

    @property
    def recorded(self) -> list[str]:
        """The frozen parameters of the state, for `begin_generation`."""
        return sorted(self._recorded)

    def begin_generation(self, frozen: Iterable[str]) -> None:
        """Compare later changes with what is frozen in the newest state."""
        self._agreed, self._changes = frozenset(frozen), 0

    def require_equal(self) -> None:
        """Check that all replicas begin with the same trained parameters. A collective call."""
        own = self.current()
        for rank, frozen in enumerate(self._group.gather(sorted(own))):
            self._require_same(own, rank, frozenset(frozen), "at the beginning")

    def find_failure(self, step: int) -> str | None:
        """Return an error message if another replica trains other parameters in this step, else None.

        Call it in a step that does not end. The others raise the same error.
        """
        if self._group.replicas == 1:
            return None
        announced = self._announced(self._group.announced(self._event) or {})
        if self._group.rank in announced:
            return None
        for rank, (other_step, frozen) in announced.items():
            if other_step <= step:
                try:
                    self._require_same(self._agreed, rank, frozen, f"after step {other_step}")
                except ReplicationError as error:
                    self._group.announce(FAILED, str(error))
                    return str(error)
        return None

    @property
    def _event(self) -> str:
        # A replica can be one change ahead of another, so two places are enough.
        return f"trained-{self._changes % 2}"

    def _agree(self, now: Frozen, step: int) -> None:
        """Wait until all replicas have made the same change, if it is one."""
        group = self._group
        if now == self._agreed:
            return
        if group.replicas > 1:
            group.announce(self._event, [self._changes, step, sorted(now)])
            announced: dict[int, tuple[int, Frozen]] = {}
            for values, failed in group.poll(self._event, FAILED):
                announced = self._announced(values)
                for rank, (_, frozen) in announced.items():
                    self._require_same(now, rank, frozen, f"after step {step}")
                if len(announced) == group.replicas:
                    break
                raise_failure(failed)
            if len(announced) < group.replicas:
                self._end_waiting(step, announced)
        self._agreed, self._changes = now, self._changes + 1

    def _end_waiting(self, step: int, announced: Collection[int]) -> NoReturn:
        """Raise an error, because not all replicas have made a change."""
        group = self._group
        if not group.has_failed and group.announced(FAILED) is not None:
            missing = min(set(range(group.replicas)) - set(announced))
            raise ReplicationError(
                f"requires_grad of parameters was set on rank {group.rank} after step {step}, and "
                f"not on rank {missing} within {INIT_TIMEOUT.total_seconds():.0f} s. {_REMEDY}"
            )
        if not group.is_elastic:
            raise ReplicationError(f"rank 0 has ended while rank {group.rank} waited in a step for it")
        group.fail()
        raise PeersLostError

    def _announced(self, values: Values) -> dict[int, tuple[int, Frozen]]:
        """Return the last step and the frozen parameters of the ranks that have announced this change."""
        return {
            rank: (step, frozenset(frozen))
            for rank, (number, step, frozen) in values.items()
            if number == self._changes
        }

    def _require_same(self, own: Frozen, rank: int, other: Frozen, when: str) -> None:
        names = self._ordered(own ^ other)
        if names:
            more = f", and for {len(names) - 1} more" if len(names) > 1 else ""
            raise ReplicationError(
                f"the {self._group.replicas} replicas train different parameters {when}: requires_grad of "
                f"{names[0]!r} is {names[0] not in own} on rank {self._group.rank} and "
                f"{names[0] not in other} on rank {rank}{more}. {_REMEDY}"
            )

    def _ordered(self, names: Frozen) -> list[str]:
        return [name for name in self._parameters if name in names]


_REMEDY = (
    "Set it before program_reentry, which then restores what is trained with the rest of the state; or where "
    "all replicas do so between the same two steps, also one that joins later or starts again: decide by the "
    "epoch, trainer.steps or trainer.progress, and not by a count of the program's own"
)
