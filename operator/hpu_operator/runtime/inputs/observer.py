"""Puts together what is known of one object: cached children, control states, and what events and endpoints tell."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from hpu_engine.contract import ControlState, Phase
from hpu_operator.control_client import ControlUrl
from hpu_operator.domain import names
from hpu_operator.domain.diagnosis.questions import EVENTS_AFTER
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.observed import Event, Group, Observed, Pod, read_groups, read_pod
from hpu_operator.domain.owner import Owner
from hpu_operator.domain.rollout.decide import awaits_endpoints
from hpu_operator.domain.timestamps import parse_time
from hpu_operator.kube.kinds import ENDPOINT_SLICE, EVENT, POD, STATEFUL_SET
from hpu_operator.kube.port import KubeApi, Live
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.inputs.control_watch import ControlWatch, Target
from hpu_operator.runtime.key import Key

_FRESH_SECONDS = 10.0
_REMEMBERED = 5_000
_NEWEST_EVENTS = 30
_ASKED_AT_ONCE = 8
"""Events of how many pods are listed in one look at an object: the rest have their turn in the next."""


class Observer:
    """`clock` gives seconds that only grow."""

    def __init__(
        self, api: KubeApi, cache: Cache, watch: ControlWatch, url_of: ControlUrl, clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._cache = cache
        self._watch = watch
        self._url_of = url_of
        self._clock = clock
        self._events: OrderedDict[str, tuple[float, tuple[Event, ...]]] = OrderedDict()

    def snapshot(self, owner: Owner) -> Observed:
        """What is known now, without a request. Tells the watch which control endpoints matter."""
        pods = self._pods(owner)
        self._watch.expect(Key.of(owner), [target for _, live in pods if (target := self._target(live))])
        read = [
            (group, read_pod(live, self._watch.answer(live["metadata"]["uid"]), self._known_events(live)))
            for group, live in pods
        ]
        sets = self._cache.own(STATEFUL_SET, owner)
        return Observed(read_groups(sets, read, {live["metadata"]["uid"]: self._known_events(live) for live in sets}))

    def _pods(self, owner: Owner) -> list[tuple[GroupId, Live]]:
        """Pods of the object's groups. Those whose StatefulSet is gone count while they are leaving."""
        found = []
        for live in self._cache.children(POD, Key.of(owner)):
            group = names.group_of(live["metadata"].get("labels") or {})
            if group is not None:
                found.append((group, live))
        return found

    def _target(self, live: Live) -> Target | None:
        pod = read_pod(live)
        url = self._url_of(live)
        if pod.deleting or url is None or "running" not in pod.state:
            return None
        return Target(pod.uid, url, pod.restarts)

    def forget(self, key: Key) -> None:
        """The object is gone: its pods are asked no more."""
        self._watch.expect(key, ())

    async def explain(self, owner: Owner, observed: Observed, now: datetime) -> Observed:
        """`observed`, with events for what has waited long and endpoints where a decision needs them."""
        waiting = [uid for group in observed.groups for uid in _unexplained(group, now)]
        await asyncio.gather(*(self._ask_events(owner.namespace, uid) for uid in self._longest_unasked(waiting)))
        explained = self.snapshot(owner)
        if not awaits_endpoints(explained.groups):
            return explained
        return Observed(explained.groups, await self._endpoints(owner))

    def _known_events(self, live: Mapping[str, Any]) -> tuple[Event, ...]:
        return self._events.get(live["metadata"]["uid"], (0.0, ()))[1]

    def _longest_unasked(self, uids: Iterable[str]) -> list[str]:
        """Those whose events are not fresh, never asked first."""
        asked_at = {uid: self._events[uid][0] if uid in self._events else -math.inf for uid in uids}
        stale = [uid for uid, when in asked_at.items() if self._clock() - when >= _FRESH_SECONDS]
        return sorted(stale, key=asked_at.__getitem__)[:_ASKED_AT_ONCE]

    async def _ask_events(self, namespace: str, uid: str) -> None:
        found = await self._api.list(EVENT, namespace, fieldSelector=f"involvedObject.uid={uid}")
        found.items.sort(key=_time_of)
        self._events[uid] = (
            self._clock(),
            tuple(_read_event(event) for event in found.items[-_NEWEST_EVENTS:]),
        )
        self._events.move_to_end(uid)
        while len(self._events) > _REMEMBERED:
            self._events.popitem(last=False)

    async def _endpoints(self, owner: Owner) -> frozenset[str]:
        """uids of the pods that the object's Service sends new connections to."""
        selector = f"kubernetes.io/service-name={names.service(owner.name)}"
        slices = await self._api.list(ENDPOINT_SLICE, owner.namespace, labelSelector=selector)
        return frozenset(
            str(endpoint["targetRef"].get("uid"))
            for piece in slices.items
            for endpoint in piece.get("endpoints") or ()
            if endpoint.get("targetRef") and (endpoint.get("conditions") or {}).get("ready", True)
        )


def _read_event(event: Mapping[str, Any]) -> Event:
    first = event.get("firstTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return Event(
        event.get("type", ""),
        event.get("reason", ""),
        event.get("message", "")[:2000],
        parse_time(first),
        parse_time(_time_of(event) or None),
    )


def _time_of(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(
        event.get("lastTimestamp")
        or series.get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


def _unexplained(group: Group, now: datetime) -> list[str]:
    """uids of what has waited so long that only events can say why."""
    if group.leaving:
        return []
    missing = len(group.pods) < group.expected_pods
    long_ago = group.created is not None and now - group.created >= EVENTS_AFTER
    found = [group.stateful_set_uid] if missing and long_ago and group.stateful_set_uid else []
    return found + [pod.uid for pod in group.pods if _needs_events(pod, now)]


def _needs_events(pod: Pod, now: datetime) -> bool:
    if pod.deleting or pod.ready or now - pod.created < EVENTS_AFTER:
        return False
    if pod.condition("PodScheduled").get("reason") == "Unschedulable":
        return False  # the scheduler says it there
    speaks_for_itself = isinstance(pod.control, ControlState) and pod.control.phase is not Phase.READY
    return not speaks_for_itself
