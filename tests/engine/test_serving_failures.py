"""Over HTTP: an answer whose row fails ends with an error, all of its rows with it, and nobody else's."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.failing_worker import SEED
from tests.server.running import PATIENCE_SECONDS, RunningServer, post, wait_until
from tests.server.test_conformance import GOOD


@pytest.fixture(scope="module")
def failing(tiny_llama: Path) -> Iterator[RunningServer]:
    flags: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_kv_blocks": 64}
    with RunningServer(tiny_llama, worker="tests.engine.failing_worker", **flags) as server:
        yield server.wait_until_ready()


BODY: dict[str, Any] = {"prompt": "Blocks hold", "max_tokens": 40, "ignore_eos": True, "seed": SEED, "n": 3}


def stream(server: RunningServer, body: dict[str, Any]) -> list[str]:
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        return [line.decode().removeprefix("data: ").strip() for line in answer if line.strip()]


def test_an_exception_in_one_samples_row_fails_that_request_alone(failing: RunningServer) -> None:
    fine = {**BODY, "seed": 7, "max_tokens": 200}
    alone = post(f"{failing.url}/v1/completions", fine)[1]["choices"]
    ended = failing.metric("vllm:request_success_total", finished_reason="error")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        beside = pool.submit(post, f"{failing.url}/v1/completions", fine)
        wait_until(lambda: failing.state().ranks[0].running > 0, "the other request runs", failing)
        status, body = post(f"{failing.url}/v1/completions", BODY)
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "ZeroDivisionError" in body["error"]["message"]
        events = stream(failing, BODY)
        assert beside.result()[0] == 200
        assert beside.result()[1]["choices"] == alone
    assert "[DONE]" not in events
    texts = [json.loads(event) for event in events]
    assert "ZeroDivisionError" in texts[-1]["error"]["message"]
    assert {event["choices"][0]["index"] for event in texts[:-1]} == {0, 1, 2}, "all three samples had begun"
    assert failing.metric("vllm:request_success_total", finished_reason="error") == ended + 2
    wait_until(lambda: failing.state().ranks[0].kv_blocks_used == 0, "all blocks are free", failing)
    assert post(f"{failing.url}/v1/completions", GOOD)[0] == 200


def test_the_samples_beside_a_failed_one_do_not_run_on(failing: RunningServer) -> None:
    steps = failing.metric("vllm:iteration_tokens_total_count")
    assert post(f"{failing.url}/v1/completions", {**BODY, "max_tokens": 450})[0] == 500
    wait_until(lambda: failing.state().ranks[0].running == 0, "the other samples are gone", failing)
    assert failing.metric("vllm:iteration_tokens_total_count") - steps < 100


def test_a_request_of_the_same_prompt_without_the_bad_row_is_answered(failing: RunningServer) -> None:
    status, answer = post(f"{failing.url}/v1/completions", {**BODY, "n": 1})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 40)
