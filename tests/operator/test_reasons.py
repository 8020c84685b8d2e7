"""Every reason has a cause, a remedy, and a situation from which an object's status comes to say it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hpu_engine.contract import FailureReason, Phase, TerminationMessage
from hpu_operator.api.reasons import CATALOGUE, Reason, is_failure, severity
from hpu_operator.control_client import ControlClient, control_url
from hpu_operator.domain import desired
from hpu_operator.domain.observed import Event, Group, Observed, Pod, Unreachable
from hpu_operator.domain.status.conditions import Situation, Subject
from hpu_operator.domain.status.document import build_status
from hpu_operator.kube.kinds import INFERENCE, SERVICE, Kind
from hpu_operator.kube.port import Listed, Live, Refused
from hpu_operator.metrics import Metrics
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.inputs.control_watch import ControlWatch
from hpu_operator.runtime.inputs.observer import Observer
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.outputs.announcer import Announcer
from hpu_operator.runtime.outputs.children import Children
from hpu_operator.runtime.outputs.status_writer import StatusWriter
from hpu_operator.runtime.reconciler import Reconciler
from tests.operator.objects import NOW, OLD_REVISION, OWNER, REVISION, control, group, pod, recorded, spec

Shown = Callable[[], dict[str, Any]]
SUBJECT = Subject("team", "smol", 1)


def of(*groups: Group, replicas: int = 1) -> Shown:
    """The status of an object with these groups."""
    seen = Situation(SUBJECT, spec(replicas=replicas), REVISION, REVISION, "engine:1", Observed(groups))
    return lambda: build_status(seen, {}, NOW)


def of_pod(found: Pod) -> Shown:
    return of(group(0, REVISION, found))


def phase(said: Phase, **more: Any) -> Shown:
    return of_pod(pod(ready=False, control=control(said, **more)))


def died(why: FailureReason) -> Shown:
    """A container whose engine left its last words."""
    said = TerminationMessage(reason=why, message="last words").encode().decode()
    ended = {"exitCode": 3, "reason": "Error", "message": said}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    return of_pod(creating(waiting, lastState={"terminated": ended}, restartCount=3))


def creating(state: Mapping[str, Any], *events: Event, **container: Any) -> Pod:
    conditions = [{"type": "PodScheduled", "status": "True"}]
    status = {"conditions": conditions, "containerStatuses": [{"name": "engine", "state": state} | container]}
    return pod(status=status, events=events)


def told_by(why: str, message: str) -> Shown:
    """A container that is being created, and an event."""
    return of_pod(creating({"waiting": {"reason": "ContainerCreating"}}, Event("Warning", why, message)))


def waits(why: str, message: str) -> Shown:
    return of_pod(creating({"waiting": {"reason": why, "message": message}}))


class Server:
    """An API server on which `found` has every child's name, and which refuses what it is told to refuse."""

    def __init__(self, found: Live | None, refuses: bool) -> None:
        self._found = found
        self._refuses = refuses
        self.status: dict[str, Any] = {}

    async def get(self, kind: Kind, namespace: str, name: str) -> Live | None:
        return {**self._found, "metadata": {**self._found["metadata"], "name": name}} if self._found else None

    async def list(self, kind: Kind, namespace: str | None, **selectors: str) -> Listed:
        return Listed([], 1)

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        if self._refuses:
            raise Refused("PATCH", 422, "spec.template: Invalid value")
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "u", "resourceVersion": "2"}}

    async def apply_status(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        self.status = dict(manifest["status"])
        return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "3"}}

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Live:
        return dict(body)


def reconciled(written: Mapping[str, Any] | None = None, found: Live | None = None, *, refuses: bool = False) -> Shown:
    """The status that one reconcile of an object writes; `written` is its spec where it differs."""

    async def once() -> dict[str, Any]:
        server, cache, client = Server(found, refuses), Cache(), ControlClient()
        metadata = {"namespace": "team", "name": "smol", "uid": OWNER.uid, "generation": 1, "resourceVersion": "1"}
        content = {"model": {"uri": "file:///m"}} | dict(written or {})
        cache.put(INFERENCE, {**INFERENCE.type_meta, "metadata": metadata, "spec": content})
        announcer = Announcer(server)  # type: ignore[arg-type]
        watch = ControlWatch(client, Metrics(), lambda: 0.0, lambda _: None)
        reconciler = Reconciler(
            cache=cache,
            children=Children(server, cache, announcer),  # type: ignore[arg-type]
            observer=Observer(server, cache, watch, control_url, lambda: 0.0),  # type: ignore[arg-type]
            status=StatusWriter(server, cache, lambda: 0.0),  # type: ignore[arg-type]
            announcer=announcer,
            default_image="engine:1",
            now=lambda: NOW,
        )
        await reconciler.reconcile(Key("team", "smol"))
        await client.close()
        return server.status

    return lambda: asyncio.run(once())


def child_of(uid: str | None) -> Live:
    """A Service whose owner is an object of our name with this uid, or nobody."""
    manifest = desired.service(replace(OWNER, uid=uid or ""))
    owners = manifest["metadata"]["ownerReferences"] if uid else []
    return {**SERVICE.type_meta, **manifest, "metadata": {**manifest["metadata"], "ownerReferences": owners}}


