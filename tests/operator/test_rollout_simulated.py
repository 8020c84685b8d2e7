"""Rollouts in a simulated cluster: never too few groups that answer, and always an end, whatever happens meanwhile."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hpu_operator.domain.facts import last_good
from hpu_operator.domain.names import GroupId
from tests.operator.objects import OLD_REVISION, REVISION
from tests.operator.simulation import Cluster, restarted

THIRD = "cccc3333"
revisions = st.sampled_from([REVISION, OLD_REVISION, THIRD])
picks = st.integers(0, 50)


class Rollout(RuleBasedStateMachine):
    """Targets change at any time, groups are made beside others by hand and withdrawn, break, crash, find no cards."""

    @initialize(replicas=st.integers(1, 4), surplus=st.integers(0, 2), allowed=st.integers(1, 2))
    def start(self, replicas: int, surplus: int, allowed: int) -> None:
        self.cluster, self.target = Cluster(), OLD_REVISION
        self.cluster.settle(replicas + surplus, OLD_REVISION)
        self.replicas, self.allowed = replicas + surplus, allowed

    @rule()
    def reconcile(self) -> None:
        self.cluster.step(self.replicas, self.target, self.allowed)

    @rule(chosen=picks)
    def something_happens(self, chosen: int) -> None:
        self.cluster.tick(chosen)

    @rule(revision=revisions)
    def change_the_target(self, revision: str) -> None:
        self.target = revision

    @rule()
    def scale_down(self) -> None:
        self.replicas = max(1, self.replicas - 1)

    @rule(index=st.integers(0, 3), fits=st.booleans())
    def make_one_beside(self, index: int, fits: bool) -> None:
        self.cluster.surge(index, self.target, fits=fits)

    @rule(chosen=picks)
    def withdraw_one(self, chosen: int) -> None:
        staying = self.cluster.staying()
        indices = [id_.index for id_ in staying]
        idle = [id_ for id_ in staying if not self.cluster.groups[id_].serving_pods and indices.count(id_.index) > 1]
        if idle:
            self.cluster.withdraw(idle[chosen % len(idle)])

    @rule(chosen=picks)
    def break_one(self, chosen: int) -> None:
        if staying := self.cluster.staying():
            self.cluster.break_(staying[chosen % len(staying)])

    @rule(chosen=picks)
    def restart_one_twice(self, chosen: int) -> None:
        if answering := [id_ for id_ in self.cluster.staying() if self.cluster.groups[id_].answers]:
            id_ = answering[chosen % len(answering)]
            self.cluster.put(id_, restarted(self.cluster.groups[id_].pods[0].name, self.cluster.now))

    @invariant()
    def enough_answer(self) -> None:
        if hasattr(self, "cluster"):
            missing = self.replicas - len(self.cluster.answering)
            assert missing <= self.allowed + len(self.cluster.hurt), self.cluster.groups.keys()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.cluster.settle(self.replicas, self.target, self.allowed)
        self.cluster.step(self.replicas, self.target)
        assert last_good(self.cluster.facts) == self.target
        known = dict(self.cluster.facts)
        assert self.cluster.step(self.replicas, self.target) == [], "a settled object needs nothing"
        assert self.cluster.facts == known, "and nothing is news"


Rollout.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRollout = Rollout.TestCase


def started(replicas: int = 2) -> Cluster:
    cluster = Cluster()
    cluster.settle(replicas, OLD_REVISION)
    return cluster


def surged(cluster: Cluster) -> GroupId:
    made = cluster.surge(0, REVISION)
    assert made is not None
    return made


def test_a_surge_group_replaces_its_predecessor_without_a_gap() -> None:
    cluster = started()
    new = surged(cluster)
    assert cluster.step(2, REVISION) == []
    while not cluster.groups[new].answers:
        cluster.tick(sorted(cluster.groups).index(new))
    for chosen in range(100):
        assert 0 in cluster.answering
        cluster.step(2, REVISION)
        if {id_ for id_ in cluster.groups if id_.index == 0} == {new}:
            break
        cluster.tick(chosen)
    cluster.settle(2, REVISION)


def test_a_surge_group_that_is_withdrawn_leaves_the_predecessor_to_its_turn() -> None:
    cluster = started()
    cluster.withdraw(surged(cluster))
    assert {type(action).__name__ for action in cluster.step(2, REVISION)} == {"LeaveService"}
    assert cluster.answering == {1}
    cluster.settle(2, REVISION)


def test_a_surge_group_that_finds_no_cards_gives_way_to_a_replacement_in_place() -> None:
    cluster = started()
    cluster.surge(0, REVISION, fits=False)
    assert {type(action).__name__ for action in cluster.step(2, REVISION)} == {"DeleteGroup"}
    assert cluster.answering == {0, 1}
    cluster.settle(2, REVISION)


def test_a_revert_in_the_middle_brings_the_old_group_back_before_the_new_one_goes() -> None:
    cluster = started(1)
    new = surged(cluster)
    while not cluster.groups[new].answers:
        cluster.tick(sorted(cluster.groups).index(new))
    cluster.step(1, REVISION)
    assert not cluster.groups[GroupId(0, OLD_REVISION, 0)].answers, "it is on its way out"
    for chosen in range(20):
        cluster.step(1, OLD_REVISION)
        assert cluster.answering == {0}
        cluster.tick(chosen)
    assert cluster.is_settled(1, OLD_REVISION)


def test_going_back_to_the_last_good_revision() -> None:
    """What a rollback does: the target is taken from the facts."""
    cluster = started(2)
    for chosen in range(8):
        cluster.step(2, REVISION)
        cluster.tick(chosen)
    target = last_good(cluster.facts)
    assert target == OLD_REVISION
    cluster.settle(2, target)


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(picks, max_size=60))
def test_a_rollout_that_also_scales_down_never_answers_with_less_than_it_shall_have(
    replicas: int, surplus: int, happenings: list[int]
) -> None:
    cluster = started(replicas + surplus)
    for chosen in happenings:
        cluster.step(replicas, REVISION)
        assert len(cluster.answering) >= replicas
        cluster.tick(chosen)
    cluster.settle(replicas, REVISION)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), revisions, picks), max_size=40))
def test_any_series_of_changes_ends_where_the_last_one_says(changes: list[tuple[int, str, int]]) -> None:
    cluster = Cluster()
    for replicas, revision, chosen in changes:
        cluster.step(replicas, revision)
        cluster.tick(chosen)
    cluster.settle(3, REVISION)
    assert cluster.step(3, REVISION) == [], "a settled object needs nothing"
