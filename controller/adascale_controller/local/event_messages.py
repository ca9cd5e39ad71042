"""Messages about events of a running job: losses of replicas, new generations, missing steps."""

from __future__ import annotations

from adascale_controller.formatting import capitalized, describe_limit, duration, local_batch, plural, trimmed
from adascale_controller.local.display import Display
from adascale_controller.local.replicas import Replicas
from adascale_core.failures import EXIT_PEER_LOST, describe_exit
from adascale_core.messages.allocation import SlowReplacement
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.views.jobs import JobView

STALL_TIMEOUT = 35.0
"""Seconds without a step after which a message shows where the program is. Trainers report it after 30."""
LOSS_TIMEOUT = 1.0
"""Seconds to wait for the registration of the replica that was lost."""


class EventMessages:
    """Compares successive views of a job and prints a message for each event."""

    def __init__(self, replicas: Replicas, display: Display, now: float) -> None:
        self._replicas = replicas
        self._display = display
        self._disruptions: int | None = None
        self._disrupted_at: float | None = None
        self._limit: int | None = None
        self._slow: int | None = None
        self._replacement: SlowReplacement | None = None
        self._last_step: tuple[int, int] | None = None
        self._last_step_at: float | None = now

    def report_losses(self, view: JobView, now: float) -> None:
        """Report the loss of a replica."""
        previous, self._disruptions = self._disruptions, view.disruptions
        if previous is not None and view.disruptions > previous:
            self._disrupted_at = now
        if self._disrupted_at is None:
            return
        # The other replicas are often the first to report the loss; the exit code of the lost replica
        # follows.
        exit_codes = {
            replica.replica: replica.exit_code
            for replica in view.replicas
            if replica.state is ReplicaState.LOST and replica.exit_code is not None
        }
        index = next((index for index, code in exit_codes.items() if code != EXIT_PEER_LOST), None)
        if index is not None:
            lost = f"The trainer of replica {index} was lost ({describe_exit(exit_codes[index])})"
        elif now - self._disrupted_at > LOSS_TIMEOUT:
            lost = "A replica was lost"
        else:
            return
        self._disrupted_at = None
        others = any(replica.holds for replica in view.replicas)
        effect = "the others keep their state" if others else "training restarts from the last checkpoint"
        self._display.message(f"{lost}; {effect}", "yellow")

    def report_limit(self, view: JobView) -> None:
        """Report that a batch did not fit into memory."""
        previous, self._limit = self._limit, view.local_bsz_limit
        if self._limit is not None and (previous is None or self._limit < previous):
            self._display.message(describe_limit(self._limit), "yellow")

    def report_slow(self, view: JobView) -> None:
        """Report that a replica is slow, or another one than before, or that a spare has its place."""
        slow, previous = view.slow, self._slow
        self._slow = slow.replica if slow is not None else None
        if slow is not None and slow.replica != previous:
            self._display.message(capitalized(str(slow)), "yellow")
        replacement, before = view.slow_replacement, self._replacement
        self._replacement = replacement
        if replacement is not None and replacement != before:
            self._display.message(capitalized(str(replacement)), "yellow")

    def report_generation(self, first: GainReport, downtime: float | None) -> None:
        """Report a new generation."""
        batch = f"local batch {local_batch(first.local_bsz, first.accumulation)}"
        after = "" if downtime is None else f", downtime {duration(downtime)}"
        self._display.message(
            f"Generation {first.generation} trains on {plural(first.replicas, 'replica')}: {batch}, "
            f"scale {trimmed(first.scale)}{after}"
        )

    def report_stall(self, view: JobView, now: float) -> None:
        """Report that no step was made for a while."""
        step = (view.latest.generation, view.latest.step) if view.latest else None
        if step != self._last_step:
            self._last_step, self._last_step_at = step, now
        elif self._last_step_at is not None and now - self._last_step_at > STALL_TIMEOUT:
            self._last_step_at = None
            self._display.message(f"No step for {STALL_TIMEOUT:.0f} s{self._position(view)}", "yellow")

    def _position(self, view: JobView) -> str:
        """Return where the replicas are, as their trainers report it; or else the last output."""
        if view.stall is not None:
            return f": {view.stall}. The log of a replica that is behind has its stack"
        agents = self._replicas.agents
        members = view.active.members if view.active is not None else ()
        first = members[0].replica if members else 0
        line = agents.log_tail(first, 1)
        return f"; the last output of replica {first} is: {line}" if line else ""
