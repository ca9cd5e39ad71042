"""Rendezvous: what registrations count as, and late, missing and unexpected registrations."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.rendezvous.rendezvous import Rendezvous, VersionMismatchError, declare, expire, register
from support.rendezvous import (
    ELASTIC,
    FAILED,
    FINISHED,
    HOLDING,
    LOST,
    REENTERING,
    RUNNING,
    TERMINATED,
    WAITING,
    active,
    after,
    desired,
    holding,
    registration,
    running,
)

# -- counting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "failures", "disruptions"),
    [
        ([FAILED], 1, 0),
        ([FAILED, FAILED], 1, 0),  # the same defect on all replicas
        ([FAILED, HOLDING], 1, 0),
        ([HOLDING, FAILED], 1, 0),  # the peer of the failed replica registers first
        ([HOLDING, FAILED, FAILED], 1, 0),
        ([LOST, LOST], 0, 1),
        ([TERMINATED, HOLDING, HOLDING], 0, 1),
    ],
)
def test_a_generation_counts_once_and_as_a_failure_if_the_program_failed(
    ends: list[ReplicaState], failures: int, disruptions: int
) -> None:
    state = after(
        running(1, 3), *(registration(index, replica_state, 1) for index, replica_state in enumerate(ends))
    )
    assert (state.failures, state.disruptions) == (failures, disruptions)


def test_a_failure_counts_also_if_the_others_have_left_the_replica_out_before() -> None:
    state = after(running(1, 2), holding(0, 1, 1))
    assert (active(state), state.disruptions) == ((2, [0]), 1)
    state = after(state, registration(1, FAILED, 1))
    assert (active(state), state.failures, state.disruptions) == ((2, [0]), 1, 0)


def too_large(state: Registration, limit: int) -> Registration:
    """The registration of a replica whose batch did not fit into memory."""
    return replace(state, local_bsz_limit=limit, accelerator="a")


def on_type(state: Rendezvous, *accelerators: str) -> Rendezvous:
    """Return the state with replicas on these types of accelerators, on the type `a` by default."""
    return replace(
        state,
        replicas={
            index: replace(each, accelerator=accelerators[index] if accelerators else "a")
            for index, each in state.replicas.items()
        },
    )


def limit_of(state: Rendezvous) -> int | None:
    """The limit with which the active generation trains."""
    assert state.active is not None
    assert state.active.spec is not None
    return state.active.spec.local_bsz_limit


@pytest.mark.parametrize("first", [0, 1])
def test_members_continue_with_a_lower_limit_after_a_batch_of_one_did_not_fit(first: int) -> None:
    state = after(
        on_type(running(1, 2)),
        *(
            registration(index, HOLDING, 1) if index == first else too_large(holding(index, 1), 6)
            for index in (0, 1)
        ),
    )
    assert active(state) == (2, [0, 1])
    assert limit_of(state) == 6
    assert (state.failures, state.disruptions, state.restarts_without_progress) == (0, 0, 0)


def test_a_trainer_that_ended_because_a_batch_did_not_fit_is_neither_a_failure_nor_a_disruption() -> None:
    state = after(on_type(running(1, 2)), too_large(registration(1, REENTERING, 1), 3), holding(0, 1, 1))
    assert active(state) == (2, [0])
    assert limit_of(state) == 3
    assert (state.failures, state.disruptions, state.restarts_without_progress) == (0, 0, 0)


def test_limits_only_fall_and_hold_for_their_type_of_accelerator() -> None:
    state = on_type(running(1, 1))
    for limit, expected in ((6, 6), (7, 6), (4, 4)):
        state = register(state, too_large(registration(0, RUNNING, 1), limit), ELASTIC)
        assert state.local_bsz_limit == expected
    assert Rendezvous.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert on_type(state, "other").local_bsz_limit is None
    # A job that has no replicas at present may get any type.
    assert replace(state, replicas={}).local_bsz_limit == 4


@pytest.mark.parametrize(
    ("present", "reported", "expected"),
    [
        # the limit of the type of the reports, also if its replicas are on another type by now, or gone
        (["a"], "a", 6),
        (["b"], "a", 6),
        (["a"], "b", 4),
        (["a"], "c", None),
        ([], "a", 6),
        # of all types that its replicas have
        (["a", "b"], "a", 4),
        (["a", "c"], "c", 6),
        # the type of the reports is not known
        (["a"], "", 6),
        ([], "", 4),
    ],
)
def test_predictions_have_the_limit_of_the_type_that_was_measured(
    present: Sequence[str], reported: str, expected: int | None
) -> None:
    state = running(1, len(present)) if present else Rendezvous()
    state = replace(on_type(state, *present), local_bsz_limits={"a": 6, "b": 4})
    assert state.local_bsz_limit_of_report(reported) == expected


def test_limits_are_learned_again_with_other_batch_sizes() -> None:
    state = register(on_type(running(1, 1)), too_large(registration(0, RUNNING, 1), 4), ELASTIC)
    assert declare(state, ELASTIC, replace(ELASTIC, max_replicas=4)).local_bsz_limit == 4
    assert declare(state, ELASTIC, replace(ELASTIC, local_bsz_bounds=(1, 16))).local_bsz_limit is None


def test_a_count_whose_batches_do_not_fit_waits_for_another_decision() -> None:
    spec = JobSpec(8, 64, (5, 8), max_replicas=8)
    state = after(on_type(running(1, 1, spec=spec)), too_large(holding(0, 1), 7), spec=spec)
    assert active(state) is None, "one replica needs 8 = 1 x 8 samples"
    joiner = replace(registration(1, WAITING), accelerator="a")
    state = after(state, Allocation(3, 2), joiner, spec=spec)
    assert active(state) == (3, [0, 1])
    assert limit_of(state) == 7


def test_restarts_without_progress_are_counted_until_the_next_step() -> None:
    state = running(1, 1)
    for generation in range(2, 5):
        name = f"{generation}"
        state = after(
            state,
            registration(
                0, LOST, generation - 1, trainer="trainer-0" if generation == 2 else f"{generation - 1}"
            ),
            registration(0, WAITING, trainer=name),
            registration(0, RUNNING, generation, trainer=name),
        )
        assert state.restarts_without_progress == generation - 1
    state = after(state, registration(0, RUNNING, 4, trainer="4", stepped=4))
    assert state.restarts_without_progress == 0
    state = after(state, registration(0, LOST, 4, trainer="4", stepped=4))
    assert state.restarts_without_progress == 0, "generation 4 has made a step"


def test_trainers_that_are_killed_before_any_generation_are_counted() -> None:
    state = after(Rendezvous(), Allocation(1, 2), *(registration(0, LOST, trainer=f"{i}") for i in range(3)))
    assert state.restarts_without_progress == 3
    state = after(state, registration(0, LOST, trainer="2"))
    assert state.restarts_without_progress == 3, "the same trainer"


def test_a_replica_that_cannot_join_does_not_count_while_the_others_make_steps() -> None:
    state = after(running(1, 1), registration(0, RUNNING, 1, stepped=1), Allocation(2, 2))
    state = after(state, *(registration(1, LOST, trainer=f"{i}") for i in range(9)))
    assert state.restarts_without_progress == 0
    assert after(state, registration(0, LOST, 1, stepped=1)).restarts_without_progress == 0


# -- versions and the secret ----------------------------------------------------------------------------


def test_another_version_is_refused_while_members_train_and_both_are_named() -> None:
    state = after(running(1, 1), replace(registration(0, RUNNING, 1), version="1.0"), Allocation(2, 2))
    with pytest.raises(VersionMismatchError, match=r"replica 1 has adascale 2.0.*replica 0.*has 1.0"):
        after(state, replace(registration(1, WAITING), version="2.0"))
    assert active(after(state, replace(registration(1, WAITING), version="1.0"))) == (2, [0, 1])
    gone = after(state, replace(registration(0, LOST, 1), version="1.0"))
    after(gone, replace(registration(1, WAITING), version="2.0"))


def test_the_first_secret_becomes_the_jobs_and_only_agents_get_it() -> None:
    state = after(Rendezvous(), replace(registration(0, WAITING), key="first"))
    state = after(state, replace(registration(1, WAITING), key="second"))
    assert state.member_view(1, "").key == "first"
    assert "first" not in json.dumps(state.view(1).to_json())
    assert all(not replica.key for replica in state.replicas.values())


# -- expiry ---------------------------------------------------------------------------------------------


def test_the_expiry_of_an_agent_does_not_interrupt_training() -> None:
    state = expire(running(1, 2), [1], ELASTIC)
    assert active(state) == (1, [0, 1])
    assert 1 not in state.replicas
    assert expire(state, [1]) == state
    assert after(state, registration(1, RUNNING, 1)) == running(1, 2)


def test_the_expiry_of_all_members_breaks_the_generation() -> None:
    state = expire(expire(running(1, 2), [1], ELASTIC), [0], ELASTIC)
    assert active(state) is None
    assert state.disruptions == 1
    assert active(after(state, holding(0, 1))) == (2, [0]), "it was only slow"


def test_an_expired_member_is_accounted_for_after_a_loss() -> None:
    state = after(running(1, 3), registration(1, LOST, 1), holding(0, 1))
    assert active(state) is None
    assert active(expire(state, [2], ELASTIC)) == (2, [0])


def test_an_expired_replica_is_absent_until_it_registers_again() -> None:
    state = expire(after(running(1, 1), registration(1, WAITING)), [1])
    state = after(state, Allocation(2, 2))
    assert active(state) == (1, [0])
    assert active(after(state, registration(1, WAITING))) == (2, [0, 1])


# -- late registrations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newer", "late"),
    [
        (registration(1, RUNNING, 1), registration(1, WAITING)),
        (registration(1, HOLDING, 1), registration(1, RUNNING, 1)),
        (registration(1, LOST, 1), registration(1, RUNNING, 1)),
        (registration(1, LOST, 1), registration(1, HOLDING, 1)),
        (registration(1, REENTERING, 1), registration(1, RUNNING, 1)),
        (registration(1, FAILED, 1), registration(1, LOST, 1)),
        (registration(1, TERMINATED, 1), registration(1, REENTERING, 1)),
        (registration(1, FINISHED, 1), registration(1, RUNNING, 1)),
        (registration(0, FINISHED, 1), registration(0, RUNNING, 1)),
        (registration(1, HOLDING, 1, lost=(0, 2)), registration(1, HOLDING, 1, lost=(0,))),
        (registration(1, RUNNING, 1, stepped=1), registration(1, RUNNING, 1)),
    ],
)
def test_a_delayed_registration_changes_nothing(newer: Registration, late: Registration) -> None:
    state = after(running(1, 3), newer)
    assert after(state, late) == state
    assert after(state, newer) == state


def test_registrations_of_a_replaced_trainer_are_ignored() -> None:
    state = after(running(1, 2), registration(1, WAITING, trainer="next"), holding(0, 1))
    assert active(state) == (2, [0, 1])
    for replica_state in ReplicaState:
        assert after(state, registration(1, replica_state, 1)) == state


# -- completion -----------------------------------------------------------------------------------------


def test_a_job_is_complete_when_rank_0_has_finished_and_remains_complete() -> None:
    done = after(running(1, 2), registration(0, FINISHED, 1))
    assert done.complete
    for state in (
        after(done, registration(0, WAITING, trainer="next")),
        after(done, registration(0, FAILED, 1)),
        after(done, registration(1, FAILED, 1)),
        after(done, registration(1, LOST, 1)),
        after(done, registration(1, WAITING, trainer="next")),
        expire(done, [0, 1]),
        after(done, Allocation(2, 2)),
    ):
        assert state.complete
        assert active(state) == (1, [0, 1])
        assert (state.failures, state.disruptions) == (0, 0)


def test_rank_0_need_not_be_the_replica_with_index_0() -> None:
    state = after(running(1, 3), registration(0, LOST, 1), holding(1, 1), holding(2, 1))
    assert active(state) == (2, [1, 2])
    assert not after(state, registration(2, FINISHED, 2, rank=1)).complete
    assert after(state, registration(1, FINISHED, 2, rank=0)).complete


def test_a_rank_other_than_0_that_finishes_neither_completes_the_job_nor_breaks_the_generation() -> None:
    state = after(running(1, 2), registration(1, FINISHED, 1))
    assert not state.complete
    assert active(state) == (1, [0, 1])


def test_a_program_that_finishes_before_it_enters_a_generation_breaks_that_generation() -> None:
    state = after(running(1, 1), Allocation(2, 2), registration(1, WAITING))
    assert active(state) == (2, [0, 1])
    state = after(state, registration(0, FINISHED, 1))
    assert state.complete
    assert state.view(1).has_ended(2)


def test_a_trainer_that_was_left_out_cannot_complete_the_job() -> None:
    state = after(running(1, 2), holding(1, 1, 0))
    assert active(state) == (2, [1])
    assert not after(state, registration(0, FINISHED, 1)).complete


# -- after a loss of the service's data -----------------------------------------------------------------


def in_generation_5(replica: int, replicas: int, rank: int | None = None) -> Registration:
    return registration(replica, RUNNING, 5, replicas=replicas, rank=rank)


def test_after_a_loss_of_data_the_running_generation_becomes_active() -> None:
    state = after(Rendezvous(), Allocation(5, 2), in_generation_5(1, 2, rank=0))
    assert active(state) is None
    state = after(state, in_generation_5(0, 2, rank=1))
    assert active(state) == (5, [1, 0])
    assert not state.view(1).has_ended(5)
    assert active(after(state, Allocation(6, 1))) == (6, [0])


def test_after_a_loss_of_data_running_replicas_move_to_a_newer_allocation() -> None:
    state = after(Rendezvous(), Allocation(6, 2), in_generation_5(0, 1), registration(1, WAITING))
    assert active(state) == (6, [0, 1])
    assert state.active is not None
    assert state.active.has_state


def test_after_a_loss_of_data_members_that_hold_continue() -> None:
    held = replace(holding(1, 5, 0), replicas=2, rank=1)
    state = after(Rendezvous(), Allocation(1, 2), held)
    assert active(state) == (6, [1])
    assert desired(state) == (7, 2)


def test_trainers_with_newer_state_take_the_place_of_a_generation_begun_without_them() -> None:
    state = after(Rendezvous(), registration(0, WAITING), Allocation(1, 1))
    assert active(state) == (1, [0])
    state = after(state, in_generation_5(1, 1, rank=0))
    assert active(state) == (6, [1, 0]), "replica 1 gives its state to replica 0, which stays"
    assert state.view(1).has_ended(1)
