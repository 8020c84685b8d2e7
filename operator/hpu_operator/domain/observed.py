"""What was observed of one object's groups, as frozen values: the only thing decisions and status are made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from hpu_engine.contract import ControlState
from hpu_operator.domain import names
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.timestamps import parse_time


@dataclass(frozen=True)
class Unreachable:
    """The control endpoint has given no usable answer for `for_seconds`. This says nothing about the model."""

    error: str
    for_seconds: float = 0.0


Control = ControlState | Unreachable | None
"""None: not asked yet."""


@dataclass(frozen=True)
class Event:
    """The part of a Kubernetes event that explains a wait. A repeated event has one entry, from `first` to `last`."""

    type: str
    reason: str
    message: str
    first: datetime | None = None
    last: datetime | None = None


@dataclass(frozen=True)
class Pod:
    """One engine pod. `status` is the pod's own status as the API server gives it.

    `template` is the pod spec of its StatefulSet, empty where that is gone; `grace_seconds` is how long a pod that is
    being deleted may take to end.
    """

    name: str
    uid: str
    created: datetime
    deleting: bool
    in_service: bool
    left_service_at: datetime | None
    status: Mapping[str, Any]
    control: Control = None
    events: tuple[Event, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    grace_seconds: int | None = None

    @property
    def address(self) -> str | None:
        return self.status.get("podIP")

    @property
    def ready(self) -> bool:
        """The kubelet's verdict; False for a pod that is being deleted."""
        return not self.deleting and self.condition("Ready").get("status") == "True"

    def condition(self, kind: str) -> Mapping[str, Any]:
        return next((c for c in self.status.get("conditions") or () if c.get("type") == kind), {})

    @property
    def container(self) -> Mapping[str, Any]:
        """Status of the engine's container; empty before the kubelet wrote one."""
        statuses = self.status.get("containerStatuses") or ()
        return next((c for c in statuses if c.get("name") == "engine"), statuses[0] if statuses else {})

    @property
    def state(self) -> Mapping[str, Any]:
        """State of that container: `waiting`, `running` or `terminated`."""
        return self.container.get("state") or {}

    @property
    def running_since(self) -> datetime | None:
        return parse_time(self.state.get("running", {}).get("startedAt"))

    @property
    def restarts(self) -> int:
        return int(self.container.get("restartCount", 0))


@dataclass(frozen=True)
class Group:
    """One placement of a group: its StatefulSet, if it still exists, and its pods."""

    id: GroupId
    stateful_set_uid: str | None
    stateful_set_name: str | None
    created: datetime | None
    expected_pods: int
    deleting: bool
    pods: tuple[Pod, ...]
    events: tuple[Event, ...] = ()

    @property
    def leaving(self) -> bool:
        """Whether its StatefulSet is deleted or being deleted, so that it cannot return."""
        return self.stateful_set_uid is None or self.deleting

    @property
    def answers(self) -> bool:
        """Whether all of its pods are ready and clients are sent to them."""
        return (
            not self.leaving
            and len(self.pods) >= self.expected_pods
            and all(pod.ready and pod.in_service for pod in self.pods)
        )

    @property
    def serving_pods(self) -> tuple[Pod, ...]:
        """Pods that clients may be connected to."""
        return tuple(pod for pod in self.pods if pod.ready)


@dataclass(frozen=True)
class Observed:
    """All groups of one object, sorted."""

    groups: tuple[Group, ...] = ()
    endpoints: frozenset[str] = field(default_factory=frozenset)
    """uids of pods that the Service still sends new connections to; filled when a group is to be taken down."""


def read_pod(live: Mapping[str, Any], control: Control = None, events: Sequence[Event] = ()) -> Pod:
    """A pod from the object the API server gives."""
    metadata = live["metadata"]
    created = parse_time(metadata["creationTimestamp"])
    assert created is not None, "the API server stamps every object"
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        created=created,
        deleting="deletionTimestamp" in metadata,
        in_service=(metadata.get("labels") or {}).get(names.IN_SERVICE_LABEL) == "true",
        left_service_at=parse_time((metadata.get("annotations") or {}).get(names.LEFT_SERVICE_ANNOTATION)),
        status=live.get("status") or {},
        control=control,
        events=tuple(events),
        grace_seconds=metadata.get("deletionGracePeriodSeconds"),
    )


def read_groups(
    stateful_sets: Iterable[Mapping[str, Any]],
    pods: Iterable[tuple[GroupId, Pod]],
    events: Mapping[str, Sequence[Event]] | None = None,
) -> tuple[Group, ...]:
    """Groups from their StatefulSets and pods; one whose StatefulSet is gone still has the pods that are leaving."""
    of_group: dict[GroupId, list[Pod]] = defaultdict(list)
    for group, pod in pods:
        of_group[group].append(pod)
    found: dict[GroupId, Group] = {}
    for live in stateful_sets:
        metadata = live["metadata"]
        group_id = names.group_of(metadata.get("labels") or {})
        if group_id is None:
            continue
        template = (live.get("spec", {}).get("template") or {}).get("spec") or {}
        found[group_id] = Group(
            id=group_id,
            stateful_set_uid=metadata["uid"],
            stateful_set_name=metadata["name"],
            created=parse_time(metadata.get("creationTimestamp")),
            expected_pods=int(live.get("spec", {}).get("replicas", 1)),
            deleting="deletionTimestamp" in metadata,
            pods=_sorted(replace(pod, template=template) for pod in of_group.pop(group_id, [])),
            events=tuple((events or {}).get(metadata["uid"], ())),
        )
    for group_id, rest in of_group.items():
        found[group_id] = Group(group_id, None, None, None, 0, True, _sorted(rest))
    return tuple(found[group_id] for group_id in sorted(found))


def _sorted(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    return tuple(sorted(pods, key=lambda pod: pod.name))
