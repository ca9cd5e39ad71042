"""The JSON bodies of requests, as pydantic models of messages of the core.

Numbers are strict: no strings, no booleans, no infinities. Their limits exceed every sensible value, and
prevent overflows in later calculations.
"""

# mypy: disable-error-code="valid-type"
# The types are values here, of which models are made.

import dataclasses
import inspect
import re
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType, NoneType
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from adascale_core.batch.plans import AUTO, Auto
from adascale_core.messages import Message
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Heartbeat
from adascale_core.messages.replica_seconds import Cause
from adascale_core.messages.reports import GainReport
from adascale_core.names import (
    MAX_ACCELERATOR_LENGTH,
    MAX_BATCH_SIZE,
    MAX_METRICS,
    MAX_REPLICAS,
    MAX_STALL_LENGTH,
    MAX_STEPS,
    METRIC_NAME,
)
from adascale_core.views.decision import CountView, DecisionView, GivenReplicas, LimitView

MAX_INTEGER = 2**31 - 1
MAX_REPORTS = 1000
"""Reports in one request."""
MAX_DECISION_COUNTS = 64
"""Replica counts in an explained decision."""
MAX_DECISION_GIVEN = 16
"""Other jobs that are named for each of them."""
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""Exactly the fields of a message, of exactly their types."""
NO_NUL = r"^[^\x00]*$"
"""PostgreSQL stores no text with this character."""

_ARGUMENTS = re.compile(r"^ {4}([\w, ]+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""In a docstring without the indentation of its class, which Python 3.13 removes."""


def _to_integer(value: object) -> object:
    # JSON has a single number type, so 4.0 is accepted as 4.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _to_samples_or_auto(value: object) -> object:
    value = _to_integer(value)
    if value == AUTO or (type(value) is int and 1 <= value <= MAX_BATCH_SIZE):
        return value
    # pydantic itself has an error for each member of a union.
    raise PydanticCustomError("samples_or_auto", f'an integer from 1 to {MAX_BATCH_SIZE} or "{AUTO}"')


def _integer(lowest: int, highest: int = MAX_INTEGER) -> Any:
    return Annotated[int, Field(ge=lowest, le=highest), BeforeValidator(_to_integer)]


def _number(lowest: float, highest: float) -> Any:
    return Annotated[float, Field(ge=lowest, le=highest)]


def _text(length: int, shortest: int = 0, pattern: str | None = None) -> Any:
    return Annotated[str, Field(min_length=shortest, max_length=length, pattern=pattern)]


Replicas = _integer(1, MAX_REPLICAS)
ReplicasOrZero = _integer(0, MAX_REPLICAS)
Rank = _integer(0, MAX_REPLICAS - 1)
Samples = _integer(1, MAX_BATCH_SIZE)
SamplesOrAuto = Annotated[Samples | Auto, BeforeValidator(_to_samples_or_auto)]
Estimate = _number(-1e300, 1e300)
MetricName = Annotated[str, Field(pattern=f"^{METRIC_NAME}$")]
_TYPES = {
    name: kind
    for names, kind in (
        ("assigned epoch generation pid stepped", _integer(0)),
        ("max_replicas min_replicas nodes processes_per_replica replicas", Replicas),
        ("present spares", ReplicasOrZero),
        ("rank replica slow_replica", Rank),
        ("lost", Annotated[tuple[Rank, ...], Field(max_length=MAX_REPLICAS)]),
        ("accumulation batch_size local_bsz local_bsz_limit max_batch_size", Samples),
        ("local_bsz_bounds", tuple[Samples, SamplesOrAuto]),
        ("step", _integer(0, MAX_STEPS)),
        ("scale_invariant_steps train_samples", _integer(1, MAX_STEPS)),
        ("port state_port", _integer(0, 65535)),
        ("exit_code", _integer(-MAX_INTEGER)),
        ("grad_sqr grad_var loss", Estimate),
        ("metrics", Annotated[dict[MetricName, Estimate], Field(max_length=MAX_METRICS)]),
        ("seconds", dict[Cause, Annotated[float, Field(ge=0, le=1e12)]]),
        ("goodput grad_sqr_error seconds_left", _number(0, 1e300)),
        ("progress target", _number(0, 1e15)),
        ("gain gain_high gain_low scale", _number(1e-9, 1e9)),
        ("lr lr_factor slow_factor", _number(0, 1e9)),
        ("gpu_memory gpu_use", _number(0, 1)),
        ("efficiency_target", Annotated[float, Field(gt=0, le=1)]),
        ("step_time sync_time", _number(0, 1e6)),
        ("time", _number(0, 1e12)),
        ("job", _text(127)),
        ("instance", _text(128, 1, NO_NUL)),
        ("address", _text(253, 1)),
        ("node", _text(253)),
        ("key version", _text(128)),
        ("accelerator", _text(MAX_ACCELERATOR_LENGTH, pattern=r"^[^\x00-\x1f]*$")),
        ("stall", _text(MAX_STALL_LENGTH)),
        ("reason", _text(500)),
        # A program may print this character, and its log shall be shown nevertheless.
        ("log", Annotated[_text(65536), AfterValidator(lambda log: log.replace("\0", "\ufffd"))]),
    )
    for name in names.split()
}
"""The types of the fields of all messages, by their names, but those of truth values and enumerations."""


