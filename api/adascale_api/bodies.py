"""The JSON bodies of requests, as pydantic models that convert to messages of the core.

Numbers are strict: no strings, no booleans, no infinities. Their limits exceed every sensible value, and
prevent overflows in later calculations.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, cast

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from adascale_core.batch.plans import AUTO, Auto
from adascale_core.messages import Message
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.names import (
    DEFAULT_EFFICIENCY_TARGET,
    DEFAULT_EFFICIENCY_TARGET_OF_SAMPLES,
    MAX_ACCELERATOR_LENGTH,
    MAX_BATCH_SIZE,
    MAX_METRICS,
    MAX_REPLICAS,
    MAX_STALL_LENGTH,
    MAX_STEPS,
    METRIC_NAME,
)
from adascale_core.views.decision import CountView, DecisionView, GivenReplicas, LimitKind, LimitView, Verdict

MAX_INTEGER = 2**31 - 1


def _to_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _to_samples_or_auto(value: object) -> object:
    value = _to_integer(value)
    if value == AUTO or (type(value) is int and 1 <= value <= MAX_BATCH_SIZE):
        return value
    # pydantic itself has an error for each member of a union.
    raise PydanticCustomError("samples_or_auto", f'an integer from 1 to {MAX_BATCH_SIZE} or "{AUTO}"')


INTEGER = BeforeValidator(_to_integer)
"""Accepts 4.0 as 4, because JSON has a single number type."""
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER), INTEGER]
Generation = Annotated[int, Field(ge=1, le=MAX_INTEGER), INTEGER]
Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS), INTEGER]
ReplicasOrZero = Annotated[int, Field(ge=0, le=MAX_REPLICAS), INTEGER]
Rank = Annotated[int, Field(ge=0, lt=MAX_REPLICAS), INTEGER]
Samples = Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE), INTEGER]
SamplesOrAuto = Annotated[Samples | Auto, BeforeValidator(_to_samples_or_auto)]
Step = Annotated[int, Field(ge=0, le=MAX_STEPS), INTEGER]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS), INTEGER]
Port = Annotated[int, Field(ge=0, le=65535), INTEGER]
ExitCode = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER), INTEGER]
Estimate = Annotated[float, Field(ge=-1e300, le=1e300)]
EstimateError = Annotated[float, Field(ge=0, le=1e300)]
Progress = Annotated[float, Field(ge=0, le=1e15)]
Ratio = Annotated[float, Field(ge=1e-9, le=1e9)]
Factor = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Timestamp = Annotated[float, Field(ge=0, le=1e12)]
NO_NUL = r"^[^\x00]*$"
"""PostgreSQL stores no text with this character."""
AcceleratorType = Annotated[str, Field(max_length=MAX_ACCELERATOR_LENGTH, pattern=r"^[^\x00-\x1f]*$")]
MetricName = Annotated[str, Field(pattern=f"^{METRIC_NAME}$")]
Metrics = Annotated[dict[MetricName, Estimate], Field(max_length=MAX_METRICS)]


M = TypeVar("M", bound=Message)
STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""Exactly the fields of a message, of exactly their types."""

_ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""In a docstring without the indentation of its class, which Python 3.13 removes."""


def described_fields(message: type[Message], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message: their types with limits, and the descriptions of the docstring.

    With `python -OO` there is no docstring.
    """
    found = _ARGUMENT.findall(inspect.cleandoc(message.__doc__ or ""))
    texts = {name: re.sub(r"\s+", " ", text).replace("None", "null") for name, text in found}
    return {
        each.name: Annotated[types[each.name], pydantic.Field(description=_sentence(texts.get(each.name)))]
        for each in _fields(message)
    }


def validated(described: Mapping[str, Any], example: dict[str, Any]) -> Callable[[type[M]], type[M]]:
    """Return a decorator for a subclass of a message, which makes `TypeAdapter` validate its fields."""

    def decorate(body: type[M]) -> type[M]:
        body.__annotations__ = dict(described)
        for each in _fields(body):
            if each.default_factory is not dataclasses.MISSING:
                setattr(body, each.name, dataclasses.field(default_factory=each.default_factory))
        config = pydantic.ConfigDict(**STRICT, json_schema_extra=example)
        return cast("type[M]", dataclass(frozen=True, config=config)(body))

    return decorate


