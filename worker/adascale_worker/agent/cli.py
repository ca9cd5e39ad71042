"""The command `adascale-agent -- PROGRAM [ARGUMENT...]`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from adascale_core import names
from adascale_core.errors import AdaScaleError
from adascale_core.exit_codes import EXIT_REENTRY
from adascale_core.termination_message import TerminationMessage

_DESCRIPTION = f"""\
Run a training program as one replica of an elastic job.

The agent is the entry point of a worker. It registers with the metrics service, starts PROGRAM in each
generation that has a place for this replica, and starts it again after a change of replicas. It leaves
with 0 when the program has finished, {EXIT_REENTRY} when it was asked to leave (SIGTERM) with the
state saved, and with the program's own exit code when that failed.

environment:
  {names.ENV_API_URL}   base URL of the metrics service
  {names.ENV_JOB_ID}    the job, <namespace>.<name>
  {names.ENV_REPLICA}   index of this replica, from 0
  {names.ENV_ADDRESS}   where other replicas reach it (default: 127.0.0.1)
  {names.ENV_SERVICE_TIMEOUT}   seconds to wait for the service's first answer
  {names.ENV_TERMINATION_GRACE}   seconds that a trainer has to save when the agent is asked to leave
  {names.ENV_TERMINATION_LOG}   a file in which to say why the program has failed
  {names.ENV_TOKEN}, {names.ENV_TOKEN_FILE}   the bearer token, or a file with it
"""


def main() -> NoReturn:
    """Run the agent and leave with its exit code."""
    # First of all: a signal that nobody listens for does not reach the first process of a container. Until
    # the agent listens itself there is nothing to save and nothing to tell.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    parser = argparse.ArgumentParser(
        "adascale-agent", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs="+", metavar="PROGRAM", help="the training program and its arguments"
    )
    code = _run(parser.parse_args().command)
    # The threads that talk with the service wait on it; nothing is left that they could be needed for.
    sys.stdout.flush()
    os._exit(code)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(EXIT_REENTRY)


def _run(command: list[str]) -> int:
    # What takes time to import waits until signals are listened for.
    from adascale_client import MetricsServiceClient
    from adascale_worker import environment
    from adascale_worker.agent.agent import Agent
    from adascale_worker.agent.termination_log import TerminationLog
    from adascale_worker.errors import EnvironmentVariableError

    environ = os.environ
    termination_log = TerminationLog(environment.read_termination_log(environ))
    try:
        service = environment.read_service(environ)
        if service is None:
            raise EnvironmentVariableError(
                f"{names.ENV_API_URL} and {names.ENV_JOB_ID} are not set: an agent needs a metrics service. "
                "Without one, run the program itself"
            )
        agent = Agent(
            MetricsServiceClient(service.url, service.token, service.token_file).for_job(service.job_id),
            command,
            environ,
            rank=environment.read_replica(environ),
            address=environ.get(names.ENV_ADDRESS, "127.0.0.1"),
            patience=environment.read_service_timeout(environ),
            termination_grace=environment.read_termination_grace(environ),
            termination_log=termination_log,
        )
        return agent.run()
    except AdaScaleError as error:
        termination_log.say(TerminationMessage(0, error.exit_code, str(error)))
        print(f"adascale-agent: {error}", file=sys.stderr, flush=True)
        return error.exit_code
