"""What a cluster could leave on a machine, as it is now: to compare before `up`, while it runs, and after `down`.

Links, routes, rules, firewall, mounts and settings are compared whole. Processes, namespaces and cgroups of a shared
machine come and go for other reasons (other clusters, for one), so those are the ones of one state folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cgroups, processes, state

_NAMESPACES = ("net", "mnt", "pid")
# Settings of the whole machine that a kubelet or kube-proxy would change.
_SETTINGS = (
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "net/ipv4/ip_forward",
    "net/netfilter/nf_conntrack_max",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)
# Where the programs of a node put something by themselves, if nothing keeps them from it.
_PLACES = (
    "/etc/cni",
    "/etc/containerd",
    "/opt",
    "/opt/containerd",
    "/run",
    "/var/lib",
    "/var/lib/cni",
    "/var/lib/kubelet",
)
# What counts down by itself: how long an address from DHCP or a route to a neighbour is good for.
_COUNTDOWN = re.compile(r"\b(valid_lft|preferred_lft|expires) \S+")


@dataclass(frozen=True)
class HostNetwork:
    """The host's own network namespace."""

    links: str
    addresses: str
    routes: str
    rules: str
    firewall: str
    named_namespaces: tuple[str, ...]


@dataclass(frozen=True)
class Traces:
    """All of it; equal before and after."""

    network: HostNetwork
    mounts: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    cgroups: tuple[str, ...]
    processes: tuple[int, ...]
    files: tuple[str, ...]
    places: tuple[str, ...]


def take(folder: Path) -> Traces:
    """The traces now. `folder` is the state folder of the cluster in question, there or not."""
    return Traces(
        network=_network(),
        mounts=tuple(sorted(Path("/proc/mounts").read_text().splitlines())),
        settings=tuple((name, path.read_text()) for name in _SETTINGS if (path := Path("/proc/sys", name)).exists()),
        cgroups=tuple(str(path) for path in cgroups.folders(state.uid_of(folder))),
        processes=tuple(sorted(process.pid for process in members(folder))),
        files=tuple(str(path) for path in sorted(folder.parent.glob("*"))),
        places=tuple(str(path) for place in _PLACES for path in sorted(Path(place).glob("*"))),
    )


def members(folder: Path) -> list[processes.Process]:
    """Every process of a cluster: the marked ones, and whatever lives in their PID namespaces."""
    own = _namespace(os.getpid(), "pid")
    marked = processes.marked(folder)
    rooms = {_namespace(process.pid, "pid") for process in marked} - {own, None}
    inside = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = {process.pid: process for process in marked}
    for pid in inside:
        if _namespace(pid, "pid") in rooms and (process := processes.identify(pid)):
            found[pid] = process
    return list(found.values())


def namespaces(of: list[processes.Process]) -> set[str]:
    """The namespaces of these processes that are not the host's."""
    host = {_namespace(os.getpid(), kind) for kind in _NAMESPACES}
    return {name for process in of for kind in _NAMESPACES if (name := _namespace(process.pid, kind))} - host


def held(wanted: set[str], before: processes.Process) -> dict[int, str]:
    """Which processes of the whole machine are in one of these namespaces.

    The kernel gives numbers of namespaces anew: who started after `before` may have got one for namespaces of its own.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        process = processes.identify(int(entry.name)) if entry.name.isdigit() else None
        if process is None or process.started_at > before.started_at:
            continue
        for kind in _NAMESPACES:
            if (name := _namespace(process.pid, kind)) in wanted and name is not None:
                found[process.pid] = name
    return found


def _namespace(pid: int, kind: str) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return None


def listening(of: list[processes.Process]) -> set[str]:
    """Where in the host's network these processes accept connections: addresses in hex, as the kernel lists them."""
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    # The fields of a line: 1 is the local address, 3 the state (0A listens), 9 the number of the socket.
    lines = [line.split() for table in tables for line in table]
    addresses = {fields[9]: fields[1].partition(":")[0] for fields in lines if fields[3] == "0A"}
    found = set()
    for process in of:
        handles: list[Path] = []
        with contextlib.suppress(OSError):  # a process may end while it is looked at, and so may a handle
            handles = list(Path(f"/proc/{process.pid}/fd").iterdir())
        for handle in handles:
            with contextlib.suppress(OSError):
                socket = str(handle.readlink()).removeprefix("socket:[").removesuffix("]")
                found |= {addresses[socket]} if socket in addresses else set()
    return found


def _network() -> HostNetwork:
    return HostNetwork(
        links=_output("ip", "-o", "link"),
        addresses=_COUNTDOWN.sub("", _output("ip", "-o", "address")),
        routes=_COUNTDOWN.sub("", _output("ip", "route", "show", "table", "all")),
        rules=_output("ip", "rule"),
        firewall=_output("nft", "--stateless", "list", "ruleset"),
        named_namespaces=tuple(sorted(str(path) for path in Path("/run/netns").glob("*"))),
    )


def _output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
