"""What is in a revision, and what never restarts a pod: the schema is walked, so a new field cannot be forgotten."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from hpu_operator.api.crd import structural_schema
from hpu_operator.api.inference import Spec
from hpu_operator.api.schema import NEVER_RESTARTS, ApiModel, never_restarting
from hpu_operator.domain import desired, names
from hpu_operator.domain.revision import (
    MAX_RECORDS,
    Record,
    expired,
    next_number,
    read_record,
    record_from_stateful_set,
    record_manifest,
    revision_of,
)
from tests.operator.objects import OWNER, spec

Path = tuple[str | int, ...]


def leaves(node: dict[str, Any], path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every place where a user can write a value."""
    if node.get("x-kubernetes-int-or-string") or node.get("type") in ("string", "integer", "boolean"):
        yield path, node
    elif node.get("type") == "array":
        yield from leaves(node["items"], (*path, 0))
    elif "additionalProperties" in node:
        yield from leaves(node["additionalProperties"], (*path, "key"))
    else:
        for name, child in node.get("properties", {}).items():
            yield from leaves(child, (*path, name))


def two_values(node: dict[str, Any]) -> tuple[Any, Any]:
    if node.get("x-kubernetes-int-or-string"):
        return "1", "2"
    if values := node.get("enum"):
        return (values[0], values[-1])
    if node["type"] == "boolean":
        return False, True
    if node["type"] == "integer":
        low = node.get("minimum", 0)
        return low + 1, low + 2
    if "pvc" in node.get("description", ""):
        return "pvc://a/b", "pvc://a/c"
    return "a", "b"


def minimal(node: dict[str, Any]) -> Any:
    """The smallest valid value of a node: its required fields."""
    if node.get("type") == "object":
        return {name: minimal(node["properties"][name]) for name in node.get("required", [])}
    return [minimal(node["items"])] if node.get("type") == "array" else two_values(node)[0]


def written(path: Path, value: Any) -> dict[str, Any]:
    """A minimal spec with `value` at `path`, and everything that is required on the way."""
    root: dict[str, Any] = {"model": {"uri": "pvc://models/x"}}
    node: dict[str, Any] = structural_schema(Spec)
    place: Any = root
    for part, following in zip(path, (*path[1:], None), strict=True):
        child = node["items"] if part == 0 else node.get("properties", {}).get(part, node.get("additionalProperties"))
        if following is None:
            place[part] = value
            return root
        present = place[0] if part == 0 else place.get(str(part))
        if present is None:
            present = [minimal(child["items"])] if child.get("type") == "array" else minimal(child)
            place[part] = present
        node, place = child, present
    return root


ALL = list(leaves(structural_schema(Spec), ()))
# An enum of one value cannot change.
CHANGEABLE = [(path, node) for path, node in ALL if len(node.get("enum", [1, 2])) > 1]


MARKED = tuple(never_restarting(Spec, "spec"))


def dotted(path: Path) -> str:
    """Without the places in lists and maps."""
    return ".".join(["spec", *(str(part) for part in path if part not in (0, "key"))])


def test_the_walk_reaches_the_whole_schema() -> None:
    fields = {"model.uri", "replicas", "drainSeconds", "pod.env.valueFrom.secretKeyRef"}
    assert {f"spec.{field}" for field in fields} <= {dotted(path) for path, _ in ALL}
    assert len(ALL) > 100


@pytest.mark.parametrize(
    ("path", "node"), CHANGEABLE, ids=lambda item: ".".join(map(str, item)) if isinstance(item, tuple) else ""
)
def test_every_field_is_in_the_revision_or_never_restarts(path: Path, node: dict[str, Any]) -> None:
    one, other = (revision_of(Spec.model_validate(written(path, value))) for value in two_values(node))
    assert (one == other) == (dotted(path) in MARKED)


def test_only_replicas_never_restarts_a_pod() -> None:
    assert set(MARKED) == {"spec.replicas"}


class Leaf(ApiModel):
    marked: Annotated[int, NEVER_RESTARTS] = Field(default=0, ge=0)
    plain: int = 0


