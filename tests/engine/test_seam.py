"""The scripted worker behaves like the real one in everything that the server's tests rely on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpu_engine.contract import Phase
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.wire.messages import Abort, Heartbeat, Loaded, Progress, Ready, Rejected, StepOutputs, Stop, Submit
from tests.engine.worker_process import REAL, WorkerProcess, worker_process

SCRIPTED = (sys.executable, "-m", "tests.server.scripted_worker", "--script", '{"step_seconds": 0.002}')


@pytest.fixture(scope="module", params=[REAL, SCRIPTED], ids=["real", "scripted"])
def worker(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[WorkerProcess]:
    config = EngineConfig(model=str(tiny_llama), max_model_len=512, num_kv_blocks=16, dtype="float32")
    with worker_process(config, request.param) as worker:
        worker.until(lambda message: isinstance(message, Ready))
        yield worker


def submit(worker: WorkerProcess, name: str, prompt: tuple[int, ...] = (70, 71, 72), **params: object) -> None:
    settings = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]
    worker.send(Submit(request_id=name, prompt_token_ids=prompt, params=settings))


def idle_beat(worker: WorkerProcess) -> Heartbeat:
    beat = worker.until(lambda message: isinstance(message, Heartbeat) and message.running == 0)
    assert isinstance(beat, Heartbeat)
    return beat


def test_the_start_goes_load_loaded_warm_up_ready(worker: WorkerProcess) -> None:
    start = worker.seen[: [type(message) for message in worker.seen].index(Ready)]
    phases = [message.phase for message in start if isinstance(message, Progress)]
    assert phases == sorted(phases, key=[Phase.STARTING, Phase.LOADING, Phase.WARMING_UP].index)
    assert {Phase.LOADING, Phase.WARMING_UP} <= set(phases)
    loads = [message for message in start if isinstance(message, Progress) and message.phase is Phase.LOADING]
    assert loads[-1].done == loads[-1].total > 0
    warm_ups = [message for message in start if isinstance(message, Progress) and message.phase is Phase.WARMING_UP]
    assert warm_ups[-1].done == warm_ups[-1].total > 0
    (loaded,) = [message for message in start if isinstance(message, Loaded)]
    assert (loaded.max_model_len, loaded.num_kv_blocks, loaded.block_size) == (512, 16, 128)
    assert not any(isinstance(message, StepOutputs | Heartbeat) for message in start)


def test_tokens_come_until_the_limit_and_the_last_row_says_so(worker: WorkerProcess) -> None:
    submit(worker, "limit", max_tokens=9, ignore_eos=True)
    rows = worker.rows_until_finished("limit")
    assert sum(len(row.token_ids) for row in rows) == 9
    assert [row.finish for row in rows[:-1]] == [None] * (len(rows) - 1)
    assert (rows[-1].finish, rows[-1].stop_token_id) == ("length", None)


def test_a_stop_token_is_the_last_token_of_the_row_and_named(worker: WorkerProcess) -> None:
    submit(worker, "look", max_tokens=9, ignore_eos=True)
    tokens = [token for row in worker.rows_until_finished("look") for token in row.token_ids]
    stop = tokens[2]
    submit(worker, "stop", max_tokens=50, ignore_eos=True, stop_token_ids=(stop,))
    rows = worker.rows_until_finished("stop")
    got = [token for row in rows for token in row.token_ids]
    assert got == tokens[: tokens.index(stop) + 1]
    assert (rows[-1].finish, rows[-1].stop_token_id) == ("stop", stop)


def test_an_abort_ends_a_row_without_a_word_and_frees_its_blocks(worker: WorkerProcess) -> None:
    submit(worker, "gone", max_tokens=400, ignore_eos=True)
    worker.until(lambda message: isinstance(message, StepOutputs))
    worker.send(Abort(request_ids=("gone", "never existed")))
    beat = idle_beat(worker)
    assert beat.kv_blocks_used == 0
    last = [row for message in worker.seen if isinstance(message, StepOutputs) for row in message.rows][-1]
    assert (last.request_id, last.finish) == ("gone", None)


def test_a_prompt_that_can_never_fit_is_rejected_with_both_numbers(worker: WorkerProcess) -> None:
    submit(worker, "big", prompt=(5,) * 600, max_tokens=1)
    refusal = worker.until(lambda message: isinstance(message, Rejected | StepOutputs))
    assert isinstance(refusal, Rejected)
    assert (refusal.request_id, refusal.internal, refusal.param) == ("big", False, "prompt")
    assert "600" in refusal.message
    assert "512" in refusal.message


def test_an_output_that_would_pass_the_end_is_cut_there(worker: WorkerProcess) -> None:
    submit(worker, "end", prompt=(5,) * 500, max_tokens=100, ignore_eos=True)
    rows = worker.rows_until_finished("end")
    assert (sum(len(row.token_ids) for row in rows), rows[-1].finish) == (12, "length")


def test_each_token_and_each_prompt_token_but_the_first_is_scored_as_asked(worker: WorkerProcess) -> None:
    prompt = tuple(range(60, 100))
    submit(worker, "scored", prompt, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    rows = worker.rows_until_finished("scored")
    scored = [one for row in rows for one in row.prompt_logprobs or ()]
    assert [one.token_id for one in scored] == list(prompt[1:])
    first_token = next(place for place, row in enumerate(rows) if row.token_ids)
    assert all(row.prompt_logprobs is None for row in rows[first_token + 1 :]), "scores come before the tokens"
    assert [one.token_id for row in rows for one in row.logprobs or ()] == [t for row in rows for t in row.token_ids]
    for one, count in [*((one, 2) for one in scored), *((one, 3) for row in rows for one in row.logprobs or ())]:
        logprobs = [logprob for _, logprob in one.top]
        assert len(logprobs) == count
        assert logprobs == sorted(logprobs, reverse=True)
        assert one.logprob <= 0


def test_a_sample_begins_once_the_first_one_has_the_prompt_and_says_so(worker: WorkerProcess) -> None:
    prompt = tuple(range(60, 100))
    settings = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    worker.send(Submit(request_id="first", prompt_token_ids=prompt, params=settings))
    other = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    worker.send(Submit(request_id="other", prompt_token_ids=prompt, params=other, shares_prompt_with="first"))
    seen = len(worker.seen)
    worker.rows_until_finished("other")
    steps = [message for message in worker.seen[seen:] if isinstance(message, StepOutputs)]
    begun = [name for step in steps for name in step.begun]
    assert begun == ["first", "other"], "each once"
    order = [row.request_id for step in steps for row in step.rows if row.token_ids]
    scores = [row.request_id for step in steps for row in step.rows if row.prompt_logprobs]
    assert order[0] == "first"
    assert set(scores) == {"first"}
    assert (order.count("first"), order.count("other")) == (3, 3)


def test_heartbeats_count_steps_and_come_while_idle(worker: WorkerProcess) -> None:
    before = idle_beat(worker).steps
    submit(worker, "count", max_tokens=5, ignore_eos=True)
    worker.rows_until_finished("count")
    assert idle_beat(worker).steps >= before + 5
    assert idle_beat(worker).kv_blocks_total == 16


@pytest.mark.parametrize("command", [REAL, SCRIPTED], ids=["real", "scripted"])
def test_stop_ends_it_with_zero_and_a_closed_socket_ends_it_too(command: tuple[str, ...], tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), max_model_len=256, num_kv_blocks=8)
    with worker_process(config, command) as told:
        told.until(lambda message: isinstance(message, Ready))
        told.send(Stop())
        assert told.wait() == 0
    with worker_process(config, command) as left:
        left.until(lambda message: isinstance(message, Ready))
        left.socket.close()
        assert left.wait() != 0
