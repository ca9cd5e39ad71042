"""The loop of a run: looks at the job, acts on what is decided, and tells what happens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from signal import Signals as SignalNumber

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.formatting import count, duration, plural, trimmed
from adascale_controller.job import Job
from adascale_controller.local.display import Display, Status
from adascale_controller.local.replicas import Replicas
from adascale_controller.local.service_supervisor import ServiceSupervisor
from adascale_controller.local.stop_signals import StopSignals
from adascale_controller.measurements import JobMeasurements
from adascale_core.decision import decide
from adascale_core.exit_codes import EXIT_PEER_LOST, describe_exit
from adascale_core.messages import Allocation, GainReport, ReplicaState
from adascale_core.views import JobView

TICK = 0.25
"""Seconds between two rounds, unless the job's generations change before."""
DECISION_INTERVAL = 1.0
"""Seconds between two decisions."""
FINISH_TIMEOUT = 60.0
"""Seconds that the other replicas have to finish after the first one has."""
SILENCE = 30.0
"""Seconds without a step after which the user is pointed to the program's output."""
LOSS_TIMEOUT = 1.0
"""Seconds to wait for word of which replica was lost."""


@dataclass(frozen=True)
class RunResult:
    """Why the loop has ended.

    Args:
        words: for the user.
        exit_code: of the run.
        finished: whether the program has come to its end.
        log: the last lines of the program, where it failed.
    """

    words: str
    exit_code: int
    finished: bool = False
    log: str = ""


