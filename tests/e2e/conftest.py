"""The end-to-end tier: two real nodes, the real images, Helm and kubectl. One cluster and one release for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import state
from tests.cluster.fleet import Fleet
from tests.demo import installation
from tests.demo.kube import Kube
from tests.e2e.clients import wait_for
from tests.e2e.serving import NAME, Serving

REUSE = "HPU_TEST_CLUSTER"
"""Name of a running cluster of two nodes to use, for work on these tests. It stays up."""


@pytest.fixture(scope="session")
def installed(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """The operator, a model on a volume, and a default namespace that admits restricted pods only; no object yet."""
    images = installation.prepare_images()  # first: nodes that start after this begin with them
    name = os.environ.get(REUSE)
    fleet = Fleet(state.load(name)) if name else request.getfixturevalue("two_node_cluster")
    kube = Kube.of(fleet.cluster)
    references = installation.provide_images(fleet.cluster, images)
    kube.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "labels": installation.RESTRICTED}}
    )
    installation.provide_models(kube, installation.model_folder())
    installation.install_operator(kube, references)
    serving = Serving(fleet, kube)
    yield serving
    kube.kubectl("delete", "hpui", NAME, "--ignore-not-found")


@pytest.fixture
def serving(installed: Serving) -> Serving:
    """The example, ready with one group: made where a test before took it away, and otherwise as that test left it."""
    if installed.kube.get("hpui", NAME) is None:
        wait_for("the end of the one before", lambda: not installed.children(), 120)
    installed.apply()
    if installed.read()["spec"]["replicas"] != 1:
        installed.patch({"replicas": 1})
    installed.wait_ready()
    wait_for("one pod", lambda: len(installed.pods()) == 1, 120)
    return installed
