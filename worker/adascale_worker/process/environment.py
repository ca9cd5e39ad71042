"""What an agent and a trainer get from outside: environment variables, and the settings of the job.

The controller plans with the job file. A program that trained with other batch sizes would get replica
counts that do not fit them, so the job file takes precedence over the program's arguments. A difference that
changes the result is reported.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import struct
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from adascale_client import MetricsServiceClient
from adascale_core import names
from adascale_core.batch.plans import AUTO, BatchBounds, EfficiencyBound, LocalBszBounds
from adascale_core.errors import InvalidJobError
from adascale_core.job_id import parse_job_id
from adascale_core.messages.job_spec import steps_of
from adascale_core.names import DEFAULT_CHECKPOINT_INTERVAL, DISTRIBUTION
from adascale_worker.errors import EnvironmentVariableError

T = TypeVar("T")
D = TypeVar("D")

DEFAULT_TERMINATION_GRACE = 25.0
"""Seconds. A pod has 30 by default; the agent needs the rest to report how it ended."""


ONE_PROCESS = (
    "let the command start one (torchrun --nproc-per-node 1, accelerate launch --num_processes 1), and set "
    "the number of replicas in the job"
)
"""What to do if the command of a job starts several trainers."""


@dataclass(frozen=True)
class RankAssignment:
    """The rank of a trainer, from the variables of its agent or of torchrun."""

    rank: int  # index of the replica, from 0
    replicas: int  # number of replicas (the world size)
    local_rank: int = 0  # index of the process on its machine
    local_replicas: int = 1  # number of replicas on its machine; 1 if unknown
    process: int = 0  # index of this process in its replica
    processes: int | None = None  # number of processes of a replica; None if the job does not set it


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


@dataclass(frozen=True)
class AgentAccess:
    """What a trainer has of the agent that has started it; nothing without an agent."""

    channel: socket.socket | None = None  # of the first process of a replica
    replica_store: str | None = None  # the file in which several processes of the replica find each other
    snapshot_files: Sequence[str] = ()  # its memory for copies of the state

    @property
    def exists(self) -> bool:
        """Whether there is an agent."""
        return self.channel is not None or self.replica_store is not None


def take_agent_access(environ: MutableMapping[str, str]) -> AgentAccess:
    """Connect to the agent that has started this program, or a program in between.

    Removes the variables, since programs that this one starts are not trainers of the agent.
    """
    path = environ.pop(names.ENV_AGENT_SOCKET, None)
    return AgentAccess(
        _connect_to_agent(path) if path else None,
        environ.pop(names.ENV_REPLICA_STORE, None) or None,
        [each for each in environ.pop(names.ENV_SNAPSHOT_FILES, "").split(":") if each],
    )


def _connect_to_agent(path: str) -> socket.socket:
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


def apply_settings(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> None:
    """Set the variables of a generation, where the program finds them; None removes a variable."""
    for name, value in settings.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def read_secret(environ: Mapping[str, str]) -> str:
    """Return the token of the job, with which members authenticate each other without another secret."""
    return environ.get(names.ENV_TOKEN) or ""


def read_peer_timeout(environ: Mapping[str, str]) -> float:
    """Return the silence after which a member of a generation is lost, in seconds."""
    return _read(environ, names.ENV_PEER_TIMEOUT, _TIMEOUT.parse, names.DEFAULT_PEER_TIMEOUT)


def read_service(environ: Mapping[str, str]) -> tuple[MetricsServiceClient, str] | None:
    """Return the metrics service, and the full id of the job of this process; None without a service."""
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
    client = MetricsServiceClient(
        url,
        environ.get(names.ENV_TOKEN),
        Path(token_file) if token_file else None,
        ca_file=Path(ca_file) if ca_file else None,
    )
    return client, parse_job_id(job)


def read_assignment(environ: Mapping[str, str], *, has_agent: bool) -> RankAssignment:
    """Return the rank that the agent expects for its trainer; without an agent, that of torchrun's variables.

    Without these either, it is rank 0 of 1.
    """
    processes = read_processes(environ)
    started = _read(environ, "WORLD_SIZE", _COUNT.parse, 1)
    if has_agent and started > 1:
        raise EnvironmentVariableError(
            f"the command of the job starts {started} processes (WORLD_SIZE is {started}), but a replica is "
            f"one process: {ONE_PROCESS}"
        )
    if has_agent:
        process = 0 if processes is None else _read(environ, names.ENV_LOCAL_RANK, _INDEX.parse, 0)
        rank = _read(environ, names.ENV_RANK, _INDEX.parse, 0)
        replicas = _read(environ, names.ENV_REPLICAS, _COUNT.parse, 1)
        return RankAssignment(rank, replicas, process, process=process, processes=processes)
    index = _read(environ, "RANK", _INDEX.parse, 0)
    if index >= started:
        raise EnvironmentVariableError(
            f"RANK is {index} but WORLD_SIZE is {started}: RANK must be from 0 to {started - 1}"
        )
    replicas, rest = divmod(started, processes or 1)
    if rest:
        raise EnvironmentVariableError(
            f"WORLD_SIZE is {started}, which is not a multiple of the processes of a replica "
            f"({names.ENV_PROCESSES_PER_REPLICA}={processes}): start {max(replicas, 1) * (processes or 1)} "
            "processes"
        )
    rank, process = divmod(index, processes or 1)
    return RankAssignment(
        rank,
        replicas,
        _read(environ, "LOCAL_RANK", _INDEX.parse, 0),
        _read(environ, "LOCAL_WORLD_SIZE", _COUNT.parse, 1),
        process,
        processes,
    )


def read_job_settings(environ: Mapping[str, str]) -> JobSettings:
    """Return the settings of the job, as the controller sets them."""
    directory = environ.get(names.ENV_CHECKPOINT_DIR)
    return JobSettings(
        batch_size=_read(environ, names.ENV_BATCH_SIZE, _COUNT.parse, None),
        max_batch_size=_read(environ, names.ENV_MAX_BATCH_SIZE, _COUNT.parse, None),
        local_bsz_bounds=_read(environ, names.ENV_LOCAL_BSZ_BOUNDS, _bounds_pair, None),
        local_bsz_limit=_read(environ, names.ENV_LOCAL_BSZ_LIMIT, _COUNT.parse, None),
        processes_per_replica=read_processes(environ),
        elastic_single_replica=environ.get(names.ENV_ELASTIC_SINGLE_REPLICA) == "1",
        efficiency_target=_read(environ, names.ENV_EFFICIENCY_TARGET, _FRACTION.parse, None),
        scale_invariant_steps=_read(environ, names.ENV_SCALE_INVARIANT_STEPS, _COUNT.parse, None),
        train_samples=_read(environ, names.ENV_TRAIN_SAMPLES, _COUNT.parse, None),
        checkpoint_dir=directory or None,
        checkpoint_interval=_read(environ, names.ENV_CHECKPOINT_INTERVAL, _SECONDS.parse, None),
    )


def read_processes(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes of a replica; None if it is not set."""
    return _read(environ, names.ENV_PROCESSES_PER_REPLICA, _COUNT.parse, None)


