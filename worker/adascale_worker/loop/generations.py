"""Changes of generation: how this replica enters one, leaves one, and gets the state of training.

Without an agent there is one generation, which `begin_alone` enters.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
import time
from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adascale_client import ServiceError
from adascale_core.errors import AdaScaleError
from adascale_core.failures import EXIT_REENTRY
from adascale_core.messages.channel import (
    AgentMessage,
    Assignment,
    Follow,
    Hold,
    Holding,
    Ready,
    Refuse,
    Release,
    Running,
    SavedElsewhere,
    Terminate,
    Terminated,
    TrainerMessage,
    agent_message,
    encode,
)
from adascale_core.messages.replica_seconds import Cause
from adascale_core.names import ENV_ADDRESS
from adascale_worker.errors import (
    CheckpointError,
    StorageUnavailableError,
    UnusableCheckpointError,
    WorkerError,
)
from adascale_worker.gradients.step_failure import release_memory
from adascale_worker.loop.context import Context
from adascale_worker.membership.links import (
    FollowerServer,
    Formation,
    MembershipLinks,
    PeersLostError,
    connect_to,
)
from adascale_worker.membership.process_group import described_error, shared_error
from adascale_worker.process import environment
from adascale_worker.process.environment import listen
from adascale_worker.program.parts import check_optimizer_parameters

POLL: Final = 0.1
"""Seconds after which a wait looks for signals again."""
MAX_CONNECTION_TIME: Final = 10.0
"""Seconds for which a change waits for replicas that join to connect, while the others train."""
FOLLOW_PAUSE: Final = 1.0
"""Seconds until a replica that waits connects again to the one that it follows..."""
MEMORY_PAUSE: Final = 60.0
"""...and if it has too little memory for copies."""
MAX_TRIES: Final = 2
"""How often a replica that joins tries to follow rank 0."""
SILENCE: Final = 1.0
"""Seconds in which something is heard of the replica that is followed, once the others have left it."""
# The messages of a leader to the other processes of its replica, which wait to enter a generation, are "form"
# (`ReplicaGroup.form`), "follow", "finish", "save" and "leave".


SHARED_ERRORS = (UnusableCheckpointError, StorageUnavailableError, CheckpointError, WorkerError)
"""Errors of a restored checkpoint with which all replicas end, with the same message and exit code."""


class Generations(Context):
    """Enters generations, as the agent assigns them, with the state of the members, and leaves them.

    The first process of a replica receives the messages of the agent. The others enter what it enters.
    """

    _listener: socket.socket
    """To which other members connect."""

    def __init__(self, known: Context) -> None:
        super().__init__(known)
        self._newest: Assignment | Release | None = None
        """The message of the agent for the newest generation; None before the first."""
        self._refusal: str | None = None
        """Why the agent refuses this trainer; None if it does not."""
        self._links: MembershipLinks | None = None
        """The links of the generation that this trainer is in, or has failed to enter."""
        self._next_links: MembershipLinks | None = None
        """The links of the newest assignment, until this trainer enters its generation."""
        self._earlier_links: MembershipLinks | None = None
        """The links of the generation that this trainer has left, and other members may not have left."""
        self._instances: frozenset[str] = frozenset()
        """The trainers of the present generation."""
        self._server: FollowerServer | None = None
        """Accepts the replicas that wait: the same process of each. None without an agent."""
        self._source: Follow | None = None
        """Whose state this replica gets while it waits."""
        self._follows_at = 0.0
        """When it connects next."""
        self._followed = 0, 0
        """The newest generation whose rank 0 this replica has tried to follow, and how often."""
        self._follows = 0
        """How often it has begun to follow another one."""
        self._lack = ""
        """How much memory is missing for copies, as it was reported."""
        self._pending_since: float | None = None
        """When this trainer has first seen that a change is pending."""
        self._tried = 0
        """The newest generation that this trainer has tried to enter."""
        self._void = 0
        """The newest generation that the service has ended before or after this trainer entered it."""
        self._left: set[int] = set()
        """Replicas that have left the present generation at an agreed step."""
        self._is_holding = False
        self._sent: set[TrainerMessage] = set()
        """The messages of `send_once`."""
        self._is_entering = False

    # -- the first generation -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Enter the first generation: without an agent, with the last checkpoint."""
        if not self.group.is_elastic:
            self.state.was_restored = self._load()
            self._begin()
            return
        self.start()
        self.enter()

    def start(self) -> None:
        """Report to the agent that this trainer is ready for its first generation."""
        self.group.watch_processes()
        self.group.observe(self.peers_lost)
        self._listener = listen(os.environ.get(ENV_ADDRESS, "127.0.0.1"))
        port = self._listener.getsockname()[1]
        self._server = server = FollowerServer(os.environ.get(ENV_ADDRESS, "127.0.0.1"))
        server.ports = self.group.own.exchange(server.port)
        # A collection of all objects takes 0.1 s, for which all replicas wait.
        gc.collect()
        self.channel.start(self._handle)
        self.channel.send(Ready(port, self.accelerator, os.getpid(), server.port))

    # -- messages of the agent ----------------------------------------------------------------------------

    def _handle(self, message: AgentMessage) -> None:
        match message:
            case Refuse(reason):
                self._refusal = reason
            case Terminate():
                self.shutdown_request.make()
            case Hold(generation):
                self._hold(generation)
            case Follow():
                self._source, self._follows_at = message, 0.0
            case Assignment() | Release() if message.generation > self._newest_generation:
                if isinstance(message, Assignment):
                    self._prepare(message)
                self._newest = message

    @property
    def _newest_generation(self) -> int:
        """The newest active generation; 0 before the first."""
        return 0 if self._newest is None else self._newest.generation

    @property
    def _change_is_pending(self) -> bool:
        """Whether this trainer has to leave the present generation for a newer one."""
        return self._newest_generation > self._tried

    def is_ready_for_change(self) -> bool:
        """Whether a change is pending, and replicas that join do not wait for more of the state.

        All processes of a replica call this, and get the same answer.
        """
        if self._server is None:
            return self._change_is_pending
        followers, group = self.state.followers, self.group
        is_pending, links = self._change_is_pending, self._next_links
        for each in self._server.take():
            if each.instance in self._instances:
                each.connection.close()  # It has tried before it was a member.
            else:
                joins = is_pending and each.instance in self._joining()
                followers.add(each, gets_copies=group.replicas == 1 and not joins)
        joining = self._joining() if is_pending and group.rank == 0 else {}
        is_late = time.monotonic() - (self._pending_since or math.inf) > MAX_CONNECTION_TIME

        def is_missing(instance: str) -> bool:
            has_arrived = links is not None and links.has_arrived(joining[instance])
            return not (instance in followers.instances or has_arrived or is_late)

        followed = [each for each in joining if each in followers.instances]
        served = [] if any(map(is_missing, joining)) else followed
        served = group.own.share(served if is_pending else None)
        if served is None:
            self._pending_since = None
            if group.replicas > 1 and group.rank == 0:
                followers.send_to_all()
            return False
        self._pending_since = self._pending_since or time.monotonic()
        if followers.send_pieces(served) and group.replicas == 1:
            self._prepare_memory()
        # Those whose connections are of no use any more are missing too.
        are_there = is_late or followers.instances >= {*served}
        is_ready = followers.have_all(served) and not any(map(is_missing, joining))
        return group.own.all(is_ready and (are_there or group.own.is_leader))

    def _joining(self) -> dict[str, int]:
        """Return the ranks of the trainers that join in the next generation; if unknown, of all that may."""
        if not isinstance(self._newest, Assignment):
            return dict.fromkeys(self.state.followers.instances if self.group.replicas > 1 else (), 0)
        members = self._newest.members
        return {
            each.instance: rank for rank, each in enumerate(members) if each.instance not in self._instances
        }

    def _prepare(self, assignment: Assignment) -> None:
        """Accept the connections of the members of a generation."""
        previous, self._next_links = self._next_links, None
        if previous is not None:
            previous.close()
        if len(assignment.members) > 1:
            self._next_links = MembershipLinks(
                assignment,
                self._listener,
                _secret_of(assignment),
                self.group.peer_timeout,
                self._on_links_change,
            )

    def _hold(self, generation: int) -> None:
        """Leave a generation that the service has ended, and report the state that this trainer has."""
        if generation < max(self._tried, self._newest_generation):
            return
        self._void = generation
        self.group.fail(generation)
        # Now, because the main thread may run code of the program for long.
        self._report_holding()

    # -- losses -------------------------------------------------------------------------------------------

    def _on_links_change(self, links: MembershipLinks) -> None:
        if links is self._links and links.broken:
            self.group.fail(links.assignment.generation)
            if self._is_holding:
                self._report_holding()
        self.channel.notify()

    def peers_lost(self, generation: int) -> None:
        """Let the other members know that a generation cannot continue."""
        links = self._links
        if links is not None and links.assignment.generation == generation:
            links.break_up()

    def _report_holding(self) -> None:
        """Report that this trainer waits for another generation, unless it was terminated and leaves."""
        if self.shutdown_request.is_made:
            return
        lost, links = set(self._left), self._links  # read once, since this is called in several threads
        if links is not None:
            lost |= links.lost
        self._is_holding = True
        generation = max(self._tried, self._void)
        number = self.state.number
        step = None if number is None else number[1]
        self.channel.send(Holding(generation, step, tuple(sorted(lost))))

    # -- entering a generation ----------------------------------------------------------------------------

    def enter(self) -> None:
        """Enter the newest generation, and get the same state as its other members.

        Waits for it if the present one was tried already, and for another one while members are lost.
        """
        with self.spent.measured(Cause.CHANGE):
            self._enter()
        self.spent.begin()

    def _enter(self) -> None:
        self._is_entering = True
        form = self._form if self.group.own.is_leader else self._follow_leader
        while True:
            try:
                assignment, formation = form()
                self._synchronize(assignment, formation)
                if self.group.has_failed:
                    raise PeersLostError
            except PeersLostError:
                if self._links is not None and self._links.refusal is not None:
                    raise WorkerError(self._links.refusal) from None
                self.group.fail()
                self.peers_lost(self._tried)
                continue
            self._is_entering = self._is_holding = False
            self.channel.send(Running(assignment.generation))
            return

    def _wait_for_assignment(self) -> Assignment:
        if self._newest_generation <= max(self._tried, self._void) > 0:
            self._report_holding()
        while True:
            if self._refusal is not None:
                raise WorkerError(self._refusal)
            if self.shutdown_request.is_made:
                self._save_before_leaving()
                self._leave()
            newest = self._newest
            if newest is not None and newest.generation > max(self._tried, self._void):
                if isinstance(newest, Release):
                    if newest.last:
                        self._save_before_leaving()
                    self._leave()
                if self._follow_rank_0(newest):
                    continue  # There may be news.
                return newest
            self._require_agent()
            source = self._source
            if source is None or newest is not None or time.monotonic() < self._follows_at:
                self.channel.wait(POLL)
                continue
            self._follow(source)

    def _save_before_leaving(self) -> None:
        self.group.own.share(["save"])
        self.state.save_alone()

    def _form(self) -> tuple[Assignment, Formation]:
        """Form the group of the generation that the agent assigns next."""
        assignment = self._wait_for_assignment()
        self._is_holding = False
        left, self._links = self._links, None
        if left is not None and left.formation is None:
            # No member trains in a generation that was not formed, and its links accept those of later ones.
            left.close()
        elif left is not None:
            self._replace_earlier_links(left)
        self._tried = assignment.generation
        links: MembershipLinks | None = None
        if len(assignment.members) > 1:
            links = self._next_links
            if links is None or links.assignment is not assignment:
                raise PeersLostError  # a newer assignment has arrived
            self._next_links = None
        self._left.clear()
        self._links = links
        self._finish_followers({} if links is None or links.broken else self._joining(), links)
        store, formation = None, Formation(0, (self.state.number,))
        if links is not None:
            store, formation = self._gather_members(links)
        # All members have left the previous generation, so nobody needs its connections.
        self._replace_earlier_links(None)
        self.group.destroy()
        self.group.form(assignment, store, formation, _secret_of(assignment))
        self._serve(assignment, _secret_of(assignment))
        is_broken = links is not None and links.broken
        self.group.settle(failed=is_broken or self._void >= assignment.generation)
        return assignment, formation

    def _serve(self, assignment: Assignment, secret: str) -> None:
        """Let replicas that know the secret and are no members follow this one from now on."""
        if self._server is not None:
            self._server.secret = secret
        self._pending_since = None
        self._instances = frozenset(member.instance for member in assignment.members)

    def _finish_followers(self, joining: Collection[str], links: MembershipLinks | None) -> None:
        """Send nothing any more, on all processes of this replica, after what those that join wait for."""
        own = self.group.own
        if own.is_leader:
            own.share(["finish", [*joining]])
        try:
            self.state.followers.finish(
                joining, self._require_agent if links is None else lambda: self._require_undisturbed(links)
            )
        finally:
            # Only then do others wait for this replica.
            own.exchange(None)

    def _gather_members(self, links: MembershipLinks) -> tuple[TCPStore | None, Formation]:
        """Wait until all members have arrived, and return on rank 0 the store that it has opened."""
        links.arrive(self.state.number)
        store = None
        while links.formation is None:
            self._require_undisturbed(links)
            if store is None and links.all_arrived:
                store, port = self.group.open_store(links.assignment.members[0].address)
                links.announce_store(port)
            else:
                self.channel.wait(POLL)
        return store, links.formation

    def _follow_rank_0(self, assignment: Assignment) -> bool:
        """Get the state of rank 0 of the generation, if that trains; return whether this was tried now."""
        state = self.state
        generation, tries = self._followed
        tries = tries if generation == assignment.generation else 0
        # Again, because rank 0 may have sent a copy, before it knew that this replica joins.
        links = self._next_links
        has_left = tries > 0 and links is not None and links.has_arrived(0)
        is_done = tries == MAX_TRIES or has_left or state.is_mixed or state.has_followed
        if (
            assignment.rank == 0
            or is_done
            or state.number is not None
            or not assignment.members[0].state_port
        ):
            return False
        self._followed = assignment.generation, tries + 1
        instance = assignment.members[assignment.rank].instance
        self._source = Follow(assignment.members[0], instance, _secret_of(assignment))
        self._follow(self._source)
        return True

    def _follow(self, source: Follow) -> None:
        """Get the state of a replica that trains, until this one is assigned, or gets nothing more."""
        own, lack = self.group.own, ""
        self._prepare_memory()
        with contextlib.suppress(OSError, PeersLostError):
            connection, ports = connect_to(source, self.state.copied)
            if len(ports) != own.count:
                connection.close()
                raise ConnectionError("its replica has another number of processes")
            self._follows += 1
            own.share(["follow", encode(source).decode(), ports, self._follows])
            try:
                lack = self.state.follow(connection, partial(self._require_source, source))
            finally:
                own.announce(f"followed-{self._follows}")
        self._follows_at = time.monotonic() + (MEMORY_PAUSE if lack else FOLLOW_PAUSE)
        if lack and not self._lack:
            print(
                f"adascale: no copies of the state of replica {source.source.replica} are kept: {lack}. "
                "If it is lost, training continues from the last checkpoint",
                flush=True,
            )
        self._lack = lack

    def _follow_beside(self, source: Follow, port: int, number: int) -> None:
        """Get the part of this process, again and again until its leader gets nothing more."""
        looks_at, ends_at, connects_at = 0.0, math.inf, 0.0

        def is_over() -> bool:
            nonlocal looks_at, ends_at
            now = time.monotonic()
            if now >= looks_at:
                looks_at = now + POLL
                if self.group.own.is_announced(f"followed-{number}"):
                    ends_at = min(ends_at, now + SILENCE)
            return math.isfinite(ends_at)

        def check(_: float | None) -> None:
            if is_over() and time.monotonic() > ends_at:
                raise PeersLostError

        self._prepare_memory()
        own = replace(source, source=replace(source.source, state_port=port))
        while not is_over():
            if time.monotonic() >= connects_at:
                with contextlib.suppress(OSError, PeersLostError):
                    self.state.follow(connect_to(own, None)[0], check)
                connects_at = time.monotonic() + FOLLOW_PAUSE
            time.sleep(POLL)

    def _prepare_memory(self) -> None:
        """Map the memory of the exchange of gradients, before others wait for this replica."""
        if self.device.type == "cpu":
            self.accumulation.prepare()

    @property
    def _is_assigned(self) -> bool:
        """Whether this trainer waits to enter a generation."""
        return isinstance(self._newest, Assignment) and self._newest.generation > max(self._tried, self._void)

    def _require_source(self, source: Follow, heard_at: float | None) -> None:
        """Raise an error if this replica gets nothing more of the one that it follows."""
        is_left = self._refusal is not None or self.shutdown_request.is_made or self.channel.is_closed
        present = self._source
        is_other = present is not None and present.source.instance != source.source.instance
        if is_left or is_other or isinstance(self._newest, Release):
            raise PeersLostError
        if not self._is_assigned:
            return
        links = self._next_links
        if links is not None:
            links.begin_to_wait()
            if links.broken:
                raise PeersLostError
        # Before, they have sent all. One that is frozen does not end the connection.
        have_left = links is None or links.has_arrived(0)
        if have_left and (heard_at is None or time.monotonic() - heard_at > SILENCE):
            raise PeersLostError

    def _follow_leader(self) -> tuple[Assignment, Formation]:
        """Form the group that the leader of this replica forms, in another process of it."""
        while True:
            match self.group.own.share(None):
                case ["form", text, port, states, secret]:
                    break
                case ["follow", text, ports, number]:
                    source = agent_message(text)
                    assert isinstance(source, Follow)
                    self._follow_beside(source, ports[self.group.process], number)
                case ["finish", joining]:
                    self._finish_followers(joining, None)
                case ["leave"]:
                    self.exit(EXIT_REENTRY)
                case _:
                    self.state.save_alone()
        assignment, formation = agent_message(text), Formation.of(port, states)
        assert isinstance(assignment, Assignment)
        self.group.destroy()
        self.group.form(assignment, None, formation, secret)
        self._serve(assignment, secret)
        self.group.settle()
        return assignment, formation

    def _replace_earlier_links(self, links: MembershipLinks | None) -> None:
        earlier, self._earlier_links = self._earlier_links, links
        if earlier is not None:
            earlier.close()

    def _require_undisturbed(self, links: MembershipLinks) -> None:
        is_void = self._void >= links.assignment.generation
        if links.broken or is_void or self._change_is_pending or self.shutdown_request.is_made:
            raise PeersLostError
        self._require_agent()

    def _require_agent(self) -> None:
        if self.channel.is_closed:
            self._leave()

    def _synchronize(self, assignment: Assignment, formation: Formation) -> None:
        """Give all members of a generation whose group is formed the same state."""
        group, steps, trained = self.group, self.steps, self.program.trained
        self.job.adopt(assignment.env)
        settings = self.job.settings
        self.planner.bounds = settings.bounds
        self.feed.bounds = settings.bounds
        self.checkpointing.interval = settings.checkpoint_interval
        if group.replicas > 1:
            check_optimizer_parameters(self.program.model, self.optimizer, group.replicas)
            # Before more memory is mapped for the exchange of gradients.
            self.optimizer.discard_comparison()
        self.failure.clear()
        if formation.sources:
            self.state.transfer(formation.sources, group.hosts)
            if formation.states[group.rank] is None:
                self.state.was_restored = True
        else:
            self.state.was_restored = self._load()
        self.state.begin_generation(assignment.generation)
        # What a member decides between two steps does not change the number of its state.
        rows = group.gather([self.progress.finish_reason, trained.recorded])
        self.progress.finish_reason = next((reason for reason, _ in rows if reason is not None), None)
        trained.begin_generation(rows[formation.sources[0] if formation.sources else 0][1])
        steps.begin_generation()
        self._announce_place()
        self._begin()

    def _announce_place(self) -> None:
        """Announce where the program is, also if the state that was copied is in a later epoch."""
        loop, epoch = self.loop, self.progress.epoch
        if loop.number and epoch > loop.epoch:
            loop.overtaken_epoch = loop.epoch
            loop.overtaken_states = deepcopy(self.program.registered_states())
        if loop.is_inside and loop.overtaken_epoch is None:
            self.evaluations.announce_training()
        if loop.is_inside or (loop.number and epoch <= loop.epoch):
            self.departures.begin_generation(loop.epoch, inside=loop.is_inside)
        else:
            self.departures.begin_generation(epoch, inside=True)

    def _begin(self) -> None:
        """Use the restored state, or the initial state, with the present replicas. A collective call."""
        bounds = self.job.settings.bounds
        self.planner.adapt(bounds, self.optimizer, self.telemetry.step_timer)
        self.steps.use_plan()
        self.loop.step_at_begin = self.progress.step
        self.telemetry.begin_generation()

    # -- the state ----------------------------------------------------------------------------------------

    def _load(self) -> bool:
        """Restore the last checkpoint on all ranks, and return whether there is one. A collective call.

        Rank 0 reads it, each process of it its part, and sends the state to the others. If the memory of its
        agent has a later copy, it uses that.
        """
        group, checkpointing, trained = self.group, self.checkpointing, self.program.trained
        failure: tuple[str, str] | None = None
        loaded, reported = None, 0
        if group.rank > 0:
            group.settle()
        else:
            try:
                # In the first generation the storage's address may be wrong, so an error is raised at once.
                loaded = self.state.load(wait=group.generation > 1)
                group.settle(failed=self._continues_elsewhere())
                if loaded is not None:
                    self.state.restore(loaded)
                    reported = _last_reported_step()
                    self.feed.begin_from_checkpoint()
                elif group.own.any(self.state.is_mixed):
                    # Nobody has the state any more, of which this replica had received a part.
                    self.exit(EXIT_REENTRY)
            except AdaScaleError as error:
                failure = described_error(error, SHARED_ERRORS)
            failure = next((each for each in group.own.exchange(failure) if each is not None), None)
        # More steps may be required now than when the end of training was saved.
        is_final = loaded is not None and self.state.has_loaded_final and self.job.finished
        is_restored, is_final, failure, reported = group.broadcast(
            (loaded is not None, is_final, failure, reported)
        )
        self.spent.repeated_until = reported
        if failure is not None:
            raise shared_error(failure, SHARED_ERRORS, WorkerError)
        checkpointing.keep_final(is_final=is_final)
        if not is_restored:
            trained.require_equal()
        # Also without a checkpoint: each rank may have made another seed, or other registered objects.
        if group.replicas > 1:
            self.state.transfer([0], group.hosts)
        if not is_restored:
            self.planner.begin(self.job.settings.bounds)
        trained.begin_generation(trained.recorded)
        return bool(is_restored)

    def _continues_elsewhere(self) -> bool:
        """Whether this generation is before that of the restored checkpoint, which it cannot replace.

        Another controller has continued the job, such as `adascale run` on the checkpoints of a cluster. Then
        the service has to begin a later generation.
        """
        last, info = self.checkpointing.manifest, self.state.info()
        if not self.group.is_elastic or last is None or last.incarnation != info.incarnation:
            return False
        if last.generation <= info.generation:
            return False
        if not self.group.is_main:
            return True
        print(
            f"adascale: the last checkpoint is of generation {last.generation}, and this is generation "
            f"{self.group.generation}: the job was continued elsewhere. It continues here in a later "
            "generation",
            flush=True,
        )
        self.channel.send(SavedElsewhere(last.generation))
        return True

    # -- changes ------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Discard the step in which members were lost, and enter another generation."""
        self.spent.discard_step(self.telemetry.step_timer.recent_median)
        self.steps.discard()
        if self.failure.lacks_memory:
            release_memory()
        self.enter()

    def retry_in_smaller_batches(self) -> None:
        """Deliver the samples of a step that lacked memory again, in smaller batches. Without an agent."""
        self.job.limit_local_bsz(self.failures.limit)
        self.failures.limit = None
        self.steps.discard()
        self.failure.clear()
        release_memory()
        self._begin()

    def change(self) -> None:
        """Do what the members have agreed on: terminated members leave, or all enter a newer generation."""
        with self.spent.measured(Cause.CHANGE):
            self._change()

    def _change(self) -> None:
        group = self.group
        rows = group.gather([self.shutdown_request.is_made, self._newest_generation])
        terminated = leaving = {rank for rank, row in enumerate(rows) if row[0]}
        if not terminated:
            newest = max(row[1] for row in rows)
            while group.own.is_leader and self._newest_generation < newest and not group.has_failed:
                self._require_agent()
                self.channel.wait(POLL)
            is_released = self._change_is_pending and isinstance(self._newest, Release)
            leaving = {rank for rank, released in enumerate(group.gather(is_released)) if released}
        if leaving:
            self.telemetry.report(self.planner.plan, self.planner.bounds)
        if len(leaving) == group.replicas:
            # Else the others keep the state.
            self.state.save_if_possible()
        if group.rank in leaving:
            if len(leaving) < group.replicas:
                self.state.followers.finish(self._joining(), self._require_agent)
            self._leave()
        self._left |= {group.indices[rank] for rank in terminated}
        self.enter()

    # -- the end ------------------------------------------------------------------------------------------

    def send_once(self, message: TrainerMessage) -> None:
        """Send a message to the agent, if it was not sent before."""
        if message not in self._sent:
            self._sent.add(message)
            self.channel.send(message)

    def close(self) -> None:
        """Send `leave` to the other members."""
        self.group.observe(None)
        self.state.followers.close()
        for links in (self._earlier_links, self._links, self._next_links):
            if links is not None:
                links.close()

    def _leave(self) -> NoReturn:
        """Leave the job: this trainer was released or terminated, or its agent is gone."""
        if self._is_entering:
            self.group.own.share(["leave"])
        self.close()
        self.exit(EXIT_REENTRY)

    def exit(self, code: int) -> NoReturn:
        """End the process with an exit code, after the program's own handler for a signal was called."""
        if self.shutdown_request.is_made:
            self.send_once(Terminated())
        self.telemetry.close()
        self.spent.close()
        self.group.destroy()
        # The handler may end the program.
        self.process_exit.code = code
        self.shutdown_request.call_program_handler()
        self.process_exit.exit(code)


def _last_reported_step() -> int:
    """Return the last step that was reported of the job; 0 if the service has none, or does not answer."""
    service = environment.read_service(os.environ)
    with contextlib.suppress(ServiceError):
        return service[0].get_gain(service[1]).report.step if service is not None else 0
    return 0


def _secret_of(assignment: Assignment) -> str:
    return assignment.secret or environment.read_secret(os.environ)
