"""Who owns a child: owner references that let the garbage collector take everything down without the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpu_operator.api.schema import GROUP, KIND, VERSION
from hpu_operator.domain.compare import Manifest


@dataclass(frozen=True)
class Owner:
    """The identity of one HpuInference object."""

    namespace: str
    name: str
    uid: str


class Ownership(StrEnum):
    OURS = "ours"
    PREDECESSOR = "predecessor"
    """Of an earlier object of the same name: the garbage collector is about to remove it."""
    FOREIGN = "foreign"


def child_metadata(
    owner: Owner, name: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> Manifest:
    metadata: Manifest = {
        "name": name,
        "namespace": owner.namespace,
        "labels": dict(labels),
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return metadata


def ownership(owner: Owner, live: Mapping[str, Any]) -> Ownership:
    """To whom a live object with a child's name belongs."""
    references = live.get("metadata", {}).get("ownerReferences") or []
    if any(reference.get("uid") == owner.uid for reference in references):
        return Ownership.OURS
    for reference in references:
        if (reference.get("kind"), reference.get("name")) == (KIND, owner.name):
            return Ownership.PREDECESSOR
    return Ownership.FOREIGN
