"""The parts of a pod that a user may set: the shapes Kubernetes gives them, with bounds.

Only what reaches the pod unchanged. Field names and meaning are those of the core/v1 types of the same name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from hpu_operator.api.affinity import Affinity
from hpu_operator.api.environment import EnvVar
from hpu_operator.api.formats import (
    DOMAIN_NAME,
    KEY_FORM,
    KEYS_OF_LABELS,
    QUALIFIED_NAME,
    ImageName,
    LabelKey,
    LabelValue,
    ObjectName,
    keys_are,
)
from hpu_operator.api.schema import ApiModel, LongText, Quantity, keyed_by, rule, rules
from hpu_operator.api.volumes import LocalReference, Volume, VolumeMount

MAX_ENV_CHARACTERS = 131_072
MAX_ANNOTATION_CHARACTERS = 65_536
"""All of a pod's variables or annotations together: the record, the StatefulSet and the pods each hold them."""


class Toleration(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
                "a toleration without a key tolerates every taint and needs operator Exists: name a key, or use Exists",
            ),
            rule(
                "!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
                "a toleration with operator Exists takes no value: remove it, or use Equal",
            ),
            rule(
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                "tolerationSeconds needs effect NoExecute: set it, or remove tolerationSeconds",
            ),
        )
    )
    key: LabelKey | None = Field(default=None, description="Taint to tolerate. Absent, with Exists: every taint.")
    operator: Literal["Exists", "Equal"] | None = Field(default=None, description="How key and value relate.")
    value: LabelValue | None = Field(default=None, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect to tolerate. Absent: every effect."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=2**53, description="For how long NoExecute is tolerated. Absent: for ever."
    )


_RESOURCE_NAMES = keys_are(
    f"^(cpu|memory|ephemeral-storage|hugepages-[0-9]+[A-Za-z]*|{DOMAIN_NAME})$",
    "the name of a resource",
    "cpu, memory, ephemeral-storage, hugepages-SIZE, or DOMAIN/NAME such as habana.ai/gaudi",
)
_WHOLE_DEVICES = rule(
    "self.all(k, !k.contains('/') || !isQuantity(string(self[k])) || quantity(string(self[k])).isInteger())",
    "devices such as habana.ai/gaudi are not divided: use a whole number",
)
_AMOUNTS = rules(_RESOURCE_NAMES, _WHOLE_DEVICES)


class Resources(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) "
                "|| !isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k])) "
                "|| quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
                "a request is above its limit: lower the request or raise the limit",
            ),
            rule(
                "!has(self.requests) || self.requests.all(k, !k.contains('/') || (has(self.limits) && k in self.limits "
                "&& (!isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k])) "
                "|| quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) == 0)))",
                "devices such as habana.ai/gaudi cannot be requested without the same limit: set limits, and leave "
                "requests out",
            ),
        )
    )
    requests: dict[str, Quantity] | None = Field(
        default=None, max_length=32, description="What the scheduler reserves.", json_schema_extra=_AMOUNTS
    )
    limits: dict[str, Quantity] | None = Field(
        default=None, max_length=32, description="What may be used at most.", json_schema_extra=_AMOUNTS
    )


_MOUNTS_EXIST = rule(
    "!has(self.volumeMounts) || self.volumeMounts.all(m, "
    "has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
    "every entry of volumeMounts needs a volume of the same name in volumes: add it there",
)
_OWN_LABELS = rule(
    "self.all(k, !k.startsWith('serving.hpu.dev/') && !k.startsWith('app.kubernetes.io/'))",
    "labels under serving.hpu.dev/ and app.kubernetes.io/ are the operator's own: use another prefix",
)
_OWN_ANNOTATIONS = rule(
    "self.all(k, !k.startsWith('serving.hpu.dev/'))",
    "annotations under serving.hpu.dev/ are the operator's own: use another prefix",
)
_KEYS_OF_ANNOTATIONS = keys_are(QUALIFIED_NAME, "the key of an annotation", KEY_FORM)
_ANNOTATIONS_BOUNDED = rule(
    f"self.map(k, self[k].size()).sum() <= {MAX_ANNOTATION_CHARACTERS}",
    f"annotations have at most {MAX_ANNOTATION_CHARACTERS} characters in all: mount a ConfigMap for more",
)
_ENV_BOUNDED = rule(
    f"self.map(v, has(v.value) ? v.value.size() : 0).sum() <= {MAX_ENV_CHARACTERS}",
    f"values of variables have at most {MAX_ENV_CHARACTERS} characters in all: mount a ConfigMap for more",
)


class PodSettings(ApiModel):
    """Everything of the pods that is not the engine's."""

    model_config = ConfigDict(json_schema_extra=rules(_MOUNTS_EXIST))
    image: ImageName | None = Field(
        default=None, description="Engine image. Absent: the operator's default when a revision is first rendered."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When the node fetches the image."
    )
    image_pull_secrets: tuple[LocalReference, ...] | None = Field(
        default=None,
        max_length=16,
        description="Secrets for the registry, by name.",
        json_schema_extra=keyed_by("name"),
    )
    resources: Resources | None = Field(default=None, description="CPU, memory and cards of one pod.")
    node_selector: dict[str, LabelValue] | None = Field(
        default=None,
        max_length=32,
        description="Labels a node must have.",
        json_schema_extra=rules(KEYS_OF_LABELS),
    )
    tolerations: tuple[Toleration, ...] | None = Field(default=None, max_length=32, description="Taints to tolerate.")
    affinity: Affinity | None = Field(default=None, description="Where pods may and should run.")
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class_name: ObjectName | None = Field(default=None, description="RuntimeClass of the pods.")
    env: tuple[EnvVar, ...] | None = Field(
        default=None,
        max_length=128,
        description="More environment variables for the engine.",
        json_schema_extra=keyed_by("name") | rules(_ENV_BOUNDED),
    )
    volumes: tuple[Volume, ...] | None = Field(
        default=None, max_length=32, description="More volumes.", json_schema_extra=keyed_by("name")
    )
    volume_mounts: tuple[VolumeMount, ...] | None = Field(
        default=None,
        max_length=32,
        description="Where the engine sees them.",
        json_schema_extra=keyed_by("mountPath"),
    )
    labels: dict[str, LabelValue] | None = Field(
        default=None,
        max_length=32,
        description="More labels for the pods.",
        json_schema_extra=rules(_OWN_LABELS, KEYS_OF_LABELS),
    )
    annotations: dict[str, LongText] | None = Field(
        default=None,
        max_length=32,
        description="More annotations for the pods.",
        json_schema_extra=rules(_OWN_ANNOTATIONS, _KEYS_OF_ANNOTATIONS, _ANNOTATIONS_BOUNDED),
    )
