"""Says what this machine lacks for a cluster, all of it at once, before anything is made.

Kernel features are tried, not looked up: in a network namespace that goes with the attempt.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import machine
from tests.cluster import cgroups
from tests.cluster.errors import MissingRequirement
from tests.machine import Missing

# What a node needs of the kernel: what it is called, and a command that needs just that.
_NETWORK_FEATURES = {
    "virtual Ethernet pairs (CONFIG_VETH)": "ip link add probe0 type veth peer name probe1",
    "bridges (CONFIG_BRIDGE)": "ip link add probe0 type bridge",
    "nftables (CONFIG_NF_TABLES, as kube-proxy uses it)": (
        "nft add table ip a && nft 'add chain ip a b' && nft 'add rule ip a b numgen random mod 2 vmap { 0 : drop }' &&"
        " nft 'add chain ip a c { type nat hook postrouting priority 100; }' && nft 'add rule ip a c masquerade'"
    ),
}


def check(*, nodes: bool) -> None:
    """Raise MissingRequirement for a machine that cannot run a cluster of this size."""
    missing = machine.missing(node=nodes)
    if nodes and not missing:
        missing = kernel_features()
    if missing:
        raise MissingRequirement("; ".join(item.what for item in missing), "; ".join(item.remedy for item in missing))


def kernel_features(cgroup_mount: Path = cgroups.MOUNT) -> list[Missing]:
    """What the kernel lacks for a node. Needs root."""
    if not works("true"):
        return [Missing("network, mount and PID namespaces (unshare is refused)", "run as root, with CAP_SYS_ADMIN")]
    found = [
        Missing(f"the kernel has no {feature}", "load the module on the host, or use a kernel that has it")
        for feature, command in _NETWORK_FEATURES.items()
        if not works(command)
    ]
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        # By it the process is found that nsenter(1) has started inside.
        found.append(
            Missing("the kernel has no lists of children (CONFIG_PROC_CHILDREN)", "use a kernel that has them")
        )
    if controllers := cgroups.missing_controllers(cgroup_mount):
        names = ", ".join(controllers)
        found.append(Missing(f"no cgroup controllers {names} in {cgroup_mount}", "mount them, or enable them at boot"))
    return found


def works(command: str) -> bool:
    """Whether a shell command succeeds in namespaces of its own."""
    argv = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", command]
    try:
        return subprocess.run(argv, capture_output=True, check=False, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        raise MissingRequirement(
            f"no answer within 60 s: {' '.join(argv)[:200]}", "try again when the machine is less busy"
        ) from None
