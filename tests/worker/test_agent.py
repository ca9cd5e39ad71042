"""Agents with a real metrics service and real trainers, which receive real signals."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from adascale_controller.operator.runtime.certificate_keeper import make_authority
from adascale_core.failures import EXIT_CHECK_FAILED, EXIT_INVALID_PROGRAM, TerminationMessage
from support.certificates import tls_files
from support.fast_python import PYTHON
from support.launch import PROGRAM, TIMEOUT, AgentProcess, free_port, wait_until
from support.service import LONG, Job, Service

FAULTY_DEVICE = str(PROGRAM.with_name("faulty_device.py"))


def test_agents_with_tls_and_of_before_train_together_while_certificates_are_renewed(
    tmp_path: Path,
) -> None:
    """The service of an upgrade: replica 0 was started with http://, replica 1 with https://."""
    authority = make_authority(datetime.now(UTC) - timedelta(days=1))
    files = tls_files(tmp_path / "tls", authority)
    job = Job(tmp_path, Service(tmp_path, tls=files))
    try:
        job.service.allocate(1, 2)
        plain = {"ADASCALE_API_URL": job.service.url.replace("https://", "http://"), "ADASCALE_CA_FILE": ""}
        job.start(0, **LONG, **plain)
        (secure,) = job.start(1, **LONG)
        job.wait_for_training(1, replicas=2)
        files.issue(make_authority(datetime.now(UTC), authority))
        job.service.stop()
        job.service.start()  # so that both connect again, as after an upgrade
        job.service.allocate(2, 1)
        job.wait_for_training(2, replicas=1)
        job.service.allocate(3, 2)
        job.wait_for_training(3, replicas=2)
        assert "certificate" not in secure.log.read_text()
        wait_until(
            lambda: job.service.call("GET", "/gain")["generation"] == 3, "a report from the third generation"
        )
    finally:
        job.end()
        job.service.stop(signal.SIGKILL)


def test_a_replica_of_several_processes_does_not_join_if_the_device_of_one_of_them_is_faulty(
    service: Service, tmp_path: Path
) -> None:
    service.allocate(1, 1)
    options = {"ADASCALE_PROCESSES_PER_REPLICA": 2, "FAULTY": 1}
    agent = AgentProcess(
        0, tmp_path, service.environ, [*PYTHON, FAULTY_DEVICE, "sharded_members.py"], **options
    )
    try:
        assert agent.wait() == EXIT_CHECK_FAILED, agent.log.read_text()
    finally:
        agent.end()
    reason = "does not join: device cpu has failed its check: in a product of float32 matrices"
    assert reason in agent.log.read_text().splitlines()[-1]
    assert service.job()["replicas"] == []


def test_a_replica_whose_device_computes_wrong_results_does_not_join(job: Job) -> None:
    log = job.folder / "termination-log"
    job.service.allocate(1, 1)
    job.start(0, **LONG)
    job.wait_for_training(1)
    job.service.allocate(2, 2)
    options = {**LONG, "ADASCALE_TERMINATION_LOG": log, "ADASCALE_NODE_NAME": "node-7"}
    faulty = AgentProcess(
        1, job.folder, job.service.environ, [*PYTHON, FAULTY_DEVICE, "journal.py"], **options
    )
    job.agents.append(faulty)
    assert faulty.wait() == EXIT_CHECK_FAILED, job.logs()
    message = TerminationMessage.parse(log.read_text())
    assert message is not None
    assert (message.generation, message.exit_code) == (0, EXIT_CHECK_FAILED)
    found = re.match(
        r"replica 1 on node node-7 does not join: device cpu has failed its check: in a product of float32 "
        r"matrices, number 1 of 3, 1 of \d+ elements are wrong. Expected (-?\d+) at \[511, 511\], "
        r"got (-?\d+)\.0",
        message.log,
    )
    assert found is not None, message.log
    assert int(found[2]) == int(found[1]) + 1
    assert f"adascale-agent: {message.log}" in faulty.log.read_text()
    step = job.journal.last_step()
    wait_until(lambda: job.journal.last_step() > step, "a step of the other replica")
    assert job.generation() == 1
    assert (job.service.job()["failures"], job.service.job()["disruptions"]) == (0, 0)


