"""The user's program as this machine can run it: its command, its folder, its environment."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adascale_controller.job import Job, trainer_environment
from adascale_core import names
from adascale_core.errors import AdaScaleError

_PYTHON = re.compile(r"python(3(\.\d+)?)?\Z")
_REFERENCE = re.compile(r"\$\$|\$\(([-._A-Za-z][-._A-Za-z0-9]*)\)")


class LocalCommandError(AdaScaleError):
    """A job whose program can't run on this machine."""

    exit_code = 2


@dataclass(frozen=True)
class LocalCommand:
    """What the agents run.

    Args:
        command: the program and its arguments.
        environ: its environment, besides what each replica is told of its place.
        cwd: the folder that it runs in.
        ignored: the settings of the job that this machine ignores.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    ignored: tuple[str, ...] = ()


def resolve_command(job: Job, checkpoints: Path, environ: Mapping[str, str], threads: int) -> LocalCommand:
    """The program of `job` on this machine.

    `python` is the interpreter that runs us, for that one has what a trainer needs. References to
    variables are resolved as Kubernetes does.

    Args:
        job: the job.
        checkpoints: where its state is saved.
        environ: our own environment, which it inherits.
        threads: threads that a replica may use for its computations.

    Raises:
        LocalCommandError: there is no such program.
    """
    if not job.command:
        raise LocalCommandError(
            f"job {job.short_id} names no program: give the container {names.WORKER_CONTAINER!r} of "
            "spec.template a command, as in [python, train.py]; its image is not used on this machine"
        )
    cwd, ignored = _folder(job)
    own = {**job.env, **trainer_environment(job)}
    env = {name: _resolve(value, own) for name, value in own.items()}
    path = os.pathsep.join((str(Path(sys.executable).parent), environ.get("PATH", os.defpath)))
    command = [_resolve(part, env) for part in job.command]
    if _PYTHON.match(command[0]):
        command[0] = sys.executable
    _require_program(command, cwd, path)
    return LocalCommand(
        command=tuple(command),
        environ={
            "OMP_NUM_THREADS": str(threads),
            **environ,
            "PATH": path,
            **env,
            names.ENV_CHECKPOINT_DIR: str(checkpoints.absolute()),
        },
        cwd=cwd,
        ignored=(*job.cluster_only_env, *ignored),
    )


def _folder(job: Job) -> tuple[Path, list[str]]:
    """Where it runs: its working directory names a place in an image, which needn't be here."""
    here = Path.cwd()
    if job.working_dir is None:
        return here, []
    there = here / job.working_dir
    if there.is_dir():
        return there, []
    return here, [f"the working directory {job.working_dir}, which is not on this machine; it runs in {here}"]


def _resolve(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced by its value where it has one, and `$$` by `$`."""
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]), text)


def _require_program(command: Sequence[str], cwd: Path, path: str) -> None:
    """What would fail on each replica, told before anything starts."""
    program = command[0]
    if shutil.which(cwd / program if os.sep in program else program, path=path) is None:
        raise LocalCommandError(
            f"the program {program!r} of the job's command is not there, or may not be run"
        )
    script = command[1] if program == sys.executable and len(command) > 1 else "-"
    if not script.startswith("-") and not (cwd / script).exists():
        raise LocalCommandError(
            f"the script {script!r} of the job's command is not in {cwd}: "
            "run the same command from the folder that its path starts in"
        )
