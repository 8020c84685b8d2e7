"""Server-sent events of one answer. Owns the response once it has begun: from then on an error is an event, too."""

from __future__ import annotations

from aiohttp import web

from hpu_engine.server.errors import ApiError

_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    async def begin(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, event: bytes) -> None:
        """Raises `ConnectionError` when the client is gone, or was ended by the listener because it does not read."""
        await self.response.write(b"data: " + event + b"\n\n")

    async def end(self) -> None:
        await self.response.write(_DONE)
        await self.response.write_eof()

    async def end_with(self, error: ApiError) -> None:
        """No `[DONE]` follows: a client that only looks for that must not take a broken answer for a whole one."""
        await self.response.write(b"data: " + error.encode() + b"\n\n")
        await self.response.write_eof()
