"""The command `adascale-agent -- PROGRAM [ARGUMENT...]`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from adascale_core import names
from adascale_core.errors import AdaScaleError
from adascale_worker.agent.agent import Agent
from adascale_worker.environment import read_replica, read_service, read_service_patience
from adascale_worker.errors import EnvironmentVariableError
from adascale_worker.service import ServiceClient

_DESCRIPTION = f"""\
Run a training program as one replica of an elastic job.

The agent is the entry point of a worker. It registers with the metrics service, starts PROGRAM in each
generation that has a place for this replica, and starts it again after a change of replicas. It leaves
with 0 when the program has finished, {names.EXIT_REENTRY} when it was asked to leave (SIGTERM) with the
state saved, and with the program's own exit code when that failed.

environment:
  {names.ENV_API_URL}   base URL of the metrics service
  {names.ENV_JOB_ID}    the job, <namespace>.<name>
  {names.ENV_REPLICA}   index of this replica, from 0
  {names.ENV_ADDRESS}   where other replicas reach it (default: 127.0.0.1)
  {names.ENV_SERVICE_PATIENCE}   seconds to wait for the service's first answer
  {names.ENV_TOKEN}, {names.ENV_TOKEN_FILE}   the bearer token, or a file with it
"""


def main() -> NoReturn:
    """Run the agent and leave with its exit code."""
    parser = argparse.ArgumentParser(
        "adascale-agent", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs="+", metavar="PROGRAM", help="the training program and its arguments"
    )
    arguments = parser.parse_args()
    try:
        service = read_service(os.environ)
        if service is None:
            raise EnvironmentVariableError(
                f"{names.ENV_API_URL} and {names.ENV_JOB_ID} are not set: an agent needs a metrics service. "
                "Without one, run the program itself"
            )
        agent = Agent(
            ServiceClient(service),
            arguments.command,
            os.environ,
            rank=read_replica(os.environ),
            address=os.environ.get(names.ENV_ADDRESS, "127.0.0.1"),
            patience=read_service_patience(os.environ),
        )
        code = agent.run()
    except AdaScaleError as error:
        print(f"adascale-agent: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    # The threads that talk with the service wait on it; nothing is left that they could be needed for.
    sys.stdout.flush()
    os._exit(code)
