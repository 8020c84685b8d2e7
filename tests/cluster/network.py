"""The networks of a cluster with nodes: addresses, namespaces, and the links and routes inside them.

    control plane's namespace                      node-I's namespace
    br0 10.129.0.1/24  ==  veth pair  ==           eth0 10.129.0.(10+I)/24
    route 10.130.I.0/24 via each node              pods0 10.130.I.1/24 (made by the CNI plugin), default via 10.129.0.1

Nothing of it is in the host's namespace, so all clusters use the same addresses. A namespace has no name in /run/netns:
a process holds it, and the kernel removes links, routes and rules when the last process in it has gone.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.errors import ComponentFailed, NotRunning
from tests.cluster.processes import Supervisor

CONTROL_PLANE_ADDRESS = "10.129.0.1"
POD_RANGE = "10.130.0.0/16"
SERVICE_RANGE = "10.131.0.0/16"
FIRST_SERVICE_ADDRESS = "10.131.0.1"

# PID 1 of the new namespaces: it ignores SIGCHLD, so orphans that end in them leave no zombies.
_HOLD = (
    *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("env", "--ignore-signal=CHLD", "sleep", "infinity"),
)


def node_address(index: int) -> str:
    return f"10.129.0.{10 + index}"


def pod_subnet(index: int) -> str:
    return f"10.130.{index}.0/24"


@dataclass(frozen=True)
class Room:
    """Network, mount and PID namespaces that end with one process. `name` is the component that holds them."""

    name: str
    pid: int

    @property
    def net(self) -> Path:
        return Path(f"/proc/{self.pid}/ns/net")

    @property
    def enter(self) -> tuple[str, ...]:
        """A command prefix. nsenter(1), not `ip netns exec`: that mounts another /sys, without the cgroups."""
        return ("nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--")

    def run(self, argv: Sequence[str], *, stdin: str | None = None) -> str:
        """Run a short command inside; its output. ComponentFailed with its complaint."""
        done = subprocess.run([*self.enter, *argv], input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ComponentFailed(
                f"{' '.join(argv)[:200]}: exit {done.returncode} in {self.name}: {done.stderr.strip()[-600:]}",
                "python -m tests.cluster down, then up again",
            )
        return done.stdout


def open_room(supervisor: Supervisor, name: str, timeout_seconds: float = 60.0) -> Room:
    """Make the namespaces and the process that holds them. ComponentFailed."""
    supervisor.start(name, _HOLD, entered=True)
    deadline = time.monotonic() + timeout_seconds
    # unshare(1) has mounted the new /proc when its child has become sleep(1).
    while not _sleeps(supervisor.process(name).pid):
        if time.monotonic() > deadline or not supervisor.alive(name):
            raise ComponentFailed(
                f"no namespaces for {name}\n{supervisor.tail(name)}", "does this user have CAP_SYS_ADMIN?"
            )
        time.sleep(0.01)
    room = find_room(supervisor, name)
    room.run(["sh", "-ec", "mount --make-rshared /; ip link set lo up; echo 1 >/proc/sys/net/ipv4/ip_forward"])
    return room


def _sleeps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
    except OSError:
        return False


def find_room(supervisor: Supervisor, name: str) -> Room:
    """The namespaces that a component holds. NotRunning: its pid may be somebody else's by now."""
    process = supervisor.process(name)
    if not process.alive():
        raise NotRunning(f"{name} does not run: its namespaces are gone", f"see {supervisor.log(name)}")
    return Room(name, process.pid)


def build_bridge(control_plane: Room) -> None:
    control_plane.run(
        [
            "sh",
            "-ec",
            f"ip link add br0 type bridge; ip addr add {CONTROL_PLANE_ADDRESS}/24 dev br0; ip link set br0 up",
        ]
    )


def connect(control_plane: Room, node: Room, index: int, count: int) -> None:
    """Join a node to the bridge, and route every other node's pods to it. `count` nodes will exist."""
    port = port_of(index)
    # A node that boots again: the kernel may not have removed its old cable yet.
    control_plane.run(["sh", "-c", f"ip link del {port} 2>/dev/null || true"])
    # Made inside the control plane's namespace with the other end in the node's: the host never sees either.
    # Not with `run`: in the control plane's PID namespace the node's pid means nothing.
    cable = ("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
    done = subprocess.run(
        ["nsenter", f"--net={control_plane.net}", "--", *cable], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ComponentFailed(
            f"{' '.join(cable)}: exit {done.returncode}: {done.stderr.strip()}",
            "python -m tests.cluster down, then up again",
        )
    route = f"ip route replace {pod_subnet(index)} via {node_address(index)}"
    control_plane.run(["sh", "-ec", f"ip link set {port} master br0 up; {route}"])
    others = "; ".join(
        f"ip route add {pod_subnet(other)} via {node_address(other)}" for other in range(count) if other != index
    )
    node.run(
        [
            *("sh", "-ec"),
            f"ip addr add {node_address(index)}/24 dev eth0; ip link set eth0 up; "
            f"ip route add default via {CONTROL_PLANE_ADDRESS}; {others}",
        ]
    )


def port_of(index: int) -> str:
    """The name of a node's end of the veth pair on the control plane's bridge."""
    return f"port{index}"