SHOWN: dict[Reason, Shown] = {
    Reason.INVALID_SPEC: reconciled({"replicas": "many"}),
    Reason.NAME_TAKEN: reconciled(found=child_of(None)),
    Reason.REJECTED: reconciled(refuses=True),
    Reason.MODEL_NOT_FOUND: died(FailureReason.MODEL_NOT_FOUND),
    Reason.MODEL_BROKEN: died(FailureReason.MODEL_BROKEN),
    Reason.MODEL_UNSUPPORTED: died(FailureReason.MODEL_UNSUPPORTED),
    Reason.BAD_ARGUMENTS: died(FailureReason.USAGE),
    Reason.INSUFFICIENT_MEMORY: died(FailureReason.INSUFFICIENT_MEMORY),
    Reason.OUT_OF_MEMORY: of_pod(recorded("oom-killed")),
    Reason.SECRET_MISSING: of_pod(recorded("secret-volume-missing")),
    Reason.CONFIG_MAP_MISSING: waits("CreateContainerConfigError", 'configmap "settings" not found'),
    Reason.VOLUME_MISSING: of_pod(recorded("pvc-missing")),
    Reason.VOLUME_NOT_MOUNTED: told_by("FailedMount", "mount failed: exit status 32"),
    Reason.IMAGE_PULL_FAILED: of_pod(recorded("image-pull")),
    Reason.POD_REFUSED: of_pod(recorded("run-as-non-root")),
    Reason.START_FAILED: of_pod(recorded("start-error")),
    Reason.NO_MATCHING_NODE: of_pod(recorded("selector-mismatch")),
    Reason.NO_CAPACITY: of_pod(recorded("cards-insufficient")),
    Reason.LIVENESS_FAILED: of_pod(recorded("liveness-kill")),
    Reason.WORKER_LOST: died(FailureReason.WORKER_LOST),
    Reason.CRASH_LOOP: of_pod(recorded("crashloop")),
    Reason.EVICTED: of_pod(recorded("evicted-ephemeral")),
    Reason.NODE_LOST: of_pod(recorded("node-lost")),
    Reason.STALLED: phase(Phase.LOADING, idle_seconds=130),
    Reason.CONTROL_UNREACHABLE: of_pod(pod(ready=False, control=Unreachable("no answer", for_seconds=60))),
    Reason.PROBE_FAILING: of_pod(recorded("readiness-failing", control=control(Phase.READY, idle_seconds=12))),
    Reason.PULLING_IMAGE: told_by("Pulling", 'Pulling image "engine:1"'),
    Reason.WAITING_FOR_CLEANUP: reconciled(found=child_of("uid-of-the-one-before")),
    Reason.WAITING_FOR_PODS: of(replace(group(0), pods=())),
    Reason.STARTING: phase(Phase.STARTING),
    Reason.WAITING_FOR_CONTROL: of_pod(pod(ready=False)),
    Reason.FETCHING: phase(Phase.FETCHING),
    Reason.LOADING: phase(Phase.LOADING),
    Reason.CONNECTING: phase(Phase.CONNECTING),
    Reason.WARMING_UP: phase(Phase.WARMING_UP, done=37, total=72),
    Reason.ROLLING_OUT: of(group(0, OLD_REVISION)),
    Reason.DRAINING: of(group(0, OLD_REVISION, leaving=True)),
    Reason.SCALED_TO_ZERO: of(replicas=0),
    Reason.ACCEPTED: of(group(0)),
    Reason.COMPLETE: of(group(0)),
    Reason.WARMED_UP: of(group(0)),
    Reason.ANSWERING: of(group(0)),
}
"""A situation for each reason. Real clusters show most of them again in `control_plane`, `e2e` and `recordings`."""

_SAID_ELSEWHERE = {Reason.ACCEPTED: "Accepted", Reason.COMPLETE: "Progressing", Reason.WARMED_UP: "WarmedUp"}


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reason_has_cause_remedy_and_a_situation_that_shows_it(reason: Reason) -> None:
    entry = CATALOGUE[reason]
    assert entry.cause.endswith(".")
    assert entry.remedy.endswith(".")
    assert re.match(r"^[A-Z][A-Za-z]+$", reason.value)
    said = {item["type"]: item for item in SHOWN[reason]()["conditions"]}
    told = said[_SAID_ELSEWHERE.get(reason, "Ready")]
    assert told["reason"] == reason.value, told
    assert told["message"]
    assert said["Ready"]["status"] == ("True" if reason in (*_SAID_ELSEWHERE, Reason.ANSWERING) else "False")


def test_the_catalogue_has_nothing_else() -> None:
    assert list(CATALOGUE) == list(Reason)


def test_failures_are_graver_than_what_is_on_the_way() -> None:
    assert severity(Reason.OUT_OF_MEMORY) < severity(Reason.WARMING_UP) < severity(Reason.ANSWERING)
    assert is_failure(Reason.CONTROL_UNREACHABLE)
    assert not is_failure(Reason.PULLING_IMAGE)
    assert not is_failure(Reason.ANSWERING)
