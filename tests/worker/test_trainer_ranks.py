"""Tests of several replicas under torchrun."""

import json
from typing import Any

import pytest

from support.launch import PROGRAMS, run_python


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both replicas."""
    folder = tmp_path_factory.mktemp("ranks")
    run_python(PROGRAMS / "ranks.py", replicas=2, OUT=folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_weights_are_equal_on_both_replicas(results: list[dict[str, Any]]) -> None:
    assert results[0]["weights"] == results[1]["weights"]
    assert results[0]["weights_of_micro_batches"] == results[1]["weights_of_micro_batches"]


def test_frozen_and_unused_parameters_and_all_names_are_unchanged(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert not result["frozen_moved"]
        assert not result["never_moved"]
        assert result["same_names"]


def test_gains_are_equal_on_both_replicas_and_reduce_the_number_of_steps(
    results: list[dict[str, Any]],
) -> None:
    assert [result["progress"] for result in results] == [results[0]["progress"]] * 2
    assert results[0]["gain"] == results[1]["gain"]
    assert 1 <= results[0]["gain"] <= results[0]["scale"]
    assert results[0]["progress"] >= 24
    assert results[0]["steps"] <= results[0]["progress"]


def test_micro_batches_on_two_replicas_equal_a_step_with_the_large_batch(
    results: list[dict[str, Any]],
) -> None:
    assert results[0]["plan"] == [2, 4, 2]
    assert results[0]["difference"] < 1e-6


def test_micro_batches_of_unequal_weight_on_two_replicas_equal_a_step_with_the_large_batch(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["weighted_steps"] == 4
        assert result["weighted_difference"] < 1e-6
        assert result["difference_of_two_optimizers"] < 1e-6
        ours, theirs = result["weighted_estimates"]
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_program_may_change_gradients_before_and_after_they_are_averaged(
    results: list[dict[str, Any]],
) -> None:
    assert [result["steps_with_changed_gradients"] for result in results] == [4, 4]


def test_a_program_may_call_torch_autograd_grad_in_the_backward_pass(results: list[dict[str, Any]]) -> None:
    assert [result["steps_with_recomputed_gradients"] for result in results] == [4, 4]


@pytest.mark.parametrize("kind", ["copied", "saved_and_loaded"])
def test_a_copy_of_the_model_uses_its_own_parameters(results: list[dict[str, Any]], kind: str) -> None:
    """Averaging of weights and `torch.save(model)` require this."""
    for result in results:
        copied = result["copies"][kind]
        assert copied["own"] == 0
        assert copied["training"] == 0
        assert copied["original"] > 0


def test_all_ranks_begin_with_the_seed_and_the_registered_objects_of_rank_0(
    results: list[dict[str, Any]],
) -> None:
    assert sorted(results[0]["indices"] + results[1]["indices"]) == list(range(48))
    assert results[0]["average"] == results[1]["average"]


def test_a_checkpoint_is_saved_at_the_first_step_and_once_when_it_is_due(
    results: list[dict[str, Any]],
) -> None:
    first, second = results[0]["saved"]
    assert first == 1
    assert second >= 3
    assert results[1]["saved"] == []


def test_an_evaluation_is_shared_out_without_padding_and_has_the_same_result_on_all_replicas(
    results: list[dict[str, Any]],
) -> None:
    shared, alone = (results[0]["evaluation"][kind] for kind in ("shared", "alone"))
    other = results[1]["evaluation"]["shared"]
    assert shared[:2] == other[:2]
    assert sorted(shared[2] + other[2]) == list(range(43))
    assert (len(shared[2]), len(other[2])) == (23, 20)
    assert shared[0]["samples"] == 43
    assert isinstance(shared[0]["positive"], int)
    # One replica that evaluates alone gets all samples, and the same numbers to the last bit.
    assert sorted(alone[2]) == list(range(43))
    assert alone[:2] == shared[:2]
    assert [result["evaluation"]["buffers"] for result in results] == [0.0, 0.0], "those of rank 0"


def test_sums_over_replicas_are_the_same_on_all_of_them(results: list[dict[str, Any]]) -> None:
    expected = [20.0 * number + 2 * repeat + 0.1 for number in range(8) for repeat in range(4)]
    for result in results:
        assert [sums["value"] for sums in result["sums"]] == pytest.approx(expected)
        assert {sums["replicas"] for sums in result["sums"]} == {2.0}
        assert "with the same names on all replicas" in result["refusal_of_sums"]
    assert results[0]["sums"] == results[1]["sums"]


def test_the_weight_of_a_step_is_that_of_all_its_micro_batches(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["begins_step"] == [True, False] * 4
        assert len(result["step_weights"]) == 4
        for ours, theirs in result["step_weights"]:
            assert ours == pytest.approx(theirs)


@pytest.mark.slow
def test_three_restarted_replicas_round_like_replicas_that_continue() -> None:
    undisturbed, *disturbed = run_python(PROGRAMS / "buckets.py", replicas=3).split()
    assert disturbed == [undisturbed] * 2
