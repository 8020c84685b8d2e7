"""All pods in trouble, at once, on the real nodes of the session; one of the nodes is frozen meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.fixtures import namespace_name
from tests.cluster.fleet import Fleet
from tests.recordings import pods
from tests.recordings.recorder import Recorder


@pytest.fixture(scope="package")
def recorder(two_node_cluster: Fleet) -> Iterator[Recorder]:
    """The pods of `pods.all_pods()` in a namespace of their own, and the kubelet of the node FROZEN stopped."""
    namespace = namespace_name("recordings")
    two_node_cluster.create_namespace(namespace)
    recorder = Recorder(two_node_cluster, namespace)
    two_node_cluster.api.request("POST", recorder.path("services"), pods.service("graceful"))
    for manifest in pods.all_pods():
        recorder.create(manifest)
    recorder.wait("frozen", lambda pod: pod.condition("Ready").get("status") == "True")
    two_node_cluster.freeze(pods.FROZEN)
    try:
        yield recorder
    finally:
        two_node_cluster.thaw(pods.FROZEN)
        two_node_cluster.wait_until_ready(pods.FROZEN)
        two_node_cluster.delete_namespace(namespace)
