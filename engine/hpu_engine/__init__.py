"""The engine. `LLM` and `SamplingParams` load on first use, so that planning and server import without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_engine.offline.llm import LLM
    from hpu_engine.scheduling.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {"LLM": "hpu_engine.offline.llm", "SamplingParams": "hpu_engine.scheduling.sampling_params"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
