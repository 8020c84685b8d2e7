"""Bodies and requests that are broken as such: size, coding, JSON, HTTP itself. Each is refused; serving goes on."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
import zlib
from typing import Any

import pytest
from pydantic import ValidationError

from hpu_engine.server.api.parsing import MAX_COMMAS
from hpu_engine.server.api.protocol import ChatCompletionRequest
from tests.server.running import PATIENCE_SECONDS, RunningServer, post

GOOD = {"model": "tiny", "prompt": "abc", "max_tokens": 2}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"5",
        b"\xff\xfe\x00",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: str(body[:20]),
)
def test_a_body_that_is_no_json_object_is_refused(echo: RunningServer, body: bytes) -> None:
    status, answer = post(f"{echo.url}/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "body")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_name_their_field(echo: RunningServer, literal: str) -> None:
    body = f'{{"prompt": "a", "temperature": {literal}}}'.encode()
    status, answer = post(f"{echo.url}/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "text", ['{"x":[%s1]}', '{"messages":[%s{}]}', '{"prompt":[%s[1]]}', '{"logit_bias":{%s"1":1}}']
)
def test_a_body_of_countless_tiny_elements_is_refused_unread(echo: RunningServer, path: str, text: str) -> None:
    """Reading them would hold up everybody, probes included: they are counted before anything is made of them."""
    body = (text % ("{}," * MAX_COMMAS + "2,")).encode()
    status, answer = post(f"{echo.url}{path}", body)
    assert status == 400
    assert answer["error"]["param"] == "body"
    assert str(MAX_COMMAS) in answer["error"]["message"]


@pytest.mark.parametrize(
    "field",
    [{"messages": [{}] * 9}, {"stop": [1] * 9}, {"stop_token_ids": [-1] * 9}],
    ids=lambda field: next(iter(field)),
)
def test_reading_ends_at_the_first_fault_of_a_list(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **field})
    assert {problem["loc"][1:2] for problem in caught.value.errors()} <= {(0,), ()}


def test_a_huge_body_is_refused_and_the_next_request_answers(echo: RunningServer) -> None:
    status, answer = post(f"{echo.url}/v1/completions", b'{"prompt": "' + b"a" * (17 * 1024 * 1024) + b'"}')
    assert (status, answer["error"]["param"]) == (400, "body")
    assert post(f"{echo.url}/v1/completions", GOOD)[0] == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps(GOOD).encode()


def encoded(name: bytes, body: bytes) -> bytes:
    return HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (name, len(body)) + body


def exchange(port: int, *pieces: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of the answer to bytes that are sent as they are, each piece apart."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as raw:
        for piece in pieces:
            raw.sendall(piece)
            time.sleep(0.05 * (len(pieces) > 1))
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        return answer.status, str(answer.headers).encode(), answer.read()


@pytest.mark.parametrize(
    ("pieces", "what"),
    [
        ((encoded(b"gzip", b"xx"),), "gzip"),
        ((encoded(b"deflate", b"xx"),), "deflate"),
        ((encoded(b"deflate", zlib.compress(BODY)[:-6]),), "deflate"),
        ((encoded(b"gzip", gzip.compress(BODY, mtime=0)[:-8] + b"12345678"),), "gzip"),
        ((encoded(b"gzip", gzip.compress(BODY, mtime=0)[:12]),), "gzip"),
        ((encoded(b"br", b"xx"),), "`br` is not supported"),
        ((encoded(b"zstd", b"xx"),), "`zstd` is not supported"),
        ((encoded(b"rot13", BODY),), "`rot13` is not supported"),
        ((encoded(b"gzip, gzip", BODY),), "`gzip, gzip` is not supported"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\nabc\r\n"), "damaged"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\nabc", b"defg\r\n0\r\n\r\n"), "damaged"),
    ],
    ids=lambda value: str(value)[-50:],
)
def test_a_body_that_cannot_be_decoded_is_refused(echo: RunningServer, pieces: tuple[bytes, ...], what: str) -> None:
    before = echo.log
    status, head, raw = exchange(echo.port, *pieces)
    error = json.loads(raw)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "body"), raw
    assert what in error["message"]
    assert "aiohttp" not in (head + raw).decode()
    assert "Traceback" not in echo.log[len(before) :]


def test_a_compressed_body_is_read(echo: RunningServer) -> None:
    for name, body in ((b"gzip", gzip.compress(BODY, mtime=0)), (b"deflate", zlib.compress(BODY)), (b"identity", BODY)):
        status, head, _ = exchange(echo.port, encoded(name, body))
        assert (status, b"Server:" in head) == (200, False)


@pytest.mark.parametrize(
    "noise",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"\x16\x03\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        HEAD + b"Authorization: secret" + b"x" * 20_000 + b"\r\n\r\n",
        HEAD + b"".join(b"a%d: x\r\n" % i for i in range(1000)) + b"\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: many\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=lambda value: str(value[:60]),
)
@pytest.mark.parametrize("port", ["port", "control_port"])
def test_what_is_no_http_gets_an_error_object_and_stops_nobody(echo: RunningServer, noise: bytes, port: str) -> None:
    before = echo.log
    status, head, raw = exchange(getattr(echo, port), noise)
    error = json.loads(raw)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert 5 < len(error["message"]) < 300
    assert b"Server:" not in head
    assert "secret" not in error["message"]
    assert "Traceback" not in echo.log[len(before) :]
    assert post(f"{echo.url}/v1/completions", GOOD)[0] == 200
