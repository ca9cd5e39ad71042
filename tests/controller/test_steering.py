"""What is done about a job, for what is seen of it and decided: the rules of docs/operator.md."""

from __future__ import annotations

from adascale_core.messages import Allocation
from support.sightings import batch, course, job, seen, training, view


def test_where_the_service_came_to_the_recorded_number_by_itself_another_one_is_taken() -> None:
    """It wanted the lost count of 4 again, while the operator recorded a 2 that it then could not publish."""
    raced = seen(job((5, 2)), view((5, 4), (5, 4)), batch(4))
    assert course(raced, 2).want == Allocation(6, 2)
    assert course(raced, 4).status["allocation"] == {"generation": 5, "replicas": 4}


def test_pods_that_are_about_to_enter_a_generation_stay_until_it_is_over() -> None:
    entering = seen(job((3, 4)), view((3, 4), (3, 4), running=[0, 1]), batch(4))
    assert course(entering, 2).resize is None
    left = seen(job((4, 2)), view((4, 2), (4, 2), running=[]), batch(4))
    assert course(left, 2).resize == 2


def test_what_is_as_it_should_be_is_left_alone() -> None:
    sighting = training()
    done = course(sighting, 2)
    assert (done.want, done.resize, done.create, done.declare, done.remove_batch) == (None,) * 4 + (False,)
