"""What is measured is what the server did; what went wrong is named and not counted."""

from __future__ import annotations

import random

import aiohttp
import pytest

from hpu_engine.bench.client import Answer, BenchError, Target, run_workload, served_model
from hpu_engine.bench.figures import summarise
from hpu_engine.bench.workload import Request, TokenIds, Workload
from tests.bench.scripted_server import ScriptedServer, scripted

IDS = TokenIds(5, 9)


def workload(count: int, concurrency: int, tokens: int = 8) -> Workload:
    rng = random.Random(0)
    return Workload("w", tuple(Request("all", 0.0, IDS.prompt(rng, 16), tokens) for _ in range(count)), concurrency)


async def run(server: ScriptedServer, work: Workload, limit: float = 60.0) -> tuple[Answer, ...]:
    async with scripted(server), aiohttp.ClientSession() as session:
        target = Target(server.url, await served_model(session, server.url))
        return await run_workload(session, target, work, limit)


async def test_times_and_tokens_are_those_of_the_server() -> None:
    server = ScriptedServer(first_seconds=0.2, next_seconds=0.03)
    answers = await run(server, workload(4, 4))
    figures = summarise("w", answers, (1.0, 1.0), None)
    (kind,) = figures.kinds
    assert (figures.output_tokens, figures.prompt_tokens, figures.failed) == (32, 64, 0)
    # A busy machine is late, never early: the upper bounds only tell a time from a sum of several.
    assert kind.ttft_ms.p50 is not None
    assert 200 <= kind.ttft_ms.p50 < 2000
    assert kind.itl_ms.p50 is not None
    assert 20 <= kind.itl_ms.p50 < 300
    assert len(kind.itl_samples_ms) == 4 * 7
    assert 0.4 <= figures.seconds < 4
    assert figures.output_tokens_per_second == pytest.approx(32 / figures.seconds)


async def test_the_request_asks_for_a_fixed_amount_of_greedy_work() -> None:
    server = ScriptedServer(0.0, 0.0)
    await run(server, workload(1, 1))
    (body,) = server.bodies
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"], len(body["prompt"])) == (0.0, True, 8, 16)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


async def test_no_more_requests_are_open_than_the_workload_allows() -> None:
    server = ScriptedServer(0.02, 0.0)
    answers = await run(server, workload(6, 2))
    assert server.open_most == 2
    assert [answer.error for answer in answers] == [None] * 6


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("status", "503"),
        ("cut", "without [DONE]"),
        ("error", "worker lost"),
        ("nonsense", "none of a completion"),
        ("no usage", "no usage"),
        ("hang", "not finished within"),
    ],
)
async def test_a_faulty_answer_is_named_and_not_counted(fault: str, named: str) -> None:
    answers = await run(ScriptedServer(0.0, 0.0, fault=fault), workload(2, 2), limit=1.0 if fault == "hang" else 60.0)
    figures = summarise("w", answers, (1.0, 1.0), None)
    assert named in str(figures.first_error)
    assert (figures.failed, figures.output_tokens) == (2, 0)
    assert figures.kinds[0].ttft_ms.p50 is None


async def test_a_server_that_is_not_there_is_an_error_of_one_line() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(BenchError, match=r"no server at http://127\.0\.0\.1:9"):
            await served_model(session, "http://127.0.0.1:9")
