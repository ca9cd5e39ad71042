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
from adascale_core.failures import EXIT_REENTRY, TerminationMessage
from adascale_worker.errors import exit_code
from adascale_worker.process.exit import end_process

_DESCRIPTION = f"""\
Run a training program as one replica of an elastic job.

The agent is the entry point of a worker. It registers with the metrics service, starts PROGRAM, and assigns
it to the generations that include this replica. If PROGRAM is killed, it starts it again. Its exit code is 0
when the program has finished, {EXIT_REENTRY} after SIGTERM, when the program has saved its state, and that
of the program when the program has failed.

environment:
  {names.ENV_API_URL}   base URL of the metrics service
  {names.ENV_JOB_ID}    the job, <namespace>.<name>
  {names.ENV_REPLICA}   index of this replica, from 0
  {names.ENV_ADDRESS}   address at which other replicas reach it (default: 127.0.0.1)
  {names.ENV_NODE_NAME}   name of the node (default: the host name)
  {names.ENV_SERVICE_TIMEOUT}   seconds to wait for the first answer of the service
  {names.ENV_TERMINATION_GRACE}   seconds that a trainer has to save its state after SIGTERM
  {names.ENV_TERMINATION_LOG}   file for the termination message
  {names.ENV_TOKEN}, {names.ENV_TOKEN_FILE}   the bearer token, or a file with the token
  {names.ENV_CA_FILE}   file with the certificate of the authority of a service with TLS
"""


def main() -> NoReturn:
    """Run the agent, and exit with its exit code."""
    # Before anything else: the first process of a container does not get signals without a handler. Until
    # the agent has its own handlers, there is no state to save.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
            signal.signal(number, _exit)
    parser = argparse.ArgumentParser(
        "adascale-agent", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs="+", metavar="PROGRAM", help="the training program and its arguments"
    )
    # Without waiting for the threads of the heartbeat, which may wait for the service.
    end_process(_run(parser.parse_args().command))


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    end_process(EXIT_REENTRY)


def _run(command: list[str]) -> int:
    # Imported here, since signals must be handled before imports that take time.
    from adascale_worker.agent.agent import Agent, TerminationLog
    from adascale_worker.process.environment import read_termination_log

    termination_log = TerminationLog(read_termination_log(os.environ))
    try:
        return Agent(command, os.environ, termination_log).run()
    except AdaScaleError as error:
        code = exit_code(error)
        termination_log.write(TerminationMessage(0, code, str(error)))
        print(f"adascale-agent: {error}", file=sys.stderr, flush=True)
        return code
