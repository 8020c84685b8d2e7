"""A worker that dies, freezes or cannot start: clients are told, the evidence is kept, nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hpu_engine.contract import ExitCode, FailureReason, Phase
from tests.server.running import PATIENCE_SECONDS, RunningServer, get, is_alive, kill, post, wait_until

SLOW = {"step_seconds": 0.05}
FROZEN_AFTER_SECONDS = 10
LOOKED_AT: dict[str, Any] = {"failed_linger_seconds": 8.0}


def open_stream(server: RunningServer, **change: Any) -> Iterator[bytes]:
    """Lines of a long stream of which the first has arrived."""
    body = {"prompt": "abc", "max_tokens": 400, "stream": True, **change}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer: Iterable[bytes] = urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)
    lines = iter(answer)
    first = next(lines)
    assert first.startswith(b"data: {")
    return lines


def last_event(lines: Iterator[bytes]) -> Any:
    events = [line for line in lines if line.strip()]
    assert events[-1].startswith(b"data: ")
    return json.loads(events[-1].removeprefix(b"data: "))


def check_frozen(event: Any) -> None:
    """It says how long the server had seen no sign of life: a clock of ours would count what else the machine does."""
    message = event["error"]["message"]
    found = re.search(r"no sign of life for (\d+) s, and the process is stopped by a signal", message)
    assert found, message
    assert int(found[1]) < FROZEN_AFTER_SECONDS, message


def test_a_killed_worker_ends_streams_with_an_error_and_leaves_evidence(shell: Path) -> None:
    with RunningServer(shell, SLOW, **LOOKED_AT).wait_until_ready() as server:
        stream = open_stream(server)
        worker = server.worker_pid()
        kill(worker, signal.SIGKILL)
        event = last_event(stream)
        assert event["error"]["type"] == "server_error"
        assert "SIGKILL" in event["error"]["message"]
        state = server.state()
        assert state.phase is Phase.FAILED
        assert state.ranks[0].phase is Phase.FAILED
        assert "SIGKILL" in (state.ranks[0].last_error or "")
        assert state.last_error is not None
        assert (state.last_error.rank, state.last_error.signal) == (0, "SIGKILL")
        assert get(f"{server.control_url}/livez")[0] == 503
        assert post(f"{server.url}/v1/completions", {"prompt": "a"})[0] == 503
        assert server.exit_code() == ExitCode.WORKER_LOST
        told = server.termination()
        assert (told.reason, told.rank, told.worker, told.signal) == (FailureReason.WORKER_LOST, 0, 0, "SIGKILL")
        assert told.bucket == "tokens=8"


def test_the_openai_client_gets_an_exception_not_a_short_answer(shell: Path) -> None:
    with RunningServer(shell, SLOW).wait_until_ready() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chunks = client.completions.create(model="tiny", prompt="abc", max_tokens=400, stream=True)
        next(iter(chunks))
        kill(server.worker_pid(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(chunks)


def test_a_frozen_worker_is_noticed_within_ten_seconds_and_killed(shell: Path) -> None:
    with RunningServer(shell, SLOW, **LOOKED_AT).wait_until_ready() as server:
        stream = open_stream(server)
        worker = server.worker_pid()
        kill(worker, signal.SIGSTOP)
        check_frozen(last_event(stream))
        state = server.state()
        assert state.last_error is not None
        assert (state.last_error.reason, state.last_error.rank) == (FailureReason.WORKER_FROZEN, 0)
        assert server.exit_code() == ExitCode.WORKER_LOST
        assert server.termination().reason is FailureReason.WORKER_FROZEN
        assert not is_alive(worker)


def test_a_worker_that_is_busy_with_one_long_step_is_left_alone(shell: Path) -> None:
    with RunningServer(shell, {"busy_step_seconds": 11.0}).wait_until_ready() as server:
        assert post(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert server.state().phase is Phase.READY


def test_a_pod_that_was_suspended_as_a_whole_goes_on(shell: Path) -> None:
    """Both processes stop for longer than a worker may be silent: nobody was frozen, time was."""
    with RunningServer(shell, SLOW).wait_until_ready() as server:
        worker = server.worker_pid()
        kill(worker, signal.SIGSTOP)
        time.sleep(1.5)  # so that nothing it said before is what the server finds first when it wakes
        server.signal(signal.SIGSTOP)
        time.sleep(11)
        server.signal(signal.SIGCONT)
        time.sleep(0.5)  # the server wakes first and finds silence
        kill(worker, signal.SIGCONT)
        server.wait_until_ready()  # the next heartbeat
        assert post(f"{server.url}/v1/completions", {"prompt": "a"})[0] == 200


def test_no_worker_survives_a_killed_server(shell: Path) -> None:
    with RunningServer(shell, SLOW).wait_until_ready() as server:
        worker = server.worker_pid()
        server.signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(worker), "the worker is gone")


def test_a_worker_that_crashes_at_work_says_its_first_error_line(shell: Path) -> None:
    trace = "Traceback (most recent call last):\n  File ...\nIndexError: list index out of range\n\nsome noise\n"
    script = {"die_after_steps": 3, "die_saying": trace, "die_with_code": 9}
    with RunningServer(shell, script).wait_until_ready() as server:
        assert post(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 50})[0] == 500
        assert server.exit_code() == ExitCode.WORKER_LOST
        told = server.termination()
        assert told.exit_code == 9
        assert "IndexError: list index out of range" in told.message


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FailureReason.MODEL_BROKEN, ExitCode.MODEL),
        (FailureReason.INSUFFICIENT_MEMORY, ExitCode.RESOURCES),
        (FailureReason.INTERNAL, ExitCode.INTERNAL),
    ],
)
def test_last_words_of_a_worker_become_the_exit_code(shell: Path, reason: FailureReason, code: ExitCode) -> None:
    fatal = {"reason": reason, "message": "x" * 9000, "path": "/m/a.safetensors", "tensor": "model.norm.weight"}
    with RunningServer(shell, {"fatal": fatal}) as server:
        assert server.exit_code() == code
        told = server.termination()
        assert (told.reason, told.path, told.tensor, told.rank) == (reason, fatal["path"], fatal["tensor"], 0)
        assert "error: /m/a.safetensors: model.norm.weight: xxx" in server.log


@pytest.mark.parametrize("has_last_words", [True, False])
def test_a_signal_of_the_server_is_no_evidence(shell: Path, has_last_words: bool) -> None:
    """The worker closes its socket, as it does when it ends, but its process does not end: the server ends it."""
    script: dict[str, Any] = {"linger_seconds": 60.0, "die_with_code": 1}
    if has_last_words:
        script["fatal"] = {"reason": FailureReason.USAGE, "message": "max-model-len is outside of the model"}
    with RunningServer(shell, script) as server:
        assert server.exit_code() == (ExitCode.USAGE if has_last_words else ExitCode.WORKER_LOST)
        told = server.termination()
        assert (told.signal, told.exit_code) == (None, None)
        assert "SIGKILL" not in told.message
        assert "SIGKILL" not in server.log
        assert ("max-model-len" if has_last_words else "did not exit within") in told.message


def test_a_worker_that_cannot_start_is_lost_with_its_error(shell: Path) -> None:
    script = {"die_saying": "ModuleNotFoundError: No module named 'torch'\n", "die_with_code": 1}
    with RunningServer(shell, script) as server:
        assert server.exit_code() == ExitCode.WORKER_LOST
        assert "No module named 'torch'" in server.termination().message


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows_and_is_counted(shell: Path, stream: bool) -> None:
    """Not at their next token: here there is none until they are gone."""
    with RunningServer(shell, {}, held=("step",)).wait_until_ready() as server:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_SECONDS) as raw:
            body = json.dumps({"prompt": ["a", "b"], "max_tokens": 400, "stream": stream}).encode()
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: server.state().ranks[0].running == 2, "both rows run", server)
        wait_until(lambda: server.state().ranks[0].running == 0, "both rows are gone", server)
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2
        server.release("step")
        assert post(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
