"""The worker process as its server sees it: start-up, tokens, refusals, last words, death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpu_engine.contract import ExitCode, FailureReason, Phase
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.wire.messages import (
    Abort,
    Fatal,
    FromWorker,
    Heartbeat,
    Loaded,
    Progress,
    Ready,
    Rejected,
    Stop,
    Submit,
)
from hpu_engine.worker.threads import apply_thread_policy
from tests.engine.worker_process import WorkerProcess, worker_process
from tests.models.tiny import tiny

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig(model=str(tiny("llama")), num_kv_blocks=16, max_num_seqs=8)


@pytest.fixture(scope="module")
def worker(config: EngineConfig) -> Iterator[WorkerProcess]:
    """One worker for every test that leaves it as it was: starting one imports torch."""
    with worker_process(config, worker=3) as started:
        started.until(lambda message: isinstance(message, Ready))
        started.start_up = tuple(started.seen)
        yield started


def test_start_up_reports_bytes_then_shapes_then_ready(worker: WorkerProcess) -> None:
    kinds = [message.phase if isinstance(message, Progress) else type(message) for message in worker.start_up]
    order = list(dict.fromkeys(kinds))
    assert order == [Phase.STARTING, Phase.LOADING, Loaded, Phase.WARMING_UP, Ready]
    loading = [m for m in worker.start_up if isinstance(m, Progress) and m.phase is Phase.LOADING]
    assert loading[-1].done == loading[-1].total > 0
    shapes = [m for m in worker.start_up if isinstance(m, Progress) and m.phase is Phase.WARMING_UP]
    assert [m.done for m in shapes] == list(range(len(shapes)))
    assert shapes[-1].done == shapes[-1].total > 0
    ran = [(m.ran.bucket, m.ran.seconds) for m in shapes if m.ran is not None]
    assert [name for name, _ in ran] == [m.current for m in shapes[:-1]]
    assert all(seconds is not None and seconds > 0 for _, seconds in ran)


def test_a_worker_names_what_it_settled_on(worker: WorkerProcess) -> None:
    (loaded,) = [message for message in worker.start_up if isinstance(message, Loaded)]
    assert loaded.settled_digest is not None
    assert len(loaded.settled_digest) == 64


def test_a_worker_says_which_one_it_is(worker: WorkerProcess) -> None:
    said = [message for message in worker.start_up if isinstance(message, FromWorker)]
    assert {message.worker for message in said} == {3}


def test_workers_of_a_pod_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for workers, threads in ((1, "16"), (4, "4"), (32, "1")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert apply_thread_policy(workers)
        assert os.environ["OMP_NUM_THREADS"] == threads


def test_tokens_stream_one_step_at_a_time(worker: WorkerProcess) -> None:
    worker.send(Submit(request_id="a", prompt_token_ids=(5, 6, 7), params=GREEDY))
    rows = worker.rows_until_finished("a")
    assert [len(row.token_ids) for row in rows] == [1] * 8
    assert [row.finish for row in rows] == [None] * 7 + ["length"]


def test_a_request_that_never_fits_is_refused_and_the_next_one_answers(worker: WorkerProcess) -> None:
    worker.send(Submit(request_id="long", prompt_token_ids=(5,) * 5000, params=GREEDY))
    worker.send(Submit(request_id="alien", prompt_token_ids=(5, 10**9), params=GREEDY))
    worker.send(Submit(request_id="good", prompt_token_ids=(5,), params=GREEDY))
    refusals = [worker.until(lambda message: isinstance(message, Rejected)) for _ in range(2)]
    assert len(worker.rows_until_finished("good")) == 8
    assert isinstance(refusals[0], Rejected)
    assert "5000" in refusals[0].message
    assert "2048" in refusals[0].message
    assert isinstance(refusals[1], Rejected)
    assert str(10**9) in refusals[1].message


def test_an_abort_frees_the_blocks_within_one_step(worker: WorkerProcess) -> None:
    long = SamplingParams(max_tokens=1500, temperature=0.0)
    worker.send(Submit(request_id="a", prompt_token_ids=(5,) * 200, params=long))
    worker.until(lambda message: isinstance(message, Heartbeat) and message.kv_blocks_used > 0)
    worker.send(Abort(request_ids=("a", "unknown")))
    freed = worker.until(lambda message: isinstance(message, Heartbeat) and message.kv_blocks_used == 0)
    assert isinstance(freed, Heartbeat)
    assert freed.running == 0


def test_heartbeats_come_while_idle(worker: WorkerProcess) -> None:
    started = time.monotonic()
    for _ in range(3):
        worker.until(lambda message: isinstance(message, Heartbeat))
    assert time.monotonic() - started < 30


def test_a_broken_model_is_named_before_the_worker_ends_with_its_exit_code(tmp_path: Path) -> None:
    with worker_process(EngineConfig(model=str(tmp_path / "nowhere"))) as worker:
        fatal = worker.until(lambda message: isinstance(message, Fatal))
        assert worker.wait() == ExitCode.MODEL
    assert isinstance(fatal, Fatal)
    assert fatal.reason is FailureReason.MODEL_NOT_FOUND
    assert fatal.path is not None
    assert "nowhere" in fatal.path


def test_the_worker_ends_when_the_server_closes_the_socket(config: EngineConfig) -> None:
    with worker_process(config) as worker:
        worker.until(lambda message: isinstance(message, Ready))
        worker.socket.close()
        assert worker.wait() != 0


def test_stop_ends_the_worker_with_zero(config: EngineConfig) -> None:
    with worker_process(config) as worker:
        worker.until(lambda message: isinstance(message, Ready))
        worker.send(Stop())
        assert worker.wait() == ExitCode.OK


def test_the_worker_dies_with_a_killed_server(config: EngineConfig) -> None:
    """The server is a process of its own here; a child of it keeps the socket open, so only the signal can end it."""
    server = textwrap.dedent("""
        import os, subprocess, sys, time
        sys.path.insert(0, os.getcwd())
        from hpu_engine.settings.engine import EngineConfig
        from tests.engine.worker_process import WorkerProcess
        worker = WorkerProcess(EngineConfig(model=sys.argv[1], num_kv_blocks=4))
        worker.socket.set_inheritable(True)
        holder = subprocess.Popen(["sleep", "300"], pass_fds=[worker.socket.fileno()])
        print(worker.process.pid, holder.pid, flush=True)
        time.sleep(300)
    """)
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", server, config.model], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    worker_pid, holder_pid = (int(word) for word in process.stdout.readline().split())
    try:
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while is_alive(worker_pid):
            assert time.monotonic() < deadline, "the worker outlived its server"
            time.sleep(0.05)
    finally:
        os.kill(holder_pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
