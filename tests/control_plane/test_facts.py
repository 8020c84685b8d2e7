"""Facts about a revision's past, on the records of a real API server."""

from __future__ import annotations

import pytest

from hpu_operator.domain.facts import last_good, read_facts
from hpu_operator.domain.names import COMPLETED_ANNOTATION
from hpu_operator.kube.client import connect
from hpu_operator.kube.kinds import INFERENCE, RECORD
from hpu_operator.kube.port import Conflict, Live
from hpu_operator.metrics import Metrics
from tests.control_plane.admin import Admin
from tests.control_plane.conftest import OperatorHandle, inference
from tests.control_plane.looks import ready
from tests.control_plane.nodes import TestNode


async def record_of(admin: Admin, namespace: str, live: Live) -> Live:
    found = await admin.get(RECORD, namespace, f"smol-{live['status']['revision']}")
    assert found is not None
    return found


async def test_a_completed_revision_is_the_last_good_one_also_after_a_return_to_it(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    first = await record_of(admin, namespace, await ready(admin, namespace))
    for generation, settings in ((2, {"maxNumSeqs": 8}), (3, {"maxNumSeqs": 64})):
        await admin.merge(INFERENCE, namespace, "smol", {"spec": {"engine": settings}})
        current = await record_of(admin, namespace, await ready(admin, namespace, generation=generation))
        records = await admin.list(RECORD, namespace, labelSelector=RECORD.selector)
        facts = {record["metadata"]["name"]: read_facts(record) for record in records}
        assert last_good(facts) == current["metadata"]["name"]
    assert current["metadata"]["uid"] == first["metadata"]["uid"], "the same record, with a newer fact"
    assert {key: current[key] for key in ("data", "revision")} == {key: first[key] for key in ("data", "revision")}


async def test_annotations_are_set_on_exactly_the_version_that_was_read(
    admin: Admin, namespace: str, node: TestNode, operator: OperatorHandle
) -> None:
    await operator.start()
    await admin.create(INFERENCE, namespace, inference())
    live = await record_of(admin, namespace, await ready(admin, namespace))
    await operator.stop()
    client = await connect(Metrics())
    try:
        stamp = {COMPLETED_ANNOTATION: "2030-01-01T00:00:00Z"}
        answer = await client.annotate(RECORD, live, stamp)
        assert answer["metadata"]["annotations"] == stamp
        assert {key: answer["metadata"][key] for key in ("labels", "ownerReferences")} == {
            key: live["metadata"][key] for key in ("labels", "ownerReferences")
        }
        with pytest.raises(Conflict):
            await client.annotate(RECORD, live, stamp)
        await admin.delete(RECORD, namespace, live["metadata"]["name"])
        with pytest.raises(Conflict):
            await client.annotate(RECORD, answer, stamp)
        fresh = {"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": {"name": live["metadata"]["name"]}}
        await admin.create(RECORD, namespace, {**fresh, "revision": 1, "data": {}})
        with pytest.raises(Conflict):
            await client.annotate(RECORD, answer, stamp)
    finally:
        await client.close()
