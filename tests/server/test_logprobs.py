"""Log-probabilities and echoed prompts, asked for by the `openai` client of a worker whose scores are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hpu_engine.server.api.logprobs import ScoredToken, completion_logprobs
from hpu_engine.text.token_bytes import Spelling
from hpu_engine.text.tokenizer import Tokenizer, load_tokenizer
from hpu_engine.wire.messages import TokenLogprobs
from tests.server.running import RunningServer, post
from tests.server.scripted_worker import scores_of

TEXT = "Many rows share 你好 🙂🚀 café"
CHAT: Any = [{"role": "user", "content": TEXT}]


@pytest.fixture
def client(echo: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(shell: Path) -> Tokenizer:
    return load_tokenizer(shell)


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tokenizer.encode_now(text, add_special_tokens=True)


def spelled(tokens: list[str]) -> bytes:
    """The bytes of tokens as they are spelled: text, or `bytes:\\xf0`."""
    parts = []
    for token in tokens:
        if token.startswith("bytes:"):
            parts.append(bytes(int(byte, 16) for byte in token.removeprefix("bytes:\\x").split("\\x")))
        else:
            parts.append(token.encode())
    return b"".join(parts)


def test_each_token_of_a_completion_has_its_scores_and_its_place(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, TEXT)
    choice = client.completions.create(model="tiny", prompt=TEXT, max_tokens=len(ids), logprobs=3).choices[0]
    scores = choice.logprobs
    assert scores is not None
    assert choice.text == TEXT
    assert spelled(scores.tokens or []) == TEXT.encode()
    assert scores.token_logprobs == [scores_of(token, 3).logprob for token in ids]
    for token_id, token, top, offset in zip(
        ids, scores.tokens or [], scores.top_logprobs or [], scores.text_offset or [], strict=True
    ):
        expected = scores_of(token_id, 3)
        assert top[token] == expected.logprob
        assert {tokenizer.spell(other).text: logprob for other, logprob in expected.top}.items() <= top.items()
        assert len(top) in (3, 4)
        if not token.startswith("bytes:"):
            assert TEXT[offset:].startswith(token)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_chosen_token_is_scored_whatever_the_count(client: openai.OpenAI, count: int) -> None:
    choice = client.completions.create(model="tiny", prompt=[71, 70], max_tokens=2, logprobs=count).choices[0]
    scores = choice.logprobs
    assert scores is not None
    assert scores.token_logprobs == [scores_of(71, 0).logprob, scores_of(70, 0).logprob]
    odd, even = scores.top_logprobs or []
    assert (len(odd), len(even)) == (count + 1, max(1, count))


def test_of_two_tokens_that_are_spelled_alike_the_likelier_one_is_shown() -> None:
    scores = TokenLogprobs(token_id=2, logprob=-5.0, top=((1, -0.5),))
    found = completion_logprobs([ScoredToken(2, scores, 0)], 1, lambda _: Spelling("x", b"x"))
    assert found.top_logprobs == ({"x": -0.5},)
    assert found.token_logprobs == (-5.0,)


def test_scores_are_asked_for_or_null(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].logprobs is None
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2)
    assert answer.choices[0].logprobs is None
    bare = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2, logprobs=True)
    assert bare.choices[0].logprobs is not None
    assert [token.top_logprobs for token in bare.choices[0].logprobs.content or []] == [[], []]


def test_a_chats_tokens_are_its_bytes(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "max_tokens": 60,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    choice = client.chat.completions.create(model="tiny", messages=CHAT, **options).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == 60
    shown = b"".join(bytes(token.bytes or ()) for token in content if token.token not in ("<role>", "<eos>"))
    assert shown.decode(errors="replace") == choice.message.content
    assert any(token.token.startswith("bytes:\\x") for token in content), "no character was split; this proves nothing"
    for token in content:
        assert spelled([token.token]) == bytes(token.bytes or ())
        assert len(token.top_logprobs) == 2
        assert token.logprob <= max(one.logprob for one in token.top_logprobs)


@pytest.mark.parametrize("stops", [[], ["ows s"], ["好"]])
def test_a_stream_has_the_scores_of_the_whole_beside_their_text(client: openai.OpenAI, stops: list[str]) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "max_tokens": 40, "logprobs": 2, "stop": stops}
    whole = client.completions.create(**options).choices[0]
    assert whole.logprobs is not None
    text = ""
    tokens: list[str] = []
    logprobs: list[float] = []
    offsets: list[int] = []
    for chunk in client.completions.create(stream=True, **options):
        choice = chunk.choices[0]
        scores = choice.logprobs
        assert scores is not None
        assert all(len(text) <= offset <= len(text + choice.text) for offset in scores.text_offset or [])
        text += choice.text
        tokens += scores.tokens or []
        logprobs += scores.token_logprobs or []
        offsets += scores.text_offset or []
        assert spelled(tokens).decode(errors="replace").startswith(text), "text before its token"
    assert text == whole.text
    assert (tokens, logprobs, offsets) == (
        whole.logprobs.tokens,
        whole.logprobs.token_logprobs,
        whole.logprobs.text_offset,
    )
    assert spelled(tokens).decode(errors="replace").startswith(text)
    for stop in stops:
        assert stop not in spelled(tokens).decode(errors="replace")


def test_a_streamed_chat_has_the_scores_of_the_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 50,
        "logprobs": True,
        "top_logprobs": 1,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.logprobs is not None
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == whole.logprobs.content
    assert len(streamed) == 50


def test_the_token_that_ends_a_text_is_scored_and_stands_at_its_end(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tiny", prompt=[70, 71, 2], max_tokens=50, logprobs=0).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*choice.text, "<eos>"]
    assert choice.logprobs.text_offset == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["text", "tokens"])
def test_an_echoed_prompt_stands_before_every_sample(
    client: openai.OpenAI, tokenizer: Tokenizer, given: str, stream: bool
) -> None:
    texts = [TEXT, "two words"]
    prompts: Any = texts if given == "text" else [list(ids_of(tokenizer, text)) for text in texts]
    options: dict[str, Any] = {"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 3, "logprobs": 1, "echo": True}
    found: dict[int, dict[str, list[Any]]] = {}
    for answer in (
        client.completions.create(stream=True, **options) if stream else [client.completions.create(**options)]
    ):
        for choice in answer.choices:
            mine = found.setdefault(choice.index, {"text": [], "tokens": [], "logprobs": [], "offsets": [], "top": []})
            assert choice.logprobs is not None
            mine["text"] += choice.text
            mine["tokens"] += choice.logprobs.tokens or []
            mine["logprobs"] += choice.logprobs.token_logprobs or []
            mine["offsets"] += choice.logprobs.text_offset or []
            mine["top"] += choice.logprobs.top_logprobs or []
    assert sorted(found) == [0, 1, 2, 3]
    for index, mine in found.items():
        prompt = texts[index // 2]
        ids = ids_of(tokenizer, prompt)
        answer_ids = [ids[(index % 2 + place) % len(ids)] for place in range(3)]
        text = "".join(mine["text"])
        assert text.startswith(prompt)
        assert spelled(mine["tokens"]).decode(errors="replace") == text
        assert mine["logprobs"] == [None, *(scores_of(token, 1).logprob for token in (*ids[1:], *answer_ids))]
        assert mine["top"][0] is None
        for token, offset in zip(mine["tokens"], mine["offsets"], strict=True):
            assert token.startswith("bytes:") or text[offset:].startswith(token)


def test_an_echo_without_scores_is_text_only(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tiny", prompt="ab", max_tokens=2, echo=True).choices[0]
    assert (choice.text, choice.logprobs) == ("abab", None)


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_echoes_the_prompt_alone(echo: RunningServer, client: openai.OpenAI, stream: bool) -> None:
    before = echo.metric("vllm:generation_tokens_total")
    options: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        usage = {"include_usage": True}
        chunks = list(client.completions.create(stream=True, stream_options=usage, **options))  # type: ignore[call-overload]
        (choice,), last = chunks[0].choices, chunks[-1]
        assert len(chunks) == 2
    else:
        last = client.completions.create(**options)
        (choice,) = last.choices
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == last.usage.prompt_tokens
    assert last.usage.completion_tokens == 0
    assert echo.metric("vllm:generation_tokens_total") == before


def test_special_tokens_of_an_echoed_prompt_are_shown_when_asked_for(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": [1, 70, 71], "max_tokens": 0, "echo": True, "logprobs": 0}
    hidden = client.completions.create(**options).choices[0]
    shown = client.completions.create(extra_body={"skip_special_tokens": False}, **options).choices[0]
    assert shown.text == "<bos>" + hidden.text
    assert hidden.logprobs is not None
    assert shown.logprobs is not None
    assert hidden.logprobs.tokens == shown.logprobs.tokens
    assert hidden.logprobs.text_offset == [0, 0, 1]
    assert shown.logprobs.text_offset == [0, 5, 6]


def test_prompt_logprobs_are_by_token_id_in_both_routes(echo: RunningServer, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "some words")
    body = {"prompt": "some words", "max_tokens": 2, "n": 2, "prompt_logprobs": 2}
    choices = post(f"{echo.url}/v1/completions", body)[1]["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    first, *others = choices[0]["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip(ids[1:], others, strict=True):
        expected = scores_of(token_id, 2)
        likely = {str(other): place for place, (other, _) in enumerate(expected.top, 1)}
        assert entry[str(token_id)] == {
            "logprob": expected.logprob,
            "rank": likely.get(str(token_id)),
            "decoded_token": tokenizer.spell(token_id).text,
        }
        assert set(entry) == {*likely, str(token_id)}
    status, answer = post(
        f"{echo.url}/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "n": 2, "prompt_logprobs": 0}
    )
    assert status == 200
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (len(answer["prompt_logprobs"]) - 1)


def test_a_prompt_of_one_token_has_one_null_score(echo: RunningServer) -> None:
    body = {"prompt": [70], "max_tokens": 0, "echo": True, "logprobs": 5, "prompt_logprobs": 5}
    choice = post(f"{echo.url}/v1/completions", body)[1]["choices"][0]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"] == {
        "text_offset": [0],
        "token_logprobs": [None],
        "tokens": [choice["text"]],
        "top_logprobs": [None],
    }


def test_no_number_that_is_none_reaches_the_json() -> None:
    """The worker cuts minus infinity; should it ever slip, the body is JSON still."""
    from hpu_engine.server.api.responses import CompletionLogprobs, encode

    broken = CompletionLogprobs((0,), (float("nan"),), ("a",), ({"a": float("-inf")},))
    found = json.loads(encode(broken), parse_constant=pytest.fail)
    assert (found["token_logprobs"], found["top_logprobs"]) == ([None], [{"a": None}])
