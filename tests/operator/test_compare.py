"""When a child is written: only where the live object lacks something, or the manifest lost something."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hpu_operator.domain.compare import digest, is_subset, needs_apply, with_hash

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def manifest(**spec: Any) -> dict[str, Any]:
    return with_hash({"kind": "StatefulSet", "metadata": {"name": "x"}, "spec": spec})


@given(json_values)
def test_everything_is_a_subset_of_itself(value: Any) -> None:
    assert is_subset(value, value)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.text(min_size=6), json_values)
def test_what_the_server_adds_is_no_difference(desired: dict[str, Any], key: str, value: Any) -> None:
    assert is_subset(desired, {**desired, key: value})


def test_a_changed_field_is_seen() -> None:
    assert needs_apply(manifest(replicas=1), manifest(replicas=2))


def test_a_field_that_is_no_longer_sent_is_seen_through_the_hash() -> None:
    assert needs_apply(manifest(replicas=1), manifest(replicas=1, paused=True))


def test_an_equal_object_with_defaults_is_not_written() -> None:
    live = manifest(replicas=1)
    live["spec"]["minReadySeconds"] = 0
    live["metadata"]["labels"] = {"foreign": "yes"}
    assert not needs_apply(manifest(replicas=1), live)


def test_an_absent_object_is_written() -> None:
    assert needs_apply(manifest(), None)


def test_a_zero_value_equals_an_absent_one() -> None:
    assert is_subset({"readOnly": False, "value": "", "items": []}, {})
    assert not is_subset({"readOnly": True}, {})


def test_lists_with_a_key_are_compared_by_it() -> None:
    mine = {"env": [{"name": "A", "value": "1"}]}
    assert is_subset(mine, {"env": [{"name": "INJECTED", "value": "x"}, {"name": "A", "value": "1"}]})
    assert not is_subset(mine, {"env": [{"name": "A", "value": "2"}]})
    assert not is_subset(mine, {"env": [{"name": "B", "value": "1"}]})


def test_lists_without_a_key_are_compared_whole() -> None:
    assert not is_subset({"args": ["serve"]}, {"args": ["serve", "--more"]})
    assert not is_subset({"args": ["a", "b"]}, {"args": ["b", "a"]})


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_the_digest_does_not_depend_on_the_order_of_keys(value: dict[str, Any]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))
