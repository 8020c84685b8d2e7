"""What is under the pods: a card that breaks, a node whose kubelet has stopped."""

from __future__ import annotations

from typing import Any

from hpu_operator.api.reasons import Reason
from tests.cluster import cards
from tests.cluster.api import wait_for
from tests.recordings import pods
from tests.recordings.recorder import Recorder, Seen


def environment(recorder: Recorder, name: str) -> dict[str, str]:
    lines = recorder.fleet.kubectl("logs", "--namespace", recorder.namespace, name).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def health(pod: Seen) -> dict[str, str]:
    """Card -> health, from `allocatedResourcesStatus`."""
    resources: list[dict[str, Any]] = pod.container.get("allocatedResourcesStatus", [])
    entries = [entry for one in resources if one["name"] == cards.RESOURCE for entry in one.get("resources", [])]
    return {entry["resourceID"]: entry["health"] for entry in entries}


def test_a_broken_card_is_named_in_the_pod_that_holds_it_and_leaves_the_node(recorder: Recorder) -> None:
    recorder.wait("card-lost", lambda pod: pod.condition("Ready").get("status") == "True")
    told = environment(recorder, "card-lost")
    held = told["HL_VISIBLE_DEVICES_UUID"].split(",")
    assert len(held) == pods.CARDS_HELD
    assert told["HABANA_VISIBLE_DEVICES"] == ",".join(name.removeprefix("gaudi-") for name in held)
    assert len(told["HABANA_VISIBLE_MODULES"].split(",")) == pods.CARDS_HELD

    pod = recorder.wait("card-lost", lambda pod: len(health(pod)) == pods.CARDS_HELD)
    assert health(pod) == dict.fromkeys(held, "Healthy")
    assert pod.container["allocatedResources"] == {cards.RESOURCE: str(pods.CARDS_HELD)}

    node = recorder.fleet.node(pods.HERE)
    before = cards.allocatable(recorder.fleet.api, pods.HERE)
    cards.set_unhealthy(node, [held[0]])
    try:
        pod = recorder.wait("card-lost", lambda pod: health(pod).get(held[0]) == "Unhealthy")
        assert health(pod)[held[1]] == "Healthy"
        # The kubelet lets the pod be: to act on it is somebody else's business.
        assert pod.condition("Ready")["status"] == "True"
        assert pod.container["restartCount"] == 0
        wait_for(
            "one card less on the node",
            lambda: cards.allocatable(recorder.fleet.api, pods.HERE) == before - 1,
            timeout_seconds=20,
        )
    finally:
        cards.set_unhealthy(node, [])
    recorder.wait("card-lost", lambda pod: health(pod) == dict.fromkeys(held, "Healthy"))


def test_a_pod_on_a_frozen_node_turns_unready_from_outside_and_is_evicted(recorder: Recorder) -> None:
    # 40 s without a heartbeat, then the node controller speaks for the kubelet.
    pod = recorder.wait("frozen", lambda pod: pod.condition("Ready").get("status") == "False", timeout_seconds=90)
    assert pod.container["ready"] is True
    assert "running" in pod.container["state"]
    if "deletionTimestamp" not in pod.live["metadata"]:
        diagnosis = pod.diagnosis()
        assert diagnosis is not None
        assert diagnosis.reason is Reason.NODE_LOST
    node: Any = recorder.fleet.api.request("GET", f"/api/v1/nodes/{pods.FROZEN}")
    ready = next(one for one in node["status"]["conditions"] if one["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("Unknown", "NodeStatusUnknown")
    assert {"node.kubernetes.io/unreachable"} <= {taint["key"] for taint in node["spec"]["taints"]}

    pod = recorder.wait("frozen", lambda pod: bool(pod.condition("DisruptionTarget")), timeout_seconds=60)
    assert pod.condition("DisruptionTarget")["reason"] == "DeletionByTaintManager"
    assert pod.live["metadata"]["deletionTimestamp"]
    assert pod.status["phase"] == "Running"
    diagnosis = pod.diagnosis()
    assert diagnosis is not None
    assert diagnosis.reason is Reason.NODE_LOST
