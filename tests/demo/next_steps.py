"""What can be done with the demo's cluster once it answered: commands for this machine, as a user would type them.

The end-to-end test runs them, so that none of them is only a text.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from tests.demo.kube import Kube


@dataclass(frozen=True)
class Step:
    """`does` says what for; the command needs `environment()` exported, and may run in the background."""

    does: str
    command: str


def environment(kube: Kube) -> str:
    """Also where clusters and caches are, if not where they are by default: `make down` must find this one."""
    moved = "".join(f" {name}={os.environ[name]}" for name in ("HPU_CLUSTERS", "HPU_CACHE") if os.environ.get(name))
    return f"export KUBECONFIG={kube.kubeconfig} PATH={kube.binaries}:{kube.helm_binaries}:$PATH{moved}"


def next_steps(name: str, port: int = 8000) -> tuple[Step, ...]:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    body = json.dumps({"model": name, "stream": True, "max_tokens": 100, "messages": question})
    return (
        Step("reach it from here, on loopback", f"kubectl port-forward service/{name} {port}:8000 &"),
        Step("ask it yourself", f"curl --silent --no-buffer {url} -H 'Content-Type: application/json' -d '{body}'"),
        Step("see what it says about itself", f"kubectl describe hpui {name}"),
        Step("watch it", f"kubectl get hpui {name} --watch"),
        Step("scale it", f"kubectl scale hpui {name} --replicas 2"),
        Step("change it, and watch it roll", f"kubectl edit hpui {name}"),
        Step("read the operator's log", "kubectl -n hpu-system logs deployment/hpu-operator"),
        Step("take the model down", f"kubectl delete hpui {name}"),
        Step("end the cluster and remove it", "make down"),
    )
