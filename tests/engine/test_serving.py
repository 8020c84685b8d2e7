"""Real answers over HTTP: the real worker behind the real server, asked by the `openai` client."""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.running import PATIENCE_SECONDS, RunningServer, post, wait_until
from tests.server.test_conformance import CHAT, GOOD, REFUSED, REFUSED_CHATS, TAKEN, check_refused

PROMPT = "Blocks hold what was computed, so that"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 48, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Iterator[RunningServer]:
    with RunningServer(tiny_llama, dtype="float32", max_model_len=512, num_kv_blocks=64) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[RunningServer]:
    with RunningServer(smollm2, served_model_name="smollm2", max_model_len=2048) as server:
        yield server.wait_until_ready()


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


def test_a_stream_equals_the_whole_text(tiny: RunningServer) -> None:
    client = client_of(tiny)
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    chunks = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 48


def test_a_seed_repeats_an_answer_whatever_else_runs(tiny: RunningServer) -> None:
    client = client_of(tiny)

    def ask(seed: int) -> str:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=32, temperature=1.0, seed=seed)
        return answer.choices[0].text

    alone = ask(7)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, [7, 1, 2, 7, 3, 4, 7, -5]))
    assert [together[i] for i in (0, 3, 6)] == [alone] * 3
    assert len({*together}) >= 5, "other seeds choose otherwise"
    unseeded = {client.completions.create(model="tiny", prompt=PROMPT, max_tokens=32).choices[0].text for _ in range(3)}
    assert len(unseeded) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_any_part_of_the_text_can_be_a_stop_string(tiny: RunningServer, stream: bool) -> None:
    """Thirty random substrings of the answer: the text ends right before the first one, in a stream as well."""
    client = client_of(tiny)
    whole = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    draw = random.Random(5)
    for _ in range(30):
        start = draw.randrange(len(whole) - 1)
        stop = whole[start : start + draw.randrange(1, 7)]
        if stream:
            chunks = list(client.completions.create(prompt=PROMPT, stop=[stop], stream=True, **GREEDY))
            text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
        else:
            choice = client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY).choices[0]
            text, reason = choice.text, choice.finish_reason
        assert text == whole[: whole.index(stop)], stop
        assert reason == "stop"
    wait_until(lambda: tiny.state().ranks[0].running == 0, "stopped rows are gone", tiny)


def test_many_at_once_get_what_each_gets_alone(tiny: RunningServer) -> None:
    client = client_of(tiny)
    prompts = [f"{PROMPT} {number}" for number in range(24)]

    def ask(prompt: str) -> str:
        text: str = client.completions.create(prompt=prompt, **GREEDY).choices[0].text
        return text

    alone = [ask(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, prompts)) == alone
    listed = client.completions.create(prompt=prompts, **GREEDY)
    assert [choice.text for choice in listed.choices] == alone


def test_the_conformance_table_holds_with_the_real_worker(tiny: RunningServer) -> None:
    for change, param in REFUSED:
        check_refused(post(f"{tiny.url}/v1/completions", {**GOOD, **change}), param)
    for change, param in REFUSED_CHATS:
        check_refused(post(f"{tiny.url}/v1/chat/completions", {**CHAT, **change}), param)
    for change in TAKEN:
        if change != {"prompt": [325]}:  # this vocabulary ends at 319
            assert post(f"{tiny.url}/v1/completions", {**GOOD, **change})[0] == 200, change
    assert post(f"{tiny.url}/v1/completions", GOOD)[0] == 200


def test_the_boundary_of_the_pool_refuses_with_both_numbers_or_ends_with_length(tiny_llama: Path) -> None:
    """The context is longer than the pool of 256 tokens: no request may wait there for ever."""
    with RunningServer(tiny_llama, max_model_len=512, num_kv_blocks=4, block_size=64).wait_until_ready() as server:
        for stream in (False, True):
            body = {"prompt": [7] * 300, "max_tokens": 1, "stream": stream}
            status, answer = post(f"{server.url}/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, "prompt")
            assert "300" in answer["error"]["message"]
            assert "256" in answer["error"]["message"]
        for wanted in (155, 156, 157, 400):
            body = {"prompt": [7] * 100, "max_tokens": wanted, "ignore_eos": True}
            status, answer = post(f"{server.url}/v1/completions", body)
            assert (status, answer["usage"]["completion_tokens"]) == (200, min(wanted, 156))
            assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_free_their_blocks(tiny: RunningServer, stream: bool) -> None:
    aborted = tiny.metric("vllm:request_success_total", finished_reason="abort")
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", tiny.port), PATIENCE_SECONDS) as raw:
            prompts = [f"{PROMPT} {number}" for number in range(8)]
            body = json.dumps({"prompt": prompts, "max_tokens": 480, "ignore_eos": True, "stream": stream}).encode()
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: tiny.state().ranks[0].kv_blocks_used > 0, "the rows have blocks", tiny)
        wait_until(lambda: tiny.state().ranks[0].kv_blocks_used == 0, "all blocks are free", tiny)
    assert tiny.metric("vllm:request_success_total", finished_reason="abort") == aborted + 40
    assert post(f"{tiny.url}/v1/completions", GOOD)[0] == 200


def test_a_real_model_chats(smol: RunningServer) -> None:
    client = client_of(smol)
    question: Any = [{"role": "user", "content": "Please tell me the capital of France."}]
    answer = client.chat.completions.create(model="smollm2", messages=question, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    chunks = list(
        client.chat.completions.create(
            model="smollm2", messages=question, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == "The capital of France is Paris."
    assert chunks[-1].usage == answer.usage
    stopped = client.chat.completions.create(model="smollm2", messages=question, temperature=0, stop=" is Par")
    assert stopped.choices[0].message.content == "The capital of France"


def test_characters_that_are_several_tokens_stream_whole(smol: RunningServer) -> None:
    client = client_of(smol)
    prompt = "Repeat exactly: 你好 🙂🚀 ďábel 🙂🚀 你好 🙂🚀 ďábel 🙂🚀 你好 🙂🚀 ďábel"
    settings: dict[str, Any] = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 60}
    whole = client.completions.create(**settings).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **settings)]
    assert "".join(pieces) == whole
    assert any(ord(char) > 127 for char in whole), "the model wrote no such character; the test proves nothing"
    inner = "".join(pieces[:-1])
    assert inner.count("\N{REPLACEMENT CHARACTER}") == whole[: len(inner)].count("\N{REPLACEMENT CHARACTER}")


def test_identity_and_plan_input_are_what_was_loaded(smol: RunningServer) -> None:
    state = smol.state()
    assert (state.model.architecture, state.model.parameters) == ("LlamaForCausalLM", 134_515_008)
    assert state.model.max_model_len == 2048
    assert state.plan_input.kv_blocks == state.ranks[0].kv_blocks_total > 0
    assert state.ranks[0].loaded_bytes == state.ranks[0].total_bytes > 250_000_000
    assert state.ranks[0].warm_up.done == state.ranks[0].warm_up.total > 0
    beat = state.ranks[0].heartbeat_age_seconds
    assert beat is not None
    assert beat < 30
    assert time.monotonic() - smol.started > state.uptime_seconds
