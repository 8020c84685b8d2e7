"""Reads pods and their events from the API server until they are as a test expects."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hpu_operator.api.reasons import Reason
from hpu_operator.domain.diagnosis.questions import Diagnosis, diagnose_pod
from hpu_operator.domain.observed import Event, read_pod
from tests.cluster.api import ApiError
from tests.cluster.fleet import Fleet

Object = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """A pod at one moment, with the events about it, oldest first."""

    live: Object
    events: tuple[Object, ...]

    @property
    def status(self) -> Object:
        return dict(self.live.get("status", {}))

    @property
    def container(self) -> Object:
        """The status of the container `engine`; empty before the kubelet wrote one."""
        return next(iter(self.status.get("containerStatuses", [])), {})

    @property
    def waiting(self) -> Object:
        return dict(self.container.get("state", {}).get("waiting", {}))

    @property
    def last_end(self) -> Object:
        """How the container ended last: it may be between two runs, or running again."""
        states = (self.container.get("state", {}), self.container.get("lastState", {}))
        return next((dict(state["terminated"]) for state in states if "terminated" in state), {})

    def condition(self, kind: str) -> Object:
        return next((dict(one) for one in self.status.get("conditions", []) if one["type"] == kind), {})

    def messages(self, reason: str) -> list[str]:
        """The messages of the events with this reason."""
        return [str(event.get("message", "")) for event in self.events if event.get("reason") == reason]

    def facts(self) -> Object:
        """What to look at when a test fails."""
        told = ("type", "reason", "message", "count")
        events = [{name: event.get(name) for name in told} for event in self.events]
        return {"status": self.status, "events": events}

    def diagnosis(self) -> Diagnosis | None:
        """What the operator makes of it."""
        events = tuple(Event(event["type"], event["reason"], event.get("message", "")) for event in self.events)
        return diagnose_pod(read_pod(self.live, events=events), datetime.now(UTC))

    @property
    def reason(self) -> Reason | None:
        """The operator's word for it."""
        diagnosis = self.diagnosis()
        return diagnosis.reason if diagnosis else None


@dataclass(frozen=True)
class Recorder:
    fleet: Fleet
    namespace: str

    def path(self, kind: str, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def see(self, name: str) -> Seen | None:
        """The pod now; None when there is none. Read after its events, so that its status is not older than those."""
        query = f"{self.path('events')}?fieldSelector=involvedObject.name={name}"
        found: Any = self.fleet.api.request("GET", query)["items"]
        try:
            live = self.fleet.api.request("GET", self.path("pods", name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        metadata: Any = live["metadata"]
        events = [event for event in found if event["involvedObject"].get("uid") == metadata["uid"]]
        events.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return Seen(live, tuple(events))

    def wait(self, name: str, expected: Callable[[Seen], bool], timeout_seconds: float = 90.0) -> Seen:
        """The first sight of the pod that is as expected. AssertionError with the last one.

        Status and events come from different hands: whatever a test asserts and may come later belongs into `expected`.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            seen = self.see(name)
            if seen and expected(seen):
                return seen
            if time.monotonic() > deadline:
                said = json.dumps(seen.facts() if seen else None, indent=1)
                raise AssertionError(f"pod {name} is not as expected after {timeout_seconds:.0f} s:\n{said}")
            time.sleep(0.5)

    def gone_after(self, name: str, timeout_seconds: float) -> float:
        """Seconds until the pod has disappeared."""
        start = time.monotonic()
        while self.see(name):
            if time.monotonic() - start > timeout_seconds:
                raise AssertionError(f"pod {name} is still there after {timeout_seconds:.0f} s")
            time.sleep(0.2)
        return time.monotonic() - start

    def create(self, manifest: Object) -> None:
        self.fleet.api.request("POST", self.path("pods"), manifest)

    def delete(self, name: str) -> None:
        self.fleet.api.request("DELETE", self.path("pods", name))
