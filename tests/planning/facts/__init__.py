"""Configurations of published models, committed as facts.

`model_configs.json` lists the fields of each `config.json` that planning reads, with the page where the model publishes
them. The pages themselves could not be read here: some values were transcribed from public repositories that quote
them, the others are as the models are known, and none was compared with its page. What holds them is that the
parameter totals that follow are those the models are known by. Nothing else of the models is here.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hpu_engine.planning import ModelDescription, describe


@cache
def published_configs() -> dict[str, dict[str, Any]]:
    """`config.json` by model name."""
    entries = json.loads((Path(__file__).parent / "model_configs.json").read_text())
    assert all(entry["source"].startswith("https://") for entry in entries)
    return {entry["model"]: entry["config"] for entry in entries}


def published(name: str) -> ModelDescription:
    return describe(published_configs()[name], f"{name}/config.json")


ERNIE_21B = "baidu/ERNIE-4.5-21B-A3B-PT"
ERNIE_300B = "baidu/ERNIE-4.5-300B-A47B-PT"
LLAMA_8B = "meta-llama/Llama-3.1-8B"
LLAMA_405B = "meta-llama/Llama-3.1-405B"
