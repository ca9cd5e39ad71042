"""The JSON at the edge: what may come in, how it becomes the core's dataclasses, and what goes out.

Numbers are taken strictly: no text, no truth value, nothing infinite. Limits are far beyond what makes
sense, and near enough that nothing overflows on the way.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from adascale_core.messages import Allocation, GainReport, JobSpec, Registration, ReplicaState
from adascale_core.names import MAX_BATCH_SIZE, MAX_REPLICAS, MAX_STEPS
from adascale_core.views import GainView, PredictionView

MAX_REPORTS = 1000
"""Reports in one request."""
MAX_BATCH = MAX_BATCH_SIZE
"""Samples in a step."""
MAX_INTEGER = 2**31 - 1
MAX_STEP = MAX_STEPS
"""Integers up to here are exact in any JSON reader."""


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""JSON has one kind of number, so 4.0 is the integer 4."""
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER), WHOLE]
Number = Annotated[int, Field(ge=1, le=MAX_INTEGER), WHOLE]
Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS), WHOLE]
ReplicasOrNone = Annotated[int, Field(ge=0, le=MAX_REPLICAS), WHOLE]
Rank = Annotated[int, Field(ge=0, lt=MAX_REPLICAS), WHOLE]
Samples = Annotated[int, Field(ge=1, le=MAX_BATCH), WHOLE]
Step = Annotated[int, Field(ge=0, le=MAX_STEP), WHOLE]
Port = Annotated[int, Field(ge=0, le=65535), WHOLE]
ExitCode = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER), WHOLE]
Estimate = Annotated[float, Field(ge=-1e300, le=1e300)]


def _example(**members: Any) -> dict[str, Any]:
    return {"examples": [members]}


class Input(BaseModel):
    """What may be sent: exactly these fields, of exactly these types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class GainReportBody(Input):
    """A snapshot of training, posted by rank 0."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            generation=2, step=1200, progress=3110.5, epoch=8, replicas=4, local_bsz=8, accumulation=1,
            scale=8.0, gain=3.2, grad_sqr=0.021, grad_var=0.064, step_time=0.0031,
            time=1760000000.0, loss=0.31,
        )
    )  # fmt: skip

    generation: Count = Field(description="The allocation that it was measured in.")
    step: Step = Field(description="Optimizer steps since the job began.")
    progress: float = Field(ge=0, le=1e15, description="Sum of gains so far, in steps at `batch_size`.")
    epoch: Count = Field(description="The epoch being trained, from 0.")
    replicas: Replicas = Field(description="Number of replicas (K).")
    local_bsz: Samples = Field(description="Samples in a micro-batch of one replica (b).")
    accumulation: Samples = Field(description="Micro-batches that a replica adds up before it steps (a).")
    scale: float = Field(ge=1e-9, le=1e9, description="K*b*a / `batch_size`.")
    gain: float = Field(ge=1e-9, le=1e9, description="Steps at `batch_size` that one step is worth.")
    grad_sqr: Estimate = Field(description="Estimated squared norm of the true gradient; by chance below 0.")
    grad_var: Estimate = Field(
        description="Estimated variance of a gradient at `batch_size`; by chance below 0."
    )
    step_time: float = Field(
        ge=0, le=1e6, description="Mean seconds per step since the last report; 0: not measured."
    )
    time: float = Field(ge=0, le=1e12, description="When the step was done, in seconds since 1970.")
    loss: Estimate | None = Field(
        default=None, description="Mean training loss since the last report, if told."
    )

    def report(self) -> GainReport:
        """The core's message."""
        return GainReport(**self.__dict__)


class JobSpecBody(Input):
    """What a job is declared to be."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            batch_size=4, max_batch_size=256, local_bsz_bounds=[4, 64], min_replicas=1, max_replicas=4,
            scale_invariant_steps=12000, efficiency_target=0.5,
        )
    )  # fmt: skip

    batch_size: Samples = Field(description="The global batch size that the learning rate was tuned for.")
    max_batch_size: Samples | None = Field(
        default=None, description="Upper bound of the global batch size; null: not bounded."
    )
    local_bsz_bounds: tuple[Samples, Samples] | None = Field(
        default=None, description="Lower and upper bound of the batch on one replica; null: not bounded."
    )
    min_replicas: Replicas = Field(default=1, description="The fewest replicas that it may run on.")
    max_replicas: Replicas = Field(default=1, description="The most replicas that it may run on.")
    scale_invariant_steps: Annotated[int, Field(ge=1, le=MAX_STEP), WHOLE] | None = Field(
        default=None, description="The progress at which it ends; null: not known."
    )
    efficiency_target: float = Field(
        default=JobSpec.efficiency_target,
        gt=0,
        le=1,
        description="Gain per scale that a batch must be worth while step times are not known.",
    )

    def spec(self) -> JobSpec:
        """The core's message."""
        return JobSpec(**self.__dict__)


class AllocationBody(Input):
    """The replica count that a job is given."""

    model_config = ConfigDict(json_schema_extra=_example(generation=3, replicas=4))

    generation: Number = Field(description="Its number, higher than the one before.")
    replicas: ReplicasOrNone = Field(description="Number of replicas; 0: none for now.")

    def allocation(self) -> Allocation:
        """The core's message."""
        return Allocation(**self.__dict__)


class RegistrationBody(Input):
    """What the agent of one replica is doing and where it is."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            rank=0, instance="6f1c", state="running", generation=2, address="127.0.0.1", port=40123,
            exit_code=None, log=None, prepared=2,
        )
    )  # fmt: skip

    rank: Rank = Field(description="The rank in the path, again.")
    instance: str = Field(
        min_length=1, max_length=128, description="Random text that tells it from an earlier agent."
    )
    state: ReplicaState = Field(description="What it is doing.")
    generation: Count = Field(description="The last generation its trainer has run in; 0: none.")
    address: str = Field(
        min_length=1, max_length=253, description="Host name or IP address at which the others reach it."
    )
    port: Port = Field(description="Port of the socket that it keeps for the next generation.")
    exit_code: ExitCode | None = Field(
        default=None, description="Of the trainer, where it has ended; negative for a signal."
    )
    log: Annotated[str, Field(max_length=65536)] | None = Field(
        default=None, description="The last lines that the trainer wrote, where it failed."
    )
    prepared: Count | None = Field(
        default=None, description="The newest generation that the next trainer is ready for, while one runs."
    )

    def registration(self) -> Registration:
        """The core's message."""
        return Registration(**self.__dict__)


class GainResponse(GainReportBody):
    """The latest report of a job, and what it predicts for other replica counts."""

    job: str = Field(description="The job's full id.")
    efficiency: float = Field(description="gain / scale.")
    predictions: list[PredictionView] | None = Field(
        description="For the valid replica counts; null while the job is not declared or nothing is measured."
    )

    @classmethod
    def of(cls, view: GainView) -> Self:
        """The response for the core's view."""
        predictions = None if view.predictions is None else list(view.predictions)
        return cls(**vars(view.report), job=view.job, efficiency=view.efficiency, predictions=predictions)


@dataclass(frozen=True)
class Health:
    """That the service answers."""

    status: str