def test_a_job_grows_shrinks_and_finishes(job: Job) -> None:
    """1 -> 2 -> 1 replicas, then the end of training, with the same agent for replica 0."""
    finish = job.folder / "finish"
    options = {**LONG, "ADASCALE_CHECKPOINT_INTERVAL": 1000, "FINISH_FILE": finish}
    job.service.allocate(1, 1)
    (first,) = job.start(0, **options)
    job.wait_for_training(1)
    job.service.allocate(2, 2)
    # Generation 1 continues while replica 1 has no agent.
    job.wait_for_training(1, steps=len(job.journal.attempts()[-1].steps) + 3)
    assert job.generation() == 1
    (second,) = job.start(1, **options)
    job.wait_for_training(2, replicas=2)
    job.service.allocate(3, 1)
    job.wait_for_training(3)
    second.process.terminate()
    assert second.wait() == 75
    begin = job.journal.attempts()[-1].begin
    wait_until(lambda: job.service.job()["latest"]["step"] > begin, "a report from generation 3")
    finish.touch()
    assert first.wait() == 0
    view = job.service.job()
    assert view["complete"]
    assert view["latest"]["step"] == job.journal.last_step()
    attempts = job.journal.attempts(0)
    assert [(attempt.generation, attempt.steps[0]["replicas"]) for attempt in attempts] == [
        (1, 1),
        (2, 2),
        (3, 1),
    ]
    assert len({attempt.pid for attempt in attempts}) == 1, "the trainer stays"
    steps = job.journal.effective()
    assert sorted(steps) == list(range(1, len(steps) + 1))
    assert [len(attempt.steps) for attempt in attempts] == [
        following.begin - attempt.begin for attempt, following in pairwise(attempts)
    ] + [len(attempts[-1].steps)], "a change of replicas undoes no step"
    assert (view["failures"], view["disruptions"]) == (0, 0)


@pytest.mark.slow
def test_an_agent_exits_with_the_code_of_its_failed_program_and_reports_the_last_lines(job: Job) -> None:
    job.service.allocate(1, 2)
    log = job.folder / "termination-log"
    first, second = job.start(0, 1, **LONG, FAIL_AT=4, FAIL_RANK=1, ADASCALE_TERMINATION_LOG=log)
    assert second.wait() == 1
    message = TerminationMessage.parse(log.read_text())
    assert message is not None
    assert message.exit_code == 1
    assert message.generation >= 1, "greater if the first was broken on a slow machine"
    assert message.log.endswith("ArithmeticError: made to fail at step 4")
    replicas = {
        replica["replica"]: replica
        for replica in wait_until(lambda: job.service.job()["replicas"], "the report")
    }
    assert replicas[1]["state"] == "failed"
    assert replicas[1]["exit_code"] == 1
    assert "ArithmeticError: made to fail at step 4" in replicas[1]["log"]
    assert first.process.poll() is None, "the agent of a replica that lost its peer continues"
    job.agents.remove(second)
    job.start(1, **LONG, FAIL_AT=4, FAIL_RANK=1)
    job.wait_for_training(message.generation + 1, replicas=2)
    view = job.service.job()
    assert view["failures"] == 1
    # On a slow machine, others may have been broken before and after the one that failed, also the newest.
    assert view["disruptions"] + view["failures"] <= view["active"]["generation"]


