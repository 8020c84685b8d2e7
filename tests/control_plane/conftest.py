"""Fixtures of the control-plane tests: the CRD, an administrator, a node, a scripted control endpoint, an operator.

The operator runs in the test's own process with a service account's token and exactly the rights of
`hpu_operator.kube.permissions`, in the test's namespace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from hpu_operator.api.crd import CRD_NAME, crd_yaml
from hpu_operator.kube.kinds import INFERENCE
from hpu_operator.kube.permissions import IN_LEASE_NAMESPACE, IN_SERVED_NAMESPACES, Permission
from hpu_operator.process import Operator
from hpu_operator.settings import Settings
from tests.cluster import ports
from tests.cluster.api import wait_for
from tests.cluster.handle import ControlPlane
from tests.control_plane.admin import Admin
from tests.control_plane.nodes import TestNode
from tests.control_plane.scripted_control import ScriptedControl

_CRD_PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"


@pytest.fixture(scope="session")
def crd(control_plane: ControlPlane) -> None:
    """The CRD as `hpu-operator crd` prints it, established."""
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=crd_yaml())
    wait_for("the API of the CRD", lambda: control_plane.api.exists(INFERENCE.path("default")), timeout_seconds=60)


@pytest_asyncio.fixture
async def admin(control_plane: ControlPlane) -> AsyncIterator[Admin]:
    held = Admin(control_plane.kubeconfig)
    try:
        yield held
    finally:
        await held.close()


@pytest_asyncio.fixture
async def control() -> AsyncIterator[ScriptedControl]:
    async with ScriptedControl() as held:
        yield held


@pytest_asyncio.fixture
async def node(admin: Admin, namespace: str) -> AsyncIterator[TestNode]:
    async with TestNode(admin, namespace) as held:
        yield held


def role(name: str, permissions: tuple[Permission, ...]) -> dict[str, Any]:
    rules = [{"apiGroups": [p.group], "resources": [p.resource], "verbs": list(p.verbs)} for p in permissions]
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules}


async def grant(admin: Admin, namespace: str) -> None:
    """The operator's rights, to the service account `operator`, in one namespace."""
    root = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    await admin.request("POST", f"{root}/roles", role("operator", IN_SERVED_NAMESPACES + IN_LEASE_NAMESPACE))
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": namespace}],
    }
    await admin.request("POST", f"{root}/rolebindings", binding)


def free_port() -> int:
    return ports.choose(1)[0]


def settings_for(namespace: str, **changes: Any) -> Settings:
    chosen: dict[str, Any] = {
        "namespaces": (namespace,),
        "engine_image_cpu": "engine:test",
        "listen_host": "127.0.0.1",
        "listen_port": free_port(),
        "lease_namespace": namespace,
        "lease_name": "hpu-operator",
        "identity": "tests",
    }
    return Settings(**(chosen | changes))


class OperatorHandle:
    """Starts and stops operators in this process; one at a time unless a test wants two."""

    def __init__(self, namespace: str, control: ScriptedControl, kubeconfig: Path) -> None:
        self.namespace = namespace
        self.kubeconfig = kubeconfig
        self._control = control
        self._running: list[tuple[Operator, asyncio.Task[int]]] = []
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self, **changes: Any) -> tuple[Operator, asyncio.Task[int]]:
        operator = Operator(settings_for(self.namespace, **changes), self._control.url_of)
        task = asyncio.create_task(operator.run())
        self._running.append((operator, task))
        return operator, task

    async def start_as_a_kubelet_does(self) -> None:
        """And start another whenever one ends by itself, as kopf makes it do after some faults of an API server."""
        _, task = await self.start()

        async def supervise(task: asyncio.Task[int]) -> None:
            while await asyncio.shield(task) != 0:
                await asyncio.sleep(1)
                self._running.clear()
                _, task = await self.start()

        self._supervisor = asyncio.create_task(supervise(task))

    async def stop(self) -> list[int]:
        """Stop all of them in order; their exit codes."""
        if self._supervisor:
            self._supervisor.cancel()
        running, self._running = self._running, []
        for operator, _ in running:
            operator.stop()
        return list(await asyncio.gather(*(task for _, task in running)))


@pytest_asyncio.fixture
async def operator(
    control_plane: ControlPlane,
    crd: None,
    admin: Admin,
    namespace: str,
    control: ScriptedControl,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[OperatorHandle]:
    await grant(admin, namespace)
    kubeconfig = control_plane.service_account_kubeconfig(namespace, "operator")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    handle = OperatorHandle(namespace, control, kubeconfig)
    try:
        yield handle
    finally:
        await handle.stop()


def inference(name: str = "smol", **spec: Any) -> dict[str, Any]:
    """A valid object; `spec` are top-level fields that differ."""
    return {
        "apiVersion": "serving.hpu.dev/v1alpha1",
        "kind": "HpuInference",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "file:///model"}} | spec,
    }