class Training:
    """Runs a job until it ends, or is to leave.

    Each round is the same phases: which agents have ended, what the service knows, what that means,
    whether to move, who must be started or may leave, and whether this is the end.

    Args:
        job: the job.
        service: what keeps the metrics service up.
        client: the way to it.
        replicas: the agents.
        capacity: how many replicas run at once at most.
        until: the progress at which to leave, where the user wants that.
        display: what the user sees.
        signals: by which the user asks to leave.
    """

    def __init__(
        self,
        job: Job,
        service: ServiceSupervisor,
        client: MetricsServiceClient,
        replicas: Replicas,
        capacity: int,
        until: float | None,
        display: Display,
        signals: StopSignals,
    ) -> None:
        self._job = job
        self._service = service
        self._client = client
        self._replicas = replicas
        self._capacity = capacity
        self._until = until
        self._display = display
        self._signals = signals
        self._measurements = JobMeasurements()
        self._began = time.monotonic()
        self._decided_at = self._began
        self._finished_at: float | None = None
        self._disruptions: int | None = None
        self._loss_since: float | None = None
        self._last_step: tuple[int, int] | None = None
        self._stepped_at: float | None = self._began

    @property
    def total(self) -> float | None:
        """The progress at which the run ends, if bounded."""
        ends = [end for end in (self._job.spec.scale_invariant_steps, self._until) if end is not None]
        return min(ends) if ends else None

    def begin(self) -> None:
        """Declare the job, and want the first allocation: the former one if it still fits.

        Raises:
            ServiceError: the service does not answer, or refuses.
        """
        self._client.declare_job(self._job.id, self._job.spec)
        view = self._client.get_job(self._job.id)
        if view.complete:
            # It has finished once and is to go on, for more steps; to the service, what is complete stays so.
            self._client.delete_job(self._job.id)
            self._client.declare_job(self._job.id, self._job.spec)
        state = self._measurements.job_state(self._job, view, self.total)
        decision = decide([state], self._capacity, time.monotonic())[self._job.id]
        first = Allocation(view.generation + 1, decision.replicas)
        self._client.allocate(self._job.id, first)
        self._measurements.ignore_before(first.generation)
        self._display.update(Status(f"starting {plural(decision.replicas, 'replica')}", total=self.total))

    def run(self) -> RunResult:
        """Go on until the end.

        Raises:
            ServiceProcessError: the service can't be kept up.
        """
        while True:
            ending = self._round(time.monotonic())
            if ending is not None:
                return ending
            self._service.wait(TICK)

    def show(self, doing: str) -> None:
        """Show where the job stands, and do nothing about it."""
        view = self._service.look()
        if view is not None:
            self._display.update(self._status(view, doing))

    def _round(self, now: float) -> RunResult | None:
        if self._signals.asked:
            return self._asked()
        self._replicas.collect()
        self._service.keep_up(now)
        view = self._service.look()
        if view is None:
            return None
        failed = self._replicas.mind(view, now)
        if failed is not None:
            return RunResult(failed.words, 1, log=failed.log)
        self._tell(view, now)
        self._move(view, now)
        self._replicas.staff(view, now)
        self._display.update(self._status(view))
        return self._end(view, now)

    # -- what is new ---------------------------------------------------------------------------------------

    def _tell(self, view: JobView, now: float) -> None:
        self._tell_of_losses(view, now)
        first = self._measurements.update(view, now)
        if first is not None:
            self._tell_of_generation(first)
        self._tell_of_silence(view, now)

    def _tell_of_losses(self, view: JobView, now: float) -> None:
        before, self._disruptions = self._disruptions, view.disruptions
        if before is not None and view.disruptions > before:
            self._loss_since = now
        if self._loss_since is None:
            return
        # Often its peers are the first to notice: wait a little for the one that was lost itself.
        lost = [
            one for one in view.replicas if one.state is ReplicaState.LOST and one.exit_code != EXIT_PEER_LOST
        ]
        if lost and lost[0].exit_code is not None:
            what = f"The trainer of replica {lost[0].rank} is gone ({describe_exit(lost[0].exit_code)})"
        elif now - self._loss_since > LOSS_TIMEOUT:
            what = "A replica is gone"
        else:
            return
        self._loss_since = None
        self._display.note(f"{what}; all re-enter from the last checkpoint", "yellow")

    def _tell_of_generation(self, first: GainReport) -> None:
        batch = f"local batch {first.local_bsz}"
        if first.accumulation > 1:
            batch += f" x {first.accumulation}"
        downtime = self._measurements.last_downtime
        after = "" if downtime is None else f", {duration(downtime)} after the last step"
        self._display.note(
            f"Generation {first.generation} trains on {plural(first.replicas, 'replica')}, {batch}, "
            f"scale {trimmed(first.scale)}{after}"
        )

    def _tell_of_silence(self, view: JobView, now: float) -> None:
        step = (view.latest.generation, view.latest.step) if view.latest else None
        if step != self._last_step:
            self._last_step, self._stepped_at = step, now
        elif self._stepped_at is not None and now - self._stepped_at > SILENCE:
            self._stepped_at = None
            said = self._replicas.agents.last_lines(0, 1)
            ends = f", whose output ends with: {said}" if said else ""
            self._display.note(f"No step was reported for {SILENCE:.0f} s by replica 0{ends}", "yellow")

    # -- moving --------------------------------------------------------------------------------------------

    def _move(self, view: JobView, now: float) -> None:
        """Want another count if that is decided."""
        if view.complete or view.desired is None or now - self._decided_at < DECISION_INTERVAL:
            return
        state = self._measurements.job_state(self._job, view, self.total)
        if state.stable_since is None:
            return
        self._decided_at = now
        decision = decide([state], self._capacity, now)[self._job.id]
        if decision.replicas in (0, view.desired.replicas):
            return
        try:
            self._client.allocate(self._job.id, Allocation(view.generation + 1, decision.replicas))
        except ServiceError:
            return  # The job has moved on meanwhile, or the service is away: the next round knows.
        self._display.note(
            f"Rescaling {view.desired.replicas} -> {decision.replicas}: {decision.reason}", "cyan"
        )

    # -- the end -------------------------------------------------------------------------------------------

    def _asked(self) -> RunResult:
        number = self._signals.first or SignalNumber.SIGTERM
        what = "Interrupted" if number is SignalNumber.SIGINT else f"Asked to leave ({number.name})"
        return RunResult(f"{what}: saving. Once more leaves at once", 128 + number)

    def _end(self, view: JobView, now: float) -> RunResult | None:
        progress = view.latest.progress if view.latest else 0.0
        if self._replicas.finished:
            self._finished_at = self._finished_at or now
            if self._replicas.all_gone or now - self._finished_at > FINISH_TIMEOUT:
                return RunResult("The program has finished", 0, finished=True)
            return None
        if self._until is not None and progress >= self._until:
            return RunResult(f"Progress {count(progress)} has reached {count(self._until)}: saving", 0)
        deadline = self._job.active_deadline_seconds
        if deadline is not None and now - self._began > deadline:
            return RunResult(f"activeDeadlineSeconds {deadline} are over: saving", 1)
        return None

    # -- the status ----------------------------------------------------------------------------------------

    def _status(self, view: JobView, doing: str = "") -> Status:
        report = view.latest
        if report is None:
            return Status(doing or "starting", total=self.total)
        left = None
        if self.total is not None and report.step_time > 0:
            left = (self.total - report.progress) * report.step_time / report.gain
        if not doing and view.desired and report.generation < view.desired.generation:
            now, then = report.replicas, view.desired.replicas
            doing = f"{now} -> {then} replicas" if now != then else "re-entering"
        return Status(doing, report.progress, self.total, report, left)
