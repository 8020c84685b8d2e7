"""An OpenAI-compatible server with a script: when each token leaves, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ScriptedServer:
    """`first_seconds` until the first token, `next_seconds` between tokens. `fault` names what goes wrong."""

    first_seconds: float = 0.05
    next_seconds: float = 0.01
    fault: str = ""
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open_now: int = 0
    open_most: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fault == "status":
            return web.json_response({"error": {"message": "full"}}, status=503)
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, body)
        finally:
            self.open_now -= 1
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        async def send(event: Any) -> None:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        if self.fault == "hang":
            await asyncio.sleep(60)
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.next_seconds if index else self.first_seconds)
            await send({"choices": [{"index": 0, "text": "x"}]})
            if self.fault == "cut" and index == 1:
                return
            if self.fault == "error" and index == 1:
                await send({"error": {"message": "worker lost"}})
                return
            if self.fault == "nonsense" and index == 1:
                await send(["not", "an", "event"])
        if self.fault != "no usage":
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")


@asynccontextmanager
async def scripted(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()