@pytest.mark.parametrize(
    ("command", "environ", "code", "message"),
    [
        (["no-such-program"], {}, 127, "'no-such-program' cannot be started: No such file or directory"),
        ([sys.executable], {"ADASCALE_REPLICA": "x"}, EXIT_INVALID_PROGRAM, "ADASCALE_REPLICA is 'x'"),
        (
            [sys.executable],
            {"ADASCALE_JOB_ID": "Not_A_Name"},
            EXIT_INVALID_PROGRAM,
            "'Not_A_Name' is not valid",
        ),
        (
            [sys.executable],
            {"ADASCALE_JOB_ID": "", "ADASCALE_API_URL": ""},
            EXIT_INVALID_PROGRAM,
            "an agent needs a metrics service",
        ),
    ],
)
def test_an_invalid_command_or_environment_is_an_error(
    service: Service, tmp_path: Path, command: list[str], environ: dict[str, str], code: int, message: str
) -> None:
    log = tmp_path / "termination-log"
    run = run_agent(service, *command, ADASCALE_TERMINATION_LOG=str(log), **environ)
    assert (run.returncode, message in run.stderr) == (code, True), run.stderr
    assert "Traceback" not in run.stderr
    written = TerminationMessage.parse(log.read_text())
    assert written is not None
    assert (written.generation, written.exit_code, message in written.log) == (0, code, True)


def test_a_service_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    start = time.monotonic()
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
        timeout=TIMEOUT,
        check=False,
    )
    assert run.returncode == 69
    assert "does not answer" in run.stderr
    assert "check ADASCALE_API_URL, and that the service runs" in run.stderr
    assert time.monotonic() - start > 1
    first_line, cause = log.read_text().split("\n")
    assert first_line == "before any generation: exit code 69"
    assert "does not answer" in cause


@pytest.mark.parametrize(
    ("script", "code", "log"),
    [
        (
            "echo no data; exit 3",
            3,
            "no data\n{command} ended before it called program_reentry (exit code 3)",
        ),
        ("true", 78, "{command} finished without calling program_reentry"),
        ("kill -SEGV $$", 139, "{command} ended before it called program_reentry (killed by SIGSEGV)"),
    ],
    ids=["fails", "makes no trainer", "crashes"],
)
def test_the_termination_message_states_why_an_agent_exits(
    service: Service, tmp_path: Path, script: str, code: int, log: str
) -> None:
    file = tmp_path / "termination-log"
    run = run_agent(service, "sh", "-c", script, ADASCALE_TERMINATION_LOG=str(file))
    assert "Traceback" not in run.stderr
    message = TerminationMessage.parse(file.read_text())
    assert message is not None
    assert (message.generation, message.exit_code, run.returncode) == (0, code, code)
    assert message.log.startswith(log.format(command=f"sh -c {script}"))


def test_a_termination_log_that_cannot_be_written_does_not_change_the_exit_code(service: Service) -> None:
    run = run_agent(service, "sh", "-c", "exit 3", ADASCALE_TERMINATION_LOG="/no/such/folder")
    assert run.returncode == 3
    assert "cannot write the termination message to /no/such/folder" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_an_agent_that_has_not_failed_writes_no_termination_message(job: Job) -> None:
    job.service.allocate(1, 1)
    log = job.folder / "termination-log"
    (first,) = job.start(0, **LONG, ADASCALE_TERMINATION_LOG=log)
    job.wait_for_training(1)
    first.process.terminate()
    assert first.wait() == 75
    (second,) = job.start(0, **{**LONG, "EPOCHS": 1}, ADASCALE_TERMINATION_LOG=log)
    assert second.wait() == 0
    assert not log.exists()


@pytest.mark.slow
def test_a_trainer_that_does_not_leave_in_time_is_killed(job: Job) -> None:
    job.service.allocate(1, 1)
    (agent,) = job.start(0, **{**LONG, "STEP_SECONDS": 1000}, ADASCALE_TERMINATION_GRACE=0.5)
    wait_until(job.journal.attempts, "the trainer")
    wait_until(lambda: job.generation() == 1, "the generation")
    agent.process.terminate()
    assert agent.wait() == 75
    assert "did not leave generation 1 in time" in agent.log.read_text()


