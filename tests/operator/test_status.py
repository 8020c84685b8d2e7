"""What status says: true, stable, and about the generation it names."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_engine.contract import FailureReason, Phase, TerminationMessage
from hpu_operator.api.crd import structural_schema
from hpu_operator.api.inference import Status
from hpu_operator.api.reasons import CATALOGUE, Reason, is_failure
from hpu_operator.domain.diagnosis.questions import Diagnosis
from hpu_operator.domain.facts import Facts
from hpu_operator.domain.observed import Group, Observed, Pod
from hpu_operator.domain.rollout.decide import Wanted, learn
from hpu_operator.domain.rollout.slots import is_settled, slots
from hpu_operator.domain.status.conditions import Situation, Subject
from hpu_operator.domain.status.document import (
    build_status,
    invalid_status,
    leaving_status,
    only_progress,
)
from tests.operator.objects import NOW, OLD_REVISION, REVISION, control, group, pod, recorded, spec
from tests.operator.simulation import restarted

SUBJECT = Subject("team", "smol", 7)


def status(
    *groups: Group,
    replicas: int = 2,
    problem: Diagnosis | None = None,
    previous: dict[str, Any] | None = None,
    target: str = REVISION,
) -> dict[str, Any]:
    seen = Situation(SUBJECT, spec(replicas=replicas), REVISION, target, "engine:1", Observed(groups), problem)
    return build_status(seen, previous or {}, NOW)


def conditions(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {item["type"]: (item["status"], item["reason"]) for item in found["conditions"]}


def message(found: dict[str, Any], kind: str) -> str:
    return next(str(item["message"]) for item in found["conditions"] if item["type"] == kind)


def starting(index: int, phase: Phase = Phase.LOADING, revision: str = REVISION, **progress: int) -> Group:
    return group(index, revision, pod(ready=False, control=control(phase, **progress)))


def failing(index: int, case: str, revision: str = REVISION) -> Group:
    return group(index, revision, pod(ready=False, status=dict(recorded(case).status)))


def test_ready_when_every_group_of_this_revision_answers() -> None:
    found = status(group(0), group(1))
    assert conditions(found) == {
        "Accepted": ("True", "Accepted"),
        "Available": ("True", "Answering"),
        "Progressing": ("False", "Complete"),
        "Ready": ("True", "Answering"),
        "WarmedUp": ("True", "WarmedUp"),
    }
    assert (found["replicas"], found["readyReplicas"], found["updatedReplicas"]) == (2, 2, 2)


def test_an_object_that_is_being_deleted_is_not_ready_however_ready_its_pods_are() -> None:
    before = status(group(0), group(1))
    found = leaving_status(SUBJECT, Observed((group(0), group(1))), before, NOW)
    assert conditions(found) == {
        "Available": ("False", "Draining"),
        "Progressing": ("True", "Draining"),
        "Ready": ("False", "Draining"),
    }
    assert (found["replicas"], found["readyReplicas"], found["url"]) == (2, 0, before["url"])
    leaving = replace(pod(deleting=True), grace_seconds=80)
    told = leaving_status(SUBJECT, Observed((group(0, REVISION, leaving, leaving=True),)), found, NOW)
    assert message(told, "Ready") == (
        "the object is being deleted: its pods are leaving (up to 60 s for running requests)"
    )
    assert leaving_status(SUBJECT, Observed(), told, NOW)["replicas"] == 0


def test_ready_is_never_about_pods_of_an_old_revision() -> None:
    found = conditions(status(group(0, OLD_REVISION), group(1, OLD_REVISION)))
    assert found["Ready"] == ("False", "RollingOut")
    assert found["Available"] == ("True", "Answering")
    assert found["WarmedUp"][0] == "False"


def test_groups_that_go_back_to_another_revision_are_not_called_updated_or_ready() -> None:
    found = status(group(0, OLD_REVISION), group(1, OLD_REVISION), target=OLD_REVISION)
    assert (found["readyReplicas"], found["updatedReplicas"], found["updatedReadyReplicas"]) == (2, 0, 0)
    assert found["revision"] == REVISION
    said = conditions(found)
    assert said["Ready"] == said["WarmedUp"] == ("False", "RollingOut")
    assert said["Available"] == ("True", "Answering")
    assert message(found, "Ready") == f"groups go to revision {OLD_REVISION}, not to {REVISION} of the spec"


def test_on_the_way_back_status_says_what_is_missing_and_where_the_groups_go() -> None:
    found = status(starting(0, revision=OLD_REVISION), group(1), target=OLD_REVISION)
    assert (found["updatedReplicas"], found["updatedReadyReplicas"]) == (1, 1)
    assert conditions(found)["Ready"] == ("False", "Loading")
    assert message(found, "Ready").endswith(f"; groups go to revision {OLD_REVISION}, not to {REVISION} of the spec")


def test_every_condition_is_about_the_generation_it_names() -> None:
    assert {item["observedGeneration"] for item in status(group(0))["conditions"]} == {7}
    assert status(group(0))["observedGeneration"] == 7


def test_warming_up_shows_how_far() -> None:
    found = status(starting(0, Phase.WARMING_UP, done=37, total=72), group(1))
    assert conditions(found)["WarmedUp"] == ("False", "WarmingUp")
    assert "37/72" in message(found, "WarmedUp")
    assert found["warmUp"] == "37/72"


def test_warm_up_is_that_of_the_group_that_is_furthest_behind() -> None:
    found = status(starting(0, Phase.WARMING_UP, done=70, total=72), starting(1, Phase.WARMING_UP, done=3, total=72))
    assert found["warmUp"] == "3/72"


def test_warm_up_is_kept_by_an_operator_that_has_asked_nobody_yet() -> None:
    """It has just started: what it does not know is no news, and writing it would be two writes for nothing."""
    before = status(starting(0, Phase.READY, done=7, total=7), group(1))
    assert before["warmUp"] == "7/7"
    assert status(group(0), group(1), previous=before)["warmUp"] == "7/7"
    another = before | {"revision": OLD_REVISION}
    assert "warmUp" not in status(group(0), group(1), previous=another), "of another revision"
    behind = status(starting(0, Phase.WARMING_UP, done=2, total=7), group(1), previous=before)
    assert behind["warmUp"] == "2/7", "who answers is believed"


def test_warmed_up_but_not_yet_probed() -> None:
    found = conditions(status(starting(0, Phase.READY), replicas=1))
    assert found["WarmedUp"] == ("True", "WarmedUp")
    assert found["Ready"] == ("False", "Starting")


def test_a_failure_ends_progress_and_speaks_for_the_object() -> None:
    found = status(failing(0, "image-pull"), starting(1))
    assert conditions(found)["Progressing"] == ("False", "ImagePullFailed")
    assert conditions(found)["Ready"] == ("False", "ImagePullFailed")
    assert message(found, "Ready").endswith("; group 1: Loading")


def test_a_failure_of_an_old_group_is_named_beside_that_of_the_new_revision() -> None:
    lost = TerminationMessage(reason=FailureReason.WORKER_LOST, message="gone").encode().decode()
    ended = dict(recorded("crashloop-backoff").status)
    container = {**ended["containerStatuses"][0], "lastState": {"terminated": {"exitCode": 5, "message": lost}}}
    old = group(1, OLD_REVISION, pod(status=ended | {"containerStatuses": [container]}))
    found = status(failing(0, "image-pull"), old)
    assert conditions(found)["Ready"] == ("False", "ImagePullFailed")
    assert message(found, "Ready").endswith("; group 1: WorkerLost")


def test_of_many_groups_the_gravest_are_named_and_the_rest_counted() -> None:
    others = [starting(index) for index in range(1, 30)]
    found = status(failing(0, "image-pull"), *others, failing(30, "oom-killed"), replicas=31)
    assert conditions(found)["Ready"] == ("False", "OutOfMemory")
    tail = "; group 0: ImagePullFailed; group 1: Loading; group 2: Loading; group 3: Loading; and 26 more groups"
    assert message(found, "Ready").endswith(tail)


def test_nobody_is_told_that_requests_are_running_where_that_is_not_known() -> None:
    leaving = replace(pod(deleting=True), grace_seconds=80)
    told = message(status(group(0, OLD_REVISION, leaving, leaving=True), replicas=1), "Ready")
    assert told == "group 0: its old pods are leaving (up to 60 s for running requests)"


def test_part_of_the_groups_makes_available_but_not_ready() -> None:
    found = status(group(0), failing(1, "oom-killed"))
    assert conditions(found)["Available"] == ("True", "Answering")
    assert message(found, "Available") == "1 of 2 groups answer"
    assert conditions(found)["Ready"] == ("False", "OutOfMemory")


def test_a_group_being_replaced() -> None:
    gone = group(0, OLD_REVISION, pod(deleting=True), leaving=True)
    found = conditions(status(gone, replicas=1))
    assert found["Ready"] == ("False", "Draining")
    assert found["Progressing"] == ("True", "Draining")
    assert conditions(status(replicas=1))["Ready"] == ("False", "RollingOut")


def test_a_group_between_crashes_is_available_but_not_ready() -> None:
    crashed = dict(recorded("crashloop-backoff").status)
    crashed["conditions"] = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
    running = {"running": {"startedAt": (NOW - timedelta(seconds=5)).isoformat()}}
    crashed["containerStatuses"] = [{**crashed["containerStatuses"][0], "restartCount": 5, "state": running}]
    found = conditions(status(group(0, REVISION, pod(status=crashed)), replicas=1))
    assert found["Ready"] == ("False", "CrashLoop")
    assert found["Available"][0] == "True"


def test_a_rollout_is_not_complete_while_a_replaced_group_is_still_there() -> None:
    found = status(group(0), group(0, OLD_REVISION), group(1))
    assert conditions(found)["Ready"] == ("True", "Answering")
    assert conditions(found)["Progressing"] == ("True", "Draining")
    assert message(found, "Progressing") == "1 replaced groups are leaving"
    assert (found["replicas"], found["readyReplicas"], found["updatedReplicas"]) == (2, 2, 2)


def test_scaled_to_zero_is_not_ready_and_not_progressing() -> None:
    found = conditions(status(replicas=0))
    assert found["Ready"] == ("False", "ScaledToZero")
    assert found["Progressing"] == ("False", "ScaledToZero")
    leaving = conditions(status(group(0, REVISION, pod(deleting=True), leaving=True), replicas=0))
    assert leaving["Progressing"] == ("True", "Draining")


@pytest.mark.parametrize("reason", [Reason.NAME_TAKEN, Reason.REJECTED, Reason.WAITING_FOR_CLEANUP])
def test_a_child_that_cannot_be_made(reason: Reason) -> None:
    found = conditions(status(problem=Diagnosis(reason, "Service smol")))
    assert found["Accepted"] == ("False", reason.value)
    assert found["Ready"] == ("False", reason.value)


def test_an_invalid_spec_keeps_what_was_true_of_the_pods() -> None:
    before = status(group(0), group(1))
    found = invalid_status(SUBJECT, Diagnosis(Reason.INVALID_SPEC, "spec.replicas: wrong"), before, NOW)
    assert conditions(found)["Ready"] == ("False", "InvalidSpec")
    assert found["readyReplicas"] == 2


def test_a_time_changes_only_with_its_status() -> None:
    first = status(starting(0), replicas=1)
    for item in first["conditions"]:
        item["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    second = status(group(0), replicas=1, previous=first)
    times = {item["type"]: item["lastTransitionTime"] for item in second["conditions"]}
    assert times["Accepted"] == "2026-01-01T00:00:00Z"
    assert times["Ready"] == "2026-11-30T12:20:00Z"


def test_progress_is_told_from_transitions() -> None:
    early = status(starting(0, Phase.WARMING_UP, done=1, total=72), replicas=1)
    later = status(starting(0, Phase.WARMING_UP, done=2, total=72), replicas=1, previous=early)
    ready = status(group(0), replicas=1, previous=early)
    assert early != later
    assert only_progress(early, later)
    assert not only_progress(early, ready)


def test_the_end_of_a_warm_up_is_no_mere_progress() -> None:
    """The pod is ready before its endpoint was asked again: nobody should read 71/72 beside that for long."""
    told = status(group(0), replicas=1)
    behind, ahead, done = (told | {"warmUp": f"{number}/72"} for number in (70, 71, 72))
    assert only_progress(behind, ahead)
    assert not only_progress(ahead, done)


def test_the_url_the_model_and_the_selector() -> None:
    found = status(group(0))
    assert found["url"] == "http://smol.team.svc:8000"
    assert found["servedName"] == "smol"
    assert found["selector"] == "serving.hpu.dev/name=smol,apps.kubernetes.io/pod-index=0"


def any_pod(choice: str) -> Pod:
    return {
        "ready": pod(),
        "loading": pod(ready=False, control=control(Phase.LOADING)),
        "warming": pod(ready=False, control=control(Phase.WARMING_UP, done=1, total=3)),
        "warm": pod(ready=False, control=control(Phase.READY)),
        "broken": pod(ready=False, status=dict(recorded("crashloop-backoff").status)),
        "leaving": pod(in_service=False),
        "deleting": pod(deleting=True),
        "restarted": restarted("smol-0", NOW),
    }[choice]


choices = st.sampled_from(["ready", "loading", "warming", "warm", "broken", "leaving", "deleting", "restarted"])
any_groups = st.lists(
    st.builds(
        lambda index, revision, choice, leaving: group(index, revision, any_pod(choice), leaving=leaving),
        st.integers(0, 3), st.sampled_from([REVISION, OLD_REVISION]), choices, st.booleans(),
    ),
    max_size=6,
    unique_by=lambda item: item.id,
)  # fmt: skip


@given(any_groups, st.integers(0, 3))
def test_whatever_is_observed_status_is_sound(groups: list[Group], replicas: int) -> None:
    found = status(*groups, replicas=replicas)
    said = conditions(found)
    allowed = structural_schema(Status)["properties"]
    assert set(found) <= set(allowed)
    assert Status.model_validate(found).model_dump(mode="json", by_alias=True, exclude_none=True) == found
    assert list(said) == sorted(said) == ["Accepted", "Available", "Progressing", "Ready", "WarmedUp"]
    assert {Reason(reason) for _, reason in said.values()} <= set(CATALOGUE)
    held = slots(replicas, REVISION, groups)
    settled = bool(held) and all(slot.successor and is_settled(slot.successor, NOW) for slot in held)
    assert (said["Ready"][0] == "True") == settled, "Ready is what a rollout waits for"
    assert settled == bool(learn(Wanted(replicas, REVISION, {REVISION: Facts()}), Observed(tuple(groups)), NOW))
    assert not settled or all(slot.answers for slot in held)
    assert (said["Ready"][0] == "True") <= (said["Available"][0] == "True")
    assert not (said["Progressing"][0] == "True" and is_failure(Reason(said["Progressing"][1])))
    assert status(*groups, replicas=replicas, previous=found) == found, "an unchanged truth is an unchanged object"
