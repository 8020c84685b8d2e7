"""What is refused and what is taken, as OpenAI's clients expect it. A refusal names the parameter; serving goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpu_engine.server.api.protocol import read_chat, read_completion
from hpu_engine.server.errors import ApiError
from tests.server.running import RunningServer, get, post

GOOD = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

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
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1.5}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"echo": "loud"}, "echo"),
    ({"echo": [True]}, "echo"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**40}, "n"),
    ({"n": 128, "prompt": ["a", "b", "c"]}, "n"),
    ({"n": 128, "max_tokens": 500, "logprobs": 20}, "logprobs"),
    ({"prompt": [[70] * 500] * 200, "prompt_logprobs": 20}, "prompt_logprobs"),
    ({"prompt": [[70] * 500] * 200, "echo": True, "logprobs": 20, "max_tokens": 0}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": "a"}, "logit_bias"),
    ({"logit_bias": {"a": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"1.5": 5}}, "logit_bias"),
    ({"logit_bias": {" 1": 5}}, "logit_bias"),
    ({"logit_bias": {"": 5}}, "logit_bias"),
    ({"logit_bias": {"٣": 5}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 5}}, "logit_bias"),
    ({"logit_bias": {"330": 5}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": -100.5}}, "logit_bias"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias"),
    ({"logit_bias": {"1": math.nan}}, "logit_bias"),
    ({"logit_bias": {"1": math.inf}}, "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"logit_bias": {"1": {"2": 3}}}, "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(5_000)}}, "logit_bias"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"min_tokens": 17, "max_tokens": None}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 1.5}, "min_tokens"),
    ({"min_tokens": 10**40}, "min_tokens"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": math.nan}, "presence_penalty"),
    ({"presence_penalty": True}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": math.inf}, "frequency_penalty"),
    ({"frequency_penalty": []}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 1e-30}, "repetition_penalty"),
    ({"repetition_penalty": 1e30}, "repetition_penalty"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"repetition_penalty": math.inf}, "repetition_penalty"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"bad_words": ["no"]}, "bad_words"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
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
    ({"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"top_logprobs": 5, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": True, "logprobs": True}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": {}}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"n": 129}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"logit_bias": {"330": 1}}, "logit_bias"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
]

TAKEN: list[dict[str, Any]] = [
    {"max_tokens": "4"},
    {"max_tokens": None},
    {"max_tokens": 512},  # beyond the context with the prompt: cut to what is left
    {"max_tokens": 10**12},
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
    {"logprobs": False},
    {"logprobs": 0},
    {"logprobs": 20, "prompt_logprobs": 20, "echo": True, "n": 2, "best_of": 2},
    {"max_tokens": 0, "echo": True},
    {"n": "2"},
    {"logit_bias": {"1": 100, "02": -100, "3": 0.5}},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.3, "min_p": 1},
    {"min_tokens": 2},
    {"min_tokens": 3, "max_tokens": 500, "prompt": [70] * 510},
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "messages: at least one message is needed"),
        ({"messages": None}, "messages: is missing"),
        ({"messages": "hi"}, "messages: has to be a list"),
        ({"messages": [5]}, "messages[0]: has to be an object"),
        ({"messages": CHAT["messages"] * 4097}, "messages: at most 4096 messages are allowed, not 4097"),
        ({"stop": 5}, "stop: has to be a string or a list of strings"),
        ({"seed": "x"}, "seed: has to be a whole number"),
        ({"seed": 2**63}, "seed: has to be less than 9223372036854775808"),
        ({"top_p": 0}, "top_p: has to be greater than 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_speaks_of_json_and_not_of_a_validator(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as raised:
        read_chat({**CHAT, **change})
    assert raised.value.message == words


@pytest.mark.parametrize("change", [change for change, _ in [*REFUSED, *REFUSED_CHATS]], ids=lambda v: str(v)[:40])
def test_no_refusal_leaks_the_validators_words(change: dict[str, Any]) -> None:
    said = refusal_of(read_completion, {**GOOD, **change}) + refusal_of(read_chat, {**CHAT, **change})
    for jargon in ("tuple", "dictionary", "instance of", "nput should", "validation", "parse", "ield required"):
        assert jargon not in said


def refusal_of(read: Callable[[dict[str, Any]], object], body: dict[str, Any]) -> str:
    """Empty where nothing is refused."""
    try:
        read(body)
    except ApiError as error:
        return error.message
    return ""


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


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
FIELDS = st.sampled_from(
    [
        *("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "stream_options", "n", "logprobs", "logit_bias", "tools", "echo", "best_of"),
        *("top_logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"),
        *("min_tokens", "skip_special_tokens", "add_special_tokens", "cache_salt"),
        "chat_template_kwargs",
    ]
)


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(chat=st.booleans(), changes=st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3))
def test_no_field_of_any_kind_breaks_the_server(echo: RunningServer, chat: bool, changes: dict[str, Any]) -> None:
    path, good = ("chat/completions", CHAT) if chat else ("completions", GOOD)
    status, body = post(f"{echo.url}/v1/{path}", {**good, **changes})
    assert status in (200, 400, 404), body
    assert status == 200 or body["error"]["param"]
    assert post(f"{echo.url}/v1/completions", GOOD)[0] == 200
