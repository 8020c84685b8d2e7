"""Pytest fixtures: a control plane for the session with a namespace per test, a cluster of two nodes, a slow API.

A cluster is named after the test process. One whose process was killed is removed by the next session that starts one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator

import pytest
from xdist.workermanage import WorkerController

from tests.cluster import launcher, processes, state
from tests.cluster.fleet import Fleet
from tests.cluster.handle import ControlPlane
from tests.cluster.proxy import ApiLatency

# What each node of the two-node cluster offers, as on a real board.
CARDS_PER_NODE = 8
_figures: list[str] = []


@contextlib.contextmanager
def _up(kind: str, nodes: int, cards: int = 0) -> Iterator[state.Cluster]:
    """A cluster of this test run; what it took is printed at the end of the run."""
    launcher.remove_orphans()
    start = time.monotonic()
    request = launcher.Request(f"{kind}-{os.getpid()}", nodes, cards, owner=state.this_process())
    cluster = launcher.up(request)
    up_seconds, memory = time.monotonic() - start, processes.memory_bytes(cluster.folder)
    try:
        yield cluster
    finally:
        start = time.monotonic()
        launcher.down(cluster.name)
        size = f"{nodes} nodes" if nodes else "a control plane"
        down_seconds = time.monotonic() - start
        _figures.append(f"{size}: up in {up_seconds:.1f} s, {memory >> 20} MiB, down in {down_seconds:.1f} s")


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """etcd, API server with audit log, controllers and scheduler; no node, no root."""
    with _up("tests", nodes=0) as cluster:
        yield ControlPlane(cluster)


@pytest.fixture(scope="session")
def two_node_cluster() -> Iterator[Fleet]:
    """Two real nodes with containerd, CNI, kube-proxy and DNS. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("nodes need root: namespaces, mounts and cgroups")
    with _up("fleet", nodes=2, cards=CARDS_PER_NODE) as cluster:
        yield Fleet(cluster)


@pytest.fixture
def namespace(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the session's control plane for one test, with its default service account there."""
    name = namespace_name(request.node.name)
    control_plane.create_namespace(name)
    try:
        yield name
    finally:
        control_plane.delete_namespace(name)


@pytest.fixture
def api_latency(control_plane: ControlPlane) -> Iterator[ApiLatency]:
    """A proxy before the session's control plane; its delay is 0 until the test sets one."""
    proxy = ApiLatency(control_plane.kubeconfig, control_plane.cluster.folder)
    try:
        yield proxy
    finally:
        proxy.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A worker of two hands its figures to the process that prints.
    if output := getattr(session.config, "workeroutput", None):
        output["clusters"] = _figures


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: WorkerController) -> None:
    _figures.extend(getattr(node, "workeroutput", {}).get("clusters", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("clusters")
        for line in _figures:
            terminalreporter.line(line)


def namespace_name(test_name: str) -> str:
    """A namespace named after a test: unique, and readable in an audit log."""
    words = re.sub(r"[^a-z0-9]+", "-", test_name.lower()).strip("-")
    return f"{words.removeprefix('test-')[:40].strip('-')}-{secrets.token_hex(3)}"
