"""Our idea of a quantity's canonical form against the API server's own."""

from __future__ import annotations

from typing import Any

from hpu_operator.domain.quantity import canonical
from hpu_operator.kube.kinds import STATEFUL_SET
from tests.control_plane.admin import Admin

AMOUNTS = [
    "1024Mi", "2048Mi", "2Gi", "1536Mi", "1000m", "0.5", "1e3", "1000", "1500", "0", "100Mi", "1.5Gi", "8", "12e6",
    "1E3", "0.0001", "1Ki", "512", "1e-3", "0.5Ki", "1000Ki", ".5", "1M", "5000000", "1e4", "123456789", "0.1Gi",
    "1.25", "12E6", "10E3", "1000E3", "1E1", "1E6", "1000e3", "2500m", "1023Ki", "1025Ki", "3e1", "1u", "100n", "1.1n",
]  # fmt: skip


async def test_amounts_are_spelled_as_the_server_stores_them(admin: Admin, namespace: str) -> None:
    volumes = [{"name": f"v{number}", "emptyDir": {"sizeLimit": amount}} for number, amount in enumerate(AMOUNTS)]
    labels = {"app": "x"}
    spec: dict[str, Any] = {"containers": [{"name": "c", "image": "i"}], "volumes": volumes}
    body = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "amounts"},
        "spec": {
            "replicas": 0,
            "serviceName": "x",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    live = await admin.create(STATEFUL_SET, namespace, body)
    stored = [volume["emptyDir"]["sizeLimit"] for volume in live["spec"]["template"]["spec"]["volumes"]]
    assert dict(zip(AMOUNTS, stored, strict=True)) == {amount: canonical(amount) for amount in AMOUNTS}