def _fields(message: type[Message]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(message)  # type: ignore[arg-type]  # every message is a dataclass


def _sentence(text: str | None) -> str | None:
    return text and text[0].upper() + text[1:]


MAX_REPORTS = 1000
"""Reports in one request."""
MAX_DECISION_COUNTS = 64
"""Replica counts in an explained decision."""
MAX_DECISION_GIVEN = 16
"""Other jobs that are named for each of them."""


def _example(**members: Any) -> dict[str, Any]:
    return {"examples": [members]}


class RequestBody(BaseModel):
    """A request body with exactly these fields of exactly these types."""

    model_config = STRICT


Amount = Annotated[float, Field(ge=0, le=1e300)]

REPORT_FIELDS = described_fields(
    GainReport,
    {
        "generation": Count,
        "step": Step,
        "progress": Progress,
        "epoch": Count,
        "replicas": Replicas,
        "local_bsz": Samples,
        "accumulation": Samples,
        "scale": Ratio,
        "gain": Ratio,
        "grad_sqr": Estimate,
        "grad_var": Estimate,
        "step_time": Seconds,
        "time": Timestamp,
        "goodput": Amount | None,
        "loss": Estimate | None,
        "target": Progress | None,
        "nodes": Replicas,
        "lr_factor": Factor | None,
        "lr": Factor | None,
        "sync_time": Seconds | None,
        "grad_sqr_error": EstimateError,
        "gpu_use": Share | None,
        "gpu_memory": Share | None,
        "slow_replica": Rank | None,
        "slow_factor": Factor | None,
        "metrics": Metrics,
        "accelerator": AcceleratorType,
        "counts_samples": bool,
    },
)


@validated(
    REPORT_FIELDS,
    _example(
        generation=2, step=1200, progress=3110.5, epoch=8, replicas=4, local_bsz=8, accumulation=1,
        scale=8.0, gain=3.2, grad_sqr=0.021, grad_var=0.064, step_time=0.0031,
        time=1760000000.0, goodput=1010.0, loss=0.31, target=20000.0, nodes=2,
        lr_factor=3.2, lr=0.032, sync_time=0.0008, gpu_use=0.93, gpu_memory=0.41,
        slow_replica=1, slow_factor=1.2,
        grad_sqr_error=0.004, metrics={"accuracy": 0.91},
        accelerator="NVIDIA-H200", counts_samples=False,
    ),
)  # fmt: skip
class GainReportBody(GainReport):
    """A snapshot of training, posted by rank 0."""


class JobSpecBody(RequestBody):
    """The declaration of a job."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            batch_size=4, max_batch_size=256, local_bsz_bounds=[4, 64], min_replicas=1, max_replicas=4,
            scale_invariant_steps=12000, efficiency_target=0.5,
        )
    )  # fmt: skip

    batch_size: Samples = Field(description="The global batch size that the learning rate was tuned for.")
    max_batch_size: Samples | None = Field(
        default=None, description="Upper bound of the global batch size; null for no bound."
    )
    local_bsz_bounds: tuple[Samples, SamplesOrAuto] | None = Field(
        default=None,
        description="Lower and upper bound of the batch size of one replica; null for no bounds. The upper "
        'bound may be "auto" if `max_batch_size` is set: what fits into memory.',
    )
    min_replicas: Replicas = Field(default=1, description="The minimum number of replicas.")
    max_replicas: Replicas = Field(default=1, description="The maximum number of replicas.")
    scale_invariant_steps: Steps | None = Field(
        default=None, description="The progress at which training ends; null if unknown."
    )
    efficiency_target: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="The minimum efficiency (gain / scale) of a batch while step times are unknown; with "
        "`train_samples`, always; null for "
        f"{DEFAULT_EFFICIENCY_TARGET}, with `train_samples` {DEFAULT_EFFICIENCY_TARGET_OF_SAMPLES}.",
    )

    train_samples: Steps | None = Field(
        default=None,
        description="The samples after which training ends, in place of `scale_invariant_steps`; progress is "
        "then the samples over `batch_size`.",
    )
    elastic_single_replica: bool = Field(
        default=False, description="Whether the batch of a single replica may exceed `batch_size`."
    )
    processes_per_replica: Replicas | None = Field(
        default=None,
        description="The number of processes of a replica, which divide its batch; null for one with the "
        "whole model.",
    )

    def to_spec(self) -> JobSpec:
        """Return the spec as a message of the core."""
        return JobSpec(**self.__dict__)


class AllocationBody(RequestBody):
    """The desired number of replicas."""

    model_config = ConfigDict(json_schema_extra=_example(generation=3, replicas=4))

    generation: Generation = Field(description="The number of the generation, higher than all before.")
    replicas: ReplicasOrZero = Field(description="The number of replicas; 0 suspends the job.")
    spares: ReplicasOrZero = Field(
        default=0,
        description="The number of replicas beyond them that are started and wait to take the places of lost "
        f"and of slow ones. Without replicas there are none, and both together are at most {MAX_REPLICAS}.",
    )
    failed: bool = Field(default=False, description="Whether the job has failed, and so gets no replicas.")

    def to_allocation(self) -> Allocation:
        """Return the allocation as a message of the core."""
        return Allocation(**self.__dict__)


class RegistrationBody(RequestBody):
    """The state and address of a replica's agent."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            replica=0, instance="6f1c.1", state="running", generation=2, address="127.0.0.1", port=40123,
            exit_code=None, log=None, assigned=2, step=None, lost=[], stepped=2, rank=0, replicas=4,
            version="0.1.0", node="node-a", key="", stall="",
            accelerator="cpu", local_bsz_limit=None, snapshot_port=40124,
        )
    )  # fmt: skip

    replica: Rank = Field(description="The index of the replica, as in the path.")
    instance: str = Field(
        min_length=1,
        max_length=128,
        pattern=NO_NUL,
        description="Identifies the trainer process: a random identifier of the agent, a dot, a number.",
    )
    state: ReplicaState = Field(description="The state of the replica.")
    generation: Count = Field(
        description="The last generation in which its trainer ran, or for which it has held; 0 if none."
    )
    address: str = Field(
        min_length=1, max_length=253, description="Host name or IP address at which other replicas reach it."
    )
    port: Port = Field(description="Port on which its trainer listens for other members; 0 if none.")
    exit_code: ExitCode | None = Field(
        default=None, description="Exit code of the trainer if it has exited; negative for a signal."
    )
    log: Annotated[str, Field(max_length=65536)] | None = Field(
        default=None, description="The last lines of the trainer's output if it failed."
    )
    assigned: Count = Field(
        default=0, description="The newest generation to which its trainer was assigned; 0 if none."
    )
    step: Step | None = Field(
        default=None, description="While it holds: the step of its state; null if it has no state."
    )
    lost: Annotated[tuple[Rank, ...], Field(max_length=MAX_REPLICAS)] = Field(
        default=(), description="While it holds: the replicas whose loss its trainer has noticed."
    )
    stepped: Count = Field(
        default=0, description="The newest generation in which its trainer has finished a step; 0 if none."
    )
    rank: Rank | None = Field(default=None, description="Its rank in the generation; null if none.")
    replicas: Replicas | None = Field(
        default=None, description="The number of members of the generation; null if none."
    )
    version: str = Field(default="", max_length=128, description="The version of the package.")
    node: str = Field(default="", max_length=253, description="The node that it runs on.")
    key: str = Field(
        default="",
        max_length=128,
        description="A random secret; the first becomes that of the job's members.",
    )
    stall: str = Field(
        default="",
        max_length=MAX_STALL_LENGTH,
        description="While no step of its trainer ends: where that is, or that it waits for the others.",
    )
    accelerator: AcceleratorType = Field(
        default="", description="The type of accelerator that it computes on; empty if unknown."
    )
    local_bsz_limit: Samples | None = Field(
        default=None,
        description="The largest local batch size that it can still try, because a larger one did not fit "
        "into memory; null if none has failed in its generation.",
    )
    snapshot_port: Port = Field(
        default=0,
        description="Port on which its agent sends copies of the state to the agents of others; 0 if none.",
    )

    def to_registration(self) -> Registration:
        """Return the registration as a message of the core."""
        # A program may print this character, and its log shall be shown nevertheless.
        log = None if self.log is None else self.log.replace("\0", "\ufffd")
        return Registration(**{**self.__dict__, "log": log})


