"""The indices below `replicas`, and the groups at each.

Two questions are asked of a group. Does it *answer*: are all of its pods ready and in service (`Group.answers`)? Is it
*settled*: does nothing speak against it, such as a container that has crashed twice and runs again for seconds
(`is_settled`)? Availability counts groups that answer. A rollout goes on, and status says Ready, only once they are
settled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from hpu_operator.api.reasons import Reason, is_failure
from hpu_operator.domain.diagnosis.questions import diagnose_group
from hpu_operator.domain.observed import Group

_NOT_BROKEN = {Reason.CONTROL_UNREACHABLE, Reason.PROBE_FAILING, Reason.WORKER_LOST, Reason.LIVENESS_FAILED}
"""Failures that a pod recovers from by itself, and a silent control endpoint, which says nothing about the pod."""


@dataclass(frozen=True)
class Slot:
    """One index. `successor` is the newest placement of the target revision that is not leaving, `predecessor` the
    best of the other groups that are not leaving, `groups` are all of them."""

    index: int
    successor: Group | None
    predecessor: Group | None
    groups: tuple[Group, ...]

    @property
    def answers(self) -> bool:
        return any(group.answers for group in self.groups)

    @property
    def to_replace(self) -> Group | None:
        """The group that holds the index, where it has no successor yet."""
        return self.predecessor if self.successor is None else None

    def is_settled(self, now: datetime) -> bool:
        """Whether it answers, and any group of the target revision in it is settled."""
        return self.answers and (self.successor is None or is_settled(self.successor, now))

    def kept(self, now: datetime) -> tuple[Group, ...]:
        """The groups that stay for now; the others are to go."""
        new, old = self.successor, self.predecessor
        if new is None or old is None:
            return tuple(group for group in (new, old) if group)
        if not old.answers or is_settled(new, now):
            return (new,)
        return (old,) if waits_for_capacity(new, now) else (new, old)


def slots(replicas: int, target: str, groups: Iterable[Group]) -> tuple[Slot, ...]:
    """All slots, by index."""
    at: defaultdict[int, list[Group]] = defaultdict(list)
    for group in groups:
        at[group.id.index].append(group)
    return tuple(_slot(index, target, tuple(at[index])) for index in range(replicas))


def _slot(index: int, target: str, groups: tuple[Group, ...]) -> Slot:
    staying = [group for group in groups if not group.leaving]
    mine = [group for group in staying if group.id.revision == target]
    successor = max(mine, key=lambda group: group.id.attempt, default=None)
    others = [group for group in staying if group is not successor]
    return Slot(index, successor, max(others, key=lambda group: (group.answers, group.id), default=None), groups)


def is_settled(group: Group, now: datetime) -> bool:
    """Whether the group answers and nothing speaks against it."""
    return diagnose_group(group, now) is None


def is_broken(group: Group, now: datetime) -> bool:
    """Whether the group does not answer and will not recover by itself."""
    if group.answers or group.leaving:
        return False
    diagnosis = diagnose_group(group, now)
    return diagnosis is not None and is_failure(diagnosis.reason) and diagnosis.reason not in _NOT_BROKEN


def waits_for_capacity(group: Group, now: datetime) -> bool:
    diagnosis = None if group.answers else diagnose_group(group, now)
    return diagnosis is not None and diagnosis.reason is Reason.NO_CAPACITY


def is_out_of_service(group: Group) -> bool:
    """Whether its pods could answer, but no new connections are sent to any of them."""
    return bool(group.serving_pods) and not any(pod.in_service for pod in group.pods)
