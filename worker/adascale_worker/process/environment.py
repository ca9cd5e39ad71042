"""The environment variables of agents and trainers, parsed and validated."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeVar

from adascale_core import names
from adascale_core.batch.plans import AUTO, LocalBszBounds
from adascale_core.job_id import parse_job_id
from adascale_core.names import DISTRIBUTION
from adascale_worker.errors import EnvironmentVariableError
from adascale_worker.process.sockets import require_same_user

T = TypeVar("T")

DEFAULT_TERMINATION_GRACE = 25.0
"""Seconds. A pod has 30 by default; the agent needs the rest to report how it ended."""


ONE_PROCESS = (
    "let the command start one (torchrun --nproc-per-node 1, accelerate launch --num_processes 1), and set "
    "the number of replicas in the job"
)
"""What to do if the command of a job starts several trainers."""


@dataclass(frozen=True)
class ServiceAddress:
    """The address of the metrics service, and the credentials for it."""

    url: str
    job_id: str  # full id of the job that this process belongs to
    token: str | None = None  # the bearer token. None if there is none, or if it is in a file.
    # a file that contains the token and can be renewed. None if there is none.
    token_file: Path | None = None
    ca_file: Path | None = None  # a file with the certificate of its authority. None for those of the system.


@dataclass(frozen=True)
class RankAssignment:
    """The rank of a trainer, from the variables of its agent or of torchrun."""

    rank: int  # index of the replica, from 0
    replicas: int  # number of replicas (the world size)
    local_rank: int  # index of the replica on its machine
    master_addr: str | None  # the address of rank 0, and its port; None if not set
    master_port: int | None
    local_replicas: int = 1  # number of replicas on its machine; 1 if unknown


SingleReplicaGain = Literal["divided", "consecutive"]
"""How a single replica without accumulation measures the gain: on divided steps, or by comparing steps."""


@dataclass(frozen=True)
class JobSettings:
    """Settings of a job, from its environment or from the program's arguments. None means not set.

    `ElasticTrainer` documents each of them.
    """

    batch_size: int | None = None
    max_batch_size: int | None = None
    local_bsz_bounds: LocalBszBounds | None = None
    efficiency_target: float | None = None
    scale_invariant_steps: int | None = None
    checkpoint_dir: str | Path | None = None
    checkpoint_interval: float | None = None
    epochs: int | None = None
    max_nonfinite_steps: int | None = None
    elastic_single_replica: bool = False
    local_bsz_limit: int | None = None
    processes_per_replica: int | None = None
    single_replica_gain: SingleReplicaGain | None = None
    train_samples: int | None = None
    max_gain: float | None = None


def take_replica_store(environ: MutableMapping[str, str]) -> str | None:
    """Return the file in which the processes of this replica find each other; None without an agent.

    Removes the variable, since programs that this one starts are not trainers of the agent.
    """
    return environ.pop(names.ENV_REPLICA_STORE, None) or None


def take_agent_channel(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Connect to the agent that has started this program, or a program in between. None without an agent.

    Removes the variable, since programs that this one starts are not trainers of the agent.
    """
    path = environ.pop(names.ENV_AGENT_SOCKET, None)
    if not path:
        return None
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(path)
        require_same_user(channel)
    except OSError as error:
        channel.close()
        raise EnvironmentVariableError(
            f"{names.ENV_AGENT_SOCKET} is {path}, but this is no connection with the agent "
            f"({error.strerror or error}): the agent has ended, or this program runs in another container or "
            "as another user. Start it where its agent runs, as the same user"
        ) from None
    return channel


def take_snapshot_files(environ: MutableMapping[str, str]) -> list[str]:
    """Return the paths of the agent's memory for copies of the state; none if it has no such memory.

    Removes the variable, since programs that this one starts are not trainers of the agent.
    """
    return [path for path in environ.pop(names.ENV_SNAPSHOT_FILES, "").split(":") if path]


