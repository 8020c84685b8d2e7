"""Pytest fixtures: a control plane for the session with a namespace per test, a cluster of two nodes, a slow API.

A cluster is named after the test process. One whose process was killed is removed by the next session that starts one.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator

import pytest

from tests.cluster import launcher, state
from tests.cluster.fleet import Fleet
from tests.cluster.handle import ControlPlane
from tests.cluster.proxy import ApiLatency

# What each node of the two-node cluster offers, as on a real board.
CARDS_PER_NODE = 8


def _up(kind: str, nodes: int, cards: int = 0) -> state.Cluster:
    launcher.remove_orphans()
    name = f"{kind}-{os.getpid()}"
    return launcher.up(launcher.Request(name, nodes, cards, owner=state.this_process()))


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """etcd, API server with audit log, controllers and scheduler; no node, no root."""
    cluster = _up("tests", nodes=0)
    try:
        yield ControlPlane(cluster)
    finally:
        launcher.down(cluster.name)


@pytest.fixture(scope="session")
def two_node_cluster() -> Iterator[Fleet]:
    """Two real nodes with containerd, CNI, kube-proxy and DNS. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("nodes need root: namespaces, mounts and cgroups")
    cluster = _up("fleet", nodes=2, cards=CARDS_PER_NODE)
    try:
        yield Fleet(cluster)
    finally:
        launcher.down(cluster.name)


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


def namespace_name(test_name: str) -> str:
    """A namespace named after a test: unique, and readable in an audit log."""
    words = re.sub(r"[^a-z0-9]+", "-", test_name.lower()).strip("-")
    return f"{words.removeprefix('test-')[:40].strip('-')}-{secrets.token_hex(3)}"
