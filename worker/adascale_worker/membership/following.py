"""Membership of a replica of several processes: the first enters generations, and the others follow it.

The first process, the leader, shares what it does over the group of the processes of its replica: that it
forms a generation, that it saves its state before it leaves, and that it leaves.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NoReturn

from adascale_core.messages.channel import Assignment, Limited, TrainerMessage, agent_message, encode
from adascale_core.names import LIMIT_FILE_SUFFIX
from adascale_worker.membership.agent_channel import AgentChannel, MessageReceiver
from adascale_worker.membership.generations import (
    AgentConnection,
    Joining,
    LeaveError,
    Membership,
    MemberState,
)
from adascale_worker.membership.lane_group import LaneGroup
from adascale_worker.membership.links import Formation, PeersLostError
from adascale_worker.process.shutdown_request import ShutdownRequest

FORM, SAVE, LEAVE = "form", "save", "leave"


class _ReplicaMembership(Membership):
    """The membership of a replica, in each of its processes."""

    def __init__(
        self,
        connection: AgentConnection,
        group: LaneGroup,
        shutdown_request: ShutdownRequest,
        state: MemberState,
    ) -> None:
        super().__init__(connection, group, shutdown_request, state)
        self._group: LaneGroup = group
        self._own = group.own


class LeadingMembership(_ReplicaMembership):
    """The membership of a replica, in its first process. See `Membership`."""

    _is_joining = False

    def start(self) -> None:
        """Report to the agent that this trainer is ready for its first generation."""
        self._group.watch_processes()
        super().start()

    def join(self, joining: Joining) -> None:
        """Enter the newest generation, with the other processes of this replica."""
        self._is_joining = True
        super().join(joining)
        self._is_joining = False

    def _save_before_leaving(self) -> None:
        self._own.share([SAVE])
        super()._save_before_leaving()

    def leave(self) -> NoReturn:
        """Let the other processes leave too."""
        if self._is_joining:
            self._own.share([LEAVE])
        super().leave()


class FollowerChannel(AgentChannel):
    """In place of the connection with the agent, in processes that have none."""

    def __init__(self, replica_store: str) -> None:
        self._limit = Path(f"{replica_store}{LIMIT_FILE_SUFFIX}")

    def start(self, receiver: MessageReceiver) -> None:
        """Receive nothing."""

    def send(self, message: TrainerMessage) -> None:
        """Leave a limit of the batch size to the agent, which reads it at the end. Ignore all else.

        Does nothing if the file cannot be written: then the lack of memory ends this process as it is.
        """
        if isinstance(message, Limited):
            # Another process may write its own at the same time.
            draft = self._limit.with_name(f"{self._limit.name}-{os.getpid()}")
            with contextlib.suppress(OSError):
                draft.write_bytes(encode(message))
                draft.replace(self._limit)


class FollowingMembership(_ReplicaMembership):
    """The membership of a replica, in the other processes. See `Membership`."""

    def start(self) -> None:
        """Watch the other processes. The leader reports."""
        self._group.watch_processes()

    @property
    def change_is_pending(self) -> bool:
        """False: what the leader requests counts."""
        return False

    @property
    def newest_generation(self) -> int:
        """0: what the leader knows counts."""
        return 0

    @property
    def is_released(self) -> bool:
        """False: what the leader knows counts."""
        return False

    def wait_for_generation(self, generation: int) -> None:
        """Do not wait: the leader does, before it shares what follows."""

    def join(self, joining: Joining) -> None:
        """Enter the generation that the leader enters."""
        while True:
            kind, *arguments = self._own.share(None)
            if kind == SAVE:
                self._state.save_before_leaving()
                continue
            if kind == LEAVE:
                raise LeaveError
            assert kind == FORM, kind
            try:
                assignment, formation = self._follow(joining, *arguments)
                joining.synchronize(assignment, formation)
                if self._group.has_failed:
                    raise PeersLostError
            except PeersLostError:
                self._group.fail()
                continue
            return

    def _follow(
        self, joining: Joining, text: str, store_port: int, states: list[list[int] | None], secret: str
    ) -> tuple[Assignment, Formation]:
        assignment = agent_message(text)
        assert isinstance(assignment, Assignment)
        joining.release_group()
        formation = Formation(
            store_port,
            tuple(None if state is None else (state[0], state[1], state[2]) for state in states),
        )
        self._group.form(assignment, None, formation, secret)
        self._group.settle()
        return assignment, formation

    def report_step(self) -> None:
        """Report nothing: the leader does."""

    def report_terminated(self) -> None:
        """Report nothing: the leader does."""

    def close(self) -> None:
        """Close nothing."""
