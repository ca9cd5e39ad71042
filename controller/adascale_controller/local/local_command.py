"""The training program as it runs on this machine: its command, working directory and environment."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adascale_controller.schema import JobDefinition
from adascale_core import names
from adascale_core.errors import AdaScaleError

_PYTHON = re.compile(r"python(3(\.\d+)?)?\Z")
_REFERENCE = re.compile(r"\$\$|\$\(([-._A-Za-z][-._A-Za-z0-9]*)\)")


class LocalCommandError(AdaScaleError):
    """A job whose program cannot run on this machine."""

    exit_code = 2


@dataclass(frozen=True)
class LocalCommand:
    """The program that the trainers run."""

    command: tuple[str, ...]
    environ: Mapping[str, str]  # its environment, without the variables of its replica
    cwd: Path
    ignored: tuple[str, ...] = ()  # descriptions of the settings of the job that do not apply on this machine


def resolve_command(
    job: JobDefinition, checkpoints: Path | str, environ: Mapping[str, str], threads: int
) -> LocalCommand:
    """Return the program of `job` on this machine.

    `python` is replaced by the interpreter of this process, in which the worker package is installed.
    References to environment variables are expanded as Kubernetes does.
    """
    cwd, ignored = _working_dir(job)
    if job.spec.opportunistic is not None:
        ignored.append("spec.opportunistic, since there are extra pods on a cluster only")
    folder = checkpoints if isinstance(checkpoints, str) else str(checkpoints.absolute())
    env = {**job.environment, names.ENV_JOB_ID: job.id, names.ENV_CHECKPOINT_DIR: folder}
    worker = job.worker
    for name, value in {
        each.name: each.value or "" for each in worker.env if each.value_from is None
    }.items():
        # A value may refer to the variables before it, and to ours, which the job cannot replace.
        env.setdefault(name, _expand(value, env))
    ignored += [
        f"environment variable {each.name} (valueFrom {', '.join(each.value_from)})"
        for each in worker.env
        if each.value_from is not None
    ]
    if worker.env_from:
        ignored.append("the environment variables of envFrom")
    path = os.pathsep.join((str(Path(sys.executable).parent), environ.get("PATH", os.defpath)))
    command = [_expand(part, env) for part in (*worker.command, *worker.args)]
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
        },
        cwd=cwd,
        ignored=tuple(ignored),
    )


def _working_dir(job: JobDefinition) -> tuple[Path, list[str]]:
    """Return the working directory, and the ignored fields: a workingDir of the image may not exist here."""
    current, folder = Path.cwd(), job.worker.working_dir
    if folder is None:
        return current, []
    requested = current / folder
    if requested.is_dir():
        return requested, []
    return current, [f"workingDir {folder}, which does not exist here; using {current}"]


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Return `text` with `$(NAME)` replaced by the variable's value, if it has one, and `$$` by `$`."""
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else env.get(match[1], match[0]), text)


def _require_program(command: Sequence[str], cwd: Path, path: str) -> None:
    """Check that the program and its script exist, before anything is started."""
    program = command[0]
    if shutil.which(cwd / program if os.sep in program else program, path=path) is None:
        fix = "install it, or correct its path"
        if " " in program:
            fix = "write each word of the command as an item of its own, such as [python, train.py]"
        raise LocalCommandError(
            f"the program {program!r} of the job's command is missing or not executable: {fix}"
        )
    script = command[1] if program == sys.executable and len(command) > 1 else "-"
    if not script.startswith("-") and not (cwd / script).exists():
        raise LocalCommandError(
            f"the script {script!r} of the job's command does not exist in {cwd}: change to the folder that "
            "its path is relative to"
        )
