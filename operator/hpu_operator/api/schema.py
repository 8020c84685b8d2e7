"""The base of every API model, and the field types that carry their own bounds into the CRD.

Invariant: every string has a maximum length and every list and map a maximum size, because the API server refuses a
rule whose worst case it cannot bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "serving.hpu.dev"
VERSION = "v1alpha1"
KIND = "HpuInference"
PLURAL = "hpuinferences"

RULES = "x-kubernetes-validations"
MAP_KEYS = "x-kubernetes-list-map-keys"
LIST_TYPE = "x-kubernetes-list-type"
INT_OR_STRING = "x-kubernetes-int-or-string"


class ApiModel(BaseModel):
    """camelCase on the wire, frozen in memory. Unknown keys are for the API server to refuse or prune."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")


NEVER_RESTARTS = object()
"""Marks a field, at any depth, that is in no revision: `Annotated[int, NEVER_RESTARTS]`. It needs a default."""

_Model = TypeVar("_Model", bound=ApiModel)


def what_pods_run(model: _Model) -> _Model:
    """`model` with every marked field at its default."""
    return model.model_copy(
        update={
            name: field.get_default(call_default_factory=True)
            if NEVER_RESTARTS in field.metadata
            else _what_pods_run(getattr(model, name))
            for name, field in type(model).model_fields.items()
        }
    )


def _what_pods_run(value: Any) -> Any:
    if isinstance(value, ApiModel):
        return what_pods_run(value)
    if isinstance(value, tuple):
        return tuple(_what_pods_run(item) for item in value)
    return {key: _what_pods_run(item) for key, item in value.items()} if isinstance(value, dict) else value


def never_restarting(kind: Any, path: str) -> Iterator[str]:
    """Paths of the marked fields in a model, or in a type that holds models."""
    if not (isinstance(kind, type) and issubclass(kind, ApiModel)):
        for part in get_args(kind):
            yield from never_restarting(part, path)
        return
    for name, field in kind.model_fields.items():
        below = f"{path}.{field.alias or name}"
        yield from [below] if NEVER_RESTARTS in field.metadata else never_restarting(field.annotation, below)


def rule(expression: str, message: str | None = None, *, computed: str | None = None) -> dict[str, str]:
    """One CEL rule. `computed` is a CEL expression for a message that depends on the object."""
    out = {"rule": expression}
    if message is not None:
        out["message"] = message
    if computed is not None:
        out["messageExpression"] = computed
    return out


def rules(*items: dict[str, str]) -> dict[str, Any]:
    """`json_schema_extra` of a field or model that has rules."""
    return {RULES: list(items)}


def one_of(what: str, sources: Sequence[str]) -> dict[str, Any]:
    """`json_schema_extra` of a model of which exactly one of `sources` is given."""
    present = ", ".join(f"has(self.{source})" for source in sources)
    told = f"{what} has exactly one source: one of {', '.join(sources)}"
    return rules(rule(f"[{present}].exists_one(present, present)", told))


def keyed_by(*keys: str) -> dict[str, Any]:
    """`json_schema_extra` of a list that server-side apply merges by key, and in which a key may appear once."""
    return {LIST_TYPE: "map", MAP_KEYS: list(keys)}


def _text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_IS_QUANTITY = rule(
    "isQuantity(string(self))",
    "not a quantity: write a number with an optional unit, such as 500m, 2, 512Mi or 16Gi",
)
_NOT_NEGATIVE = rule(
    "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('0')) >= 0",
    "a quantity must not be negative: use 0 or more",
)
_NOT_ENDLESS = rule(
    "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('1E')) <= 0",
    "a quantity is at most 1E: use less",
)
"""Beyond 9E the API server neither computes with an amount nor spells it in one way."""

Quantity = Annotated[
    str,
    BeforeValidator(_text),
    Field(max_length=32, json_schema_extra={INT_OR_STRING: True, RULES: [_IS_QUANTITY, _NOT_NEGATIVE, _NOT_ENDLESS]}),
]
"""An amount of a resource, in the API server's own notation. Written as a number or a string, read as a string."""


Text = Annotated[str, Field(max_length=1024)]
LongText = Annotated[
    str,
    Field(
        max_length=32768,
        json_schema_extra=rules(rule("!self.contains('\\u0000')", "must not contain the character NUL: remove it")),
    ),
]
