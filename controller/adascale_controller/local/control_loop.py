"""The control loop of a run: observes the job, decides its replica count, starts and stops replicas."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, replace
from http import HTTPStatus

from adascale_client import MetricsServiceClient, ServiceError, ServiceRefusedError
from adascale_controller.formatting import capitalized, count, describe_batch, duration, plural, trimmed
from adascale_controller.job.phase import A_LOSS, describe_change, describe_feasibility, describe_loss
from adascale_controller.job.reasons import Reason
from adascale_controller.local.display import Display, RunStatus
from adascale_controller.local.machine import describe_contention
from adascale_controller.local.processes import StopSignals, has_message
from adascale_controller.local.replica_limit import ReplicaLimit, ScaleRequests
from adascale_controller.local.replicas import Replicas, RunResult
from adascale_controller.local.service_process import ServiceSupervisor
from adascale_controller.schedule.measurements import training_target
from adascale_controller.schedule.memory import lowest
from adascale_controller.schedule.standing import ExplanationSchedule
from adascale_controller.schema import JobDefinition
from adascale_core.decision.decide import Contender, Decision, Solution, decide
from adascale_core.decision.explanation import explain
from adascale_core.decision.job_utility import JobState
from adascale_core.messages.allocation import Allocation, SlowReplacement
from adascale_core.messages.reports import GainReport
from adascale_core.views.jobs import JobView

STALL_TIMEOUT = 35.0
"""Seconds without a step after which a message shows where the program is. Trainers report it after 30."""
LOSS_TIMEOUT = 1.0
"""Seconds to wait for the registration of the replica that was lost."""


INTERVAL = 0.25
"""Seconds between two iterations, unless the job's allocation changes before."""
DECISION_INTERVAL = 1.0
"""Seconds between two decisions."""
MAX_ATTEMPTS = 5
"""How often the first allocation is requested if others request allocations at the same time."""
FINISH_TIMEOUT = 60.0
"""Seconds that the other replicas have to finish after rank 0."""
DEADLINE_SETTLED = 30.0
"""Seconds for which a deadline cannot be met, or can be again, before that is shown. Predictions vary."""


