"""Connections that ask for nothing or read nothing: they are closed in time, and never take the control port's room."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from hpu_engine.server import listener
from tests.server.running import PATIENCE_SECONDS, RunningServer, get, post, wait_until

HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SHORT, LONG = 0.3, 600.0
LONG_BODY = b"x" * (32 * 1024 * 1024)
"""More than all buffers between a server and a client on loopback."""


@asynccontextmanager
async def listening(most_connections: int = 100, *, keeps_newest: bool = False) -> AsyncIterator[int]:
    """The port of an application that answers `ok`, each time after it has read the body; two other paths say much."""

    async def ok(request: web.Request) -> web.Response:
        return web.Response(text="ok" if not await request.read() else "body")

    app = web.Application()

    async def whole(request: web.Request) -> web.Response:
        return web.Response(body=LONG_BODY)

    async def streamed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(LONG_BODY), 1 << 16):
            await response.write(LONG_BODY[start : start + (1 << 16)])
        return response

    app.add_routes([web.route("*", "/", ok), web.get("/whole", whole), web.get("/streamed", streamed)])
    runner = listener.Runner(app, most_connections, keeps_newest=keeps_newest)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def connect(port: int, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def is_closed(reader: asyncio.StreamReader) -> bool:
    return await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""


@pytest.mark.parametrize("data", [b"", HALF_A_HEAD, REQUEST + HALF_A_HEAD], ids=["nothing", "half", "second half"])
async def test_a_connection_without_a_whole_head_is_closed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", SHORT)
    monkeypatch.setattr(listener, "KEEP_ALIVE_SECONDS", LONG)
    async with listening() as port:
        whole, half = data.partition(b"\r\n\r\n")[::2] if data.startswith(b"GET") else (b"", data)
        reader, writer = await connect(port)
        if whole:
            writer.write(REQUEST)
            await reader.readuntil(b"ok")
        writer.write(half)
        assert await is_closed(reader)


async def test_a_kept_connection_has_a_time_out_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", SHORT)
    monkeypatch.setattr(listener, "KEEP_ALIVE_SECONDS", LONG)
    async with listening() as port:
        reader, writer = await connect(port, REQUEST)
        await reader.readuntil(b"ok")
        await asyncio.sleep(3 * SHORT)
        writer.write(REQUEST)
        await asyncio.wait_for(reader.readuntil(b"ok"), PATIENCE_SECONDS)
    monkeypatch.setattr(listener, "KEEP_ALIVE_SECONDS", SHORT)
    async with listening() as port:
        reader, writer = await connect(port, REQUEST)
        await reader.readuntil(b"ok")
        assert await is_closed(reader)


async def test_a_slow_body_is_not_a_missing_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", SHORT)
    async with listening() as port:
        reader, writer = await connect(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
        await asyncio.sleep(3 * SHORT)
        writer.write(b"b")
        await asyncio.wait_for(reader.readuntil(b"body"), PATIENCE_SECONDS)


async def test_one_connection_too_many_is_told_so_and_leaves_the_others_alone() -> None:
    async with listening(most_connections=2) as port:
        first, second = await connect(port, HALF_A_HEAD), await connect(port, HALF_A_HEAD)
        reader, _ = await connect(port)
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["message"] == "too many connections are open"
        first[1].write(b"\r\n")
        await asyncio.wait_for(first[0].readuntil(b"404"), PATIENCE_SECONDS)
        second[1].close()
        await second[1].wait_closed()
        for _ in range(100):  # the server sees the end of a connection a moment later
            reader, _ = await connect(port, REQUEST)
            if (await reader.read(12)).endswith(b"200"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("a connection that has ended still counts")


@pytest.mark.parametrize("path", ["whole", "streamed"])
async def test_a_client_that_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(listener, "UNREAD_SECONDS", SHORT)
    async with listening(most_connections=1) as port:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as mute:
            mute.sendall(b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
            for _ in range(100):
                reader, writer = await connect(port, REQUEST)
                with suppress(ConnectionError):
                    if (await reader.read(12)).endswith(b"200"):
                        return
                writer.close()
                await asyncio.sleep(0.05)
    raise AssertionError("the connection of a client that reads nothing still counts")


@pytest.mark.parametrize("path", ["whole", "streamed"])
async def test_a_slow_reader_gets_its_whole_answer(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(listener, "UNREAD_SECONDS", SHORT)
    async with listening() as port:
        reader, writer = await connect(
            port, b"GET /%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode()
        )
        received = 0
        began = asyncio.get_running_loop().time()
        while piece := await asyncio.wait_for(reader.read(1 << 20), PATIENCE_SECONDS):
            received += len(piece)
            await asyncio.sleep(SHORT * len(piece) / (1 << 22))
        assert asyncio.get_running_loop().time() - began > 3 * SHORT
        assert received > len(LONG_BODY)
        writer.close()


async def test_where_the_newest_is_kept_the_oldest_idle_connection_makes_room() -> None:
    async with listening(most_connections=2, keeps_newest=True) as port:
        oldest, second = await connect(port), await connect(port)
        newest = await connect(port, REQUEST)
        assert await is_closed(oldest[0])
        await asyncio.wait_for(newest[0].readuntil(b"ok"), PATIENCE_SECONDS)
        second[1].write(REQUEST)
        await asyncio.wait_for(second[0].readuntil(b"ok"), PATIENCE_SECONDS)


@contextmanager
def descriptors(soft: int) -> Iterator[None]:
    """For the processes that are started within."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_silent_clients_do_not_take_the_control_port_down(shell: Path) -> None:
    with ExitStack() as stack:
        with descriptors(768):
            server = stack.enter_context(RunningServer(shell, {"step_seconds": 0.001}))
        server.wait_until_ready()
        silent = []
        for _ in range(700):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE_SECONDS)))
            silent[-1].sendall(HALF_A_HEAD)
        for path in ("livez", "readyz", "state"):
            assert get(f"{server.control_url}/{path}")[0] == 200
        for _ in range(200):
            address = ("127.0.0.1", server.control_port)
            silent.append(stack.enter_context(socket.create_connection(address, PATIENCE_SECONDS)))
        for path in ("livez", "readyz", "state"):
            assert get(f"{server.control_url}/{path}")[0] == 200
        for connection in silent:
            connection.close()
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
        wait_until(lambda: post(f"{server.url}/v1/completions", body)[0] == 200, "there is room again", server)
        assert "Traceback" not in server.log
