"""Which object: the unit of the queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hpu_operator.domain.names import NAME_LABEL
from hpu_operator.domain.owner import Owner
from hpu_operator.kube.kinds import INFERENCE, Kind


class Key(NamedTuple):
    namespace: str
    name: str

    @classmethod
    def of(cls, owner: Owner) -> Key:
        return cls(owner.namespace, owner.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def key_of(kind: Kind, live: Mapping[str, Any]) -> Key | None:
    """The HpuInference that `live` is, or is a child of by its label; None where it has no such label."""
    metadata = live["metadata"]
    name = metadata["name"] if kind is INFERENCE else (metadata.get("labels") or {}).get(NAME_LABEL)
    return Key(metadata["namespace"], name) if name else None
