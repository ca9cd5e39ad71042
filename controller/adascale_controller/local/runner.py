"""One run of a job on this machine, from the job file to the last line.

Here everything is put together and taken apart again; what happens in between is `training`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adascale_client import MetricsServiceClient
from adascale_controller.formatting import plural
from adascale_controller.job import Job
from adascale_controller.local import checkpoints, machine
from adascale_controller.local.agents import LEAVE_TIMEOUT, Agents
from adascale_controller.local.control_loop import RunResult, Training
from adascale_controller.local.display import Display
from adascale_controller.local.generations import summarize
from adascale_controller.local.local_command import LocalCommand, resolve_command
from adascale_controller.local.replicas import Replicas
from adascale_controller.local.run_report import already_done, conclude, introduce
from adascale_controller.local.service_process import ServiceProcess, choose_port
from adascale_controller.local.service_supervisor import ServiceSupervisor
from adascale_controller.local.state_dir import DEFAULT_ROOT, Lock, StateDir
from adascale_controller.local.stop_signals import StopSignals
from adascale_core import names
from adascale_core.batch import require_valid_replicas
from adascale_core.errors import AdaScaleError

HISTORY_POINTS = 5_000
"""Reports that the table at the end is made of, at most."""


class CapacityError(AdaScaleError):
    """A job that needs more replicas at once than there may be."""

    exit_code = 2


@dataclass(frozen=True)
class RunOptions:
    """What the user says of a run, besides the job.

    Args:
        replicas: the most replicas at once; none: as this machine suggests.
        until: the progress at which to stop; none: the job's own.
        state_dir: the state folder; none: `.adascale/<namespace>.<name>`.
        port: where the metrics service listens; none: at the usual port, or any free one.
        fresh: whether to begin anew.
    """

    replicas: int | None = None
    until: int | None = None
    state_dir: Path | None = None
    port: int | None = None
    fresh: bool = False


def run_job(job: Job, options: RunOptions, display: Display) -> int:
    """Run a job until it ends or the user has it leave.

    Returns:
        the exit code.

    Raises:
        AdaScaleError: it can't be run.
    """
    if job.suspend:
        display.note(f"{job.short_id} is suspended (spec.suspend), so it does not run")
        return 0
    if job.replicas == 0:
        display.note(f"{job.short_id} is scaled to no replicas (spec.replicas is 0), so it does not run")
        return 0
    folder = StateDir(options.state_dir or DEFAULT_ROOT / job.id)
    saved_at = Path(job.checkpoint.path) if job.checkpoint.path else folder.checkpoints
    environ = _inherited(os.environ)
    devices = machine.gpus(environ)
    capacity = max_concurrent_replicas(job, options, devices)
    program = resolve_command(job, saved_at, environ, max(1, machine.cores() // capacity))
    with StopSignals() as signals:
        folder.create()
        lock = Lock(folder, display.note, lambda: signals.asked)
        try:
            if options.fresh:
                folder.forget(saved_at)
            done = already_done(job, options.until, checkpoints.newest(saved_at))
            if done is not None:
                display.note(done)
                return 0
            run = _Run(job, options, display, signals, folder, saved_at, lock)
            return run.go(program, environ, devices, capacity)
        finally:
            lock.release()


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What our processes inherit of the environment: nothing that is set there for another job."""
    return {name: value for name, value in environ.items() if not name.startswith("ADASCALE_")}


def max_concurrent_replicas(job: Job, options: RunOptions, devices: list[str]) -> int:
    """How many replicas run at once at most.

    Raises:
        CapacityError: fewer than the job needs, or more than there are GPUs for.
    """
    capacity = options.replicas or machine.default_capacity(devices)
    if devices and capacity > len(devices):
        raise CapacityError(
            f"--replicas {capacity} is more than the {plural(len(devices), 'GPU')} of this machine, and each "
            "replica needs its own; set CUDA_VISIBLE_DEVICES= (to nothing) to train on the CPU"
        )
    spec = job.spec
    fewest = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)[0]
    if fewest > capacity:
        source = f"--replicas is {capacity}" if options.replicas else f"this machine has room for {capacity}"
        raise CapacityError(
            f"{job.short_id} needs at least {plural(fewest, 'replica')} at once, and {source}: "
            f"give --replicas {fewest} or more, or lower spec.minReplicas"
        )
    cap = spec.max_replicas if job.replicas is None else job.replicas
    if fewest > cap:
        raise CapacityError(
            f"{job.short_id} needs at least {plural(fewest, 'replica')} at once, and spec.replicas is {cap}: "
            f"raise spec.replicas to {fewest} or more, or lower spec.minReplicas"
        )
    return min(capacity, cap, spec.max_replicas)


