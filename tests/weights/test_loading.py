"""Both drivers give the same tensors, whole and sharded; a worker reads its own bytes and holds no more than them."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from hpu_engine.model.weights.loading import load_parameters, take_parameters
from hpu_engine.model.weights.name_table import NameTable, expand
from hpu_engine.model.weights.placement import Placement
from hpu_engine.model.weights.reading import CheckpointReader, byte_runs
from hpu_engine.planning import read_model_description
from hpu_engine.planning.layout import Layout
from tests.models.tiny import FAMILIES, tiny

LAYOUTS = [Layout(), Layout(2), Layout(2, 1, 2), Layout(1, 2, 2), Layout(2, 2, 4)]


def quietly(_done: int, _total: int) -> None:
    pass


def streamed(
    directory: Path, table: NameTable, dtype: torch.dtype = torch.float32, reader: CheckpointReader | None = None
) -> dict[str, Tensor]:
    return dict(load_parameters(directory, table, dtype, quietly, reader))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_stored_values(family: str) -> None:
    """Put together here by hand from whole tensors, as an independent reading of the table's meaning."""
    directory = tiny(family)
    table = expand(read_model_description(directory))
    stored = load_file(directory / "model.safetensors")
    got = streamed(directory, table)
    assert set(got) == set(table.parameters)
    q, k, v = (stored[f"model.layers.2.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(got["layers.2.qkv"], torch.cat((q, k, v)))
    assert torch.equal(got["embedding"], stored["model.embed_tokens.weight"])
    if family == "mixtral":
        prefix = "model.layers.2.block_sparse_moe."
        gate, up = (stored[f"{prefix}experts.5.{name}.weight"] for name in ("w1", "w3"))
        assert torch.equal(got["layers.2.experts.5.gate_up"], torch.cat((gate, up)))
        assert torch.equal(got["layers.2.experts.5.down"], stored[f"{prefix}experts.5.w2.weight"])
    if family == "ernie4_5_moe":
        bias = stored["model.layers.2.mlp.moe_statics.e_score_correction_bias"]
        assert torch.equal(got["layers.2.router_correction"], bias[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["ernie4_5_moe", "mixtral", "qwen3_moe"])
def test_both_drivers_give_identical_tensors_under_any_layout(family: str, layout: Layout, dtype: torch.dtype) -> None:
    directory = tiny(family)
    description = read_model_description(directory)
    whole = load_file(directory / "model.safetensors")
    for worker in range(layout.cards):
        table = expand(description, Placement(layout, worker))
        by_streaming = streamed(directory, table, dtype)
        by_taking = dict(take_parameters(whole, table, dtype, directory))
        assert by_streaming.keys() == by_taking.keys() == table.parameters.keys()
        for name, value in by_streaming.items():
            assert value.dtype == (torch.float32 if table.parameters[name].wide else dtype), name
            assert value.shape == table.parameters[name].shape
            assert torch.equal(value, by_taking[name]), name


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 1, 2), Layout(1, 4, 4)], ids=str)
def test_activation_scales_go_where_the_table_says(layout: Layout) -> None:
    """All experts' up_gate scales on every worker, down scales of its own experts, in their order; by both drivers."""
    directory = tiny("ernie4_5_moe", quantization_config={"quantization": "mix_quant", "quant_method": "mix_quant"})
    description = read_model_description(directory)
    whole = load_file(directory / "model.safetensors")
    names = [name for name, part in expand(description).parts.items() if part.scale is not None]
    whole |= {name: torch.tensor([float(number)]) for number, name in enumerate(names)}
    for worker in range(layout.cards):
        place = Placement(layout, worker)
        held = dict(take_parameters(whole, expand(description, place), torch.bfloat16, directory))
        window = place.experts(description)
        prefix = "ernie.layers.2.mlp.experts.{}.{}_proj.activation_scale"
        own = [whole[prefix.format(expert, "down")] for expert in range(window.first, window.last + 1)]
        every = [whole[prefix.format(expert, "up_gate")] for expert in range(8)]
        assert torch.equal(held["layers.2.experts.down.in_scale"], torch.cat(own))
        assert torch.equal(held["layers.2.experts.gate_up.in_scale"], torch.cat(every))
        assert torch.equal(
            held["layers.3.cache_k_scale"], whole["ernie.layers.3.self_attn.cachek_matmul.activation_scale"]
        )
        assert "layers.0.gate_up.act_scale" in held
        assert "layers.1.gate_up.act_scale" not in held