def read_replica(environ: Mapping[str, str]) -> int:
    """Return the index of this agent's replica, from 0."""
    return _read(environ, names.ENV_REPLICA, _INDEX.parse, 0)


def read_service_timeout(environ: Mapping[str, str]) -> float:
    """Return the time within which the service must answer an agent for the first time, in seconds."""
    return _read(environ, names.ENV_SERVICE_TIMEOUT, _SECONDS.parse, names.DEFAULT_SERVICE_TIMEOUT)


def read_incarnation(environ: Mapping[str, str]) -> int:
    """Return the creation time of the job, in seconds since 1970; 0 if not set."""
    return _read(environ, names.ENV_INCARNATION, _INDEX.parse, 0)


def read_accelerator(environ: Mapping[str, str]) -> str | None:
    """Return the type of accelerator that the operator has chosen for the job. None if it has not chosen."""
    return environ.get(names.ENV_ACCELERATOR) or None


def read_step_timeout(environ: Mapping[str, str]) -> float | None:
    """Return the time without a step after which a trainer that is behind ends, in seconds. None: never."""
    return _read(environ, names.ENV_STEP_TIMEOUT, _SECONDS.parse, 0.0) or None


def read_termination_log(environ: Mapping[str, str]) -> Path | None:
    """Return the file for the agent's termination message. None if not set."""
    path = environ.get(names.ENV_TERMINATION_LOG)
    return Path(path) if path else None


