"""The parts of a pod that a user may set: the shapes Kubernetes gives them, with bounds.

Only what reaches the pod unchanged. Field names and meaning are those of the core/v1 types of the same name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from hpu_operator.api.affinity import Affinity
from hpu_operator.api.schema import (
    ApiModel,
    FilePath,
    LabelValue,
    LongText,
    Name,
    Quantity,
    Text,
    keyed_by,
    rule,
    rules,
)

RESERVED_VOLUME_PREFIX = "hpu-"
RESERVED_PATHS = ("/mnt/model", "/tmp")  # noqa: S108 - where the operator mounts its own volumes


class LocalReference(ApiModel):
    name: Name = Field(description="Name of an object in the same namespace.")


class KeySelector(ApiModel):
    name: Name = Field(description="Name of the object in the same namespace.")
    key: Name = Field(description="Key within it.")
    optional: bool | None = Field(default=None, description="Start without it when it does not exist.")


class FieldSelector(ApiModel):
    field_path: Name = Field(description="Path of a pod field, such as metadata.name.")


class ResourceFieldSelector(ApiModel):
    resource: Name = Field(description="Such as limits.memory.")
    container_name: Name | None = Field(default=None, description="Container to read from.")
    divisor: Quantity | None = Field(default=None, description="Unit of the value.")


class EnvSource(ApiModel):
    secret_key_ref: KeySelector | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeySelector | None = Field(default=None, description="A key of a ConfigMap.")
    field_ref: FieldSelector | None = Field(default=None, description="A field of the pod.")
    resource_field_ref: ResourceFieldSelector | None = Field(default=None, description="A resource of the container.")


class EnvVar(ApiModel):
    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")] = Field(
        description="Name of the variable."
    )
    value: LongText | None = Field(default=None, description="Its value. A number is written in quotes.")
    value_from: EnvSource | None = Field(default=None, description="Where its value comes from.")


class VolumeMount(ApiModel):
    name: Name = Field(description="Name of a volume of pod.volumes.")
    mount_path: FilePath = Field(
        description="Where the container sees it.",
        json_schema_extra=rules(
            rule(
                " && ".join(f"self != '{path}' && !self.startsWith('{path}/')" for path in RESERVED_PATHS),
                "mountPath must not be under /mnt/model or /tmp: the operator mounts there; use another path",
            ),
            rule("self.startsWith('/') && !self.contains(':')", "mountPath must start with / and contain no colon"),
        ),
    )
    sub_path: Text | None = Field(default=None, description="A folder of the volume in place of its root.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")


class KeyToPath(ApiModel):
    key: Name = Field(description="Key of the object.")
    path: FilePath = Field(description="File it becomes, below the mount.")
    mode: int | None = Field(default=None, ge=0, le=0o777, description="Permission bits of the file.")


class ClaimVolume(ApiModel):
    claim_name: Name = Field(description="Name of a PersistentVolumeClaim in the same namespace.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")


class EmptyDirVolume(ApiModel):
    medium: Literal["", "Memory"] | None = Field(default=None, description="Memory for a file system in memory.")
    size_limit: Quantity | None = Field(default=None, description="Largest size.")


class ConfigMapVolume(ApiModel):
    name: Name = Field(description="Name of a ConfigMap in the same namespace.")
    items: tuple[KeyToPath, ...] | None = Field(default=None, max_length=64, description="Which keys. Absent: all.")
    optional: bool | None = Field(default=None, description="Start without it when it does not exist.")
    default_mode: int | None = Field(default=None, ge=0, le=0o777, description="Permission bits of the files.")


class SecretVolume(ApiModel):
    secret_name: Name = Field(description="Name of a Secret in the same namespace.")
    items: tuple[KeyToPath, ...] | None = Field(default=None, max_length=64, description="Which keys. Absent: all.")
    optional: bool | None = Field(default=None, description="Start without it when it does not exist.")
    default_mode: int | None = Field(default=None, ge=0, le=0o777, description="Permission bits of the files.")


class HostPathVolume(ApiModel):
    path: FilePath = Field(description="Path on the node.")
    type: Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="What must be there, such as Directory."
    )


class NfsVolume(ApiModel):
    server: Name = Field(description="Host name or address of the server.")
    path: FilePath = Field(description="Exported path.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")


class CsiVolume(ApiModel):
    driver: Name = Field(description="Name of the CSI driver.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")
    fs_type: Annotated[str, Field(max_length=64)] | None = Field(default=None, description="File system.")
    volume_attributes: dict[str, Text] | None = Field(
        default=None, max_length=64, description="Settings of the driver."
    )
    node_publish_secret_ref: LocalReference | None = Field(
        default=None, description="Secret the node gives the driver."
    )


class ImageVolume(ApiModel):
    reference: Text = Field(description="An OCI artifact to mount read-only.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the node fetches it."
    )


_SOURCES = ("persistentVolumeClaim", "emptyDir", "configMap", "secret", "hostPath", "nfs", "csi", "image")


class Volume(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "[" + ", ".join(f"has(self.{source})" for source in _SOURCES) + "].exists_one(present, present)",
                "a volume has exactly one source: one of " + ", ".join(_SOURCES),
            )
        )
    )
    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name that volumeMounts refers to.",
        json_schema_extra=rules(
            rule(
                f"!self.startsWith('{RESERVED_VOLUME_PREFIX}')",
                "volume names that start with hpu- are the operator's own: choose another name",
            )
        ),
    )
    persistent_volume_claim: ClaimVolume | None = Field(default=None, description="A PersistentVolumeClaim.")
    empty_dir: EmptyDirVolume | None = Field(default=None, description="Scratch space that goes with the pod.")
    config_map: ConfigMapVolume | None = Field(default=None, description="Files from a ConfigMap.")
    secret: SecretVolume | None = Field(default=None, description="Files from a Secret.")
    host_path: HostPathVolume | None = Field(default=None, description="A path of the node.")
    nfs: NfsVolume | None = Field(default=None, description="An NFS export.")
    csi: CsiVolume | None = Field(default=None, description="An ephemeral CSI volume.")
    image: ImageVolume | None = Field(default=None, description="An OCI artifact as a read-only volume.")


class Toleration(ApiModel):
    key: Annotated[str, Field(max_length=316)] | None = Field(
        default=None, description="Taint to tolerate. Absent, with Exists: every taint."
    )
    operator: Literal["Exists", "Equal", "Lt", "Gt"] | None = Field(
        default=None, description="How key and value relate."
    )
    value: Annotated[str, Field(max_length=63)] | None = Field(default=None, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect to tolerate. Absent: every effect."
    )
    toleration_seconds: int | None = Field(
        default=None, description="For how long NoExecute is tolerated. Absent: for ever."
    )


class Resources(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) "
                "|| !isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k])) "
                "|| quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
                "a request is above its limit: lower the request or raise the limit",
            )
        )
    )
    requests: dict[str, Quantity] | None = Field(
        default=None, max_length=32, description="What the scheduler reserves."
    )
    limits: dict[str, Quantity] | None = Field(default=None, max_length=32, description="What may be used at most.")


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


class PodSettings(ApiModel):
    """Everything of the pods that is not the engine's."""

    model_config = ConfigDict(json_schema_extra=rules(_MOUNTS_EXIST))
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
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
        default=None, max_length=32, description="Labels a node must have."
    )
    tolerations: tuple[Toleration, ...] | None = Field(default=None, max_length=32, description="Taints to tolerate.")
    affinity: Affinity | None = Field(default=None, description="Where pods may and should run.")
    priority_class_name: Name | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class_name: Name | None = Field(default=None, description="RuntimeClass of the pods.")
    env: tuple[EnvVar, ...] | None = Field(
        default=None,
        max_length=128,
        description="More environment variables for the engine.",
        json_schema_extra=keyed_by("name"),
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
        default=None, max_length=32, description="More labels for the pods.", json_schema_extra=rules(_OWN_LABELS)
    )
    annotations: dict[str, LongText] | None = Field(
        default=None,
        max_length=32,
        description="More annotations for the pods.",
        json_schema_extra=rules(_OWN_ANNOTATIONS),
    )
