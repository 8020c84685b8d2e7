"""Which group is made, taken out of service or deleted next: observed groups in, actions out.

Policy, in words:

1. An index that nothing occupies gets a group of the revision the spec asks for. An index whose old pods are still
   leaving waits for them: work is in place, the new group needs their cards.
2. A group of another revision that is broken is replaced at once; it answers nobody, so that costs no availability.
3. Otherwise groups are replaced one at a time: first one that is not ready, then, while all are ready, by index.
   While a group of the wanted revision does not answer, no other is touched: the old ones may be the last that will.
4. A group that answers leaves service in order: label false, endpoints gone, StatefulSet deleted. What follows (lame
   duck, drain) is the engine's. A group that answers nobody is deleted at once.
5. A group beyond `replicas`, or a second group at an index, is taken down in the same order. One that answers stays
   while it stands in for a group that does not, or is about to be replaced; unless that one waits for its cards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from hpu_operator.api.reasons import Reason, is_failure
from hpu_operator.domain.diagnosis import diagnose_group
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.observed import Group, Observed, Pod

ENDPOINT_PATIENCE = timedelta(seconds=15)
"""How long a group waits for its endpoints to disappear. The lame duck covers what is left of them after that."""

_NOT_BROKEN = {Reason.CONTROL_UNREACHABLE, Reason.PROBE_FAILING, Reason.WORKER_LOST, Reason.LIVENESS_FAILED}
"""Failures a pod recovers from by itself, and silence towards the operator, which says nothing about the pod."""


@dataclass(frozen=True)
class CreateGroup:
    id: GroupId


@dataclass(frozen=True)
class LeaveService:
    id: GroupId
    pods: tuple[Pod, ...]


@dataclass(frozen=True)
class ReturnToService:
    id: GroupId
    pods: tuple[Pod, ...]


@dataclass(frozen=True)
class DeleteGroup:
    id: GroupId
    stateful_set_name: str
    stateful_set_uid: str


Action = CreateGroup | LeaveService | ReturnToService | DeleteGroup


@dataclass(frozen=True)
class Slot:
    """One index below `replicas`: the group that should stay, and those that should not."""

    index: int
    current: Group | None
    others: tuple[Group, ...]

    @property
    def ready(self) -> bool:
        return any(group.ready for group in (self.current, *self.others) if group)

    @property
    def replaceable(self) -> Group | None:
        """The group of another revision that holds this index, where it is not leaving yet."""
        return next((group for group in self.others if not group.leaving), None) if self.current is None else None


def slots(replicas: int, revision: str, groups: Iterable[Group]) -> tuple[Slot, ...]:
    """The indices below `replicas`, with who holds them."""
    at: defaultdict[int, list[Group]] = defaultdict(list)
    for group in groups:
        at[group.id.index].append(group)
    return tuple(_slot(index, revision, at[index]) for index in range(replicas))


def _slot(index: int, revision: str, groups: list[Group]) -> Slot:
    mine = [group for group in groups if group.id.revision == revision and not group.leaving]
    current = max(mine, key=lambda group: group.id.attempt, default=None)
    return Slot(index, current, tuple(group for group in groups if group is not current))


def decide(replicas: int, revision: str, observed: Observed, now: datetime) -> tuple[Action, ...]:
    """What to do now. Empty: nothing, or wait for what was done before."""
    held = slots(replicas, revision, observed.groups)
    actions: list[Action] = []
    for group in _surplus(replicas, held, observed.groups, now):
        actions += _take_down(group, observed, now)
    for slot in held:
        if slot.current is None and not slot.others:
            actions.append(CreateGroup(GroupId(slot.index, revision, 0)))
        elif slot.current is not None:
            actions += _return_to_service(slot.current)
            for surplus in slot.others:
                actions += _take_down(surplus, observed, now)
    for group in _to_replace(held, now):
        actions += _take_down(group, observed, now)
    return tuple(actions)


def _surplus(replicas: int, held: tuple[Slot, ...], groups: Iterable[Group], now: datetime) -> list[Group]:
    """Groups beyond `replicas` that nobody needs any more."""
    beyond = [group for group in groups if group.id.index >= replicas]
    if any(slot.current and _waits_for_capacity(slot.current, now) for slot in held):
        return beyond
    silent = sum(not slot.ready for slot in held)
    next_to_go = any(slot.ready and slot.replaceable for slot in held)
    stand_ins = [group for group in beyond if group.ready][: silent + next_to_go]
    return [group for group in beyond if group not in stand_ins]


def _waits_for_capacity(group: Group, now: datetime) -> bool:
    diagnosis = None if group.ready else diagnose_group(group, now)
    return diagnosis is not None and diagnosis.reason is Reason.NO_CAPACITY


def _to_replace(held: tuple[Slot, ...], now: datetime) -> list[Group]:
    """Groups of another revision whose turn it is."""
    old = [slot.replaceable for slot in held if slot.replaceable is not None]
    chosen = [group for group in old if is_broken(group, now)]
    rest = [group for group in old if group not in chosen]
    already_leaving = [group for group in rest if _out_of_service(group)]
    if already_leaving:
        return chosen + already_leaving
    in_transit = any(not slot.current.ready if slot.current else slot.replaceable is None for slot in held)
    idle = [group for group in rest if not group.ready]
    if idle and not in_transit:
        return chosen + idle[:1]
    if all(slot.ready for slot in held):
        return chosen + rest[:1]
    return chosen


def is_broken(group: Group, now: datetime) -> bool:
    """Whether the group answers nobody and will not by itself."""
    if group.ready or group.leaving:
        return False
    diagnosis = diagnose_group(group, now)
    return diagnosis is not None and is_failure(diagnosis.reason) and diagnosis.reason not in _NOT_BROKEN


def _out_of_service(group: Group) -> bool:
    return bool(group.serving_pods) and not any(pod.in_service for pod in group.pods)


def awaits_endpoints(groups: Iterable[Group]) -> bool:
    """Whether the next decision needs to know which pods the Service still sends connections to."""
    return any(not group.leaving and _out_of_service(group) for group in groups)


def _take_down(group: Group, observed: Observed, now: datetime) -> list[Action]:
    if group.leaving or group.stateful_set_uid is None or group.stateful_set_name is None:
        return []
    delete = DeleteGroup(group.id, group.stateful_set_name, group.stateful_set_uid)
    if not group.serving_pods:
        return [delete]
    in_service = tuple(pod for pod in group.pods if pod.in_service)
    if in_service:
        return [LeaveService(group.id, in_service)]
    if any(pod.uid in observed.endpoints and not _out_of_patience(pod, now) for pod in group.pods):
        return []
    return [delete]


def _out_of_patience(pod: Pod, now: datetime) -> bool:
    return pod.left_service_at is not None and now - pod.left_service_at > ENDPOINT_PATIENCE


def _return_to_service(group: Group) -> list[Action]:
    """A group that was on its way out and is wanted again, because the spec was changed back."""
    pods = tuple(pod for pod in group.pods if not pod.in_service and not pod.deleting)
    return [ReturnToService(group.id, pods)] if pods else []
