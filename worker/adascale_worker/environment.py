"""What agents and trainers are told through environment variables, read once and checked."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from adascale_core import names
from adascale_core.exit_codes import EXIT_REENTRY
from adascale_core.job_id import parse_job_id
from adascale_worker.errors import EnvironmentVariableError

T = TypeVar("T")

DEFAULT_TERMINATION_GRACE = 25.0
"""Seconds; a pod has 30 by default, of which the agent keeps some to tell how it ended."""


@dataclass(frozen=True)
class ServiceAddress:
    """The address of the metrics service, and the token for it.

    Args:
        url: the base URL of the service.
        job_id: the job that this process belongs to.
        token: the bearer token; None if it is not set.
        token_file: a file with the bearer token, which may be renewed; None if it is not set.
    """

    url: str
    job_id: str
    token: str | None = None
    token_file: Path | None = None


@dataclass(frozen=True)
class RankAssignment:
    """Which replica of how many a trainer is, and where the others meet it (torchrun's variables)."""

    rank: int
    replicas: int
    local_rank: int
    master_addr: str | None
    master_port: int | None


@dataclass(frozen=True)
class JobEnvironment:
    """What the controller says of the job; each is none where it says nothing."""

    batch_size: int | None = None
    max_batch_size: int | None = None
    local_bsz_bounds: tuple[int, int] | None = None
    efficiency_target: float | None = None
    scale_invariant_steps: int | None = None
    checkpoint_dir: Path | None = None
    checkpoint_interval: float | None = None


def is_standby(environ: Mapping[str, str]) -> bool:
    """Whether this program was started ahead of its generation, by an agent, and still has to wait for it."""
    return names.ENV_AGENT_FD in environ


def wait_for_assignment(environ: MutableMapping[str, str]) -> None:
    """Tell the agent that this program is ready, and wait to be told its place.

    An agent starts a program before its generation begins, so neither the place nor what the job asks for
    by then can be in the environment from the start; it is put there now, for torch and for whoever else
    reads it. Without an agent, this returns at once.

    Raises:
        SystemExit: the agent needs this program no longer.
    """
    descriptor = _read(environ, names.ENV_AGENT_FD, _natural, None)
    if descriptor is None:
        return
    del environ[names.ENV_AGENT_FD]
    with socket.socket(fileno=descriptor) as channel, channel.makefile("r", encoding="utf-8") as lines:
        channel.sendall(b"!")
        told = lines.readline()
    if not told:
        sys.exit(EXIT_REENTRY)
    for name, value in json.loads(told).items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def read_service(environ: Mapping[str, str]) -> ServiceAddress | None:
    """The metrics service of this process; none where it runs off any service.

    Raises:
        EnvironmentVariableError: only part of it is told.
    """
    url = environ.get(names.ENV_API_URL)
    job = environ.get(names.ENV_JOB_ID)
    if not url and not job:
        return None
    if not url or not job:
        given, missing = (
            (names.ENV_API_URL, names.ENV_JOB_ID) if url else (names.ENV_JOB_ID, names.ENV_API_URL)
        )
        raise EnvironmentVariableError(f"{given} is set but {missing} is not: set both, or neither")
    token_file = environ.get(names.ENV_TOKEN_FILE)
    return ServiceAddress(
        url=url.rstrip("/"),
        job_id=parse_job_id(job),
        token=environ.get(names.ENV_TOKEN),
        token_file=Path(token_file) if token_file else None,
    )


def read_assignment(environ: Mapping[str, str]) -> RankAssignment:
    """The place of this trainer; alone where nothing is told.

    Raises:
        EnvironmentVariableError: a variable is not a number, or the rank is not below the world size.
    """
    rank = _read(environ, "RANK", _natural, 0)
    replicas = _read(environ, "WORLD_SIZE", _positive, 1)
    if rank >= replicas:
        raise EnvironmentVariableError(
            f"RANK is {rank} but WORLD_SIZE is {replicas}: ranks go from 0 to {replicas - 1}"
        )
    return RankAssignment(
        rank=rank,
        replicas=replicas,
        local_rank=_read(environ, "LOCAL_RANK", _natural, 0),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_read(environ, "MASTER_PORT", _positive, None),
    )


def read_job(environ: Mapping[str, str]) -> JobEnvironment:
    """What the controller says of the job.

    Raises:
        EnvironmentVariableError: a variable does not say what it should.
    """
    directory = environ.get(names.ENV_CHECKPOINT_DIR)
    return JobEnvironment(
        batch_size=_read(environ, names.ENV_BATCH_SIZE, _positive, None),
        max_batch_size=_read(environ, names.ENV_MAX_BATCH_SIZE, _positive, None),
        local_bsz_bounds=_read(environ, names.ENV_LOCAL_BSZ_BOUNDS, _pair, None),
        efficiency_target=_read(environ, names.ENV_EFFICIENCY_TARGET, _share, None),
        scale_invariant_steps=_read(environ, names.ENV_SCALE_INVARIANT_STEPS, _positive, None),
        checkpoint_dir=Path(directory) if directory else None,
        checkpoint_interval=_read(environ, names.ENV_CHECKPOINT_INTERVAL, _seconds, None),
    )


def read_generation(environ: Mapping[str, str]) -> int:
    """The generation that this trainer runs in; 0 without an agent."""
    return _read(environ, names.ENV_GENERATION, _natural, 0)


def read_listen_fd(environ: Mapping[str, str]) -> int | None:
    """The descriptor of the listening socket that the agent hands to rank 0, if it does."""
    return _read(environ, names.ENV_LISTEN_FD, _natural, None)


def read_replica(environ: Mapping[str, str]) -> int:
    """The index of this agent's replica."""
    return _read(environ, names.ENV_REPLICA, _natural, 0)


def read_service_timeout(environ: Mapping[str, str]) -> float:
    """Seconds within which the service must answer an agent for the first time."""
    return _read(environ, names.ENV_SERVICE_TIMEOUT, _seconds, names.DEFAULT_SERVICE_TIMEOUT)


def read_incarnation(environ: Mapping[str, str]) -> int:
    """When the job was made, in seconds since 1970; 0 where nobody says so."""
    return _read(environ, names.ENV_INCARNATION, _natural, 0)


def read_termination_log(environ: Mapping[str, str]) -> Path | None:
    """The file in which an agent says why its program has failed, if there is one."""
    path = environ.get(names.ENV_TERMINATION_LOG)
    return Path(path) if path else None


def read_termination_grace(environ: Mapping[str, str]) -> float:
    """Seconds that a trainer has to save and leave once its agent is asked to leave."""
    return _read(environ, names.ENV_TERMINATION_GRACE, _seconds, DEFAULT_TERMINATION_GRACE)


def _read(environ: Mapping[str, str], name: str, parse: Callable[[str], T], default: T) -> T:
    text = environ.get(name)
    if text is None or text == "":
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise EnvironmentVariableError(f"{name} is {text!r}: {error}") from None


def _natural(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("it must be a whole number from 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("it must be a whole number from 1")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError("it must be two whole numbers, 'lower,upper'")
    return _positive(parts[0]), _positive(parts[1])


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("it must be a number of seconds") from None
    if not 0 <= value < float("inf"):
        raise ValueError("it must be a number of seconds, not negative")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("it must be a number above 0 and at most 1") from None
    if not 0 < value <= 1:
        raise ValueError("it must be above 0 and at most 1")
    return value
