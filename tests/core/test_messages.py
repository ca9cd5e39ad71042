"""Messages survive the trip through JSON, and views say what to do next."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.messages import Message, channel
from adascale_core.messages.allocation import ActiveAllocation, Allocation, AllocationView, Member, MemberView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport, StepTime

sizes = st.integers(1, 10**7)
numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=20)

allocations = st.builds(Allocation, generation=sizes, replicas=sizes)
specs = st.builds(
    JobSpec,
    batch_size=sizes,
    max_batch_size=st.none() | sizes,
    local_bsz_bounds=st.none() | st.tuples(sizes, sizes | st.just("auto")),
    min_replicas=sizes,
    max_replicas=sizes,
    scale_invariant_steps=st.none() | sizes,
    efficiency_target=numbers,
    train_samples=st.none() | sizes,
)
members = st.builds(
    Member,
    replica=sizes,
    instance=words,
    address=words,
    port=st.integers(0, 65535),
    holds=st.booleans(),
    node=words,
)
active_allocations = st.builds(
    ActiveAllocation,
    generation=sizes,
    replicas=sizes,
    members=st.lists(members, max_size=3).map(tuple),
    spec=st.none() | specs,
)
views = st.builds(
    AllocationView,
    version=sizes,
    desired=st.none() | allocations,
    active=st.none() | active_allocations,
    broken=st.booleans(),
    complete=st.booleans(),
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        GainReport,
        generation=sizes,
        step=sizes,
        progress=numbers,
        epoch=sizes,
        replicas=sizes,
        local_bsz=sizes,
        accumulation=sizes,
        scale=numbers,
        gain=numbers,
        grad_sqr=numbers,
        grad_var=numbers,
        step_time=numbers,
        time=numbers,
        loss=st.none() | numbers,
        target=st.none() | numbers,
        counts_samples=st.booleans(),
        slow_replica=st.none() | sizes,
        slow_factor=st.none() | numbers,
    ),
    st.builds(
        StepTime, replicas=sizes, local_bsz=sizes, accumulation=sizes, step_time=numbers, reports=sizes
    ),
    specs,
    allocations,
    active_allocations,
    views,
    st.builds(
        MemberView,
        version=sizes,
        desired=st.none() | allocations,
        active=st.none() | active_allocations,
        broken=st.booleans(),
        complete=st.booleans(),
        key=words,
        left_out=st.booleans(),
    ),
    st.builds(
        Registration,
        replica=sizes,
        instance=words,
        state=st.sampled_from(ReplicaState),
        generation=sizes,
        address=words,
        port=st.integers(0, 65535),
        exit_code=st.none() | st.integers(-64, 255),
        snapshot_port=st.integers(0, 65535),
        log=st.none() | words,
        assigned=sizes,
        step=st.none() | sizes,
        lost=st.lists(sizes, max_size=3).map(tuple),
        stepped=sizes,
        rank=st.none() | sizes,
        replicas=st.none() | sizes,
        version=words,
        node=words,
        key=words,
        stall=words,
    ),
)


@given(messages)
def test_a_message_is_equal_after_a_round_trip_through_json_with_unknown_members(message: Message) -> None:
    sent = {**message.to_json(), "since_the_next_version": 1}
    received = type(message).from_json(json.loads(json.dumps(sent)))
    assert received == message
    for field in fields(message):  # type: ignore[arg-type]
        assert type(getattr(received, field.name)) is type(getattr(message, field.name)), field.name


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
        (REGISTRATION, {"snapshot_port": 40124, "pid": 40124}),
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
    members=st.lists(members, max_size=3).map(tuple),
    secret=words,
    env=st.dictionaries(words, st.none() | words),
)
def test_an_assignment_survives_the_trip_through_json(
    members: tuple[Member, ...], secret: str, env: dict[str, str | None]
) -> None:
    assignment = channel.Assignment(3, 0, members, secret, env)
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