def run_agent(service: Service, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run an agent until it exits by itself, before its program has a trainer."""
    service.allocate(1, 1)
    return subprocess.run(
        [sys.executable, "-m", "adascale_worker.agent", "--", *command],
        env={**os.environ, **service.environ, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@contextmanager
def first_process(*command: str, **environ: str) -> Iterator[int]:
    """Run an agent as the first process of a PID namespace, and yield its process id outside of it."""
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
            pytest.skip(f"no PID namespace can be created: {outer.stderr.read().strip()}")
        yield children(outer.pid)[0]
        assert outer.wait(TIMEOUT) == 75
    finally:
        outer.kill()
        outer.communicate()


def children(pid: int) -> list[int]:
    """Return the child processes of a process, with zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(stat.rsplit(")", 1)[1].split()[1]) == pid:
            found.append(int(path.parent.name))
    return found


def test_an_agent_with_process_id_1_reaps_orphans(job: Job) -> None:
    job.service.allocate(1, 1)
    marks = [job.folder / f"mark-{number}" for number in range(3)]
    script = " ".join(f"(sh -c 'sleep 0.2; touch {mark}' &);" for mark in marks)
    with first_process("sh", "-c", f"{script} exec sleep 1000", **job.service.environ) as agent:
        wait_until(lambda: all(mark.exists() for mark in marks), "the exit of the orphans")
        wait_until(lambda: len(children(agent)) == 1, "the reaping of the orphans")
        os.kill(agent, signal.SIGTERM)


def test_an_agent_with_process_id_1_exits_on_sigterm_while_it_imports(tmp_path: Path) -> None:
    """The kernel delivers to process 1 only the signals for which it has handlers."""
    (tmp_path / "urllib3.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('importing').touch()\ntime.sleep(1000)\n"
    )
    environ = {"PYTHONPATH": str(tmp_path), "ADASCALE_API_URL": "http://127.0.0.1:1", "ADASCALE_JOB_ID": "a"}
    with first_process("true", **environ) as agent:
        wait_until((tmp_path / "importing").exists, "the import")
        os.kill(agent, signal.SIGTERM)


def test_a_job_that_another_service_has_continued_saves_again(job: Job) -> None:
    """Its checkpoint is of a later generation than those of this service."""
    job.service.allocate(7, 1)
    (elsewhere,) = job.start(0, **LONG)
    job.wait_for_training(7)
    elsewhere.process.terminate()
    assert elsewhere.wait() == 75
    continued_at = job.journal.last_step()
    job.service.restart_without_data()

    job.service.allocate(1, 1)
    (agent,) = job.start(0, **LONG)
    job.wait_for_training(8)
    assert job.journal.attempts()[-1].begin == continued_at
    assert (job.generation(), job.service.job()["disruptions"]) == (8, 1)
    agent.process.terminate()
    assert agent.wait() == 75
    assert job.saved_step() == job.journal.last_step() > continued_at


@pytest.mark.slow
@pytest.mark.parametrize("comparison_interval", [0, 1000])
def test_replicas_with_slow_steps_exit_within_a_few_steps_of_sigterm(
    job: Job, comparison_interval: int
) -> None:
    """AdaScale measures every 16th step at most; the replicas must not wait for it."""
    options = {
        **LONG,
        "STEP_SECONDS": 0.06,
        "ADASCALE_CHECKPOINT_INTERVAL": 1000,
        "COMPARISON_INTERVAL": comparison_interval,
    }
    job.service.allocate(1, 2)
    _, second = job.start(0, 1, **options)
    job.wait_for_training(1, replicas=2, steps=130)  # from step 100 on, not every step is measured
    step = job.journal.last_step(1)
    second.process.terminate()
    assert second.wait() == 75
    assert job.journal.last_step(1) <= step + 4
