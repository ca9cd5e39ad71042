"""The faults that a run on a cluster draws: `tests/cluster/test_chaos.py`."""

import pytest

from cluster.drawn_faults import EARLY, LATEST, draw

KINDS = ("kill_trainer", "delete_pod", "kill_service", "kill_operator", "freeze_node", "stop_api_server")


@pytest.mark.parametrize("seed", range(20))
def test_each_kind_is_drawn_as_often_as_any_other(seed: int) -> None:
    for count in (len(KINDS), 2 * len(KINDS) + 1):
        kinds = [fault.kind for fault in draw(seed, count, KINDS)]
        times = [kinds.count(kind) for kind in KINDS]
        assert len(kinds) == count
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_faults_come_in_order_and_before_the_end_of_training(seed: int) -> None:
    faults = draw(seed, 30, KINDS)
    moments = [fault.progress for fault in faults]
    assert moments == sorted(moments)
    assert len(set(moments)) < len(moments), "none at the same moment as another"
    assert all(0 < fault.progress <= EARLY.get(fault.kind, LATEST) for fault in faults)
    assert all(fault.seconds > 5 for fault in faults if fault.kind == "freeze_node")


def test_the_faults_follow_from_the_seed() -> None:
    assert draw(7, 20, KINDS) == draw(7, 20, KINDS) != draw(8, 20, KINDS)
