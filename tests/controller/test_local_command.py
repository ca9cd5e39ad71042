"""The training program as it runs on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from adascale_controller.local.local_command import LocalCommandError, resolve_command
from adascale_controller.schema import JobDefinition
from adascale_core.messages.job_spec import JobSpec
from support.definitions import changed, define
from support.observed_jobs import checkpoint_settings

SPEC = JobSpec(4, 64, (4, 16), 1, 4, 1000)
COMMAND = "python", "-c", "pass"
JOB = define("default.digits", SPEC, COMMAND)


def job_with(**container: Any) -> JobDefinition:
    return define("default.digits", SPEC, COMMAND, container=container)


def test_python_is_the_interpreter_of_this_process(tmp_path: Path) -> None:
    local = resolve_command(JOB, tmp_path, {"PATH": "/bin"}, threads=2)
    assert local.command == (sys.executable, "-c", "pass")
    assert local.environ["PATH"] == f"{Path(sys.executable).parent}:/bin"


def test_the_environment_has_the_settings_of_the_job(tmp_path: Path) -> None:
    job = changed(JOB, checkpoint=checkpoint_settings(interval_seconds=2.5))
    environ = resolve_command(job, tmp_path, {}, threads=2).environ
    assert {name: value for name, value in environ.items() if name.startswith("ADASCALE_")} == {
        "ADASCALE_BATCH_SIZE": "4",
        "ADASCALE_MAX_BATCH_SIZE": "64",
        "ADASCALE_LOCAL_BSZ_BOUNDS": "4,16",
        "ADASCALE_SCALE_INVARIANT_STEPS": "1000",
        "ADASCALE_CHECKPOINT_INTERVAL": "2.5",
        "ADASCALE_CHECKPOINT_DIR": str(tmp_path),
        "ADASCALE_JOB_ID": "default.digits",
    }


def test_omp_num_threads_is_set_unless_the_user_has_set_it(tmp_path: Path) -> None:
    assert resolve_command(JOB, tmp_path, {}, threads=2).environ["OMP_NUM_THREADS"] == "2"
    assert resolve_command(JOB, tmp_path, {"OMP_NUM_THREADS": "7"}, 2).environ["OMP_NUM_THREADS"] == "7"


def test_references_to_variables_are_expanded_as_on_a_cluster(tmp_path: Path) -> None:
    env = {
        "EARLY": "$(WHO)",
        "WHO": "me",
        "PATH_TO": "$(WHO)/x",
        "DEEP": "$(PATH_TO)/$(ADASCALE_JOB_ID)",
        "SAVED": "$(ADASCALE_CHECKPOINT_DIR)",
        "ADASCALE_BATCH_SIZE": "5",
    }
    job = job_with(
        args=["-c", "$(WHO) $(ADASCALE_BATCH_SIZE) $(UNKNOWN) $$(WHO) $WHO"],
        command=["python"],
        env=[{"name": name, "value": value} for name, value in env.items()],
    )
    local = resolve_command(job, tmp_path, {}, 1)
    assert local.command[2] == "me 4 $(UNKNOWN) $(WHO) $WHO"
    assert {name: local.environ[name] for name in env} == {
        "EARLY": "$(WHO)",  # a variable may refer to those before it only
        "WHO": "me",
        "PATH_TO": "me/x",
        "DEEP": "me/x/default.digits",
        "SAVED": str(tmp_path),
        "ADASCALE_BATCH_SIZE": "4",
    }


def test_a_working_dir_that_does_not_exist_is_ignored(tmp_path: Path) -> None:
    existing = resolve_command(job_with(workingDir=str(tmp_path)), tmp_path, {}, 1)
    assert (existing.cwd, existing.ignored) == (tmp_path, ())
    missing = resolve_command(job_with(workingDir="/no/such/app"), tmp_path, {}, 1)
    assert missing.cwd == Path.cwd()
    assert missing.ignored == (f"workingDir /no/such/app, which does not exist here; using {Path.cwd()}",)


def test_variables_that_only_a_cluster_can_resolve_are_ignored(tmp_path: Path) -> None:
    env = [{"name": "PASSWORD", "valueFrom": {"secretKeyRef": {}}}, {"name": "A", "value": "x"}]
    local = resolve_command(job_with(env=env, envFrom=[{"configMapRef": {}}]), tmp_path, {}, 1)
    assert local.environ["A"] == "x"
    assert "PASSWORD" not in local.environ
    assert local.ignored == (
        "environment variable PASSWORD (valueFrom secretKeyRef)",
        "the environment variables of envFrom",
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ("no-such-program",),
            "the program 'no-such-program' of the job's command is missing or not executable: ",
        ),
        (
            ("python no/such.py",),
            "the program 'python no/such.py' of the job's command is missing or not executable: write each "
            "word of the command as an item of its own",
        ),
        (("./no-such-program",), "the program './no-such-program' of the job's command is missing or not"),
        (("python", "no/such.py"), "the script 'no/such.py' of the job's command does not exist in "),
    ],
)
def test_a_missing_program_is_an_error(tmp_path: Path, command: tuple[str, ...], message: str) -> None:
    with pytest.raises(LocalCommandError) as raised:
        resolve_command(define("default.digits", SPEC, command), tmp_path, {}, 1)
    assert str(raised.value).startswith(message)
    assert raised.value.exit_code == 2
