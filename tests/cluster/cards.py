"""The cards of a node: the device plugin inside the node, beside its kubelet, and which cards are broken.

The plugin follows a kubelet that restarts by itself. Cards are called gaudi-0, gaudi-1, ... on every node.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tests.cluster.api import Api, wait_for
from tests.cluster.control_plane import check_alive
from tests.cluster.node import BIN, ETC, Node

RESOURCE = "habana.ai/gaudi"
_UNHEALTHY = "unhealthy-cards"


def start_device_plugin(node: Node, cards: int) -> None:
    """Offer `cards` cards on a Ready node, after every boot; returns when they are allocatable."""
    if not cards:
        return
    node.start("cards", [f"{BIN}/deviceplugin", "--cards", str(cards), "--unhealthy", f"{ETC}/{_UNHEALTHY}"])
    api = Api(node.cluster.kubeconfig)
    wait_for(
        f"{cards} cards on {node.name}",
        lambda: allocatable(api, node.name) == cards,
        timeout_seconds=60,
        check=lambda: check_alive(node.supervisor, [node.component("cards")]),
    )


def allocatable(api: Api, node: str) -> int:
    """The healthy cards of a node, as the scheduler counts them."""
    status = api.request("GET", f"/api/v1/nodes/{node}")["status"]
    assert isinstance(status, dict)
    return int(status.get("allocatable", {}).get(RESOURCE, 0))


def set_unhealthy(node: Node, ids: Collection[str]) -> None:
    """Break just these cards of a node; an empty collection repairs all of them."""
    file = _health_file(node)
    # Renamed into place: the plugin never reads half a list.
    partial = file.with_suffix(".new")
    partial.write_text("".join(f"{name}\n" for name in sorted(ids)))
    partial.replace(file)


def _health_file(node: Node) -> Path:
    return node.folder / "run/hpu/etc" / _UNHEALTHY
