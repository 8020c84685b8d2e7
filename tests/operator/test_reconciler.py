"""What one reconcile reads and writes, in order: facts before actions, groups from their own revision's record."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from hpu_operator.control_client import ControlClient, control_url
from hpu_operator.domain import desired, names
from hpu_operator.domain.facts import Facts
from hpu_operator.domain.names import COMPLETED_ANNOTATION, GroupId
from hpu_operator.domain.revision import MAX_RECORDS, record_manifest, revision_of
from hpu_operator.domain.rollout.actions import CreateGroup
from hpu_operator.kube.kinds import INFERENCE, POD, RECORD, STATEFUL_SET, Kind
from hpu_operator.kube.port import Conflict, Listed, Live
from hpu_operator.metrics import Metrics
from hpu_operator.runtime import reconciler as module
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.inputs.control_watch import ControlWatch
from hpu_operator.runtime.inputs.observer import Observer
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.outputs.announcer import Announcer
from hpu_operator.runtime.outputs.children import Children
from hpu_operator.runtime.outputs.status_writer import StatusWriter
from hpu_operator.runtime.reconciler import Reconciler
from tests.operator.objects import NOW, OWNER, pod, spec

KEY = Key("team", "smol")
SPEC = spec()
REVISION = revision_of(SPEC)
OLD = spec(drainSeconds=7)


class Server:
    """An API server in memory. `written` names each write."""

    def __init__(self) -> None:
        self.live: dict[tuple[Kind, str], Live] = {}
        self.written: list[tuple[str, str, str]] = []
        self._version = itertools.count(10)

    def put(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        metadata = manifest["metadata"]
        given = {"uid": f"uid-of-{metadata['name']}", "creationTimestamp": NOW.isoformat(), **metadata}
        given["resourceVersion"] = str(next(self._version))
        self.live[kind, metadata["name"]] = {**manifest, "metadata": given}
        return self.live[kind, metadata["name"]]

    async def get(self, kind: Kind, namespace: str, name: str) -> Live | None:
        return self.live.get((kind, name))

    async def list(self, kind: Kind, namespace: str | None, **selectors: str) -> Listed:
        return Listed([], 1)

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        self.written.append(("apply", kind.kind, manifest["metadata"]["name"]))
        return self.put(kind, manifest)

    async def apply_status(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        self.written.append(("status", kind.kind, manifest["metadata"]["name"]))
        return self.put(kind, {**self.live[kind, manifest["metadata"]["name"]], "status": manifest["status"]})

    async def annotate(self, kind: Kind, live: Mapping[str, Any], annotations: Mapping[str, str]) -> Live:
        name = live["metadata"]["name"]
        held = self.live[kind, name]
        if held["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
            raise Conflict("annotate", 409, "changed")
        self.written.append(("annotate", kind.kind, name))
        return self.put(kind, {**held, "metadata": {**held["metadata"], "annotations": dict(annotations)}})

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self.written.append(("delete", kind.kind, name))
        del self.live[kind, name]

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Live:
        return dict(body)


class World:
    """One object on a server, its cache, and an operator."""

    def __init__(self) -> None:
        self.server, self.cache = Server(), Cache()
        metadata = {"namespace": "team", "name": "smol", "uid": OWNER.uid, "generation": 1}
        content = SPEC.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.know(INFERENCE, {**INFERENCE.type_meta, "metadata": metadata, "spec": content})

    def know(self, kind: Kind, manifest: Mapping[str, Any]) -> None:
        self.cache.put(kind, self.server.put(kind, manifest))

    def record_of(self, revision: str, number: int, facts: Facts | None = None) -> None:
        """A record of the older spec, under any name of a revision."""
        record = desired.render_record(OWNER, OLD, revision, number, "engine:old")
        manifest = record_manifest(OWNER, record)
        if facts and facts.completed:
            manifest["metadata"]["annotations"] = {COMPLETED_ANNOTATION: facts.completed.isoformat()}
        self.know(RECORD, manifest)

    def pods_answer(self) -> None:
        """A pod that is ready for each StatefulSet."""
        for (kind, name), live in list(self.server.live.items()):
            if kind is STATEFUL_SET:
                labels = live["spec"]["template"]["metadata"]["labels"]
                metadata = {"namespace": "team", "name": f"{name}-0", "labels": labels}
                self.know(POD, {**POD.type_meta, "metadata": metadata, "status": pod().status})

    async def reconcile(self) -> list[tuple[str, str, str]]:
        """One reconcile; what it wrote."""
        client, api = ControlClient(), self.server
        announcer = Announcer(api)  # type: ignore[arg-type]
        watch = ControlWatch(client, Metrics(), lambda: 0.0, lambda _: None)
        held = Reconciler(
            cache=self.cache,
            children=Children(api, self.cache, announcer),  # type: ignore[arg-type]
            observer=Observer(api, self.cache, watch, control_url, lambda: 0.0),  # type: ignore[arg-type]
            status=StatusWriter(api, self.cache, lambda: 0.0),  # type: ignore[arg-type]
            announcer=announcer,
            default_image="engine:new",
            now=lambda: NOW,
        )
        before = len(self.server.written)
        try:
            await held.reconcile(KEY)
        finally:
            await client.close()
        return self.server.written[before:]


async def test_a_revision_that_became_complete_is_noted_once() -> None:
    world = World()
    await world.reconcile()
    world.pods_answer()
    record = names.revision_record("smol", REVISION)
    assert await world.reconcile() == [("annotate", "ControllerRevision", record), ("status", "HpuInference", "smol")]
    live = world.server.live[RECORD, record]
    assert live["metadata"]["annotations"] == {COMPLETED_ANNOTATION: "2026-11-30T12:20:00Z"}
    assert await world.reconcile() == [], "at rest nothing is written, by a new process either"


async def test_nothing_is_done_where_a_fact_cannot_be_written() -> None:
    world = World()
    await world.reconcile()
    world.pods_answer()
    world.server.put(RECORD, world.server.live[RECORD, names.revision_record("smol", REVISION)])
    before = list(world.server.written)
    with pytest.raises(Conflict):
        await world.reconcile()
    assert world.server.written == before, "it was changed meanwhile, and the watch has not told yet"


def deciding(monkeypatch: pytest.MonkeyPatch, *groups: GroupId) -> None:
    monkeypatch.setattr(module, "decide", lambda *_: tuple(CreateGroup(group) for group in groups))


async def test_a_group_is_made_from_the_record_of_its_own_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.record_of("01d01d01", 1)
    deciding(monkeypatch, GroupId(0, "01d01d01", 0), GroupId(1, REVISION, 0))
    await world.reconcile()
    images = {
        name: live["spec"]["template"]["spec"]["containers"][0]["image"]
        for (kind, name), live in world.server.live.items()
        if kind is STATEFUL_SET
    }
    assert images == {"smol-01d01d01-0-0": "engine:old", f"smol-{REVISION}-1-0": "engine:new"}


async def test_a_group_without_a_record_of_its_revision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    deciding(monkeypatch, GroupId(0, "01d01d01", 0))
    with capture_logs() as logs:
        await world.reconcile()
    assert [kind for kind, _ in world.server.live if kind is STATEFUL_SET] == []
    (told,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert told["event"] == "group not created: its revision has no record"
    assert (told["object"], told["group"]) == ("team/smol", GroupId(0, "01d01d01", 0))


async def test_the_record_of_the_last_good_revision_is_kept_however_old_it_is() -> None:
    world = World()
    for number in range(1, MAX_RECORDS + 4):
        world.record_of(f"{number:08x}", number, Facts(NOW) if number == 2 else None)
    await world.reconcile()
    gone = {name for verb, kind, name in world.server.written if (verb, kind) == ("delete", "ControllerRevision")}
    assert gone == {"smol-00000001", "smol-00000003"}
