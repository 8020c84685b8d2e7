"""Every name and label that the operator generates. They are made only here; docs/generated-names.md shows examples.

Lengths: the StatefulSet controller labels each pod with `<StatefulSet name>-<ten characters>`, and a label value has at
most 63, so a StatefulSet's name has at most 52. The longest suffix takes 17 (`-1a2b3c4d-999-999`), which leaves 35 for
the base: the object's name, or its first 26 characters and a hash of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from hpu_operator.api.inference import RANKS_SUFFIX
from hpu_operator.api.schema import GROUP

MANAGER = "hpu-operator"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
NAME_LABEL = f"{GROUP}/name"
REVISION_LABEL = f"{GROUP}/revision"
GROUP_LABEL = f"{GROUP}/group"
ATTEMPT_LABEL = f"{GROUP}/attempt"
IN_SERVICE_LABEL = f"{GROUP}/in-service"
COMPONENT_LABEL = "app.kubernetes.io/component"
ENGINE_COMPONENT, SERVICE_COMPONENT, RECORD_COMPONENT = "engine", "service", "revision"
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"

MANIFEST_HASH_ANNOTATION = f"{GROUP}/manifest-hash"
LEFT_SERVICE_ANNOTATION = f"{GROUP}/left-service-at"
COMPLETED_ANNOTATION = f"{GROUP}/completed-at"

MAX_STATEFULSET_NAME = 52
MAX_BASE = 35
MAX_ATTEMPT = 999
_BASE_HASH_LENGTH = 8

CHILD_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGER}"
"""Selects every object the operator made, and nothing else."""

RECORD_SELECTOR = f"{CHILD_SELECTOR},{COMPONENT_LABEL}={RECORD_COMPONENT}"
"""Without the component it would select the StatefulSet controller's own ControllerRevisions, which copy pod labels."""


@dataclass(frozen=True, order=True)
class GroupId:
    """Index and revision of a group, and how many times it was placed before."""

    index: int
    revision: str
    attempt: int


def base(name: str) -> str:
    """The object's name, shortened with a hash of the whole where it is longer than generated names allow."""
    if len(name) <= MAX_BASE:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_BASE_HASH_LENGTH]
    return f"{name[: MAX_BASE - _BASE_HASH_LENGTH - 1]}-{digest}"


def stateful_set(name: str, group: GroupId) -> str:
    return f"{base(name)}-{group.revision}-{group.index}-{group.attempt}"


def service(name: str) -> str:
    """Where clients find the API: the object's own name."""
    return name


def ranks_service(name: str) -> str:
    """The headless Service through which the pods of a group find each other."""
    return f"{base(name)}{RANKS_SUFFIX}"


def revision_record(name: str, revision: str) -> str:
    return f"{base(name)}-{revision}"


def object_labels(name: str) -> dict[str, str]:
    """On every child."""
    return {
        "app.kubernetes.io/name": "hpu-inference",
        "app.kubernetes.io/instance": name,
        MANAGED_BY_LABEL: MANAGER,
        NAME_LABEL: name,
    }


def group_labels(name: str, group: GroupId) -> dict[str, str]:
    """On a group's StatefulSet and pods, and the StatefulSet's selector."""
    return {
        NAME_LABEL: name,
        REVISION_LABEL: group.revision,
        GROUP_LABEL: str(group.index),
        ATTEMPT_LABEL: str(group.attempt),
    }


def group_of(labels: Mapping[str, str]) -> GroupId | None:
    """The group an object with these labels belongs to; None where a label is missing or not a number."""
    try:
        return GroupId(int(labels[GROUP_LABEL]), labels[REVISION_LABEL], int(labels[ATTEMPT_LABEL]))
    except (KeyError, ValueError):
        return None