class EventMessages:
    """Compares successive views of a job and prints a message for each event."""

    def __init__(self, replicas: Replicas, display: Display, now: float) -> None:
        self._replicas = replicas
        self._display = display
        self.first_generation = 0
        """That of this run, from which on losses are its own."""
        self._disruptions: int | None = None
        self._disrupted_at: float | None = None
        self._members = 0
        """The replicas of the generation before a loss."""
        self._slow: int | None = None
        self._names_contention = False
        self._replacement: SlowReplacement | None = None
        self._last_step: tuple[int, int] | None = None
        self._last_step_at: float | None = now

    def report_messages(self) -> None:
        """Show the warnings of the trainers."""
        for text in self._replicas.agents.messages.read():
            self._display.message(text, "yellow")

    def report_losses(self, view: JobView, now: float) -> None:
        """Report the loss of a replica."""
        if view.active is None or view.active.generation < self.first_generation:
            return
        previous, self._disruptions = self._disruptions, view.disruptions
        if previous is not None and view.disruptions > previous:
            self._disrupted_at = now
        if self._disrupted_at is None:
            self._members = view.active.replicas
            return
        lost = describe_loss(view)
        if lost is None and now - self._disrupted_at <= LOSS_TIMEOUT:
            return
        self._disrupted_at = None
        others = self._members > 1 and any(replica.holds for replica in view.replicas)
        self._display.message(
            f"{lost or A_LOSS}; {'the others keep their state' if others else 'restarting it'}", "yellow"
        )

    def report_slow(self, view: JobView) -> None:
        """Report that a replica is slow, or another one than before, or that a spare has its place."""
        slow, previous = view.slow, self._slow
        self._slow = slow.replica if slow is not None else None
        if slow is not None and slow.replica != previous:
            contention = describe_contention(view)
            if not contention or not self._names_contention:
                self._display.message(contention or capitalized(str(slow)), "yellow")
            self._names_contention = self._names_contention or bool(contention)
        replacement, before = view.slow_replacement, self._replacement
        self._replacement = replacement
        if replacement is not None and replacement != before:
            self._display.message(capitalized(str(replacement)), "yellow")

    def report_generation(self, first: GainReport, downtime: float | None) -> None:
        """Report a new generation."""
        after = "" if downtime is None else f", downtime {duration(downtime)}"
        self._display.message(
            f"Generation {first.generation} trains on {plural(first.replicas, 'replica')}: "
            f"{describe_batch(first)}, scale {trimmed(first.scale)}{after}"
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
        lines = agents.log_tail(first, 2)
        if not lines or has_message(lines):  # a message is shown already
            return ""
        return f"; the last output of replica {first} is: {lines.splitlines()[-1]}"


@dataclass(eq=False)
class LocalControlLoop:
    """Runs a job until it ends or the user stops it."""

    job: JobDefinition
    service: ServiceSupervisor
    client: MetricsServiceClient
    replicas: Replicas
    limit: ReplicaLimit
    until: float | None
    display: Display
    signals: StopSignals
    scale_requests: ScaleRequests
    saved_generation: int

    def __post_init__(self) -> None:
        self._memory = self.replicas.memory
        self._measurements = self._memory.measurements
        self._solution = Solution()
        self._started_at = time.monotonic()
        self._events = EventMessages(self.replicas, self.display, self._started_at)
        self._decided_at = self._started_at
        self._explanations = ExplanationSchedule()
        self._finished_at: float | None = None
        self._has_trained = False
        self._deadline_shown: Reason | None = None
        self._deadline_outcome: tuple[Reason | None, float] = None, self._started_at
        """Whether the deadline is predicted to be met, and since when that is predicted."""

    def start(self) -> None:
        """Declare the job to the metrics service and request its first allocation.

        Others may request allocations too, so it is requested again if another came before it.
        """
        self.limit = self.scale_requests.apply(self.limit)
        self.client.declare_job(self.job.id, self.job.declaration)
        view = self.client.get_job(self.job.id)
        if view.complete:
            # A finished job has more steps to make now. Only a new job can be incomplete again.
            self.client.delete_job(self.job.id)
            self.client.declare_job(self.job.id, self.job.declaration)
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            try:
                self._request_first(view)
            except ServiceRefusedError as error:
                if error.status != HTTPStatus.CONFLICT or not attempts_left:
                    raise
                view = self.client.get_job(self.job.id)
            else:
                return

    def _request_first(self, view: JobView) -> None:
        """Request the first allocation of this run."""
        total, now = self._total(view), time.monotonic()
        self._measurements.add_reported(view)
        decision = self._decide(self._state(view, now), now)
        # Trainers of an earlier generation than that of the checkpoint cannot replace it. The metrics service
        # may not know it, if its data were lost, or if the checkpoint is that of another state directory.
        generation = max(view.last_generation, self.saved_generation) + 1
        first = Allocation(generation, decision.replicas, spares=self.limit.spares)
        self.client.allocate(self.job.id, first)
        self._measurements.ignore_before(first.generation)
        self._events.first_generation = first.generation
        self.replicas.begin(view)
        self.display.update(RunStatus(f"starting {plural(decision.replicas, 'replica')}", total=total))

    def run(self) -> RunResult:
        """Iterate until the run ends."""
        while True:
            result = self._iterate(time.monotonic())
            if result is not None:
                return result
            self.service.wait_for_change(INTERVAL)

    def request_pause(self) -> None:
        """Request no replicas: when they end, the metrics service records a pause, and not their loss."""
        # Without an answer the replicas stop all the same.
        with contextlib.suppress(ServiceError):
            view = self.client.get_job(self.job.id)
            if not view.complete:
                self.client.allocate(self.job.id, Allocation(view.generation + 1, 0))

    def show_status(self, activity: str) -> None:
        """Show the job's status, without acting on it."""
        view = self.service.get_job()
        if view is not None:
            self.display.update(self._status(view, activity))

    def _iterate(self, now: float) -> RunResult | None:
        if self.signals.stop_requested:
            return self._stopped_by_user()
        self.replicas.collect_exits()
        self.service.restart_if_exited(now)
        view = self.service.get_job()
        if view is None:
            return None
        failure = self.replicas.handle_exits(view, now)
        if failure is not None:
            return failure
        self._measure(view, now)
        self.limit = self.scale_requests.apply(self.limit)
        self._reallocate(view, now)
        self.replicas.start_and_stop(view, now)
        self.display.update(self._status(view))
        return self._result(view, now)

    def _measure(self, view: JobView, now: float) -> None:
        self._events.report_messages()
        self._events.report_losses(view, now)
        self._events.report_slow(view)
        first_report = self._measurements.update(view, now)
        if first_report is not None:
            self._events.report_generation(first_report, self._downtime(first_report.generation))
        self._events.report_stall(view, now)

    def _downtime(self, generation: int) -> float | None:
        """Return the downtime before a generation, as the table of generations has it; None if unknown."""
        if not self._has_trained:
            self._has_trained = True  # before the first one of this run, the job was paused
            return None
        with contextlib.suppress(ServiceError):
            found = {each.generation: each for each in self.client.get_generations(self.job.id).generations}
            return found[generation].downtime if generation in found else None
        return None

    def _reallocate(self, view: JobView, now: float) -> None:
        """Request another replica count if the decision is for one."""
        if view.complete or view.desired is None or now - self._decided_at < DECISION_INTERVAL:
            return
        state = self._state(view, now)
        decision = self._decide(state, now)
        self._explain(now)
        self.report_deadline(decision, now)
        exceeds = state.limit is not None and state.replicas > state.limit
        if state.stable_since is None and not exceeds:
            return
        self._decided_at = now
        spares, desired = self.limit.spares, view.desired
        if not decision.replicas or (decision.replicas, spares) == (desired.replicas, desired.spares):
            return
        following = Allocation(view.generation + 1, decision.replicas, spares=spares)
        try:
            self.client.allocate(self.job.id, following)
        except ServiceError:
            return  # The next iteration decides again, from a new view.
        if decision.replicas == view.desired.replicas:
            return
        change = describe_change(desired.replicas, decision.replicas, decision.reason)
        self.display.message(change, "cyan")

    def _state(self, view: JobView, now: float) -> JobState:
        """Return the job as the decision sees it."""
        seconds = self.job.spec.completion_deadline_seconds
        due = None if seconds is None else self._started_at + seconds
        self._memory.observe_deadline(due, now, now)
        state = self._measurements.job_state(self.job.id, self.job.declaration, view, self._total(view))
        limits = [*self._memory.limits(lambda: 0, now)]
        if state.replicas > self.limit.replicas:
            limited = plural(self.limit.replicas, "replica")
            limits.append((self.limit.replicas, f"limited to {limited} by --replicas or `adascale scale`"))
        limit, reason = lowest(limits)
        return replace(state, deadline=self._memory.deadline, limit=limit, limit_reason=reason)

    def _decide(self, state: JobState, now: float) -> Decision:
        self._solution = decide([Contender(state)], self.limit.replicas, now, self._solution)
        return self._solution.decisions[self.job.id]

    def report_deadline(self, decision: Decision, now: float) -> None:
        """Show whether the replicas of this run can meet the deadline, if that is known and has changed."""
        seconds = self.job.spec.completion_deadline_seconds
        if seconds is None:
            return
        outlook = describe_feasibility(
            self.job,
            decision.feasibility,
            has_passed=now >= self._started_at + seconds,
            limit=self.limit.replicas,
        )
        if outlook is None:
            return
        outcome, text = outlook
        if outcome is not self._deadline_outcome[0]:
            self._deadline_outcome = outcome, now
        is_settled = now >= self._deadline_outcome[1] + DEADLINE_SETTLED
        is_first = outcome is Reason.COUNT_SUFFICES and self._deadline_shown is None
        is_over = outcome is Reason.DEADLINE_MISSED
        if outcome is not self._deadline_shown and (is_settled or is_first or is_over):
            self._deadline_shown = outcome
            self.display.message(text)

    def _explain(self, now: float) -> None:
        """Store the explained decision with the metrics service, if it is time to."""
        due = self._explanations.due(self._solution.decisions, now)
        for job, view in explain(self._solution, now, time.time(), due).items():
            try:
                self.client.put_decision(view)
            except ServiceError:
                self._explanations.repeat(job)

    def _stopped_by_user(self) -> RunResult:
        if self.signals.first is signal.SIGINT:
            message = "Interrupted: saving and stopping. Press Ctrl-C again to stop without saving"
        else:
            number = self.signals.first or signal.SIGTERM
            message = f"Received {number.name}: saving and stopping. A second signal stops without saving"
        return RunResult(message, self.signals.exit_code)

    def _result(self, view: JobView, now: float) -> RunResult | None:
        # A report of an earlier run may be of steps that were not saved.
        report = self._measurements.latest(view)
        progress = report.progress if report else 0.0
        if self.replicas.finished:
            self._finished_at = self._finished_at or now
            if not self.replicas.agents.ranks or now - self._finished_at > FINISH_TIMEOUT:
                return RunResult("", 0, finished=True)
            return None
        if self.until is not None and progress >= self.until:
            return RunResult(f"Progress {count(progress)} has reached --until {count(self.until)}: saving", 0)
        return None

    def _total(self, view: JobView) -> float | None:
        """Return the progress at which the run ends; None if it is not known."""
        ends = [end for end in (training_target(self.job.declaration, view), self.until) if end is not None]
        return min(ends) if ends else None

    def _status(self, view: JobView, activity: str = "") -> RunStatus:
        report, total = self._measurements.latest(view), self._total(view)
        if report is None:
            return RunStatus(activity or "starting", total=total)
        if not activity and view.desired and report.generation < view.desired.generation:
            before, after = report.replicas, view.desired.replicas
            activity = f"{before} -> {after} replicas" if before != after else "restarting"
        return RunStatus(activity, report.progress, total, report, report.seconds_left(total))
