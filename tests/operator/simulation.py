"""A cluster that does what the rollout decides, slowly, and to which things happen by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from hpu_operator.domain.facts import Facts
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.observed import Group, Observed, Pod
from hpu_operator.domain.rollout.actions import Action, CreateGroup, DeleteGroup, LeaveService, ReturnToService
from hpu_operator.domain.rollout.decide import Wanted, decide, learn
from tests.operator.objects import NOW, group, pod, recorded


def named(id_: GroupId) -> str:
    return f"smol-{id_.revision}-{id_.index}-{id_.attempt}-0"


def loading(id_: GroupId) -> Pod:
    return pod(ready=False, name=named(id_))


def crashing(id_: GroupId) -> Pod:
    return pod(name=named(id_), status=dict(recorded("crashloop-backoff").status))


def unschedulable(id_: GroupId) -> Pod:
    return pod(name=named(id_), status=dict(recorded("cards-insufficient").status))


def restarted(name: str, now: datetime) -> Pod:
    """A pod that answers and has crashed twice a moment ago."""
    held = pod(name=name)
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": now.isoformat()}}
    running = {"running": {"startedAt": now.isoformat()}}
    container = {**held.container, "restartCount": 2, "state": running, "lastState": ended}
    return replace(held, status={**held.status, "containerStatuses": [container]})


@dataclass
class Cluster:
    """Each tick one thing happens: a pod becomes ready, or recovers, or goes. `hurt` are indices that fail by our hand
    and do not answer again yet."""

    groups: dict[GroupId, Group] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    now: datetime = NOW
    in_endpoints: set[str] = field(default_factory=set)
    hurt: set[int] = field(default_factory=set)

    def step(self, replicas: int, target: str, max_unavailable: int = 1) -> list[Action]:
        """One reconcile: facts first, then actions."""
        observed = Observed(tuple(self.groups[key] for key in sorted(self.groups)), frozenset(self.in_endpoints))
        self.facts.setdefault(target, Facts())
        self.facts |= learn(Wanted(replicas, target, self.facts, max_unavailable), observed, self.now)
        actions = decide(Wanted(replicas, target, self.facts, max_unavailable), observed, self.now)
        for action in actions:
            self._do(action)
        self.hurt -= self.answering
        return list(actions)

    def _do(self, action: Action) -> None:
        match action:
            case CreateGroup(id_):
                occupied = [key for key in self.groups if key.index == id_.index]
                assert not occupied, f"{id_} is made while {occupied} holds its place"
                self.put(id_, loading(id_))
            case LeaveService(id_, _):
                self._change(id_, in_service=False, left_service_at=self.now)
            case ReturnToService(id_, _):
                self._change(id_, in_service=True, left_service_at=None)
            case DeleteGroup(id_):
                assert not self.groups[id_].serving_pods or not self._in_service(id_), f"{id_} is deleted in service"
                self._change(id_, deleting=True)
                self.groups[id_] = replace(self.groups[id_], stateful_set_uid=None, deleting=True, expected_pods=0)

    def _in_service(self, id_: GroupId) -> bool:
        return any(p.in_service for p in self.groups[id_].serving_pods)

    def put(self, id_: GroupId, *pods: Pod) -> None:
        """A group, or another state of its pods."""
        self.groups[id_] = group(id_.index, id_.revision, *pods, attempt=id_.attempt)

    def _change(self, id_: GroupId, **changes: Any) -> None:
        held = self.groups[id_]
        self.groups[id_] = replace(held, pods=tuple(replace(p, **changes) for p in held.pods))

    def tick(self, chosen: int) -> None:
        """Something happens to the group that `chosen` picks; a pod that waits for cards waits for its neighbours."""
        self.now += timedelta(seconds=1)
        self.in_endpoints = {p.uid for g in self.groups.values() for p in g.pods if p.ready and p.in_service}
        if not self.groups:
            return
        id_ = sorted(self.groups)[chosen % len(self.groups)]
        held = self.groups[id_]
        alone = not any(other.index == id_.index for other in self.groups if other != id_)
        if held.leaving:
            del self.groups[id_]
        elif alone or held.pods[0].condition("PodScheduled").get("status") == "True":
            well = pod(name=named(id_), in_service=held.pods[0].in_service)
            self.groups[id_] = replace(held, pods=(replace(well, left_service_at=held.pods[0].left_service_at),))

    # What happens by hand

    def staying(self) -> list[GroupId]:
        return sorted(id_ for id_, held in self.groups.items() if not held.leaving)

    def surge(self, index: int, revision: str, *, fits: bool = True) -> GroupId | None:
        """Make a group of `revision` beside the only one at `index`."""
        here = [id_ for id_ in self.groups if id_.index == index]
        id_ = GroupId(index, revision, 0)
        if len(here) != 1 or id_ in here or self.groups[here[0]].leaving:
            return None
        self.put(id_, loading(id_) if fits else unschedulable(id_))
        return id_

    def withdraw(self, id_: GroupId) -> None:
        """Delete a group that does not answer."""
        held = self.groups[id_]
        self._do(DeleteGroup(id_, str(held.stateful_set_name), str(held.stateful_set_uid)))

    def break_(self, id_: GroupId) -> None:
        self.put(id_, crashing(id_))
        if id_.index not in self.answering:
            self.hurt.add(id_.index)

    @property
    def answering(self) -> set[int]:
        return {id_.index for id_, held in self.groups.items() if held.answers}

    def is_settled(self, replicas: int, target: str) -> bool:
        return set(self.groups) == {GroupId(index, target, 0) for index in range(replicas)} and all(
            held.answers for held in self.groups.values()
        )

    def settle(self, replicas: int, target: str, max_unavailable: int = 1) -> None:
        """Go on until everything is as wanted; a failure where that never comes."""
        for chosen in range(400):
            self.step(replicas, target, max_unavailable)
            if self.is_settled(replicas, target):
                return
            self.tick(chosen)
        pytest.fail(f"never settled: {sorted(self.groups)}")
