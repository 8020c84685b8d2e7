"""The pods in trouble, as manifests. All run at once: most of their time is waiting."""

from __future__ import annotations

from typing import Any

from hpu_operator.domain.names import IN_SERVICE_LABEL
from tests.cluster.busybox import IMAGE
from tests.cluster.cards import RESOURCE

Manifest = dict[str, Any]

HERE, FROZEN = "node-0", "node-1"
GRACE_SECONDS, ENDS_AFTER_SECONDS = 45, 20
CARDS_HELD = 2
FIRST_LINE = "OSError: /models/smollm2/model.safetensors: no such file"
# Longer than any test waits.
_RUN = ["sleep", "100000"]
_EVICTION_SECONDS = 5


def pod(name: str, *, container: Manifest | None = None, node: str | None = HERE, **spec: Any) -> Manifest:
    """One container called `engine`, as the operator's pods have it; it runs until it is ended."""
    engine = {
        "name": "engine",
        "image": IMAGE,
        "command": _RUN,
        "imagePullPolicy": "IfNotPresent",
        **(container or {}),
    }
    placed = {"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name, IN_SERVICE_LABEL: "true"}},
        "spec": {
            "containers": [engine],
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            **placed,
            **spec,
        },
    }


def _shell(script: str) -> Manifest:
    return {"command": ["sh", "-c", script]}


def _cards(count: int) -> Manifest:
    return {"resources": {"limits": {RESOURCE: str(count)}}}


def _failing(probe: str) -> Manifest:
    return {
        probe: {
            "exec": {"command": ["sh", "-c", "echo no heartbeat; false"]},
            "periodSeconds": 1,
            "failureThreshold": 1,
        }
    }


def all_pods() -> list[Manifest]:
    secret_file = [{"name": "token", "secret": {"secretName": "absent"}}]
    claim = [{"name": "models", "persistentVolumeClaim": {"claimName": "absent"}}]
    unreachable = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": _EVICTION_SECONDS,
    }
    return [
        pod("cards-insufficient", container=_cards(64), node=None),
        pod("cards-refused", container=_cards(64), node=None, nodeName=HERE),
        pod("image-never", container={"image": "localhost/absent:1", "imagePullPolicy": "Never"}),
        pod("secret-env", container={"envFrom": [{"secretRef": {"name": "absent"}}]}),
        pod("secret-volume", volumes=secret_file, container={"volumeMounts": [{"name": "token", "mountPath": "/t"}]}),
        pod("claim-absent", volumes=claim, container={"volumeMounts": [{"name": "models", "mountPath": "/m"}]}),
        pod("crash", container=_shell(f"echo '{FIRST_LINE}' >/dev/termination-log; exit 3")),
        pod("memory", container={"command": ["tail", "/dev/zero"], "resources": {"limits": {"memory": "32Mi"}}}),
        pod("unready", container=_failing("readinessProbe")),
        pod("dead", container=_failing("livenessProbe")),
        pod(
            "graceful",
            container=_shell(f"trap 'sleep {ENDS_AFTER_SECONDS}; exit 0' TERM; while :; do sleep 0.1; done"),
            terminationGracePeriodSeconds=GRACE_SECONDS,
        ),
        pod("frozen", node=FROZEN, tolerations=[unreachable]),
        pod("card-lost", container=_shell("env; exec sleep 100000") | _cards(CARDS_HELD)),
    ]


def service(name: str) -> Manifest:
    """A Service for one pod, whose endpoints tell when clients stop being sent to it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 8000}]},
    }