class Branch(ApiModel):
    leaf: Leaf = Leaf()
    leaves: tuple[Leaf, ...] | None = None
    named: dict[str, Leaf] | None = None
    marked: Annotated[Leaf, NEVER_RESTARTS] = Field(default=Leaf())


class DeepSpec(Spec):
    """A spec with marked fields at every place where a model may stand."""

    branch: Branch = Branch()


def deep(branch: Branch) -> DeepSpec:
    return DeepSpec.model_validate(spec().model_dump() | {"branch": branch})


leaf = st.builds(Leaf, marked=st.integers(0, 3), plain=st.integers(0, 3))
branch = st.builds(
    Branch,
    leaf=leaf,
    leaves=st.none() | st.lists(leaf, max_size=3).map(tuple),
    named=st.none() | st.dictionaries(st.sampled_from(["a", "b"]), leaf),
    marked=leaf,
)


def plain_values(branch: Branch) -> object:
    leaves = None if branch.leaves is None else [leaf.plain for leaf in branch.leaves]
    named = None if branch.named is None else {name: leaf.plain for name, leaf in branch.named.items()}
    return branch.leaf.plain, leaves, named


@given(branch, branch)
def test_a_marked_field_at_any_depth_is_in_no_revision_and_every_other_is(one: Branch, other: Branch) -> None:
    same = revision_of(deep(one)) == revision_of(deep(other))
    assert same == (plain_values(one) == plain_values(other))


def test_the_marks_at_any_depth_are_found() -> None:
    assert set(never_restarting(DeepSpec, "spec")) == {
        "spec.replicas",
        "spec.branch.marked",
        *(f"spec.branch.{place}.marked" for place in ("leaf", "leaves", "named")),
    }


def test_a_new_field_with_a_default_is_the_same_revision() -> None:
    assert revision_of(deep(Branch())) == revision_of(spec())


def test_a_default_written_out_is_the_same_revision() -> None:
    assert revision_of(spec()) == revision_of(spec(engine={"blockSize": 128}, drainSeconds=60))


def test_another_spelling_of_an_amount_is_the_same_revision() -> None:
    def memory(amount: str) -> Spec:
        volumes = [{"name": "v", "emptyDir": {"sizeLimit": amount}}]
        return spec(pod={"resources": {"limits": {"memory": amount}}, "volumes": volumes})

    assert revision_of(memory("2048Mi")) == revision_of(memory("2Gi"))
    assert revision_of(memory("2Gi")) != revision_of(memory("3Gi"))


def test_the_operators_default_image_is_not_in_the_revision_but_in_the_record() -> None:
    one = desired.render_record(OWNER, spec(), "r", 1, "engine:1")
    other = desired.render_record(OWNER, spec(), "r", 1, "engine:2")
    assert (one.image, other.image) == ("engine:1", "engine:2")


def test_a_record_survives_the_api_server() -> None:
    record = desired.render_record(OWNER, spec(), revision_of(spec()), 3, "engine:1")
    assert read_record(record_manifest(OWNER, record)) == record


def test_the_stateful_set_controllers_own_records_are_not_ours() -> None:
    data: dict[str, Any] = {"spec": {"template": {"spec": {}}}}
    assert read_record({"metadata": {"labels": {names.REVISION_LABEL: "r"}}, "data": data}) is None


def test_a_lost_record_is_what_its_group_runs() -> None:
    revision = revision_of(spec())
    record = desired.render_record(OWNER, spec(), revision, 1, "engine:old")
    live = copy.deepcopy(desired.stateful_set(OWNER, names.GroupId(2, revision, 1), record))
    assert record_from_stateful_set(live, 1) == record


def test_records_nobody_needs_expire_oldest_first() -> None:
    records = [Record(f"r{number}", number, 1, {}) for number in range(1, MAX_RECORDS + 5)]
    gone = [record.revision for record in expired(records, {"r1"})]
    assert gone == ["r2", "r3", "r4"]
    assert next_number(records) == MAX_RECORDS + 5
