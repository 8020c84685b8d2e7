"""The relay on its own, in this machine's network: what it passes on, and for how long it remembers."""

from __future__ import annotations

import asyncio
import gc
import socket

from tests.cluster import relay


async def test_an_answer_comes_though_the_client_has_sent_all_long_before() -> None:
    ask, answered = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"question"
        ask.set()
        await answered.wait()
        writer.write(b"answer")
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    listening = socket.create_server(("127.0.0.1", 0))
    relaying = asyncio.create_task(relay.serve(listening, *server.sockets[0].getsockname()))
    try:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"question")
        writer.write_eof()
        await ask.wait()
        gc.collect()
        answered.set()
        assert await asyncio.wait_for(reader.read(), timeout=60) == b"answer"
        writer.close()
    finally:
        relaying.cancel()
        server.close()
