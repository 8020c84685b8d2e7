"""The images on real nodes: put under a containerd that starts, imported into one that runs, run under restrictions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import wait_for
from tests.cluster.fixtures import namespace_name
from tests.cluster.fleet import Fleet
from tests.cluster.node import BIN
from tests.images import archive, nodes, seed
from tests.images.build import Image, build
from tests.images.layout import Layout
from tests.images.store import Store

CODE_BYTES = 10e6
RESTRICTED = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def provided(two_node_cluster: Fleet, store: Store, images: dict[str, Image]) -> dict[str, Image]:
    """The images on both nodes of the session."""
    nodes.provide(two_node_cluster.cluster, images, store)
    return images


@pytest.fixture
def namespace(two_node_cluster: Fleet) -> Iterator[str]:
    name = namespace_name("images")
    two_node_cluster.create_namespace(name)
    # The strictest of the cluster's own policies judges the pods.
    two_node_cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield name
    finally:
        two_node_cluster.delete_namespace(name)


def run(fleet: Fleet, namespace: str, name: str, node: str, image: str, arguments: list[str]) -> str:
    """The log of a pod that runs the image's own entry point to its end."""
    container = {
        "name": "main",
        "image": image,
        "args": arguments,
        "imagePullPolicy": "Never",
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    manifest: dict[str, object] = {
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
    path = f"/api/v1/namespaces/{namespace}/pods"
    fleet.api.request("POST", path, manifest)
    status: dict[str, Any] = {}

    def ended() -> bool:
        found: Any = fleet.api.request("GET", f"{path}/{name}")["status"]
        status.update(found)
        return found["phase"] in ("Succeeded", "Failed")

    wait_for(f"the end of {name}", ended, timeout_seconds=180, interval_seconds=0.5)
    log = fleet.kubectl("logs", "--namespace", namespace, name)
    assert status["phase"] == "Succeeded", f"{json.dumps(status, indent=1)}\n{log}"
    return log


def test_both_programs_start_under_the_restricted_policy_on_every_node(
    two_node_cluster: Fleet, namespace: str, provided: dict[str, Image]
) -> None:
    for node in two_node_cluster.nodes:
        for target, words in (("operator", "hpu-operator"), ("engine-cpu", "hpu-engine")):
            log = run(two_node_cluster, namespace, f"{target}-{node}", node, provided[target].reference, ["--help"])
            assert words in log


def test_a_change_of_code_moves_kilobytes_to_the_nodes(
    two_node_cluster: Fleet, namespace: str, own: Store, provided: dict[str, Image], checkout: Path, tmp_path: Path
) -> None:
    with (checkout / "engine/hpu_engine/__init__.py").open("a") as file:
        file.write("# changed\n")
    changed = build(["engine-cpu"], root=checkout, store=own)
    node = two_node_cluster.node("node-0")
    held = node.room.run([f"{BIN}/ctr", "--namespace", "k8s.io", "content", "ls", "-q"]).split()
    size = archive.write(tmp_path / "import.tar", Layout(own.layout), list(changed.values()), held=held)
    assert size < CODE_BYTES
    nodes.provide(two_node_cluster.cluster, changed, own)
    reference = changed["engine-cpu"].reference
    assert reference != provided["engine-cpu"].reference
    assert "hpu-engine" in run(two_node_cluster, namespace, "changed", "node-0", reference, ["--help"])


def test_a_node_that_boots_anew_starts_with_the_images(
    two_node_cluster: Fleet, namespace: str, store: Store, provided: dict[str, Image]
) -> None:
    """Its disk is emptied, so that its containerd starts from what was unpacked once, and nothing is imported."""
    images = list(provided.values())
    seed.prepare(store, images, two_node_cluster.binaries)
    two_node_cluster.kill_node("node-1")
    shutil.rmtree(two_node_cluster.node("node-1").folder / "var-lib" / "containerd")
    two_node_cluster.boot_node("node-1")
    listed = two_node_cluster.node("node-1").room.run([f"{BIN}/ctr", "--namespace", "k8s.io", "images", "ls", "-q"])
    assert {image.reference for image in images} <= set(listed.split())
    log = run(two_node_cluster, namespace, "seeded", "node-1", provided["engine-cpu"].reference, ["--help"])
    assert "hpu-engine" in log
    assert seed.place(store, images, two_node_cluster.node("node-1").folder / "var-lib" / "containerd") is False
