"""Agents, with a real metrics service and real trainers, killed for real."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from adascale_core.termination_message import TerminationMessage
from support.launch import AgentProcess, Journal, free_port, wait_until
from support.service import Service

BOUNDS = json.dumps({"batch_size": 8, "max_batch_size": 16, "local_bsz_bounds": [4, 8]})
LONG = {"BOUNDS": BOUNDS, "EPOCHS": 10_000, "STEP_SECONDS": 0.02, "ADASCALE_CHECKPOINT_INTERVAL": 0}


SHORT = {**LONG, "ADASCALE_SCALE_INVARIANT_STEPS": 800, "ADASCALE_CHECKPOINT_INTERVAL": 1000}


class Job:
    """A job's service, its agents and what its trainers wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.service = Service(folder)
        self.journal = Journal(folder / "journal")
        self.agents: list[AgentProcess] = []

    def start(self, *ranks: int, **options: object) -> list[AgentProcess]:
        started = [AgentProcess(rank, self.folder, self.service.environ, **options) for rank in ranks]
        self.agents += started
        return started

    def trains_in(self, generation: int, replicas: int = 1, steps: int = 2) -> None:
        """Wait until all ranks of a generation have made some steps in it."""

        def trained(rank: int) -> bool:
            attempts = self.journal.attempts(rank)
            return any(one.header["generation"] == generation and len(one.steps) >= steps for one in attempts)

        wait_until(
            lambda: all(trained(rank) for rank in range(replicas)) or self.died(),
            f"training in generation {generation}",
        )
        assert not self.died(), self.logs()

    def died(self) -> bool:
        return any(agent.process.poll() not in (None, 0, 75) for agent in self.agents)

    def logs(self) -> str:
        return "\n".join(agent.log.read_text() for agent in self.agents)

    def generation(self) -> int:
        active = self.service.job()["active"]
        return active["generation"] if active else 0

    def trainer_pid(self, rank: int) -> int:
        return int(self.journal.attempts(rank)[-1].header["pid"])

    def end(self) -> None:
        for agent in self.agents:
            agent.end()
        self.service.stop(signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    running = Job(tmp_path)
    yield running
    running.end()


def gone(pid: int) -> Callable[[], bool]:
    def check() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"

    return check


def test_a_job_grows_shrinks_and_finishes(job: Job) -> None:
    """1 -> 2 -> 1, then the end, with one agent per replica that stays."""
    job.service.allocate(1, 1)
    (first,) = job.start(0, **SHORT)
    job.trains_in(1)
    job.service.allocate(2, 2)
    job.trains_in(1, steps=len(job.journal.attempts()[-1].steps) + 3)  # nobody there yet: it goes on
    assert job.generation() == 1
    (second,) = job.start(1, **SHORT)
    job.trains_in(2, replicas=2)
    job.service.allocate(3, 1)
    job.trains_in(3)
    second.process.terminate()
    assert second.wait() == 75
    assert first.wait() == 0
    assert job.service.job()["complete"]
    attempts = job.journal.attempts(0)
    assert [(one.header["generation"], one.header["replicas"]) for one in attempts] == [
        (1, 1),
        (2, 2),
        (3, 1),
    ]
    steps = job.journal.effective()
    assert sorted(steps) == list(range(1, len(steps) + 1))
    assert [len(one.steps) for one in attempts] == [
        later.header["step"] - one.header["step"] for one, later in pairwise(attempts)
    ] + [len(attempts[-1].steps)], "a change of replicas undoes no step"
    told = job.service.job()
    assert (told["failures"], told["disruptions"]) == (0, 0)
    assert told["latest"]["progress"] >= 800


def test_a_killed_trainer_costs_the_steps_since_the_last_checkpoint(job: Job) -> None:
    job.service.allocate(1, 2)
    job.start(0, 1, **LONG)
    job.trains_in(1, replicas=2, steps=5)
    os.kill(job.trainer_pid(1), signal.SIGKILL)
    job.trains_in(2, replicas=2)
    before, after = job.journal.attempts(0)
    assert before.steps[-1].step - after.header["step"] <= 2
    told = job.service.job()
    assert (told["failures"], told["disruptions"]) == (0, 1)
    assert all(agent.process.poll() is None for agent in job.agents)


def test_a_killed_agent_takes_its_trainer_with_it_and_can_be_replaced(job: Job) -> None:
    job.service.allocate(1, 2)
    _, second = job.start(0, 1, **LONG)
    job.trains_in(1, replicas=2)
    trainer = job.trainer_pid(1)
    second.process.kill()
    second.wait()
    job.agents.remove(second)
    wait_until(gone(trainer), "the end of the orphan")
    job.start(1, **LONG)
    job.trains_in(2, replicas=2)
    assert job.service.job()["failures"] == 0


def test_after_sigterm_a_replica_saves_and_the_others_continue_without_it(job: Job) -> None:
    job.service.allocate(1, 2)
    _, second = job.start(0, 1, **{**LONG, "ADASCALE_CHECKPOINT_INTERVAL": 1000})
    job.trains_in(1, replicas=2, steps=3)
    second.process.terminate()
    assert second.wait() == 75
    job.service.allocate(job.service.job()["desired"]["generation"] + 1, 1)
    job.trains_in(job.service.job()["desired"]["generation"])
    before, after = job.journal.attempts(0)
    assert before.steps[-1].step == after.header["step"], "saved at the very step it left at"


def test_an_agent_exits_with_the_code_of_its_failed_program_and_reports_the_last_lines(job: Job) -> None:
    job.service.allocate(1, 2)
    log = job.folder / "termination-log"
    first, second = job.start(0, 1, **LONG, FAIL_AT=4, FAIL_RANK=1, ADASCALE_TERMINATION_LOG=log)
    assert second.wait() == 1
    said = TerminationMessage.parse(log.read_text())
    assert said is not None
    assert (said.generation, said.exit_code) == (1, 1)
    assert said.log.endswith("ArithmeticError: made to fail at step 4")
    told = {one["rank"]: one for one in wait_until(lambda: job.service.job()["replicas"], "the report")}
    assert told[1]["state"] == "failed"
    assert told[1]["exit_code"] == 1
    assert "ArithmeticError: made to fail at step 4" in told[1]["log"]
    assert first.process.poll() is None, "only the failure itself counts, not its peers"
    job.agents.remove(second)
    job.start(1, **LONG, FAIL_AT=4, FAIL_RANK=1)
    job.trains_in(2, replicas=2)
    counts = job.service.job()
    assert (counts["failures"], counts["disruptions"]) == (1, 0)


def test_training_continues_while_the_service_is_down_and_reports_arrive_afterwards(job: Job) -> None:
    job.service.allocate(1, 1)
    job.start(0, **LONG)
    job.trains_in(1, steps=3)
    job.service.stop(signal.SIGKILL)
    step = job.journal.last_step()
    wait_until(lambda: job.journal.last_step() > step + 30, "training without the service")
    job.service.start()
    reached = job.journal.last_step()
    wait_until(lambda: job.service.job()["latest"]["step"] >= reached, "reports")
    history = job.service.call("GET", "/gain/history?points=5000")["points"]
    assert any(step < point["step"] < reached for point in history), "what was measured meanwhile is there"
    assert len(job.journal.attempts()) == 1, "the trainer has not been restarted"


def test_a_program_that_makes_no_trainer_is_an_error(job: Job, tmp_path: Path) -> None:
    job.service.allocate(1, 1)
    run = subprocess.run(
        [sys.executable, "-m", "adascale_worker.agent", "--", sys.executable, "-c", "print('hello')"],
        env={**os.environ, **job.service.environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 1
    assert "finished without making an ElasticTrainer" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("command", "environ", "code", "message"),
    [
        (["no-such-program"], {}, 127, "'no-such-program' cannot be started: No such file or directory"),
        ([sys.executable], {"ADASCALE_REPLICA": "x"}, 2, "ADASCALE_REPLICA is 'x'"),
        ([sys.executable], {"ADASCALE_JOB_ID": "Not_A_Name"}, 2, "'Not_A_Name' is not valid"),
        (
            [sys.executable],
            {"ADASCALE_JOB_ID": "", "ADASCALE_API_URL": ""},
            2,
            "an agent needs a metrics service",
        ),
    ],
)
def test_an_invalid_command_or_environment_is_an_error(
    job: Job, command: list[str], environ: dict[str, str], code: int, message: str
) -> None:
    job.service.allocate(1, 1)
    run = subprocess.run(
        [sys.executable, "-m", "adascale_worker.agent", "--", *command],
        env={**os.environ, **job.service.environ, **environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (run.returncode, message in run.stderr) == (code, True), run.stderr
    assert "Traceback" not in run.stderr


def test_a_service_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    began = time.monotonic()
    log = tmp_path / "termination-log"
    run = subprocess.run(
        [sys.executable, "-m", "adascale_worker.agent", "--", sys.executable],
        env={
            **os.environ,
            "ADASCALE_API_URL": f"http://127.0.0.1:{free_port()}",
            "ADASCALE_JOB_ID": "digits",
            "ADASCALE_SERVICE_TIMEOUT": "1",
            "ADASCALE_TERMINATION_LOG": str(log),
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 69
    assert "does not answer" in run.stderr
    assert "check ADASCALE_API_URL, and that the service runs" in run.stderr
    assert time.monotonic() - began > 1
    first, said = log.read_text().split("\n")
    assert first == "before any generation: exit code 69"
    assert "does not answer" in said


@pytest.mark.parametrize(
    ("command", "environ", "said"),
    [
        (
            ["sh", "-c", "echo no data; exit 3"],
            {},
            (3, "no data\nsh -c echo no data; exit 3 ended before it made an ElasticTrainer (exit code 3)"),
        ),
        (["true"], {}, (1, "true finished without making an ElasticTrainer")),
        (
            ["sh", "-c", "kill -SEGV $$"],
            {},
            (
                139,
                "sh -c kill -SEGV $$ ended before it made an ElasticTrainer (killed by SIGSEGV)",
            ),
        ),
        (["no-such"], {}, (127, "'no-such' cannot be started: No such file or directory")),
        (["true"], {"ADASCALE_REPLICA": "x"}, (2, "ADASCALE_REPLICA is 'x'")),
    ],
    ids=["fails", "makes no trainer", "crashes", "is not there", "misconfigured"],
)
def test_the_termination_message_states_why_an_agent_exits(
    job: Job, command: list[str], environ: dict[str, str], said: tuple[int, str]
) -> None:
    job.service.allocate(1, 1)
    log = job.folder / "termination-log"
    run = run_agent(job, *command, ADASCALE_TERMINATION_LOG=str(log), **environ)
    words = TerminationMessage.parse(log.read_text())
    assert words is not None
    assert (words.generation, words.exit_code) == (0, run.returncode)
    assert (words.exit_code, words.log[: len(said[1])]) == said


def test_a_termination_log_that_cannot_be_written_changes_nothing_else(job: Job) -> None:
    job.service.allocate(1, 1)
    run = run_agent(job, "sh", "-c", "exit 3", ADASCALE_TERMINATION_LOG="/no/such/folder")
    assert run.returncode == 3
    assert "cannot write the termination message to /no/such/folder" in run.stderr
    assert "Traceback" not in run.stderr


def test_an_agent_that_has_not_failed_writes_no_termination_message(job: Job) -> None:
    job.service.allocate(1, 1)
    log = job.folder / "termination-log"
    (first,) = job.start(0, **LONG, ADASCALE_TERMINATION_LOG=log)
    job.trains_in(1)
    first.process.terminate()
    assert first.wait() == 75
    (second,) = job.start(0, **{**LONG, "EPOCHS": 1}, ADASCALE_TERMINATION_LOG=log)
    assert second.wait() == 0
    assert not log.exists()


def test_a_trainer_that_does_not_leave_in_time_is_killed(job: Job) -> None:
    job.service.allocate(1, 1)
    (agent,) = job.start(0, **{**LONG, "STEP_SECONDS": 1000}, ADASCALE_TERMINATION_GRACE=0.5)
    wait_until(job.journal.attempts, "the trainer")
    wait_until(lambda: job.generation() == 1, "the generation")
    agent.process.terminate()
    assert agent.wait() == 75
    assert "did not leave generation 1 in time" in agent.log.read_text()


def test_edited_bounds_reach_the_trainers_of_the_next_generation(job: Job) -> None:
    """Both what is set anew and what is not set any more."""
    first = {"batch_size": 8, "max_batch_size": 16, "local_bsz_bounds": [4, 8]}
    job.service.call("PUT", "", {**first, "max_replicas": 4})
    job.service.allocate(1, 1)
    environ = {
        "ADASCALE_BATCH_SIZE": 8,
        "ADASCALE_MAX_BATCH_SIZE": 16,
        "ADASCALE_LOCAL_BSZ_BOUNDS": "4,8",
        "ADASCALE_SCALE_INVARIANT_STEPS": 10**9,
    }
    job.start(0, 1, **{**LONG, **environ})
    job.trains_in(1, steps=3)
    job.service.call("PUT", "", {"batch_size": 8, "local_bsz_bounds": [12, 24], "max_replicas": 4})
    step = job.journal.last_step()
    wait_until(lambda: job.journal.last_step() > step + 3, "training")
    assert job.journal.attempts()[-1].steps[-1].local_bsz <= 8, "a generation keeps what it began with"
    job.service.allocate(2, 2)
    job.trains_in(2, replicas=2)
    for rank in (0, 1):
        assert 12 <= job.journal.attempts(rank)[-1].steps[-1].local_bsz <= 24
    told = job.service.job()["active"]["spec"]
    assert (told["max_batch_size"], told["local_bsz_bounds"]) == (None, [12, 24])


def run_agent(job: Job, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """An agent that is expected to leave by itself."""
    return subprocess.run(
        [sys.executable, "-m", "adascale_worker.agent", "--", *command],
        env={**os.environ, **job.service.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def first_process(*command: str, **environ: str) -> Iterator[int]:
    """An agent as the first process of a container; its process id out here."""
    outer = subprocess.Popen(
        [
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *(sys.executable, "-m", "adascale_worker.agent", "--", *command),
        ],
        env={**os.environ, **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: outer.poll() is not None or children(outer.pid), "the first process")
        if outer.poll() is not None:
            assert outer.stderr is not None
            pytest.skip(f"there can be no other first process here: {outer.stderr.read().strip()}")
        yield children(outer.pid)[0]
        assert outer.wait(30) == 75
    finally:
        outer.kill()
        outer.communicate()


def children(pid: int) -> list[int]:
    """The children of a process, those among them that have ended and are not reaped yet."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            told = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(told.rsplit(")", 1)[1].split()[1]) == pid:
            found.append(int(path.parent.name))
    return found


def test_an_agent_with_process_id_1_reaps_orphans(job: Job) -> None:
    job.service.allocate(1, 1)
    marks = [job.folder / f"mark-{number}" for number in range(3)]
    script = " ".join(f"(sh -c 'sleep 0.2; touch {mark}' &);" for mark in marks)
    with first_process("sh", "-c", f"{script} exec sleep 1000", **job.service.environ) as agent:
        wait_until(lambda: all(mark.exists() for mark in marks), "the end of the orphans")
        wait_until(lambda: len(children(agent)) == 1, "their being reaped")
        os.kill(agent, signal.SIGTERM)


def test_an_agent_with_process_id_1_exits_on_sigterm_while_it_imports(tmp_path: Path) -> None:
    """The kernel keeps signals from it that it does not listen for."""
    (tmp_path / "urllib3.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('begun').touch()\ntime.sleep(1000)\n"
    )
    environ = {"PYTHONPATH": str(tmp_path), "ADASCALE_API_URL": "http://127.0.0.1:1", "ADASCALE_JOB_ID": "a"}
    with first_process("true", **environ) as agent:
        wait_until((tmp_path / "begun").exists, "the import")
        os.kill(agent, signal.SIGTERM)


@pytest.mark.slow
def test_agents_continue_with_a_service_that_has_lost_its_data(job: Job) -> None:
    job.service.allocate(1, 1)
    job.start(0, **LONG)
    job.trains_in(1, steps=3)
    job.service.stop(signal.SIGKILL)
    for path in job.folder.glob("api.sqlite*"):
        path.unlink()
    job.service.start()
    wait_until(job.service.job_exists, "the agent's registration")
    job.service.allocate(1, 1)  # published again: it is what runs already
    wait_until(lambda: job.generation() == 1, "the generation that runs")
    job.service.allocate(2, 2)
    job.start(1, **LONG)
    job.trains_in(2, replicas=2)
    assert len(job.journal.attempts()) == 2


@pytest.mark.slow
def test_a_job_that_finishes_before_a_generation_begins_finishes_on_all_replicas(job: Job) -> None:
    options = {**SHORT, "ADASCALE_SCALE_INVARIANT_STEPS": 200}
    job.service.allocate(1, 1)
    first, _ = job.start(0, 1, **options)
    job.trains_in(1)
    # Only a trainer that hurries to its end while the next generation begins leaves its peers waiting.
    wait_until(lambda: job.journal.last_step() >= 190, "the last steps")
    job.service.allocate(2, 2)
    assert [agent.wait() for agent in job.agents] == [0, 0]
    assert job.service.job()["complete"]
    assert first.process.returncode == 0


@pytest.mark.slow
def test_slow_steps_do_not_delay_leaving(job: Job) -> None:
    """AdaScale measures every 16th step at most; the replicas must not wait for it."""
    options = {**LONG, "STEP_SECONDS": 0.06, "ADASCALE_CHECKPOINT_INTERVAL": 1000}
    job.service.allocate(1, 2)
    _, second = job.start(0, 1, **options)
    job.trains_in(1, replicas=2, steps=130)  # from the 100th on, not all are measured
    step = job.journal.last_step(1)
    second.process.terminate()
    assert second.wait() == 75
    assert job.journal.last_step(1) <= step + 4
