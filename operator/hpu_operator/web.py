"""Health and metrics of the operator itself, served by every replica, leader or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from hpu_operator.metrics import Metrics

Check = Callable[[], str | None]
"""None where all is well, else what is wrong."""


class Web:
    """`/livez`, `/readyz`, `/metrics`. A standby replica is ready: it is ready to take over."""

    def __init__(self, metrics: Metrics, alive: Check, ready: Check) -> None:
        app = web.Application()
        app.router.add_get("/livez", _probe(alive))
        app.router.add_get("/readyz", _probe(ready))
        app.router.add_get("/metrics", self._metrics_text)
        self._metrics = metrics
        self._runner = web.AppRunner(app, access_log=None)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises `OSError` where the port is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()


def _probe(check: Check) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(_: web.Request) -> web.StreamResponse:
        wrong = check()
        return web.Response(text=wrong or "ok", status=503 if wrong else 200)

    return handle
