"""Changes of membership: this trainer enters one generation after the other, in the same process."""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, Protocol

from adascale_core.messages.channel import (
    Assignment,
    Holding,
    Ready,
    Release,
    Running,
    Stepped,
    Terminated,
    agent_message,
)
from adascale_worker.errors import WorkerError
from adascale_worker.membership.links import (
    AgentChannel,
    Formation,
    MembershipLinks,
    OtherVersionError,
    PeersLostError,
    StateNumber,
    state_number,
)
from adascale_worker.membership.process_group import FORM, ReplicaGroup
from adascale_worker.process.environment import listen
from adascale_worker.process.shutdown_request import ShutdownRequest

POLL: Final = 0.1
"""Seconds after which a wait looks for signals again."""
MAX_CONNECTION_TIME: Final = 10.0
"""Seconds for which a change waits for replicas that join to connect, while the others train."""
SAVE, LEAVE = "save", "leave"
"""Kinds of messages of a leader to the other processes of its replica, which wait to enter a generation."""


class LeaveError(Exception):
    """This trainer has to leave the job now: it was released, its agent is gone, or it was terminated."""


class Following(Protocol):
    """The state on its way to replicas that join, while the others train."""

    @property
    def is_sent(self) -> bool:
        """Whether those that receive it need nothing before the next change."""

    def begin(self, connections: Sequence[socket.socket]) -> None:
        """Send the state from the next step on."""

    def finish(self, check: Callable[[], None]) -> None:
        """Send the rest between two steps, if all but the rest was sent. `check` may raise an error."""

    def stop(self) -> None:
        """Send nothing any more."""

    def receive(self, connection: socket.socket, check: Callable[[], None]) -> None:
        """Receive the state of another replica. `check` may raise an error meanwhile."""


class MemberState(Protocol):
    """The state of training in the memory of a member."""

    @property
    def number(self) -> StateNumber | None:
        """Its number; None without a state."""

    @property
    def following(self) -> Following | None:
        """What sends and receives it while the others train; None if it is sent as a whole only."""

    def save_alone(self) -> bool:
        """Save it without the others, if there is one, and return whether it is saved."""

    def save_beside(self) -> bool:
        """Save it in a thread, without the others, and return whether it is saved."""


Formed = Callable[[], tuple[Assignment, Formation]]
"""Forms the group of a generation, of which the agent or the leader has sent the assignment."""


@dataclass(frozen=True)
class AgentConnection:
    """How a trainer reaches its agent and the other members."""

    channel: AgentChannel
    listener: socket.socket
    secret: str  # authenticates members if the assignment has no secret
    peer_timeout: float  # seconds of silence after which a member is lost
    accelerator: str = ""  # the type of accelerator that this trainer computes on


