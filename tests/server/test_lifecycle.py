"""How a server comes and goes: control port first, drain, lame duck, cut, abort. The worker is scripted."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpu_engine.contract import ExitCode, FailureReason, Phase
from tests.server.running import (
    PATIENCE_SECONDS,
    RunningServer,
    free_port,
    get,
    is_alive,
    post,
    reachable,
    wait_until,
)


class Background(threading.Thread):
    """A request in a thread of its own; `answer` after `join`."""

    def __init__(self, server: RunningServer, **change: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._body = f"{server.url}/v1/completions", {"prompt": "abc", "ignore_eos": True, **change}
        self.answer: tuple[int, Any] | None = None
        self.start()

    def run(self) -> None:
        self.answer = post(self._url, self._body)

    def result(self) -> tuple[int, Any]:
        self.join(PATIENCE_SECONDS)
        assert self.answer is not None
        return self.answer


def running(server: RunningServer) -> int:
    return server.state().ranks[0].running


def test_the_control_port_answers_before_the_worker_exists_and_shows_every_phase(shell: Path) -> None:
    with RunningServer(shell, {}, held=("load", "tokens=256")) as server:
        server.wait_until_listening()
        first = server.state()
        assert first.phase in (Phase.STARTING, Phase.LOADING)
        assert first.ranks[0].heartbeat_age_seconds is None
        assert first.model.served_name == "tiny"
        assert first.plan_input.device == "cpu"
        assert get(f"{server.control_url}/livez")[0] == 200
        server.wait_for_phase(Phase.LOADING)
        assert get(f"{server.control_url}/readyz") == (503, b"Loading: the model is not ready yet\n")
        wait_until(lambda: reachable(server.port), "the API port is open", server)
        status, body = post(f"{server.url}/v1/completions", {"prompt": "a"})
        assert (status, body["error"]["code"]) == (503, "not_ready")
        assert get(f"{server.url}/health")[0] == 503
        server.release("load")
        server.wait_for_phase(Phase.WARMING_UP)
        warm = server.state()
        assert warm.ranks[0].warm_up.total == 3
        assert warm.ranks[0].warm_up.current is not None
        assert warm.model.architecture == "LlamaForCausalLM"
        assert warm.plan_input.kv_blocks == 16
        assert warm.seconds_since_progress < 60
        server.release("tokens=256")
        server.wait_until_ready()
        assert server.state().phase is Phase.READY
        assert get(f"{server.url}/health")[0] == 200
        wait_until(lambda: server.state().ranks[0].heartbeat_age_seconds is not None, "a heartbeat came", server)
        for line in ("phase=Loading", "phase=WarmingUp", "ready "):
            wait_until(lambda line=line: line in server.log, f"{line} is logged", server)


def test_listening_comes_before_the_worker_in_the_log(echo: RunningServer) -> None:
    assert echo.log.index("listening") < echo.log.index("worker started")


def test_the_control_port_is_read_only(echo: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", echo.control_port, timeout=PATIENCE_SECONDS)
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/state", "/livez", "/readyz", "/metrics"):
            connection.request(method, path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 405, (method, path)


def test_metrics_have_vllms_names_on_both_ports(echo: RunningServer) -> None:
    before = echo.metric("vllm:generation_tokens_total")
    assert post(f"{echo.url}/v1/completions", {"prompt": "abc", "max_tokens": 7, "ignore_eos": True})[0] == 200
    assert echo.metric("vllm:generation_tokens_total", engine="0", model_name="tiny") == before + 7
    text = get(f"{echo.url}/metrics")[1].decode()
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "iteration_tokens_total_bucket",
        "cache_config_info",
    ):
        assert f"vllm:{name}{{" in text, name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_finishes_what_runs_refuses_what_comes_and_exits_0(shell: Path, number: signal.Signals) -> None:
    with RunningServer(shell, {}, held=("step",)).wait_until_ready() as server:
        worker = server.worker_pid()
        request = Background(server, max_tokens=60)
        wait_until(lambda: running(server) == 1, "the request runs", server)
        server.signal(number)
        server.wait_for_phase(Phase.DRAINING)
        assert get(f"{server.control_url}/readyz")[0] == 503
        assert get(f"{server.control_url}/livez")[0] == 200
        status, body = post(f"{server.url}/v1/completions", {"prompt": "a"})
        assert (status, body["error"]["type"]) == (503, "service_unavailable")
        server.release("step")
        status, body = request.result()
        assert (status, body["usage"]["completion_tokens"]) == (200, 60)
        assert server.exit_code() == ExitCode.OK
        assert not server.termination_log.exists()
        assert not is_alive(worker)


def test_a_lame_duck_still_serves_but_keeps_no_connection(shell: Path) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with RunningServer(shell, {}, lame_duck_seconds=8.0).wait_until_ready() as server:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_SECONDS) as kept:
            kept.sendall(request)
            before = kept.recv(65536)
            assert before.startswith(b"HTTP/1.1 200")
            assert b"Connection: close" not in before
            server.signal(signal.SIGTERM)
            signalled = time.monotonic()
            server.wait_for_phase(Phase.DRAINING)
            assert get(f"{server.control_url}/readyz")[0] == 503, "not ready at once"
            kept.sendall(request)
            after = b""
            while chunk := kept.recv(65536):  # until the server closes
                after += chunk
            assert reachable(server.port), "closed by the answer, not by the end of the server"
            assert after.startswith(b"HTTP/1.1 200")
            assert b"Connection: close" in after
        assert server.exit_code() == ExitCode.OK
        assert time.monotonic() - signalled >= 8.0


def test_a_lame_duck_serves_on_while_requests_keep_coming(shell: Path) -> None:
    """A load balancer that is slow to notice costs no request."""
    with RunningServer(shell, {}, lame_duck_seconds=0.5, drain_seconds=60.0).wait_until_ready() as server:
        server.signal(signal.SIGTERM)
        signalled = time.monotonic()
        while time.monotonic() - signalled < 5.0:
            assert post(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
            time.sleep(0.2)
        assert server.exit_code() == ExitCode.OK, "and ends when nobody comes any more"


def test_requests_that_never_end_do_not_keep_a_server_for_ever(shell: Path) -> None:
    """At most for half of the drain's time: the rest is for those that run."""
    with RunningServer(shell, {}, lame_duck_seconds=0.5, drain_seconds=6.0).wait_until_ready() as server:
        server.signal(signal.SIGTERM)
        with suppress(OSError):  # it has gone
            while post(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 2})[0] in (200, 503):
                time.sleep(0.1)
        assert server.exit_code() == ExitCode.OK


