"""The client of the control endpoint against the scripted double and against servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from aiohttp import web

from hpu_engine.contract import ControlState, Phase
from hpu_operator.control_client import ControlClient, control_url
from hpu_operator.domain.diagnosis.progress import SILENCE_SECONDS
from hpu_operator.domain.observed import Unreachable
from hpu_operator.metrics import Metrics
from hpu_operator.runtime.inputs.control_watch import ControlWatch, Target
from hpu_operator.runtime.key import Key
from tests.cluster import ports
from tests.control_plane.scripted_control import ScriptedControl, state

KEY = Key("team", "smol")


@pytest_asyncio.fixture
async def client() -> AsyncIterator[ControlClient]:
    held = ControlClient()
    try:
        yield held
    finally:
        await held.close()


@pytest.mark.parametrize(
    ("status", "url"),
    [
        ({"podIP": "198.51.100.7"}, "http://198.51.100.7:8001"),
        ({"podIP": "2001:db8::7"}, "http://[2001:db8::7]:8001"),
        ({}, None),
    ],
)
def test_the_address_of_a_pod(status: dict[str, str], url: str | None) -> None:
    assert control_url({"status": status}) == url


async def test_a_state_is_read(client: ControlClient) -> None:
    async with ScriptedControl() as scripted:
        scripted.says("team", "smol-0", state(Phase.WARMING_UP, done=3, total=5))
        read = await client.read(f"{scripted.base}/team/smol-0")
        assert isinstance(read, ControlState)
        assert read.ranks[0].warm_up.done == 3


async def test_a_connection_that_breaks_is_unreachable(client: ControlClient) -> None:
    async with ScriptedControl() as scripted:
        scripted.default = None
        assert isinstance(await client.read(f"{scripted.base}/team/smol-0"), Unreachable)


async def test_a_closed_port_is_unreachable(client: ControlClient) -> None:
    (port,) = ports.choose(1)
    read = await client.read(f"http://127.0.0.1:{port}")
    assert isinstance(read, Unreachable)
    assert "cannot be reached" in read.error


async def read_from(
    client: ControlClient, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> ControlState | Unreachable:
    """What the client makes of a server that answers so."""
    app = web.Application()
    app.router.add_get("/state", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        return await client.read(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "word"),
    [
        (500, "oops", "HTTP 500"),
        (302, "", "HTTP 302"),
        (200, "<html>", "something else"),
        (200, '{"phase": "Dancing"}', "something else"),
        (200, "9" * (3 << 20), "more than 1 MiB"),
    ],
)
async def test_whatever_else_answers_is_unreachable(client: ControlClient, status: int, body: str, word: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers={"Location": "http://192.0.2.1/"})

    read = await read_from(client, answer)
    assert isinstance(read, Unreachable)
    assert word in read.error


async def test_an_answer_that_comes_in_pieces_is_read_to_its_end(client: ControlClient) -> None:
    whole = state(Phase.WARMING_UP, done=3, total=5).model_dump_json(by_alias=True).encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(whole), 100):
            await response.write(whole[start : start + 100])
            await asyncio.sleep(0.02)
        return response

    read = await read_from(client, answer)
    assert isinstance(read, ControlState), read


async def heard(news: asyncio.Queue[Key]) -> Key:
    return await asyncio.wait_for(news.get(), 30)


async def test_a_silence_has_a_length_and_is_news_when_it_lasts(client: ControlClient) -> None:
    news: asyncio.Queue[Key] = asyncio.Queue()
    now = [100.0]
    watch = ControlWatch(client, Metrics(), lambda: now[0], news.put_nowait)
    running = asyncio.create_task(watch.run())
    try:
        async with ScriptedControl() as scripted:
            scripted.default = None
            watch.expect(KEY, [Target("uid", f"{scripted.base}/team/smol-0", 0)])
            while not isinstance(watch.answer("uid"), Unreachable):
                await asyncio.sleep(0.01)
            assert news.empty(), "a moment's silence changes nothing"
            now[0] += SILENCE_SECONDS
            assert await heard(news) == KEY
            answer = watch.answer("uid")
            assert isinstance(answer, Unreachable)
            assert answer.for_seconds == SILENCE_SECONDS
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_watch_tells_news_once_and_stops_when_nobody_expects_the_pod(client: ControlClient) -> None:
    news: asyncio.Queue[Key] = asyncio.Queue()
    watch = ControlWatch(client, Metrics(), asyncio.get_running_loop().time, news.put_nowait)
    running = asyncio.create_task(watch.run())
    try:
        async with ScriptedControl() as scripted:
            scripted.default = state(Phase.LOADING)
            watch.expect(KEY, [Target("uid", f"{scripted.base}/team/smol-0", 0)])
            assert await heard(news) == KEY
            answer = watch.answer("uid")
            assert isinstance(answer, ControlState)
            assert answer.phase is Phase.LOADING
            await asyncio.sleep(1.3)
            assert news.empty(), "the same again is no news"
            scripted.default = state(Phase.WARMING_UP, total=4)
            assert await heard(news) == KEY
            watch.expect(KEY, [Target("uid", f"{scripted.base}/team/smol-0", 1)])
            assert watch.answer("uid") is None, "a restarted container has said nothing yet"
            await heard(news)
            watch.expect(KEY, [])
            await asyncio.gather(*watch._tasks)  # a question that was on its way is no new one
            asked = scripted.asked
            await asyncio.sleep(1.5)
            assert scripted.asked == asked
            assert watch.answer("uid") is None
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