class _Run:
    """What belongs to one run while it lasts."""

    def __init__(
        self,
        job: Job,
        options: RunOptions,
        display: Display,
        signals: StopSignals,
        folder: StateDir,
        saved_at: Path,
        lock: Lock,
    ) -> None:
        self._job = job
        self._options = options
        self._display = display
        self._signals = signals
        self._folder = folder
        self._saved_at = saved_at
        self._lock = lock
        self._began = time.monotonic()
        self._runs = folder.begin_run(job.id, time.time())

    def go(self, program: LocalCommand, environ: Mapping[str, str], devices: list[str], capacity: int) -> int:
        """Start everything, train, and end everything; the exit code."""
        asked = self._options.port
        port = choose_port(names.DEFAULT_API_PORT if asked is None else asked, insist=asked is not None)
        process = ServiceProcess(self._folder, environ, port, self._lock.descriptor)
        try:
            if not process.start(lambda: self._signals.asked):
                return self._leave_before_start()
            self._folder.announce(process.url, self._job.id)
            saved = checkpoints.newest(self._saved_at)
            introduce(self._display, self._job, process.url, self._folder, capacity, program, saved)
            return self._train(program, devices, capacity, process)
        finally:
            process.stop()
            self._folder.withdraw()

    def _train(
        self, program: LocalCommand, devices: list[str], capacity: int, process: ServiceProcess
    ) -> int:
        job, display, signals = self._job, self._display, self._signals
        client = MetricsServiceClient(process.url, process.token)
        environ = {
            names.ENV_JOB_ID: job.id,
            names.ENV_API_URL: process.url,
            names.ENV_TOKEN: process.token,
        }
        agents = Agents(program, environ, devices, self._folder, self._lock.descriptor)
        training = Training(
            job,
            ServiceSupervisor(process, client, job.id, display, signals),
            client,
            Replicas(agents, job.backoff_limit, display),
            capacity,
            self._options.until,
            display,
            signals,
        )
        try:
            training.begin()
            ending = training.run()
            self._leave(ending, training, agents)
            self._conclude(ending, client)
            return ending.exit_code
        finally:
            display.close()
            if agents.ranks:
                agents.leave(lambda: signals.hurry, lambda: None)
            client.close()

    def _leave(self, ending: RunResult, training: Training, agents: Agents) -> None:
        """Have the agents save and leave, unless they have."""
        if not ending.finished:
            self._display.note(ending.words, "red" if ending.log else "")
        if not agents.ranks:
            return
        killed = agents.leave(lambda: self._signals.hurry, lambda: training.show("saving"))
        if killed:
            which = ", ".join(str(one.rank) for one in killed)
            why = "at once" if self._signals.hurry else f"after {LEAVE_TIMEOUT:.0f} s"
            self._display.note(
                f"Ended {why}, so its steps since the last checkpoint are lost: replica {which}", "yellow"
            )

    def _leave_before_start(self) -> int:
        number = self._signals.first
        assert number is not None
        self._display.note("Asked to leave before anything had begun")
        return 128 + number

    def _conclude(self, ending: RunResult, client: MetricsServiceClient) -> None:
        self._display.close()
        try:
            reports = list(client.get_history(self._job.id, HISTORY_POINTS).points)
        except AdaScaleError as error:
            self._display.note(f"There is no table of the generations: {error}", "yellow")
            reports = []
        conclude(
            self._display,
            ending,
            summarize(reports, self._runs),
            checkpoints.newest(self._saved_at),
            time.monotonic() - self._began,
        )
