"""Builders of what the tests of the operator's pure parts are fed with: specs, pods, groups at any state."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hpu_engine.contract import ControlState, ModelIdentity, Phase, PlanInput, RankState, WarmUp
from hpu_operator.api.inference import Spec
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.observed import Control, Event, Group, Pod, read_pod
from hpu_operator.domain.owner import Owner

NOW = datetime(2026, 11, 30, 12, 20, 0, tzinfo=UTC)
OWNER = Owner("team", "smol", "uid-1")
REVISION = "aaaa1111"
OLD_REVISION = "bbbb2222"
RECORDINGS = Path(__file__).parent / "recordings" / "kubelet-1.37"


def spec(**changes: Any) -> Spec:
    """A valid spec; `changes` are top-level fields as JSON."""
    return Spec.model_validate({"model": {"uri": "pvc://models/smollm2"}} | changes)


def control(phase: Phase, *, done: int = 0, total: int = 0, idle_seconds: float = 0.0, **changes: Any) -> ControlState:
    rank = RankState(rank=0, phase=phase, heartbeat_age_seconds=None, warm_up=WarmUp(done=done, total=total))
    state = ControlState(
        phase=phase,
        seconds_since_progress=idle_seconds,
        uptime_seconds=30,
        model=ModelIdentity(served_name="smol", path="/mnt/model/smollm2"),
        plan_input=PlanInput(device="cpu", block_size=128, max_num_seqs=64, max_batched_tokens=256),
        ranks=(rank,),
        engine_version="0",
    )
    return state.model_copy(update=changes)


def recorded(case: str, *, control: Control = None, age: timedelta = timedelta(minutes=5)) -> Pod:
    """A pod whose status and events a real kubelet wrote."""
    data = json.loads((RECORDINGS / f"{case}.json").read_text())
    metadata: dict[str, Any] = {
        "name": "smol-0",
        "uid": "pod-uid",
        "creationTimestamp": (NOW - age).isoformat(),
        "labels": {"serving.hpu.dev/in-service": "true"},
    }
    if "deletionTimestamp" in data:
        metadata["deletionTimestamp"] = data["deletionTimestamp"]
    events = [Event(event["type"], event["reason"], event["message"]) for event in data.get("events", [])]
    return read_pod({"metadata": metadata, "status": data["status"]}, control, events)


def pod(
    *,
    ready: bool = True,
    in_service: bool = True,
    deleting: bool = False,
    name: str = "smol-0",
    status: dict[str, Any] | None = None,
    control: Control = None,
    left_service_at: datetime | None = None,
    events: tuple[Event, ...] = (),
    age: timedelta = timedelta(minutes=5),
) -> Pod:
    """A scheduled pod whose container runs."""
    running: dict[str, Any] = {
        "phase": "Running",
        "podIP": "198.51.100.7",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": ready,
                "restartCount": 0,
                "state": {"running": {"startedAt": (NOW - age).isoformat()}},
                "lastState": {},
            }
        ],
    }
    return Pod(
        name=name,
        uid=f"uid-of-{name}",
        created=NOW - age,
        deleting=deleting,
        in_service=in_service,
        left_service_at=left_service_at,
        status=running if status is None else status,
        control=control,
        events=events,
    )


def group(index: int, revision: str = REVISION, *pods: Pod, leaving: bool = False, attempt: int = 0) -> Group:
    """A group of one pod; without `pods`, of a ready one."""
    name = f"smol-{revision}-{index}-{attempt}"
    return Group(
        id=GroupId(index, revision, attempt),
        stateful_set_uid=None if leaving else f"uid-of-{name}",
        stateful_set_name=None if leaving else name,
        created=NOW - timedelta(minutes=5),
        expected_pods=0 if leaving else 1,
        deleting=leaving,
        pods=pods or (pod(name=f"{name}-0"),),
    )
