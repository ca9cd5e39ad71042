"""Runs a job on this machine: sets up its parts, runs the control loop, and stops the processes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.job.phase import requested_stop
from adascale_controller.job_overview import describe_comparison
from adascale_controller.local.control_loop import LocalControlLoop
from adascale_controller.local.display import Display, LiveDisplay
from adascale_controller.local.local_command import LocalCommand, resolve_command
from adascale_controller.local.machine import cpu_cores, package_versions, visible_gpus
from adascale_controller.local.processes import StopSignals
from adascale_controller.local.replica_limit import ReplicaLimit, ScaleRequests, replica_limit
from adascale_controller.local.replicas import STOP_TIMEOUT, Agents, Replicas, RunResult
from adascale_controller.local.run_history import (
    RunRecord,
    record_end,
    record_start,
    register_folder,
    require_folder_of,
)
from adascale_controller.local.run_report import (
    completed_message,
    print_start,
    print_summary,
    summarize_generations,
)
from adascale_controller.local.service_process import (
    RunningService,
    ServiceProcess,
    ServiceSupervisor,
    listen,
    mark_stopping,
    page_url,
    remove_service,
    write_service,
)
from adascale_controller.local.state_dir import (
    DEFAULT_ROOT,
    CheckpointStorageError,
    StateDir,
    StateLock,
    location,
    newest_manifest,
)
from adascale_controller.schema import JobDefinition
from adascale_core import names
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.errors import AdaScaleError

MAX_HISTORY_POINTS = 5_000
"""The most reports that the table of generations is computed from."""

PAGE_INTERVAL = 2.5
"""Seconds within which an open page reads how the run has ended. Where nobody watches, there is none."""


@dataclass(frozen=True)
class RunOptions:
    """The options of `adascale run`."""

    replicas: int | None = None  # the most replicas at once; None for the machine's default
    until: int | None = None  # the progress at which to stop; None for the job's own end
    state_dir: Path | None = None  # the state folder; None for `.adascale/<namespace>.<name>`
    # the metrics service's port; None for the default port, or a free one if that is in use
    port: int | None = None
    fresh: bool = False  # whether to delete the saved state first


def run_job(job: JobDefinition, options: RunOptions, display: Display) -> int:
    """Run a job until it ends or the user stops it."""
    if (stop := requested_stop(job)) is not None:
        display.message(f"{job.short_id} is not run: {stop[1]}")
        return 0
    folder = StateDir(options.state_dir or DEFAULT_ROOT / job.id)
    chosen = job.checkpoint_url or job.spec.checkpoint.path
    checkpoints = location(chosen, folder.checkpoints)
    environ = _inherited_environ(os.environ)
    devices = visible_gpus(environ)
    limit = replica_limit(job, options.replicas, devices)
    processes = (limit.replicas + limit.spares) * (job.spec.processes_per_replica or 1)
    command = resolve_command(job, checkpoints, environ, max(1, cpu_cores() // processes))
    preferred = names.DEFAULT_API_PORT if options.port is None else options.port
    versions = package_versions()
    # A run that cannot have its port has not begun, and keeps the state of the run before.
    with (
        StopSignals() as signals,
        _locked(folder, job, display, signals) as lock,
        listen(preferred, required=options.port is not None) as listener,
    ):
        if options.fresh:
            folder.delete_saved_state(checkpoints)
        completed = completed_message(job, options.until, newest_manifest(checkpoints))
        if completed is not None:
            display.message(completed)
            return 0
        record = RunRecord(job.id, time.time(), job.declaration.steps, chosen, versions)
        run_starts = record_start(folder, record)
        _register(folder, display)
        run = _Run(job, options, display, signals, folder, checkpoints, lock, listener, run_starts)
        exit_code, reason, latest, comparison = 1, "", None, ""
        try:
            result = run.execute(command, environ, devices, limit)
            exit_code, reason = result.exit_code, result.reason
            latest, comparison = result.latest, result.comparison
        except Exception as error:
            exit_code = error.exit_code if isinstance(error, AdaScaleError) else 1
            reason = str(error) or type(error).__name__
            raise
        finally:
            record_end(folder, exit_code, time.time(), reason, latest, comparison)
        return exit_code


@contextmanager
def _locked(folder: StateDir, job: JobDefinition, display: Display, signals: StopSignals) -> Iterator[int]:
    """Create and lock the state folder of a job, and yield the descriptor of its lock."""
    folder.create()
    lock = StateLock(folder, display.message, lambda: signals.stop_requested)
    try:
        # `adascale rm` may have deleted it meanwhile.
        folder.create()
        require_folder_of(folder, job.id)
        yield lock.descriptor
    finally:
        lock.release()


def _register(folder: StateDir, display: Display) -> None:
    """Add the folder to those in which `adascale list` and `adascale ui` find runs."""
    try:
        register_folder(folder.path)
    except (OSError, RuntimeError, ValueError) as error:
        display.message(
            f"`adascale list` will find this run only with --state-dir {folder.path}: {error}", "yellow"
        )


def _inherited_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for child processes: without the settings of another job."""
    return {name: value for name, value in environ.items() if not name.startswith("ADASCALE_")}


