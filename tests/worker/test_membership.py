"""Tests of changes of membership, with real trainers and a scripted agent."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adascale_core.failures import EXIT_REENTRY
from support.examples import examples
from support.launch import PROGRAMS
from support.members import REPLACED_CODES, Members, Trainer
from support.training import samples

AVERAGES = PROGRAMS / "averages.py"
DIES_WHILE_SENDING = PROGRAMS / "dies_while_sending.py"
EVALUATES = PROGRAMS / "evaluates.py"
LATE = PROGRAMS / "late.py"
ACCUMULATING = json.dumps({"batch_size": 12, "local_bsz_bounds": [2, 3]})
ELASTIC = json.dumps({"batch_size": 8, "max_batch_size": 24, "local_bsz_bounds": [2, 8]})


@pytest.mark.slow
def test_a_killed_member_costs_no_bit_if_micro_batches_have_weights(
    make_members: Callable[..., Members],
) -> None:
    """The replacement does not know the weight of the steps before."""
    options = {"EPOCHS": 6, "STEP_SECONDS": 0.01, "WEIGHTED": 1}
    calm = make_members("calm", **options)
    expected = calm.complete(2)
    job = make_members("killed", **options)
    first, lost, spare = job.start(3)
    job.train([first, lost], 3)
    lost.kill()
    job.wait_holding([first])
    job.activate([first, spare])
    assert job.finish() == expected
    assert job.require_complete_stream() == calm.require_complete_stream()


def test_survivors_stay_in_their_processes_when_replicas_join_and_leave(
    make_members: Callable[..., Members],
) -> None:
    job = make_members(BOUNDS=ELASTIC, EPOCHS=30, STEP_SECONDS=0.01)
    trainers = job.start(3)
    for count in (1, 3, 2, 1):
        job.train(trainers[:count], 5)
    assert len(job.finish()) == 1
    job.require_complete_stream()
    first = {record["file"] for record in job.records() if record["replicas"] == 1}
    assert len(first) == 1
    assert {record["replicas"] for record in job.records()} == {1, 2, 3}


@pytest.mark.slow
def test_persistent_workers_load_each_sample_once_over_changes_of_size_and_a_loss(
    make_members: Callable[..., Members],
) -> None:
    loader = json.dumps({"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"})
    job = make_members(BOUNDS=ELASTIC, EPOCHS=30, STEP_SECONDS=0.01, LOADER=loader)
    trainers = job.start(3)
    for count in (1, 2, 3):
        job.train(trainers[:count], 5)
    trainers[1].kill()
    members = [trainers[0], trainers[2]]
    job.wait_holding(members)
    job.train(members, 5)
    job.finish()
    job.require_complete_stream()
    first = {record["file"] for record in job.records() if record["rank"] == 0}
    assert len(first) == 1


def test_averages_of_weights_and_batchnorm_are_those_of_the_steps_over_changes_of_size(
    make_members: Callable[..., Members],
) -> None:
    job = make_members(PROGRAM=AVERAGES, BOUNDS=ELASTIC, EPOCHS=30, STEP_SECONDS=0.01)
    trainers = job.start(3)
    for count in (1, 3, 2):
        job.train(trainers[:count], 5)
    job.finish()
    steps = {record["step"]: record for record in job.records() if record["rank"] == 0}
    assert sorted(steps) == list(range(1, job.require_complete_stream() + 1))
    norm = nn.BatchNorm1d(6)
    average: list[torch.Tensor] = []
    for step in sorted(steps):
        for batch in steps[step]["batches"]:
            norm(samples()[torch.tensor(batch)][1])
        weights = [torch.tensor(weight) for weight in steps[step]["weights"]]
        average = (
            [0.9 * old + 0.1 * new for old, new in zip(average, weights, strict=True)] if average else weights
        )
    results = [json.loads(path.read_text()) for path in (job.folder / "journal").glob("result-*")]
    assert sorted(result["rank"] for result in results) == [0, 1]
    for result in results:
        for found, weight in zip(result["average"], average, strict=True):
            torch.testing.assert_close(torch.tensor(found), weight, rtol=0, atol=1e-5)
        if result["rank"] == 0:
            for found, buffer in zip(result["buffers"], norm.buffers(), strict=True):
                torch.testing.assert_close(torch.tensor(found), buffer, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("victim", "width", "gpus"),
    [
        pytest.param(1, 16, 0, marks=pytest.mark.slow),
        (0, 50_000, 0),
        pytest.param(0, 50_000, 1, marks=pytest.mark.gpu, id="replicas share a GPU, with gloo"),
        pytest.param(0, 50_000, 2, marks=pytest.mark.gpu, id="a GPU for each replica, with NCCL"),
    ],
)
def test_a_killed_member_costs_no_step_and_no_bit(
    make_members: Callable[..., Members], victim: int, width: int, gpus: int
) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    options = {
        "EPOCHS": 6,
        "STEP_SECONDS": 0.01,
        "WIDTH": width,
        "GPUS": gpus,
        **({"KEEP_GRADIENTS": 1} if victim else {}),
    }
    calm = make_members("calm", **options)
    expected = calm.complete(2)
    job = make_members("killed", **options)
    *members, first, second = job.start(4)
    job.activate(members)
    for round_, spare in enumerate((first, second)):
        job.wait_step(job.last_step() + random.Random(victim + round_).randint(1, 4))
        lost = members[victim]
        lost.kill()
        survivors = [t for t in members if t is not lost]
        job.wait_holding(survivors)
        # Gloo can notice the closed connection before the links between members do.
        job.wait(
            lambda lost=lost, survivors=survivors: all(
                t.state.get("lost") == [lost.replica] for t in survivors
            ),
            "the loss is reported",
        )
        members = [*survivors, spare]
        job.activate(members)
    assert job.finish() == expected
    assert job.require_complete_stream() == calm.require_complete_stream()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "fails", "ends_epoch"),
    [(0, True, True), (1, False, False)],
)
def test_survivors_agree_on_the_later_step_if_only_one_has_finished_it(
    make_members: Callable[..., Members], late: int, fails: bool, ends_epoch: bool
) -> None:
    """A member is killed while one of the others has made the step, and the other has not."""
    options = {"EPOCHS": 4, "STEP_SECONDS": 0.01, "PER_EPOCH": 1}
    calm = make_members("calm", **options)
    expected = calm.complete(3)
    last = max(record["step"] for record in calm.records() if record["epoch"] == 1)
    environ = {"LATE_REPLICA": late, "LATE_AT": last if ends_epoch else last - 2, "LATE_FAILS": int(fails)}
    job = make_members("late", **options, PROGRAM=LATE, **environ)
    *members, spare = job.start(4)
    survivors, lost = members[:2], members[2]
    behind, ahead = survivors[late], survivors[1 - late]
    job.activate(members)
    folder = job.folder / "journal"
    job.wait((folder / "late").exists, "one member is late")
    step = last_step_of(job, behind) + 1
    assert (step == last) == ends_epoch
    job.wait(lambda: last_step_of(job, ahead) == step, "the other survivor has made the step")
    lost.kill()
    job.wait_holding([ahead])
    assert last_step_of(job, behind) == step - 1
    (folder / "release").touch()
    job.wait_holding(survivors)
    assert ahead.state["step"] == step
    assert behind.state["step"] == (step - 1 if fails else step)
    job.activate([*survivors, spare])
    assert job.finish() == expected
    assert all(trainer.code == 0 for trainer in survivors), "they stay in their processes"
    assert job.require_complete_stream() == calm.require_complete_stream()
    journal, undisturbed = results_by_rank(job), results_by_rank(calm)
    # The late member gets this step from the other, and does not record it. The killed one may not have.
    unrecorded = {(step, 2), *({(step, late)} if fails else ())}
    assert undisturbed.keys() - journal.keys() <= unrecorded
    assert journal == {place: undisturbed[place] for place in journal}


def last_step_of(job: Members, trainer: Trainer) -> int:
    """Return the last step that a trainer has recorded."""
    name = f"{trainer.replica}-{trainer.pid}.jsonl"
    return max((record["step"] for record in job.records() if record["file"] == name), default=0)


def results_by_rank(job: Members) -> dict[tuple[int, int], tuple[object, ...]]:
    """Return what each step has read and computed, by step and rank."""
    names = ("samples", "indices", "epoch", "loss", "progress", "lr", "ended")
    return {
        (record["step"], record["rank"]): tuple(record[name] for name in names) for record in job.records()
    }


FINISHES = {"EPOCHS": 3, "BOUNDS": json.dumps({"batch_size": 12, "epochs": 3}), "STEP_SECONDS": 0.01}


def test_the_replacement_of_a_member_lost_while_the_end_is_saved_saves_it_too(
    make_members: Callable[..., Members], tmp_path: Path
) -> None:
    options = {**FINISHES, "EVALUATES": "epochs", "PROGRAM": PROGRAMS / "dies_at_the_end.py", "DIES": 0}
    job = make_members("job", **options, ADASCALE_CHECKPOINT_DIR=tmp_path / "checkpoints")
    lost, *survivors, spare = job.start(4)
    job.activate([lost, *survivors])
    job.wait(lambda: lost.code == -signal.SIGKILL, "a member is killed at the end")
    job.wait_holding(survivors)
    job.activate([*survivors, spare])
    assert len(job.finish()) == 1
    assert all(member.has_sent("final") for member in job.active)


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_rank_0_saves_at_once(
    make_members: Callable[..., Members], tmp_path: Path, *, is_killed: bool
) -> None:
    """The former one may have been saving. The interval continues, also for one that has joined later."""
    folder = tmp_path / "checkpoints"
    saves = {"ADASCALE_CHECKPOINT_DIR": folder, "ADASCALE_CHECKPOINT_INTERVAL": 1000}
    job = make_members("job", EPOCHS=10**6, STEP_SECONDS=0.01, **saves)
    first, second, third = job.start(3)
    job.activate([first])
    job.wait(lambda: list(folder.glob("*.json")), "the checkpoint of the first steps")
    job.train([first, second], 20)
    if is_killed:
        first.kill()
        job.wait_holding([second])
    job.train([second], 20)
    job.train([second, third], 20)
    job.train([third], 20)
    newest = [folder / f"checkpoint-0000000{number}.json" for number in (3, 4)]
    # After a step, before it grew, and of two others.
    job.wait(lambda: sorted(folder.glob("*.json")) == newest, "the checkpoint of the third")


def test_replicas_of_a_finished_job_that_start_again_have_all_finished(
    make_members: Callable[..., Members], tmp_path: Path
) -> None:
    environ = {**FINISHES, "EVALUATES": "finished", "ADASCALE_CHECKPOINT_DIR": tmp_path / "checkpoints"}
    job = make_members("first", **environ)
    weights = job.complete(2)
    again = make_members("again", **environ)
    assert again.complete(2) == weights
    assert not again.records(), "no step is made"


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once(make_members: Callable[..., Members]) -> None:
    """Also when the replicas and their batches change, and a member is lost."""
    bounds = json.dumps({"batch_size": 8, "max_batch_size": 12, "local_bsz_bounds": [2, 8]})
    job = make_members(BOUNDS=bounds, EPOCHS=60, STEP_SECONDS=0.01, COMPILE=1)
    first, second, third = job.start(3)
    for members in ([first], [first, second], [first]):
        job.train(members, 5)
    job.train([first, third], 5)
    third.kill()
    job.wait_holding([first])
    job.activate([first])
    assert len(job.finish()) == 1
    job.require_complete_stream()
    batches = {(record["replicas"], len(record["indices"])) for record in job.records()}
    assert len({size for _, size in batches}) > 1, batches
    assert {replicas for replicas, _ in batches} == {1, 2}


@pytest.mark.slow
def test_members_that_are_stopped_together_lose_nobody(make_members: Callable[..., Members]) -> None:
    job = make_members(EPOCHS=30, STEP_SECONDS=0.01, ADASCALE_PEER_TIMEOUT=1)
    members = job.start(2)
    job.activate(members)
    job.wait_step(3)
    for _ in range(3):
        for member in members:
            member.kill(signal.SIGSTOP)
        # The members can notice nothing in this time.
        time.sleep(1.2)
        for member in members:
            member.kill(signal.SIGCONT)
        job.wait_step(job.last_step() + 3)
    held = [message for member in members for message in member.messages if message.get("lost")]
    assert not held
    job.finish()


def test_a_state_that_has_arrived_in_part_replaces_nothing(make_members: Callable[..., Members]) -> None:
    options = {"EPOCHS": 1, "WIDTH": 300_000}
    calm = make_members("calm", **options)
    calm.activate(calm.start(2)[1:])
    expected = calm.finish()

    for number in range(5):
        job = make_members(f"killed-{number}", PROGRAM=DIES_WHILE_SENDING, STEP_SECONDS=0.3, **options)
        holder, joiner = job.start(2)
        job.activate([holder])
        job.wait_step(1)
        job.activate([holder, joiner], wait=False)
        job.wait(lambda lost=holder: lost.code == -signal.SIGKILL, "the member with the state is killed")
        job.wait_holding([joiner])
        if joiner.code is None:
            break
        # Gloo has lost a message: the process ends instead, and another one does not have these weights.
    # All that have the state are lost, and there is no checkpoint.
    job.activate([joiner])
    assert job.finish() == expected


@pytest.mark.slow
def test_training_never_begins_with_weights_that_were_received_in_part(
    make_members: Callable[..., Members],
) -> None:
    options = {"EPOCHS": 1, "WIDTH": 50_000, "STEP_SECONDS": 0.1}
    calm = make_members("calm", **options)
    calm.activate(calm.start(3)[2:])
    expected = calm.finish()

    job = make_members("killed", PROGRAM=DIES_WHILE_SENDING, DIES=0, WHILE="piece", **options)
    holder, joiner = job.start(2)
    job.activate([holder])
    job.activate([holder, joiner], wait=False)
    job.wait(lambda: holder.code == -signal.SIGKILL, "the only member with the state is killed")
    job.wait_holding([joiner])
    job.activate([joiner], wait=False)
    job.wait(lambda: joiner.code == EXIT_REENTRY, "its process ends")
    job.activate(job.start())
    assert job.finish() == expected


def test_replicas_that_join_get_the_state_while_the_others_train(
    make_members: Callable[..., Members],
) -> None:
    options = {"EPOCHS": 30, "STEP_SECONDS": 0.05, "WIDTH": 50_000}
    job = make_members(PROGRAM=DIES_WHILE_SENDING, DIES="nobody", BOUNDS=ELASTIC, **options)
    first, *others = job.start(3)
    job.train([first], 3)
    job.train([first, *others], 3)
    assert len(job.finish()) == 1
    job.require_complete_stream()
    for each in others:
        assert "of 12 large tensors, 10 were received while" in each.output.read_text()


@pytest.mark.parametrize(
    ("lost", "more"), [(0, {}), (1, {"AUTOCAST": 1, "BOUNDS": ACCUMULATING})], ids=["rank 0", "autocast"]
)
def test_a_spare_that_follows_has_the_state_when_it_takes_the_place_of_a_lost_member(
    make_members: Callable[..., Members], lost: int, more: dict[str, Any]
) -> None:
    """Also if that is rank 0, which it follows. Statistics of BatchNorm are sent again."""
    options = {"EPOCHS": 5, "WIDTH": 50_000, "STEP_SECONDS": 0.1, **more}
    calm = make_members("calm", **options)
    expected = calm.complete(2)
    job = make_members("killed", **options)
    spare = job.replace_by_spare(lost)
    assert job.finish() == expected
    assert job.require_complete_stream() == calm.require_complete_stream()
    assert "of 12 large tensors, 10 were received while" in spare.output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("while_", ["piece", "rest"])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_replica_that_is_killed_while_the_state_is_sent_during_steps_costs_no_step_and_no_bit(
    make_members: Callable[..., Members], while_: str, dies: int
) -> None:
    options = {"EPOCHS": 4, "WIDTH": 50_000, "STEP_SECONDS": 0.05}
    calm = make_members("calm", **options)
    expected = calm.complete(2)
    job = make_members("killed", PROGRAM=DIES_WHILE_SENDING, DIES=dies, WHILE=while_, **options)
    source, joiner, other = job.start(3)
    job.train([source, other], 3)
    job.activate([source, other, joiner], wait=False)
    lost, members = ((source, [other, joiner]), (joiner, [source, other]))[dies]
    job.wait(lambda: lost.code == -signal.SIGKILL, "one is killed")
    if dies == 0:
        job.wait(lambda: all(each.has_sent("holding") for each in members), "the others notice it")
    job.activate(members)
    assert job.finish() == expected
    assert job.require_complete_stream() == calm.require_complete_stream()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(1)))
def test_weights_and_samples_survive_kills_and_freezes_at_any_moment(
    make_members: Callable[..., Members], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    count = chance.choice([2, 3, 4])
    options = {"EPOCHS": 12, "STEP_SECONDS": 0.005, "ADASCALE_PEER_TIMEOUT": 1}
    calm = make_members("calm", **options)
    calm.activate(calm.start(count))
    expected = calm.finish()
    # For members that save before they end, because they cannot leave a collective call.
    saves = {"ADASCALE_CHECKPOINT_DIR": tmp_path / "checkpoints", "ADASCALE_CHECKPOINT_INTERVAL": 1000}
    job = make_members("disturbed", **options, **saves)
    members = job.start(count)
    job.activate(members)
    holders = members
    for _ in range(4):
        spares = job.start(chance.choice([0, 1]))
        for spare in spares:
            job.follow(spare)
        time.sleep(chance.random() * 0.2)
        kept = chance.choice(holders)  # Else the state would be lost.
        victims = chance.sample([t for t in members if t is not kept], chance.randint(1, count - 1))
        frozen = []
        for victim in victims:
            if chance.random() < 0.3:
                victim.kill(signal.SIGSTOP)
                frozen.append(victim)
            else:
                victim.kill()
            time.sleep(chance.random() * 0.03)
        rest = [member for member in members if member not in victims]
        if all(member.code == 0 for member in rest):
            break
        job.wait_holding(rest)
        rest = [member for member in rest if member.code not in REPLACED_CODES]
        spares = [*spares, *job.start(max(count - len(rest) - len(spares), 0))][: count - len(rest)]
        holders = [member for member in rest if member.state["step"] is not None]
        members = holders + [member for member in rest if member not in holders] + spares
        holders = holders or members
        job.activate(members, wait=False)
        for member in frozen:
            member.kill(signal.SIGCONT)
            job.release(member)
    assert job.finish() == expected
    assert job.require_complete_stream() == calm.require_complete_stream()


@pytest.mark.slow
def test_after_half_of_eight_replicas_are_lost_one_by_one_the_weights_differ_by_rounding_only(
    make_members: Callable[..., Members],
) -> None:
    def weights(job: Members) -> list[torch.Tensor]:
        paths = [*(job.folder / "journal").glob("tensors-*")]
        first, *others = [torch.load(path) for path in paths]
        assert all(torch.equal(a, b) for each in others for a, b in zip(first, each, strict=True))
        return list(first)

    options = {"PROGRAM": PROGRAMS / "precise.py", "EPOCHS": 6, "STEP_SECONDS": 0.1}
    calm = make_members("calm", **{**options, "STEP_SECONDS": 0.0})
    calm.activate(calm.start())
    calm.finish()
    job = make_members("disturbed", **options)
    members = job.start(8)
    job.activate(members)
    for _ in range(4):
        job.wait_step(job.last_step() + 2)
        members.pop(random.Random(len(members)).randrange(len(members))).kill()
        job.wait_holding(members)
        members = [each for each in members if each.code is None]
        job.activate(members)
    job.finish()
    assert {record["replicas"] for record in job.records()} >= {4, 8}
    for ours, theirs in zip(weights(job), weights(calm), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert job.require_complete_stream() == calm.require_complete_stream()


def results_of(job: Members) -> dict[str, list[Any]]:
    """Return the results of all evaluations, by replica."""
    return {
        path.name.removeprefix("results-"): [json.loads(line) for line in path.read_text().splitlines()]
        for path in (job.folder / "journal").glob("results-*")
    }


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_is_killed_in_an_evaluation_does_not_change_its_result(
    make_members: Callable[..., Members], victim: int
) -> None:
    calm = make_members("calm", PROGRAM=EVALUATES)
    expected = calm.complete(2)
    results = results_of(calm)
    assert results["0"] == results["1"]
    assert [epoch for epoch, _ in results["0"]] == [0, 1, 2, 3]

    job = make_members("killed", PROGRAM=EVALUATES, WAITS=victim)
    *members, spare = job.start(3)
    job.activate(members)
    folder = job.folder / "journal"
    # The buffers of rank 0 are there then.
    job.wait(lambda: len(list(folder.glob("evaluates-*"))) == 2, "both evaluate")
    members[victim].kill()
    survivor = members[1 - victim]
    job.wait_holding([survivor])
    job.activate([survivor, spare])
    assert job.finish() == expected
    assert results_of(job)[str(survivor.replica)] == results["0"]
    assert results_of(job)[str(spare.replica)] == results["0"][2:]


def test_a_forward_pass_after_a_loss_leaves_no_statistics_of_the_discarded_step(
    make_members: Callable[..., Members],
) -> None:
    calm = make_members("calm", PROGRAM=EVALUATES)
    expected = calm.complete(2)

    job = make_members("killed", PROGRAM=EVALUATES, PAUSES=0)
    survivor, victim, spare = job.start(3)
    job.activate([survivor, victim])
    folder = job.folder / "journal"
    job.wait((folder / "pauses").exists, "a pause before a forward pass")
    victim.kill()
    job.wait_holding([survivor])
    job.activate([survivor, spare])
    assert job.finish() == expected
    assert results_of(job)["0"] == results_of(calm)["0"], "with BatchNorm's statistics"
