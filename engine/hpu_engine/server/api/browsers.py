"""What web pages may do: read answers where their origin is allowed, and never post unasked.

A browser sends a form, a text or an untyped body to any address, loopback too, without asking that address first. Only
`application/json` makes it ask (a preflight request). So bodies of other types are refused, whatever the route, and a
preflight succeeds for the origins of `--allowed-origins` alone (the Fetch standard, "CORS protocol").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from hpu_engine.server.errors import ApiError

ANY_ORIGIN = "*"
PREFLIGHT_SECONDS = 600
"""How long a browser may remember the answer to a preflight."""
METHODS = "GET, POST, OPTIONS"
_WITH_BODY = {hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_PATCH, hdrs.METH_DELETE}


class AllowedOrigins:
    """The origins whose pages may read answers, as browsers spell them: `https://chat.example.com`, or `*` for all."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def __contains__(self, origin: str | None) -> bool:
        return origin is not None and (ANY_ORIGIN in self._origins or origin in self._origins)

    def __bool__(self) -> bool:
        return bool(self._origins)


def json_bodies_only(origins: AllowedOrigins) -> Middleware:
    """Answers 415 to a body that is not typed as JSON. One without a type passes, but not from an unknown page."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in _WITH_BODY and request.match_info.http_exception is None:
            types = request.headers.getall(hdrs.CONTENT_TYPE, [])
            origin = request.headers.get(hdrs.ORIGIN)
            if not all(map(_is_json, types)) or (not any(types) and origin is not None and origin not in origins):
                given = f"`{types[0][:100]}`" if any(types) else "none"
                raise ApiError(
                    415,
                    f"the Content-Type has to be application/json, not {given}",
                    param="body",
                    code="unsupported_content_type",
                )
        return await handler(request)

    return check


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind in ("", "application/json") or (kind.startswith("application/") and kind.endswith("+json"))


def preflights(origins: AllowedOrigins) -> Middleware:
    """Answers the question that a browser asks before it sends a page's JSON: OPTIONS of a route that exists."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get(hdrs.ORIGIN)
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        exists = request.match_info.http_exception is None or request.match_info.http_exception.status == 405
        if not origins or request.method != hdrs.METH_OPTIONS or origin is None or wanted is None or not exists:
            return await handler(request)
        if origin not in origins:
            raise ApiError(403, f"pages of {origin[:200]} may not use this server; see --allowed-origins")
        headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS, hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_SECONDS)}
        if (asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)) is not None:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
        return web.Response(status=204, headers=headers)

    return answer


def cors_headers(origins: AllowedOrigins) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal for every response, streams and errors included: whether the page that asked may read it."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        if not origins:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if (origin := request.headers.get(hdrs.ORIGIN)) in origins and origin is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = hdrs.RETRY_AFTER

    return add