def read_termination_grace(environ: Mapping[str, str]) -> float:
    """Return the time that a trainer has to save and exit when its agent is terminated, in seconds."""
    return _read(environ, names.ENV_TERMINATION_GRACE, _SECONDS.parse, DEFAULT_TERMINATION_GRACE)


@dataclass(frozen=True)
class _Kind(Generic[T]):
    """The numbers that a setting may have."""

    requirement: str
    type: Callable[[str], T]  # int or float
    allows: Callable[[Any], bool]

    def is_valid(self, value: object) -> bool:
        """Whether a value that a program has passed is one of them."""
        return (
            type(value) is int or (self.type is float and isinstance(value, float | int))
        ) and self.allows(value)

    def parse(self, text: str) -> T:
        """Return a number of them; raises ValueError for another text."""
        with contextlib.suppress(ValueError):
            if self.allows(value := self.type(text)):
                return value
        raise ValueError(f"it must be {self.requirement}")


_COUNT = _Kind("an integer of at least 1", int, lambda value: value >= 1)
_INDEX = _Kind("an integer of at least 0", int, lambda value: value >= 0)
_SECONDS = _Kind("a finite number of seconds, at least 0", float, lambda value: 0 <= value < math.inf)
_TIMEOUT = _Kind("a finite number of seconds above 0", float, lambda value: 0 < value < math.inf)
_FRACTION = _Kind("a number above 0 and at most 1", float, lambda value: 0 < value <= 1)


def _read(environ: Mapping[str, str], name: str, parse: Callable[[str], T], default: D) -> T | D:
    """Return the parsed value of a variable, or `default` if it is not set or empty."""
    text = environ.get(name)
    if text is None or text == "":
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise EnvironmentVariableError(f"{name} is {text!r}: {error}") from None


def _bounds_pair(text: str) -> LocalBszBounds:
    lower, _, upper = text.partition(",")
    try:
        return _COUNT.parse(lower), AUTO if upper.strip() == AUTO else _COUNT.parse(upper)
    except ValueError:
        raise ValueError(f"it must be 'lower,upper', two integers of at least 1, or 'lower,{AUTO}'") from None


