"""What a web page can do to the server: nothing, unless its origin is allowed."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import PATIENCE_SECONDS, RunningServer

BODY = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 2})
CHAT = json.dumps({"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "stream": True})
ROUTES = ("/v1/completions", "/v1/chat/completions")
PAGE = "https://chat.example.com"
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-lang"}


@pytest.fixture(scope="module")
def allowing(shell: Path) -> Iterator[RunningServer]:
    with RunningServer(shell, {"step_seconds": 0.001}, allowed_origins=PAGE) as server:
        yield server.wait_until_ready()


def ask(
    server: RunningServer, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """A request with just these headers: `Content_Type` stands for `Content-Type`."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "kind",
    [
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain",
        "text/plain; application/json",
    ],
)
def test_a_body_that_a_page_may_send_unasked_is_refused(echo: RunningServer, path: str, kind: str) -> None:
    status, _, raw = ask(echo, "POST", path, BODY, Content_Type=kind)
    error = json.loads(raw)["error"]
    assert (status, error["param"]) == (415, "body"), raw
    assert "has to be application/json" in error["message"]


def test_a_pages_untyped_body_is_refused_and_another_clients_is_read(echo: RunningServer) -> None:
    assert ask(echo, "POST", ROUTES[0], BODY)[0] == 200
    assert ask(echo, "POST", ROUTES[0], BODY, Origin="https://evil.example")[0] == 415


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json", ""])
def test_json_is_read_by_any_of_its_names(echo: RunningServer, kind: str) -> None:
    assert ask(echo, "POST", ROUTES[0], BODY, Content_Type=kind)[0] == 200


def test_no_page_may_use_a_server_without_allowed_origins(echo: RunningServer) -> None:
    status, headers, raw = ask(echo, "OPTIONS", ROUTES[0], Origin=PAGE, **ASKED)
    assert (status, "error" in json.loads(raw)) == (405, True)
    status, other, _ = ask(echo, "POST", ROUTES[0], BODY, Content_Type="application/json", Origin=PAGE)
    assert status == 200, "curl and servers may name an origin"
    assert not [name for name in (*headers, *other) if name.lower().startswith("access-control")]


@pytest.mark.parametrize("path", [*ROUTES, "/v1/models", "/v1/models/tiny"])
def test_an_allowed_page_is_told_what_it_may_send(allowing: RunningServer, path: str) -> None:
    status, headers, body = ask(allowing, "OPTIONS", path, Origin=PAGE, **ASKED)
    assert (status, body) == (204, b"")
    assert headers["Access-Control-Allow-Origin"] == PAGE
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert headers["Access-Control-Allow-Headers"] == ASKED["Access-Control-Request-Headers"]
    assert headers["Vary"] == "Origin"


def test_an_allowed_page_may_read_answers_streams_and_errors(allowing: RunningServer) -> None:
    answers = [
        ask(allowing, "POST", ROUTES[0], BODY, Content_Type="application/json", Origin=PAGE),
        ask(allowing, "POST", ROUTES[1], CHAT, Content_Type="application/json", Origin=PAGE),
        ask(allowing, "POST", ROUTES[1], "{", Content_Type="application/json", Origin=PAGE),
        ask(allowing, "GET", "/v1/nothing", Origin=PAGE),
    ]
    assert [status for status, *_ in answers] == [200, 200, 400, 404]
    assert {headers["Access-Control-Allow-Origin"] for _, headers, _ in answers} == {PAGE}


def test_another_page_is_refused_and_named(allowing: RunningServer) -> None:
    status, headers, raw = ask(allowing, "OPTIONS", ROUTES[0], Origin="https://evil.example", **ASKED)
    assert (status, headers["Access-Control-Allow-Origin"]) == (403, None)
    assert "https://evil.example" in json.loads(raw)["error"]["message"]
    _, headers, _ = ask(allowing, "GET", "/v1/models", Origin="https://evil.example")
    assert (headers["Access-Control-Allow-Origin"], headers["Vary"]) == (None, "Origin")
