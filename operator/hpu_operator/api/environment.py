"""A pod's environment variables, as core/v1 has them, with bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from hpu_operator.api.formats import DataKey, ObjectName
from hpu_operator.api.schema import ApiModel, LongText, Quantity, one_of, rule, rules

_SOURCES = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef")
_POD_FIELDS = (
    "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
    "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs",
)  # fmt: skip
_RESOURCES = tuple(
    f"{kind}.{name}" for kind in ("limits", "requests") for name in ("cpu", "memory", "ephemeral-storage")
)


class KeySelector(ApiModel):
    name: ObjectName = Field(description="Name of the object in the same namespace.")
    key: DataKey = Field(description="Key within it.")
    optional: bool | None = Field(default=None, description="Start without it when it does not exist.")


class FieldSelector(ApiModel):
    field_path: Annotated[str, Field(min_length=1, max_length=350)] = Field(
        description="Path of a pod field, such as metadata.name.",
        json_schema_extra=rules(
            rule(
                f"self in {list(_POD_FIELDS)} || self.matches('^metadata[.](labels|annotations)[[]\\'[^\\']+\\'[]]$')",
                f"not a field of a pod that a variable can have: use {', '.join(_POD_FIELDS)}, "
                "metadata.labels['KEY'] or metadata.annotations['KEY']",
            )
        ),
    )


class ResourceFieldSelector(ApiModel):
    resource: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="Such as limits.memory.",
        json_schema_extra=rules(
            rule(f"self in {list(_RESOURCES)}", f"not a resource that a variable can have: use {', '.join(_RESOURCES)}")
        ),
    )
    container_name: Literal["engine"] | None = Field(default=None, description="The pod's one container.")
    divisor: Quantity | None = Field(default=None, description="Unit of the value.")


class EnvSource(ApiModel):
    model_config = ConfigDict(json_schema_extra=one_of("valueFrom", _SOURCES))
    secret_key_ref: KeySelector | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeySelector | None = Field(default=None, description="A key of a ConfigMap.")
    field_ref: FieldSelector | None = Field(default=None, description="A field of the pod.")
    resource_field_ref: ResourceFieldSelector | None = Field(default=None, description="A resource of the container.")


class EnvVar(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.valueFrom) || !has(self.value) || self.value == ''",
                "a variable has value or valueFrom, not both: remove one",
            )
        )
    )
    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="Name of the variable.",
        json_schema_extra=rules(
            rule(
                "self.matches('^[-._a-zA-Z][-._a-zA-Z0-9]*$') && !self.startsWith('..') && self != '.'",
                "not the name of a variable: use letters, digits, -, _ and ., not beginning with a digit",
            )
        ),
    )
    value: LongText | None = Field(default=None, description="Its value. A number is written in quotes.")
    value_from: EnvSource | None = Field(default=None, description="Where its value comes from.")
