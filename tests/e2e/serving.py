"""The model under test as the end-to-end tests see it: its object, its pods, and what they say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from tests.cluster.fleet import Fleet
from tests.control_plane.audit import QUIET_SECONDS
from tests.demo import installation, progress
from tests.demo.kube import Kube
from tests.demo.progress import Object
from tests.e2e.clients import wait_for

NAME = "smollm2"
LABEL = "serving.hpu.dev/name"
OPERATOR = "system:serviceaccount:hpu-system:hpu-operator"
READY_SECONDS = 480.0
KINDS = "statefulsets,controllerrevisions,services,endpointslices,pods"


@dataclass(frozen=True)
class Serving:
    """`url` is the Service's, inside the cluster."""

    fleet: Fleet
    kube: Kube
    url: str = f"http://{NAME}.default.svc.cluster.local:8000"

    def apply(self) -> None:
        self.kube.kubectl("apply", "-f", str(installation.EXAMPLE))

    def patch(self, spec: Object) -> None:
        self.kube.kubectl("patch", "hpui", NAME, "--type=merge", "--patch", json.dumps({"spec": spec}))

    def read(self) -> Object:
        item = self.kube.get("hpui", NAME)
        assert item is not None, f"there is no HpuInference {NAME}"
        return item

    def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> Object:
        """Until Ready is True for the present generation. The failure says what the object said last."""
        return progress.wait_until(self.read, timeout_seconds=timeout_seconds, say=print)

    def events(self, reason: str) -> list[Object]:
        """Those that tell of a reason of the Ready condition, oldest first. They stay; the condition may be gone."""
        found = [event for event in self.kube.list("events") if event["involvedObject"]["name"] == NAME]
        found.sort(key=lambda event: str(event["metadata"]["creationTimestamp"]))
        return [event for event in found if event["reason"] == reason]

    def pods(self) -> list[Object]:
        return self.kube.list("pods", selector=f"{LABEL}={NAME}")

    def children(self) -> list[str]:
        """Everything that exists for the object, pods and endpoints included."""
        found = self.kube.list(KINDS, selector=f"{LABEL}={NAME}")
        return [f"{item['kind']} {item['metadata']['name']}" for item in found]


def identity(pod: Object) -> tuple[str, int]:
    """What changes when a pod is replaced or its container restarted."""
    return pod["metadata"]["uid"], restarts(pod)


def restarts(pod: Object) -> int:
    return sum(int(status["restartCount"]) for status in pod["status"].get("containerStatuses", ()))


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


@contextmanager
def fewest_ready(serving: Serving) -> Iterator[list[int]]:
    """Samples how many pods were ready during the block, as often as kubectl allows."""
    samples: list[int] = []
    stop = Event()

    def sample() -> None:
        while not stop.is_set():
            samples.append(sum(is_ready(pod) for pod in serving.pods()))
            time.sleep(0.2)

    thread = Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join(timeout=30)


def audit(serving: Serving, since: int = 0) -> list[dict[str, Any]]:
    """The API server's audit entries from byte `since` on."""
    with serving.fleet.audit_log.open() as log:
        log.seek(since)
        return [json.loads(line) for line in log if line.endswith("\n")]


def writes_of_operator(serving: Serving, since: int = 0, *, leases: bool = False) -> list[str]:
    """Verb and address of each of its writes from byte `since` on: those of its lease, or all others."""
    return [
        f"{entry['verb']} {entry['requestURI']}"
        for entry in audit(serving, since)
        if entry["user"]["username"] == OPERATOR
        and entry["verb"] not in {"get", "list", "watch"}
        and ("/leases/" in entry["requestURI"]) == leases
    ]


def wait_until_quiet(serving: Serving) -> int:
    """Until the operator has written nothing for `QUIET_SECONDS`; the byte of the audit log where they began."""
    start = 0

    def quiet() -> bool:
        nonlocal start
        start = serving.fleet.audit_log.stat().st_size
        time.sleep(QUIET_SECONDS)
        return not writes_of_operator(serving, start)

    wait_for(f"{QUIET_SECONDS:g} s without a write of the operator", quiet, 120)
    return start
