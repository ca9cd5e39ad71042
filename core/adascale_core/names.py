"""Names and numbers that two parts must agree on, each written once.

Environment variables reach a trainer from its agent and an agent from the controller. Exit codes tell
an agent why its trainer ended.
"""

from __future__ import annotations

import re

from adascale_core.errors import AdaScaleError

# -- the custom resource --------------------------------------------------------------------------------

API_GROUP = "adascale.dev"
API_VERSION = "v1alpha1"
KIND = "AdaScaleJob"
DEFAULT_NAMESPACE = "default"
WORKER_CONTAINER = "worker"

# -- the environment of an agent and of its trainer -----------------------------------------------------

ENV_JOB_ID = "ADASCALE_JOB_ID"
ENV_API_URL = "ADASCALE_API_URL"
ENV_TOKEN = "ADASCALE_TOKEN"
"""The bearer token itself; a file is preferred where there is one, since tokens in files can be renewed."""
ENV_TOKEN_FILE = "ADASCALE_TOKEN_FILE"
ENV_REPLICA = "ADASCALE_REPLICA"
"""This agent's replica index, from 0."""
ENV_ADDRESS = "ADASCALE_ADDRESS"
"""The address at which other replicas reach this one."""
ENV_SERVICE_PATIENCE = "ADASCALE_SERVICE_PATIENCE"
"""Seconds within which the service must answer an agent for the first time."""
ENV_GENERATION = "ADASCALE_GENERATION"
ENV_LISTEN_FD = "ADASCALE_LISTEN_FD"
"""On rank 0: the descriptor of the socket, already listening, that serves the generation's rendezvous."""
ENV_AGENT_FD = "ADASCALE_AGENT_FD"
"""The descriptor on which a trainer, started ahead of time, says that it is ready and learns its place."""
ENV_BATCH_SIZE = "ADASCALE_BATCH_SIZE"
ENV_MAX_BATCH_SIZE = "ADASCALE_MAX_BATCH_SIZE"
ENV_LOCAL_BSZ_BOUNDS = "ADASCALE_LOCAL_BSZ_BOUNDS"
"""`lower,upper`."""
ENV_EFFICIENCY_TARGET = "ADASCALE_EFFICIENCY_TARGET"
ENV_SCALE_INVARIANT_STEPS = "ADASCALE_SCALE_INVARIANT_STEPS"
ENV_CHECKPOINT_DIR = "ADASCALE_CHECKPOINT_DIR"
ENV_CHECKPOINT_INTERVAL = "ADASCALE_CHECKPOINT_INTERVAL"
"""Seconds between two checkpoints while training goes on undisturbed."""

# -- exit codes of a trainer ----------------------------------------------------------------------------

EXIT_FINISHED = 0
EXIT_REENTRY = 75
"""The state is saved; start me again in the next generation (EX_TEMPFAIL of sysexits.h)."""
EXIT_PEER_LOST = 76
"""Another replica is gone; start me again, from the last checkpoint, in the next generation."""

# -- numbers --------------------------------------------------------------------------------------------

DEFAULT_EFFICIENCY_TARGET = 0.5
DEFAULT_BACKOFF_LIMIT = 3
DEFAULT_CHECKPOINT_INTERVAL = 30.0
DEFAULT_API_PORT = 8265
DEFAULT_SERVICE_PATIENCE = 60.0

MOST_REPLICAS = 1024
"""No job may ask for more: every count up to it is looked at."""
REPORT_INTERVAL = 0.25
"""Seconds between two reports of a trainer."""
HEARTBEAT_INTERVAL = 3.0
"""Seconds between two registrations of an agent."""
HEARTBEAT_TIMEOUT = 20.0
"""Seconds without a registration after which a replica counts as lost."""
LEAVE_GRACE = 10.0
"""Seconds that a trainer has to leave a generation that is over, before its agent ends it."""

# -- job ids --------------------------------------------------------------------------------------------

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")


class InvalidJobIdError(AdaScaleError):
    """A job id that is neither `<namespace>.<name>` nor a bare name."""

    exit_code = 2


def job_id(name: str, namespace: str = DEFAULT_NAMESPACE) -> str:
    """The id of the job `name`: `<namespace>.<name>`.

    Raises:
        InvalidJobIdError: a part is not a DNS label (lower case letters, digits and '-', at most 63).
    """
    for part, text in (("namespace", namespace), ("name", name)):
        if not _LABEL.match(text):
            raise InvalidJobIdError(
                f"job {part} {text!r} is not valid: use lower case letters, digits and '-', "
                "beginning and ending with a letter or digit, at most 63 of them"
            )
    return f"{namespace}.{name}"


def parse_job_id(text: str) -> str:
    """The full id for `text`, which may be a bare name of namespace `default`.

    Raises:
        InvalidJobIdError: as `job_id`.
    """
    namespace, dot, name = text.rpartition(".")
    return job_id(name, namespace if dot else DEFAULT_NAMESPACE)
