"""CoreDNS beside the control plane: the names of Services and pods for every pod of the cluster."""

from __future__ import annotations

import subprocess

from tests.cluster.api import Api, Json, wait_for
from tests.cluster.control_plane import check_alive
from tests.cluster.credentials import DNS
from tests.cluster.network import CONTROL_PLANE_ADDRESS, Room
from tests.cluster.processes import Supervisor
from tests.cluster.state import Cluster

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
# Short lived answers: a test sees a change of endpoints within seconds. Names outside of the cluster do not exist.
_COREFILE = f""".:53 {{
    bind {CONTROL_PLANE_ADDRESS}
    errors
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig %s local
        ttl 5
    }}
}}
"""


def start(cluster: Cluster, supervisor: Supervisor, room: Room) -> None:
    """Allow CoreDNS to read what it serves, and start it. The API server must answer."""
    _allow(Api(cluster.kubeconfig))
    corefile = cluster.folder / "Corefile"
    corefile.write_text(_COREFILE % (cluster.folder / f"{DNS.name}.kubeconfig"))
    supervisor.start("coredns", [*room.enter, str(cluster.binaries / "coredns"), "-conf", str(corefile)], entered=True)


def wait_until_ready(supervisor: Supervisor, room: Room) -> None:
    """Wait until CoreDNS has read the cluster's objects and answers."""
    probe = [*room.enter, "busybox", "wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8181/ready"]
    wait_for(
        "CoreDNS",
        lambda: subprocess.run(probe, capture_output=True, check=False).returncode == 0,
        timeout_seconds=120,
        check=lambda: check_alive(supervisor, ["coredns"]),
        interval_seconds=0.3,
    )


def _allow(api: Api) -> None:
    """Let CoreDNS list and watch what its answers are made of."""
    role: Json = {
        "metadata": {"name": DNS.user},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    }
    binding: Json = {
        "metadata": {"name": DNS.user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": DNS.user},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": DNS.user}],
    }
    api.request("POST", f"{_RBAC}/clusterroles", role)
    api.request("POST", f"{_RBAC}/clusterrolebindings", binding)
