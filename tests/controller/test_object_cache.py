"""The cache holds the newest version of each object, for any order of arrival."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.types.kubernetes import Resource


def version(number: int, name: str = "digits", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name, "resourceVersion": str(number), **metadata}}


def versions(cache: ObjectCache) -> list[int]:
    return [int(raw["metadata"]["resourceVersion"]) for raw in cache.all(Resource.ADASCALEJOBS)]


def test_an_older_version_is_ignored() -> None:
    cache = ObjectCache()
    cache.put(Resource.ADASCALEJOBS, version(5))
    cache.changed.clear()
    cache.put(Resource.ADASCALEJOBS, version(4))
    cache.put(Resource.ADASCALEJOBS, version(5))
    cache.remove(Resource.ADASCALEJOBS, version(4))
    assert versions(cache) == [5]
    assert not cache.changed.is_set()


def test_an_older_version_does_not_bring_back_a_deleted_object() -> None:
    cache = ObjectCache()
    cache.put(Resource.ADASCALEJOBS, version(5))
    cache.remove(Resource.ADASCALEJOBS, version(7))
    cache.put(Resource.ADASCALEJOBS, version(6))
    cache.replace(Resource.ADASCALEJOBS, [version(6)], 6)
    assert versions(cache) == []
    cache.put(Resource.ADASCALEJOBS, version(8))
    assert versions(cache) == [8], "an object of the same name was created again"


def test_a_list_removes_objects_that_it_lacks_unless_they_are_newer() -> None:
    cache = ObjectCache()
    cache.put(Resource.ADASCALEJOBS, version(3, "deleted"))
    cache.put(Resource.ADASCALEJOBS, version(9, "new"))
    cache.replace(Resource.ADASCALEJOBS, [version(4, "there")], 6)
    assert versions(cache) == [9, 4]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=12), st.randoms())
def test_the_order_of_changes_does_not_matter(changes: list[tuple[bool, int]], random: Any) -> None:
    """Each change either writes or deletes the object."""
    shuffled = list({number: alive for alive, number in changes}.items())
    random.shuffle(shuffled)
    cache = ObjectCache()
    for number, alive in shuffled:
        (cache.put if alive else cache.remove)(Resource.ADASCALEJOBS, version(number))
    newest = max(shuffled, default=(0, False))
    assert versions(cache) == ([newest[0]] if newest[1] else [])


def node(number: int, *, ready: str = "True", heartbeat: str = "", **spec: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}]
    return {
        "metadata": {"name": "node1", "resourceVersion": str(number)},
        "spec": spec,
        "status": {"conditions": conditions, "allocatable": {"cpu": "4"}},
    }


@pytest.mark.parametrize(
    ("changed", "is_news"),
    [
        (node(2, heartbeat="10:05"), False),
        (node(2, ready="Unknown"), True),
        (node(2, unschedulable=True), True),
    ],
)
def test_the_heartbeat_of_a_node_is_no_news(changed: dict[str, Any], is_news: bool) -> None:
    cache = ObjectCache()
    cache.put(Resource.NODES, node(1))
    assert cache.changed.is_set()
    cache.changed.clear()
    cache.put(Resource.NODES, changed)
    assert cache.changed.is_set() is is_news
    assert cache.all(Resource.NODES) == [changed]


@pytest.mark.parametrize(("generation", "is_news"), [(1, False), (2, True)])
def test_a_write_of_reported_fields_is_no_news_unless_its_answer_has_an_edit(
    generation: int, is_news: bool
) -> None:
    cache = ObjectCache()
    cache.put(Resource.ADASCALEJOBS, version(1, generation=1))
    cache.take_changes()
    cache.changed.clear()
    cache.put(Resource.ADASCALEJOBS, version(2, generation=generation), is_news=False)
    assert cache.changed.is_set() is cache.has_changes is is_news
    changes = cache.take_changes()
    assert [bool(changes.jobs), bool(changes.no_news)] == [is_news, not is_news]
    assert not cache.has_changes