def test_what_runs_past_the_drain_is_cut_with_an_error_and_exit_0(shell: Path) -> None:
    with RunningServer(shell, {}, held=("step",), drain_seconds=1.0).wait_until_ready() as server:
        request = Background(server, max_tokens=400)
        wait_until(lambda: running(server) == 1, "the request runs", server)
        server.signal(signal.SIGTERM)
        status, body = request.result()
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert server.exit_code() == ExitCode.OK


def test_a_second_signal_aborts(shell: Path) -> None:
    with RunningServer(
        shell, {}, held=("step",), drain_seconds=300.0, lame_duck_seconds=300.0
    ).wait_until_ready() as server:
        worker = server.worker_pid()
        request = Background(server, max_tokens=400)
        wait_until(lambda: running(server) == 1, "the request runs", server)
        server.signal(signal.SIGTERM)
        server.wait_for_phase(Phase.DRAINING)
        server.signal(signal.SIGTERM)
        assert request.result()[0] == 503
        assert server.exit_code() == 143
        assert not is_alive(worker)


def test_a_signal_during_the_start_ends_it_at_once(shell: Path) -> None:
    with RunningServer(shell, {}, held=("load",)) as server:
        server.wait_until_listening()
        server.wait_for_phase(Phase.LOADING)
        worker = server.worker_pid()
        server.signal(signal.SIGTERM)
        assert server.exit_code() == ExitCode.OK
        assert not is_alive(worker)


@pytest.mark.parametrize("flag", ["port", "control_port"])
def test_a_taken_port_is_named_with_its_flag(shell: Path, echo: RunningServer, flag: str) -> None:
    taken: dict[str, Any] = {flag: echo.port}
    with RunningServer(shell, {}, **taken) as server:
        assert server.exit_code() == ExitCode.USAGE
        told = server.termination()
        assert told.reason is FailureReason.PORT_TAKEN
        assert str(echo.port) in told.message
        assert f"--{flag.replace('_', '-')} " in told.message
        assert told.message in server.log


def test_an_address_that_is_not_ours_is_a_usage_error(shell: Path) -> None:
    with RunningServer(shell, {}, host="203.0.113.7", port=free_port()) as server:
        assert server.exit_code() == ExitCode.USAGE
        assert "203.0.113.7" in server.termination().message


def test_more_open_sequences_than_allowed_are_turned_away(shell: Path) -> None:
    with RunningServer(shell, {}, held=("step",), max_open_requests=2).wait_until_ready() as server:
        request = Background(server, prompt=["a", "b"], max_tokens=40)
        wait_until(lambda: running(server) == 2, "both run", server)
        status, body = post(f"{server.url}/v1/completions", {"prompt": "c"})
        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "rate_limit_error", "overloaded")
        server.release("step")
        assert request.result()[0] == 200
        assert post(f"{server.url}/v1/completions", {"prompt": "c"})[0] == 200


def test_the_server_process_has_no_torch(echo: RunningServer) -> None:
    mapped = Path(f"/proc/{echo.process.pid}/maps").read_text()
    assert "tokenizers" in mapped
    assert "torch" not in mapped
    assert "numpy" not in mapped
