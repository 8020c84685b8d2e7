"""Room for prompt and output: a request is refused only where not one token fits, and the refusal names its field."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.server.errors import ApiError
from hpu_engine.server.metrics import Metrics
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.requests.sequence import ServedSequence, Sink
from hpu_engine.text.detokenizer import Detokenizer, TokenText
from hpu_engine.wire.messages import Rejected, Submit
from tests.server.running import RunningServer, post

POOL = 256
MODEL = 512


@pytest.fixture(scope="module")
def small_pool(shell: Path) -> Iterator[RunningServer]:
    """A KV cache of half the model's length."""
    script = {"step_seconds": 0.001, "tokens_per_step": 50, "num_kv_blocks": 2, "max_model_len": MODEL}
    with RunningServer(shell, script, block_size=POOL // 2) as server:
        yield server.wait_until_ready()


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "ignore_eos": True}


@pytest.mark.parametrize("wanted", [POOL + 1, MODEL + 1, 9000])
@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("completions", "max_tokens", {"prompt": [70] * 6, "ignore_eos": True}),
        ("chat/completions", "max_tokens", chat("hi")),
        ("chat/completions", "max_completion_tokens", chat("hi")),
    ],
    ids=["completion", "chat", "chat by the new name"],
)
def test_an_output_that_is_too_long_is_cut(
    small_pool: RunningServer, wanted: int, path: str, field: str, body: dict[str, Any]
) -> None:
    status, answer = post(f"{small_pool.url}/v1/{path}", {**body, field: wanted})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length"), answer
    assert answer["usage"]["total_tokens"] == POOL


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("completions", "prompt", {"prompt": [70] * POOL}),
        ("completions", "prompt", {"prompt": [[70], [70] * (POOL + 5)], "max_tokens": 9000}),
        ("chat/completions", "messages", chat("9 z! " * 70)),
        ("chat/completions", "messages", {**chat("9 z! " * 70), "max_completion_tokens": 2}),
    ],
)
def test_a_prompt_without_room_behind_it_is_refused_by_its_field(
    small_pool: RunningServer, path: str, param: str, body: dict[str, Any]
) -> None:
    status, answer = post(f"{small_pool.url}/v1/{path}", body)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded"), answer
    assert f"the KV cache of this server takes {POOL} tokens" in error["message"]


def test_the_last_token_of_room_is_given(small_pool: RunningServer) -> None:
    status, answer = post(f"{small_pool.url}/v1/completions", {"prompt": [70] * (POOL - 1), "max_tokens": 5})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["prompt", "messages"])
async def test_a_prompt_that_the_worker_refuses_has_the_clients_name_for_it(field: str) -> None:
    metrics = Metrics("tiny").for_rank(0)
    rank = ServedRank(0, metrics)
    sink: Sink = asyncio.Queue()
    sequence = ServedSequence(
        request_id="a",
        index=0,
        prompt_tokens=1,
        detokenizer=Detokenizer(TokenText(lambda _: b"", False)),
        shown_stop_ids=frozenset(),
        sink=sink,
        metrics=metrics,
        prompt_field=field,
    )
    rank.sequences.submit(sequence, Submit(request_id="a", prompt_token_ids=(1,), params=SamplingParams(max_tokens=1)))
    rank.handle(rank.workers[0], Rejected(request_id="a", message="token id 1 is unknown", param="prompt"))
    error = sink.get_nowait()
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (400, field)
