"""The table agrees with planning and with what transformers writes; workers' regions tile every tensor."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from hpu_engine.model.weights.checking import check_stored
from hpu_engine.model.weights.name_table import expand
from hpu_engine.model.weights.placement import Placement
from hpu_engine.model.weights.safetensors_files import list_tensors
from hpu_engine.planning import ModelDescription, read_model_description
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.model.parameters import Cut, parameter_count, tensor_table
from tests.models.tiny import FAMILIES, tiny

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(family, {}) for family in FAMILIES],
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("ernie4_5_moe", {"use_bias": True, "moe_num_shared_experts": 2, "moe_layer_interval": 2}),
]
MOE_LAYOUTS = [Layout(1, 1, 1), Layout(2, 1, 1), Layout(2, 1, 2), Layout(4, 1, 4), Layout(1, 4, 4), Layout(2, 2, 4)]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_the_table_is_what_transformers_wrote(family: str, changes: dict[str, Any]) -> None:
    directory = tiny(family, **changes)
    description = read_model_description(directory)
    table = expand(description)
    check_stored(list_tensors(directory), table, directory)
    assert sum(prod(parameter.shape) for parameter in table.parameters.values()) == parameter_count(description)
    assert all(part.region is not None for part in table.parts.values())


def held(description: ModelDescription, layout: Layout, name: str) -> torch.Tensor:
    """How often each element of a tensor is held by the workers of a group."""
    times: torch.Tensor | None = None
    for worker in range(layout.cards):
        part = expand(description, Placement(layout, worker)).parts[name]
        if times is None:
            times = torch.zeros(part.shape, dtype=torch.int64)
        if part.region is not None:
            times[tuple(slice(start, stop) for start, stop in part.region)] += 1
    assert times is not None
    return times


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["ernie4_5_moe", "mixtral", "qwen3_moe"])
def test_regions_tile_every_tensor(family: str, layout: Layout) -> None:
    description = read_model_description(tiny(family))
    for name, part in expand(description).parts.items():
        if not (name.startswith("model.layers.1.") or name.startswith(("model.embed", "lm_head"))):
            continue
        times = held(description, layout, name)
        if part.expert is not None and layout.expert > 1:
            expected = 1
        elif part.cut is Cut.NONE:
            expected = layout.cards
        elif part.cut is Cut.KV_HEADS:
            expected = layout.data * max(1, layout.tensor // description.kv_heads)
        else:
            expected = layout.data
        assert torch.equal(times, torch.full_like(times, expected)), name


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=str)
def test_a_worker_holds_what_planning_says(layout: Layout) -> None:
    description = read_model_description(tiny("ernie4_5_moe"))
    planned = sum(
        layout.local_copies(row) * prod(layout.local_shape(description, row)) for row in tensor_table(description)
    )
    for worker in range(layout.cards):
        table = expand(description, Placement(layout, worker))
        assert sum(prod(parameter.shape) for parameter in table.parameters.values()) == planned


def test_few_kv_heads_are_held_by_the_ranks_whose_queries_need_them() -> None:
    description = read_model_description(tiny("llama"))  # 4 heads, 2 KV heads of 16
    rows = [Placement(Layout(tensor=4), worker).region for worker in range(4)]
    (key,) = [row for row in tensor_table(description) if row.name.endswith("k_proj.weight")]
    assert [region(description, key, None) for region in rows] == [
        ((0, 16), (0, 64)),
        ((0, 16), (0, 64)),
        ((16, 32), (0, 64)),
        ((16, 32), (0, 64)),
    ]


@pytest.mark.parametrize(("family", "wide"), [("mixtral", set()), ("ernie4_5_moe", {"router", "router_correction"})])
def test_what_is_kept_wide_is_the_router_of_ernie(family: str, wide: set[str]) -> None:
    parameters = expand(read_model_description(tiny(family))).parameters
    assert {name.rsplit(".", 1)[-1] for name, parameter in parameters.items() if parameter.wide} == wide
