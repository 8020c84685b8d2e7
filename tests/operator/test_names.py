"""Generated names fit where Kubernetes puts them, for every admissible name of an object."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_operator.api.inference import MAX_NAME_LENGTH, MAX_REPLICAS
from hpu_operator.domain import names
from hpu_operator.domain.names import GroupId

LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
admissible = st.from_regex(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$", fullmatch=True).filter(
    lambda n: not n.endswith("-ranks")
)
largest = GroupId(MAX_REPLICAS - 1, "ffffffff", names.MAX_ATTEMPT)


@pytest.mark.parametrize("length", [1, 35, 36, 40, 52, MAX_NAME_LENGTH])
def test_names_of_every_length_fit(length: int) -> None:
    name = "a" * length
    stateful_set = names.stateful_set(name, largest)
    assert len(stateful_set) <= names.MAX_STATEFULSET_NAME
    # The StatefulSet controller's label: its name, a dash, and a hash of up to ten characters.
    assert len(f"{stateful_set}-1234567890") <= 63
    for generated in (
        stateful_set,
        names.service(name),
        names.ranks_service(name),
        names.revision_record(name, "f" * 8),
    ):
        assert LABEL.match(generated)
        assert len(generated) <= 63


@given(admissible, admissible)
def test_names_of_two_objects_never_meet(one: str, other: str) -> None:
    def all_names(name: str) -> set[str]:
        group = GroupId(0, "aaaaaaaa", 0)
        return {names.stateful_set(name, group), names.ranks_service(name), names.revision_record(name, "aaaaaaaa")}

    services = {names.service(name) for name in (one, other)}
    if one != other:
        assert not all_names(one) & all_names(other)
        assert names.ranks_service(one) not in services


@given(admissible, st.integers(0, 999), st.integers(0, 999))
def test_labels_give_the_group_back(name: str, index: int, attempt: int) -> None:
    group = GroupId(index, "0a1b2c3d", attempt)
    assert names.group_of(names.group_labels(name, group)) == group


@pytest.mark.parametrize("broken", [{}, {"serving.hpu.dev/group": "x"}])
def test_labels_that_are_not_a_group_are_none(broken: dict[str, str]) -> None:
    assert names.group_of(broken) is None
