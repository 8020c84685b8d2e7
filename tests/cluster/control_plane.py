"""etcd, API server, controller manager, scheduler: their arguments, their order of starting, when they count as ready.

Alone (`nodes == 0`) they run as the calling user on loopback ports of the host. With nodes they run inside the control
plane's namespaces on their usual ports; `Site` is the whole difference.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.cluster import credentials, pki, state
from tests.cluster.api import Api, wait_for
from tests.cluster.errors import ComponentFailed
from tests.cluster.network import CONTROL_PLANE_ADDRESS, FIRST_SERVICE_ADDRESS, SERVICE_RANGE
from tests.cluster.processes import Supervisor
from tests.cluster.state import Cluster

COMPONENTS = ("etcd", "apiserver", "controllers", "scheduler")

# etcd reserves its log in files of 64 MB: with less than that left, a disk counts as full.
_FULL_BYTES = 64 * 1024 * 1024

# Metadata of every request: enough to say who wrote what, cheap enough for thousands of writes.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True)
class Site:
    """Where the control plane runs. `enter` is prepended to every command; ports are those inside."""

    enter: tuple[str, ...]
    address: str
    api_port: int
    etcd_port: int
    peer_port: int
    controllers_port: int
    scheduler_port: int

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    @property
    def etcd_url(self) -> str:
        return f"http://127.0.0.1:{self.etcd_port}"


def on_loopback(cluster: Cluster) -> Site:
    return Site(
        enter=(),
        address="127.0.0.1",
        api_port=cluster.api_port,
        etcd_port=cluster.etcd_port,
        peer_port=cluster.peer_port,
        controllers_port=cluster.controllers_port,
        scheduler_port=cluster.scheduler_port,
    )


def in_namespaces(enter: Sequence[str]) -> Site:
    return Site(tuple(enter), CONTROL_PLANE_ADDRESS, 6443, 2379, 2380, 10257, 10259)


def etcd(cluster: Cluster, site: Site) -> list[str]:
    peer = f"http://127.0.0.1:{site.peer_port}"
    return [
        str(cluster.binaries / "etcd"),
        "--name=local",
        f"--data-dir={cluster.folder}/etcd",
        "--unsafe-no-fsync",  # the data is thrown away with the cluster
        f"--listen-client-urls={site.etcd_url}",
        f"--advertise-client-urls={site.etcd_url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=local={peer}",
        "--log-level=warn",
    ]


def apiserver(cluster: Cluster, site: Site) -> list[str]:
    keys = cluster.pki
    return [
        str(cluster.binaries / "kube-apiserver"),
        f"--etcd-servers={site.etcd_url}",
        f"--secure-port={site.api_port}",
        f"--bind-address={'127.0.0.1' if not cluster.nodes else '0.0.0.0'}",
        f"--advertise-address={site.address}",
        # Without nodes nobody reaches the Service `kubernetes`, and loopback is refused as its endpoint.
        f"--endpoint-reconciler-type={'lease' if cluster.nodes else 'none'}",
        "--authorization-mode=Node,RBAC",
        f"--token-auth-file={keys}/tokens.csv",
        f"--client-ca-file={keys}/ca.crt",
        f"--tls-cert-file={keys}/apiserver.crt",
        f"--tls-private-key-file={keys}/apiserver.key",
        f"--kubelet-client-certificate={keys}/kube-apiserver-kubelet-client.crt",
        f"--kubelet-client-key={keys}/kube-apiserver-kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",  # host names of nodes resolve nowhere
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={keys}/service-accounts.pub",
        f"--service-account-signing-key-file={keys}/service-accounts.key",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--allow-privileged=true",
        f"--audit-policy-file={cluster.folder}/audit-policy.json",
        f"--audit-log-path={cluster.audit_log}",
        # One file, without rotation: who reads it as it grows remembers how far.
        "--audit-log-maxsize=0",
    ]


def controllers(cluster: Cluster, site: Site) -> list[str]:
    config = cluster.folder / "controllers.kubeconfig"
    return [
        str(cluster.binaries / "kube-controller-manager"),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--use-service-account-credentials",
        # Each of the forty controllers asks for its account's token first: 4 s of a start at the default of 20/s.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        "--leader-elect=false",
        f"--service-account-private-key-file={cluster.pki}/service-accounts.key",
        f"--root-ca-file={cluster.pki}/ca.crt",
        "--bind-address=127.0.0.1",
        f"--secure-port={site.controllers_port}",
        f"--cert-dir={cluster.folder}/controllers-pki",
    ]


def scheduler(cluster: Cluster, site: Site) -> list[str]:
    config = cluster.folder / "scheduler.kubeconfig"
    return [
        str(cluster.binaries / "kube-scheduler"),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={site.scheduler_port}",
        f"--cert-dir={cluster.folder}/scheduler-pki",
    ]


def write_credentials(cluster: Cluster, site: Site) -> None:
    """Keys, tokens and a kubeconfig per user; the admin's points at the host's loopback, all others inside."""
    cluster.pki.mkdir(mode=0o700, exist_ok=True)
    authority = pki.create_authority(cluster.pki)
    pki.issue_server(
        authority,
        cluster.pki,
        "apiserver",
        addresses=sorted({"127.0.0.1", site.address, FIRST_SERVICE_ADDRESS}),
        dns=[
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        ],
    )
    pki.issue_client(authority, cluster.pki, "kube-apiserver-kubelet-client", ["system:masters"])
    pki.create_signing_key(cluster.pki, "service-accounts")
    users = [credentials.ADMIN, credentials.CONTROLLERS, credentials.SCHEDULER]
    if cluster.nodes:
        users += [credentials.PROXY, credentials.DNS, *map(credentials.node_user, cluster.node_names())]
    tokens = credentials.write_tokens(cluster.pki, users)
    certificate = (cluster.pki / "ca.crt").read_bytes()
    for user in users:
        inside = cluster.folder / f"{user.name}.kubeconfig"
        credentials.write_kubeconfig(
            cluster.kubeconfig if user is credentials.ADMIN else inside,
            server=cluster.url if user is credentials.ADMIN else site.url,
            authority=certificate,
            user=user.name,
            token=tokens[user.name],
        )
    (cluster.folder / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))


def start(
    cluster: Cluster, site: Site, supervisor: Supervisor, before_ready: Callable[[], None] = lambda: None
) -> None:
    """Start everything and wait until the API server answers and the first service account exists.

    `before_ready` runs once the server's process is there (the relay of a cluster with nodes). Raises ComponentFailed.
    """
    entered = bool(site.enter)

    def launch(name: str, argv: list[str]) -> None:
        supervisor.start(name, [*site.enter, *argv], entered=entered)

    launch("etcd", etcd(cluster, site))
    launch("apiserver", apiserver(cluster, site))
    before_ready()
    api = Api(cluster.kubeconfig)
    wait_until_served(cluster, supervisor)
    launch("controllers", controllers(cluster, site))
    launch("scheduler", scheduler(cluster, site))
    wait_for(
        "the controllers' first service account",
        lambda: api.exists("/api/v1/namespaces/default/serviceaccounts/default"),
        timeout_seconds=180,
        check=lambda: check_alive(supervisor, COMPONENTS),
    )


def wait_until_served(cluster: Cluster, supervisor: Supervisor, timeout_seconds: float = 180.0) -> float:
    """Wait for /readyz; seconds it took."""
    api = Api(cluster.kubeconfig)
    return wait_for(
        "the API server's /readyz",
        # Soon asked again: whoever else has the port may accept and say nothing.
        lambda: api.exists("/readyz", timeout_seconds=5),
        timeout_seconds=timeout_seconds,
        check=lambda: check_alive(supervisor, ("etcd", "apiserver")),
    )


def check_alive(supervisor: Supervisor, names: Sequence[str]) -> None:
    """Raise ComponentFailed for the first of these components that has ended, with the end of its log."""
    for name in names:
        if not supervisor.alive(name):
            raise failure(supervisor, name)


def failure(supervisor: Supervisor, name: str) -> ComponentFailed:
    tail = supervisor.tail(name)
    if "address already in use" in tail:
        return ComponentFailed(
            f"{name} ended: another program took its port\n{tail}", "run up again: it chooses other ports each time"
        )
    # The log itself may have found no room to say so.
    if "no space left on device" in tail or shutil.disk_usage(supervisor.folder).free < _FULL_BYTES:
        return ComponentFailed(
            f"{name} ended: the disk of {supervisor.folder} is full\n{tail}",
            "free some room, or point HPU_CLUSTERS at another disk",
        )
    kept = state.kept_logs(supervisor.folder.name)
    return ComponentFailed(f"{name} ended\n{tail}", f"more is in {name}.log; a start that failed keeps it in {kept}")
