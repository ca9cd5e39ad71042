"""Messages and views survive the trip through JSON, and views say what to do next."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.messages import Message, channel
from adascale_core.messages.allocation import ActiveAllocation, Allocation, AllocationView, Member, MemberView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.views.decision import LimitKind, LimitView
from adascale_core.views.gain import GainView, HistoryView, StoredReports
from adascale_core.views.jobs import JobChanges, JobList, JobView, ReplicaView
from support.examples import examples

# The efficiency of a report divides by its scale.
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(GainReport, st.builds(GainReport, scale=st.floats(1e-9, 1e9)))

MESSAGES = (
    GainReport,
    StepTime,
    JobSpec,
    Allocation,
    ActiveAllocation,
    AllocationView,
    MemberView,
    Registration,
)
VIEWS = (StoredReports, GainView, HistoryView, ReplicaView, JobView, JobList, JobChanges)


@pytest.mark.parametrize("kind", [*MESSAGES, *VIEWS])
@given(st.data())
@settings(max_examples=examples(10))
def test_a_message_is_equal_after_a_round_trip_through_json_with_unknown_members(
    kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(st.from_type(kind))
    sent = json.loads(text := json.dumps(message.to_json()))
    received = kind.from_json({**sent, "since_the_next_version": 1})
    assert json.dumps(received.to_json()) == text
    if kind in MESSAGES:  # Views are drawn with lists as sequences, and received with tuples.
        assert received == message
        for field in fields(message):  # type: ignore[arg-type]
            assert type(getattr(received, field.name)) is type(getattr(message, field.name)), field.name


def test_the_view_of_an_unknown_job_is_empty() -> None:
    view = JobView.empty("default.digits")
    assert (view.id, view.generation, view.replica(0)) == ("default.digits", 0, None)
    assert JobView.from_json(json.loads(json.dumps(view.to_json()))) == view


def test_a_limit_of_a_kind_of_a_later_version_keeps_its_reason() -> None:
    limit = LimitView.from_json({"kind": "of the next version", "reason": "for a reason"})
    assert limit == LimitView(LimitKind.OTHER, "for a reason")
    assert LimitView.from_json(limit.to_json()) == limit


REPORT = GainReport(
    generation=1, step=10, progress=15.0, epoch=0, replicas=2, local_bsz=8, accumulation=3, scale=4.0,
    gain=3.0, grad_sqr=1.0, grad_var=2.0, step_time=0.1, time=0.0,
)  # fmt: skip
REGISTRATION = Registration(0, "a", ReplicaState.WAITING, 0, "host", 1)


@pytest.mark.parametrize(
    ("message", "values"),
    [
        (REPORT, {"counts_samples": True}),
        (Allocation(1, 2), {"spares": 1}),
        (REGISTRATION, {"state_port": 40124, "pid": 40124}),
    ],
)
def test_members_that_version_0_1_0_refuses_are_sent_only_if_they_say_something(
    message: Any, values: dict[str, Any]
) -> None:
    assert not message.to_json().keys() & values.keys()
    assert replace(message, **values).to_json() == {**message.to_json(), **values}


def test_an_unknown_replica_state_is_rejected() -> None:
    with pytest.raises(ValueError, match="dozing"):
        Registration.from_json({**REGISTRATION.to_json(), "state": "dozing"})


def test_a_report_has_a_plan_and_an_efficiency() -> None:
    assert REPORT.plan == BatchPlan(2, 8, 3)
    assert REPORT.efficiency == 0.75
    assert StepTime(2, 8, 3, 0.1).plan == BatchPlan(2, 8, 3)


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        (JobSpec(8), None),
        (JobSpec(8, scale_invariant_steps=20), 20),
        (JobSpec(8, train_samples=160), 20),
        (JobSpec(8, train_samples=161), 21),
        (JobSpec(8, train_samples=1), 1),
    ],
)
def test_a_job_ends_at_its_steps_or_at_those_of_its_samples(spec: JobSpec, steps: int | None) -> None:
    assert spec.steps == steps


@pytest.mark.parametrize("pair", [None, (4, 8)])
def test_a_spec_has_batch_bounds(pair: tuple[int, int] | None) -> None:
    assert JobSpec(8, 64, pair).bounds == BatchBounds(8, 64, pair)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            JobSpec(8, 64, (4, 16), scale_invariant_steps=20000, efficiency_target=0.7,
                    elastic_single_replica=True, local_bsz_limit=12),
            {"BATCH_SIZE": "8", "MAX_BATCH_SIZE": "64", "LOCAL_BSZ_BOUNDS": "4,16",
             "LOCAL_BSZ_LIMIT": "12", "ELASTIC_SINGLE_REPLICA": "1",
             "EFFICIENCY_TARGET": "0.7", "SCALE_INVARIANT_STEPS": "20000"},
        ),
        (
            JobSpec(8, 64, (4, "auto"), train_samples=1000),
            {"BATCH_SIZE": "8", "MAX_BATCH_SIZE": "64", "LOCAL_BSZ_BOUNDS": "4,auto",
             "TRAIN_SAMPLES": "1000"},
        ),
        (JobSpec(8), {"BATCH_SIZE": "8"}),
    ],
)  # fmt: skip
def test_the_environment_of_a_spec_unsets_the_variables_of_missing_fields(
    spec: JobSpec, expected: dict[str, str]
) -> None:
    names = ["BATCH_SIZE", "MAX_BATCH_SIZE", "LOCAL_BSZ_BOUNDS", "LOCAL_BSZ_LIMIT", "ELASTIC_SINGLE_REPLICA"]
    names += ["EFFICIENCY_TARGET", "SCALE_INVARIANT_STEPS", "TRAIN_SAMPLES"]
    assert spec.environment() == {f"ADASCALE_{name}": expected.get(name) for name in names}


WIDE, NARROW = JobSpec(8, 64, (4, 16)), JobSpec(8, 8, (4, 8))
"""Up to 16 replicas, and up to 2."""


@pytest.mark.parametrize(
    ("declared", "before", "replicas", "chosen"),
    [
        (None, None, 2, None),
        (WIDE, None, 2, WIDE),
        (WIDE, NARROW, 2, WIDE),
        (NARROW, WIDE, 2, NARROW),
        (NARROW, WIDE, 4, WIDE),  # edited while 4 replicas start: they must not fail
        (NARROW, None, 4, None),
        (None, WIDE, 4, WIDE),
        (NARROW, WIDE, 0, WIDE),
    ],
)
def test_an_allocation_gets_the_declared_spec_if_its_count_is_valid(
    declared: JobSpec | None, before: JobSpec | None, replicas: int, chosen: JobSpec | None
) -> None:
    active = ActiveAllocation(3, replicas, (Member(0, "a.1", "host", 1234, holds=True),))
    assert active.with_spec(declared, before) == replace(active, spec=chosen)


def view_of(active: int | None, *, broken: bool = False) -> AllocationView:
    allocation = None if active is None else ActiveAllocation(active, 2)
    return AllocationView(1, None, allocation, broken=broken, complete=False)


@pytest.mark.parametrize(
    ("view", "generation", "ended"),
    [
        (view_of(None), 0, False),
        (view_of(None), 3, False),  # the service has lost its data: training continues
        (view_of(1), 0, True),
        (view_of(3), 3, False),
        (view_of(3), 2, True),
        (view_of(3), 4, False),  # the service is behind the trainer: training continues
        (view_of(3, broken=True), 3, True),
        (view_of(3, broken=True), 2, True),
        (view_of(3, broken=True), 4, False),
    ],
)
def test_a_view_shows_which_generations_have_ended(
    view: AllocationView, generation: int, ended: bool
) -> None:
    assert view.has_ended(generation) is ended


@pytest.mark.parametrize(
    ("instance", "agent", "number"), [("6f1c.12", "6f1c", 12), ("6f1c", "6f1c", 0), ("a.b", "a", 0)]
)
def test_an_instance_names_the_agent_and_numbers_its_trainers(instance: str, agent: str, number: int) -> None:
    registration = replace(REGISTRATION, instance=instance)
    assert (registration.agent, registration.trainer) == (agent, number)


# -- between agent and trainer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        channel.Ready(7, "NVIDIA-T4", 12),
        channel.Holding(3, None, (1, 2)),
        channel.SavedElsewhere(4),
        channel.TrainingSaved(),
        channel.Exiting(75),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_of_a_trainer_survives_the_trip_through_json(message: channel.TrainerMessage) -> None:
    assert channel.trainer_message(channel.encode(message).decode()) == message


@given(
    st.lists(st.from_type(Member), max_size=3), st.text(), st.dictionaries(st.text(), st.none() | st.text())
)
def test_an_assignment_survives_the_trip_through_json(
    members: list[Member], secret: str, env: dict[str, str | None]
) -> None:
    assignment = channel.Assignment(3, 0, tuple(members), secret, env)
    assert channel.agent_message(channel.encode(assignment).decode()) == assignment


def test_a_message_of_an_unknown_type_and_unknown_fields_are_ignored() -> None:
    assert channel.trainer_message('{"type": "sings", "song": 1}') is None
    assert channel.trainer_message('{"type": "terminate"}') is None, "of an agent"
    assert channel.trainer_message('{"type": "exiting", "code": 1, "song": 2}') == channel.Exiting(1)


@pytest.mark.parametrize(
    "line",
    [
        "what?",
        "[1]",
        '{"type": "running"}',
        '{"type": "running", "generation": "3"}',
        '{"type": "running", "generation": true}',
        '{"type": "holding", "generation": 3, "step": 1, "lost": 2}',
        '{"type": "holding", "generation": 3, "step": 1, "lost": ["2"]}',
    ],
)
def test_what_is_no_message_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"message|Expecting value"):
        channel.trainer_message(line)
