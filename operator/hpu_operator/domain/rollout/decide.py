"""Which group is made, taken out of service or deleted next: what is wanted and observed in, actions out.

Policy, in words:

1. An index without a group gets one of the target revision. An index whose old pods are still leaving waits for them:
   work is in place, the new group needs their cards.
2. A group of another revision that is broken is replaced at once. It does not answer, so that costs no availability.
3. Otherwise at most `max_unavailable` groups are replaced at a time: first those that do not answer, then, while few
   enough are missing, those that do, by index. A group of the target revision that is not settled counts as missing:
   the old groups may be the last that answer.
4. Where a group of the target revision stands beside another one at its index, the other one stays while it answers,
   until the new one is settled. A new one that waits for cards beside it is withdrawn.
5. A group that answers leaves service in order: label false, endpoints gone, StatefulSet deleted. The lame duck and the
   drain that follow are the engine's. A group that does not answer is deleted at once.
6. A group beyond `replicas` is taken down in the same order. It stays while it stands in for a group that does not
   answer, or is about to be replaced; unless that one waits for its cards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from hpu_operator.domain.facts import Facts, completed_now
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.observed import Group, Observed, Pod
from hpu_operator.domain.rollout.actions import Action, CreateGroup, DeleteGroup, LeaveService, ReturnToService
from hpu_operator.domain.rollout.slots import Slot, is_broken, is_out_of_service, is_settled, slots, waits_for_capacity

ENDPOINT_PATIENCE = timedelta(seconds=15)
"""How long a group waits for its endpoints to disappear. The lame duck covers what is left of them after that."""


@dataclass(frozen=True)
class Wanted:
    """What should run: `replicas` groups of the revision `target`, which need not be the one that the spec asks for.

    `facts` are what is known of each recorded revision's past.
    """

    replicas: int
    target: str
    facts: Mapping[str, Facts] = field(default_factory=dict)
    max_unavailable: int = 1


def learn(wanted: Wanted, observed: Observed, now: datetime) -> dict[str, Facts]:
    """New facts, by revision. They are written before anything is decided from them."""
    known = wanted.facts
    held = slots(wanted.replicas, wanted.target, observed.groups)
    if wanted.target not in known or not held or not all(s.successor and is_settled(s.successor, now) for s in held):
        return {}
    facts = completed_now(known, wanted.target, now)
    return {wanted.target: facts} if facts != known[wanted.target] else {}


def decide(wanted: Wanted, observed: Observed, now: datetime) -> tuple[Action, ...]:
    """What to do now. Empty where nothing is to be done, or earlier actions have not taken effect yet."""
    held = slots(wanted.replicas, wanted.target, observed.groups)
    actions: list[Action] = []
    going = _surplus(wanted, held, observed.groups, now)
    for slot in held:
        kept = slot.kept(now)
        if not slot.groups:
            actions.append(CreateGroup(GroupId(slot.index, wanted.target, 0)))
        elif slot.successor in kept:
            actions += _return_to_service(slot.successor)
        going += [group for group in slot.groups if group not in kept]
    going += _to_replace(wanted.max_unavailable, held, now)
    return (*actions, *(action for group in going for action in _take_down(group, observed, now)))


def _surplus(wanted: Wanted, held: Sequence[Slot], groups: Iterable[Group], now: datetime) -> list[Group]:
    """Groups beyond `replicas` that are not needed any more."""
    beyond = [group for group in groups if group.id.index >= wanted.replicas]
    if any(slot.successor and not slot.answers and waits_for_capacity(slot.successor, now) for slot in held):
        return beyond
    silent = sum(not slot.answers for slot in held)
    next_to_go = sum(slot.answers and slot.to_replace is not None for slot in held)
    needed = silent + min(next_to_go, wanted.max_unavailable)
    stand_ins = [group for group in beyond if group.answers][:needed]
    return [group for group in beyond if group not in stand_ins]


def _to_replace(max_unavailable: int, held: Sequence[Slot], now: datetime) -> list[Group]:
    """Groups of another revision whose turn it is."""
    old = [slot.to_replace for slot in held if slot.to_replace]
    broken = [group for group in old if is_broken(group, now)]
    leaving = [group for group in old if is_out_of_service(group) and group not in broken]
    answering = [group for group in old if group.answers]
    idle = [group for group in old if group not in (*broken, *leaving, *answering)]
    in_transit = sum(slot.to_replace is None and not slot.is_settled(now) for slot in held) + len(leaving)
    missing = sum(not slot.is_settled(now) for slot in held)
    return (
        broken + leaving + idle[: max(0, max_unavailable - in_transit)] + answering[: max(0, max_unavailable - missing)]
    )


def awaits_endpoints(groups: Iterable[Group]) -> bool:
    """Whether the next decision needs to know which pods the Service still sends connections to."""
    return any(not group.leaving and is_out_of_service(group) for group in groups)


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
    """Returns a group that was leaving service and is wanted again, because the target was changed back."""
    pods = tuple(pod for pod in group.pods if not pod.in_service and not pod.deleting)
    return [ReturnToService(group.id, pods)] if pods else []
