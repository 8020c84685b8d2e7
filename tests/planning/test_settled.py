"""What the plan prints is what the engine runs, figure by figure; what the plan refuses the engine refuses as well."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from hpu_engine.cli.plan import app
from hpu_engine.contract import FailureReason
from hpu_engine.device.cpu.processor import cpu_card, read_processor
from hpu_engine.planning.cards import CARDS, Processor
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.report import as_document
from hpu_engine.planning.settle import Settled, Specification, settle
from hpu_engine.planning.violations import PlanError, in_flags
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.settings.serve import load_settings
from hpu_engine.worker.start_up import StartUpError
from tests.engine.direct import open_quietly
from tests.models.smollm2 import smollm2
from tests.models.tiny import tiny
from tests.planning.facts import ERNIE_21B, LLAMA_8B, published

WIDE, NARROW, TILES = Processor(), Processor(bfloat16=True), Processor(bfloat16=True, tiles=True, kernels_ahead=True)


def planned(model: str, settings: dict[str, Any]) -> Result:
    """The command with the flags that `serve` takes for these settings."""
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in settings.items()]
    return CliRunner().invoke(app, ["--device", "cpu", "--json", "--model", model, *flags])


def served(model: str, settings: dict[str, Any]) -> EngineConfig:
    """What the workers of `serve` with these settings are told."""
    return load_settings({"model": model, **settings}).engine_config()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16", "max_model_len": 256}),
        ("llama", {"exact": True, "block_size": 16, "num_kv_blocks": 40}),
        ("llama", {"force_buckets": True, "block_size": 16, "num_kv_blocks": 40, "max_num_seqs": 12}),
        ("llama", {"compile": True, "block_size": 32, "kv_cache_memory": 4 << 20}),
        ("mixtral", {"max_num_batched_tokens": 64, "block_size": 32, "kernels": "torch"}),
        ("ernie4_5_moe", {"dtype": "float32", "max_num_seqs": 3}),
        ("smollm2", {"max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory": 1 << 28}),
    ],
)
def test_the_engine_runs_what_the_plan_prints(family: str, settings: dict[str, Any]) -> None:
    model = str(smollm2() if family == "smollm2" else tiny(family))
    done = planned(model, settings)
    assert done.exit_code == 0, done.stderr
    rank = open_quietly(served(model, settings))
    assert as_json(rank.settled) == json.loads(done.stdout)["settled"]
    settled, loaded, transformer = rank.settled, rank.loaded, rank.runner.transformer
    assert str(transformer.dtype) == f"torch.{settled.compute_dtype}"
    assert (loaded.num_kv_blocks, loaded.max_batched_tokens) == (
        settled.memory.kv_blocks,
        settled.limits.max_batched_tokens,
    )
    assert (loaded.dtype, loaded.kernels) == (settled.kv_format, settled.kernels)
    assert rank.runner.shapes.buckets is settled.buckets


def as_json(settled: Settled) -> Any:
    return json.loads(json.dumps(as_document(settled)))


REFUSED: list[dict[str, Any]] = [
    {"compile": True, "kernels": "torch"},
    {"max_model_len": 1},
    {"max_model_len": 4096},
    {"max_num_batched_tokens": 100},
    {"max_num_batched_tokens": 130, "max_num_seqs": 100},
    {"max_num_seqs": 300, "max_num_batched_tokens": 256},
    {"block_size": 1, "num_kv_blocks": 1},
    {"kv_cache_memory": 1000},
    {"max_model_len": 2048, "num_kv_blocks": 3},
    {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 2048},
]


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_what_the_plan_refuses_the_engine_refuses_in_the_same_words(settings: dict[str, Any]) -> None:
    model = str(tiny("llama"))
    done = planned(model, settings)
    assert done.exit_code != 0
    with pytest.raises(StartUpError) as refused:
        open_quietly(served(model, settings))
    assert refused.value.reason is FailureReason.USAGE
    printed = done.stderr or json.loads(done.stdout)["verdict"]
    assert refused.value.message in printed


@given(
    length=st.none() | st.integers(-1, 3000),
    sequences=st.integers(-1, 200),
    budget=st.none() | st.integers(-1, 5000),
    size=st.integers(-1, 300),
    blocks=st.none() | st.integers(-1, 100),
    memory=st.none() | st.integers(-1, 1 << 26),
)
def test_whatever_is_asked_is_settled_or_refused(
    length: int | None, sequences: int, budget: int | None, size: int, blocks: int | None, memory: int | None
) -> None:
    """And what is settled keeps its own rules: a request has room, padding has slots of its own, memory adds up."""
    asked = Specification(
        model=published(LLAMA_8B),
        card=CARDS["cpu"],
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
        block_size=size,
        num_kv_blocks=blocks,
        kv_cache_memory_bytes=memory,
    )
    try:
        settled = settle(asked)
    except PlanError as refused:
        in_flags(refused.violations)
        return
    limits, planned_memory = settled.limits, settled.memory
    assert limits.scratch_blocks * size >= limits.flat_tokens
    assert planned_memory.needed_bytes >= planned_memory.kv_bytes
    if not settled.violations:
        assert limits.kv_blocks == planned_memory.kv_blocks >= limits.blocks_per_row
        assert limits.max_model_len == min(settled.max_model_len, planned_memory.kv_tokens)
        assert length is None or limits.max_model_len == length


@pytest.mark.parametrize(
    ("processor", "settings", "expected"),
    [
        (WIDE, {}, ("float32", "float32", "float32", "torch")),
        (NARROW, {}, ("bfloat16", "bfloat16", "bfloat16", "torch")),
        (TILES, {}, ("float32", "bfloat16", "bfloat16", "tiles")),
        (TILES, {"kernels": "torch"}, ("bfloat16", "bfloat16", "bfloat16", "torch")),
        (TILES, {"exact": True}, ("bfloat16", "bfloat16", "bfloat16", "torch")),
        (TILES, {"force_buckets": True}, ("bfloat16", "bfloat16", "bfloat16", "torch")),
        (TILES, {"block_size": 24, "max_num_batched_tokens": 240}, ("bfloat16", "bfloat16", "bfloat16", "torch")),
        (TILES, {"dtype": "float32"}, ("float32", "float32", "float32", "torch")),
        (TILES, {"compile": True}, ("float32", "bfloat16", "bfloat16", "tiles")),
        (TILES, {"compile": True, "exact": True}, ("float32", "float32", "float32", "compiled")),
        (NARROW, {"compile": True}, ("float32", "float32", "float32", "compiled")),
    ],
)
def test_the_types_of_a_cpu_follow_from_its_processor_and_the_settings(
    processor: Processor, settings: dict[str, Any], expected: tuple[str, ...]
) -> None:
    card = CARDS["cpu"].model_copy(update={"processor": processor})
    settled = settle(Specification(published(LLAMA_8B), card, **settings))
    assert (settled.compute_dtype, settled.weight_format, settled.kv_format, settled.kernels) == expected


def test_float16_is_widened_where_bfloat16_would_lose_its_digits() -> None:
    model = published(LLAMA_8B).model_copy(update={"dtype": "float16"})
    card = CARDS["cpu"].model_copy(update={"processor": NARROW})
    assert settle(Specification(model, card)).weight_format == "float32"
    assert settle(Specification(model, CARDS["gaudi2"])).weight_format == "bfloat16"


def test_the_flags_of_the_processor_say_what_torch_says_of_it() -> None:
    assert read_processor().bfloat16 == bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert cpu_card().processor == read_processor()


def test_every_rank_of_a_group_settles_the_same_and_a_digest_tells_two_settings_apart() -> None:
    asked = Specification(published(ERNIE_21B), CARDS["gaudi2"], Layout(1, 8, 8), max_model_len=32768)
    assert settle(asked).digest == settle(replace(asked)).digest
    others = [
        replace(asked, max_model_len=16384),
        replace(asked, dtype="fp8"),
        replace(asked, recipes=64),
        replace(asked, layout=Layout(2, 4, 8)),
    ]
    assert len({settle(one).digest for one in (asked, *others)}) == 5


def test_a_pool_of_a_given_size_bounds_a_request_only_where_no_length_was_asked_for() -> None:
    model, pool = published(LLAMA_8B), {"num_kv_blocks": 4, "block_size": 128}
    bounded = settle(Specification(model, CARDS["gaudi2"], **pool))  # type: ignore[arg-type]
    assert (bounded.limits.max_model_len, bounded.max_model_len, bounded.fits) == (512, model.max_positions, True)
    asked = settle(Specification(model, CARDS["gaudi2"], max_model_len=8192, **pool))  # type: ignore[arg-type]
    assert [violation.field for violation in asked.violations] == ["maxModelLen"]


def test_every_setting_of_the_engine_reaches_what_is_settled() -> None:
    """All but where files are, and the sizes, which are the layout's."""
    of_the_plan = {"card", "layout", "kv_format", "recipes", "trace", "fp8_dispatch"}
    of_the_worker = {"device", "compile_cache", *(f"{name}_parallel_size" for name in ("tensor", "data", "expert"))}
    asked = {field.name for field in fields(Specification)} - of_the_plan
    assert asked == set(EngineConfig.__struct_fields__) - of_the_worker
    config = EngineConfig(model="m", tensor_parallel_size=2, data_parallel_size=4, expert_parallel_size=8, exact=True)
    specification = config.specification(published(ERNIE_21B), CARDS["cpu"])
    assert (specification.layout, specification.exact) == (Layout(2, 4, 8), True)


def test_settings_of_the_cpu_alone_are_refused_on_a_gaudi() -> None:
    with pytest.raises(PlanError) as refused:
        settle(Specification(published(LLAMA_8B), CARDS["gaudi2"], exact=True, compile=True, kernels="torch"))
    assert [violation.field for violation in refused.value.violations] == ["exact", "kernels", "compile"]
