"""What is refused and what is taken, as OpenAI's clients expect it. A refusal names the parameter; serving goes on."""

from __future__ import annotations

import json
import math
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.running import RunningServer, get, post

GOOD = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [330]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"prompt": "word " * 100_000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 513}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [330]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "perhaps"}, "stream"),
    ({"logprobs": 1000}, "logprobs"),
    ({"logprobs": 0}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"n": 2}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"presence_penalty": 1.0}, "presence_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"model": 7}, "model"),
]

REFUSED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "word " * 100_000}]}, "messages"),
    ({"top_logprobs": 50}, "top_logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 513}, "max_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
]

TAKEN: list[dict[str, Any]] = [
    {"max_tokens": "4"},
    {"max_tokens": None},
    {"max_tokens": 512},  # beyond the context with the prompt: cut to what is left
    {"model": None},
    {"nobody_knows_this": {"deep": [1, 2]}},
    {"seed": -1},
    {"top_k": -1},
    {"top_k": 10**12},
    {"temperature": 0},
    {"temperature": 1e-12},
    {"stop": None},
    {"stop": []},
    {"logprobs": None, "n": 1, "echo": False, "best_of": 1, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    {"user": "somebody", "request_id": "r", "cache_salt": "s", "logit_bias": {}},
    {"stream": None, "stream_options": None},
    {"prompt": [325]},  # an id of the padded embedding that the tokenizer does not have
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_completion_is_refused_by_name(echo: RunningServer, change: dict[str, Any], param: str) -> None:
    check_refused(post(f"{echo.url}/v1/completions", {**GOOD, **change}), param)


@pytest.mark.parametrize(("change", "param"), REFUSED_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat_is_refused_by_name(echo: RunningServer, change: dict[str, Any], param: str) -> None:
    check_refused(post(f"{echo.url}/v1/chat/completions", {**CHAT, **change}), param)


def check_refused(answer: tuple[int, Any], param: str) -> None:
    status, body = answer
    error = body["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), body
    assert 5 < len(error["message"]) < 500
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("change", TAKEN, ids=lambda value: str(value)[:40])
def test_what_other_servers_take_is_taken(echo: RunningServer, change: dict[str, Any]) -> None:
    status, body = post(f"{echo.url}/v1/completions", {**GOOD, **change})
    assert status == 200, body
    assert body["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("role", ["user", "critic", "assistant"])
def test_any_role_may_speak_last(echo: RunningServer, role: str) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": role, "content": "ho"}]
    assert post(f"{echo.url}/v1/chat/completions", {**CHAT, "messages": turns})[0] == 200


def test_variables_for_the_template_cannot_replace_the_conversation(echo: RunningServer) -> None:
    body = {**CHAT, "chat_template_kwargs": {"messages": [], "add_generation_prompt": 0, "self": 1}}
    assert post(f"{echo.url}/v1/chat/completions", body)[0] == 200


def test_an_unknown_model_is_404_with_the_served_name(echo: RunningServer) -> None:
    status, body = post(f"{echo.url}/v1/completions", {**GOOD, "model": "gpt-x"})
    assert (status, body["error"]["param"], body["error"]["code"]) == (404, "model", "model_not_found")
    assert "tiny" in body["error"]["message"]


def test_wrong_methods_and_paths_are_errors_in_the_same_form(echo: RunningServer) -> None:
    status, raw = get(f"{echo.url}/v1/completions")
    assert (status, json.loads(raw)["error"]["type"]) == (405, "invalid_request_error")
    status, raw = get(f"{echo.url}/v1/nothing")
    assert (status, json.loads(raw)["error"]["type"]) == (404, "not_found_error")


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


def test_a_huge_body_is_refused_and_the_next_request_answers(echo: RunningServer) -> None:
    status, answer = post(f"{echo.url}/v1/completions", b'{"prompt": "' + b"a" * (17 * 1024 * 1024) + b'"}')
    assert (status, answer["error"]["param"]) == (400, "body")
    assert post(f"{echo.url}/v1/completions", GOOD)[0] == 200


@pytest.mark.parametrize(
    "noise",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_noise_on_the_port_stops_nobody(echo: RunningServer, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", echo.port), 10) as raw:
        raw.sendall(noise)
        raw.settimeout(10)
        raw.recv(4096)
    assert post(f"{echo.url}/v1/completions", GOOD)[0] == 200


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
FIELDS = st.sampled_from(
    [
        *("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "stream_options", "n", "logprobs", "logit_bias", "tools", "echo"),
        "chat_template_kwargs",
    ]
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chat=st.booleans(), changes=st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3))
def test_no_field_of_any_kind_breaks_the_server(echo: RunningServer, chat: bool, changes: dict[str, Any]) -> None:
    path, good = ("chat/completions", CHAT) if chat else ("completions", GOOD)
    status, body = post(f"{echo.url}/v1/{path}", {**good, **changes})
    assert status in (200, 400, 404), body
    assert status == 200 or body["error"]["param"]
    assert post(f"{echo.url}/v1/completions", GOOD)[0] == 200
