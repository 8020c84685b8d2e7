"""A running control plane as a test holds it: where to reach it, how to break it, how to act as a service account."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import control_plane, credentials
from tests.cluster.api import Api, ApiError, wait_for
from tests.cluster.errors import ComponentFailed
from tests.cluster.processes import Supervisor
from tests.cluster.state import Cluster


@dataclass(frozen=True)
class ControlPlane:
    """etcd, API server, controller manager and scheduler.

    `kubeconfig` is the administrator's: exempt from RBAC and from priority and fairness, so what is under test gets one
    of `service_account_kubeconfig` instead.
    """

    cluster: Cluster

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.kubeconfig

    @property
    def url(self) -> str:
        return self.cluster.url

    @property
    def audit_log(self) -> Path:
        """One JSON object per line, level Metadata, stage ResponseComplete (ResponseStarted for watches)."""
        return self.cluster.audit_log

    @property
    def binaries(self) -> Path:
        return self.cluster.binaries

    @property
    def supervisor(self) -> Supervisor:
        return Supervisor(self.cluster.folder)

    @property
    def api(self) -> Api:
        return Api(self.kubeconfig)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 120.0) -> str:
        """Run kubectl as the administrator; its output. ComponentFailed with its complaint, or when it has none."""
        try:
            done = subprocess.run(
                [str(self.binaries / "kubectl"), *arguments],
                env={**os.environ, **self.cluster.kubectl_environment()},
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ComponentFailed(
                f"kubectl {' '.join(arguments)}: no answer in {timeout_seconds:.0f} s", "see the API server's log"
            ) from None
        if done.returncode:
            raise ComponentFailed(
                f"kubectl {' '.join(arguments)}: {done.stderr.strip()}", "see the answer of the API server"
            )
        return done.stdout

    def kill(self, component: str) -> None:
        """kill -9 of etcd, apiserver, controllers, scheduler or any of `components()`; returns when it has gone."""
        self.supervisor.kill(component)

    def restart(self, component: str) -> None:
        """Start a component again with its arguments (after a kill -9 if it still runs); waits for the API."""
        self.supervisor.restart(component)
        if component in ("etcd", "apiserver", "relay"):
            control_plane.wait_until_served(self.cluster, self.supervisor)

    def components(self) -> dict[str, bool]:
        """Every process of the cluster, and whether it lives."""
        return {name: self.supervisor.alive(name) for name in self.supervisor.names()}

    def log(self, component: str) -> str:
        return self.supervisor.log(component).read_text(errors="replace")

    def create_namespace(self, name: str) -> None:
        """Create a namespace and wait for the service account that pods in it need."""
        self.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        # After an absence of the API server the controllers look for it again at growing intervals.
        wait_for(f"the default service account of {name}", lambda: self.api.exists(path), timeout_seconds=120)

    def delete_namespace(self, name: str) -> None:
        """Start the deletion; the controllers finish it. Missing is fine."""
        try:
            self.api.request("DELETE", f"/api/v1/namespaces/{name}")
        except ApiError as error:
            if error.status != 404:
                raise

    def service_account_kubeconfig(self, namespace: str, name: str, *, lifetime_seconds: int = 86400) -> Path:
        """A kubeconfig that acts as a service account; the account is created when it is missing."""
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        if not self.api.exists(f"{accounts}/{name}"):
            self.api.request("POST", accounts, {"metadata": {"name": name}})
        request: dict[str, object] = {"spec": {"expirationSeconds": lifetime_seconds}}
        answer = self.api.request("POST", f"{accounts}/{name}/token", request)
        status = answer["status"]
        assert isinstance(status, dict)
        path = self.cluster.folder / f"sa-{namespace}-{name}.kubeconfig"
        credentials.write_kubeconfig(
            path,
            server=self.url,
            authority=(self.cluster.pki / "ca.crt").read_bytes(),
            user=f"{namespace}-{name}",
            token=status["token"],
            namespace=namespace,
        )
        return path
