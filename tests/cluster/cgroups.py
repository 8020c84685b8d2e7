"""The cgroup folders of a cluster: one per node in every hierarchy, the kubelet's root, removed when the cluster goes.

A folder's name carries the cluster's uid, so the folders are found again whatever became of the launcher. Version 1 (a
hierarchy per controller) and version 2 (one for all) differ only in which folders there are and what they need first.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tests.cluster.errors import ClusterError, MissingRequirement

MOUNT = Path("/sys/fs/cgroup")
# The controllers that the root of version 2 passes on since there are clusters: gone with the last of them.
PASSED_ON = Path("/run/hpu-cgroup-controllers")
# What a kubelet insists on. Version 2 has no hierarchy that is called devices or freezer: those are built in.
REQUIRED_V1 = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids")
REQUIRED_V2 = ("cpu", "cpuset", "memory", "pids")


def name(uid: str, node: str) -> str:
    """The folder of a node, the same in every hierarchy."""
    return f"hpu-{uid}-{node}"


def unified(mount: Path = MOUNT) -> bool:
    """Whether version 2 alone is mounted (a hybrid machine counts as version 1, as it does for the kubelet)."""
    return (mount / "cgroup.controllers").exists()


def hierarchies(mount: Path = MOUNT) -> list[Path]:
    """The root folder of every hierarchy, each once though version 1 may link several names to one."""
    if unified(mount):
        return [mount]
    found = (
        {path.resolve() for path in mount.iterdir() if (path / "cgroup.procs").exists()} if mount.is_dir() else set()
    )
    return sorted(found)


def missing_controllers(mount: Path = MOUNT) -> list[str]:
    """The controllers that a kubelet needs and this machine lacks."""
    if unified(mount):
        have = set((mount / "cgroup.controllers").read_text().split())
        return [controller for controller in REQUIRED_V2 if controller not in have]
    return [controller for controller in REQUIRED_V1 if not (mount / controller / "cgroup.procs").exists()]


def create(uid: str, node: str, mount: Path = MOUNT) -> str:
    """Make a node's folders; returns the kubelet's cgroupRoot. MissingRequirement when the kernel refuses."""
    folder = name(uid, node)
    try:
        if unified(mount):
            _delegate(mount)
        for hierarchy in hierarchies(mount):
            (hierarchy / folder).mkdir(exist_ok=True)
            # Version 1 cpuset: no process may enter a folder whose sets are empty, and they are not inherited.
            for sets in ("cpuset.cpus", "cpuset.mems"):
                if not unified(mount) and (hierarchy / sets).exists():
                    (hierarchy / folder / sets).write_text((hierarchy / sets).read_text())
    except OSError as error:
        raise MissingRequirement(
            f"no cgroup for {node}: {error}", "run where /sys/fs/cgroup is writable and is the root of its hierarchy"
        ) from None
    return f"/{folder}"


def _delegate(mount: Path) -> None:
    """Version 2: children get a controller only when the parent passes it on. What that changed is written down."""
    passed = set((mount / "cgroup.subtree_control").read_text().split())
    wanted = [controller for controller in REQUIRED_V2 if controller not in passed]
    if wanted:
        with PASSED_ON.open("a") as record:
            record.write("".join(f"{controller}\n" for controller in wanted))
        (mount / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in wanted))


def _take_back(mount: Path) -> None:
    """With the last node of all clusters go the controllers that the first one asked for."""
    if not PASSED_ON.exists() or folders("*", mount=mount):
        return
    for controller in sorted(set(PASSED_ON.read_text().split())):
        with contextlib.suppress(OSError):  # somebody else's folders use it by now
            (mount / "cgroup.subtree_control").write_text(f"-{controller}")
    PASSED_ON.unlink()


def folders(uid: str, node: str = "", mount: Path = MOUNT) -> list[Path]:
    """The folders of a node, or of a whole cluster, in every hierarchy."""
    return [path for hierarchy in hierarchies(mount) for path in sorted(hierarchy.glob(name(uid, node or "*")))]


def remove(uid: str, node: str = "", mount: Path = MOUNT, timeout_seconds: float = 60.0) -> None:
    """Remove the folders of a node, or of a whole cluster. A folder stays busy until its last process is buried."""
    deadline = time.monotonic() + timeout_seconds
    while left := folders(uid, node, mount):
        for top in left:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
        if all(not top.exists() for top in left):
            break
        if time.monotonic() > deadline:
            raise ClusterError(
                f"cgroups are still busy: {', '.join(map(str, left))}", "see their cgroup.procs, then run down again"
            )
        time.sleep(0.05)
    if not node:
        _take_back(mount)
