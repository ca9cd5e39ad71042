"""When a generation of replicas becomes active, as a pure state machine.

The controller writes the desired allocation, and agents register what their trainers do. A generation is an
ordered set of members: replicas whose trainers take part. `docs/design.md` has the rules by which it becomes
active, at a start, by a planned change, after a loss, and for a slow member, and the protocol of agents. An
agent acts by `instruction`.

For any order of events, while the service's data is not lost: generations never decrease; a trainer that was
left out, such as a member that was taken for lost, takes part in no later generation; if members with state
are there, the next generation has one of them; valid replica counts are followed by valid ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from adascale_core.batch.plans import is_valid_replicas
from adascale_core.errors import AdaScaleError
from adascale_core.failures import FailureCount
from adascale_core.messages.allocation import (
    ActiveAllocation,
    Allocation,
    AllocationView,
    Member,
    MemberView,
    SlowReplacement,
)
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState, agent_of
from adascale_core.messages.reports import GainReport
from adascale_core.rendezvous.slow_places import SlowPlaces

DEPARTED_STATES = frozenset(
    {ReplicaState.REENTERING, ReplicaState.LOST, ReplicaState.FAILED, ReplicaState.TERMINATED}
)
"""States after which a trainer takes part in no generation."""

EXITED_STATES = frozenset({ReplicaState.FAILED, ReplicaState.TERMINATED, ReplicaState.FINISHED})
"""States after which an agent exits and sends no more heartbeats."""

_STATE_ORDER = {
    ReplicaState.WAITING: 0,
    ReplicaState.RUNNING: 1,
    ReplicaState.HOLDING: 2,
    ReplicaState.REENTERING: 3,
    ReplicaState.LOST: 3,
    ReplicaState.FAILED: 4,
    ReplicaState.TERMINATED: 4,
    ReplicaState.FINISHED: 4,
}
"""The order in which a trainer goes through the states within one generation."""

_HISTORY_LENGTH = 2048
"""How many agents and trainers that may not take part again are kept, the latest."""

_MAX_LIMITS = 32
"""Types of accelerators whose limits are kept, the latest."""


class StaleAllocationError(AdaScaleError):
    """An allocation whose generation is not newer than the desired generation."""


class VersionMismatchError(AdaScaleError):
    """A replica that has another version of the package than the members of its job."""


@dataclass(frozen=True)
class Rendezvous:
    """The generations and replicas of a job."""

    # desired, active, broken: as in `AllocationView`
    desired: Allocation | None = None
    active: ActiveAllocation | None = None
    broken: bool = False
    complete: bool = False  # whether the program has finished on rank 0 of its generation
    # index -> the last registration, of the replicas whose heartbeats arrive
    replicas: Mapping[int, Registration] = field(default_factory=lambda: MappingProxyType({}))
    failures: int = 0  # generations in which the user's program failed
    disruptions: int = 0  # generations that were lost for another reason
    # index -> the last registration, of the replicas whose heartbeats have expired
    expired: Mapping[int, Registration] = field(default_factory=lambda: MappingProxyType({}))
    # agents that another agent of their replica has replaced, the latest last. Their registrations are
    # ignored, unless the other agent has expired or exited.
    replaced: tuple[str, ...] = ()
    # instances of trainers that were members and are not any more, the latest last. They take part in no
    # later generation.
    left_out: tuple[str, ...] = ()
    key: str = ""  # the secret of the job's members; empty before the first registration
    last_failed: int = 0  # the newest generation that is counted in `failures`; 0 if none is
    last_disrupted: int = 0  # the newest generation that is counted in `disruptions`; 0 if none is
    stepped: int = 0  # the newest generation in which a step was finished; 0 if none
    stalled: int = 0  # disrupted generations after `stepped`, in which no step was finished
    # index -> how many trainers of this replica were killed before any step after `stepped`
    deaths: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    # type of accelerator -> the largest local batch size that is used on it, since a larger one did not
    # fit into its memory
    local_bsz_limits: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    last_limited: int = 0  # the newest generation that has ended because a batch did not fit; 0 if none has
    # the replicas whose places spares have taken because they were slow
    slow_places: SlowPlaces = field(default_factory=SlowPlaces)

    @property
    def local_bsz_limit(self) -> int | None:
        """The largest local batch size that fits on all of its replicas; None if none has failed."""
        return applicable_limit(self.local_bsz_limits, self._present_accelerators)

    def local_bsz_limit_of_report(self, accelerator: str) -> int | None:
        """Return the largest local batch size that fits where a report was made; None if none has failed."""
        present = self._present_accelerators
        is_elsewhere = accelerator != "" and accelerator not in present
        return applicable_limit(self.local_bsz_limits, {accelerator} if is_elsewhere else present)

    @property
    def _present_accelerators(self) -> set[str]:
        return {each.accelerator for each in self.replicas.values() if each.state not in EXITED_STATES}

    @property
    def restarts_without_progress(self) -> int:
        """How often the replicas were restarted since the last step; 0 while trainers finish steps."""
        if self.active is not None and not self.broken and self.stepped >= self.active.generation > 0:
            return 0
        return max(self.stalled, *self.deaths.values(), 0)

    def view(self, version: int) -> AllocationView:
        """Return the view of this state that clients get, as `version`."""
        return AllocationView(version, self.desired, self.active, self.broken, self.complete)

    def member_view(self, version: int, instance: str) -> MemberView:
        """Return the view of this state that the agent of the trainer `instance` gets, as `version`."""
        left_out = instance in self.left_out
        return MemberView(**vars(self.view(version)), key=self.key, left_out=left_out)

    def to_json(self) -> dict[str, Any]:
        """Return the members of the state's JSON object."""
        return {
            **vars(self),
            "desired": self.desired.to_json() if self.desired else None,
            "active": self.active.to_json() if self.active else None,
            "replicas": [registration.to_json() for registration in self.replicas.values()],
            "expired": [registration.to_json() for registration in self.expired.values()],
            "deaths": [list(pair) for pair in self.deaths.items()],
            "local_bsz_limits": dict(self.local_bsz_limits),
            "slow_places": self.slow_places.to_json(),
        }

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the state of the JSON object that `to_json` has made."""
        desired, active, slow = members["desired"], members["active"], members.get("slow_places")
        return cls(
            **{
                **members,
                "desired": Allocation.from_json(desired) if desired else None,
                "active": ActiveAllocation.from_json(active) if active else None,
                "replicas": _by_index(map(Registration.from_json, members["replicas"])),
                "expired": _by_index(map(Registration.from_json, members["expired"])),
                "replaced": tuple(members["replaced"]),
                "left_out": tuple(members["left_out"]),
                "deaths": MappingProxyType(dict(members["deaths"])),
                "local_bsz_limits": MappingProxyType(dict(members["local_bsz_limits"])),
                "slow_places": SlowPlaces.from_json(slow) if slow else SlowPlaces(),
            }
        )


def applicable_limit(limits: Mapping[str, int], accelerators: Collection[str]) -> int | None:
    """Return the largest local batch size that fits on all these types; None if none has failed on them.

    Without types, the next replicas may have any.
    """
    return min(
        (size for each, size in limits.items() if each in accelerators or not accelerators), default=None
    )


def allocate(state: Rendezvous, allocation: Allocation, declared: JobSpec | None = None) -> Rendezvous:
    """Return the state after the controller writes `allocation`. The same allocation may be written again."""
    if state.desired is not None and allocation.generation <= state.desired.generation:
        if allocation == state.desired:
            return state
        raise StaleAllocationError(
            f"allocation {allocation.generation} ({allocation.replicas} replicas) is out of date: generation "
            f"{state.desired.generation} ({state.desired.replicas} replicas) is desired already; "
            f"read it, and write generation {state.desired.generation + 1} to change it"
        )
    return _activate_if_ready(replace(state, desired=allocation), declared)


def register(state: Rendezvous, registration: Registration, declared: JobSpec | None = None) -> Rendezvous:
    """Return the state after an agent registers. The same registration may be sent again."""
    state = replace(state, key=state.key or registration.key)
    registration = replace(registration, key="")
    before = state.replicas.get(registration.replica) or state.expired.get(registration.replica)
    if before is not None and _is_outdated(registration, before):
        return state
    after = state
    if not _is_replaced(state, registration):
        _require_same_version(state, registration)
        after = _with_registration(state, registration, before)
        if state.complete:
            return after
        after = _count_steps(_count_death(after, registration, before), registration)
        after = _with_limit(after, registration)
        if registration.state is ReplicaState.FAILED:
            after = _count_failure(after, registration)
        if _completes(after, registration):
            # A program that has finished before it entered the active generation never enters it.
            has_left = after.active is not None and registration.generation < after.active.generation
            return replace(after, complete=True, broken=after.broken or has_left)
    if after.complete:
        return after
    is_stored = after.replicas.get(registration.replica) == registration
    is_newer = after.active is not None and registration.generation > after.active.generation
    if is_stored and is_newer and registration.holds:
        # The service has lost its data, and trainers have newer state than the generation it has begun.
        after = replace(after, active=None, broken=False)
    if _breaks_generation(after, registration):
        is_limited = after.active is not None and after.last_limited == after.active.generation
        disrupted = registration.state is not ReplicaState.FAILED and not is_limited
        newest = max(registration.generation, registration.assigned)
        after = _break_generation(after, disrupted=disrupted, newest=newest)
    return _activate_if_ready(after, declared)


def expire(state: Rendezvous, indices: Iterable[int], declared: JobSpec | None = None) -> Rendezvous:
    """Return the state after the heartbeats of agents have expired.

    A trainer whose agent does not answer may still train, and its loss is noticed by the other members. The
    generation is broken when no member is left that could notice it.
    """
    overdue = {index for index in indices if index in state.replicas}
    if not overdue or state.complete:
        return state
    after = replace(
        state,
        replicas=_by_index(state.replicas[index] for index in state.replicas if index not in overdue),
        expired=_by_index(
            [
                *state.expired.values(),
                *(state.replicas[index] for index in state.replicas if index in overdue),
            ]
        ),
    )
    if state.active is not None and state.active.members and not state.broken:
        present = [after.replicas.get(member.replica) for member in state.active.members]
        if not any(each is not None and each.state not in DEPARTED_STATES for each in present):
            after = _break_generation(after, disrupted=True)
    return _activate_if_ready(after, declared)


def report(
    state: Rendezvous, latest: GainReport, declared: JobSpec | None = None, *, now: float
) -> Rendezvous:
    """Return the state after a report of rank 0. If it names a slow member, a spare takes its place.

    The change is made at once or not at all: while another one is in progress, or no spare waits, a later
    report makes it.
    """
    places = state.slow_places.at(now)
    if places is not state.slow_places:
        state = replace(state, slow_places=places)
    active, desired = state.active, state.desired
    if active is None or desired is None or state.complete:
        return state
    if not latest.generation == active.generation == desired.generation or not places.may_replace(now):
        return state
    running = _running(state, active)
    slow = next((each for each in running if each.replica == latest.slow_replica), None)
    if slow is None or latest.slow_factor is None or len(running) < active.replicas:
        return state
    spec = declared or active.spec
    if spec is not None and not _is_valid(spec.with_limit(state.local_bsz_limit), active.replicas):
        return state
    after = replace(
        state,
        desired=replace(desired, generation=desired.generation + 1),
        slow_places=places.with_replaced(slow, now),
    )
    others = [each for each in running if each is not slow]
    spare = _substitute(after, slow, others)
    if spare is None:
        return state
    after = _activate(after, [*others, spare], declared)
    assert after.active is not None
    replacement = SlowReplacement(slow.replica, slow.instance, slow.node, latest.slow_factor, spare.replica)
    return replace(after, active=replace(after.active, slow_replacement=replacement))


def declare(state: Rendezvous, before: JobSpec | None, declared: JobSpec) -> Rendezvous:
    """Return the state after the job is declared: with other batch sizes, its limits are learned again."""
    if before is None or before.bounds == declared.bounds:
        return state
    return replace(state, local_bsz_limits=MappingProxyType({}))


# -- registrations --------------------------------------------------------------------------------------


def _by_index(registrations: Iterable[Registration]) -> Mapping[int, Registration]:
    return MappingProxyType({registration.replica: registration for registration in registrations})


def _order(registration: Registration) -> tuple[int, ...]:
    return (
        registration.generation,
        _STATE_ORDER[registration.state],
        registration.assigned,
        registration.stepped,
        len(registration.lost),
    )


def _is_outdated(registration: Registration, before: Registration) -> bool:
    """Whether `before`, of the same trainer, was sent after `registration` and arrived first."""
    if registration.agent != before.agent:
        return False
    if registration.instance != before.instance:
        return registration.trainer < before.trainer
    if before.state in DEPARTED_STATES or before.state in EXITED_STATES:
        return _STATE_ORDER[registration.state] < _STATE_ORDER[before.state]
    return _order(registration) < _order(before)


def _is_replaced(state: Rendezvous, registration: Registration) -> bool:
    """Whether another agent of its replica has replaced its agent, and is still there."""
    successor = state.replicas.get(registration.replica)
    if registration.agent not in state.replaced or successor is None:
        return False
    return registration.agent != successor.agent and successor.state not in EXITED_STATES


def _require_same_version(state: Rendezvous, registration: Registration) -> None:
    if registration.state is not ReplicaState.WAITING:
        return
    for other in state.replicas.values():
        if other.replica != registration.replica and other.holds and other.version != registration.version:
            raise VersionMismatchError(
                f"replica {registration.replica} has adascale {registration.version or '(no version)'}, but "
                f"replica {other.replica}, which trains, has {other.version or '(no version)'}: state moves "
                "only between replicas of the same version. Start all replicas from the same image or "
                "environment"
            )


def _with_registration(
    state: Rendezvous, registration: Registration, before: Registration | None
) -> Rendezvous:
    replaced = state.replaced
    if before is not None and before.agent != registration.agent:
        others = (agent for agent in replaced if agent != registration.agent)
        replaced = (*others, before.agent)[-_HISTORY_LENGTH:]
    return replace(
        state,
        replicas=_by_index([*state.replicas.values(), registration]),
        expired=_by_index(other for other in state.expired.values() if other.replica != registration.replica),
        replaced=replaced,
    )


# -- counting -------------------------------------------------------------------------------------------


def _count_steps(state: Rendezvous, registration: Registration) -> Rendezvous:
    """Restart the count of restarts without progress if a step was finished in a newer generation."""
    if registration.stepped <= state.stepped:
        return state
    return replace(state, stepped=registration.stepped, stalled=0, deaths=MappingProxyType({}))


def _count_death(state: Rendezvous, registration: Registration, before: Registration | None) -> Rendezvous:
    """Count a trainer of a replica that was killed before it had finished a step."""
    died: Registration | None = before
    if before is not None and before.instance != registration.instance:
        if before.state in DEPARTED_STATES or before.state in EXITED_STATES:
            died = registration if registration.state is ReplicaState.LOST else None
    else:
        is_new = before is None or before.state is not ReplicaState.LOST
        died = registration if registration.state is ReplicaState.LOST and is_new else None
    if died is None or died.stepped:
        return state
    active = state.active
    trains = active is not None and not state.broken and state.stepped >= active.generation > 0
    if active is not None and trains and not active.admits(died.replica, died.instance):
        # The others train without it.
        return state
    deaths = dict(state.deaths)
    deaths[died.replica] = deaths.get(died.replica, 0) + 1
    return replace(state, deaths=MappingProxyType(deaths))


def _count_failure(state: Rendezvous, registration: Registration) -> Rendezvous:
    """Count the failure of a generation once.

    A peer that noticed the loss may have registered first: then its disruption becomes this failure.
    """
    disrupted = state.last_disrupted == registration.generation
    is_member = state.active is not None and state.active.admits(registration.replica, registration.instance)
    is_surplus = state.active is not None and not is_member and not disrupted
    before = FailureCount(state.failures, state.last_failed)
    after = before.with_generations([registration.generation])
    if is_surplus or after == before:
        return state
    return replace(
        state, failures=after.count, last_failed=after.generation, disruptions=state.disruptions - disrupted
    )


def _with_limit(state: Rendezvous, registration: Registration) -> Rendezvous:
    """Lower the limit of a type of accelerator if a batch did not fit into its memory.

    That is no disruption. A peer may have registered the end of the generation first.
    """
    limit, generation = registration.local_bsz_limit, registration.generation
    if limit is None:
        return state
    accelerator = registration.accelerator
    limits = dict(state.local_bsz_limits)
    limits[accelerator] = min(limit, limits.pop(accelerator, limit))
    newest = list(limits.items())[-_MAX_LIMITS:]
    state = replace(state, local_bsz_limits=MappingProxyType(dict(newest)))
    if generation <= state.last_limited:
        return state
    disrupted = state.last_disrupted == generation
    return replace(
        state,
        last_limited=generation,
        last_disrupted=0 if disrupted else state.last_disrupted,
        disruptions=state.disruptions - disrupted,
        stalled=max(state.stalled - (disrupted and state.stepped < generation), 0),
    )


def _completes(state: Rendezvous, registration: Registration) -> bool:
    """Whether the program has finished, on rank 0 of a generation that no other has taken the place of."""
    if registration.state is not ReplicaState.FINISHED or registration.rank != 0:
        return False
    active = state.active
    return (
        active is None
        or registration.generation >= active.generation
        or active.admits(registration.replica, registration.instance)
    )


# -- breaking a generation ------------------------------------------------------------------------------


def _breaks_generation(state: Rendezvous, registration: Registration) -> bool:
    """Whether the active generation is broken because of this registration."""
    active = state.active
    if active is None or state.broken:
        return False
    if not active.admits(registration.replica, registration.instance):
        is_current = state.replicas.get(registration.replica) == registration
        replaces = registration.replica in active.indices and is_current
        # The service has lost its data, and the adopted generation does not include all trainers.
        is_unknown = registration.holds and registration.generation >= active.generation
        return replaces or is_unknown
    if registration.assigned > active.generation:
        # The service has lost its data, and this trainer enters newer generations only. Or it has read the
        # checkpoint of a newer one, as another service had continued the job.
        return True
    if registration.assigned == active.generation and registration.replicas is not None:
        place = (active.rank_of(registration.replica, registration.instance), active.replicas)
        if (registration.rank, registration.replicas) != place:
            # The service has lost its data, and has used this generation's number again.
            return True
    if registration.state is ReplicaState.HOLDING:
        return registration.generation == active.generation
    return registration.state in DEPARTED_STATES


def _break_generation(state: Rendezvous, *, disrupted: bool, newest: int = 0) -> Rendezvous:
    """Mark the active generation as broken. The desired count stays, in a newer generation."""
    active, desired = state.active, state.desired
    if active is None or desired is None:
        return state
    made_steps = state.stepped >= active.generation
    return replace(
        state,
        broken=True,
        desired=replace(desired, generation=max(desired.generation, active.generation + 1, newest + 1)),
        disruptions=state.disruptions + disrupted,
        last_disrupted=active.generation if disrupted else state.last_disrupted,
        stalled=state.stalled + (disrupted and not made_steps),
        deaths=MappingProxyType({}) if made_steps else state.deaths,
    )


# -- activating a generation ----------------------------------------------------------------------------


def _activate_if_ready(state: Rendezvous, declared: JobSpec | None) -> Rendezvous:
    """Make the next generation active if its members are there."""
    if state.desired is None or state.complete:
        return state
    if state.active is None:
        state = _adopt(state, declared)
    active, desired = state.active, state.desired
    assert desired is not None
    if active is not None and active.generation >= desired.generation:
        return state
    if desired.replicas == 0:
        return _activate(state, [], declared)
    spec = declared or (active.spec if active is not None else None)
    if spec is not None:
        is_allowed = _is_valid(spec, desired.replicas)
        spec = spec.with_limit(state.local_bsz_limit)
        if is_allowed and not state.broken and not _is_valid(spec, desired.replicas):
            # No batch of this count fits into memory. The controller chooses another count.
            return state
    if active is None or not active.members:
        members = _joiners(state)[: desired.replicas]
        is_ready = len(members) == desired.replicas and _trainers_are_known(state)
        return _activate(state, members, declared) if is_ready else state
    chosen = _after_a_loss(state, active, spec) if state.broken else _planned(state, active, spec)
    return _activate(state, chosen, declared) if chosen else state


def _planned(state: Rendezvous, active: ActiveAllocation, spec: JobSpec | None) -> list[Registration]:
    """Return the members of a planned change by rank; an empty list if they are not all there."""
    assert state.desired is not None
    count = state.desired.replicas
    running = _running(state, active)
    if len(running) < active.replicas:
        return []
    staying = [registration for registration in running if registration.replica in state.desired.indices]
    # If some are too many, the slow ones leave first.
    kept = sorted(staying, key=state.slow_places.includes)[:count]
    staying = [registration for registration in staying if registration in kept]
    joining = _joiners(state)
    chosen = [*staying, *joining][:count]
    if len(chosen) < count:
        return []
    if staying:
        return chosen
    # All trainers with state are on replicas that must go. Another generation moves it to a joiner first.
    for size in range(min(max(active.replicas, 2), len(running) + len(joining)), 1, -1):
        if _is_valid(spec, size):
            return [*running[: size - 1], joining[0]]
    return []


def _running(state: Rendezvous, active: ActiveAllocation) -> list[Registration]:
    """Return the members of the active generation that run in it, by rank."""
    present = [state.replicas.get(member.replica) for member in active.members]
    return [
        registration
        for registration in present
        if registration is not None
        and registration.state is ReplicaState.RUNNING
        and registration.generation == active.generation
    ]


def _substitute(state: Rendezvous, slow: Registration, others: Sequence[Registration]) -> Registration | None:
    """Return the spare that can take the place of a slow member; None if none can.

    Among members of several types of accelerators, one may be slow because of its type: then another one of
    this type does not help.
    """
    types = {each.accelerator for each in others}
    if types != {slow.accelerator}:
        types.discard(slow.accelerator)
    spares = _joiners(state)
    return next(
        (each for each in spares if each.accelerator in types and not state.slow_places.includes(each)), None
    )


def _after_a_loss(state: Rendezvous, active: ActiveAllocation, spec: JobSpec | None) -> list[Registration]:
    """Return the members of the generation after a loss by rank; an empty list if they are not all there."""
    assert state.desired is not None
    desired, indices = state.desired.replicas, state.desired.indices
    # Only members with state: another one could report the only member that has it.
    reported = {
        index
        for registration in state.replicas.values()
        if registration.state is ReplicaState.HOLDING
        and registration.holds
        and registration.generation == active.generation
        and active.admits(registration.replica, registration.instance)
        for index in registration.lost
    }
    holding: list[Registration] = []
    for member in active.members:
        latest = state.replicas.get(member.replica)
        if latest is None or latest.instance != member.instance:
            continue
        if latest.state in DEPARTED_STATES or latest.state in EXITED_STATES:
            continue
        if latest.state is ReplicaState.HOLDING and latest.generation == active.generation:
            if latest.holds:
                holding.append(latest)
        elif member.replica not in reported and latest.assigned <= active.generation:
            # It may have got the state in this generation, or have finished steps, since it registered.
            return []
    suspected = [
        registration
        for registration in _joiners(state)
        if registration.replica in reported and active.admits(registration.replica, registration.instance)
    ]
    joining = [registration for registration in _joiners(state) if registration not in suspected]
    if holding:
        # A member that has finished one more step than others must stay. Of the others, those whose index is
        # desired stay first: the others must go afterwards.
        ordered = sorted(holding, key=lambda each: (-(each.step or 0), each.replica not in indices))
        candidates = [*ordered, *joining]
        least = min(active.replicas if spec is None else spec.min_replicas, desired)
        size = _largest_valid(spec, min(desired, len(candidates)), least)
        if not size:
            # Without them the others would wait forever: such a joiner was late, but it answers.
            candidates += [each for each in suspected if _answers(each, active)]
            size = _largest_valid(spec, min(desired, len(candidates)), least)
        ranks = {member.replica: rank for rank, member in enumerate(active.members)}
        chosen = candidates[:size]
        members = sorted((each for each in chosen if each.holds), key=lambda each: ranks[each.replica])
        return [*members, *(each for each in chosen if not each.holds)]
    # No state is left: begin from the last checkpoint with at least as many replicas as before, and not with
    # fewer than the job requires now.
    least = max(active.replicas, spec.min_replicas if spec is not None else 1)
    least = _largest_valid(spec, min(least, desired), 1) or desired
    agents = {agent_of(member.instance) for member in active.members}
    # The agent of a lost trainer has its latest copy, and that of a replica that has waited may have one. An
    # agent that has taken the place of another one has none.
    joining.sort(key=lambda each: (each.agent not in agents, each.replica in active.indices))
    return joining[: _largest_valid(spec, min(desired, len(joining)), least)]


def _answers(registration: Registration, active: ActiveAllocation) -> bool:
    """Whether a trainer has registered since the active generation was broken."""
    is_holding = registration.state is ReplicaState.HOLDING
    return is_holding and registration.generation == active.generation


def _largest_valid(spec: JobSpec | None, most: int, least: int) -> int:
    """Return the largest valid count from `least` to `most`; 0 if there is none. Without bounds all are."""
    return next((count for count in range(most, max(least, 1) - 1, -1) if _is_valid(spec, count)), 0)


def _is_valid(spec: JobSpec | None, count: int) -> bool:
    return spec is None or is_valid_replicas(spec.bounds, count)


def _joiners(state: Rendezvous) -> list[Registration]:
    """Return the desired replicas that are ready to join without state, by index, slow ones last."""
    indices = state.desired.indices if state.desired is not None else ()
    return state.slow_places.ordered(
        registration
        for index, registration in sorted(state.replicas.items())
        if index in indices
        and registration.instance not in state.left_out
        and (
            registration.state is ReplicaState.WAITING
            or (registration.state is ReplicaState.HOLDING and not registration.holds)
        )
    )


def _activate(state: Rendezvous, chosen: Sequence[Registration], declared: JobSpec | None) -> Rendezvous:
    """Make a generation of `chosen` active; if it does not have all desired replicas, these stay desired."""
    desired, before, limit = state.desired, state.active, state.local_bsz_limit
    assert desired is not None
    # No trainer takes part in a generation twice; `desired` can be older only if the service lost its data.
    generation = max(
        [desired.generation, *(max(each.generation, each.assigned) + 1 for each in state.replicas.values())]
        if chosen
        else [desired.generation]
    )
    members = tuple(map(_member, chosen))
    active = ActiveAllocation(generation, len(members), members)
    is_desired = _is_desired(members, desired)
    remaining = {member.instance for member in members}
    left_out = [
        *state.left_out,
        *(
            member.instance
            for member in (before.members if before is not None else ())
            if member.instance not in remaining
        ),
    ]
    previous = before.spec if before is not None else None
    active = active.with_spec(
        None if declared is None else declared.with_limit(limit),
        None if previous is None else previous.with_limit(limit),
    )
    return replace(
        state,
        desired=replace(desired, generation=generation if is_desired else generation + 1),
        active=active,
        broken=False,
        left_out=tuple(left_out[-_HISTORY_LENGTH:]),
    )


def _is_desired(members: Collection[Member], desired: Allocation) -> bool:
    """Whether these members are as many as desired, and each of them is desired."""
    return len(members) == desired.replicas and all(each.replica in desired.indices for each in members)


def _member(registration: Registration) -> Member:
    return Member(
        registration.replica,
        registration.instance,
        registration.address,
        registration.port,
        registration.holds,
        registration.node,
        registration.state_port,
    )


# -- after the service has lost its data ----------------------------------------------------------------


def _trainers(state: Rendezvous) -> list[Registration]:
    """Return the replicas of the newest generation that a trainer has state of."""
    trainers = [
        registration
        for registration in state.replicas.values()
        if registration.state in {ReplicaState.RUNNING, ReplicaState.HOLDING} and registration.generation > 0
    ]
    newest = max((registration.generation for registration in trainers if registration.holds), default=0)
    return [registration for registration in trainers if registration.generation == newest]


def _trainers_are_known(state: Rendezvous) -> bool:
    """Whether no trainer has state of a generation that the service does not know."""
    return state.active is not None or not any(trainer.holds for trainer in _trainers(state))


def _adopt(state: Rendezvous, declared: JobSpec | None) -> Rendezvous:
    """Make the generation active that trainers are in already, once all of its members are accounted for."""
    assert state.desired is not None
    trainers = sorted(_trainers(state), key=lambda each: (each.rank is None, each.rank or 0, each.replica))
    if not any(trainer.holds for trainer in trainers):
        return state
    generation = trainers[0].generation
    size = max(trainer.replicas or 1 for trainer in trainers)
    present = {trainer.replica for trainer in trainers}
    lost = {index for trainer in trainers for index in trainer.lost} - present
    all_registered = all(index in state.replicas for index in state.desired.indices)
    if len(present) + len(lost) < size and not all_registered:
        return state
    members = tuple(map(_member, trainers))
    active = ActiveAllocation(generation, len(members), members).with_spec(declared, None)
    broken = len(members) < size or any(trainer.state is ReplicaState.HOLDING for trainer in trainers)
    is_desired = not broken and _is_desired(members, state.desired)
    least = generation if is_desired else generation + 1
    desired = replace(state.desired, generation=max(state.desired.generation, least))
    return replace(state, active=active, broken=broken, desired=desired)
