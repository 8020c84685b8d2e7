"""What the object says while its pods go through what a kubelet reports: each trouble a word of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hpu_engine.contract import FailureReason, Phase, TerminationMessage
from hpu_operator.kube.kinds import INFERENCE, Kind
from tests.control_plane.admin import Admin
from tests.control_plane.conftest import OperatorHandle, inference
from tests.control_plane.looks import condition, eventually, ready, reason
from tests.control_plane.nodes import TestNode, ended, pod_status, running, waiting
from tests.control_plane.scripted_control import ScriptedControl, state

EVENTS = Kind("", "v1", "events", "Event")
QUOTAS = Kind("", "v1", "resourcequotas", "ResourceQuota")


def said(why: FailureReason, message: str, **evidence: Any) -> str:
    return TerminationMessage(reason=why, message=message, **evidence).encode().decode()


BACK_OFF = ("CrashLoopBackOff", "back-off 20s restarting failed container")
MISSING = said(FailureReason.MODEL_NOT_FOUND, "the model's folder does not exist", path="/mnt/model/absent")
TRUNCATED = said(FailureReason.MODEL_BROKEN, "file is cut short", path="/mnt/model/x.safetensors", tensor="lm_head")

KUBELET: dict[str, tuple[dict[str, Any], str, str]] = {
    "image pull": (waiting("ErrImagePull", "failed to pull registry.example/x:1"), "ImagePullFailed", "x:1"),
    "secret in a variable": (waiting("CreateContainerConfigError", 'secret "hub" not found'), "SecretMissing", "hub"),
    "config map in a variable": (
        waiting("CreateContainerConfigError", 'configmap "c" not found'),
        "ConfigMapMissing",
        '"c"',
    ),
    "root image": (waiting("CreateContainerConfigError", "image will run as root"), "PodRefused", "run as root"),
    "no program": (waiting("RunContainerError", 'exec: "hpu-engine": not found'), "StartFailed", "hpu-engine"),
    "path that does not exist": (
        waiting(*BACK_OFF, restarts=3, last_end=ended(3, MISSING)),
        "ModelNotFound",
        "/mnt/model/absent",
    ),
    "truncated tensor": (waiting(*BACK_OFF, restarts=3, last_end=ended(3, TRUNCATED)), "ModelBroken", "lm_head"),
    "crash loop": (
        waiting(*BACK_OFF, restarts=3, last_end=ended(1, "Segmentation\nmore")),
        "CrashLoop",
        "Segmentation",
    ),
    "memory": (waiting(*BACK_OFF, restarts=2, last_end=ended(137, "", "OOMKilled")), "OutOfMemory", "137"),
    "worker lost": (
        waiting(*BACK_OFF, restarts=1, last_end=ended(5, said(FailureReason.WORKER_LOST, "gone", signal="SIGKILL"))),
        "WorkerLost",
        "SIGKILL",
    ),
}


@pytest.mark.parametrize("case", KUBELET)
async def test_what_the_kubelet_reports_is_told(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle, case: str
) -> None:
    status, expected, word = KUBELET[case]
    node.script = lambda _: status
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    told = await reason(admin, namespace, expected)
    assert told["status"] == "False"
    assert word in told["message"]
    live = await admin.get(INFERENCE, namespace, "smol")
    assert live is not None
    assert live["status"]["readyReplicas"] == 0
    assert condition(live, "Available")["reason"] == expected


async def test_a_pod_that_no_node_can_take(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    cards = {"resources": {"limits": {"habana.ai/gaudi": 8}}}
    await admin.create(INFERENCE, namespace, inference("cards", pod=cards))
    await admin.create(INFERENCE, namespace, inference("picky", pod={"nodeSelector": {"zone": "nowhere"}}))
    await admin.create(INFERENCE, namespace, inference("claimless", model={"uri": "pvc://absent/x"}))
    assert "habana.ai/gaudi" in (await reason(admin, namespace, "NoCapacity", "cards"))["message"]
    assert "affinity/selector" in (await reason(admin, namespace, "NoMatchingNode", "picky"))["message"]
    missing = await reason(admin, namespace, "VolumeMissing", "claimless")
    assert "PersistentVolumeClaim absent does not exist" in missing["message"]


async def event(admin: Admin, namespace: str, kind: str, uid: str, name: str, why: str, message: str) -> None:
    """An event as a kubelet writes it."""
    stamp = "2026-11-30T12:00:00Z"
    about = {"kind": kind, "namespace": namespace, "name": name, "uid": uid}
    body = {
        "metadata": {"name": f"{name}.{why.lower()}"},
        "involvedObject": about,
        "type": "Warning",
        "reason": why,
        "message": message,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "source": {"component": "kubelet"},
    }
    await admin.create(EVENTS, namespace, body)


async def test_what_only_events_tell_is_told_after_ten_seconds(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    node.script = lambda _: waiting("ContainerCreating")
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    await reason(admin, namespace, "Starting")
    (pod,) = await admin.list(Kind("", "v1", "pods", "Pod"), namespace)
    metadata = pod["metadata"]
    text = 'MountVolume.SetUp failed for volume "token" : secret "hub-token" not found'
    await event(admin, namespace, "Pod", metadata["uid"], metadata["name"], "FailedMount", text)
    told = await reason(admin, namespace, "SecretMissing")
    assert "hub-token" in told["message"]


async def test_a_quota_that_refuses_pods_is_told(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await admin.create(QUOTAS, namespace, quota)
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    told = await reason(admin, namespace, "PodRefused")
    assert "exceeded quota: none" in told["message"]


async def test_an_unreachable_control_endpoint_is_no_failure_and_no_restart(
    admin: Admin, namespace: str, node: TestNode, control: ScriptedControl, operator: OperatorHandle
) -> None:
    node.script = lambda _: running(ready=False, started="2026-11-30T12:00:00Z")
    control.default = None
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    told = await reason(admin, namespace, "ControlUnreachable")
    assert "cannot be reached" in told["message"]
    pods = dict(node.incarnations)
    node.script = lambda _: running(ready=True)
    await ready(admin, namespace)
    assert node.incarnations == pods


async def test_a_start_up_that_does_not_move_is_stalled(
    admin: Admin, namespace: str, node: TestNode, control: ScriptedControl, operator: OperatorHandle
) -> None:
    node.script = lambda _: running(ready=False)
    control.default = state(Phase.LOADING)
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    await reason(admin, namespace, "Loading")
    control.default = state(Phase.LOADING, idle_seconds=130)
    assert "Loading has not moved for 2 minutes" in (await reason(admin, namespace, "Stalled"))["message"]


async def test_ready_is_never_true_between_crashes(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    """A container that crashes, is ready for a moment, and crashes again, while every status is watched."""
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    crash = ended(1, "boom")
    node.script = lambda _: waiting(*BACK_OFF, restarts=2, last_end=crash)
    await reason(admin, namespace, "CrashLoop")
    for restarts in (3, 4, 5):
        between = running(ready=True, restarts=restarts, last_end=crash)
        node.script = lambda _, between=between: between  # type: ignore[misc]
        for _ in range(15):
            assert condition(await admin.get(INFERENCE, namespace, "smol"), "Ready")["status"] == "False"
            await asyncio.sleep(0.1)
        again = waiting(*BACK_OFF, restarts=restarts, last_end=crash)
        node.script = lambda _, again=again: again  # type: ignore[misc]
        await asyncio.sleep(0.3)
    told = await reason(admin, namespace, "CrashLoop")
    assert "boom" in told["message"]


async def test_a_single_crash_recovers(admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    lost = ended(5, said(FailureReason.WORKER_LOST, "rank 0 lost its worker", signal="SIGKILL"))
    node.script = lambda _: pod_status(state={"terminated": lost}, ready=False, restarts=0)
    told = await reason(admin, namespace, "WorkerLost")
    assert "SIGKILL" in told["message"]
    node.script = lambda _: running(ready=True, restarts=1, last_end=lost)
    await ready(admin, namespace)


async def test_people_are_told_by_events_once_per_transition(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    node.script = lambda _: waiting(*BACK_OFF, restarts=2, last_end=ended(1, "boom"))
    await reason(admin, namespace, "CrashLoop")

    async def events() -> list[tuple[str, str]] | None:
        query = {"fieldSelector": "involvedObject.kind=HpuInference"}
        found = await admin.list(EVENTS, namespace, **query)
        pairs = sorted((item["reason"], item["type"]) for item in found)
        return pairs if len(pairs) >= 2 else None

    assert await eventually("both events", events) == [("Answering", "Normal"), ("CrashLoop", "Warning")]
    await asyncio.sleep(2)
    assert len(await events() or []) == 2
