"""A pod's volumes and where they are mounted, as core/v1 has them, with bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from hpu_operator.api.formats import AbsolutePath, DataKey, ImageName, Name, ObjectName, RelativePath
from hpu_operator.api.schema import ApiModel, Quantity, Text, one_of, rule, rules

RESERVED_VOLUME_PREFIX = "hpu-"
RESERVED_PATHS = ("/mnt/model", "/tmp")  # noqa: S108 - where the operator mounts its own volumes
SYSTEM_PATHS = ("/dev", "/proc", "/sys")


class LocalReference(ApiModel):
    name: ObjectName = Field(description="Name of an object in the same namespace.")


class VolumeMount(ApiModel):
    name: Name = Field(description="Name of a volume of pod.volumes.")
    mount_path: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Where the container sees it.",
        json_schema_extra=rules(
            rule(
                " && ".join(f"self != '{path}' && !self.startsWith('{path}/')" for path in RESERVED_PATHS),
                "mountPath must not be under /mnt/model or /tmp: the operator mounts there; use another path",
            ),
            rule("self.startsWith('/') && !self.contains(':')", "mountPath must start with / and contain no colon"),
            rule(
                "!self.matches('(^|/)[.]{1,2}(/|$)') && !self.matches('//') && (self == '/' || !self.endsWith('/'))",
                "mountPath must be written out: without //, . or .. as an element, or a / at its end",
            ),
            rule(
                "self != '/' && self != '/mnt' && "
                + " && ".join(f"self != '{path}' && !self.startsWith('{path}/')" for path in SYSTEM_PATHS),
                "mountPath must not be /, /mnt or under /dev, /proc or /sys, which would hide what the engine needs: "
                "use another path, such as /data",
            ),
        ),
    )
    sub_path: RelativePath | None = Field(default=None, description="A folder of the volume in place of its root.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")


class KeyToPath(ApiModel):
    key: DataKey = Field(description="Key of the object.")
    path: RelativePath = Field(description="File it becomes, below the mount.")
    mode: int | None = Field(default=None, ge=0, le=0o777, description="Permission bits of the file.")


class ClaimVolume(ApiModel):
    claim_name: ObjectName = Field(description="Name of a PersistentVolumeClaim in the same namespace.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")


class EmptyDirVolume(ApiModel):
    medium: Literal["", "Memory"] | None = Field(default=None, description="Memory for a file system in memory.")
    size_limit: Quantity | None = Field(default=None, description="Largest size.")


class ConfigMapVolume(ApiModel):
    name: ObjectName = Field(description="Name of a ConfigMap in the same namespace.")
    items: tuple[KeyToPath, ...] | None = Field(default=None, max_length=64, description="Which keys. Absent: all.")
    optional: bool | None = Field(default=None, description="Start without it when it does not exist.")
    default_mode: int | None = Field(default=None, ge=0, le=0o777, description="Permission bits of the files.")


class SecretVolume(ApiModel):
    secret_name: ObjectName = Field(description="Name of a Secret in the same namespace.")
    items: tuple[KeyToPath, ...] | None = Field(default=None, max_length=64, description="Which keys. Absent: all.")
    optional: bool | None = Field(default=None, description="Start without it when it does not exist.")
    default_mode: int | None = Field(default=None, ge=0, le=0o777, description="Permission bits of the files.")


class HostPathVolume(ApiModel):
    path: AbsolutePath = Field(description="Path on the node.")
    type: (
        Literal["", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"]
        | None
    ) = Field(default=None, description="What must be there. Absent: anything.")


class NfsVolume(ApiModel):
    server: Name = Field(description="Host name or address of the server.")
    path: AbsolutePath = Field(description="Exported path.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")


class CsiVolume(ApiModel):
    driver: ObjectName = Field(description="Name of the CSI driver.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")
    fs_type: Annotated[str, Field(max_length=64)] | None = Field(default=None, description="File system.")
    volume_attributes: dict[str, Text] | None = Field(
        default=None, max_length=64, description="Settings of the driver."
    )
    node_publish_secret_ref: LocalReference | None = Field(
        default=None, description="Secret the node gives the driver."
    )


class ImageVolume(ApiModel):
    reference: ImageName = Field(description="An OCI artifact to mount read-only.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the node fetches it."
    )


_SOURCES = ("persistentVolumeClaim", "emptyDir", "configMap", "secret", "hostPath", "nfs", "csi", "image")


class Volume(ApiModel):
    model_config = ConfigDict(json_schema_extra=one_of("a volume", _SOURCES))
    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="Name that volumeMounts refers to.",
        json_schema_extra=rules(
            rule(
                "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
                "not the name of a volume: use a-z, 0-9 and -, beginning and ending with a letter or digit",
            ),
            rule(
                f"!self.startsWith('{RESERVED_VOLUME_PREFIX}')",
                "volume names that start with hpu- are the operator's own: choose another name",
            ),
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
