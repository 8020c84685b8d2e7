"""Predicted bytes are the bytes of real tensors; the sum of the lines is the card; a measurement beats a constant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from hpu_engine.device.cpu.device import CpuDevice
from hpu_engine.model.weights.loading import load_parameters
from hpu_engine.model.weights.name_table import expand
from hpu_engine.model.weights.placement import Placement
from hpu_engine.planning import read_model_description
from hpu_engine.planning.cards import CARDS, GIB, Calibration, CalibrationError, read_calibration
from hpu_engine.planning.layout import Layout, layout_violations
from hpu_engine.planning.memory.activations import activation_plan
from hpu_engine.planning.memory.plan import MemoryPlan, memory_plan
from hpu_engine.planning.memory.weights import kv_bytes_per_block, kv_bytes_per_token, weight_bytes, weight_lines
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.model.parameters import Part, parameter_count, tensor_table
from hpu_engine.planning.shapes.limits import StepLimits
from tests.models.tiny import FAMILIES, tiny
from tests.planning.facts import ERNIE_21B, ERNIE_300B, LLAMA_8B, published

LAYOUTS = [
    Layout(),
    Layout(2),
    Layout(4),
    Layout(2, 1, 2),
    Layout(1, 2, 2),
    Layout(2, 2, 4),
    Layout(4, 2, 8),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_weight_bytes_are_those_of_the_tensors_each_worker_loads(family: str, dtype: str) -> None:
    directory = tiny(family)
    model = read_model_description(directory)
    layouts = [layout for layout in LAYOUTS if not layout_violations(model, layout)]
    assert len(layouts) >= 2
    for layout in layouts:
        for worker in range(layout.cards):
            table = expand(model, Placement(layout, worker))
            loaded = load_parameters(directory, table, getattr(torch, dtype), lambda done, total: None)
            real = sum(tensor.numel() * tensor.element_size() for _, tensor in loaded)
            assert real == weight_bytes(model, layout, dtype), (layout, worker)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_weight_bytes_are_those_of_transformers_model(family: str) -> None:
    directory = tiny(family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    real = sum(p.numel() * p.element_size() for p in theirs.parameters())
    assert real == weight_bytes(read_model_description(directory), Layout(), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_cache_bytes_are_those_of_the_real_cache(family: str, dtype: str) -> None:
    model = read_model_description(tiny(family))
    caches = CpuDevice().new_kv_cache(
        layers=model.layers,
        pages=7 + 1,
        kv_heads=model.kv_heads,
        block_size=16,
        head_dim=model.head_dim,
        dtype=getattr(torch, dtype),
    )
    real = sum(t.numel() * t.element_size() for cache in caches for t in (cache.keys, cache.values))
    block = kv_bytes_per_block(model, Layout(), dtype, 16)  # type: ignore[arg-type]
    assert real == (7 + 1) * block


@pytest.mark.parametrize("name", [LLAMA_8B, ERNIE_21B, ERNIE_300B, "Qwen/Qwen3-235B-A22B"])
def test_cards_together_hold_the_model_once_plus_what_is_replicated(name: str) -> None:
    model = published(name)
    whole = weight_bytes(model, Layout(), "bfloat16")
    for tensor in (2, 4, 8):
        for expert in {1, tensor} if model.moe is not None else {1}:
            layout = Layout(tensor, 1, expert)
            if layout_violations(model, layout):
                continue
            together = 0
            for line in weight_lines(model, layout, "bfloat16"):
                # KV heads are held by tensor / kv_heads cards each, everything else that is replicated by all.
                distinct = model.kv_heads if line.part is Part.ATTENTION else 1
                together += tensor * (line.bytes - line.replicated_bytes) + distinct * line.replicated_bytes
            assert together == whole, layout


def test_ernie_21b_needs_what_its_published_configuration_implies() -> None:
    model = published(ERNIE_21B)
    assert kv_bytes_per_token(model, Layout(), "bfloat16") == 57_344
    assert 7.33e6 < kv_bytes_per_block(model, Layout(), "bfloat16", 128) < 7.35e6
    experts = next(line for line in weight_lines(model, Layout(1, 8, 8), "bfloat16") if line.part is Part.EXPERTS)
    assert experts.bytes == 27 * 8 * 3 * 2560 * 1536 * 2


def test_fp8_stores_projections_in_one_byte_and_a_scale_for_each_output_channel() -> None:
    model = published(LLAMA_8B)
    projections = [row for row in tensor_table(model) if row.projection]
    elements = sum(row.elements for row in projections)
    channels = sum(row.copies * row.shape[0] for row in projections)
    assert weight_bytes(model, Layout(), "fp8") == 2 * (parameter_count(model) - elements) + elements + 4 * channels


def plan_of(model: ModelDescription, layout: Layout, card: str = "gaudi2", **limits: int | None) -> MemoryPlan:
    settings = {"max_model_len": 4096, "max_num_seqs": 64, "max_batched_tokens": 2048, "block_size": 128}
    return memory_plan(
        model,
        layout,
        CARDS[card],  # type: ignore[index]
        StepLimits(**(settings | limits)),  # type: ignore[arg-type]
        dtype="bfloat16",
        weight_format="bfloat16",
        kv_format="bfloat16",
        recipes=128,
    )


@pytest.mark.parametrize(
    ("name", "layout"), [(LLAMA_8B, Layout()), (ERNIE_21B, Layout()), (ERNIE_300B, Layout(8, 1, 8))]
)
@pytest.mark.parametrize("card", ["gaudi2", "gaudi3"])
def test_the_lines_add_up_to_the_card_and_no_further_block_fits(name: str, layout: Layout, card: str) -> None:
    plan = plan_of(published(name), layout, card)
    lines = (plan.reserve_bytes, plan.weight_bytes, plan.activations.bytes, plan.graph_bytes, plan.kv_bytes)
    assert sum(lines) + plan.free_bytes == plan.visible_bytes == CARDS[card].visible_bytes  # type: ignore[index]
    assert plan.fits
    assert plan.free_bytes >= 0
    more = plan_of(published(name), layout, card, kv_blocks=plan.kv_blocks + 1)
    assert not more.fits
    assert more.free_bytes < 0


def test_visible_memory_is_that_of_the_cards() -> None:
    assert CARDS["gaudi2"].visible_bytes == int(94.6 * GIB)
    assert CARDS["gaudi3"].visible_bytes == int(126.5 * GIB)
    assert (CARDS["gaudi2"].e4m3_max, CARDS["gaudi3"].e4m3_max) == (240, 448)


def test_a_model_that_does_not_fit_says_how_much_is_missing() -> None:
    plan = plan_of(published(ERNIE_300B), Layout())
    assert not plan.fits
    assert plan.shortfall_bytes > weight_bytes(published(ERNIE_300B), Layout(), "bfloat16") - (plan.visible_bytes or 0)


def test_a_measured_constant_replaces_the_published_one(tmp_path: Path) -> None:
    file = tmp_path / "gaudi2.json"
    measured = {"card": "gaudi2", "source": "a test", "visible_bytes": 90 * GIB, "graph_bytes_per_recipe": 1 << 20}
    file.write_text(json.dumps(measured | {"compile_seconds": 2.5}))
    card = read_calibration(file).apply(CARDS["gaudi2"])
    assert (card.visible_bytes, card.graph_bytes_per_recipe, card.calibrated) == (90 * GIB, 1 << 20, True)
    assert (card.compile_seconds.low, card.compile_seconds.high, card.compile_seconds.measured) == (2.5, 2.5, True)
    assert card.memory_bandwidth == CARDS["gaudi2"].memory_bandwidth
    model = published(LLAMA_8B)
    limits = StepLimits(4096, 64, 2048, 128)
    plan = memory_plan(
        model, Layout(), card, limits, dtype="bfloat16", weight_format="bfloat16", kv_format="bfloat16", recipes=10
    )
    assert plan.graph_bytes == 10 << 20


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ('{"card": "gaudi2"}', "source"),
        ('{"card": "gaudi9", "source": "x"}', "card"),
        ('{"card": "gaudi2", "source": "x", "memory_bandwidth": -1}', "memory_bandwidth"),
        ('{"card": "gaudi2", "source": "x", "bandwidth": 1}', "bandwidth"),
    ],
)
def test_a_bad_calibration_is_refused_by_file_and_key(text: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(CalibrationError, match=rf"calibration\.json: .*{word}"):
        read_calibration(file)


def test_a_calibration_of_another_card_is_refused() -> None:
    with pytest.raises(CalibrationError, match="measured on gaudi3"):
        Calibration(card="gaudi3", source="x").apply(CARDS["gaudi2"])


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3", "ernie4_5_moe"])
def test_predicted_activations_have_the_shapes_of_a_real_step(family: str) -> None:
    directory, tokens = tiny(family), 24
    model = read_model_description(directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    sizes: dict[str, int] = {}

    def record(name: str) -> None:
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor):
                sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()

        theirs.get_submodule(name).register_forward_hook(hook)

    attention = "model.layers.0.self_attn."
    dense = next((i for i in range(model.layers) if not model.is_sparse(i)), None)
    mlp = f"model.layers.{dense}.mlp."
    names = [attention + part for part in ("q_proj", "k_proj", "v_proj")] + [
        "model.layers.0.input_layernorm",
        "lm_head",
    ]
    names += [mlp + part for part in ("gate_proj", "up_proj", "down_proj")] if dense is not None else []
    for name in names:
        record(name)
    with torch.no_grad():
        theirs(torch.arange(tokens)[None] % model.vocab)

    limits = StepLimits(tokens, tokens, tokens, 8)
    plan = activation_plan(model, Layout(), limits, dtype="float32")
    predicted = {(t.phase, t.name): t.bytes for t in plan.tensors}
    assert predicted["prefill attention", "query, key, value"] == sum(sizes[attention + p + "_proj"] for p in "qkv")
    assert predicted["residual stream", "hidden states"] == sizes["model.layers.0.input_layernorm"]
    assert predicted["sampler", "logits of a card"] == sizes["lm_head"]
    if dense is not None:
        assert predicted["dense MLP", "gate and up"] == sizes[mlp + "gate_proj"] + sizes[mlp + "up_proj"]
        assert predicted["dense MLP", "output"] == sizes[mlp + "down_proj"]