def apply_settings(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> None:
    """Set the variables of a generation, where the program finds them; None removes a variable."""
    for name, value in settings.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def read_secret(environ: Mapping[str, str]) -> str:
    """Return the token of the job, with which members authenticate each other without another secret."""
    service = read_service(environ)
    return (service.token if service is not None else None) or ""


def read_peer_timeout(environ: Mapping[str, str]) -> float:
    """Return the silence after which a member of a generation is lost, in seconds."""
    return _read(environ, names.ENV_PEER_TIMEOUT, _positive_seconds, names.DEFAULT_PEER_TIMEOUT)


def read_service(environ: Mapping[str, str]) -> ServiceAddress | None:
    """Return the address of the metrics service. None if no service is configured."""
    url = environ.get(names.ENV_API_URL)
    job = environ.get(names.ENV_JOB_ID)
    if not url and not job:
        return None
    if not url or not job:
        present, missing = (
            (names.ENV_API_URL, names.ENV_JOB_ID) if url else (names.ENV_JOB_ID, names.ENV_API_URL)
        )
        raise EnvironmentVariableError(f"{present} is set but {missing} is not: set both, or neither")
    token_file, ca_file = environ.get(names.ENV_TOKEN_FILE), environ.get(names.ENV_CA_FILE)
    return ServiceAddress(
        url=url.rstrip("/"),
        job_id=parse_job_id(job),
        token=environ.get(names.ENV_TOKEN),
        token_file=Path(token_file) if token_file else None,
        ca_file=Path(ca_file) if ca_file else None,
    )


def read_assignment(environ: Mapping[str, str]) -> RankAssignment:
    """Return the rank of a trainer without an agent: rank 0 of 1 if torchrun's variables are not set."""
    rank = _read(environ, "RANK", _non_negative_integer, 0)
    replicas = _read(environ, "WORLD_SIZE", _positive_integer, 1)
    if rank >= replicas:
        raise EnvironmentVariableError(
            f"RANK is {rank} but WORLD_SIZE is {replicas}: RANK must be from 0 to {replicas - 1}"
        )
    return RankAssignment(
        rank=rank,
        replicas=replicas,
        local_rank=_read(environ, "LOCAL_RANK", _non_negative_integer, 0),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_read(environ, "MASTER_PORT", _positive_integer, None),
        local_replicas=_read(environ, "LOCAL_WORLD_SIZE", _positive_integer, 1),
    )


def read_agent_assignment(environ: Mapping[str, str]) -> RankAssignment:
    """Return the rank that the agent expects for its trainer."""
    processes = _read(environ, "WORLD_SIZE", _positive_integer, 1)
    if processes > 1:
        raise EnvironmentVariableError(
            f"the command of the job starts {processes} processes (WORLD_SIZE is {processes}), but a replica "
            f"is one process: {ONE_PROCESS}"
        )
    return RankAssignment(
        rank=_read(environ, names.ENV_RANK, _non_negative_integer, 0),
        replicas=_read(environ, names.ENV_REPLICAS, _positive_integer, 1),
        local_rank=0,
        master_addr=None,
        master_port=None,
    )


def read_job_settings(environ: Mapping[str, str]) -> JobSettings:
    """Return the settings of the job, as the controller sets them."""
    directory = environ.get(names.ENV_CHECKPOINT_DIR)
    return JobSettings(
        batch_size=_read(environ, names.ENV_BATCH_SIZE, _positive_integer, None),
        max_batch_size=_read(environ, names.ENV_MAX_BATCH_SIZE, _positive_integer, None),
        local_bsz_bounds=_read(environ, names.ENV_LOCAL_BSZ_BOUNDS, _bounds_pair, None),
        local_bsz_limit=_read(environ, names.ENV_LOCAL_BSZ_LIMIT, _positive_integer, None),
        processes_per_replica=read_processes(environ),
        elastic_single_replica=environ.get(names.ENV_ELASTIC_SINGLE_REPLICA) == "1",
        efficiency_target=_read(environ, names.ENV_EFFICIENCY_TARGET, _fraction, None),
        scale_invariant_steps=_read(environ, names.ENV_SCALE_INVARIANT_STEPS, _positive_integer, None),
        train_samples=_read(environ, names.ENV_TRAIN_SAMPLES, _positive_integer, None),
        checkpoint_dir=directory or None,
        checkpoint_interval=_read(environ, names.ENV_CHECKPOINT_INTERVAL, _seconds, None),
    )


def read_processes(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes of a replica; None if it is not set."""
    return _read(environ, names.ENV_PROCESSES_PER_REPLICA, _positive_integer, None)


def read_process(environ: Mapping[str, str], processes: int) -> int:
    """Return the index of this process in its replica, from 0, as its agent sets it."""
    process = _read(environ, names.ENV_LOCAL_RANK, _non_negative_integer, 0)
    if process >= processes:
        raise EnvironmentVariableError(
            f"{names.ENV_LOCAL_RANK} is {process} but {names.ENV_PROCESSES_PER_REPLICA} is {processes}: it "
            f"must be from 0 to {processes - 1}"
        )
    return process


def divide_into_replicas(assignment: RankAssignment, processes: int) -> tuple[RankAssignment, int]:
    """Return the rank of the replica of this process, of several processes each, and the index in it."""
    replicas, rest = divmod(assignment.replicas, processes)
    if rest:
        raise EnvironmentVariableError(
            f"WORLD_SIZE is {assignment.replicas}, which is not a multiple of the processes of a replica "
            f"({names.ENV_PROCESSES_PER_REPLICA}={processes}): start {max(replicas, 1) * processes} processes"
        )
    rank, process = divmod(assignment.rank, processes)
    return replace(assignment, rank=rank, replicas=replicas), process


def read_replica(environ: Mapping[str, str]) -> int:
    """Return the index of this agent's replica, from 0."""
    return _read(environ, names.ENV_REPLICA, _non_negative_integer, 0)


def read_service_timeout(environ: Mapping[str, str]) -> float:
    """Return the time within which the service must answer an agent for the first time, in seconds."""
    return _read(environ, names.ENV_SERVICE_TIMEOUT, _seconds, names.DEFAULT_SERVICE_TIMEOUT)


def read_incarnation(environ: Mapping[str, str]) -> int:
    """Return the creation time of the job, in seconds since 1970; 0 if not set."""
    return _read(environ, names.ENV_INCARNATION, _non_negative_integer, 0)


def read_accelerator(environ: Mapping[str, str]) -> str | None:
    """Return the type of accelerator that the operator has chosen for the job. None if it has not chosen."""
    return environ.get(names.ENV_ACCELERATOR) or None


def read_step_timeout(environ: Mapping[str, str]) -> float | None:
    """Return the time without a step after which a trainer that is behind ends, in seconds. None: never."""
    return _read(environ, names.ENV_STEP_TIMEOUT, _seconds, 0.0) or None


def read_termination_log(environ: Mapping[str, str]) -> Path | None:
    """Return the file for the agent's termination message. None if not set."""
    path = environ.get(names.ENV_TERMINATION_LOG)
    return Path(path) if path else None


def read_termination_grace(environ: Mapping[str, str]) -> float:
    """Return the time that a trainer has to save and exit when its agent is terminated, in seconds."""
    return _read(environ, names.ENV_TERMINATION_GRACE, _seconds, DEFAULT_TERMINATION_GRACE)


def _read(environ: Mapping[str, str], name: str, parse: Callable[[str], T], default: T) -> T:
    """Return the parsed value of a variable, or `default` if it is not set or empty."""
    text = environ.get(name)
    if text is None or text == "":
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise EnvironmentVariableError(f"{name} is {text!r}: {error}") from None


def _non_negative_integer(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("it must be an integer of at least 0")
    return int(text)


def _positive_integer(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("it must be an integer of at least 1")
    return int(text)


def _bounds_pair(text: str) -> LocalBszBounds:
    lower, _, upper = text.partition(",")
    try:
        return _positive_integer(lower), AUTO if upper.strip() == AUTO else _positive_integer(upper)
    except ValueError:
        raise ValueError(f"it must be 'lower,upper', two integers of at least 1, or 'lower,{AUTO}'") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("it must be a number of seconds") from None
    if not 0 <= value < float("inf"):
        raise ValueError("it must be a finite number of seconds, at least 0")
    return value


def _positive_seconds(text: str) -> float:
    if (value := _seconds(text)) == 0:
        raise ValueError("it must be a number of seconds above 0")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("it must be a number above 0 and at most 1") from None
    if not 0 < value <= 1:
        raise ValueError("it must be a number above 0 and at most 1")
    return value


def package_version() -> str:
    """Return the version that all members of a job must have; empty if the package is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
