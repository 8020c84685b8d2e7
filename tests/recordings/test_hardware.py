"""What is under the pods: a card that breaks, a node whose kubelet has stopped."""

from __future__ import annotations

from typing import Any

from hpu_operator.api.reasons import Reason
from tests.cluster import cards
from tests.cluster.api import wait_for
from tests.recordings import pods
from tests.recordings.recorder import Recorder, Seen

CARD_VARIABLES = {"HL_VISIBLE_DEVICES_UUID", "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"}


def card_variables(recorder: Recorder, name: str) -> dict[str, str]:
    """Those that the container has written into its log, once all of them are there."""
    found: dict[str, str] = {}

    def logged() -> bool:
        for line in recorder.fleet.kubectl("logs", "--namespace", recorder.namespace, name).splitlines():
            variable, _, value = line.partition("=")
            if variable in CARD_VARIABLES:
                found[variable] = value
        return found.keys() == CARD_VARIABLES

    wait_for("the environment in the log", logged, timeout_seconds=60)
    return found


def health(pod: Seen) -> dict[str, str]:
    """Card -> health, from `allocatedResourcesStatus`."""
    resources: list[dict[str, Any]] = pod.container.get("allocatedResourcesStatus", [])
    entries = [entry for one in resources if one["name"] == cards.RESOURCE for entry in one.get("resources", [])]
    return {entry["resourceID"]: entry["health"] for entry in entries}


def test_a_broken_card_is_named_in_the_pod_that_holds_it_and_leaves_the_node(recorder: Recorder) -> None:
    recorder.wait("card-lost", lambda pod: pod.condition("Ready").get("status") == "True")
    told = card_variables(recorder, "card-lost")
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
            timeout_seconds=60,
        )
    finally:
        cards.set_unhealthy(node, [])
    recorder.wait("card-lost", lambda pod: health(pod) == dict.fromkeys(held, "Healthy"))


def test_a_pod_on_a_frozen_node_turns_unready_from_outside_and_is_evicted(recorder: Recorder) -> None:
    # 40 s without a heartbeat, then the node controller speaks for the kubelet.
    pod = recorder.wait("frozen", lambda pod: pod.condition("Ready").get("status") == "False", timeout_seconds=150)
    assert pod.container["ready"] is True
    assert "running" in pod.container["state"]
    if "deletionTimestamp" not in pod.live["metadata"]:
        assert pod.reason is Reason.NODE_LOST

    def frozen_node() -> Any:
        return recorder.fleet.api.request("GET", f"/api/v1/nodes/{pods.FROZEN}")

    ready = next(one for one in frozen_node()["status"]["conditions"] if one["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("Unknown", "NodeStatusUnknown")
    wait_for(
        "the taint of the node",
        lambda: "node.kubernetes.io/unreachable" in {taint["key"] for taint in frozen_node()["spec"].get("taints", [])},
        timeout_seconds=60,
    )

    # The condition says why, before the deletion that it is about.
    pod = recorder.wait(
        "frozen",
        lambda pod: bool(pod.condition("DisruptionTarget")) and "deletionTimestamp" in pod.live["metadata"],
    )
    assert pod.condition("DisruptionTarget")["reason"] == "DeletionByTaintManager"
    assert pod.status["phase"] == "Running"
    assert pod.reason is Reason.NODE_LOST
