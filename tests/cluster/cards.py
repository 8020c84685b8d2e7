"""The cards of a node: where the device plugin is started, inside the node, beside the kubelet that it speaks to."""

from __future__ import annotations

from tests.cluster.errors import MissingRequirement
from tests.cluster.node import Node


def start_device_plugin(node: Node, cards: int) -> None:
    """Offer `cards` of habana.ai/gaudi on a node; called when the node is Ready, and again after it was restarted."""
    raise MissingRequirement(f"{node.name}: no device plugin for {cards} cards yet", "run up without --cards")
