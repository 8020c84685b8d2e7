"""Brings the images to the nodes of a local cluster: under a containerd before it starts, or into one that runs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster import build as programs
from tests.cluster.node import BIN, Node, import_image
from tests.cluster.processes import Supervisor
from tests.cluster.state import Cluster
from tests.images import archive, seed
from tests.images.build import LOCAL_TARGETS, Image, build, recorded
from tests.images.layout import Layout
from tests.images.store import Store, step

_CTR = (f"{BIN}/ctr", "--namespace", "k8s.io")


def prepare(store: Store | None = None) -> dict[str, Image]:
    """Builds the images and unpacks them once for all nodes. Before `up`, so that the nodes start with them."""
    store = store or Store.default()
    images = build(store=store)
    seed.prepare(store, list(images.values()), programs.cluster_binaries(nodes=True))
    return images


def place(node_folder: Path) -> bool:
    """Puts what `prepare` made last under a node whose containerd has not run yet; False if there is nothing to put."""
    store = Store.default()
    images = [image for image in recorded(store).values() if image.target in LOCAL_TARGETS]
    return bool(images) and seed.place(store, images, node_folder / "var-lib" / "containerd")


def provide(cluster: Cluster, images: Mapping[str, Image], store: Store | None = None) -> None:
    """Imports into every node what it has not: nothing after `place`, kilobytes after a change of code."""
    store = store or Store.default()
    supervisor = Supervisor(cluster.folder)
    nodes = [Node(cluster, index, supervisor) for index in range(cluster.nodes)]
    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        list(pool.map(lambda node: _provide(node, list(images.values()), store), nodes))


def _provide(node: Node, images: list[Image], store: Store) -> None:
    present = node.room.run([*_CTR, "images", "ls", "-q"]).split()
    missing = [image for image in images if image.reference not in present]
    if not missing:
        return
    held = node.room.run([*_CTR, "content", "ls", "-q"]).split()
    file = node.folder / "import.tar"
    try:
        with step(f"images into {node.name}"):
            archive.write(file, Layout(store.layout), missing, held=held)
            import_image(node, file)
    finally:
        file.unlink(missing_ok=True)
