"""Types of the fields of requests.

Numbers are strict: no strings, no booleans, no infinities. The limits exceed every sensible value, and
prevent overflows in later calculations.
"""

from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from adascale_core.batch.plans import AUTO, Auto
from adascale_core.names import (
    MAX_ACCELERATOR_LENGTH,
    MAX_BATCH_SIZE,
    MAX_METRICS,
    MAX_REPLICAS,
    MAX_STEPS,
    METRIC_NAME,
)

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