@dataclass(frozen=True)
class _Run:
    """A run, from the start of the metrics service to its end."""

    job: JobDefinition
    options: RunOptions
    display: Display
    signals: StopSignals
    folder: StateDir
    checkpoints: Path | str
    lock: int  # the descriptor of the lock of the folder
    listener: socket.socket  # at the address of the metrics service
    run_starts: Sequence[float]  # of this run and of those before
    started_at: float = field(default_factory=time.monotonic)

    def execute(
        self, command: LocalCommand, environ: Mapping[str, str], devices: Sequence[str], limit: ReplicaLimit
    ) -> RunResult:
        """Start the metrics service, train, and stop all processes."""
        folder, job = self.folder, self.job
        options = ["--database", f"sqlite:///{quote(os.fsencode(folder.database.absolute()))}"]
        options += ["--logs", str(folder.logs.absolute())]
        service = ServiceProcess(folder, options, environ, self.listener, [self.lock])
        try:
            if not service.start(lambda: self.signals.stop_requested):
                self.display.message("Stopped before training started")
                return RunResult("", self.signals.exit_code)
            running = RunningService(service.url, os.getpid(), job.id, read_token=service.read_token)
            write_service(folder, running)
            checkpoint = newest_manifest(self.checkpoints)
            page = page_url(service.url, service.read_token, job.id)
            print_start(self.display, job, service.url, page, folder, limit, command, checkpoint)
            result = self._train(command, devices, limit, service, checkpoint)
            if isinstance(self.display, LiveDisplay):
                time.sleep(PAGE_INTERVAL)
            return result
        finally:
            service.stop()
            remove_service(folder)

    def _train(
        self,
        command: LocalCommand,
        devices: Sequence[str],
        limit: ReplicaLimit,
        service: ServiceProcess,
        checkpoint: Manifest | None,
    ) -> RunResult:
        job, display, signals = self.job, self.display, self.signals
        client = MetricsServiceClient(service.url, service.token)
        environ = {
            names.ENV_JOB_ID: job.id,
            names.ENV_API_URL: service.url,
            names.ENV_TOKEN: service.token,
        }
        if checkpoint is not None:
            # A job on a cluster may have saved it, and this run continues that job.
            environ[names.ENV_INCARNATION] = str(checkpoint.incarnation)
        agents = Agents(command, environ, devices, self.folder, self.lock)
        loop = LocalControlLoop(
            job,
            ServiceSupervisor(service, client, job.id, display, signals),
            client,
            Replicas(agents, job, display),
            limit,
            self.options.until,
            display,
            signals,
            ScaleRequests(self.folder, job, devices, display),
            checkpoint.generation if checkpoint is not None else 0,
        )
        try:
            loop.start()
            result = loop.run()
            result = replace(result, stopped_at=time.time())
            self._stop(result, loop, agents)
            return self._summarize(result, client)
        finally:
            display.close()
            if agents.ranks:
                agents.stop_all(lambda: signals.kill_requested, lambda: None)
            client.close()

    def _stop(self, result: RunResult, loop: LocalControlLoop, agents: Agents) -> None:
        """Stop the agents that still run, after they have saved."""
        if result.message:
            self.display.message(result.message, "red" if result.end else "")
        mark_stopping(self.folder)
        if not agents.ranks:
            return
        loop.request_pause()
        killed = agents.stop_all(lambda: self.signals.kill_requested, lambda: loop.show_status("saving"))
        if killed:
            names = ", ".join(str(agent_exit.rank) for agent_exit in killed)
            plural = len(killed) > 1
            when = "immediately" if self.signals.kill_requested else f"after {STOP_TIMEOUT:.0f} s"
            self.display.message(
                f"Killed {when}: replica{'s' * plural} {names}. {'Their' if plural else 'Its'} steps since "
                "the last checkpoint are lost",
                "yellow",
            )

    def _summarize(self, result: RunResult, client: MetricsServiceClient) -> RunResult:
        """Print the end of the run, and return the result with its last report."""
        self.display.close()
        try:
            reports = client.get_history(self.job.id, MAX_HISTORY_POINTS).points
            comparison = describe_comparison(client.get_generations(self.job.id).comparison)
        except ServiceError as error:
            self.display.message(f"Cannot show the table of generations: {error}", "yellow")
            reports, comparison = (), ""
        latest = reports[-1] if reports else None
        result = replace(result, latest=latest, comparison=comparison)
        try:
            checkpoint = newest_manifest(self.checkpoints)
        except CheckpointStorageError as error:
            self.display.message(f"Cannot show what is saved: {error}", "yellow")
            return result
        print_summary(
            self.display,
            result,
            summarize_generations(reports, self.run_starts),
            checkpoint,
            latest.progress if latest is not None else None,
            time.monotonic() - self.started_at,
        )
        return result
