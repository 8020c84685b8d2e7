"""The API as an aiohttp application: its routes, and the one place where an error becomes an answer."""

from __future__ import annotations

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from hpu_engine.contract import METRICS_PATH
from hpu_engine.server.api.browsers import AllowedOrigins, cors_headers, json_bodies_only, preflights
from hpu_engine.server.api.chat import create_chat_completion
from hpu_engine.server.api.completions import create_completion
from hpu_engine.server.api.responses import Model, ModelList, encode
from hpu_engine.server.errors import ApiError, not_serving, unknown_model
from hpu_engine.server.metrics import Metrics
from hpu_engine.server.pod.control import metrics_handler
from hpu_engine.server.requests.serving_model import (
    BODY_LIMIT_BYTES,
    SERVING,
    ServingModel,
    error_response,
    json_response,
)

log = structlog.get_logger()


def build_api(serving: ServingModel, metrics: Metrics, allowed_origins: tuple[str, ...] = ()) -> web.Application:
    origins = AllowedOrigins(allowed_origins)
    app = web.Application(
        client_max_size=BODY_LIMIT_BYTES,
        middlewares=[_errors_as_answers, preflights(origins), json_bodies_only(origins)],
    )
    app[SERVING] = serving
    app.on_response_prepare.append(_close_while_draining)
    app.on_response_prepare.append(cors_headers(origins))
    app.add_routes(
        [
            web.post("/v1/completions", create_completion),
            web.post("/v1/chat/completions", create_chat_completion),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{model:.+}", show_model),
            web.get("/health", health),
            web.get(METRICS_PATH, metrics_handler(metrics)),
        ]
    )
    return app


async def list_models(request: web.Request) -> web.Response:
    return json_response(encode(ModelList(data=(_model(request.app[SERVING]),))))


async def show_model(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    if (name := request.match_info["model"]) != serving.name:
        raise unknown_model(name, serving.name)
    return json_response(encode(_model(serving)))


def _model(serving: ServingModel) -> Model:
    return Model(id=serving.name, created=serving.created, max_model_len=serving.pod.identity.max_model_len)


async def health(request: web.Request) -> web.Response:
    """200 only when a request sent now would be answered: what a load balancer wants to know."""
    if (objection := request.app[SERVING].pod.why_not_ready()) is not None:
        raise not_serving(objection)
    return web.Response(text="ok\n")


@web.middleware
async def _errors_as_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        answer = error_response(ApiError(error.status, f"{request.method} {request.path}: {error.reason}"))
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except ConnectionError:
        raise  # the client left; there is nobody to answer
    except Exception:
        log.exception("a request failed in the server", path=request.path)
        return error_response(ApiError(500, "the server failed on this request"))


async def _close_while_draining(request: web.Request, response: web.StreamResponse) -> None:
    """A kept connection would bring its next request to a server that is leaving."""
    if request.app[SERVING].pod.is_draining:
        response.headers["Connection"] = "close"
        response.force_close()
