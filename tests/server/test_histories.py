"""The shapes of messages that OpenAI's schema allows in a history: all are taken, and what is no text is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpu_engine.server.api.history import ChatMessage
from hpu_engine.server.errors import ApiError
from tests.server.running import RunningServer, post

USER = {"role": "user", "content": "What is the weather?"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Ulm"}'}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
TEMPLATE = "{% for m in messages %}{{ m | tojson(sort_keys=True) }}\n{% endfor %}"


@pytest.fixture(scope="module")
def showing(shell: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its answer is the prompt, and the prompt is what the template is given."""
    model = tmp_path_factory.mktemp("showing") / "model"
    shutil.copytree(shell, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with RunningServer(model, {"step_seconds": 0.0005, "tokens_per_step": 50}) as server:
        yield server.wait_until_ready()


def turns_of(server: RunningServer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the template was given."""
    status, answer = post(f"{server.url}/v1/chat/completions", {"messages": messages, "echo": False})
    assert status == 200, answer
    text = answer["choices"][0]["message"]["content"]
    lines = text.splitlines()
    return [json.loads(line) for line in lines[: len(messages)]]


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}], ids=["null", "none", "empty"])
def test_an_assistant_that_calls_a_tool_needs_no_content(showing: RunningServer, content: dict[str, Any]) -> None:
    turns = turns_of(showing, [USER, {"role": "assistant", "tool_calls": [CALL], **content}])
    assert turns[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Ulm"}}
    assert turns[1].get("content", "") == ""


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "a", "name": "Ann"}),
        (
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        ),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        (
            {"role": "assistant", "content": "a", "tool_calls": [], "audio": None, "function_call": None},
            {"role": "assistant", "content": "a"},
        ),
        (
            {"role": "assistant", "content": None, "function_call": FUNCTION},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {**FUNCTION, "arguments": {"city": "Ulm"}}}],
            },
        ),
        ({"role": "function", "name": "f", "content": "3"}, {"role": "tool", "name": "f", "content": "3"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "hm"},
            {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm", "thinking": "hm"},
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_shape_of_the_schema_reaches_the_template(
    showing: RunningServer, message: dict[str, Any], turn: dict[str, Any] | str
) -> None:
    given = turns_of(showing, [message])[0]
    assert given == turn or given["content"] == turn


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": None}, "m.content: has to be a string or a list of text parts"),
        ({"role": "tool", "tool_call_id": "x"}, "m.content: is missing"),
        ({"role": "assistant", "content": None}, "m.content: is missing, and so are tool_calls"),
        ({"role": "assistant"}, "m.content: is missing, and so are tool_calls"),
        ({"role": "assistant", "tool_calls": []}, "m.content: is missing, and so are tool_calls"),
        ({"role": "assistant", "tool_calls": {}}, "m.tool_calls: has to be a list"),
        ({"role": "assistant", "tool_calls": [7]}, "m.tool_calls[0]: has to be an object"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "m.tool_calls[0].function: is missing"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "m.tool_calls[0].function.name: is missing"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "m.tool_calls[0].function.arguments: has to be a JSON object as a string",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]},
            "m.tool_calls[0].type: has to be 'function'",
        ),
        ({"role": "assistant", "function_call": "f"}, "m.function_call: has to be an object"),
        ({"role": "assistant", "audio": {"id": "a"}}, "m.audio: this model has no sound"),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "m.content[0].type: has to be 'text', not 'input_audio'",
        ),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}, "has to be 'text', not 'refusal'"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "m.content[0].refusal: is missing"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "m.content[0].type: has to be 'text'"),
        ({"role": "user", "content": ["text"]}, "m.content[0]: has to be an object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_turn_of_text_is_refused_by_name(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as raised:
        ChatMessage.model_validate(message).for_template("m")
    assert words in raised.value.message
    assert raised.value.param == raised.value.message.partition(": ")[0]


def test_documents_reach_the_template(shell: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shell, model)
    (model / "chat_template.jinja").write_text("{{ documents[0].text }}")
    with RunningServer(model, {"step_seconds": 0.0005}) as server:
        server.wait_until_ready()
        body = {"messages": [USER], "documents": [{"title": "t", "text": "abc"}], "max_tokens": 3}
        answer = post(f"{server.url}/v1/chat/completions", body)[1]
        assert answer["choices"][0]["message"]["content"] == "abc"
        status, answer = post(f"{server.url}/v1/chat/completions", {**body, "documents": ["abc"]})
        assert (status, answer["error"]["param"]) == (400, "documents[0]")
