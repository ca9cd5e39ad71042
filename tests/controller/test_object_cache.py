"""The newest version of each object, whatever the order in which watches, lists and answers bring news."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.types.kubernetes import Resource


def version(number: int, name: str = "digits") -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name, "resourceVersion": str(number)}}


def versions(store: ObjectCache) -> list[int]:
    return [int(one["metadata"]["resourceVersion"]) for one in store.all(Resource.JOBS)]


def test_an_older_version_is_ignored() -> None:
    store = ObjectCache()
    store.put(Resource.JOBS, version(5))
    store.changed.clear()
    store.put(Resource.JOBS, version(4))
    store.put(Resource.JOBS, version(5))
    store.remove(Resource.JOBS, version(4))
    assert versions(store) == [5]
    assert not store.changed.is_set()


def test_an_older_version_does_not_bring_back_a_deleted_object() -> None:
    store = ObjectCache()
    store.put(Resource.JOBS, version(5))
    store.remove(Resource.JOBS, version(7))
    store.put(Resource.JOBS, version(6))
    store.replace(Resource.JOBS, [version(6)], 6)
    assert versions(store) == []
    store.put(Resource.JOBS, version(8))
    assert versions(store) == [8], "one of the same name, made anew"


def test_a_list_removes_objects_that_it_lacks_unless_they_are_newer() -> None:
    store = ObjectCache()
    store.put(Resource.JOBS, version(3, "gone"))
    store.put(Resource.JOBS, version(9, "new"))
    store.replace(Resource.JOBS, [version(4, "there")], 6)
    assert versions(store) == [9, 4]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=12), st.randoms())
def test_the_order_of_changes_does_not_matter(told: list[tuple[bool, int]], random: Any) -> None:
    """Each version is either of a living object or of its end."""
    news = list({number: alive for alive, number in told}.items())
    random.shuffle(news)
    store = ObjectCache()
    for number, alive in news:
        (store.put if alive else store.remove)(Resource.JOBS, version(number))
    newest = max(news, default=(0, False))
    assert versions(store) == ([newest[0]] if newest[1] else [])