@given(st.data())
@settings(max_examples=200)
def test_byte_runs_are_the_region_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    region = tuple(
        (start, data.draw(st.integers(start + 1, size)))
        for size in shape
        for start in [data.draw(st.integers(0, size - 1))]
    )
    values = torch.arange(prod(shape), dtype=torch.int16).view(shape)
    flat = values.flatten().view(torch.uint8).tolist()
    read = [byte for offset, length in byte_runs(shape, region, 2) for byte in flat[offset : offset + length]]
    wanted = values[tuple(slice(start, stop) for start, stop in region)].contiguous()
    assert read == wanted.flatten().view(torch.uint8).tolist()


def test_rows_are_read_in_one_run() -> None:
    assert byte_runs((8, 4), ((2, 4), (0, 4)), 2) == [(16, 16)]
    assert byte_runs((8, 4), ((0, 8), (0, 4)), 2) == [(0, 64)]
    assert byte_runs((2, 4), ((0, 2), (2, 4)), 2) == [(4, 4), (12, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_worker_reads_its_own_bytes_only(layout: Layout) -> None:
    """Counted by the reader, and by the kernel for the whole process (headers included there)."""
    directory = tiny("ernie4_5_moe", hidden_size=256, moe_intermediate_size=256, intermediate_size=512)
    description = read_model_description(directory)
    for worker in range(layout.cards):
        table = expand(description, Placement(layout, worker))
        needed = sum(prod(parameter.shape) * 4 for parameter in table.parameters.values())
        reader = CheckpointReader()
        before = _bytes_through_system_calls()
        streamed(directory, table, reader=reader)
        read = _bytes_through_system_calls() - before
        assert reader.bytes_read == needed
        assert needed <= read <= needed * 1.01


def _bytes_through_system_calls() -> int:
    for line in Path("/proc/thread-self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("no rchar in /proc/thread-self/io")


def test_progress_counts_this_workers_bytes_to_the_end() -> None:
    directory = tiny("mixtral")
    table = expand(read_model_description(directory), Placement(Layout(2, 1, 2), 1))
    seen: list[tuple[int, int]] = []
    for _ in load_parameters(directory, table, torch.float32, lambda done, total: seen.append((done, total))):
        pass
    needed = sum(prod(parameter.shape) * 4 for parameter in table.parameters.values())
    assert seen[0] == (0, needed)
    assert seen[-1] == (needed, needed)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


PEAK = """
import json, sys
import torch
from pathlib import Path
from hpu_engine.model.weights.loading import load_parameters
from hpu_engine.model.weights.name_table import expand
from hpu_engine.planning import read_model_description
directory = Path(sys.argv[1])
table = expand(read_model_description(directory))
def memory(field):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of the imports
before = memory("VmRSS")
held = dict(load_parameters(directory, table, getattr(torch, sys.argv[2]), lambda done, total: None))
after = memory("VmHWM")
sizes = [value.nbytes for value in held.values()]
print(json.dumps([after - before, sum(sizes), max(sizes)]))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_the_weights_and_at_most_two_parameters(smollm2: Path, dtype: str) -> None:
    """Real weights in a process of its own, converted and not: 269 MB as stored, 538 MB as float32."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(smollm2), dtype], capture_output=True, text=True, check=True)
    grown, weights, largest = json.loads(done.stdout)
    assert weights > 250_000_000
    assert weights * 0.98 < grown <= weights + 2 * largest
