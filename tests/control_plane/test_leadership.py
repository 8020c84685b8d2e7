"""One operator at work at a time: followed when it dies, at rest while the API server is away, ended when replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from hpu_operator.kube.kinds import INFERENCE, LEASE, SERVICE
from hpu_operator.runtime.leadership.lease import DURATION_SECONDS
from tests.cluster.handle import ControlPlane
from tests.control_plane.admin import Admin
from tests.control_plane.audit import Audit, audit_once_settled
from tests.control_plane.conftest import OperatorHandle, inference
from tests.control_plane.looks import delete_and_see_it_made_again, eventually, pods_of, ready
from tests.control_plane.nodes import TestNode
from tests.control_plane.operator_process import process
from tests.control_plane.scripted_control import ScriptedControl

OUTAGE_SECONDS = float(os.environ.get("HPU_OUTAGE_SECONDS", str(DURATION_SECONDS + 3)))
"""Longer than a lease lasts; `HPU_OUTAGE_SECONDS=60` is a minute."""


def start_controllers_afresh(control_plane: ControlPlane) -> None:
    """After an outage they back off for up to a minute, which is no matter of the operator's."""
    control_plane.restart("controllers")
    control_plane.restart("scheduler")


async def holder(admin: Admin, namespace: str) -> str:
    lease = await admin.get(LEASE, namespace, "hpu-operator")
    return str(lease["spec"].get("holderIdentity") or "") if lease else ""


@pytest.mark.timeout(300)
async def test_while_the_api_server_is_away_nobody_restarts_and_afterwards_nothing_is_written(
    control_plane: ControlPlane,
    admin: Admin,
    namespace: str,
    node: TestNode,
    control: ScriptedControl,
    operator: OperatorHandle,
    tmp_path: Path,
) -> None:
    """Away for longer than a lease lasts: the one process rests, and goes on with what it finds."""
    async with process(operator, control, tmp_path / "log") as running:
        await admin.create(INFERENCE, namespace, inference(replicas=2))
        await ready(admin, namespace)
        before = await pods_of(admin, namespace)
        audit = await audit_once_settled(control_plane.audit_log, namespace)
        control_plane.kill("apiserver")
        await asyncio.sleep(OUTAGE_SECONDS)
        await asyncio.to_thread(control_plane.restart, "apiserver")
        await asyncio.to_thread(start_controllers_afresh, control_plane)
        afterwards = Audit(control_plane.audit_log, namespace)
        await eventually("the lease renewed", lambda: renewed(afterwards))
        await asyncio.sleep(10)
        assert running.returncode is None, "the process went through it"
        assert await pods_of(admin, namespace) == before
        assert audit.writes() == []
        await admin.merge(INFERENCE, namespace, "smol", {"spec": {"replicas": 3}})
        await ready(admin, namespace, generation=2)
        assert before.items() <= (await pods_of(admin, namespace)).items()


async def renewed(audit: Audit) -> bool:
    return any(write.code < 300 for write in audit.writes(leases=True))


@pytest.mark.timeout(480)
async def test_a_leader_killed_is_followed_by_the_standby_which_writes_nothing(
    control_plane: ControlPlane,
    admin: Admin,
    namespace: str,
    node: TestNode,
    control: ScriptedControl,
    operator: OperatorHandle,
    tmp_path: Path,
) -> None:
    async with (
        process(operator, control, tmp_path / "first", "first") as first,
        process(operator, control, tmp_path / "second", "second") as second,
    ):
        await admin.create(INFERENCE, namespace, inference(replicas=2))
        await ready(admin, namespace)
        leads = await holder(admin, namespace)
        leader, standby = (first, "second") if leads == "first" else (second, "first")
        before = await pods_of(admin, namespace)
        audit = await audit_once_settled(control_plane.audit_log, namespace)
        leader.send_signal(signal.SIGKILL)

        async def followed() -> bool:
            return await holder(admin, namespace) == standby

        await eventually("the standby leads", followed)
        await asyncio.sleep(8)
        assert audit.writes() == []
        assert await pods_of(admin, namespace) == before
        await admin.merge(INFERENCE, namespace, "smol", {"spec": {"replicas": 3}})
        await ready(admin, namespace, generation=2)
        assert before.items() <= (await pods_of(admin, namespace)).items()


@pytest.mark.timeout(480)
async def test_a_deletion_that_no_watch_told_is_found(
    control_plane: ControlPlane, admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    """The API server restarts with an empty watch cache, and a Service is deleted before kopf lists again."""
    await operator.start_as_a_kubelet_does()
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    control_plane.kill("apiserver")
    await asyncio.to_thread(control_plane.restart, "apiserver")
    await delete_and_see_it_made_again(admin, namespace, SERVICE, "smol-ranks")
    await asyncio.to_thread(start_controllers_afresh, control_plane)


@pytest.mark.timeout(480)
async def test_two_operators_one_works_and_the_other_takes_over(
    control_plane: ControlPlane, admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    first, first_task = await operator.start(identity="first")
    await admin.create(INFERENCE, namespace, inference())
    await ready(admin, namespace)
    await operator.start(identity="second")
    before = await pods_of(admin, namespace)
    first.stop()
    assert await asyncio.wait_for(first_task, 60) == 0
    await admin.create(INFERENCE, namespace, inference("later"))
    await ready(admin, namespace, "later")
    assert before.items() <= (await pods_of(admin, namespace)).items()


async def test_a_lost_lease_ends_the_process(
    control_plane: ControlPlane, admin: Admin, namespace: str, operator: OperatorHandle
) -> None:
    _, task = await operator.start()

    async def held() -> bool:
        return await admin.get(LEASE, namespace, "hpu-operator") is not None

    await eventually("the lease", held)
    await admin.merge(LEASE, namespace, "hpu-operator", {"spec": {"holderIdentity": "usurper"}})
    assert await asyncio.wait_for(task, 60) == 1
