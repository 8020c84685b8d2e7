"""A model cut over an in-process set of workers computes what the whole one computes, in every kind of step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpu_engine.group.collectives import Alone, Groups
from hpu_engine.group.in_process import InProcessGroup, InProcessRank
from hpu_engine.model.weights.placement import Placement
from hpu_engine.planning.layout import Layout
from tests.families.sequences import Sequences, open_sequences, random_tokens
from tests.models.tiny import VOCAB_SIZE, tiny

CASES: list[tuple[str, dict[str, Any], Layout]] = [
    ("llama", {}, Layout(2)),
    ("llama", {}, Layout(4)),  # more ranks than KV heads
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, Layout(2)),
    ("qwen2", {}, Layout(4)),
    ("qwen3", {}, Layout(2)),
    ("ernie4_5", {"use_bias": True}, Layout(2)),
    ("mixtral", {}, Layout(2)),
    ("mixtral", {}, Layout(2, 1, 2)),
    ("qwen3_moe", {}, Layout(4, 1, 4)),
    ("ernie4_5_moe", {}, Layout(2)),
    ("ernie4_5_moe", {"moe_num_shared_experts": 2}, Layout(4, 1, 4)),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}, Layout(2, 1, 2)),
    ("ernie4_5_moe", {"use_bias": True}, Layout(2, 1, 2)),
]


def run(sequences: Sequences) -> list[torch.Tensor]:
    """A prefill, a mixed step, decoding."""
    sequences.step([(0, 30)])
    sequences.step([(1, 20), (0, 1)])
    sequences.step([(0, 1), (1, 1)])
    return [sequences.logits(0), sequences.logits(1)]


@pytest.mark.parametrize(("family", "changes", "layout"), CASES)
def test_tensor_and_expert_parallel_equal_the_whole_model(family: str, changes: dict[str, Any], layout: Layout) -> None:
    directory = tiny(family, **changes)
    tokens = random_tokens(2, 40, VOCAB_SIZE)
    whole = run(open_sequences(directory, tokens))

    def work(rank: InProcessRank) -> list[torch.Tensor]:
        groups = Groups(tensor=rank, data=Alone())
        return run(open_sequences(directory, tokens, placement=Placement(layout, rank.rank), groups=groups))

    group = InProcessGroup(layout.tensor, timeout_seconds=120)
    for result in group.run(work):
        for got, expected in zip(result, whole, strict=True):
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    # per step: the embedding, two reductions a layer, the gathered logits
    assert len(group.ranks[0].calls) == 3 * (1 + 2 * 4 + 1)
    assert all(rank.calls == group.ranks[0].calls for rank in group.ranks)


@pytest.mark.parametrize("shared", [0, 2])
def test_data_parallel_ranks_with_tokens_of_their_own_equal_the_whole_model(shared: int) -> None:
    directory = tiny("ernie4_5_moe", moe_num_shared_experts=shared)
    layout = Layout(1, 2, 2)
    tokens = [random_tokens(2, 40, VOCAB_SIZE, seed=rank) for rank in range(2)]

    def work(rank: InProcessRank) -> list[torch.Tensor]:
        groups = Groups(tensor=Alone(), data=rank)
        placement = Placement(layout, rank.rank)
        return run(open_sequences(directory, tokens[rank.rank], placement=placement, groups=groups))

    for own, result in zip(tokens, InProcessGroup(2, timeout_seconds=120).run(work), strict=True):
        for got, expected in zip(result, run(open_sequences(directory, own)), strict=True):
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
