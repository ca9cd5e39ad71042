"""Names and numbers that several packages share.

Names of Kubernetes objects and environment variables, defaults, limits and timeouts.
Exit codes are in `failures`, job ids in `job_id`, file names of checkpoints in `checkpoint_manifest`.
"""

from __future__ import annotations

DISTRIBUTION = "adascale-operator"
"""Name of the Python package."""
ENV_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""The URL of a collector of OpenTelemetry, to which a metrics service sends what jobs do."""

# -- the custom resource --------------------------------------------------------------------------------

API_GROUP = "adascale.dev"
API_VERSION = "v1alpha1"
GROUP_VERSION = f"{API_GROUP}/{API_VERSION}"
"""`apiVersion` of an AdaScaleJob."""
KIND = "AdaScaleJob"
PLURAL = "adascalejobs"
DEFAULT_NAMESPACE = "default"
WORKER_CONTAINER = "worker"
"""The container that trains, if there are several and no annotation names it."""

# -- other Kubernetes objects ---------------------------------------------------------------------------

SYSTEM_NAMESPACE = "adascale-system"
CONTROLLER = "adascale-controller"
"""The operator's Deployment, service account and Lease."""
API_SERVICE = "adascale-api"
"""The metrics service's StatefulSet, Service and service account."""
CERTIFICATE_SECRET = "adascale-api-tls"
"""The Secret with the metrics service's certificate, its key, and the certificate of its authority."""
AUTHORITY = "adascale-ca"
"""The Secret with the certificate authority and its key, and in each namespace with jobs the ConfigMap with
its certificate."""
AUTHORITY_FILE = "ca.crt"
"""The key of an authority's certificate in a Secret or ConfigMap."""
FIELD_MANAGER = "adascale-operator"
LABEL_JOB = f"{API_GROUP}/job"
"""Label of every object that belongs to a job: the job's name."""
LABEL_JOB_UID = f"{API_GROUP}/job-uid"
"""Label of a replica's pod: the uid of its AdaScaleJob."""
LABEL_REPLICA = f"{API_GROUP}/replica"
"""Label of a replica's pod: the index of the replica."""
LABEL_ATTEMPT = f"{API_GROUP}/attempt"
"""Label of a replica's pod: how many pods of the replica are known to have ended before it."""
LABEL_EXTRA = f"{API_GROUP}/extra"
"""Label of an extra pod, beyond the smallest count of a job with `spec.opportunistic`: true."""
ANNOTATION_TEMPLATE = f"{API_GROUP}/template"
"""Annotation of a pod: a digest of what it was created from."""
ANNOTATION_ACCELERATOR = f"{API_GROUP}/accelerator"
"""Annotation of a pod that is kept on one type of accelerator: the type."""
ANNOTATION_WORKER = f"{API_GROUP}/worker-container"
"""Annotation of a pod: the name of the container that trains."""
DEFAULT_ACCELERATOR_LABEL = "nvidia.com/gpu.product"
"""The label of nodes whose value is the type of their accelerators."""
NO_ACCELERATOR_LABEL = "<none>"
"""The type of the accelerators of nodes without that label. It is not a valid value of a label."""
API_AUDIENCE = f"{API_GROUP}/api"
"""Audience of the operator's token."""
TOKEN_EXPIRATION_SECONDS = 3600
"""Lifetime of a worker's token. The kubelet renews the token before."""


def job_audience(job: str) -> str:
    """Return the audience of the tokens that may write for the job of this full id only."""
    return f"{API_GROUP}/jobs/{job}"


# -- environment variables of agents and trainers -------------------------------------------------------
# `docs/reference.md` has their docstrings.

