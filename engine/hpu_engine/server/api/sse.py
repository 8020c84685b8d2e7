"""Server-sent events of one answer. Owns the response once it has begun: from then on an error is an event, too."""

from __future__ import annotations

import asyncio

from aiohttp import web

from hpu_engine.server.errors import ApiError

WRITE_SECONDS = 60.0
"""How long a client may leave its socket full before its request is given up and its blocks are freed."""

_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientStalled(ConnectionError):
    """The client did not read for `WRITE_SECONDS`."""


class EventStream:
    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    async def begin(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, event: bytes) -> None:
        """Raises `ConnectionError` when the client is gone or does not read."""
        await self._write(b"data: " + event + b"\n\n")

    async def end(self) -> None:
        await self._write(_DONE)
        await self.response.write_eof()

    async def end_with(self, error: ApiError) -> None:
        """No `[DONE]` follows: a client that only looks for that must not take a broken answer for a whole one."""
        await self._write(b"data: " + error.encode() + b"\n\n")
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self.response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientStalled from None