def descriptions(message: type[Message]) -> dict[str, str]:
    """Return what the docstrings of a message say of its fields; with `python -OO` nothing."""
    texts: dict[str, str] = {}
    documents = "\n".join(inspect.cleandoc(each.__doc__ or "") for each in reversed(message.__mro__))
    for names, text in _ARGUMENTS.findall(documents):
        sentence = re.sub(r"\s+", " ", text).replace("None", "null")
        texts |= dict.fromkeys(names.split(", "), sentence[0].upper() + sentence[1:])
    return texts


def message_body(
    message: type[Message], types: Mapping[str, Any] = MappingProxyType({}), **example: Any
) -> type[BaseModel]:
    """Return the model of a message, whose docstring describes the fields.

    `types` has those of fields that differ from `_TYPES`; None for one that is not sent.
    """
    texts = descriptions(message)
    fields: dict[str, Any] = {}
    hints = get_type_hints(message)
    found: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(message)  # type: ignore[arg-type]  # each is one
    for each in found:
        hint = hints[each.name]
        is_closed = isinstance(hint, type) and issubclass(hint, bool | Enum)
        kind = hint if is_closed else {**_TYPES, **types}[each.name]
        if kind is None:
            continue
        default = ... if each.default is dataclasses.MISSING else each.default
        if each.default_factory is not dataclasses.MISSING:
            default = Field(default_factory=each.default_factory)
        kind = kind | None if NoneType in get_args(hint) else kind
        fields[each.name] = (Annotated[kind, Field(description=texts.get(each.name))], default)
    model: type[BaseModel] = create_model(
        f"{message.__name__}Body",
        __config__=ConfigDict(**STRICT, json_schema_extra={"examples": [example]} if example else None),
        __doc__=(message.__doc__ or "").partition("\n")[0],
        **fields,
    )
    return model


GainReportBody: Any = message_body(
    GainReport,
    generation=2, step=1200, progress=3110.5, epoch=8, replicas=4, local_bsz=8, accumulation=1,
    scale=8.0, gain=3.2, grad_sqr=0.021, grad_var=0.064, step_time=0.0031,
    time=1760000000.0, goodput=1010.0, loss=0.31, target=20000.0, nodes=2,
    lr_factor=3.2, lr=0.032, sync_time=0.0008, gpu_use=0.93, gpu_memory=0.41,
    slow_replica=1, slow_factor=1.2,
    grad_sqr_error=0.004, metrics={"accuracy": 0.91},
    accelerator="NVIDIA-H200", counts_samples=False,
)  # fmt: skip
GainReports: Any = Annotated[
    list[GainReportBody], Field(min_length=1, max_length=MAX_REPORTS, fail_fast=True)
]
"""The length is checked while the list is read, and reading ends at the first invalid report."""
JobSpecBody = message_body(
    JobSpec,
    {"local_bsz_limit": None},
    batch_size=4, max_batch_size=256, local_bsz_bounds=[4, 64], min_replicas=1, max_replicas=4,
    scale_invariant_steps=12000, efficiency_target=0.5,
)  # fmt: skip
AllocationBody = message_body(
    Allocation, {"generation": _integer(1), "replicas": ReplicasOrZero}, generation=3, replicas=4
)
RegistrationBody = message_body(
    Heartbeat,
    replica=0, instance="6f1c.1", state="running", generation=2, address="127.0.0.1", port=40123,
    exit_code=None, log=None, assigned=2, step=None, lost=[], stepped=2, rank=0, replicas=4,
    version="0.1.0", node="node-a", key="", stall="",
    accelerator="cpu", local_bsz_limit=None, state_port=40124, pid=4711,
    seconds={"starting": 3.5, "useful": 61.25},
)  # fmt: skip
GivenReplicasBody: Any = message_body(GivenReplicas)
CountBody: Any = message_body(
    CountView,
    {"given": Annotated[tuple[GivenReplicasBody, ...], Field(max_length=MAX_DECISION_GIVEN)]},
)
LimitBody: Any = message_body(LimitView)
DecisionBody = message_body(
    DecisionView,
    {
        "job": _text(127, 1),
        "replicas": ReplicasOrZero,
        "counts": Annotated[tuple[CountBody, ...], Field(max_length=MAX_DECISION_COUNTS)],
        "limits": Annotated[tuple[LimitBody, ...], Field(max_length=16)],
    },
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
)  # fmt: skip

BODIES: tuple[Any, ...] = (GainReportBody, AllocationBody, RegistrationBody, JobSpecBody, DecisionBody)
"""Those of the requests."""