Explanation = Annotated[str, Field(max_length=500)]


class GivenReplicasBody(RequestBody):
    """Replicas that another job would have to give up."""

    job: Annotated[str, Field(max_length=127)] = Field(description="The other job.")
    replicas: Replicas = Field(description="How many replicas.")


class CountBody(RequestBody):
    """What a replica count would give."""

    replicas: Replicas = Field(description="The replica count.")
    goodput: Amount | None = Field(
        description="Predicted steps at `batch_size` per second; null if not predicted."
    )
    seconds_left: Amount | None = Field(
        description="Predicted seconds to the end of the job, the restart included; null if not known."
    )
    given: Annotated[tuple[GivenReplicasBody, ...], Field(max_length=MAX_DECISION_GIVEN)] = Field(
        description="The replicas that other jobs would have to give up for it."
    )
    verdict: Verdict = Field(description="Why it was chosen or not.")
    reason: Explanation = Field(description="The same for people.")

    gain: Ratio | None = Field(default=None, description="The predicted gain; null if not predicted.")
    gain_low: Ratio | None = Field(
        default=None, description="The lower gain at one standard error of the estimate."
    )
    gain_high: Ratio | None = Field(
        default=None, description="The higher gain at one standard error of the estimate."
    )

    def to_count(self) -> CountView:
        """Return the count as a message of the core."""
        given = tuple(GivenReplicas(**each.__dict__) for each in self.given)
        return CountView(**{**self.__dict__, "given": given})