def package_version() -> str:
    """Return the version that all members of a job must have; empty if the package is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""


DEFAULT_MAX_NONFINITE_STEPS = 10
ENDS = ("scale_invariant_steps", "train_samples")
"""The settings that end training, of which a job or a program has at most one."""


@dataclass(frozen=True)
class TrainerSettings:
    """The settings that a trainer uses; `ElasticTrainer` documents each of them.

    With `train_samples`, `scale_invariant_steps` are those in which so many samples are trained.
    """

    bounds: BatchBounds
    efficiency: EfficiencyBound
    scale_invariant_steps: int | None
    epochs: int | None
    checkpoint_dir: str | Path | None
    checkpoint_interval: float
    max_nonfinite_steps: int = DEFAULT_MAX_NONFINITE_STEPS
    single_replica_gain: SingleReplicaGain = "divided"
    train_samples: int | None = None
    max_gain: float | None = None


def describe_differences(program: JobSettings, job: JobSettings) -> list[str]:
    """Return a description of each argument that the job overrides, if that changes the result of training.

    Other bounds change only how fast a job trains: the gain makes up for the batch sizes that it uses.
    """
    pairs = [("batch_size", "batch_size"), *itertools.product((*ENDS, "epochs"), ENDS)]
    return [
        f"the program sets {name} to {argument}, the job sets {'it' if name == other else other} to "
        f"{setting}; the job's setting is used"
        for name, other in pairs
        for argument, setting in [(getattr(program, name), getattr(job, other))]
        if None not in (argument, setting) and (name != other or argument != setting)
    ]


def resolve_settings(program: JobSettings, job: JobSettings) -> TrainerSettings:
    """Return the settings to use.

    The batch size and its bounds are taken together: all from the job if it sets `batch_size`, otherwise
    all from the program.
    """
    sizes = job if job.batch_size is not None else program
    if sizes.batch_size is None:
        raise InvalidJobError(
            "batch_size is not set: pass ElasticTrainer(batch_size=...), the batch size that the learning "
            "rate was tuned for, or run the program as an AdaScaleJob"
        )
    check_arguments(program)
    for source in (program, job):
        if None not in (steps := source.scale_invariant_steps, source.train_samples):
            raise InvalidJobError(
                f"scale_invariant_steps ({steps}) and train_samples ({source.train_samples}) are both set, "
                "but training has one end: leave out one of them"
            )
    end = job if job.scale_invariant_steps or job.train_samples else program
    steps, samples = end.scale_invariant_steps, end.train_samples
    if samples is not None:
        steps = steps_of(samples, sizes.batch_size)
    nonfinite = program.max_nonfinite_steps
    interval = job.checkpoint_interval if job.checkpoint_interval is not None else program.checkpoint_interval
    return TrainerSettings(
        bounds=BatchBounds(
            sizes.batch_size,
            sizes.max_batch_size,
            sizes.local_bsz_bounds,
            job.elastic_single_replica,
            job.local_bsz_limit,
            job.processes_per_replica or 1,
        ),
        efficiency=EfficiencyBound(job.efficiency_target or program.efficiency_target, samples is not None),
        scale_invariant_steps=steps,
        train_samples=samples,
        epochs=program.epochs,
        checkpoint_dir=job.checkpoint_dir or program.checkpoint_dir,
        checkpoint_interval=DEFAULT_CHECKPOINT_INTERVAL if interval is None else interval,
        max_nonfinite_steps=DEFAULT_MAX_NONFINITE_STEPS if nonfinite is None else nonfinite,
        single_replica_gain=program.single_replica_gain or "divided",
        max_gain=program.max_gain,
    )


_ARGUMENTS: Mapping[str, _Kind[Any]] = {
    **dict.fromkeys((*ENDS, "epochs", "max_nonfinite_steps"), _COUNT),
    "efficiency_target": _FRACTION,
    "max_gain": _Kind("a finite number above 1", float, lambda value: 1 < value < math.inf),
    "checkpoint_interval": _Kind("a number of seconds, at least 0", float, lambda value: value >= 0),
}


def check_arguments(program: JobSettings) -> None:
    """Check the arguments that a program may pass with any type. `BatchBounds` checks the others."""
    for name, kind in _ARGUMENTS.items():
        value = getattr(program, name)
        if value is not None and not kind.is_valid(value):
            raise InvalidJobError(f"{name} must be {kind.requirement}, got {value!r}")
    folder: object = program.checkpoint_dir
    allowed = get_args(SingleReplicaGain)
    if program.single_replica_gain not in (None, *allowed):
        names = " or ".join(map(repr, allowed))
        raise InvalidJobError(f"single_replica_gain must be {names}, got {program.single_replica_gain!r}")
    if folder is not None and not isinstance(folder, str | PathLike):
        raise InvalidJobError(f"checkpoint_dir must be a folder or a URL, got {folder!r}")


_BACKLOG: Final = 1024


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port, of all interfaces unless the address is a loopback one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    any_interface = "::" if family == socket.AF_INET6 else ""
    is_loopback = address.startswith("127.") or address == "::1"
    listener.bind((address if is_loopback else any_interface, 0))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


_CREDENTIALS = struct.Struct("3i")
"""Process id, user id and group id, as SO_PEERCRED of Linux has them."""


def require_same_user(connection: socket.socket) -> int | None:
    """Check that the process at the other end of a connection belongs to the user of this one, or to root.

    Returns its process id; None in another PID namespace, and on other systems than Linux, where the
    permissions of the socket's folder have to suffice.
    """
    option: int | None = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise PermissionError(
            f"process {pid} at its other end belongs to user {user}, and this process to user {os.geteuid()}"
        )
    return pid or None
