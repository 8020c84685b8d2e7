"""A whole cluster with nodes: in which order namespaces, control plane, relay, DNS and nodes appear.

The nodes' containerds come up while the API server does; kubelets and kube-proxies start when it answers.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster import cgroups, control_plane, dns, network, processes, relay
from tests.cluster.api import Api, ApiError, wait_for
from tests.cluster.build import Say
from tests.cluster.node import Node, join, open_node
from tests.cluster.processes import Supervisor
from tests.cluster.state import Cluster

ROOM = "control-plane"
RELAY = "relay"


def start(cluster: Cluster, supervisor: Supervisor, listener: Say) -> None:
    """Bring everything up; returns when every node is Ready and DNS answers. ClusterError names what is in the way."""
    if cgroups.unified():
        listener("cgroup version 2: handled, but the project's own runs were on version 1")
    room = network.open_room(supervisor, ROOM)
    network.build_bridge(room)
    site = control_plane.in_namespaces(room.enter)
    control_plane.write_credentials(cluster, site)
    with ThreadPoolExecutor(max_workers=4) as pool:
        opened = [pool.submit(open_node, cluster, index, supervisor, room) for index in range(cluster.nodes)]
        try:
            control_plane.start(cluster, site, supervisor, before_ready=lambda: start_relay(cluster, supervisor, site))
            listener(f"cluster {cluster.name}: control plane answers, waiting for {cluster.nodes} nodes")
            dns.start(cluster, supervisor, room)
            nodes = [node.result() for node in opened]
        except BaseException:
            # The threads wait for processes: without those they end now, not when their time is up.
            processes.end_all(cluster.folder)
            raise
    for node in nodes:
        join(node)
    for node in nodes:
        wait_until_ready(node)
    dns.wait_until_ready(supervisor, room)
    offer_cards(nodes)


def start_relay(cluster: Cluster, supervisor: Supervisor, site: control_plane.Site) -> None:
    """The API server on the host's loopback, for programs outside of the cluster's networks."""
    namespace = network.find_room(supervisor, ROOM).net
    program = [sys.executable, "-I", "-S", str(Path(relay.__file__))]
    supervisor.start(RELAY, [*program, str(cluster.api_port), site.address, str(site.api_port), str(namespace)])


def offer_cards(nodes: list[Node]) -> None:
    """Start the device plugins, if cards were asked for."""
    if any(node.cluster.cards for node in nodes):
        from tests.cluster import cards

        for node in nodes:
            cards.start_device_plugin(node, node.cluster.cards)


def wait_until_ready(node: Node, timeout_seconds: float = 180.0) -> float:
    """Wait until the API server calls a node Ready; seconds it took."""
    api = Api(node.cluster.kubeconfig)
    return wait_for(
        f"{node.name} Ready",
        lambda: is_ready(api, node.name),
        timeout_seconds=timeout_seconds,
        check=lambda: control_plane.check_alive(node.supervisor, node.components),
        interval_seconds=0.3,
    )


def is_ready(api: Api, name: str) -> bool:
    """What the API server says now about a node's condition Ready."""
    try:
        node = api.request("GET", f"/api/v1/nodes/{name}")
    except (ApiError, OSError):
        return False
    status = node.get("status")
    conditions = status.get("conditions", []) if isinstance(status, dict) else []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
