"""Checkpoints as fixtures of a test session. Tests read them and never write into them.

torch is imported when a test wants one: this plugin is loaded for every test.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, bf16, with tokenizer and chat template."""
    from tests.models import smollm2 as module

    return module.smollm2()


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A Llama of 4 layers and 320 tokens with random fp32 weights and a small real tokenizer."""
    from tests.models import tiny as module

    return module.tiny("llama")
