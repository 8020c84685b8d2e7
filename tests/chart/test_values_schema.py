"""A wrong value is refused before anything is installed, by a message that names it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.chart.rendering import CHART, HelmRefused, Manifest, render

REFUSED: list[tuple[Manifest, str]] = [
    ({"replica": 2}, "replica"),
    ({"replicas": "two"}, "replicas"),
    ({"replicas": -1}, "replicas"),
    ({"image": {"repository": "r.example/operator:tagged"}}, "repository"),
    ({"image": {"repository": ""}}, "repository"),
    ({"image": {"digest": "abc"}}, "digest"),
    ({"image": {"tag": "with space"}}, "tag"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
    ({"engine": {"image": {}}}, "image"),
    ({"watchNamespaces": "team-a"}, "watchNamespaces"),
    ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
    ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
    ({"crds": {"instal": True}}, "instal"),
    ({"logLevel": "loud"}, "logLevel"),
    ({"metrics": {"service": {"port": 70000}}}, "port"),
    ({"resources": {"limit": {"memory": "1Gi"}}}, "limit"),
    ({"podLabels": {"a": 1}}, "podLabels"),
    ({"podDisruptionBudget": {"enabled": True}}, "replicas: 2 or more"),
]


@pytest.mark.parametrize(("values", "named"), REFUSED, ids=[json.dumps(values) for values, _ in REFUSED])
def test_a_wrong_value_is_refused_and_named(values: Manifest, named: str) -> None:
    with pytest.raises(HelmRefused) as refused:
        render(values)
    assert named in str(refused.value)


def test_every_default_is_in_the_schema_and_the_schema_has_nothing_else() -> None:
    """Otherwise a user could set what does nothing, or could not set what is there."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]  # Helm's own, for charts that depend on this one
    assert _paths_of_schema(schema) == _paths_of_values(values, schema)


def _paths_of_schema(schema: Manifest, prefix: str = "") -> set[str]:
    if not schema.get("properties"):
        return {prefix}
    return set().union(*(_paths_of_schema(part, f"{prefix}.{name}") for name, part in schema["properties"].items()))


def _paths_of_values(values: Any, schema: Manifest, prefix: str = "") -> set[str]:
    properties = schema.get("properties")
    if not properties:
        return {prefix}
    return set().union(*(_paths_of_values(part, properties[name], f"{prefix}.{name}") for name, part in values.items()))
