"""Children are written where they differ, and what seems to be in the way is looked at before it is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from hpu_operator.api.reasons import Reason
from hpu_operator.domain import desired
from hpu_operator.kube.kinds import EVENT, SERVICE, WATCHED, Kind
from hpu_operator.kube.port import Listed, Live
from hpu_operator.metrics import Metrics
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.inputs.intake import FIRST_SWEEP_SECONDS, Intake
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.outputs.announcer import Announcer
from hpu_operator.runtime.outputs.children import Blocked, Children
from hpu_operator.runtime.queue import Queue
from tests.operator.objects import OWNER

WANTED = desired.service(OWNER)


class Server:
    """An API server of one Service: what is live, and what was written."""

    def __init__(self, live: Live | None = None) -> None:
        self.live = live
        self.written: list[Mapping[str, Any]] = []
        self.lists = 0
        self.events: list[tuple[str, str, str]] = []

    async def get(self, kind: Kind, namespace: str, name: str) -> Live | None:
        return self.live

    async def list(self, kind: Kind, namespace: str | None, **selectors: str) -> Listed:
        self.lists += 1
        return Listed([self.live] if self.live and kind is SERVICE else [], 100)

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        self.written.append(manifest)
        self.live = live(manifest, version=101)
        return self.live

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self.live = None

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Live:
        assert kind is EVENT
        self.events.append((body["type"], body["reason"], body["message"]))
        return dict(body)


def live(manifest: Mapping[str, Any], *, version: int = 5, **metadata: Any) -> Live:
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(version), **metadata}}


def of_an_earlier_object() -> Live:
    owners = [{**WANTED["metadata"]["ownerReferences"][0], "uid": "uid-of-the-one-before"}]
    return live(WANTED, ownerReferences=owners)


def children(server: Server, cached: Live | None) -> Children:
    cache = Cache()
    if cached is not None:
        cache.put(SERVICE, cached)
    return Children(server, cache, Announcer(server))  # type: ignore[arg-type]


def told(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{entry['event']}: {entry['kind']} {entry['child']}" for entry in logs]


async def test_what_is_new_is_logged_and_is_no_event() -> None:
    server = Server()
    with capture_logs() as logs:
        await children(server, None).ensure(OWNER, SERVICE, WANTED)
    assert told(logs) == ["child created: Service team/smol"]
    assert server.events == []


async def test_a_child_that_was_changed_is_logged_as_repaired() -> None:
    changed = {**live(WANTED), "spec": {**WANTED["spec"], "type": "NodePort"}}
    server = Server()
    with capture_logs() as logs:
        await children(server, changed).ensure(OWNER, SERVICE, WANTED)
    assert told(logs) == ["child repaired: Service team/smol"]
    assert server.events == []


class RewritingServer(Server):
    """One whose webhook adds to every Service what nobody asked for, in place of what was asked for."""

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        await super().apply(kind, manifest)
        version = 100 + len(self.written)
        self.live = live({**manifest, "spec": {**manifest["spec"], "type": "NodePort"}}, version=version, uid="u1")
        return self.live


@pytest.mark.parametrize("cached", [None, {**live(WANTED), "spec": {}}], ids=["new", "changed"])
async def test_what_the_cluster_rewrites_is_written_once_and_told(cached: Live | None) -> None:
    server = RewritingServer()
    held = children(server, cached)
    with capture_logs() as logs:
        for _ in range(3):
            await held.ensure(OWNER, SERVICE, WANTED)
    assert len(server.written) == 1
    assert told(logs)[-1] == "child rewritten by the cluster: Service team/smol"


async def test_what_somebody_changes_on_top_of_a_rewriting_is_repaired() -> None:
    server = RewritingServer()
    cache = Cache()
    held = Children(server, cache, Announcer(server))  # type: ignore[arg-type]
    await held.ensure(OWNER, SERVICE, WANTED)
    assert server.live is not None
    cache.put(SERVICE, live({**server.live, "spec": {**server.live["spec"], "selector": {}}}, version=200, uid="u1"))
    await held.ensure(OWNER, SERVICE, WANTED)
    assert len(server.written) == 2


def holding(server: Server) -> tuple[Children, Cache]:
    """Children that have seen the object's Service."""
    cache = Cache()
    cache.put(SERVICE, live(WANTED, uid="u1"))
    held = Children(server, cache, Announcer(server))  # type: ignore[arg-type]
    held.see(OWNER)
    return held, cache


async def test_a_child_that_somebody_deleted_is_made_again_and_people_are_told() -> None:
    server = Server()
    held, cache = holding(server)
    cache.remove(SERVICE, live(WANTED, version=6))
    with capture_logs() as logs:
        await held.ensure(OWNER, SERVICE, WANTED)
    assert told(logs) == ["child recreated: Service team/smol"]
    assert server.events == [("Normal", "Repaired", "Service smol was deleted and has been recreated")]


@pytest.mark.parametrize("how", ["deleted on purpose", "object gone", "another object"])
async def test_what_is_made_for_another_reason_is_no_repair(how: str) -> None:
    server = Server()
    held, cache = holding(server)
    owner = OWNER
    if how == "deleted on purpose":
        with capture_logs() as logs:
            await held.delete(OWNER, SERVICE, "smol", "u1")
        assert told(logs) == ["child deleted: Service team/smol"]
        held.see(OWNER)  # the deletion has not been seen yet
    elif how == "object gone":
        held.forget(Key("team", "smol"))
    else:
        owner = replace(OWNER, uid="uid-2")
    cache.remove(SERVICE, live(WANTED, version=6))
    await held.ensure(owner, SERVICE, desired.service(owner))
    assert server.events == []


async def test_what_is_as_wanted_is_not_written() -> None:
    server = Server()
    await children(server, live(WANTED)).ensure(OWNER, SERVICE, WANTED)
    assert server.written == []


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (of_an_earlier_object(), Reason.WAITING_FOR_CLEANUP),
        (live(WANTED, ownerReferences=[]), Reason.NAME_TAKEN),
        (live(WANTED, deletionTimestamp="2026-11-30T12:00:00Z"), Reason.WAITING_FOR_CLEANUP),
    ],
    ids=["earlier object's", "foreign", "being deleted"],
)
async def test_what_is_in_the_way_is_said_while_it_is_there_and_not_a_moment_longer(
    found: Live, reason: Reason
) -> None:
    server = Server(found)
    blocked = children(server, cached=found)
    with pytest.raises(Blocked) as refused:
        await blocked.ensure(OWNER, SERVICE, WANTED)
    assert refused.value.diagnosis.reason is reason
    server.live = None  # it went, and no watch told
    await blocked.ensure(OWNER, SERVICE, WANTED)
    assert server.written == [WANTED]


async def test_a_deletion_between_the_first_list_and_the_watch_is_found_by_the_first_sweep() -> None:
    server, cache, now = Server(live(WANTED)), Cache(), [0.0]
    metrics = Metrics()
    intake = Intake(
        server,  # type: ignore[arg-type]
        cache,
        Queue(metrics, lambda: now[0]),
        scopes=[None],
        metrics=metrics,
        clock=lambda: now[0],
    )
    await intake.fill()
    assert cache.count(SERVICE) == 1
    server.live = None
    now[0] = FIRST_SWEEP_SECONDS + 0.1
    await intake.sweep_due()
    assert cache.count(SERVICE) == 0
    lists = server.lists
    await intake.sweep_due()
    assert server.lists == lists, "the next one is ten minutes away"
    assert lists == 2 * len(WATCHED)
