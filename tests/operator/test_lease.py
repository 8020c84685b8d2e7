"""Leadership: one at a time, taken over when silent, rested when unconfirmed; over a store with the server's rules."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from hpu_operator.kube.kinds import LEASE
from hpu_operator.kube.port import Conflict, Unavailable
from hpu_operator.runtime.leadership import lease as lease_module
from hpu_operator.runtime.leadership.leader_only import LeaderOnly
from hpu_operator.runtime.leadership.lease import DEADLINE_SECONDS, DURATION_SECONDS, Lease


class LeaseStore:
    """The three calls an elector makes, with the server's rule about resourceVersions, and an outage to order."""

    def __init__(self) -> None:
        self.live: dict[str, Any] | None = None
        self.down = False

    async def get(self, *_: Any) -> dict[str, Any] | None:
        if self.down:
            raise Unavailable("GET", 0, "down")
        return copy.deepcopy(self.live)

    async def create(self, _kind: Any, _namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.live is not None:
            raise Conflict("POST", 409, "exists")
        return self._store(body, 1)

    async def replace(self, _kind: Any, _namespace: str, _name: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self.live is not None
        if body["metadata"]["resourceVersion"] != self.live["metadata"]["resourceVersion"]:
            raise Conflict("PUT", 409, "changed meanwhile")
        return self._store(body, int(body["metadata"]["resourceVersion"]) + 1)

    def _store(self, body: dict[str, Any], version: int) -> dict[str, Any]:
        self.live = copy.deepcopy(body)
        self.live["metadata"]["resourceVersion"] = str(version)
        return self.live

    @property
    def holder(self) -> str:
        assert self.live is not None
        return str(self.live["spec"]["holderIdentity"])


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> LeaseStore:
    return LeaseStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def candidate(store: LeaseStore, clock: Clock, identity: str) -> Lease:
    return Lease(store, "ns", "lease", identity, clock)  # type: ignore[arg-type]


async def test_the_first_takes_it_and_the_second_waits(store: LeaseStore, clock: Clock) -> None:
    await candidate(store, clock, "a").acquire()
    assert not await candidate(store, clock, "b")._try()
    assert store.holder == "a"


async def test_a_silent_holder_is_replaced_after_the_duration_as_the_candidate_saw_it(
    store: LeaseStore, clock: Clock
) -> None:
    await candidate(store, clock, "a").acquire()
    second = candidate(store, clock, "b")
    assert not await second._try(), "seen for the first time just now"
    clock.now += DURATION_SECONDS
    assert not await second._try()
    clock.now += 1
    assert await second._try()
    assert store.holder == "b"
    assert store.live is not None
    assert store.live["spec"]["leaseTransitions"] == 1


async def test_a_holder_that_renews_is_not_replaced(store: LeaseStore, clock: Clock) -> None:
    first, second = candidate(store, clock, "a"), candidate(store, clock, "b")
    await first.acquire()
    for _ in range(5):
        assert not await second._try()
        clock.now += DURATION_SECONDS - 1
        await asyncio.sleep(0.001)  # so that the renewal has another time
        assert await first._try()
    assert store.holder == "a"


async def test_a_released_lease_is_taken_at_once(store: LeaseStore, clock: Clock) -> None:
    first = candidate(store, clock, "a")
    await first.acquire()
    await first.release()
    assert await candidate(store, clock, "b")._try()


async def test_a_container_restarted_in_the_same_pod_takes_it_at_once(store: LeaseStore, clock: Clock) -> None:
    await candidate(store, clock, "pod-1").acquire()
    assert await candidate(store, clock, "pod-1")._try()


async def test_two_that_try_at_the_same_moment_end_as_one(store: LeaseStore, clock: Clock) -> None:
    old = candidate(store, clock, "gone")
    await old.acquire()
    await old.release()
    won = await asyncio.gather(*(candidate(store, clock, name)._try() for name in "abc"))
    assert won.count(True) == 1


async def test_work_rests_while_the_lease_is_unconfirmed_and_goes_on_afterwards(
    store: LeaseStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.01)
    held = candidate(store, clock, "a")
    await held.acquire()
    await asyncio.wait_for(held.confirmed(), 30)
    holding = asyncio.create_task(held.hold())
    store.down = True
    await asyncio.sleep(0.03)
    clock.now += DEADLINE_SECONDS
    resting = asyncio.create_task(held.confirmed())
    await asyncio.sleep(0.05)
    assert not resting.done()
    assert not holding.done(), "an outage in which nobody can take over is no loss"
    store.down = False
    await asyncio.wait_for(resting, 30)
    holding.cancel()


async def test_holding_ends_when_another_holds(
    store: LeaseStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.01)
    held = candidate(store, clock, "a")
    await held.acquire()
    assert store.live is not None
    store.live["spec"]["holderIdentity"] = "b"
    await asyncio.wait_for(held.hold(), 30)


async def test_nothing_is_written_in_the_middle_of_work_while_the_lease_is_unconfirmed(
    store: LeaseStore, clock: Clock
) -> None:
    held = candidate(store, clock, "a")
    await held.acquire()
    api = LeaderOnly(store, held)  # type: ignore[arg-type]
    assert await api.replace(LEASE, "ns", "lease", store.live or {})
    clock.now += DEADLINE_SECONDS
    before = copy.deepcopy(store.live)
    writes = (
        lambda: api.apply(LEASE, {}),
        lambda: api.apply_status(LEASE, {}),
        lambda: api.delete(LEASE, "ns", "lease", "uid"),
        lambda: api.create(LEASE, "ns", {}),
        lambda: api.replace(LEASE, "ns", "lease", store.live or {}),
    )
    for write in writes:
        with pytest.raises(Unavailable, match="the lease was not renewed in time"):
            await write()
    assert store.live == before
    assert await api.get(LEASE, "ns", "lease") == before, "looking is allowed"
