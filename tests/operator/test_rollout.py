"""Which group is made, taken out of service or deleted next; alone, and in a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_engine.contract import Phase
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.observed import Group, Observed, Unreachable
from hpu_operator.domain.rollout.actions import CreateGroup, DeleteGroup, LeaveService, ReturnToService
from hpu_operator.domain.rollout.decide import ENDPOINT_PATIENCE, Wanted, awaits_endpoints, decide
from hpu_operator.domain.rollout.slots import is_broken
from tests.operator.objects import NOW, OLD_REVISION, REVISION, control, group, pod, recorded


def kinds(*groups: Group, replicas: int = 2, endpoints: frozenset[str] = frozenset()) -> list[tuple[str, int]]:
    actions = decide(Wanted(replicas, REVISION), Observed(groups, endpoints), NOW)
    return [(type(action).__name__, action.id.index) for action in actions]


def starting(index: int, revision: str = REVISION) -> Group:
    return group(index, revision, pod(ready=False, control=control(Phase.LOADING)))


def broken(index: int, revision: str = OLD_REVISION) -> Group:
    return group(index, revision, pod(ready=False, status=dict(recorded("crashloop-backoff").status)))


def out_of_service(index: int, revision: str = OLD_REVISION, since: datetime = NOW) -> Group:
    return group(index, revision, pod(in_service=False, name=f"g{index}", left_service_at=since))


def test_missing_groups_are_made_all_at_once() -> None:
    assert kinds() == [("CreateGroup", 0), ("CreateGroup", 1)]


def test_nothing_is_done_to_what_is_as_it_should_be() -> None:
    assert kinds(group(0), starting(1)) == []


def test_an_old_group_leaves_service_first() -> None:
    assert kinds(group(0, OLD_REVISION), group(1, OLD_REVISION)) == [("LeaveService", 0)]


def test_a_group_stays_until_its_endpoints_are_gone() -> None:
    leaving = out_of_service(0)
    assert awaits_endpoints([leaving])
    assert kinds(leaving, group(1, OLD_REVISION), endpoints=frozenset({"uid-of-g0"})) == []
    assert kinds(leaving, group(1, OLD_REVISION)) == [("DeleteGroup", 0)]


def test_endpoints_that_do_not_go_are_not_waited_for_for_ever() -> None:
    late = out_of_service(0, since=NOW - ENDPOINT_PATIENCE - timedelta(seconds=1))
    assert kinds(late, group(1, OLD_REVISION), endpoints=frozenset({"uid-of-g0"})) == [("DeleteGroup", 0)]


def test_a_new_group_waits_for_the_old_pods_to_go() -> None:
    assert kinds(group(0, OLD_REVISION, pod(deleting=True), leaving=True), group(1, OLD_REVISION)) == []


def test_a_group_that_does_not_answer_yet_waits_for_its_turn_as_well() -> None:
    leaving = group(0, OLD_REVISION, pod(deleting=True), leaving=True)
    assert kinds(leaving, starting(1, OLD_REVISION)) == []


def test_the_next_group_waits_for_the_new_one() -> None:
    assert kinds(starting(0), group(1, OLD_REVISION)) == []
    assert kinds(group(0), group(1, OLD_REVISION)) == [("LeaveService", 1)]


def test_all_broken_groups_of_an_old_revision_are_replaced_at_once() -> None:
    assert kinds(broken(0), broken(1)) == [("DeleteGroup", 0), ("DeleteGroup", 1)]


def test_a_broken_old_group_is_replaced_while_another_is_down() -> None:
    assert kinds(starting(0), broken(1)) == [("DeleteGroup", 1)]


def test_an_old_group_that_is_only_starting_is_replaced_before_one_that_answers() -> None:
    assert kinds(group(0, OLD_REVISION), starting(1, OLD_REVISION)) == [("DeleteGroup", 1)]


def test_a_broken_group_of_the_wanted_revision_is_left_to_recover_in_place() -> None:
    assert kinds(broken(0, REVISION), group(1)) == []


def test_silence_towards_the_operator_is_not_broken() -> None:
    silent = group(0, OLD_REVISION, pod(ready=False, control=Unreachable("no route")))
    assert not is_broken(silent, NOW)
    also_silent = group(1, OLD_REVISION, pod(ready=False, control=Unreachable("no route")))
    assert kinds(silent, also_silent) == [("DeleteGroup", 0)]


def test_surplus_groups_leave_in_order() -> None:
    assert kinds(group(0), group(1), replicas=1) == [("LeaveService", 1)]
    assert kinds(group(0), out_of_service(1, REVISION), replicas=1) == [("DeleteGroup", 1)]
    assert kinds(group(0), starting(1), replicas=1) == [("DeleteGroup", 1)]


def test_a_surplus_group_answers_until_the_rolled_one_does() -> None:
    """Replicas and revision changed at once, as when a file with another budget undoes a `kubectl scale`."""
    old = group(1, OLD_REVISION)
    assert kinds(group(0, OLD_REVISION), old, replicas=1) == [("LeaveService", 0)]
    assert kinds(starting(0), old, replicas=1) == []
    assert kinds(broken(0, REVISION), old, replicas=1) == []
    assert kinds(group(0), old, replicas=1) == [("LeaveService", 1)]


def test_no_more_surplus_groups_stay_than_groups_are_missing() -> None:
    old = [group(index, OLD_REVISION) for index in range(4)]
    assert kinds(*old, replicas=2) == [("LeaveService", 3), ("LeaveService", 0)]


def test_a_surplus_group_gives_its_cards_to_a_group_that_waits_for_them() -> None:
    status = dict(recorded("cards-insufficient").status)
    unschedulable = group(0, REVISION, pod(ready=False, status=status))
    assert kinds(unschedulable, group(1), replicas=1) == [("LeaveService", 1)]


def test_a_recovering_old_group_stays_while_the_new_revision_does_not_answer() -> None:
    recovering = group(1, OLD_REVISION, pod(ready=False))
    assert kinds(broken(0, REVISION), recovering) == []
    assert kinds(starting(0), recovering) == []


def test_scaling_to_zero_takes_everything_down() -> None:
    assert kinds(group(0), group(1), replicas=0) == [("LeaveService", 0), ("LeaveService", 1)]


def test_scaling_up_during_a_rollout_makes_the_new_group_at_once() -> None:
    assert ("CreateGroup", 2) in kinds(starting(0), group(1, OLD_REVISION), replicas=3)


def test_a_spec_that_is_changed_back_returns_the_group_to_service() -> None:
    assert kinds(out_of_service(0, REVISION), group(1)) == [("ReturnToService", 0)]


def test_an_older_placement_of_the_same_revision_is_taken_down() -> None:
    assert kinds(group(0, attempt=0), group(0, attempt=1), group(1)) == [("LeaveService", 0)]
    actions = decide(Wanted(2, REVISION), Observed((group(0, attempt=0), group(0, attempt=1), group(1))), NOW)
    assert actions[0].id.attempt == 0


@dataclass
class Cluster:
    """A cluster that does what it is told, slowly: each tick, some pods become ready and some leave."""

    groups: dict[GroupId, Group] = field(default_factory=dict)
    now: datetime = NOW
    in_endpoints: set[str] = field(default_factory=set)

    def step(self, replicas: int, revision: str) -> list[object]:
        observed = Observed(tuple(self.groups[key] for key in sorted(self.groups)), frozenset(self.in_endpoints))
        actions = decide(Wanted(replicas, revision), observed, self.now)
        for action in actions:
            match action:
                case CreateGroup(id_):
                    occupied = [key for key in self.groups if key.index == id_.index]
                    assert not occupied, f"{id_} is made while {occupied} holds its place"
                    self.groups[id_] = starting(id_.index, id_.revision)
                case LeaveService(id_, _):
                    self._change(id_, in_service=False, left_service_at=self.now)
                case ReturnToService(id_, _):
                    self._change(id_, in_service=True, left_service_at=None)
                case DeleteGroup(id_):
                    gone = self.groups[id_]
                    assert not any(p.ready and p.in_service for p in gone.pods), f"{id_} is deleted while it serves"
                    self._change(id_, deleting=True)
                    self.groups[id_] = replace(self.groups[id_], stateful_set_uid=None, deleting=True, expected_pods=0)
        return list(actions)

    def _change(self, id_: GroupId, **changes: object) -> None:
        held = self.groups[id_]
        self.groups[id_] = replace(held, pods=tuple(replace(p, **changes) for p in held.pods))  # type: ignore[arg-type]

    def tick(self, chosen: int) -> None:
        """One thing happens, picked by `chosen`: a pod gets ready, leaves, or endpoints catch up."""
        self.now += timedelta(seconds=1)
        self.in_endpoints = {p.uid for g in self.groups.values() for p in g.pods if p.ready and p.in_service}
        if not self.groups:
            return
        key = sorted(self.groups)[chosen % len(self.groups)]
        held = self.groups[key]
        if held.leaving:
            del self.groups[key]
        elif not held.pods[0].ready:
            ready = pod(name=held.pods[0].name, in_service=held.pods[0].in_service)
            self.groups[key] = replace(held, pods=(ready,))

    @property
    def ready(self) -> int:
        return len({key.index for key, held in self.groups.items() if held.answers})

    def is_settled(self, replicas: int, revision: str) -> bool:
        return {key.index for key in self.groups} == set(range(replicas)) and all(
            key.revision == revision and held.answers for key, held in self.groups.items()
        )


def settle(cluster: Cluster, replicas: int, revision: str) -> None:
    for chosen in range(400):
        cluster.step(replicas, revision)
        if cluster.is_settled(replicas, revision):
            return
        cluster.tick(chosen)
    pytest.fail(f"never settled: {sorted(cluster.groups)}")


@settings(max_examples=60)
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60))
def test_a_rollout_never_has_more_than_one_group_down(replicas: int, happenings: list[tuple[int, bool]]) -> None:
    """Whatever the order in which pods get ready, and also where the spec is changed back and forth."""
    cluster = Cluster()
    settle(cluster, replicas, OLD_REVISION)
    revision = REVISION
    for chosen, back in happenings:
        if back:
            revision = OLD_REVISION if revision == REVISION else REVISION
        cluster.step(replicas, revision)
        assert cluster.ready >= replicas - 1
        cluster.tick(chosen)
    settle(cluster, replicas, revision)


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 50), max_size=60))
def test_a_rollout_that_also_scales_down_never_answers_with_less_than_it_shall_have(
    replicas: int, surplus: int, happenings: list[int]
) -> None:
    cluster = Cluster()
    settle(cluster, replicas + surplus, OLD_REVISION)
    for chosen in happenings:
        cluster.step(replicas, REVISION)
        assert cluster.ready >= replicas
        cluster.tick(chosen)
    settle(cluster, replicas, REVISION)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([REVISION, OLD_REVISION]), st.integers(0, 50)), max_size=40)
)
def test_any_series_of_changes_ends_where_the_last_one_says(changes: list[tuple[int, str, int]]) -> None:
    cluster = Cluster()
    for replicas, revision, chosen in changes:
        cluster.step(replicas, revision)
        cluster.tick(chosen)
    settle(cluster, 3, REVISION)
    assert cluster.step(3, REVISION) == [], "a settled object needs nothing"
