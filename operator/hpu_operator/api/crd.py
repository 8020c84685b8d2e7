"""The CustomResourceDefinition, generated from the models.

pydantic's JSON schema is not a structural schema: references are inlined, nullable unions become optional properties,
`const` becomes `enum`, titles go. What the API server does not accept raises here rather than there.
"""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from hpu_operator.api.inference import OBJECT_RULES, Spec, Status
from hpu_operator.api.schema import GROUP, INT_OR_STRING, KIND, PLURAL, RULES, VERSION

CRD_NAME = f"{PLURAL}.{GROUP}"

_COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].reason'},
    {"name": "Desired", "type": "integer", "jsonPath": ".spec.replicas"},
    {"name": "Ready count", "type": "integer", "jsonPath": ".status.readyReplicas"},
    {"name": "Warm-up", "type": "string", "jsonPath": ".status.warmUp"},
    {"name": "Model", "type": "string", "jsonPath": ".status.servedName"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)

_KEPT = {
    "type", "properties", "required", "items", "additionalProperties", "enum", "default", "description", "format",
    "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-int-or-string",
}  # fmt: skip


class NotStructural(Exception):
    """A model uses something that a structural schema cannot express. Names the key and where it is."""


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The structural OpenAPI v3 schema of `model`. Raises `NotStructural`."""
    schema = model.model_json_schema(by_alias=True)
    return _convert(schema, schema.pop("$defs", {}), model.__name__)


def _convert(node: dict[str, Any], definitions: dict[str, Any], where: str) -> dict[str, Any]:
    node = _resolve(node, definitions, where)
    if node.get(INT_OR_STRING):
        kept = {INT_OR_STRING: True}
        if node.get(RULES):
            kept[RULES] = node[RULES]
        return kept | {key: node[key] for key in ("description", "default", "maxLength") if key in node}
    node.pop("title", None)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if unknown := set(node) - _KEPT:
        raise NotStructural(f"{where}: {', '.join(sorted(unknown))} cannot be part of a structural schema")
    if "properties" in node:
        node["properties"] = {
            name: _convert(child, definitions, f"{where}.{name}") for name, child in node["properties"].items()
        }
    if isinstance(node.get("items"), dict):
        node["items"] = _convert(node["items"], definitions, f"{where}[]")
    if isinstance(node.get("additionalProperties"), dict):
        node["additionalProperties"] = _convert(node["additionalProperties"], definitions, f"{where}{{}}")
    _check_bounds(node, where)
    return node


def _resolve(node: dict[str, Any], definitions: dict[str, Any], where: str) -> dict[str, Any]:
    """Without `$ref` and nullable unions. A default of null is dropped, one of a model keeps what the model sets."""
    node = dict(node)
    if "anyOf" in node:
        choices = [choice for choice in node.pop("anyOf") if choice.get("type") != "null"]
        if len(choices) != 1:
            raise NotStructural(f"{where}: a union of {len(choices)} types cannot be part of a structural schema")
        node = _resolve(choices[0], definitions, where) | node
    if "$ref" in node:
        name = node.pop("$ref").rsplit("/", 1)[-1]
        node = _resolve(definitions[name], definitions, where) | node
    if node.get("default", 0) is None:
        del node["default"]
    if isinstance(node.get("default"), dict):
        node["default"] = {}  # the defaults of its properties are theirs to give
    return node


def _check_bounds(node: dict[str, Any], where: str) -> None:
    kind = node.get("type")
    if kind == "string" and not {"maxLength", "enum", "format"} & set(node):
        raise NotStructural(f"{where}: a string needs max_length")
    if kind == "array" and "maxItems" not in node:
        raise NotStructural(f"{where}: a list needs max_length")
    if kind == "object" and "properties" not in node and "maxProperties" not in node:
        raise NotStructural(f"{where}: a map needs max_length")


def custom_resource_definition() -> dict[str, Any]:
    """The manifest that goes to `crds/` and into the chart."""
    schema = {
        "type": "object",
        "description": "A model, served by groups of cards. Declared here, served by pods the operator runs.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(Spec),
            "status": structural_schema(Status),
        },
        RULES: list(OBJECT_RULES),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "hpuinference",
                "shortNames": ["hpui"],
                "categories": ["hpu"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [dict(column) for column in _COLUMNS],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def crd_yaml() -> str:
    """The manifest as it is checked in."""
    head = "# Generated by `hpu-operator crd` from the models in operator/hpu_operator/api. Do not edit.\n"
    return head + yaml.dump(custom_resource_definition(), sort_keys=False, width=120, Dumper=_PlainDumper)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True