class Membership:
    """Forms the groups of generations, as the agent assigns them.

    It receives the messages of the agent, in the first process of a replica, and observes the group. Other
    processes of a replica enter what the first enters.
    """

    def __init__(
        self,
        connection: AgentConnection,
        group: ReplicaGroup,
        shutdown_request: ShutdownRequest,
        state: MemberState,
    ) -> None:
        self._connection = connection
        self._channel = connection.channel
        self._group = group
        self._shutdown_request = shutdown_request
        self._state = state
        self._links: MembershipLinks | None = None
        """The links of the generation that this trainer is in, or has failed to enter."""
        self._next_links: MembershipLinks | None = None
        """The links of the newest assignment, until this trainer enters its generation."""
        self._earlier_links: list[MembershipLinks] = []
        """The links of generations that this trainer has left, and other members may not have left."""
        self._instances: frozenset[str] = frozenset()
        """The trainers of the present generation."""
        self._sends_to: MembershipLinks | None = None
        """The links to the replicas that this one sends its state to, before they are members."""
        self._pending_since: float | None = None
        """When this trainer has first seen that a change is pending."""
        self._tried = 0
        """The newest generation that this trainer has tried to enter."""
        self._void = 0
        """The newest generation that the service has ended before or after this trainer entered it."""
        self._left: set[int] = set()
        """Replicas that have left the present generation at an agreed step."""
        self._is_holding = False
        self._has_stepped = False
        self._has_reported_termination = False
        self._is_joining = False

    def start(self) -> None:
        """Report to the agent that this trainer is ready for its first generation."""
        self._group.watch_processes()
        self._group.observe(self.peers_lost, self._state.save_beside)
        self._channel.start(self)
        port = self._connection.listener.getsockname()[1]
        self._channel.send(Ready(port, self._connection.accelerator, os.getpid()))

    # -- messages of the agent ----------------------------------------------------------------------------

    @property
    def change_is_pending(self) -> bool:
        """Whether this trainer has to leave the present generation for a newer one."""
        return self._channel.newest_generation > self._tried

    def is_ready_for_change(self) -> bool:
        """Whether a change is pending, and replicas that join do not wait for more of the state."""
        if not self.change_is_pending:
            self._pending_since = None
            return False
        now = time.monotonic()
        self._pending_since = now if self._pending_since is None else self._pending_since
        links, following = self._next_links, self._state.following
        if following is None:
            return True
        if links is not None and self._sends_to is links:
            return following.is_sent
        following.stop()
        self._sends_to = None
        if links is None or links.assignment.rank > 0:
            return True
        members = links.assignment.members
        joining = [rank for rank, member in enumerate(members) if member.instance not in self._instances]
        if not joining or any(links.has_arrived(rank) for rank in joining):
            return True
        if not all(rank in links.followers for rank in joining):
            return now - self._pending_since > MAX_CONNECTION_TIME
        self._sends_to = links
        try:
            following.begin(links.connect_to_followers())
        except OSError as error:
            print(f"adascale: replicas that join wait for the state: {error}", flush=True)
        return following.is_sent

    @property
    def newest_generation(self) -> int:
        """The newest active generation."""
        return self._channel.newest_generation

    @property
    def is_released(self) -> bool:
        """Whether the newest generation is without this trainer."""
        return self.change_is_pending and isinstance(self._channel.newest, Release)

    def wait_for_generation(self, generation: int) -> None:
        """Wait until the agent has sent a message for `generation`, or members are lost: in the leader."""
        while (
            self._group.own.is_leader
            and self._channel.newest_generation < generation
            and not self._group.has_failed
        ):
            self._require_agent()
            self._channel.wait(POLL)

    def assign(self, assignment: Assignment) -> None:
        """Accept the connections of the members of a generation."""
        previous, self._next_links = self._next_links, None
        if previous is not None:
            previous.close()
        if len(assignment.members) > 1:
            self._next_links = MembershipLinks(
                assignment,
                self._connection.listener,
                self._secret_of(assignment),
                self._connection.peer_timeout,
                self._on_links_change,
            )

    def _secret_of(self, assignment: Assignment) -> str:
        return assignment.secret or self._connection.secret

    def terminate(self) -> None:
        """Save and exit at the next step boundary."""
        self._shutdown_request.make()

    def hold(self, generation: int) -> None:
        """Leave a generation that the service has ended, and report the state that this trainer has."""
        if generation < max(self._tried, self._channel.newest_generation):
            return
        self._void = generation
        self._group.fail(generation)
        # Now, because the main thread may run code of the program for long.
        self._report_holding()

    # -- losses -------------------------------------------------------------------------------------------

    def _on_links_change(self, links: MembershipLinks) -> None:
        if links is self._links and links.broken:
            self._group.fail(links.assignment.generation)
            if self._is_holding:
                self._report_holding()
        self._channel.notify()

    def peers_lost(self, generation: int) -> None:
        """Let the other members know that a generation cannot continue."""
        links = self._links
        if links is not None and links.assignment.generation == generation:
            links.break_up()

    def _report_holding(self) -> None:
        """Report that this trainer waits for another generation, unless it was terminated and leaves."""
        if self._shutdown_request.is_made:
            return
        lost = set(self._left)
        if self._links is not None:
            lost |= self._links.lost
        self._is_holding = True
        generation = max(self._tried, self._void)
        number = self._state.number
        step = None if number is None else number[1]
        self._channel.send(Holding(generation, step, tuple(sorted(lost))))

    # -- entering a generation ----------------------------------------------------------------------------

    def leave_without(self, replicas: set[int]) -> None:
        """Record that `replicas` have left the present generation, so that it has ended."""
        self._left |= replicas

    def join(self, synchronize: Callable[[Assignment, Formation], None]) -> None:
        """Enter the newest generation, whose members `synchronize` gives the same state.

        Waits for it if the present one was tried already, and for another one while members are lost.
        """
        self._is_joining = True
        wait = self._wait_for_assignment if self._group.own.is_leader else self._wait_for_leader
        while True:
            form = wait()
            try:
                assignment, formation = form()
                synchronize(assignment, formation)
                if self._group.has_failed:
                    raise PeersLostError
            except PeersLostError:
                if self._links is not None and self._links.refusal is not None:
                    raise OtherVersionError(self._links.refusal) from None
                self._group.fail()
                self.peers_lost(self._tried)
                continue
            self._is_joining = self._is_holding = self._has_stepped = False
            self._channel.send(Running(assignment.generation))
            return

    def _wait_for_assignment(self) -> Formed:
        if self._channel.newest_generation <= max(self._tried, self._void) > 0:
            self._report_holding()
        while True:
            if self._channel.refusal is not None:
                raise WorkerError(self._channel.refusal)
            if self._shutdown_request.is_made:
                self._save_before_leaving()
                self.leave()
            newest = self._channel.newest
            if newest is not None and newest.generation > max(self._tried, self._void):
                if isinstance(newest, Release):
                    if newest.last:
                        self._save_before_leaving()
                    self.leave()
                return partial(self._form, newest)
            self._require_agent()
            self._channel.wait(POLL)

    def _save_before_leaving(self) -> None:
        self._group.own.share([SAVE])
        self._state.save_alone()

    def _form(self, assignment: Assignment) -> tuple[Assignment, Formation]:
        self._is_holding = False
        if self._links is not None:
            self._earlier_links.append(self._links)
            self._links = None
        # No member trains in a generation that was not formed, and its links accept those of later ones.
        self._close_earlier_links(lambda links: links.formation is None)
        self._tried = assignment.generation
        secret = self._secret_of(assignment)
        links: MembershipLinks | None = None
        if len(assignment.members) > 1:
            links = self._next_links
            if links is None or links.assignment is not assignment:
                raise PeersLostError  # a newer assignment has arrived
            self._next_links = None
        self._left.clear()
        self._links = links
        if (following := self._state.following) is not None:
            if links is not None and links is self._sends_to and not links.broken:
                following.finish(lambda: self._require_undisturbed(links))
            following.stop()
            if links is not None and assignment.rank > 0 and self._state.number is None:
                self._receive_state(links, following)
        self._sends_to = self._pending_since = None
        state = self._state.number
        self._instances = frozenset(member.instance for member in assignment.members)
        if links is None:
            self._close_earlier_links()
            self._group.destroy()
            alone = Formation(0, (state,))
            self._group.form(assignment, None, alone, secret)
            self._group.settle(failed=self._void >= assignment.generation)
            return assignment, alone
        links.arrive(state)
        store, formation = None, None
        while (formation := links.formation) is None:
            self._require_undisturbed(links)
            if store is None and links.all_arrived:
                store, port = self._group.open_store(assignment.members[0].address)
                links.announce_store(port)
            else:
                self._channel.wait(POLL)
        # All members have left the previous generation, so nobody needs its connections.
        self._close_earlier_links()
        self._group.destroy()
        self._group.form(assignment, store, formation, secret)
        self._group.settle(failed=links.broken or self._void >= assignment.generation)
        return assignment, formation

    def _receive_state(self, links: MembershipLinks, following: Following) -> None:
        """Receive the state of rank 0 while it trains, until it waits for the others."""
        assignment = links.assignment
        with listen(assignment.members[assignment.rank].address) as listener:
            proof = links.follow(listener.getsockname()[1]).encode()
            while not links.has_arrived(0):
                self._require_undisturbed(links)
                self._channel.wait(POLL)
                try:
                    connection, _ = listener.accept()
                except OSError:
                    continue
                with connection:
                    if _has_sent(connection, proof):
                        following.receive(connection, lambda: self._require_undisturbed(links))
                        return

    def _wait_for_leader(self) -> Formed:
        """Wait until the leader of this replica, in which this is another process, forms a group."""
        while True:
            kind, *arguments = self._group.own.share(None)
            if kind == FORM:
                return partial(self._follow, *arguments)
            if kind == LEAVE:
                raise LeaveError
            assert kind == SAVE, kind
            self._state.save_alone()

    def _follow(
        self, text: str, store_port: int, states: list[list[int] | None], secret: str
    ) -> tuple[Assignment, Formation]:
        assignment = agent_message(text)
        assert isinstance(assignment, Assignment)
        self._group.destroy()
        formation = Formation(store_port, tuple(map(state_number, states)))
        self._group.form(assignment, None, formation, secret)
        self._group.settle()
        return assignment, formation

    def _close_earlier_links(self, which: Callable[[MembershipLinks], bool] = lambda _: True) -> None:
        for links in filter(which, self._earlier_links):
            links.close()
        self._earlier_links = [links for links in self._earlier_links if not which(links)]

    def _require_undisturbed(self, links: MembershipLinks) -> None:
        is_void = self._void >= links.assignment.generation
        if links.broken or is_void or self.change_is_pending or self._shutdown_request.is_made:
            raise PeersLostError
        self._require_agent()

    def _require_agent(self) -> None:
        if self._channel.is_closed:
            self.leave()

    # -- reports ------------------------------------------------------------------------------------------

    def report_step(self) -> None:
        """Report the first step in a generation."""
        if not self._has_stepped:
            self._has_stepped = True
            self._channel.send(Stepped(self._group.generation))

    def report_terminated(self) -> None:
        """Report that this trainer was requested to save and exit, once."""
        if not self._has_reported_termination:
            self._has_reported_termination = True
            self._channel.send(Terminated())

    def close(self) -> None:
        """Send `leave` to the other members."""
        self._group.observe(None, None)
        if self._state.following is not None:
            self._state.following.stop()
        self._close_earlier_links()
        for links in (self._links, self._next_links):
            if links is not None:
                links.close()

    def leave(self) -> NoReturn:
        """Send `leave` to the other members, and raise `LeaveError`."""
        if self._is_joining:
            self._group.own.share([LEAVE])
        self.close()
        raise LeaveError


def _has_sent(connection: socket.socket, proof: bytes) -> bool:
    """Whether the other end of a new connection proves that it knows the secret of the job."""
    deadline, received = time.monotonic() + 1.0, b""
    try:
        while len(received) < len(proof) and (seconds := deadline - time.monotonic()) > 0:
            connection.settimeout(seconds)
            if not (part := connection.recv(len(proof) - len(received))):
                break
            received += part
    except OSError:
        return False
    return hmac.compare_digest(received, proof)
