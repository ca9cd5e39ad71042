"""Tests of the environment variables: valid values, and the errors for invalid ones."""

import os
import re
from pathlib import Path
from typing import cast

import pytest

from adascale_client.transport import Transport
from adascale_worker.agent.trainer_process import TrainerSocket
from adascale_worker.errors import EnvironmentVariableError
from adascale_worker.process.environment import (
    AgentAccess,
    JobSettings,
    RankAssignment,
    apply_settings,
    read_assignment,
    read_incarnation,
    read_job_settings,
    read_peer_timeout,
    read_service,
    read_termination_grace,
    read_termination_log,
    take_agent_access,
)


def test_an_empty_environment_means_one_replica_without_a_service() -> None:
    assert read_assignment({}, has_agent=False) == RankAssignment(rank=0, replicas=1)
    assert read_job_settings({}) == JobSettings()
    assert read_service({}) is None


def test_torchruns_variables_set_the_rank_assignment() -> None:
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert read_assignment(environ, has_agent=False) == RankAssignment(3, 4, 1, 2)


def test_job_settings_are_read() -> None:
    environ = {
        "ADASCALE_BATCH_SIZE": "32",
        "ADASCALE_MAX_BATCH_SIZE": "512",
        "ADASCALE_LOCAL_BSZ_BOUNDS": "16,128",
        "ADASCALE_EFFICIENCY_TARGET": "0.5",
        "ADASCALE_SCALE_INVARIANT_STEPS": "20000",
        "ADASCALE_CHECKPOINT_DIR": "/state",
        "ADASCALE_CHECKPOINT_INTERVAL": "2.5",
    }
    assert read_job_settings(environ) == JobSettings(32, 512, (16, 128), 0.5, 20000, "/state", 2.5)


def test_the_service_has_a_full_job_id_and_its_credentials(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of the file")
    environ = {"ADASCALE_API_URL": "http://api:80/", "ADASCALE_JOB_ID": "digits", "ADASCALE_TOKEN": "t"}
    for changes, expected in ({}, "t"), ({"ADASCALE_TOKEN_FILE": str(token)}, "of the file"):
        service = read_service(environ | changes)
        assert service is not None
        transport = cast(Transport, service[0]._transport)
        assert (transport.url, transport._read_token()) == ("http://api:80", expected)
        assert service[1] == "default.digits"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "one"}, "RANK is 'one': it must be an integer of at least 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0': it must be an integer of at least 1"),
        ({"ADASCALE_BATCH_SIZE": "3.5"}, "ADASCALE_BATCH_SIZE is '3.5': it must be an integer of at least 1"),
        ({"ADASCALE_LOCAL_BSZ_BOUNDS": "16"}, "it must be 'lower,upper', two integers of at least 1"),
        ({"ADASCALE_LOCAL_BSZ_BOUNDS": "16,"}, "or 'lower,auto'"),
        ({"ADASCALE_LOCAL_BSZ_BOUNDS": "16,x"}, "ADASCALE_LOCAL_BSZ_BOUNDS is '16,x'"),
        ({"ADASCALE_LOCAL_BSZ_BOUNDS": "16,32,64"}, "ADASCALE_LOCAL_BSZ_BOUNDS is '16,32,64'"),
        ({"ADASCALE_EFFICIENCY_TARGET": "0"}, "it must be a number above 0 and at most 1"),
        ({"ADASCALE_EFFICIENCY_TARGET": "nan"}, "it must be a number above 0 and at most 1"),
        ({"ADASCALE_CHECKPOINT_INTERVAL": "soon"}, "it must be a finite number of seconds"),
        ({"ADASCALE_CHECKPOINT_INTERVAL": "inf"}, "it must be a finite number of seconds, at least 0"),
        ({"ADASCALE_API_URL": "http://api"}, "ADASCALE_API_URL is set but ADASCALE_JOB_ID is not"),
        ({"ADASCALE_JOB_ID": "digits"}, "ADASCALE_JOB_ID is set but ADASCALE_API_URL is not"),
    ],
)
def test_an_invalid_variable_is_named_in_the_error(environ: dict[str, str], message: str) -> None:
    def read_all() -> None:
        read_assignment(environ, has_agent=False)
        read_job_settings(environ)
        read_service(environ)

    with pytest.raises(EnvironmentVariableError, match=re.escape(message)):
        read_all()


def test_variables_of_the_agent_are_read() -> None:
    assert read_termination_log({}) is None
    assert read_termination_log({"ADASCALE_TERMINATION_LOG": "/dev/termination-log"}) == Path(
        "/dev/termination-log"
    )
    assert read_termination_grace({}) == 25
    assert read_termination_grace({"ADASCALE_TERMINATION_GRACE": "115"}) == 115
    assert read_incarnation({}) == 0
    assert read_incarnation({"ADASCALE_INCARNATION": "1790000000"}) == 1790000000
    with pytest.raises(EnvironmentVariableError, match=r"ADASCALE_INCARNATION is '-1': .* at least 0"):
        read_incarnation({"ADASCALE_INCARNATION": "-1"})
    with pytest.raises(EnvironmentVariableError, match="ADASCALE_TERMINATION_GRACE is 'soon'"):
        read_termination_grace({"ADASCALE_TERMINATION_GRACE": "soon"})


def test_the_settings_of_a_generation_set_variables_and_remove_null_ones() -> None:
    environ = {"ADASCALE_MAX_BATCH_SIZE": "64", "ADASCALE_BATCH_SIZE": "8"}
    apply_settings(environ, {"RANK": "1", "ADASCALE_MAX_BATCH_SIZE": None, "ADASCALE_LOCAL_BSZ_BOUNDS": None})
    assert environ == {"RANK": "1", "ADASCALE_BATCH_SIZE": "8"}


def test_the_agent_is_connected_to_once_and_the_connection_not_inherited() -> None:
    waiting = TrainerSocket()
    environ = {"ADASCALE_AGENT_SOCKET": waiting.path}
    try:
        channel = take_agent_access(environ).channel
        assert channel is not None
        with channel:
            assert not channel.get_inheritable()
            accepted, process = waiting.accept()
            assert process == os.getpid()
            accepted.close()
    finally:
        waiting.close()
    assert take_agent_access(environ) == AgentAccess(snapshot_files=[])
    assert not Path(waiting.path).parent.exists()


def test_an_agent_that_does_not_answer_is_an_error_with_its_cause() -> None:
    waiting = TrainerSocket()
    waiting.close()
    with pytest.raises(EnvironmentVariableError, match=r"No such file or directory.* where its agent runs"):
        take_agent_access({"ADASCALE_AGENT_SOCKET": waiting.path})


def test_several_processes_of_another_launcher_are_refused() -> None:
    agent = {"ADASCALE_RANK": "1", "ADASCALE_REPLICAS": "3"}
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    assert read_assignment(agent | one, has_agent=True) == RankAssignment(1, 3)
    with pytest.raises(EnvironmentVariableError, match=r"starts 2 processes .* let the command start one"):
        read_assignment(agent | {"WORLD_SIZE": "2"}, has_agent=True)


def test_the_peer_timeout_is_above_zero() -> None:
    assert read_peer_timeout({}) == 5
    assert read_peer_timeout({"ADASCALE_PEER_TIMEOUT": "0.5"}) == 0.5
    with pytest.raises(EnvironmentVariableError, match=r"ADASCALE_PEER_TIMEOUT is '0': .* above 0"):
        read_peer_timeout({"ADASCALE_PEER_TIMEOUT": "0"})
