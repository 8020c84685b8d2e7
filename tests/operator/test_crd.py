"""The CRD: generated from the models, checked in, bounded, described."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hpu_operator.api.crd import NotStructural, crd_yaml, custom_resource_definition, structural_schema
from hpu_operator.api.inference import Condition, Spec

CHECKED_IN = Path(__file__).parents[2] / "crds" / "serving.hpu.dev_hpuinferences.yaml"


def properties(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from properties(child, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if isinstance(node.get(inner), dict):
            yield f"{path}[]", node[inner]
            yield from properties(node[inner], f"{path}[]")


def schema() -> dict[str, Any]:
    version = custom_resource_definition()["spec"]["versions"][0]
    result: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return result


def test_the_checked_in_crd_is_the_generated_one() -> None:
    assert CHECKED_IN.read_text() == crd_yaml(), "run: hpu-operator crd > crds/serving.hpu.dev_hpuinferences.yaml"


def test_every_field_is_described() -> None:
    for part in ("spec", "status"):
        for path, node in properties(schema()["properties"][part], part):
            assert path.endswith("[]") or node.get("description"), path


def test_every_string_list_and_map_is_bounded() -> None:
    for part in ("spec", "status"):
        for path, node in properties(schema()["properties"][part], part):
            if node.get("type") == "string":
                assert {"maxLength", "enum", "format"} & set(node), path
            if node.get("type") == "array":
                assert "maxItems" in node, path
            if node.get("type") == "object" and "additionalProperties" in node:
                assert "maxProperties" in node, path


def test_every_rule_has_a_message() -> None:
    nodes = [schema(), *(node for _, node in properties(schema(), ""))]
    rules = [rule for node in nodes for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) > 20
    for rule in rules:
        assert rule.get("message") or rule.get("messageExpression"), rule


def test_defaults_are_in_the_schema() -> None:
    spec = schema()["properties"]["spec"]["properties"]
    assert spec["replicas"]["default"] == 1
    assert spec["drainSeconds"]["default"] == 60
    assert spec["engine"]["default"] == {}
    assert spec["engine"]["properties"]["blockSize"]["default"] == 128
    assert "default" not in spec["engine"]["properties"]["maxModelLen"]


def test_conditions_are_a_map_by_type() -> None:
    conditions = schema()["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_subresources_and_columns() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    assert version["subresources"]["status"] == {}
    assert version["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == ["Ready", "Reason", "Desired", "Ready count", "Warm-up", "Model", "Age"]


def test_a_model_without_bounds_is_refused_with_its_place() -> None:
    class Unbounded(BaseModel):
        text: str

    with pytest.raises(NotStructural, match=r"Unbounded\.text: a string needs max_length"):
        structural_schema(Unbounded)


def test_a_union_is_refused_with_its_place() -> None:
    class Union(BaseModel):
        either: int | bool

    with pytest.raises(NotStructural, match=r"Union\.either: a union of 2 types"):
        structural_schema(Union)


def test_what_the_schema_defaults_is_what_the_models_default() -> None:
    """An object read with the server's defaults equals the same object read without them."""
    written: dict[str, Any] = {"model": {"uri": "file:///m"}, "engine": {"dtype": "float32"}}
    assert Spec.model_validate(apply_defaults(schema()["properties"]["spec"], written)) == Spec.model_validate(written)


def apply_defaults(node: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    filled = dict(value)
    for name, child in node.get("properties", {}).items():
        if name not in filled and "default" in child:
            filled[name] = child["default"]
        if isinstance(filled.get(name), dict):
            filled[name] = apply_defaults(child, filled[name])
    return filled


def test_a_condition_is_what_kubernetes_expects() -> None:
    assert set(structural_schema(Condition)["required"]) == {
        "type", "status", "observedGeneration", "lastTransitionTime", "reason", "message",
    }  # fmt: skip
