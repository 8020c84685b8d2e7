"""What a client is told when it gets no answer: OpenAI's error object, with the parameter at fault."""

from __future__ import annotations

from typing import Any

import msgspec


class ApiError(Exception):
    """An answer in OpenAI's error form. `param` names what has to change for the request to work."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


def bad_request(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


BODY_ENCODINGS = ("identity", "gzip", "deflate")


def damaged_body(encoding: str) -> ApiError:
    """For a body with an unknown `Content-Encoding`, or one that does not match its encoding or its chunks."""
    known = ", ".join(BODY_ENCODINGS)
    if encoding not in BODY_ENCODINGS:
        return bad_request("body", f"Content-Encoding `{encoding}` is not supported; use one of {known}")
    if encoding == "identity":
        return bad_request("body", "the body is damaged or ends too early")
    return bad_request("body", f"the body is damaged: it is not valid `{encoding}`, which its Content-Encoding names")


def body_too_large(limit_bytes: int) -> ApiError:
    return bad_request("body", f"the body is larger than {limit_bytes} bytes")


def unknown_model(name: str, served: str) -> ApiError:
    shown = name if len(name) <= 100 else name[:99] + "…"
    return ApiError(
        404,
        f"the model `{shown}` does not exist; this server has `{served}`",
        param="model",
        code="model_not_found",
    )


def not_serving(why: str, retry_after_seconds: int = 1) -> ApiError:
    return ApiError(503, why, code="not_ready", retry_after_seconds=retry_after_seconds)
