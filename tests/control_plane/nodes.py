"""A node of the tests' own: the scheduler gives it pods, and this plays the part of its kubelet.

It writes pod statuses of the shapes a kubelet writes, renews the node's Lease, and ends pods that are being deleted.
What a pod goes through is the test's to say; left alone, pods run and become ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from hpu_operator.kube.kinds import LEASE, Kind
from hpu_operator.kube.port import Conflict, KubeError, Live, NotFound
from tests.control_plane.admin import Admin

NODE = Kind("", "v1", "nodes", "Node")
ALL_PODS = Kind("", "v1", "pods", "Pod")
_EVERY_SECONDS = 0.1
_RENEW_SECONDS = 8.0

Status = dict[str, Any]
Script = Callable[[Live], Status | None]
"""From a pod to the status its kubelet writes; None: leave it as it is."""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def running(*, ready: bool, restarts: int = 0, last_end: Status | None = None, started: str | None = None) -> Status:
    """The status of a pod whose engine container runs."""
    return pod_status(
        state={"running": {"startedAt": started or _now()}}, ready=ready, restarts=restarts, last_end=last_end
    )


def waiting(reason: str, message: str = "", *, restarts: int = 0, last_end: Status | None = None) -> Status:
    return pod_status(
        state={"waiting": {"reason": reason, "message": message}}, ready=False, restarts=restarts, last_end=last_end
    )


def ended(exit_code: int, message: str = "", reason: str = "Error") -> Status:
    """A `terminated` state. `message` is what the container left in its termination log."""
    return {"exitCode": exit_code, "reason": reason, "message": message, "startedAt": _now(), "finishedAt": _now()}


def pod_status(*, state: Status, ready: bool, restarts: int = 0, last_end: Status | None = None) -> Status:
    word = "True" if ready else "False"
    # As recorded from a kubelet: a container that is being created for long has no sandbox, for want of a volume.
    sandbox = "False" if state.get("waiting", {}).get("reason") == "ContainerCreating" else "True"
    kinds = {"Initialized": "True", "ContainersReady": word, "Ready": word, "PodReadyToStartContainers": sandbox}
    conditions = [
        {"type": kind, "status": status, "lastTransitionTime": _now(), "lastProbeTime": None}
        for kind, status in kinds.items()
    ]
    return {
        "phase": "Running" if "running" in state or restarts else "Pending",
        "podIP": "198.51.100.7",
        "podIPs": [{"ip": "198.51.100.7"}],
        "hostIP": "192.0.2.10",
        "conditions": conditions,
        "containerStatuses": [
            {
                "name": "engine",
                "image": "engine:test",
                "imageID": "",
                "ready": ready,
                "started": "running" in state,
                "restartCount": restarts,
                "state": state,
                "lastState": {"terminated": last_end} if last_end else {},
            }
        ],
    }


class TestNode:
    """Use it as an async context manager. `script` decides what pods go through; by default they become ready."""

    __test__ = False

    def __init__(self, admin: Admin, namespace: str) -> None:
        self._admin = admin
        self._namespace = namespace
        self.name = f"node-{namespace}"[:63].rstrip("-")
        self.script: Script = lambda pod: None if _is_ready(pod) else running(ready=True)
        self.ends_pods = True
        self.incarnations: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> TestNode:
        await self._register()
        self._tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._kubelet())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._admin.delete(NODE, None, self.name)

    async def _register(self) -> None:
        await self._admin.create(NODE, None, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name}})
        capacity = {"cpu": "1000", "memory": "1000Gi", "pods": "2000", "ephemeral-storage": "1000Gi"}
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastHeartbeatTime": _now(),
            "lastTransitionTime": _now(),
        }
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [condition]}
        await self._admin.merge(NODE, None, self.name, {"status": status}, "status")
        await self._admin.merge(NODE, None, self.name, {"spec": {"taints": None}})

    async def _renew(self) -> None:
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40}
        metadata = {"name": self.name, "namespace": "kube-node-lease"}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        with contextlib.suppress(Conflict):
            await self._admin.create(LEASE, "kube-node-lease", lease)
        while True:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            with contextlib.suppress(KubeError):
                await self._admin.merge(LEASE, "kube-node-lease", self.name, {"spec": {"renewTime": stamp}})
            await asyncio.sleep(_RENEW_SECONDS)

    async def _kubelet(self) -> None:
        while True:
            with contextlib.suppress(KubeError):
                for pod in await self._admin.list(ALL_PODS, self._namespace):
                    if pod.get("spec", {}).get("nodeName") == self.name:
                        await self._attend(pod)
            await asyncio.sleep(_EVERY_SECONDS)

    async def _attend(self, pod: Live) -> None:
        metadata = pod["metadata"]
        self.incarnations[metadata["uid"]] = metadata["name"]
        with contextlib.suppress(NotFound, Conflict):
            if "deletionTimestamp" in metadata:
                if self.ends_pods:
                    await self._admin.delete(ALL_PODS, self._namespace, metadata["name"], grace_seconds=0)
                return
            wanted = self.script(copy.deepcopy(pod))
            if wanted is not None and _differs(pod.get("status") or {}, wanted):
                scheduled = [c for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled"]
                wanted = {**wanted, "conditions": [*scheduled, *wanted["conditions"]]}
                await self._admin.merge(ALL_PODS, self._namespace, metadata["name"], {"status": wanted}, "status")


def _is_ready(pod: Live) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod.get("status", {}).get("conditions", [])
    )


def _differs(live: Status, wanted: Status) -> bool:
    """Apart from times: a script is called again and again."""

    def timeless(status: Status) -> object:
        conditions = {c["type"]: c["status"] for c in status.get("conditions", []) if c["type"] != "PodScheduled"}
        containers = copy.deepcopy(status.get("containerStatuses", []))
        for container in containers:
            for state in (container.get("state", {}), container.get("lastState", {})):
                for detail in state.values():
                    for stamp in ("startedAt", "finishedAt"):
                        detail.pop(stamp, None)
        shown = [
            {key: container.get(key) for key in ("ready", "restartCount", "state", "lastState")}
            for container in containers
        ]
        return status.get("phase"), conditions, shown

    return timeless(live) != timeless(wanted)
