"""The real worker killed, frozen, orphaned, drained, or given a checkpoint it cannot use."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hpu_engine.contract import ExitCode, FailureReason, Phase
from tests.server.running import RunningServer, is_alive, kill, wait_until
from tests.server.test_lifecycle import Background
from tests.server.test_worker_loss import LOOKED_AT, check_frozen, last_event, open_stream

LONG = {"max_tokens": 2000, "ignore_eos": True}
REAL = "hpu_engine.worker.main"


def serving(model: Path, **flags: Any) -> RunningServer:
    """One row at a time has room for 2000 tokens, which take this model several seconds."""
    return RunningServer(model, dtype="float32", num_kv_blocks=32, **flags).wait_until_ready()


def test_a_killed_worker_in_mid_stream(tiny_llama: Path) -> None:
    with serving(tiny_llama, worker=REAL, **LOOKED_AT) as server:
        stream = open_stream(server, **LONG)
        kill(server.worker_pid(), signal.SIGKILL)
        assert "SIGKILL" in last_event(stream)["error"]["message"]
        state = server.state()
        assert state.phase is Phase.FAILED
        assert state.last_error is not None
        assert (state.last_error.rank, state.last_error.signal) == (0, "SIGKILL")
        assert server.exit_code() == ExitCode.WORKER_LOST
        told = server.termination()
        assert (told.reason, told.rank, told.worker) == (FailureReason.WORKER_LOST, 0, 0)
        assert told.bucket, "the bucket that ran is part of the evidence"


def test_a_frozen_worker_in_mid_stream(tiny_llama: Path) -> None:
    with serving(tiny_llama, worker=REAL, **LOOKED_AT) as server:
        stream = open_stream(server, **LONG)
        worker = server.worker_pid()
        kill(worker, signal.SIGSTOP)
        check_frozen(last_event(stream))
        state = server.state()
        assert state.last_error is not None
        assert (state.last_error.rank, state.last_error.reason) == (0, FailureReason.WORKER_FROZEN)
        assert server.exit_code() == ExitCode.WORKER_LOST
        assert server.termination().reason is FailureReason.WORKER_FROZEN
        assert not is_alive(worker)


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_no_worker_survives_a_killed_server(tiny_llama: Path, frozen: bool) -> None:
    with serving(tiny_llama) as server:
        worker = server.worker_pid()
        open_stream(server, **LONG)
        if frozen:
            kill(worker, signal.SIGSTOP)
        server.signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(worker), "the worker is gone")


def test_a_drain_lets_a_real_request_finish(tiny_llama: Path) -> None:
    with serving(tiny_llama, drain_seconds=120.0) as server:
        request = Background(server, max_tokens=1500)
        wait_until(lambda: server.state().ranks[0].running == 1, "the request runs", server)
        server.signal(signal.SIGTERM)
        status, body = request.result()
        assert (status, body["usage"]["completion_tokens"]) == (200, 1500)
        assert server.exit_code() == ExitCode.OK


def drop_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")


def truncate(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


def scale_rope(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4}
    (model / "config.json").write_text(json.dumps(config))


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def pickle_only(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("break_it", "reasons", "what"),
    [
        (drop_a_tensor, {FailureReason.MODEL_BROKEN}, "model.norm.weight"),
        (truncate, {FailureReason.MODEL_BROKEN}, "model.safetensors"),
        (scale_rope, {FailureReason.MODEL_UNSUPPORTED}, "longrope"),
        (no_weights, {FailureReason.MODEL_BROKEN, FailureReason.MODEL_NOT_FOUND}, "safetensors"),
        (pickle_only, {FailureReason.MODEL_BROKEN, FailureReason.MODEL_UNSUPPORTED}, "pickle"),
        (no_tokenizer, {FailureReason.MODEL_BROKEN}, "tokenizer.json"),
    ],
)
def test_a_bad_checkpoint_is_exit_3_in_words_before_anything_is_served(
    tiny_llama: Path, tmp_path: Path, break_it: Callable[[Path], None], reasons: set[FailureReason], what: str
) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    break_it(model)
    with RunningServer(model) as server:
        assert server.exit_code() == ExitCode.MODEL
        told = server.termination()
        assert told.reason in reasons
        assert told.path is not None
        assert what in f"{told.path} {told.tensor} {told.message}"
        words = next(line for line in server.log.splitlines() if line.startswith("error: "))
        assert what in words
        assert "Traceback" not in server.log


def test_too_little_memory_is_exit_4_with_both_numbers(tiny_llama: Path) -> None:
    with RunningServer(tiny_llama, kv_cache_memory=10**15) as server:
        assert server.exit_code() == ExitCode.RESOURCES
        told = server.termination()
        assert told.reason is FailureReason.INSUFFICIENT_MEMORY
        assert sum(char.isdigit() for char in told.message) >= 2
