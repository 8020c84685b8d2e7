"""From an object to running groups and back: what is made, repaired, rolled, left alone and removed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from hpu_operator.domain import names
from hpu_operator.kube.kinds import INFERENCE, POD, RECORD, SERVICE, STATEFUL_SET
from hpu_operator.kube.port import Live
from hpu_operator.runtime.outputs.status_writer import PROGRESS_SECONDS
from tests.cluster.handle import ControlPlane
from tests.control_plane.admin import Admin
from tests.control_plane.conftest import OperatorHandle, inference
from tests.control_plane.looks import (
    children_of,
    condition,
    delete_and_see_it_made_again,
    eventually,
    pods_of,
    ready,
    reason,
)
from tests.control_plane.nodes import TestNode, running
from tests.control_plane.scripted_control import ScriptedControl


async def test_an_object_becomes_ready_with_its_children(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference(replicas=2))
    live = await ready(admin, namespace)
    assert live["status"]["readyReplicas"] == live["status"]["updatedReplicas"] == 2
    revision = live["status"]["revision"]
    sets = {item["metadata"]["name"] for item in await admin.list(STATEFUL_SET, namespace)}
    assert sets == {f"smol-{revision}-0-0", f"smol-{revision}-1-0"}
    services = {item["metadata"]["name"]: item for item in await admin.list(SERVICE, namespace)}
    assert services["smol"]["spec"]["clusterIP"] != "None"
    assert services["smol-ranks"]["spec"]["clusterIP"] == "None"
    assert await admin.get(RECORD, namespace, f"smol-{revision}") is not None
    for item in await admin.list(STATEFUL_SET, namespace):
        (owner,) = item["metadata"]["ownerReferences"]
        assert owner["uid"] == live["metadata"]["uid"]
        assert owner["controller"] is True
    assert "finalizers" not in live["metadata"]
    assert "annotations" not in live["metadata"]


async def test_readiness_comes_from_the_pods_and_warm_up_from_the_ranks(
    admin: Admin, namespace: str, node: TestNode, control: ScriptedControl, operator: OperatorHandle
) -> None:
    from hpu_engine.contract import Phase
    from tests.control_plane.scripted_control import state

    node.script = lambda _: running(ready=False)
    control.default = state(Phase.WARMING_UP, done=37, total=72)
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    warming = await reason(admin, namespace, "WarmingUp")
    assert "37/72" in warming["message"]
    live = await admin.get(INFERENCE, namespace, "smol")
    assert live is not None
    assert live["status"]["warmUp"] == "37/72"
    control.default = state(Phase.READY)
    node.script = lambda _: running(ready=True)
    await ready(admin, namespace)


async def test_a_deleted_child_is_made_again(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    live = await ready(admin, namespace)
    record = f"smol-{live['status']['revision']}"
    for kind, name in ((SERVICE, "smol"), (SERVICE, "smol-ranks"), (RECORD, record), (STATEFUL_SET, f"{record}-0-0")):
        await delete_and_see_it_made_again(admin, namespace, kind, name)
    await ready(admin, namespace)


async def test_an_edited_child_is_repaired_and_foreign_labels_are_left_alone(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    live = await ready(admin, namespace)
    name = f"smol-{live['status']['revision']}-0-0"
    await admin.merge(
        SERVICE, namespace, "smol", {"metadata": {"labels": {"team": "nlp"}}, "spec": {"selector": {"x": "y"}}}
    )
    container = {"name": "engine", "image": "evil:1"}
    await admin.merge(STATEFUL_SET, namespace, name, {"spec": {"template": {"spec": {"containers": [container]}}}})

    async def repaired() -> bool:
        group = await admin.get(STATEFUL_SET, namespace, name)
        service = await admin.get(SERVICE, namespace, "smol")
        assert group is not None
        assert service is not None
        image = group["spec"]["template"]["spec"]["containers"][0]["image"]
        return (image, service["metadata"]["labels"]["team"]) == ("engine:test", "nlp")

    await eventually("repaired", repaired)


async def test_a_lost_record_is_restored_from_what_runs_and_not_from_a_newer_default(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start(engine_image_cpu="engine:old")
    await admin.create(INFERENCE, namespace, inference())
    live = await ready(admin, namespace)
    before = await pods_of(admin, namespace)
    await operator.stop()
    record = f"smol-{live['status']['revision']}"
    await admin.delete(RECORD, namespace, record)
    await operator.start(engine_image_cpu="engine:new")

    async def restored() -> Live | None:
        return await admin.get(RECORD, namespace, record)

    found = await eventually("the record again", restored)
    assert found["data"]["template"]["spec"]["containers"][0]["image"] == "engine:old"
    await asyncio.sleep(1)
    assert await pods_of(admin, namespace) == before


async def test_a_newer_default_image_changes_no_running_pod(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start(engine_image_cpu="engine:old")
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    before = await pods_of(admin, namespace)
    await operator.stop()
    await operator.start(engine_image_cpu="engine:new")
    await admin.merge(INFERENCE, namespace, "smol", {"spec": {"replicas": 2}})
    await ready(admin, namespace, generation=2)
    images = {
        pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"] for pod in await admin.list(POD, namespace)
    }
    assert set(images.values()) == {"engine:old"}, "the second group is made from the record of its revision"
    assert before.items() <= (await pods_of(admin, namespace)).items()
    await admin.merge(INFERENCE, namespace, "smol", {"spec": {"drainSeconds": 5}})
    live = await ready(admin, namespace, generation=3)
    assert live["status"]["image"] == "engine:new"


async def test_scaling_restarts_no_pod(admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference(replicas=2))
    await ready(admin, namespace)
    before = await pods_of(admin, namespace)
    await admin.merge(INFERENCE, namespace, "smol", {"spec": {"replicas": 3}})
    await ready(admin, namespace, generation=2)
    assert before.items() <= (await pods_of(admin, namespace)).items()
    await admin.merge(INFERENCE, namespace, "smol", {"spec": {"replicas": 1}})

    async def one_left() -> bool:
        return len(await pods_of(admin, namespace)) == 1

    await eventually("one pod", one_left)
    assert set((await pods_of(admin, namespace)).items()) <= set(before.items())
    scale = await admin.request("GET", INFERENCE.path(namespace, "smol", "scale"))
    assert scale["status"]["selector"].startswith("serving.hpu.dev/name=smol")


async def test_a_roll_takes_one_group_at_a_time_through_its_endpoints(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    """Watches every pod all the while: never fewer than replicas - 1 ready and in service."""
    await operator.start()
    await admin.create(INFERENCE, namespace, inference(replicas=3))
    first = await ready(admin, namespace)
    fewest, labels_seen = 3, set()

    async def watch() -> None:
        nonlocal fewest
        while True:
            pods = await admin.list(POD, namespace)
            serving = 0
            for pod in pods:
                label = pod["metadata"]["labels"][names.IN_SERVICE_LABEL]
                labels_seen.add(label)
                ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
                serving += ready and label == "true" and "deletionTimestamp" not in pod["metadata"]
            fewest = min(fewest, serving)
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    await admin.merge(INFERENCE, namespace, "smol", {"spec": {"engine": {"maxNumSeqs": 8}}})
    second = await ready(admin, namespace, generation=2)
    watching.cancel()
    assert fewest == 2
    assert labels_seen == {"true", "false"}
    assert second["status"]["revision"] != first["status"]["revision"]
    sets = {item["metadata"]["name"] for item in await admin.list(STATEFUL_SET, namespace)}
    assert sets == {f"smol-{second['status']['revision']}-{index}-0" for index in range(3)}


async def test_ready_turns_false_at_once_when_the_spec_changes(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    node.script = lambda pod: None
    began = time.monotonic()
    await admin.merge(INFERENCE, namespace, "smol", {"spec": {"engine": {"maxNumSeqs": 8}}})

    async def told() -> bool:
        found = condition(await admin.get(INFERENCE, namespace, "smol"), "Ready")
        return (found["observedGeneration"], found["status"]) == (2, "False")

    await eventually("Ready False for generation 2", told)
    assert time.monotonic() - began < PROGRESS_SECONDS - 1, "it waited for its turn"


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
@pytest.mark.parametrize("up", [True, False], ids=["operator-up", "operator-down"])
async def test_deleting_the_object_leaves_nothing(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle, propagation: str, up: bool
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    if not up:
        await operator.stop()
    await admin.delete(INFERENCE, namespace, "smol", propagation=propagation)

    async def gone() -> bool:
        return await admin.get(INFERENCE, namespace, "smol") is None and not await children_of(admin, namespace)

    await eventually("nothing left", gone)
    if up:
        await asyncio.sleep(2)
        assert await gone(), "something was made again"


async def test_an_object_that_waits_for_its_children_to_go_is_not_called_ready(
    control_plane: ControlPlane, admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference(replicas=2))
    await ready(admin, namespace)
    node.ends_pods = False
    await admin.delete(INFERENCE, namespace, "smol", propagation="Foreground")
    told = await reason(admin, namespace, "Draining")
    assert told["status"] == "False"
    assert "the object is being deleted: its pods are leaving" in told["message"]
    live = await admin.get(INFERENCE, namespace, "smol")
    assert condition(live, "Available")["status"] == "False"
    shown = await asyncio.to_thread(control_plane.kubectl, "-n", namespace, "get", "hpui", "smol")
    assert shown.splitlines()[1].split()[:5] == ["smol", "False", "Draining", "2", "0"]
    node.ends_pods = True

    async def gone() -> bool:
        return await admin.get(INFERENCE, namespace, "smol") is None

    await eventually("the object gone", gone)


async def test_an_object_made_again_at_once_gets_children_of_its_own(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    await admin.delete(INFERENCE, namespace, "smol", propagation="Background")
    made = await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    for kind in (STATEFUL_SET, SERVICE):
        for item in await admin.list(kind, namespace):
            assert item["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]


@pytest.mark.parametrize("kind", [SERVICE, STATEFUL_SET], ids=lambda kind: kind.kind)
async def test_a_foreign_object_with_a_childs_name_is_not_adopted_and_is_reported(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle, kind: Any
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference("other"))
    live = await ready(admin, namespace, "other")
    foreign: dict[str, Any]
    if kind is SERVICE:
        ports = [{"port": 80}]
        foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "smol"}, "spec": {"ports": ports}}
    else:
        name = f"smol-{live['status']['revision']}-0-0"
        labels = {"app": "theirs"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "theirs"}]}}
        spec = {"selector": {"matchLabels": labels}, "serviceName": "x", "replicas": 0, "template": template}
        foreign = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": spec}
    made = await admin.create(kind, namespace, foreign)
    await admin.create(INFERENCE, namespace, inference())
    told = await reason(admin, namespace, "NameTaken")
    assert f"{kind.kind} {made['metadata']['name']}" in told["message"]
    assert (await reason(admin, namespace, "NameTaken", kind="Accepted"))["status"] == "False"
    now = await admin.get(kind, namespace, made["metadata"]["name"])
    assert now is not None
    assert now["spec"] == made["spec"]
    assert now["metadata"].get("labels") == made["metadata"].get("labels")
    assert "hpu-operator" not in {entry["manager"] for entry in now["metadata"]["managedFields"]}
    await admin.delete(kind, namespace, made["metadata"]["name"])
    await ready(admin, namespace)
