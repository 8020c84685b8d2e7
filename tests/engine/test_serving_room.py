"""A KV cache in which no request has room for its answer is a usage error, with both numbers."""

from __future__ import annotations

from pathlib import Path

from hpu_engine.contract import EXIT_CODES, FailureReason
from tests.server.running import RunningServer


def test_a_cache_of_one_token_is_a_usage_error(tiny_llama: Path) -> None:
    with RunningServer(tiny_llama, block_size=1, num_kv_blocks=1) as server:
        assert server.exit_code() == EXIT_CODES[FailureReason.USAGE]
        evidence = server.termination()
    assert evidence.reason is FailureReason.USAGE
    assert "1 block of block-size 1 holds 1 token; the shortest request takes 2" in evidence.message


def test_a_cache_of_two_tokens_gives_one(tiny_llama: Path) -> None:
    with RunningServer(tiny_llama, block_size=1, num_kv_blocks=2) as server:
        server.wait_until_ready()
        assert server.state().model.max_model_len == 2
