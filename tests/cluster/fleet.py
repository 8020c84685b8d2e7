"""A running cluster with nodes as a test holds it: everything of ControlPlane, and nodes to freeze, kill and fill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster import cgroups, network, nodes, processes
from tests.cluster.api import wait_for
from tests.cluster.errors import ComponentFailed, NotRunning
from tests.cluster.handle import ControlPlane
from tests.cluster.node import Node, import_image, join, open_node, wait_until_runtime_serves
from tests.cluster.processes import MARK

# Names resolve as in a pod; the host's own /etc/resolv.conf stays as it is.
_RUN = 'mount --bind "$1" /etc/resolv.conf; shift; exec "$@"'


class Fleet(ControlPlane):
    """A control plane and its nodes, each named node-I."""

    @property
    def nodes(self) -> list[str]:
        return self.cluster.node_names()

    def node(self, name: str) -> Node:
        """A node with its namespaces, folders and components."""
        if name not in self.nodes:
            raise NotRunning(f"{self.cluster.name} has no node {name}", f"its nodes are: {', '.join(self.nodes)}")
        return Node(self.cluster, self.nodes.index(name), self.supervisor)

    def ready(self, node: str) -> bool:
        """Whether the API server calls the node Ready now."""
        return nodes.is_ready(self.api, node)

    def wait_until_ready(self, node: str, timeout_seconds: float = 180.0) -> float:
        return nodes.wait_until_ready(self.node(node), timeout_seconds)

    def freeze(self, node: str) -> None:
        """Stop the kubelet where it is (SIGSTOP); containers run on, and the node turns Unknown after 40 s."""
        self.supervisor.signal(self.node(node).component("kubelet"), signal.SIGSTOP)

    def thaw(self, node: str) -> None:
        """Let a frozen kubelet go on."""
        kubelet = self.supervisor.process(self.node(node).component("kubelet"))
        kubelet.send(signal.SIGCONT)
        # nsenter(1), which waits for the kubelet, has stopped with it.
        if parent := processes.parent(kubelet.pid):
            parent.send(signal.SIGCONT)

    def partition(self, node: str) -> None:
        """Unplug the node's cable: its pods run on, nothing reaches it and it reaches nothing."""
        port = network.port_of(self.node(node).index)
        network.find_room(self.supervisor, nodes.ROOM).run(["ip", "link", "set", port, "down"])

    def heal(self, node: str) -> None:
        """Plug the cable in again."""
        index = self.node(node).index
        room = network.find_room(self.supervisor, nodes.ROOM)
        room.run(["ip", "link", "set", network.port_of(index), "up"])

    def kill(self, component: str, node: str | None = None) -> None:
        """kill -9 of a component: of the control plane, or containerd, proxy or kubelet of a node."""
        self.supervisor.kill(self.node(node).component(component) if node else component)

    def restart(self, component: str, node: str | None = None) -> None:
        """Start a component again with its arguments (after a kill -9 if it still runs); waits for API or node."""
        if node is None:
            super().restart(component)
            return
        self.supervisor.restart(self.node(node).component(component))
        wait_until_runtime_serves(self.node(node))
        self.wait_until_ready(node)
        wait_for(f"the pods of {node} in its kubelet", lambda: self._kubelet_knows_its_pods(node), timeout_seconds=120)

    def _kubelet_knows_its_pods(self, node: str) -> bool:
        """A node stays Ready over a kubelet's restart, while `exec` and `logs` find no pod for some seconds more."""
        try:
            known = json.loads(self.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/pods"))["items"]
        except ComponentFailed:
            return False
        selector = f"spec.nodeName={node}"
        bound = json.loads(self.kubectl("get", "pods", "-A", "--field-selector", selector, "-o", "json"))["items"]
        return {item["metadata"]["uid"] for item in bound} <= {item["metadata"]["uid"] for item in known or []}

    def restart_kubelet(self, node: str) -> None:
        """kill -9 of a kubelet and a new one; returns when the node is Ready. Its containers run on."""
        self.restart("kubelet", node)

    def kill_node(self, node: str) -> None:
        """Pull the plug: every process of the node ends at once, containers included; its disk stays."""
        self.supervisor.kill(node)
        components = self.node(node).components
        wait_for(
            f"the end of {node}",
            lambda: not any(self.supervisor.alive(component) for component in components),
            timeout_seconds=60,
        )

    def boot_node(self, node: str) -> None:
        """Start a killed node again from its disk; returns when it is Ready."""
        if self.supervisor.alive(node):
            raise NotRunning(f"{node} runs already", "kill_node first")
        cgroups.remove(self.cluster.uid, node=node)
        room = network.find_room(self.supervisor, nodes.ROOM)
        booted = open_node(self.cluster, self.node(node).index, self.supervisor, room)
        join(booted)
        nodes.wait_until_ready(booted)
        nodes.offer_cards([booted])

    def import_image(self, archive: Path) -> None:
        """Import an image archive into every node at once."""
        with ThreadPoolExecutor(max_workers=len(self.nodes)) as pool:
            list(pool.map(lambda node: import_image(self.node(node), archive), self.nodes))

    def run_in_cluster(
        self, argv: Sequence[str], *, node: str = "node-0", timeout_seconds: float | None = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of this machine in a node's network, where Services and their names are reachable.

        It sees the host's files, not the node's; it ends with the cluster. The result is not checked.
        """
        prefix, environment = self.command_in_cluster(node)
        return subprocess.run(
            [*prefix, *argv], env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )

    def command_in_cluster(self, node: str = "node-0") -> tuple[list[str], dict[str, str]]:
        """The prefix of a command and its environment, for callers that start processes themselves."""
        resolver = self.cluster.folder / "resolv.conf"
        search = "default.svc.cluster.local svc.cluster.local cluster.local"
        resolver.write_text(f"nameserver {network.CONTROL_PLANE_ADDRESS}\nsearch {search}\noptions ndots:5\n")
        room = self.node(node).room
        prefix = [
            "nsenter",
            f"--net={room.net}",
            "--",
            "unshare",
            "--mount",
            "--",
            "sh",
            "-ec",
            _RUN,
            "sh",
            str(resolver),
        ]
        own = self.cluster.kubectl_environment() | {"KUBECONFIG": str(self.inside_kubeconfig())}
        environment = {**processes.without_proxies(os.environ), MARK: str(self.cluster.folder), **own}
        return prefix, environment

    def inside_kubeconfig(self) -> Path:
        """The administrator's kubeconfig with the API server's address inside the cluster's networks."""
        path = self.cluster.folder / "inside.kubeconfig"
        if not path.exists():
            inside = f"https://{network.CONTROL_PLANE_ADDRESS}:6443"
            path.touch(mode=0o600)
            path.write_text(self.kubeconfig.read_text().replace(self.url, inside))
        return path
