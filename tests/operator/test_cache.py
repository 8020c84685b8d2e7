"""The cache keeps the newest, whatever the order in which things are heard."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hpu_operator.kube.kinds import INFERENCE, POD, SERVICE, STATEFUL_SET
from hpu_operator.kube.port import Listed
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.key import Key

KEY = Key("team", "smol")


def child(version: int, name: str = "child", **more: Any) -> dict[str, Any]:
    labels = {"serving.hpu.dev/name": "smol"}
    metadata = {"namespace": "team", "name": name, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata | {"managedFields": [{}]}, **more}


def test_an_older_version_is_no_news() -> None:
    cache = Cache()
    assert cache.put(SERVICE, child(9)) == KEY
    assert cache.put(SERVICE, child(10)) == KEY
    assert cache.put(SERVICE, child(10)) is None
    assert cache.put(SERVICE, child(9)) is None, "versions are numbers, not text"


def test_the_answer_of_a_write_that_comes_after_the_deletion_is_no_news() -> None:
    cache = Cache()
    cache.put(SERVICE, child(5))
    assert cache.remove(SERVICE, child(7)) == KEY
    assert cache.put(SERVICE, child(6)) is None
    assert cache.children(SERVICE, KEY) == ()
    assert cache.put(SERVICE, child(8)) == KEY, "a new object of the same name"


def test_a_late_deletion_of_an_earlier_object_does_not_remove_its_successor() -> None:
    cache = Cache()
    cache.put(SERVICE, child(8))
    assert cache.remove(SERVICE, child(7)) is None
    assert len(cache.children(SERVICE, KEY)) == 1


def test_a_list_finds_what_a_cut_watch_never_told() -> None:
    cache = Cache()
    cache.put(SERVICE, child(5, "gone"))
    cache.put(SERVICE, child(6, "stays"))
    assert cache.replace(SERVICE, None, Listed([child(6, "stays")], 10)) == {KEY}
    assert [item["metadata"]["name"] for item in cache.children(SERVICE, KEY)] == ["stays"]


def test_a_list_does_not_forget_what_is_newer_than_itself() -> None:
    cache = Cache()
    cache.put(SERVICE, child(11, "new"))
    assert cache.replace(SERVICE, None, Listed([], 10)) == set()
    assert len(cache.children(SERVICE, KEY)) == 1


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    cache = Cache()
    cache.put(SERVICE, child(5))
    cache.replace(SERVICE, "other", Listed([], 10))
    assert len(cache.children(SERVICE, KEY)) == 1


def test_a_child_whose_label_changes_belongs_to_nobody_else() -> None:
    cache = Cache()
    cache.put(SERVICE, child(5))
    moved = child(6)
    moved["metadata"]["labels"] = {"serving.hpu.dev/name": "other"}
    cache.put(SERVICE, moved)
    assert cache.children(SERVICE, KEY) == ()
    assert len(cache.children(SERVICE, Key("team", "other"))) == 1


def test_only_what_is_read_is_kept() -> None:
    cache = Cache()
    cache.put(POD, child(1, spec={"big": 1}, status={"phase": "Running"}))
    cache.put(STATEFUL_SET, child(1, spec={"replicas": 1}, status={"replicas": 1}))
    (kept,) = cache.children(POD, KEY)
    assert set(kept) == {"metadata", "status"}
    assert "managedFields" not in kept["metadata"]
    assert "status" not in cache.children(STATEFUL_SET, KEY)[0]
    cache.put(INFERENCE, child(1, "smol", spec={}, status={}))
    kept_parent = cache.get(INFERENCE, "team", "smol")
    assert kept_parent is not None
    assert {"spec", "status"} <= set(kept_parent)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=30), st.randoms())
def test_any_order_of_the_same_history_ends_the_same(history: list[tuple[bool, int]], random: Any) -> None:
    """Each version is either a state or a deletion; the newest one wins, however they arrive."""
    by_version = {version: deleted for deleted, version in history}
    arrivals = list(by_version.items())
    random.shuffle(arrivals)
    cache = Cache()
    for version, deleted in arrivals:
        (cache.remove if deleted else cache.put)(SERVICE, child(version))
    if by_version:
        newest = max(by_version)
        assert bool(cache.children(SERVICE, KEY)) == (not by_version[newest])
