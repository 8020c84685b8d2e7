"""The control port: state, probes and metrics of this pod. Read-only, and open from the first second.

It has its own port, so that it answers while the API is busy and a cluster can keep clients off it.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from hpu_engine.contract import LIVENESS_PATH, METRICS_PATH, READINESS_PATH, STATE_PATH
from hpu_engine.server.metrics import CONTENT_TYPE_LATEST, Metrics
from hpu_engine.server.pod.pod import Pod


def build_control(pod: Pod, metrics: Metrics) -> web.Application:
    async def state(request: web.Request) -> web.Response:
        return web.json_response(text=pod.state().model_dump_json(by_alias=True))

    async def liveness(request: web.Request) -> web.Response:
        return _verdict(pod.why_not_alive())

    async def readiness(request: web.Request) -> web.Response:
        return _verdict(pod.why_not_ready())

    app = web.Application(client_max_size=0)
    app.add_routes(
        [
            web.get(STATE_PATH, state),
            web.get(LIVENESS_PATH, liveness),
            web.get(READINESS_PATH, readiness),
            web.get(METRICS_PATH, metrics_handler(metrics)),
        ]
    )
    return app


def _verdict(objection: str | None) -> web.Response:
    return web.Response(status=200 if objection is None else 503, text=(objection or "ok") + "\n")


def metrics_handler(metrics: Metrics) -> Handler:
    async def show(request: web.Request) -> web.Response:
        return web.Response(body=metrics.encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return show
