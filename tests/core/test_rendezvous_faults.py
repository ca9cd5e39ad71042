"""Rendezvous: the invariants of a simulated job under random faults."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adascale_core.batch.plans import is_valid_replicas
from adascale_core.messages.allocation import ActiveAllocation, Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.rendezvous.instruction import Instruction, instruction
from adascale_core.rendezvous.rendezvous import (
    DEPARTED_STATES,
    EXITED_STATES,
    Rendezvous,
    StaleAllocationError,
    allocate,
    expire,
    register,
    report,
)
from adascale_core.rendezvous.slow_places import MEMORY, MIN_PAUSE
from support.examples import examples
from support.rendezvous import (
    ELASTIC,
    FAILED,
    FINISHED,
    HOLDING,
    LOST,
    NOW,
    REENTERING,
    RUNNING,
    TERMINATED,
    WAITING,
    active,
    reported,
)

# -- a job under random faults --------------------------------------------------------------------------

T = TypeVar("T")
REPLICAS, SPARES = 4, 2
SPECS = (None, ELASTIC, JobSpec(4, max_replicas=4), JobSpec(8, 64, (1, 8), min_replicas=2, max_replicas=8))
_unique = count(1)


@dataclass(eq=False)
class Trainer:
    """A simulated trainer process."""

    replica: int
    agent: str
    instance: str = ""
    state: ReplicaState = WAITING
    generation: int = 0
    """As it reports."""
    assignment: ActiveAllocation | None = None
    step: int | None = None
    """Of its state; None if it has none."""
    lost: frozenset[int] = frozenset()
    stepped: int = 0
    frozen: bool = False

    def __post_init__(self) -> None:
        self.instance = f"{self.agent}.{next(_unique)}"

    @property
    def assigned(self) -> int:
        """The newest generation that it knows."""
        return max(self.assignment.generation if self.assignment else 0, self.generation)

    @property
    def runs(self) -> bool:
        """Whether it trains in its newest generation."""
        return self.state is RUNNING and self.generation == self.assigned

    def hold(self, generation: int, lost: frozenset[int] = frozenset()) -> None:
        """Hold, unless it does already, and report the loss of peers."""
        if not self.frozen:
            before = self.lost if (self.state, self.generation) == (HOLDING, generation) else frozenset()
            self.state, self.generation, self.lost = HOLDING, generation, before | lost


@dataclass(eq=False)
class Agent:
    """A simulated agent: it receives views, starts trainers and sends registrations."""

    replica: int
    trainer: Trainer
    view: AllocationView | None = None
    alive: bool = True

    @property
    def registration(self) -> Registration:
        trainer = self.trainer
        return Registration(
            *(self.replica, trainer.instance, trainer.state, trainer.generation, "host", 1),
            assigned=trainer.assigned,
            step=trainer.step if trainer.state is HOLDING else None,
            lost=tuple(sorted(trainer.lost)) if trainer.state is HOLDING else (),
            stepped=trainer.stepped,
            rank=trainer.assignment.rank_of(self.replica, trainer.instance) if trainer.assignment else None,
            replicas=trainer.assignment.replicas if trainer.assignment else None,
        )

    @property
    def has_trainer(self) -> bool:
        return self.alive and self.trainer.state not in DEPARTED_STATES | EXITED_STATES

    def receive(self, view: AllocationView) -> None:
        """Act on a view, as a real agent does."""
        if self.view is not None and view.version < self.view.version:
            return
        self.view = view
        trainer, following = self.trainer, view.active
        if not self.has_trainer or following is None or trainer.frozen:
            return
        holds = trainer.state is HOLDING and trainer.generation == trainer.assigned
        match instruction(view, self.replica, trainer.instance, trainer.assigned, holds=holds):
            case Instruction.RELEASE:
                trainer.state = REENTERING
            case Instruction.HOLD:
                trainer.hold(following.generation)
            case Instruction.ASSIGN:
                trainer.assignment = following


class SimulatedJob(RuleBasedStateMachine):
    """Agents, a controller and a service whose messages are lost, delayed, repeated and reordered."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Rendezvous()
        self.spec: JobSpec | None = None
        self.version = 1
        self.agents: list[Agent] = []
        self.latest: dict[int, Agent] = {}
        self.in_flight: list[Registration] = []
        self.published: Allocation | None = None
        self.failed_generations: set[int] = set()
        self.data_was_lost = False
        self.finished_by_all = 0
        """The newest step that all members of a generation have finished."""
        self.now = NOW
        self.replaced_at = float("-inf")
        """When a spare has last taken the place of a slow member."""

    # -- the service

    def change(self, state: Rendezvous) -> None:
        before = self.state
        if before == state:
            return
        self.state = state
        self.version += 1
        assert Rendezvous.from_json(json.loads(json.dumps(state.to_json()))) == state
        if state.desired is None or before.desired is None:
            return
        assert state.desired.generation >= before.desired.generation
        assert not before.complete or state.complete
        following = state.active
        if following is None or following == before.active:
            return
        if before.active is not None:
            assert following.generation > before.active.generation
        assert following.generation <= state.desired.generation
        assert len(following.indices) == following.replicas == len(following.members)
        if not self.data_was_lost:
            assert following.replicas == 0 or self.is_valid(following.replicas)
            self.check_that_state_is_kept(before, following)
            self.check_that_slow_ones_join_last(before, following)

    def is_valid(self, replicas: int) -> bool:
        return self.spec is None or is_valid_replicas(self.spec.bounds, replicas)

    def check_that_state_is_kept(self, before: Rendezvous, following: ActiveAllocation) -> None:
        """If a member of the previous generation has state and is there, the next one has state."""
        previous = before.active
        if previous is None or following.replicas == 0:
            return
        there = [
            agent.trainer
            for agent in self.agents
            if agent.has_trainer
            and agent.trainer.step is not None
            and previous.admits(agent.replica, agent.trainer.instance)
            and agent.replica in self.state.replicas
            and self.state.replicas[agent.replica].instance == agent.trainer.instance
        ]
        assert not there or following.has_state

    def check_that_slow_ones_join_last(self, before: Rendezvous, following: ActiveAllocation) -> None:
        """A replica that was slow joins only if no other one that waits could."""
        assert self.state.desired is not None
        present = before.active.members if before.active is not None else ()
        known, stayed = self.state.slow_places, {member.instance for member in present}
        joined = [each for each in following.members if each.instance not in stayed]
        waiting = [
            each
            for each in self.state.replicas.values()
            if each.state is WAITING
            and each.replica in self.state.desired.indices
            and each.replica not in following.indices
            and each.instance not in {*self.state.left_out, *stayed}
        ]
        if any(known.includes(self.state.replicas[each.replica]) for each in joined):
            assert all(map(known.includes, waiting))

    @property
    def view(self) -> AllocationView:
        return self.state.view(self.version)

    # -- without faults

    @initialize(replicas=st.integers(1, REPLICAS), spares=st.integers(0, SPARES), spec=st.sampled_from(SPECS))
    def submit(self, replicas: int, spares: int, spec: JobSpec | None) -> None:
        self.spec = spec
        for index in range(replicas + spares):
            self.send(self.start_agent(index))
        self.allocate(replicas, spares)

    @rule(replicas=st.integers(0, REPLICAS), spares=st.integers(0, SPARES))
    def allocate(self, replicas: int, spares: int) -> None:
        if replicas and not self.is_valid(replicas):
            return
        newest = self.state.desired or self.published
        generation = newest.generation + 1 if newest else 1
        self.published = Allocation(generation, replicas, spares=spares if replicas else 0)
        self.publish()

    @rule(index=st.integers(0, REPLICAS + SPARES - 1))
    def start(self, index: int) -> None:
        """Start an agent, which may be the second of its replica."""
        self.send(self.start_agent(index))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        self.send(self.choose(data, self.agents))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        self.poll_view(self.choose(data, self.agents))

    @rule()
    def synchronize_all(self) -> None:
        """Deliver all registrations and views; replace trainers and agents that have ended."""
        self.synchronize()

    @precondition(lambda self: any(not agent.has_trainer for agent in self.agents))
    @rule(data=st.data())
    def start_trainer(self, data: st.DataObject) -> None:
        self.restart(self.choose(data, [agent for agent in self.agents if not agent.has_trainer]))

    @rule(data=st.data())
    def form(self, data: st.DataObject) -> None:
        """Some of the members of a generation get the state and run."""
        for members in self.complete_generations():
            self.enter(members, data.draw(st.integers(1, len(members))))

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        """Some of the members finish a step, or the others do, which have not."""
        for members in self.complete_generations():
            if all(trainer.runs for trainer in members):
                self.finish_step(members, data.draw(st.integers(1, len(members))))

    @precondition(lambda self: any(self.lost_peers(agent) is not None for agent in self.agents))
    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        """A trainer notices that peers are lost or hold."""
        agent = self.choose(data, [agent for agent in self.agents if self.lost_peers(agent) is not None])
        self.notice_loss(agent)
        self.send(agent)

    @precondition(lambda self: self.state.active is not None)
    @rule(seconds=st.sampled_from([1.0, MIN_PAUSE, MEMORY]), data=st.data())
    def report_slow(self, seconds: float, data: st.DataObject) -> None:
        """Rank 0 reports a slow member: a spare takes its place, or nothing changes."""
        before = self.state.active
        assert before is not None
        members = [member.replica for member in before.members]
        slow = data.draw(st.sampled_from([None, *members]))
        self.now += seconds
        self.change(
            report(self.state, reported(before.generation, slow, before.replicas), self.spec, now=self.now)
        )
        following = self.state.active
        if following == before:
            return
        assert following is not None
        (joined,) = set(following.members) - {replace(each, holds=True) for each in before.members}
        assert following.indices == before.indices - {slow} | {joined.replica}
        assert following.replicas == before.replicas
        assert not self.state.slow_places.includes(self.state.replicas[joined.replica])
        assert self.data_was_lost or self.now - self.replaced_at >= MIN_PAUSE
        self.replaced_at = self.now

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        registration = self.choose(data, self.in_flight)
        if not again:
            self.in_flight.remove(registration)
        self.change(register(self.state, registration, self.spec))

    # -- faults

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def lose_a_message(self, data: st.DataObject) -> None:
        self.in_flight.remove(self.choose(data, self.in_flight))

    @precondition(lambda self: any(agent.has_trainer for agent in self.agents))
    @rule(data=st.data(), replica_state=st.sampled_from([LOST, LOST, FAILED, TERMINATED, FINISHED]))
    def end_a_trainer(self, data: st.DataObject, replica_state: ReplicaState) -> None:
        agent = self.choose(data, [agent for agent in self.agents if agent.has_trainer])
        if replica_state is FINISHED and not agent.trainer.runs:
            return
        agent.trainer.state = replica_state
        if replica_state is FAILED:
            self.failed_generations.add(agent.trainer.generation)
        self.send(agent)
        if replica_state in EXITED_STATES:
            self.remove(agent)

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def kill_an_agent(self, data: st.DataObject) -> None:
        self.remove(self.choose(data, self.agents))

    @precondition(lambda self: any(agent.trainer.frozen != agent.has_trainer for agent in self.agents))
    @rule(data=st.data())
    def freeze_or_thaw(self, data: st.DataObject) -> None:
        agent = self.choose(data, self.agents)
        agent.trainer.frozen = not agent.trainer.frozen

    @precondition(lambda self: any(agent.trainer.assigned for agent in self.agents))
    @rule(data=st.data(), index=st.integers(0, REPLICAS + SPARES - 1))
    def suspect(self, data: st.DataObject, index: int) -> None:
        """A trainer takes a peer for lost that is not."""
        agent = self.choose(data, [agent for agent in self.agents if agent.trainer.assigned])
        if agent.has_trainer and index != agent.replica:
            agent.trainer.hold(agent.trainer.assigned, frozenset({index}))
            self.send(agent)

    @rule(index=st.integers(0, REPLICAS + SPARES - 1))
    def expire_replica(self, index: int) -> None:
        self.change(expire(self.state, [index], self.spec))

    @rule(republish=st.booleans())
    def lose_the_data(self, republish: bool) -> None:
        self.version += 1
        self.state = Rendezvous()
        self.data_was_lost = True
        if republish:
            self.publish()

    @rule()
    def publish(self) -> None:
        try:
            self.change(allocate(self.state, self.published or Allocation(1, 1), self.spec))
        except StaleAllocationError:
            self.published = self.state.desired

    # -- invariants

    @invariant()
    def the_active_generation_is_at_most_the_desired_generation(self) -> None:
        if self.state.active is not None:
            assert self.state.desired is not None
            assert self.state.active.generation <= self.state.desired.generation

    @invariant()
    def at_most_one_generation_trains(self) -> None:
        if not self.data_was_lost:
            training = [
                members[0].generation
                for members in self.complete_generations()
                if all(trainer.runs for trainer in members)
                and all(trainer.replica in self.state.replicas for trainer in members)
            ]
            assert len(set(training)) <= 1

    @invariant()
    def only_failed_generations_count_as_failures(self) -> None:
        assert 0 <= self.state.failures <= len(self.failed_generations)
        assert self.state.disruptions >= 0

    def teardown(self) -> None:
        """Without further faults, the desired allocation becomes active and remains active."""
        for registration in self.in_flight:
            self.change(register(self.state, registration, self.spec))
        self.in_flight.clear()
        stable, rounds = self.state, 0
        for _ in range(100):
            self.synchronize()
            is_stable = (self.state.desired, self.state.active, self.state.broken) == (
                *(stable.desired, stable.active),
                stable.broken,
            )
            stable, rounds = self.state, rounds + 1 if is_stable else 0
            if rounds == 5:
                break
        assert rounds == 5, "the state does not become stable"
        if stable.complete:
            return
        assert stable.desired is not None
        assert active(stable) is not None, "deadlock"
        assert stable.active is not None
        assert stable.active.generation == stable.desired.generation
        assert stable.active.replicas == stable.desired.replicas
        assert stable.active.indices <= set(stable.desired.indices)
        if stable.active.members:
            spares = set(stable.desired.indices) - stable.active.indices
            waiting = {index for index in spares if stable.replicas[index].state is WAITING}
            assert waiting == spares, "spares wait"
        members = [agent.trainer for agent in self.agents if agent.has_trainer and agent.trainer.runs]
        assert {trainer.instance for trainer in members} == {
            member.instance for member in stable.active.members
        }

    def synchronize(self) -> None:
        """Replace agents that have exited, then deliver the registration and the view of every agent."""
        self.publish()
        assert self.state.desired is not None
        for agent in self.agents:
            agent.trainer.frozen = False
            if not agent.has_trainer:
                self.restart(agent)
        for index in self.state.desired.indices:
            if self.latest.get(index) not in self.agents:
                self.start_agent(index)
        instances = {agent.trainer.instance for agent in self.agents}
        self.change(
            expire(
                self.state,
                [
                    replica.replica
                    for replica in self.state.replicas.values()
                    if replica.instance not in instances and replica.state not in EXITED_STATES
                ],
                self.spec,
            )
        )
        for agent in self.agents:
            self.change(register(self.state, agent.registration, self.spec))
        for agent in self.agents:
            self.poll_view(agent, delivered=True)
        for agent in self.agents:
            self.notice_loss(agent)
        for members in self.complete_generations():
            self.enter(members, len(members))
            self.finish_step(members, len(members))

    # -- the trainers

    def trainer_of(self, instance: str) -> Trainer | None:
        """The trainer process of this instance, if it has not ended."""
        for agent in self.agents:
            if agent.has_trainer and agent.trainer.instance == instance:
                return agent.trainer
        return None

    def complete_generations(self) -> list[list[Trainer]]:
        """For each generation whose members are all there and connected: its trainers, by rank."""
        found = []
        allocations = {
            agent.trainer.assignment.generation: agent.trainer.assignment
            for agent in self.agents
            if agent.has_trainer and agent.trainer.assignment is not None
        }
        for generation, allocation in allocations.items():
            trainers = [self.trainer_of(member.instance) for member in allocation.members]
            members = [
                trainer
                for trainer in trainers
                if trainer is not None
                and not trainer.frozen
                and trainer.assignment == allocation
                and (trainer.state, trainer.generation) != (HOLDING, generation)
                and trainer.assigned == generation
            ]
            if members and len(members) == allocation.replicas:
                found.append(members)
        return found

    def enter(self, members: list[Trainer], size: int) -> None:
        assignment = members[0].assignment
        assert assignment is not None
        steps = [trainer.step for trainer in members if trainer.step is not None]
        newest = max(steps, default=0)
        if not self.data_was_lost and assignment.has_state:
            assert newest >= self.finished_by_all, "a step is lost that all members had finished"
        entering = [each for each in members if not each.runs][:size]
        if entering and not assignment.has_state:
            self.finished_by_all = newest
        for trainer in entering:
            trainer.state, trainer.generation, trainer.step = RUNNING, assignment.generation, newest
            trainer.lost = frozenset()

    def finish_step(self, members: list[Trainer], size: int) -> None:
        steps = [trainer.step or 0 for trainer in members]
        behind = [trainer for trainer in members if trainer.step == min(steps)]
        for trainer in behind[:size]:
            trainer.step = min(steps) + 1
            trainer.stepped = trainer.generation
        if not self.data_was_lost:
            self.finished_by_all = max(self.finished_by_all, min(each.step or 0 for each in members))

    def lost_peers(self, agent: Agent) -> frozenset[int] | None:
        """The peers that are lost for the agent's trainer; None if it need not hold."""
        trainer, allocation = agent.trainer, agent.trainer.assignment
        if not agent.has_trainer or trainer.frozen or allocation is None:
            return None
        generation = allocation.generation
        if trainer.assigned != generation or (trainer.state, trainer.generation) == (HOLDING, generation):
            return None
        lost, held = set(), False
        for member in allocation.members:
            peer = self.trainer_of(member.instance)
            if peer is None or peer.frozen:
                lost.add(member.replica)
            elif (peer.state, peer.generation) == (HOLDING, generation) or peer.assigned > generation:
                held = True
        return frozenset(lost) if lost or held else None

    def notice_loss(self, agent: Agent) -> None:
        lost = self.lost_peers(agent)
        if lost is not None:
            agent.trainer.hold(agent.trainer.assigned, lost)

    # -- helpers

    def choose(self, data: st.DataObject, options: Iterable[T]) -> T:
        return data.draw(st.sampled_from(list(options)))

    def start_agent(self, index: int) -> Agent:
        agent = self.latest[index] = Agent(index, Trainer(index, f"agent-{next(_unique)}"))
        self.agents.append(agent)
        return agent

    def restart(self, agent: Agent) -> None:
        agent.trainer = Trainer(agent.replica, agent.trainer.agent)

    def remove(self, agent: Agent) -> None:
        agent.alive = False
        self.agents.remove(agent)

    def send(self, agent: Agent) -> None:
        self.in_flight.append(agent.registration)

    def poll_view(self, agent: Agent, *, delivered: bool = False) -> None:
        before = agent.registration
        agent.receive(self.view)
        if agent.trainer.state is WAITING and agent.trainer.instance in self.state.left_out:
            self.restart(agent)
        if agent.registration != before:
            if delivered:
                self.change(register(self.state, agent.registration, self.spec))
            else:
                self.send(agent)


def test_the_invariants_hold_under_random_faults() -> None:
    run_state_machine_as_test(
        SimulatedJob, settings=settings(max_examples=examples(50), stateful_step_count=50)
    )
