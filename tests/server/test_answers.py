"""What the two generating routes answer, asked by the `openai` client. The worker echoes the prompt's tokens."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.running import RunningServer, get, post, wait_until


@pytest.fixture
def client(echo: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


TEXT = "A request is a list of tokens. 你好 🙂🚀 café"


def test_a_whole_completion_has_text_usage_and_reason(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=400)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("cmpl-")
    choice = answer.choices[0]
    assert choice.text.startswith(TEXT + TEXT)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 400
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 400


def test_max_tokens_is_sixteen_unless_said_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="ab")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_stream_is_the_whole_text_and_tears_no_character(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=TEXT, max_tokens=300).choices[0].text
    chunks = list(client.completions.create(model="tiny", prompt=TEXT, max_tokens=300, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert all("\N{REPLACEMENT CHARACTER}" not in chunk.choices[0].text for chunk in chunks[:-1])
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.choices[0].text for chunk in chunks[:-1]), "an empty chunk says nothing"


def test_usage_in_a_stream_comes_last_and_only_on_request(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="tiny", prompt="abc", max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_many_prompts_are_answered_in_their_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["first", "second", "third"], max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text[0] for choice in answer.choices] == ["f", "s", "t"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9


def test_token_ids_are_prompts_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[70, 71], max_tokens=4)
    many = client.completions.create(model="tiny", prompt=[[70, 71], [71, 70]], max_tokens=4)
    assert many.choices[0].text == answer.choices[0].text
    assert many.choices[1].text == answer.choices[0].text[::-1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2


def test_streams_of_many_prompts_belong_to_their_index(client: openai.OpenAI) -> None:
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt=["xyz", "uvw"], max_tokens=9, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    whole = client.completions.create(model="tiny", prompt=["xyz", "uvw"], max_tokens=9)
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_is_no_part_of_it(client: openai.OpenAI, stream: bool) -> None:
    prompt = "one two three. "
    if stream:
        chunks = list(
            client.completions.create(model="tiny", prompt=prompt, max_tokens=90, stop=["ee. o"], stream=True)
        )
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
        stop = (chunks[-1].choices[0].model_extra or {})["stop_reason"]
    else:
        choice = client.completions.create(model="tiny", prompt=prompt, max_tokens=90, stop=["ee. o"]).choices[0]
        text, reason, stop = choice.text, choice.finish_reason, (choice.model_extra or {})["stop_reason"]
    assert (text, reason, stop) == ("one two thr", "stop", "ee. o")


def test_tokens_after_a_stop_string_are_not_counted(echo: RunningServer) -> None:
    body = {"prompt": "q q q q q q q q", "max_tokens": 100, "stop": "q q q"}
    answer = post(f"{echo.url}/v1/completions", body)[1]
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] <= 5


def test_the_models_own_end_of_sequence_ends_without_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[70, 71, 2], max_tokens=50)
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].text) == 2
    assert (answer.choices[0].model_extra or {})["stop_reason"] is None
    on = client.completions.create(model="tiny", prompt=[70, 71, 2], max_tokens=50, extra_body={"ignore_eos": True})
    assert on.choices[0].finish_reason == "length"


def test_a_stop_token_id_of_the_client_is_named(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=[70, 71, 72], max_tokens=50, extra_body={"stop_token_ids": [72]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].model_extra or {})["stop_reason"] == 72
    assert len(answer.choices[0].text) == 2


def test_a_chat_answers_as_the_assistant(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=3)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_streams_role_content_reason_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}],
            max_completion_tokens=8,
            extra_body={"ignore_eos": True},
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[1:-1])
    whole = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    assert text == whole.choices[0].message.content
    assert text.lstrip().startswith("user")  # the echoed template begins with the role of the first turn


def test_no_chunk_of_a_chat_is_empty_but_the_first_and_the_last(client: openai.OpenAI) -> None:
    """Not where a character is split over tokens, and not where a token is no text."""
    turns: Any = [{"role": "user", "content": TEXT}]
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=turns, max_tokens=150, extra_body={"ignore_eos": True}, stream=True
        )
    )
    first, *middle, _ = [chunk.choices[0] for chunk in chunks]
    assert first.delta.role == "assistant"
    assert all(choice.delta.content for choice in middle)
    assert len(middle) < 140, "every token was a character; this proves nothing"


def test_requests_that_call_themselves_alike_are_two(echo: RunningServer) -> None:
    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 60, "request_id": "mine", "ignore_eos": True}
        text: str = post(f"{echo.url}/v1/completions", body)[1]["choices"][0]["text"]
        return text

    prompts = [char * 3 for char in "abcdefgh"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, prompts))
    assert [set(text) for text in texts] == [{prompt[0]} for prompt in prompts]


def test_a_chat_without_a_limit_may_use_the_rest_of_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_models_can_be_listed_and_looked_up(client: openai.OpenAI, echo: RunningServer) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, (model.model_extra or {})["max_model_len"]) == ("tiny", "model", 512)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other/model")
    assert get(f"{echo.url}/health")[0] == 200


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(echo: RunningServer) -> None:
    status, body = post(f"{echo.url}/v1/completions", {"prompt": [7] * 600, "stream": True})
    assert status == 400
    assert "600 tokens" in body["error"]["message"]
    assert "512" in body["error"]["message"]
    assert body["error"]["param"] == "prompt"


def test_a_row_does_not_go_on_behind_its_stop_string(shell: Path) -> None:
    """It would run for another minute; the worker is told to forget it."""
    with RunningServer(shell, {"step_seconds": 0.2}).wait_until_ready() as server:
        body = {"prompt": "xyz", "max_tokens": 400, "stop": "z"}
        assert post(f"{server.url}/v1/completions", body)[1]["choices"][0]["text"] == "xy"
        wait_until(lambda: server.state().ranks[0].running == 0, "the row is gone", server)
        assert server.metric("vllm:iteration_tokens_total_count") < 200
