"""SmolLM2 upcycled to experts talks, agrees with the dense model, and notices a swapped expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hpu_engine.device.cpu.device import CpuDevice
from hpu_engine.group.collectives import ALONE
from hpu_engine.model.builder import assemble
from hpu_engine.model.weights.loading import load_parameters
from hpu_engine.model.weights.name_table import expand
from hpu_engine.model.weights.placement import Placement
from hpu_engine.planning import read_model_description
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from tests.engine.direct import open_quietly, run_together
from tests.families.sequences import (
    Sequences,
    caches_for,
    open_sequences,
    random_tokens,
)
from tests.models.smollm2 import smollm2
from tests.models.upcycled import smollm2_ernie_moe, smollm2_mixtral

UPCYCLED = {"mixtral": smollm2_mixtral, "ernie-moe": smollm2_ernie_moe}
VOCAB = 49152


@pytest.mark.parametrize("name", UPCYCLED)
def test_it_talks(name: str) -> None:
    directory = UPCYCLED[name]()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rank = open_quietly(EngineConfig(model=str(directory), dtype="float32", num_kv_blocks=8, max_model_len=512))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    params = SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
    (output,) = run_together(rank, [prompt], params)
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."


def logits_of(sequences: Sequences, length: int) -> torch.Tensor:
    sequences.step([(index, length) for index in range(len(sequences.tokens))])
    return torch.stack([sequences.logits(index) for index in range(len(sequences.tokens))])


@pytest.fixture(scope="module")
def dense() -> torch.Tensor:
    return logits_of(open_sequences(smollm2("float32"), random_tokens(2, 96, VOCAB)), 96)


@pytest.mark.parametrize("name", UPCYCLED)
def test_logits_agree_with_the_dense_model(name: str, dense: torch.Tensor) -> None:
    got = logits_of(open_sequences(UPCYCLED[name]("float32"), random_tokens(2, 96, VOCAB)), 96)
    assert float((got - dense).abs().max()) < 5e-4
    assert torch.equal(got.argmax(-1), dense.argmax(-1))


def test_a_swapped_expert_changes_the_answer(dense: torch.Tensor) -> None:
    """One matrix of one expert in one layer: its neurons are not in the order of its other matrix."""
    directory: Path = smollm2_ernie_moe("float32")
    description = read_model_description(directory)
    table = expand(description)
    parameters = dict(load_parameters(directory, table, torch.float32, lambda _done, _total: None))
    first, second = (f"layers.3.experts.{expert}.down" for expert in (0, 1))
    parameters[first], parameters[second] = parameters[second], parameters[first]
    transformer = assemble(
        parameters.items(),
        table,
        description,
        CpuDevice(),
        dtype=torch.float32,
        max_len=192,
        placement=Placement(),
        groups=ALONE,
    )
    wrong = logits_of(Sequences(transformer, caches_for(transformer, 2), random_tokens(2, 96, VOCAB)), 96)
    assert float((wrong - dense).abs().max()) > 0.1
