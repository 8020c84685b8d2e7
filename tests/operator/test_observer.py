"""Events are listed for pods that have waited, a few at a time, and not for those whose status says why."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hpu_operator.control_client import ControlClient, control_url
from hpu_operator.domain import desired
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.revision import revision_of
from hpu_operator.kube.kinds import EVENT, POD, STATEFUL_SET, Kind
from hpu_operator.kube.port import Listed
from hpu_operator.metrics import Metrics
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.inputs.control_watch import ControlWatch
from hpu_operator.runtime.inputs.observer import Observer
from tests.operator.objects import NOW, OWNER, spec

GROUPS = 30
CREATING = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
UNSCHEDULABLE = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}


class Events:
    """An API server that has no events, and counts who asked about which pod."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def list(self, kind: Kind, namespace: str | None, **selectors: str) -> Listed:
        assert kind is EVENT
        self.asked.append(selectors["fieldSelector"])
        return Listed([], 1)


def holding(status: dict[str, Any], age: timedelta) -> Cache:
    """A cache of thirty groups, each with a pod in this state."""
    cache, wanted = Cache(), spec(replicas=GROUPS)
    record = desired.render_record(OWNER, wanted, revision_of(wanted), 1, "engine:1")
    for index in range(GROUPS):
        group = desired.stateful_set(OWNER, GroupId(index, record.revision, 0), record)
        stamps = {"resourceVersion": "1", "creationTimestamp": (NOW - age).isoformat()}
        cache.put(STATEFUL_SET, {**group, "metadata": {**group["metadata"], "uid": f"set-{index}"} | stamps})
        metadata = {
            "namespace": OWNER.namespace,
            "name": f"{group['metadata']['name']}-0",
            "labels": group["spec"]["template"]["metadata"]["labels"],
            "uid": f"pod-{index}",
        }
        cache.put(POD, {"metadata": metadata | stamps, "status": status})
    return cache


async def looks(status: dict[str, Any], count: int, age: timedelta = timedelta(minutes=1)) -> list[list[str]]:
    """Whose events each of `count` looks asked for, a look every five seconds."""
    server, now, client = Events(), [100.0], ControlClient()
    try:
        watch = ControlWatch(client, Metrics(), lambda: now[0], lambda _: None)
        observer = Observer(server, holding(status, age), watch, control_url, lambda: now[0])  # type: ignore[arg-type]
        found = []
        for _ in range(count):
            server.asked = []
            await observer.explain(OWNER, observer.snapshot(OWNER), NOW)
            found.append(server.asked)
            now[0] += 5.0
        return found
    finally:
        await client.close()


async def test_each_waiting_pod_has_its_turn_and_no_look_asks_about_all() -> None:
    asked = await looks(CREATING, 4)
    assert [len(each) for each in asked[:3]] == [8, 8, 8]
    assert len({pod for each in asked for pod in each}) == GROUPS


async def test_a_pod_that_no_node_takes_has_said_why() -> None:
    assert await looks(UNSCHEDULABLE, 1) == [[]]


async def test_a_young_pod_is_not_asked_about() -> None:
    assert await looks(CREATING, 1, age=timedelta(seconds=5)) == [[]]
