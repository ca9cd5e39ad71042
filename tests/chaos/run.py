"""A run of `adascale run` under a schedule of faults."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adascale_api.data.tables import SECONDS
from adascale_api.service.replica_seconds import STORE_INTERVAL
from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.local.replica_limit import request_limit
from adascale_controller.local.service_process import read_service
from adascale_controller.local.state_dir import StateDir
from adascale_core.errors import AdaScaleError
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.replica_seconds import Cause
from adascale_core.names import HEARTBEAT_INTERVAL
from chaos import network
from chaos.processes import MARK, Process, kill_all, processes, started
from chaos.schedule import Fault, Kind, Schedule
from e2e.local_run import write_job

PROGRAM = Path(__file__).parent / "program.py"
PACE = 0.005
"""Seconds that the program takes for a sample."""
POLL = 0.02
SEARCH = 0.2
"""Seconds between two searches for agents."""
MOST_REPLICAS = 4
"""Replicas of all schedules."""
PATIENCE = 4.0
"""Seconds to wait for a process that a fault needs."""
STALL = 100.0
"""Seconds without a step after which a run counts as hanging. The controller waits 40 s for old processes."""
LONGEST = 420.0
"""Seconds after which a run counts as hanging."""
LEAVE = 5.0
"""Seconds that the processes have to exit after `adascale run` has."""


@dataclass(frozen=True)
class Outcome:
    """What is left of a run.

    Args:
        problem: why the run did not end as it must; None if it did.
        output: of all processes of `adascale run`, in order.
        left: processes that were left, and killed.
        applied: a line for each applied fault.
        seconds: its duration.
        replica_time: the seconds of all agents, from the start of each to its end.
        unknown_time: the seconds of it that the service may have missed, because it or an agent was killed.
        replica_seconds: by cause, as the service has stored them.
    """

    problem: str | None
    output: str
    left: tuple[str, ...]
    applied: tuple[str, ...]
    seconds: float
    replica_time: float = 0.0
    unknown_time: float = 0.0
    replica_seconds: dict[str, float] = field(default_factory=dict)


class ChaosRun:
    """Starts `adascale run`, applies the faults, and waits for its end.

    Args:
        schedule: the job and the faults.
        folder: an empty folder for the job file, the state, the journals and the results.
        show: shows a line of progress.
        has_bug: whether the program loses a sample.
    """

    def __init__(
        self,
        schedule: Schedule,
        folder: Path,
        show: Callable[[str], None],
        has_bug: bool = False,
    ) -> None:
        self._schedule = schedule
        self._folder = folder
        self._state = StateDir(folder / "state")
        self._show = show
        self._has_bug = has_bug
        self._mark = f"{os.getpid()}-{folder.name}-{schedule.seed}."
        self._log = folder / "output"
        self._began = time.monotonic()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._applied: list[str] = []
        self._slow_rates: list[int] = []
        self._agents: dict[int, tuple[float, float]] = {}
        """When each agent was started, and seen last, in seconds since the start of the machine."""
        self._searched = self._unknown_time = 0.0
        self._unheard: dict[int, float] = {}
        """Since when nothing of an agent was stored any more, because `adascale run` was killed."""
        self._write_job(schedule.spec)
        self._controller = self._start()

    def execute(self) -> Outcome:
        """Run to the end, and return what is left."""
        try:
            problem = self._follow()
            if problem is not None:
                self._write_state()
            if problem is None:
                self._wait(lambda: not processes(self._mark), LEAVE)
            left = tuple(map(str, processes(self._mark)))
        finally:
            self._kill_all()
            for rate in [*self._slow_rates]:
                self._restore_network(rate)
        seconds = time.monotonic() - self._began
        replica_time = sum(last - first for first, last in self._agents.values())
        self._unknown_time += sum(self._agents[pid][1] - since for pid, since in self._unheard.items())
        return Outcome(
            problem,
            self._log.read_text(),
            left,
            tuple(self._applied),
            seconds,
            replica_time,
            self._unknown_time,
            read_replica_seconds(self._state.database),
        )

    # -- the process of `adascale run` ----------------------------------------------------------------------

    def _write_job(self, spec: dict[str, Any]) -> None:
        env = {
            "CHAOS_FOLDER": str(self._folder),
            "PACE": str(PACE),
            "CHAOS_BUG": "1" if self._has_bug else "",
            "CHAOS_DATA": self._schedule.data,
            "CHAOS_LOOP": self._schedule.loop,
        }
        fields = {"backoffLimit": 0, "checkpoint": {"intervalSeconds": 2}, **spec}
        write_job(self._folder / "job.yaml", ["python", str(PROGRAM)], env, name="chaos", **fields)

    def _start(self) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"}
        command = [sys.executable, "-m", "adascale_controller", "run", str(self._folder / "job.yaml")]
        # By default, as many processes with several per replica or with spares, so fewer replicas train.
        command += ["--replicas", str(MOST_REPLICAS + self._schedule.spares)]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--state-dir", str(self._state.path), "--port", "0"],
                env={**environ, MARK: self._mark},
                stdout=log,
                stderr=log,
            )

    def _restart(self, number: signal.Signals, spec: dict[str, Any] | None = None) -> None:
        """End `adascale run` by a signal, and start it again with the same state."""
        self._controller.send_signal(signal.SIGCONT)
        self._observe_agents()
        self._controller.send_signal(number)
        if number is signal.SIGKILL:
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            alive = [pid for pid, (_, last) in self._agents.items() if last > now - SEARCH]
            self._unheard.update(dict.fromkeys(alive, now - STORE_INTERVAL - HEARTBEAT_INTERVAL))
        # A process that is frozen for a while continues meanwhile.
        self._wait(lambda: self._controller.poll() is not None, 60)
        self._controller.wait(0)
        if self._controller.returncode == 0:
            return  # It had finished.
        if spec is not None:
            self._write_job(spec)
        self._controller = self._start()

    # -- the course of the run ------------------------------------------------------------------------------

    def _follow(self) -> str | None:
        faults = list(self._schedule.faults)
        target = float(self._schedule.spec["scaleInvariantSteps"])
        previous = last_step = time.monotonic()
        furthest, steps = 0.0, 0
        while True:
            now = time.monotonic()
            self._apply_later(now)
            self._observe_agents()
            code = self._controller.poll()
            if code is not None:
                return None if code == 0 else f"adascale run exited with code {code}"
            progress, recorded = self._progress()
            if recorded != steps:
                steps, last_step = recorded, now
            furthest = max(furthest, progress / target)
            if now - last_step > STALL:
                return f"no step for {STALL:.0f} s"
            if now - self._began > LONGEST:
                return f"not finished within {now - self._began:.0f} s"
            if faults:
                fault = faults[0]
                due = now - previous >= fault.delay if fault.progress is None else furthest >= fault.progress
                if due and self._apply(fault, patient=now - previous < PATIENCE):
                    faults.pop(0)
                    previous = time.monotonic()
            time.sleep(POLL)

    def _progress(self) -> tuple[float, int]:
        """Return the progress in the newest journal, and the size of all journals."""
        progress, size = 0.0, 0
        for journal in self._folder.glob("journal-*"):
            size += journal.stat().st_size
            with journal.open("rb") as file:
                file.seek(max(0, journal.stat().st_size - 400))
                lines = file.read().decode().splitlines(keepends=True)
            complete = [line for line in lines if line.endswith("\n") and line.startswith("{")]
            if complete:
                progress = max(progress, float(json.loads(complete[-1])["progress"]))
        return progress, size

    def _apply_later(self, now: float) -> None:
        due = [action for moment, action in self._later if moment <= now]
        self._later = [(moment, action) for moment, action in self._later if moment > now]
        for action in due:
            action()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._apply_later(time.monotonic())
            self._observe_agents()
            time.sleep(POLL)

    def _observe_agents(self) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now - self._searched > SEARCH:
            self._searched = now
            kinds = {each.pid: each.kind for each in processes(self._mark)}
            found = [pid for pid, kind in kinds.items() if kind == "agent"]
            for pid in self._agents.keys() & (kinds.keys() - {*found}):
                del self._agents[pid]  # It is a trainer, which had not begun its program before.
        else:
            found = [pid for pid in self._agents if Path(f"/proc/{pid}").exists()]
        for pid in found:
            self._agents[pid] = self._agents[pid][0] if pid in self._agents else started(pid) or now, now

    def _write_state(self) -> None:
        """Write the service's view of the job, and where the trainers are, into the folder."""
        found = processes(self._mark)
        service = read_service(self._state)
        token = next((each.token for each in found if each.token), "")
        (self._folder / "processes").write_text("\n".join(map(str, found)))
        if service is not None:
            with suppress(OSError):
                request = urllib.request.Request(
                    f"{service.url}/jobs/{service.job}", headers={"authorization": f"Bearer {token}"}
                )
                with urllib.request.urlopen(request, timeout=5) as answer:
                    (self._folder / "job.json").write_bytes(answer.read())
        for process in found:
            if process.kind == "trainer":
                process.send(signal.SIGUSR1)
        time.sleep(1)

    def _kill_all(self) -> None:
        kill_all(self._mark)
        self._controller.wait()

    # -- faults ---------------------------------------------------------------------------------------------

    def _apply(self, fault: Fault, *, patient: bool) -> bool:
        """Apply a fault; return whether it is done. While `patient`, wait for a process to apply it to."""
        if fault.kind is Kind.SLOW_NETWORK and not network.is_own():
            self._show(f"{fault}: left out, because this network is not the harness's own")
            return True
        what = self._act(fault)
        if what is None and patient:
            return False
        line = f"{time.monotonic() - self._began:6.2f} s  {fault}: {what or 'found none'}"
        self._applied.append(line)
        self._show(line)
        return True

    def _act(self, fault: Fault) -> str | None:
        """Apply a fault, and return what it was applied to; None if there is no such process."""
        match fault.kind:
            case Kind.KILL_CONTROLLER:
                self._restart(signal.SIGKILL)
                return "restarted"
            case Kind.INTERRUPT:
                self._restart(signal.SIGINT)
                return "restarted"
            case Kind.EDIT:
                self._restart(
                    signal.SIGINT if fault.target % 2 else signal.SIGKILL, self._schedule.later_spec
                )
                return f"restarted with {self._schedule.later_spec}"
            case Kind.SCALE:
                return self._scale(1 + fault.target % 4)
            case Kind.ALLOCATE:
                return self._allocate(fault.target)
        found = processes(self._mark)
        trainers = [each for each in found if each.kind == "trainer"]
        agents = [each for each in found if each.kind == "agent"]
        services = [each for each in found if each.kind == "service"]
        one_trainer, one_agent = _choose(trainers, fault.target), _choose(agents, fault.target)
        match fault.kind:
            case Kind.INTERRUPT_HOLD:
                killed = self._send(signal.SIGKILL, one_trainer)
                if killed is not None:
                    # For less time than a replacement needs to start.
                    time.sleep(0.2 + fault.target % 10 / 10)
                    self._restart(signal.SIGINT)
                return killed
            case Kind.KILL_TRAINER:
                return self._send(signal.SIGKILL, one_trainer)
            case Kind.KILL_TRAINERS:
                return self._send(signal.SIGKILL, trainers)
            case Kind.KILL_AGENT:
                return self._send(signal.SIGKILL, one_agent)
            case Kind.KILL_AGENTS:
                return self._send(signal.SIGKILL, agents)
            case Kind.KILL_SERVICE:
                return self._send(signal.SIGKILL, services)
            case Kind.TERMINATE_TRAINER:
                return self._send(signal.SIGTERM, one_trainer)
            case Kind.TERMINATE_AGENT:
                return self._send(signal.SIGTERM, one_agent)
            case Kind.FREEZE_TRAINER:
                return self._freeze(one_trainer, fault.seconds)
            case Kind.FREEZE_AGENT:
                children = [each for each in trainers if one_agent and each.parent == one_agent[0].pid]
                return self._freeze([*one_agent, *children], fault.seconds)
            case Kind.FREEZE_SERVICE:
                return self._freeze(services, fault.seconds)
            case Kind.FREEZE_CONTROLLER:
                return self._freeze([each for each in found if each.kind == "controller"], fault.seconds)
            case Kind.SLOW:
                for pulse in range(int(fault.seconds / 0.2)):
                    moment = time.monotonic() + 0.2 * pulse
                    self._later += [
                        (moment, lambda: self._send_again(signal.SIGSTOP, one_trainer)),
                        (moment + 0.14, lambda: self._send_again(signal.SIGCONT, one_trainer)),
                    ]
                return ", ".join(map(str, one_trainer)) or None
            case Kind.SLOW_NETWORK:
                return self._slow_network(network.RATES[fault.target % len(network.RATES)], fault.seconds)
        raise AssertionError(fault.kind)

    def _send(self, number: signal.Signals, targets: list[Process]) -> str | None:
        for process in targets:
            is_new = process.kind == "agent" and not self._has_trained(process)
            began = started(process.pid) if is_new else None
            process.send(number)
            # The interval of the heartbeats, and that in which the service stores what they bring.
            if process.kind == "agent":
                self._unknown_time += HEARTBEAT_INTERVAL
                if began is not None:
                    # It may not have registered before.
                    self._unknown_time += time.clock_gettime(time.CLOCK_BOOTTIME) - began
            elif process.kind == "service":
                self._unknown_time += STORE_INTERVAL
        return ", ".join(map(str, targets)) or None

    def _has_trained(self, agent: Process) -> bool:
        trainers = (each.pid for each in processes(self._mark) if each.parent == agent.pid)
        return any(list(self._folder.glob(f"journal-*-{pid}.jsonl")) for pid in trainers)

    def _freeze(self, targets: list[Process], seconds: float) -> str | None:
        self._later.append((time.monotonic() + seconds, lambda: self._send_again(signal.SIGCONT, targets)))
        return self._send(signal.SIGSTOP, targets)

    def _slow_network(self, rate: int, seconds: float) -> str:
        network.slow_down(rate)
        self._slow_rates.append(rate)
        self._later.append((time.monotonic() + seconds, lambda: self._restore_network(rate)))
        return f"{rate} kbit/s"

    def _restore_network(self, rate: int) -> None:
        self._slow_rates.remove(rate)
        self._show(f"the network is no longer slow, packets had to wait {network.restore(rate)} times")

    def _send_again(self, number: signal.Signals, targets: list[Process]) -> None:
        # Another process may have got the id of one that has exited since.
        alive = {each.pid for each in processes(self._mark)}
        self._send(number, [each for each in targets if each.pid in alive])

    def _scale(self, replicas: int) -> str | None:
        try:
            limit = request_limit(
                self._state, replicas, self._controller.pid, lambda: self._controller.poll() is None, 3.0
            )
        except AdaScaleError as error:
            return f"to {replicas}: {error}"
        return f"to {limit}" if limit is not None else f"to {replicas}, kept for later"

    def _allocate(self, choice: int) -> str | None:
        """Request another allocation, as another controller would."""
        service = read_service(self._state)
        token = next((each.token for each in processes(self._mark) if each.token), None)
        if service is None or token is None:
            return None
        spec = self._schedule.spec
        replicas = spec["minReplicas"] + choice % (spec["maxReplicas"] - spec["minReplicas"] + 1)
        client = MetricsServiceClient(service.url, token)
        try:
            generation = client.get_job(service.job).generation + 1
            client.allocate(service.job, Allocation(generation, replicas))
        except (ServiceError, AdaScaleError) as error:
            return f"{replicas} replicas: {error}"
        return f"generation {generation}, {replicas} replicas"


def _choose(candidates: list[Process], number: int) -> list[Process]:
    return [candidates[number % len(candidates)]] if candidates else []


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results that the trainers have written, in order of time."""
    files = sorted(folder.glob("result-*.json"), key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


def read_journals(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the steps that each trainer process has journalled, without incomplete lines."""
    journals = []
    for file in sorted(folder.glob("journal-*")):
        steps = []
        for line in file.read_text().splitlines(keepends=True):
            with suppress(ValueError):
                steps.append(json.loads(line))
        journals.append(steps)
    return journals


def read_replica_seconds(file: Path) -> dict[str, float]:
    columns = ", ".join(f"sum({name})" for name in SECONDS)
    with closing(sqlite3.connect(file)) as database:
        (row,) = database.execute(f"SELECT {columns} FROM replica_seconds")
    return {str(cause): seconds or 0.0 for cause, seconds in zip(Cause, row, strict=True)}
