"""A hundred objects, the longest names, the whole cluster, a namespace that goes: what one object does not show."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hpu_operator.domain import names
from hpu_operator.kube.kinds import INFERENCE, POD, RECORD, SERVICE, STATEFUL_SET
from hpu_operator.kube.permissions import IN_LEASE_NAMESPACE, IN_SERVED_NAMESPACES
from tests.cluster.handle import ControlPlane
from tests.control_plane.admin import Admin
from tests.control_plane.audit import Audit
from tests.control_plane.conftest import OperatorHandle, inference, role
from tests.control_plane.looks import eventually, ready
from tests.control_plane.nodes import TestNode

OBJECTS = 100


@pytest_asyncio.fixture
async def cluster_wide(admin: Admin, namespace: str) -> AsyncIterator[None]:
    """The operator's rights in all namespaces, as the chart gives them in cluster-wide mode."""
    root = "/apis/rbac.authorization.k8s.io/v1"
    cluster_role = {**role(namespace, IN_SERVED_NAMESPACES), "kind": "ClusterRole"}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": namespace}],
    }
    await admin.request("POST", f"{root}/clusterroles", cluster_role)
    await admin.request("POST", f"{root}/clusterrolebindings", binding)
    yield
    await admin.request("DELETE", f"{root}/clusterrolebindings/{namespace}")
    await admin.request("DELETE", f"{root}/clusterroles/{namespace}")


@pytest.mark.timeout(480)
async def test_a_hundred_objects_get_children_and_status(
    control_plane: ControlPlane, admin: Admin, namespace: str, operator: OperatorHandle, cluster_wide: None
) -> None:
    """Cluster-wide. No node: every object ends at the same true reason."""
    await operator.start(namespaces=())
    audit = Audit(control_plane.audit_log, namespace)
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(admin.create(INFERENCE, namespace, inference(f"m{n}")) for n in range(OBJECTS)))

    async def all_told() -> bool:
        objects = await admin.list(INFERENCE, namespace)
        return len(objects) == OBJECTS and all(
            (item.get("status") or {}).get("observedGeneration") == item["metadata"]["generation"] for item in objects
        )

    await eventually("every status", all_told)
    print(
        f"{OBJECTS} objects: children and status after {time.monotonic() - began:.1f} s, "
        f"{time.process_time() - cpu:.1f} s of CPU for operator and test"
    )
    assert len(await admin.list(STATEFUL_SET, namespace)) == OBJECTS
    assert len(await admin.list(SERVICE, namespace)) == 2 * OBJECTS
    records = await admin.list(RECORD, namespace, labelSelector=names.RECORD_SELECTOR)
    assert len(records) == OBJECTS
    written = Counter((write.resource, write.name) for write in audit.writes() if write.resource != "events")
    children = {place: count for place, count in written.items() if place[0] != "hpuinferences/status"}
    assert set(children.values()) == {1}, "every child is written exactly once"
    assert all(write.code < 400 for write in audit.writes())


@pytest.mark.timeout(480)
async def test_names_of_every_length_work_from_object_to_pod(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    lengths = (1, 35, 36, 40, 52, 63)
    # Two groups, so that a pod's index has its place in the name as well.
    for length in lengths:
        await admin.create(INFERENCE, namespace, inference("n" * length, replicas=2))
    for length in lengths:
        await ready(admin, namespace, "n" * length)
    for pod in await admin.list(POD, namespace):
        assert len(pod["metadata"]["name"]) <= 63
        assert pod["metadata"]["labels"][names.NAME_LABEL] in {"n" * length for length in lengths}


@pytest.mark.timeout(480)
async def test_a_namespace_that_is_deleted_takes_everything_along(
    admin: Admin,
    namespace: str,
    operator: OperatorHandle,
    cluster_wide: None,
    control_plane: ControlPlane,
) -> None:
    # Without a node: the nodes of tests end the pods of one namespace, and nobody would end those of this other one.
    _, task = await operator.start(namespaces=())
    other = f"{namespace}-x"
    await asyncio.to_thread(control_plane.create_namespace, other)
    # Kubernetes looks at a namespace that ends again after half of the longest grace period among its pods.
    await admin.create(INFERENCE, other, inference(drainSeconds=0))

    async def made() -> bool:
        return len(await admin.list(STATEFUL_SET, other)) == 1

    await eventually("children", made)
    await admin.request("DELETE", f"/api/v1/namespaces/{other}")

    async def gone() -> bool:
        return not [
            item
            for item in (await admin.request("GET", "/api/v1/namespaces"))["items"]
            if item["metadata"]["name"] == other
        ]

    await eventually("the namespace gone", gone)
    assert not task.done()


async def test_no_right_is_granted_that_is_not_used(
    control_plane: ControlPlane, admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    """A life of one object uses every verb of the list but those that only protect or repair."""
    audit = control_plane.audit_log.stat().st_size
    await operator.start()
    await admin.create(INFERENCE, namespace, inference(replicas=2))
    await ready(admin, namespace)
    for generation in range(2, 15):
        change = {"spec": {"drainSeconds": generation}} if generation < 14 else {"spec": {"replicas": 1}}
        await admin.merge(INFERENCE, namespace, "smol", change)
        await ready(admin, namespace, generation=generation)
    await operator.stop()
    used = set()
    with control_plane.audit_log.open() as log:
        log.seek(audit)
        for line in log:
            event = json.loads(line)
            about = event.get("objectRef") or {}
            account = f"system:serviceaccount:{namespace}:operator"
            if event["user"]["username"] == account and about.get("namespace") == namespace:
                resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
                used.add((about.get("apiGroup", ""), resource, event["verb"]))
                assert event["responseStatus"]["code"] != 403, event["requestURI"]
    granted = {(p.group, p.resource, verb) for p in IN_SERVED_NAMESPACES + IN_LEASE_NAMESPACE for verb in p.verbs}
    # `create` is checked by an apply that finds nothing and shows as patch; finalizers protect owner references;
    # events are listed for pods that wait, which `test_truth` shows.
    silent = {(group, resource, "create") for group, resource, _ in granted if group in ("apps", "")}
    silent |= {(g, r, v) for g, r, v in granted if r == "hpuinferences/finalizers" or (r, v) == ("events", "list")}
    assert granted - used - silent == set()
    assert used <= granted
