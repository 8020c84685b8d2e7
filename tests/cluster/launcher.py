"""up, down, status: a whole cluster appears or nothing is left of it.

`up` writes the state before it makes anything; when it fails or is interrupted it removes what it made. When it is
killed, the next `up` or `down` of the same name does. `down` is in removal.py.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import build, control_plane, modules, nodes, ports, preflight, removal, state
from tests.cluster.api import ApiError
from tests.cluster.build import Say, say
from tests.cluster.errors import ClusterError, ComponentFailed, NotRunning, StateConflict
from tests.cluster.processes import Process, Supervisor
from tests.cluster.removal import down, remove_orphans
from tests.cluster.state import Cluster

__all__ = ["Request", "down", "remove_orphans", "status", "up"]

# What `logs` of a failed start are kept for: the folder itself goes.
_KEPT_LOG_BYTES = 4 * 1024 * 1024
_KEPT_STARTS = 20


@dataclass(frozen=True)
class Request:
    """What `up` was asked for. `nodes == 0` is the control plane alone."""

    name: str
    nodes: int
    cards: int = 0
    version: str = modules.KUBERNETES_VERSION
    owner: Process | None = None


def up(request: Request, listener: Say = say) -> Cluster:
    """Bring a cluster up, or return the one that runs already. ClusterError says what is in the way."""
    preflight.check(nodes=request.nodes > 0)
    folder = state.folder_of(request.name)
    try:
        return _up(request, folder, listener)
    except OSError as error:
        raise _os_error(error, folder) from error
    except ApiError as error:
        raise ComponentFailed(
            f"cluster {request.name}: the API server answered {error}", "run up again; it starts from the beginning"
        ) from error


def _up(request: Request, folder: Path, listener: Say) -> Cluster:
    with state.locked(folder, wait_seconds=0):
        if running := _claim(request, listener):
            return running
    binaries = build.cluster_binaries(nodes=request.nodes > 0, version=request.version, listener=listener)
    with state.locked(folder, wait_seconds=0):
        # Once more: the build may have taken minutes, without the lock.
        if running := _claim(request, listener):
            return running
        start = time.monotonic()
        cluster = _record(request, binaries)
        try:
            _start(cluster, listener)
            cluster = state.mark_ready(cluster)
        except BaseException:
            _keep_logs(cluster)
            removal.remove(folder)
            raise
        listener(
            f"cluster {request.name}: ready after {time.monotonic() - start:.1f} s; KUBECONFIG={cluster.kubeconfig}"
        )
        return cluster


def _claim(request: Request, listener: Say) -> Cluster | None:
    """The running cluster, or None with the folder free: what a killed run left is removed."""
    if running := _running(request):
        listener(f"cluster {request.name} is up already")
        return running
    if state.folder_of(request.name).exists():
        listener(f"cluster {request.name}: removing what a killed run left")
        removal.remove(state.folder_of(request.name))
    return None


def _running(request: Request) -> Cluster | None:
    """The running cluster of this name, if it is what was asked for; None when there is none, or a dead one."""
    try:
        cluster = state.load(request.name)
    except (NotRunning, StateConflict):
        return None  # there is none, or its record is damaged and it is as good as dead
    dead = [name for name, alive in status(cluster) if not alive]
    if not cluster.ready or len(dead) == len(status(cluster)):
        return None
    if dead:
        # It may hold what somebody still looks at: it does not go unasked.
        raise StateConflict(
            f"{request.name} is up, but not running in it: {', '.join(dead)}",
            f"python -m tests.cluster logs {dead[0]} --name {request.name} says why; then down --name {request.name}",
        )
    have = (cluster.nodes, cluster.cards, cluster.version)
    if have != (request.nodes, request.cards, request.version):
        raise StateConflict(
            f"{request.name} runs already: {cluster.nodes} nodes, {cluster.cards} cards, Kubernetes {cluster.version}",
            f"python -m tests.cluster down --name {request.name}, or choose another --name",
        )
    return cluster


def _record(request: Request, binaries: Path) -> Cluster:
    folder = state.folder_of(request.name)
    chosen = ports.choose(5)
    cluster = Cluster(
        name=request.name,
        folder=folder,
        nodes=request.nodes,
        cards=request.cards,
        version=request.version,
        binaries=binaries,
        api_port=chosen[0],
        etcd_port=chosen[1],
        peer_port=chosen[2],
        controllers_port=chosen[3],
        scheduler_port=chosen[4],
        owner=request.owner,
    )
    try:
        for room in (folder, folder / "run", folder / "log"):
            room.mkdir(mode=0o700, exist_ok=True)
        state.save(cluster)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return cluster


def _start(cluster: Cluster, listener: Say) -> None:
    supervisor = Supervisor(cluster.folder)
    if cluster.nodes:
        nodes.start(cluster, supervisor, listener)
        return
    site = control_plane.on_loopback(cluster)
    control_plane.write_credentials(cluster, site)
    control_plane.start(cluster, site, supervisor)


def _os_error(error: OSError, folder: Path) -> ClusterError:
    remedy = "run down, then up again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"the disk is full: free some room below {folder.parent}, or point HPU_CLUSTERS at another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = f"this user must be able to write to {folder.parent}; HPU_CLUSTERS names another folder"
    return ClusterError(f"cluster {folder.name}: {error}", remedy)


def status(cluster: Cluster) -> list[tuple[str, bool]]:
    """Every component and whether its process lives."""
    supervisor = Supervisor(cluster.folder)
    return [(name, supervisor.alive(name)) for name in supervisor.names()]


def _keep_logs(cluster: Cluster) -> None:
    """Copy the logs of a start that failed into the cache, for whoever looks for the reason."""
    kept = state.kept_logs(cluster.name)
    with contextlib.suppress(OSError):
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for old in sorted(kept.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT_STARTS:]:
            shutil.rmtree(old, ignore_errors=True)
        for log in (cluster.folder / "log").iterdir():
            with log.open("rb") as source:
                source.seek(max(0, log.stat().st_size - _KEPT_LOG_BYTES))
                (kept / log.name).write_bytes(source.read())
        print(f"the logs are kept in {kept}", file=sys.stderr)
