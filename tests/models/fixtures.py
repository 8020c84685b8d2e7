"""Checkpoints as fixtures of a test session. Tests read them and never write into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import smollm2 as smollm2_module
from tests.models import tiny as tiny_module


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, bf16, with tokenizer and chat template."""
    return smollm2_module.smollm2()


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A Llama of 4 layers and 320 tokens with random fp32 weights and a small real tokenizer."""
    return tiny_module.tiny("llama")