ENV_JOB_ID = "ADASCALE_JOB_ID"
"""`<namespace>.<name>` of the job. Set together with `ADASCALE_API_URL`."""
ENV_API_URL = "ADASCALE_API_URL"
"""URL of the metrics service. Without it, gains are not reported."""
ENV_TOKEN = "ADASCALE_TOKEN"
"""The bearer token for the metrics service. Only one in a file can be renewed."""
ENV_TOKEN_FILE = "ADASCALE_TOKEN_FILE"
"""A file with the bearer token."""
ENV_CA_FILE = "ADASCALE_CA_FILE"
"""A file with the certificate, in PEM, of the authority of a metrics service with TLS, which is read again
when it changes (default: the authorities of the system)."""
ENV_READ_TOKEN = "ADASCALE_READ_TOKEN"
"""A token with which the metrics service lets people read logs and addresses."""
ENV_READ_TOKEN_FILE = "ADASCALE_READ_TOKEN_FILE"
"""A file with that token."""
ENV_REPLICA = "ADASCALE_REPLICA"
"""Index of the replica, from 0 (default: 0)."""
ENV_RANK = "ADASCALE_RANK"
"""Rank of the trainer, from 0; before its first generation, index of its replica. Set by the agent."""
ENV_REPLICAS = "ADASCALE_REPLICAS"
"""Number of replicas; before the trainer's first generation, the desired number. Set by the agent."""
ENV_ADDRESS = "ADASCALE_ADDRESS"
"""Host name or IP address at which other replicas reach this replica (default: 127.0.0.1)."""
ENV_NODE_NAME = "ADASCALE_NODE_NAME"
"""Name of the node that a replica runs on (default: the host name)."""
ENV_ACCELERATOR = "ADASCALE_ACCELERATOR"
"""The type of accelerator that the operator has chosen for a job."""
ENV_SERVICE_TIMEOUT = "ADASCALE_SERVICE_TIMEOUT"
"""Seconds within which the metrics service must answer an agent for the first time (default: 60)."""
ENV_INCARNATION = "ADASCALE_INCARNATION"
"""When the job was created, in seconds since 1970. It distinguishes jobs of the same name."""
ENV_TERMINATION_LOG = "ADASCALE_TERMINATION_LOG"
"""The file to which an agent writes its termination message."""
ENV_TERMINATION_GRACE = "ADASCALE_TERMINATION_GRACE"
"""Seconds that a trainer has to save its state after its agent gets SIGTERM."""
ENV_GENERATION = "ADASCALE_GENERATION"
"""Number of the generation, from 1; 0 before the trainer has one. Set by the agent."""
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of an AdaScaleJob or a pod: the LocalQueue of Kueue that it waits in."""
ENV_AGENT_SOCKET = "ADASCALE_AGENT_SOCKET"
"""Path of the Unix socket over which a trainer reports what it does, and is assigned to generations. Set by
the agent."""
ENV_SNAPSHOT_FILES = "ADASCALE_SNAPSHOT_FILES"
"""Paths, separated by colons, of the files in memory for copies of the state of a single replica. Set by the
agent, unless it is set already: if it is empty, no copies are kept."""
SNAPSHOT_FILE = "adascale-snapshot"
"""The name that the kernel shows for these files."""
ENV_PROCESSES_PER_REPLICA = "ADASCALE_PROCESSES_PER_REPLICA"
"""The number of processes of a replica that share one copy of the model (G). Also with 1, torch's default
process group is that of these processes."""
ENV_LOCAL_RANK = "ADASCALE_LOCAL_RANK"
"""Index of a trainer among the processes of its replica, from 0. Set by the agent."""
ENV_REPLICA_STORE = "ADASCALE_REPLICA_STORE"
"""Path of the file in which the processes of a replica find each other. Set by the agent."""
LIMIT_FILE_SUFFIX = "-limit"
"""Added to that path: the file of a message with which a process that has no connection to the agent reports
that a batch does not fit into its memory."""
ENV_PEER_TIMEOUT = "ADASCALE_PEER_TIMEOUT"
"""Seconds of silence after which the other members of a generation take a member for lost (default: 5)."""
ENV_BATCH_SIZE = "ADASCALE_BATCH_SIZE"
"""The argument `batch_size` of `ElasticTrainer`."""
ENV_MAX_BATCH_SIZE = "ADASCALE_MAX_BATCH_SIZE"
"""The argument `max_batch_size` of `ElasticTrainer`."""
ENV_LOCAL_BSZ_BOUNDS = "ADASCALE_LOCAL_BSZ_BOUNDS"
"""The argument `local_bsz_bounds` of `ElasticTrainer`: `lower,upper`, or `lower,` without an upper bound."""
ENV_LOCAL_BSZ_LIMIT = "ADASCALE_LOCAL_BSZ_LIMIT"
"""The largest local batch size, because a larger one did not fit into memory. Set by the agent."""
ENV_ELASTIC_SINGLE_REPLICA = "ADASCALE_ELASTIC_SINGLE_REPLICA"
"""1 if the batch of a single replica may be larger than the batch size too."""
ENV_EFFICIENCY_TARGET = "ADASCALE_EFFICIENCY_TARGET"
"""The argument `efficiency_target` of `ElasticTrainer`."""
ENV_SCALE_INVARIANT_STEPS = "ADASCALE_SCALE_INVARIANT_STEPS"
"""The argument `scale_invariant_steps` of `ElasticTrainer`."""
ENV_TRAIN_SAMPLES = "ADASCALE_TRAIN_SAMPLES"
"""The argument `train_samples` of `ElasticTrainer`."""
ENV_CHECKPOINT_DIR = "ADASCALE_CHECKPOINT_DIR"
"""The argument `checkpoint_dir` of `ElasticTrainer`: a directory, or the URL of an object store."""
ENV_CHECKPOINT_INTERVAL = "ADASCALE_CHECKPOINT_INTERVAL"
"""Seconds between two periodic checkpoints (default: 30)."""
ENV_STEP_TIMEOUT = "ADASCALE_STEP_TIMEOUT"
"""Seconds without a step after which a trainer that is behind ends its process (default: never)."""

LAUNCHER_VARIABLES = (
    # torchrun
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    # MPI
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    # Slurm
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    # LSF
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    # Lightning
    "NODE_RANK",
)
"""Variables of launchers from which frameworks conclude that they run in one process of several. An agent
removes them from the environment of trainers, and the adapters of frameworks do so without an agent."""

# -- defaults of settings -------------------------------------------------------------------------------

DEFAULT_EFFICIENCY_TARGET, DEFAULT_EFFICIENCY_TARGET_OF_SAMPLES = 0.5, 0.8
"""The second is used if the length of training is in samples."""
DEFAULT_FAIRNESS, DEFAULT_FAIRNESS_ACROSS_TYPES = 0.0, 0.5
"""Of the weights of jobs in the decision: 0 for short jobs first, 1 for equal weights. The second is used if
jobs may run on several types of accelerators."""
DEFAULT_BACKOFF_LIMIT = 3
DEFAULT_MAX_RESTARTS_WITHOUT_PROGRESS = 10
"""Restarts after losses, since the last step, after which a job fails."""
DEFAULT_CHECKPOINT_INTERVAL = 30.0
"""Seconds."""
DEFAULT_API_PORT = 8265
DEFAULT_SERVICE_TIMEOUT = 60.0
"""Seconds."""

DEFAULT_PEER_TIMEOUT = 5.0
"""Seconds."""

# -- limits ---------------------------------------------------------------------------------------------

MAX_NAME_LENGTH = 58
"""Of a job's name: with '-' and an index of 4 digits it is a host name of at most 63 characters."""
MAX_BATCH_SIZE = 2**20
"""Samples in a global batch."""
MAX_STEPS = 2**53 - 1
"""Steps of a job: integers up to this limit are exact in every JSON parser."""
MAX_METRICS = 16
"""Metrics that a program logs, the loss included."""
METRIC_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"
"""Pattern of the name of a metric that a program logs."""
MAX_REPLICAS = 1024
"""Replicas of a job: validation examines every count up to this limit."""

# -- intervals and timeouts, in seconds -----------------------------------------------------------------

REPORT_INTERVAL = 0.25
"""Between two reports of a trainer."""
HEARTBEAT_INTERVAL = 3.0
"""Between two registrations of an agent."""
HEARTBEAT_TIMEOUT = 20.0
"""Without a registration, after which a replica is lost."""
LEAVE_GRACE = 10.0
"""For a trainer to hold after its generation is broken, before its agent kills it.

Below HEARTBEAT_TIMEOUT."""
SIGNAL_REPEAT_INTERVAL = 1.0
"""After a signal, before another one is a second request.

A terminal, a launcher and `timeout` may each send the signal."""

WAITS_FOR_OTHERS = "waits for the others"
"""The `stall` of a replica that is not behind."""
MAX_STALL_LENGTH = 1024
"""Characters of the `stall` of a replica."""
MAX_ACCELERATOR_LENGTH = 128
"""Characters of the name of a type of accelerator."""

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of metrics in Prometheus' text format."""
