"""Which group is made, taken out of service or deleted next, and what is learned; one decision at a time."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from hpu_engine.contract import Phase
from hpu_operator.domain.facts import Facts, last_good
from hpu_operator.domain.observed import Group, Observed, Unreachable
from hpu_operator.domain.rollout.decide import ENDPOINT_PATIENCE, Wanted, awaits_endpoints, decide, learn
from hpu_operator.domain.rollout.slots import is_broken
from tests.operator.objects import NOW, OLD_REVISION, REVISION, control, group, pod, recorded
from tests.operator.simulation import restarted


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


def beside(old: Group, new: Group) -> list[tuple[str, int, str]]:
    """What is done where an old and a new group stand at index 0 of one."""
    actions = decide(Wanted(1, REVISION), Observed((new, old)), NOW)
    return [(type(action).__name__, action.id.index, action.id.revision) for action in actions]


def test_a_predecessor_that_answers_stays_beside_its_successor_until_that_is_ready() -> None:
    old = group(0, OLD_REVISION)
    assert beside(old, starting(0)) == []
    assert beside(old, broken(0, REVISION)) == []
    assert beside(old, group(0)) == [("LeaveService", 0, OLD_REVISION)]


def test_a_predecessor_that_does_not_answer_is_not_kept() -> None:
    assert beside(broken(0), starting(0)) == [("DeleteGroup", 0, OLD_REVISION)]
    assert beside(starting(0, OLD_REVISION), starting(0)) == [("DeleteGroup", 0, OLD_REVISION)]


def test_a_successor_that_waits_for_cards_beside_its_predecessor_is_withdrawn() -> None:
    waiting = group(0, REVISION, pod(ready=False, status=dict(recorded("cards-insufficient").status)))
    assert beside(group(0, OLD_REVISION), waiting) == [("DeleteGroup", 0, REVISION)]
    assert beside(broken(0), waiting) == [("DeleteGroup", 0, OLD_REVISION)]


def test_a_surge_group_that_is_not_wanted_any_more_is_withdrawn() -> None:
    third = group(0, "cccc3333", pod(ready=False))
    assert beside(group(0, REVISION), third) == [("DeleteGroup", 0, "cccc3333")]
    assert beside(third, group(0, OLD_REVISION)) == [("DeleteGroup", 0, "cccc3333"), ("LeaveService", 0, OLD_REVISION)]


def test_a_predecessor_stays_while_its_successor_is_only_between_two_crashes() -> None:
    """It answers, but nobody would call it ready: the old group may be the last that will."""
    shaky = group(0, REVISION, restarted("smol-0", NOW))
    assert shaky.answers
    assert beside(group(0, OLD_REVISION), shaky) == []
    assert kinds(shaky, group(1, OLD_REVISION)) == [], "the next one waits as well"
    assert not is_broken(shaky, NOW), "it is not replaced without a budget either: it answers"


@pytest.mark.parametrize(("allowed", "next_to_go"), [(1, 1), (2, 2), (3, 3), (9, 4)])
def test_as_many_groups_are_replaced_at_a_time_as_may_be_missing(allowed: int, next_to_go: int) -> None:
    old = Observed(tuple(group(index, OLD_REVISION) for index in range(4)))
    actions = decide(Wanted(4, REVISION, max_unavailable=allowed), old, NOW)
    assert [(type(action).__name__, action.id.index) for action in actions] == [
        ("LeaveService", index) for index in range(next_to_go)
    ]


def learned(known: dict[str, Facts], *groups: Group, replicas: int = 2) -> dict[str, Facts]:
    return learn(Wanted(replicas, REVISION, known), Observed(groups), NOW)


def test_a_revision_is_good_once_all_of_its_groups_are_settled() -> None:
    unknown = {REVISION: Facts()}
    assert learned(unknown, group(0), starting(1)) == {}
    assert learned(unknown, group(0), group(1, OLD_REVISION)) == {}
    assert learned(unknown, group(0), group(1, REVISION, restarted("smol-1", NOW))) == {}
    assert learned(unknown, replicas=0) == {}, "nothing was proven by no group"
    assert learned(unknown, group(0), group(1)) == {REVISION: Facts(NOW)}


def test_a_fact_is_news_once() -> None:
    known = {REVISION: Facts(NOW - timedelta(days=1)), OLD_REVISION: Facts(NOW - timedelta(days=2))}
    assert learned(known, group(0), group(1)) == {}


def test_the_last_good_revision_is_the_one_completed_last_also_where_a_clock_was_ahead() -> None:
    ahead = NOW + timedelta(minutes=5)
    known = {REVISION: Facts(NOW - timedelta(days=1)), OLD_REVISION: Facts(ahead)}
    assert last_good(known) == OLD_REVISION
    known |= learned(known, group(0), group(1))
    assert last_good(known) == REVISION
    assert learned(known, group(0), group(1)) == {}


def test_a_revision_without_a_record_has_no_facts() -> None:
    assert learned({}, group(0), group(1)) == {}