class LimitBody(RequestBody):
    """Something that limits the replica count."""

    kind: LimitKind = Field(description="What it is.")
    reason: Explanation = Field(description="The limit, for people.")


class DecisionBody(RequestBody):
    """A decision about a job, explained."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            job="default.digits", replicas=2, present=2, waiting=False,
            reason="unchanged: no other count is worth a change", time=1760000000.0,
            counts=[
                {
                    "replicas": 2, "goodput": 812.5, "seconds_left": 14.8, "given": [],
                    "verdict": "chosen", "reason": "chosen",
                },
                {
                    "replicas": 4, "goodput": 1320.0, "seconds_left": 10.1,
                    "given": [{"job": "default.other", "replicas": 2}],
                    "verdict": "other_jobs", "reason": "other jobs would lose more than this job would gain",
                },
            ],
            limits=[{"kind": "capacity", "reason": "0 of 4 replicas are free"}],
        )
    )  # fmt: skip

    job: Annotated[str, Field(min_length=1, max_length=127)] = Field(
        description="The job id, as in the path."
    )
    replicas: ReplicasOrZero = Field(description="The count that was chosen; 0 if the job does not run.")
    present: ReplicasOrZero = Field(description="The count before the decision.")
    waiting: bool = Field(description="Whether the job does not run because of insufficient capacity.")
    reason: Explanation = Field(description="Why it was chosen.")
    time: float = Field(ge=0, le=1e12, description="When it was decided, in seconds since 1970.")
    counts: Annotated[tuple[CountBody, ...], Field(max_length=MAX_DECISION_COUNTS)] = Field(
        description="What this and other counts would give, ascending."
    )
    limits: Annotated[tuple[LimitBody, ...], Field(max_length=16)] = Field(
        description="What limits the count."
    )

    def to_decision(self, job_id: str) -> DecisionView:
        """Return the decision about a job, by its full id, as a message of the core."""
        counts = tuple(each.to_count() for each in self.counts)
        limits = tuple(LimitView(**each.__dict__) for each in self.limits)
        return DecisionView(**{**self.__dict__, "job": job_id, "counts": counts, "limits": limits})
