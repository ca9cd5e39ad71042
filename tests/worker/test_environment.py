"""Environment variables: what they may say, and what is told when they do not."""

import json
import re
import socket
from pathlib import Path

import pytest

from adascale_worker.environment import (
    JobSettings,
    RankAssignment,
    ServiceAddress,
    read_assignment,
    read_generation,
    read_incarnation,
    read_job_settings,
    read_service,
    read_termination_grace,
    read_termination_log,
    wait_for_assignment,
)
from adascale_worker.errors import EnvironmentVariableError


def test_nothing_told_is_one_process_off_any_service() -> None:
    assert read_assignment({}) == RankAssignment(
        rank=0, replicas=1, local_rank=0, master_addr=None, master_port=None
    )
    assert read_job_settings({}) == JobSettings()
    assert read_service({}) is None
    assert read_generation({}) == 0


def test_torchruns_variables_are_understood() -> None:
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert read_assignment(environ) == RankAssignment(3, 4, 1, "10.0.0.1", 29500)


def test_the_job_is_read() -> None:
    environ = {
        "ADASCALE_BATCH_SIZE": "32",
        "ADASCALE_MAX_BATCH_SIZE": "512",
        "ADASCALE_LOCAL_BSZ_BOUNDS": "16,128",
        "ADASCALE_EFFICIENCY_TARGET": "0.5",
        "ADASCALE_SCALE_INVARIANT_STEPS": "20000",
        "ADASCALE_CHECKPOINT_DIR": "/state",
        "ADASCALE_CHECKPOINT_INTERVAL": "2.5",
    }
    assert read_job_settings(environ) == JobSettings(32, 512, (16, 128), 0.5, 20000, Path("/state"), 2.5)


def test_a_service_has_a_full_job_id_and_a_url_without_slash() -> None:
    told = read_service(
        {"ADASCALE_API_URL": "http://api:80/", "ADASCALE_JOB_ID": "digits", "ADASCALE_TOKEN": "t"}
    )
    assert told == ServiceAddress("http://api:80", "default.digits", token="t")
    with_file = read_service(
        {"ADASCALE_API_URL": "http://api", "ADASCALE_JOB_ID": "digits", "ADASCALE_TOKEN_FILE": "/run/token"}
    )
    assert with_file == ServiceAddress("http://api", "default.digits", token_file=Path("/run/token"))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "one"}, "RANK is 'one': it must be a whole number from 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 but WORLD_SIZE is 2: ranks go from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0': it must be a whole number from 1"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
        ({"ADASCALE_BATCH_SIZE": "3.5"}, "ADASCALE_BATCH_SIZE is '3.5': it must be a whole number from 1"),
        ({"ADASCALE_LOCAL_BSZ_BOUNDS": "16"}, "it must be two whole numbers, 'lower,upper'"),
        ({"ADASCALE_LOCAL_BSZ_BOUNDS": "16,x"}, "ADASCALE_LOCAL_BSZ_BOUNDS is '16,x'"),
        ({"ADASCALE_EFFICIENCY_TARGET": "0"}, "it must be above 0 and at most 1"),
        ({"ADASCALE_EFFICIENCY_TARGET": "nan"}, "it must be above 0 and at most 1"),
        ({"ADASCALE_CHECKPOINT_INTERVAL": "soon"}, "it must be a number of seconds"),
        ({"ADASCALE_CHECKPOINT_INTERVAL": "inf"}, "it must be a number of seconds, not negative"),
        ({"ADASCALE_API_URL": "http://api"}, "ADASCALE_API_URL is set but ADASCALE_JOB_ID is not"),
        ({"ADASCALE_JOB_ID": "digits"}, "ADASCALE_JOB_ID is set but ADASCALE_API_URL is not"),
    ],
)
def test_what_is_not_understood_is_told_by_name(environ: dict[str, str], message: str) -> None:
    def read_all() -> None:
        read_assignment(environ)
        read_job_settings(environ)
        read_service(environ)

    with pytest.raises(EnvironmentVariableError, match=re.escape(message)):
        read_all()


def test_what_only_an_agent_is_told_is_read() -> None:
    assert read_termination_log({}) is None
    assert read_termination_log({"ADASCALE_TERMINATION_LOG": "/dev/termination-log"}) == Path(
        "/dev/termination-log"
    )
    assert read_termination_grace({}) == 25
    assert read_termination_grace({"ADASCALE_TERMINATION_GRACE": "115"}) == 115
    assert read_incarnation({}) == 0
    assert read_incarnation({"ADASCALE_INCARNATION": "1790000000"}) == 1790000000
    with pytest.raises(EnvironmentVariableError, match=r"ADASCALE_INCARNATION is '-1': .* from 0"):
        read_incarnation({"ADASCALE_INCARNATION": "-1"})
    with pytest.raises(EnvironmentVariableError, match="ADASCALE_TERMINATION_GRACE is 'soon'"):
        read_termination_grace({"ADASCALE_TERMINATION_GRACE": "soon"})


def test_a_place_sets_variables_and_takes_away_those_that_are_none() -> None:
    agent, trainer = socket.socketpair()
    environ = {
        "ADASCALE_AGENT_FD": str(trainer.detach()),
        "ADASCALE_MAX_BATCH_SIZE": "64",
        "ADASCALE_BATCH_SIZE": "8",
    }
    with agent:
        told = {"RANK": "1", "ADASCALE_MAX_BATCH_SIZE": None, "ADASCALE_LOCAL_BSZ_BOUNDS": None}
        agent.sendall(json.dumps(told).encode() + b"\n")
        wait_for_assignment(environ)
        assert agent.recv(1) == b"!"
    assert environ == {"RANK": "1", "ADASCALE_BATCH_SIZE": "8"}
