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
from adascale_worker.program.hyperparameters import Choice, Difference

Flags = tuple[bool, ...]
"""Whether each of some parameters requires gradients."""


class TrainedParameters:
    """The parameters of the program's model that require gradients."""

    def __init__(self, model: torch.nn.Module, group: ReplicaGroup) -> None:
        named = dict(model.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self._group = group
        self._initial = self.flags = self._recorded = self._agreed = self.current()
        # `flags` are those of the last step, for which the statistics are; of several optimizers, for the
        # parameters of each those of its own last step.
        self._changes = 0
        """Changes that the members of this generation have agreed on."""

    def current(self) -> Flags:
        """Return whether each parameter requires gradients now."""
        return tuple([parameter.requires_grad for parameter in self._parameters])

    def agreed_of(self, parameters: Sequence[Tensor]) -> Flags:
        """Return whether each of `parameters` is trained on all replicas of this generation."""
        agreed = {id(p): is_trained for p, is_trained in zip(self._parameters, self._agreed, strict=True)}
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
            "frozen": self._frozen(self._recorded),
            "frozen_before": self._frozen(self.flags),
            "initially_frozen": self._frozen(self._initial),
        }

    def load_state_dict(self, state: Mapping[str, Sequence[str]], choice: Choice) -> list[Difference]:
        """Freeze what is frozen in a saved state, unfreeze the rest; return what the program has changed."""
        saved = self._flags_without(state["initially_frozen"])
        differences = [
            Difference(f"requires_grad of {name!r}", before, now)
            for name, before, now in zip(self._names, saved, self._initial, strict=True)
            if before != now
        ]
        if not (differences and choice == "program"):
            # The next checkpoint contains them again, so that a later run reports the same differences.
            self._initial = saved
            for parameter, trained in zip(
                self._parameters, self._flags_without(state["frozen"]), strict=True
            ):
                parameter.requires_grad_(trained)
        self.record()
        self.flags = self._flags_without(state["frozen_before"])
        return differences

    def undo(self, state: Mapping[str, Sequence[str]]) -> None:
        """Put the flags of the last step back. The program freezes the parameters itself again."""
        self.flags = self._flags_without(state["frozen_before"])

    # -- changes ------------------------------------------------------------------------------------------

    def agree(self, step: int) -> None:
        """Wait until all replicas train the parameters that are trained now."""
        now = self.current()
        if now != self._agreed:
            self._agree(now, step)

    def follow(self, step: int, own: Collection[Tensor] | None = None) -> list[Tensor]:
        """Use the parameters that are trained now for a step, and return those changed since the last one.

        Waits until the programs of all replicas have changed them. `own` are the parameters of the optimizer
        that makes the step; None for all.
        """
        now = self._with_current(self._agreed, own)
        if now != self._agreed:
            self._agree(now, step)
        flags = self._with_current(self.flags, own)
        pairs = zip(self._parameters, self.flags, flags, strict=True)
        changed: list[Tensor] = [parameter for parameter, before, after in pairs if before != after]
        self.flags = flags
        return changed

    def _with_current(self, flags: Flags, own: Collection[Tensor] | None) -> Flags:
        now = self.current()
        if own is None:
            return now
        triples = zip(self._parameters, flags, now, strict=True)
        return tuple([after if parameter in own else before for parameter, before, after in triples])

    @property
    def recorded(self) -> list[str]:
        """The frozen parameters of the state, for `begin_generation`."""
        return self._frozen(self._recorded)

    def begin_generation(self, frozen: Iterable[str]) -> None:
        """Compare later changes with what is frozen in the newest state."""
        self._agreed, self._changes = self._flags_without(frozen), 0

    def require_equal(self) -> None:
        """Check that all replicas begin with the same trained parameters. A collective call."""
        own = self.current()
        for rank, frozen in enumerate(self._group.gather(self._frozen(own))):
            self._require_same(own, rank, self._flags_without(frozen), "at the beginning")

    def find_failure(self, step: int) -> str | None:
        """Return an error message if another replica trains other parameters in this step, else None.

        Call it in a step that does not end. The others raise the same error.
        """
        if self._group.replicas == 1:
            return None
        announced = self._announced(self._group.announced(self._event) or {})
        if self._group.rank in announced:
            return None
        for rank, (other_step, flags) in announced.items():
            if other_step <= step:
                try:
                    self._require_same(self._agreed, rank, flags, f"after step {other_step}")
                except ReplicationError as error:
                    self._group.announce(FAILED, str(error))
                    return str(error)
        return None

    @property
    def _event(self) -> str:
        # A replica can be one change ahead of another, so two places are enough.
        return f"trained-{self._changes % 2}"

    def _agree(self, now: Flags, step: int) -> None:
        """Wait until all replicas have made the same change."""
        group = self._group
        if group.replicas > 1:
            group.announce(self._event, [self._changes, step, self._frozen(now)])
            announced: dict[int, tuple[int, Flags]] = {}
            for values, failed in group.poll(self._event, FAILED):
                announced = self._announced(values)
                for rank, (_, flags) in announced.items():
                    self._require_same(now, rank, flags, f"after step {step}")
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

    def _announced(self, values: Values) -> dict[int, tuple[int, Flags]]:
        """Return the last step and the trained parameters of the ranks that have announced this change."""
        return {
            rank: (step, self._flags_without(frozen))
            for rank, (number, step, frozen) in values.items()
            if number == self._changes
        }

    def _require_same(self, own: Flags, rank: int, other: Flags, when: str) -> None:
        names = [name for name, mine, its in zip(self._names, own, other, strict=True) if mine is not its]
        if names:
            index = self._names.index(names[0])
            more = f", and for {len(names) - 1} more" if len(names) > 1 else ""
            raise ReplicationError(
                f"the {self._group.replicas} replicas train different parameters {when}: requires_grad of "
                f"{names[0]!r} is {own[index]} on rank {self._group.rank} and {other[index]} on rank "
                f"{rank}{more}. {_REMEDY}"
            )

    # -- names --------------------------------------------------------------------------------------------

    def _frozen(self, flags: Flags) -> list[str]:
        return [name for name, trained in zip(self._names, flags, strict=True) if not trained]

    def _flags_without(self, frozen: Iterable[str]) -> Flags:
        names = set(frozen)
        return tuple([name not in names for name in self._names])


_REMEDY = (
    "Set it before program_reentry, which then restores what is trained with the rest of the state; or where "
    "all replicas do so between the same two steps, also one that joins later or starts again: decide by the "
    "epoch, trainer.steps or trainer.progress, and not by a count of the program's own"
)
