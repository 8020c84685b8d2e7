"""Keys without duplicates, in time, never twice at once, each with its own back-off."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_operator.metrics import Metrics
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.queue import FIRST_RETRY_SECONDS, Queue

A, B = Key("team", "a"), Key("team", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> Queue:
    return Queue(Metrics(), clock)


async def take(queue: Queue) -> Key | None:
    return await asyncio.wait_for(queue.take(), 30)


async def nothing(queue: Queue) -> bool:
    try:
        await asyncio.wait_for(queue.take(), 0.02)
    except TimeoutError:
        return True
    return False


async def test_a_key_added_twice_comes_once(queue: Queue) -> None:
    queue.add(A)
    queue.add(A)
    assert await take(queue) == A
    queue.done(A)
    assert await nothing(queue)


async def test_a_key_added_while_it_is_worked_on_comes_again_afterwards(queue: Queue) -> None:
    queue.add(A)
    assert await take(queue) == A
    queue.add(A)
    assert await nothing(queue), "never twice at the same time"
    queue.done(A)
    assert await take(queue) == A


async def test_an_earlier_appointment_stands(queue: Queue, clock: Clock) -> None:
    queue.add(A, 10)
    queue.add(A, 60)
    assert await nothing(queue)
    clock.now = 10
    assert await take(queue) == A


async def test_news_brings_a_delayed_key_forward(queue: Queue) -> None:
    queue.add(A, 60)
    queue.add(A)
    assert await take(queue) == A
    queue.done(A)
    assert await nothing(queue)


async def test_failures_double_the_pause_up_to_a_limit_and_success_forgets_them(queue: Queue) -> None:
    delays = []
    for _ in range(6):
        delays.append(queue.failed(A, 2.0))
    assert delays[0] < delays[1] < delays[2]
    assert delays[0] >= FIRST_RETRY_SECONDS
    assert max(delays) <= 2.0 * 1.2
    queue.done(A)
    assert queue.failed(A, 2.0) <= FIRST_RETRY_SECONDS * 1.2


async def test_one_keys_failures_do_not_delay_another(queue: Queue) -> None:
    for _ in range(8):
        queue.failed(A, 300)
    queue.add(B)
    assert await take(queue) == B


async def test_a_closed_queue_ends_its_workers(queue: Queue) -> None:
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.close()
    assert await asyncio.wait_for(waiting, 30) is None


@given(
    st.lists(st.tuples(st.sampled_from(["add", "later", "take", "done", "tick"]), st.sampled_from([A, B])), max_size=60)
)
async def test_no_addition_is_lost_and_no_key_runs_twice(happenings: list[tuple[str, Key]]) -> None:
    clock = Clock()
    queue = Queue(Metrics(), clock)
    running: set[Key] = set()
    owed: set[Key] = set()
    for verb, key in happenings:
        clock.now += 1
        if verb in ("add", "later"):
            queue.add(key, 5 if verb == "later" else 0)
            owed.add(key)
        elif verb == "done" and key in running:
            running.discard(key)
            queue.done(key)
        elif verb == "take" and not await nothing_taken(queue, running, owed):
            continue
    clock.now += 100
    for key in tuple(running):
        queue.done(key)
    running.clear()
    while owed:
        assert not await nothing_taken(queue, running, owed)


async def nothing_taken(queue: Queue, running: set[Key], owed: set[Key]) -> bool:
    try:
        key = await asyncio.wait_for(queue.take(), 0.001)
    except TimeoutError:
        return True
    assert key is not None
    assert key not in running
    running.add(key)
    owed.discard(key)
    return False
