"""up, down, status: a whole cluster appears or nothing is left of it.

`up` writes the state before it makes anything; when it fails or is interrupted it removes what it made. When it is
killed, the next `up` or `down` of the same name does. `down` needs only a folder's name: it works from any half state.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import build, cgroups, control_plane, modules, nodes, ports, preflight, processes, state
from tests.cluster.build import Say, say
from tests.cluster.errors import ClusterError, NotRunning, StateConflict
from tests.cluster.processes import Process, Supervisor
from tests.cluster.state import Cluster

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
    with state.locked(request.name, wait_seconds=0):
        if running := _claim(request, listener):
            return running
    binaries = build.cluster_binaries(nodes=request.nodes > 0, version=request.version, listener=listener)
    with state.locked(request.name, wait_seconds=0):
        # Once more: the build may have taken minutes, without the lock.
        if running := _claim(request, listener):
            return running
        start = time.monotonic()
        cluster = _record(request, binaries)
        try:
            _start(cluster, listener)
            cluster = state.mark_ready(cluster)
        except BaseException as error:
            _keep_logs(cluster)
            _remove(request.name)
            if isinstance(error, OSError):
                raise _os_error(error, cluster) from error
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
        _remove(request.name)
    return None


def _running(request: Request) -> Cluster | None:
    """The running cluster of this name, if it is what was asked for; None when there is none, or a dead one."""
    try:
        cluster = state.load(request.name)
    except (NotRunning, StateConflict):
        return None  # there is none, or its record is damaged and it is as good as dead
    if not cluster.ready or not all(alive for _, alive in status(cluster)):
        return None
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
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise _os_error(error, cluster) from error
    return cluster


def _start(cluster: Cluster, listener: Say) -> None:
    supervisor = Supervisor(cluster.folder)
    if cluster.nodes:
        nodes.start(cluster, supervisor, listener)
        return
    site = control_plane.on_loopback(cluster)
    control_plane.write_credentials(cluster, site)
    control_plane.start(cluster, site, supervisor)


def _os_error(error: OSError, cluster: Cluster) -> ClusterError:
    return ClusterError(
        f"cluster {cluster.name}: {error}", f"free some room below {cluster.folder}, or set HPU_CLUSTERS"
    )


def down(name: str) -> bool:
    """Remove everything of a cluster, whatever state it is in; False when there was nothing. May raise ClusterError."""
    if not state.folder_of(name).exists() and not processes.marked(state.folder_of(name)):
        return False
    with state.locked(name, wait_seconds=60):
        _remove(name)
    return True


def known() -> list[str]:
    """The clusters of this user: by their folders, and by processes whose folder somebody removed."""
    running = {folder.name for folder in processes.marked_folders() if folder.parent == state.root()}
    return sorted(running.union(state.names()))


def _remove(name: str) -> None:
    folder = state.folder_of(name)
    # What `_record` makes first is the folder `run`: without it, whatever is there is not ours.
    if folder.exists() and any(folder.iterdir()) and not (folder / "run").exists():
        raise StateConflict(f"{folder} holds files that are not a cluster's", "choose another --name")
    survivors = processes.end_all(folder)
    if survivors:
        pids = " ".join(str(process.pid) for process in survivors)
        raise ClusterError(
            f"cluster {name}: processes {pids} do not end", "look at their state in /proc, then run down again"
        )
    cgroups.remove(state.uid_of(folder))
    _remove_folder(folder)


def _remove_folder(folder: Path, attempts: int = 20) -> None:
    """Remove the folder; a namespace that is still being dismantled may hold a mount in it for a moment."""
    for attempt in range(attempts):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
        except OSError:
            if attempt == attempts - 1:
                raise
            time.sleep(0.1)


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


def remove_orphans(listener: Say = say) -> Sequence[str]:
    """Remove the clusters of test runs that were killed."""
    removed = []
    for name in state.orphans():
        listener(f"cluster {name}: its test run has gone, removing it")
        with contextlib.suppress(ClusterError):
            down(name)
            removed.append(name)
    return removed
