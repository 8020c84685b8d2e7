"""One echoing server for all tests that only ask it things; a checkpoint's directory without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.tokenizer import write_tiny_tokenizer
from tests.server.running import RunningServer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 330,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
"""Ten ids more than the tokenizer has, as a padded embedding has them."""


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server reads of a checkpoint; the scripted worker needs no weights."""
    directory = tmp_path_factory.mktemp("shell")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    write_tiny_tokenizer(directory, 320)
    return directory


@pytest.fixture(scope="session")
def echo(shell: Path) -> Iterator[RunningServer]:
    """Ready, fast, and shared: no test may stop it."""
    with RunningServer(shell, {"step_seconds": 0.001}) as server:
        yield server.wait_until_ready()
