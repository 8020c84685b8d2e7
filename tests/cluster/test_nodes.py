"""Two real nodes: what runs on them, how they reach each other, how they break and come back."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import busybox, network, nodes
from tests.cluster.api import wait_for
from tests.cluster.errors import ComponentFailed
from tests.cluster.fleet import Fleet

Pod = dict[str, dict[str, Any]]
WEB = Path(__file__).parent / "web.yaml"


@pytest.fixture(scope="module")
def web(two_node_cluster: Fleet) -> Iterator[dict[str, str]]:
    """A web server on each node that answers with its node's name, and a Service before both: node -> pod."""
    two_node_cluster.kubectl("apply", "-f", str(WEB))
    two_node_cluster.kubectl("rollout", "status", "daemonset/web", "--timeout=180s", timeout_seconds=200)
    yield {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in pods(two_node_cluster)}
    two_node_cluster.kubectl("delete", "-f", str(WEB), "--wait=false")


def pods(fleet: Fleet, selector: str = "app=web") -> list[Pod]:
    items: list[Pod] = json.loads(fleet.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
    return items


def pod(fleet: Fleet, node: str) -> Pod:
    return next(one for one in pods(fleet) if one["spec"]["nodeName"] == node)


def fetch(fleet: Fleet, client: str, url: str) -> str:
    """GET from within a pod, until it succeeds: a route, a name or a rule may be some seconds late."""
    answers: list[str] = []

    def answered() -> bool:
        with contextlib.suppress(ComponentFailed):
            answers.append(fleet.kubectl("exec", client, "--", "timeout", "20", "wget", "-q", "-O", "-", url).strip())
        return bool(answers)

    wait_for(f"an answer of {url} to {client}", answered, timeout_seconds=90, interval_seconds=0.5)
    return answers[0]


def test_pods_on_different_nodes_reach_each_other(two_node_cluster: Fleet, web: dict[str, str]) -> None:
    assert sorted(web) == ["node-0", "node-1"]
    for here, there in (("node-0", "node-1"), ("node-1", "node-0")):
        address = pod(two_node_cluster, there)["status"]["podIP"]
        assert fetch(two_node_cluster, web[here], f"http://{address}:8080") == there


def test_service_is_reached_by_name_and_spreads_over_both_nodes(two_node_cluster: Fleet, web: dict[str, str]) -> None:
    answers: set[str] = set()

    def both() -> bool:
        answers.add(fetch(two_node_cluster, web["node-0"], "http://web.default.svc.cluster.local"))
        return answers == {"node-0", "node-1"}

    # Each connection goes to one of them by chance.
    wait_for("an answer of each node", both, timeout_seconds=90)


def test_pods_reach_the_api_server_by_its_service(two_node_cluster: Fleet, web: dict[str, str]) -> None:
    """TCP from the pod; and with what every pod is given, from its node's network: the name, TLS and its account."""
    given = "/var/run/secrets/kubernetes.io/serviceaccount"
    connect = "timeout 20 nc -w 10 kubernetes.default.svc.cluster.local 443 </dev/null && echo reached"
    assert two_node_cluster.kubectl("exec", web["node-1"], "--", "sh", "-c", connect).strip() == "reached"
    token, authority = (
        two_node_cluster.kubectl("exec", web["node-1"], "--", "cat", f"{given}/{name}") for name in ("token", "ca.crt")
    )
    ask = """
import json, ssl, sys, urllib.request
token, authority = sys.argv[1:]
request = urllib.request.Request(
    "https://kubernetes.default.svc.cluster.local/apis/authentication.k8s.io/v1/selfsubjectreviews",
    data=json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}).encode(),
    headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
)
context = ssl.create_default_context(cadata=authority)
print(json.load(urllib.request.urlopen(request, context=context, timeout=60))["status"]["userInfo"]["username"])
"""
    argv = [sys.executable, "-I", "-c", ask, token.strip(), authority]
    answer = two_node_cluster.run_in_cluster(argv, node="node-1", timeout_seconds=120)
    assert answer.stdout.strip() == "system:serviceaccount:default:default", answer.stderr


def test_load_generator_in_the_cluster_uses_service_names(two_node_cluster: Fleet, web: dict[str, str]) -> None:
    said: list[str] = []

    def answered() -> bool:
        argv = ["busybox", "timeout", "20", "busybox", "wget", "-q", "-O", "-", "http://web"]
        said.append(two_node_cluster.run_in_cluster(argv).stdout.strip())
        return bool(said[-1])

    wait_for("an answer of the Service", answered, timeout_seconds=90)
    assert said[-1] in web


def test_nothing_leads_out_of_the_clusters_networks(two_node_cluster: Fleet) -> None:
    room = network.find_room(two_node_cluster.supervisor, nodes.ROOM)
    links = {line.split(": ")[1].partition("@")[0] for line in room.run(["ip", "-o", "link"]).splitlines()}
    assert links == {"lo", "br0", "port0", "port1"}
    assert "default" not in room.run(["ip", "route"])


def test_api_server_is_reached_from_the_host_by_the_relay_alone(two_node_cluster: Fleet) -> None:
    assert two_node_cluster.api.exists("/readyz")
    two_node_cluster.kill("relay")
    assert not two_node_cluster.api.exists("/readyz")
    two_node_cluster.restart("relay")
    assert two_node_cluster.api.exists("/readyz")


def test_logs_and_exec_go_through_the_kubelet(two_node_cluster: Fleet, web: dict[str, str]) -> None:
    assert two_node_cluster.kubectl("logs", web["node-1"]).strip() == "serving on node-1"
    assert two_node_cluster.kubectl("exec", web["node-0"], "--", "cat", "/tmp/w/index.html").strip() == "node-0"


def test_kubelet_refuses_whoever_is_not_the_api_server(two_node_cluster: Fleet) -> None:
    script = """
import ssl, sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], context=ssl._create_unverified_context(), timeout=60)
except urllib.error.HTTPError as error:
    print(error.code)
"""
    url = f"https://{network.node_address(0)}:10250/pods"
    answer = two_node_cluster.run_in_cluster([sys.executable, "-I", "-c", script, url])
    assert answer.stdout.strip() == "401", answer.stderr


def test_restarted_kubelet_leaves_its_containers_alone(two_node_cluster: Fleet, web: dict[str, str]) -> None:
    before = pod(two_node_cluster, "node-0")["status"]
    two_node_cluster.restart_kubelet("node-0")
    assert fetch(two_node_cluster, web["node-1"], f"http://{before['podIP']}:8080") == "node-0"
    assert pod(two_node_cluster, "node-0")["status"]["startTime"] == before["startTime"]


def test_killed_containerd_leaves_its_containers_alone(two_node_cluster: Fleet, web: dict[str, str]) -> None:
    address = pod(two_node_cluster, "node-1")["status"]["podIP"]
    two_node_cluster.kill("containerd", "node-1")
    try:
        assert fetch(two_node_cluster, web["node-0"], f"http://{address}:8080") == "node-1"
    finally:
        # The cluster is everybody's: a failure here must not become one everywhere.
        two_node_cluster.restart("containerd", "node-1")
    assert fetch(two_node_cluster, web["node-1"], f"http://{address}:8080") == "node-1"


def test_frozen_kubelet_renews_no_lease_until_it_is_thawed(two_node_cluster: Fleet) -> None:
    def renewed() -> str:
        return two_node_cluster.kubectl(
            "-n", "kube-node-lease", "get", "lease", "node-1", "-o", "jsonpath={.spec.renewTime}"
        )

    two_node_cluster.freeze("node-1")
    try:
        time.sleep(2)  # a renewal may have been on its way
        frozen = renewed()
        # A kubelet renews every 10 s.
        time.sleep(12)
        assert renewed() == frozen
    finally:
        two_node_cluster.thaw("node-1")
    wait_for("the lease's renewal", lambda: renewed() != frozen, timeout_seconds=90)


def test_partition_separates_a_node_and_healing_joins_it(two_node_cluster: Fleet, web: dict[str, str]) -> None:
    address = pod(two_node_cluster, "node-1")["status"]["podIP"]

    def reached(seconds: int = 20) -> bool:
        argv = ["busybox", "timeout", str(seconds), "busybox", "wget", "-q", "-O", "-", f"http://{address}:8080"]
        return two_node_cluster.run_in_cluster(argv).stdout.strip() == "node-1"

    wait_for("the node", reached, timeout_seconds=90)
    two_node_cluster.partition("node-1")
    try:
        assert not reached(seconds=5)
    finally:
        two_node_cluster.heal("node-1")
    wait_for("the healed node", reached, timeout_seconds=90)


def test_imported_image_runs_on_every_node_without_a_registry(two_node_cluster: Fleet, tmp_path: Path) -> None:
    image = f"hpu.local/imported:{time.monotonic_ns()}"
    (tmp_path / "image.tar").write_bytes(busybox.archive(image))
    two_node_cluster.import_image(tmp_path / "image.tar")
    for node in two_node_cluster.nodes:
        override = json.dumps({"spec": {"nodeName": node, "terminationGracePeriodSeconds": 0}})
        pod_name = f"imported-{node}"
        flags = ("--image-pull-policy=Never", "--restart=Never", f"--overrides={override}")
        two_node_cluster.kubectl("run", pod_name, f"--image={image}", *flags, "--command", "--", "true")
        two_node_cluster.kubectl("wait", f"pod/{pod_name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=90s")
        two_node_cluster.kubectl("delete", "pod", pod_name)


def test_plug_pulled_ends_every_process_of_a_node_and_boot_brings_its_pods_back(
    two_node_cluster: Fleet, web: dict[str, str]
) -> None:
    room = network.find_room(two_node_cluster.supervisor, "node-1")
    inside = room.run(["sh", "-c", "cat /proc/[0-9]*/comm"])
    assert {"kubelet", "containerd", "kube-proxy", "httpd"} <= set(inside.split())
    two_node_cluster.kill_node("node-1")
    assert not any(two_node_cluster.components()[name] for name in two_node_cluster.node("node-1").components)
    two_node_cluster.boot_node("node-1")

    def serves_again() -> bool:
        status = pod(two_node_cluster, "node-1")["status"]
        restarts = [one["restartCount"] for one in status["containerStatuses"]]
        return restarts == [1] and {"type": "Ready", "status": "True"} in [
            {key: condition[key] for key in ("type", "status")} for condition in status["conditions"]
        ]

    wait_for("the pod on the booted node", serves_again, timeout_seconds=120)
    address = pod(two_node_cluster, "node-1")["status"]["podIP"]
    assert fetch(two_node_cluster, web["node-0"], f"http://{address}:8080") == "node-1"
