"""Names and numbers that two parts must agree on, each written once.

Environment variables reach a trainer from its agent and an agent from the controller.
"""

from __future__ import annotations

# -- the custom resource --------------------------------------------------------------------------------

API_GROUP = "adascale.dev"
API_VERSION = "v1alpha1"
GROUP_VERSION = f"{API_GROUP}/{API_VERSION}"
"""`apiVersion` of an AdaScaleJob."""
KIND = "AdaScaleJob"
PLURAL = "adascalejobs"
DEFAULT_NAMESPACE = "default"
WORKER_CONTAINER = "worker"

# -- what a cluster calls the parts, and what is theirs -------------------------------------------------

SYSTEM_NAMESPACE = "adascale-system"
CONTROLLER = "adascale-controller"
"""The operator's workload, service account and lease."""
API_SERVICE = "adascale-api"
"""The metrics service's workload, Service and service account."""
FIELD_MANAGER = "adascale-operator"
LABEL_JOB = f"{API_GROUP}/job"
"""On every object that belongs to a job: the job's name."""
ANNOTATION_TEMPLATE = f"{API_GROUP}/template"
"""On a Job: a digest of all that its pods were made from."""
API_AUDIENCE = f"{API_GROUP}/api"
"""Audience of the operator's own token."""
TOKEN_EXPIRATION_SECONDS = 3600
"""How long a worker's token lives; the kubelet renews it before."""


def job_audience(job: str) -> str:
    """The audience of the tokens that may write for the job of this full id, and for no other."""
    return f"{API_GROUP}/jobs/{job}"


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
ENV_SERVICE_TIMEOUT = "ADASCALE_SERVICE_TIMEOUT"
"""Seconds within which the service must answer an agent for the first time."""
ENV_INCARNATION = "ADASCALE_INCARNATION"
"""When the job was made, in seconds since 1970: tells it from an earlier job of the same name."""
ENV_TERMINATION_LOG = "ADASCALE_TERMINATION_LOG"
"""A file in which an agent says why its program has failed."""
ENV_TERMINATION_GRACE = "ADASCALE_TERMINATION_GRACE"
"""Seconds that a trainer has to save and leave once its agent is asked to leave."""
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

# -- numbers --------------------------------------------------------------------------------------------

DEFAULT_EFFICIENCY_TARGET = 0.5
DEFAULT_BACKOFF_LIMIT = 3
DEFAULT_CHECKPOINT_INTERVAL = 30.0
DEFAULT_API_PORT = 8265
DEFAULT_SERVICE_TIMEOUT = 60.0

MAX_NAME_LENGTH = 58
"""Of a job: with '-' and an index it must still be the name of a host (63)."""
MAX_BATCH_SIZE = 2**20
"""No batch may have more samples."""
MAX_STEPS = 2**53 - 1
"""No job may have more: integers up to here are exact in any JSON reader."""
MAX_REPLICAS = 1024
"""No job may ask for more: every count up to it is looked at."""
REPORT_INTERVAL = 0.25
"""Seconds between two reports of a trainer."""
HEARTBEAT_INTERVAL = 3.0
"""Seconds between two registrations of an agent."""
HEARTBEAT_TIMEOUT = 20.0
"""Seconds without a registration after which a replica counts as lost."""
LEAVE_GRACE = 10.0
"""Seconds that a trainer has to leave a generation that is over, before its agent ends it."""
