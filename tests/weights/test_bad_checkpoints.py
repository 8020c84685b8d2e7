"""Whatever is wrong with a checkpoint is named, file and tensor, before a byte of it is loaded."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpu_engine.contract import FailureReason
from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.model.weights.loading import load_parameters, take_parameters
from hpu_engine.model.weights.name_table import expand
from hpu_engine.model.weights.placement import Placement
from hpu_engine.model.weights.safetensors_files import list_tensors
from hpu_engine.planning import ModelConfigError, read_model_description
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.violations import PlanError
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.worker.start_up import StartUpError, open_rank
from tests.models.tiny import tiny

Weights = dict[str, Tensor]
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("ernie4_5_moe"), tmp_path / "model"))


def load(directory: Path, placement: Placement | None = None) -> None:
    table = expand(read_model_description(directory), placement)
    read: list[int] = []
    try:
        for _ in load_parameters(directory, table, torch.float32, lambda done, _total: read.append(done)):
            pass
    except WeightsError:
        assert max(read, default=0) == 0, "the refusal came after bytes were loaded"
        raise


def change(directory: Path, edit: Callable[[Weights], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors")


def rename(old: str, new: str) -> Callable[[Weights], object]:
    return lambda weights: weights.update({new: weights.pop(old)})


@pytest.mark.parametrize(
    ("edit", "tensor", "said"),
    [
        (lambda w: w.pop(EXPERT), EXPERT, "missing"),
        (rename(EXPERT, EXPERT.replace("up_proj", "up_porj")), EXPERT, "nearest name is .*up_porj"),
        (lambda w: w.update({EXPERT.replace("3", "8"): w[EXPERT].clone()}), "experts.8", "no such tensor"),
        (lambda w: w.update({EXPERT: w[EXPERT][:-1].contiguous()}), EXPERT, r"\[31, 64\] is stored, \[32, 64\]"),
        (lambda w: w.update({EXPERT: w[EXPERT].to(torch.float64)}), EXPERT, "F64 is not supported"),
        (lambda w: w.update({EXPERT: w[EXPERT].to(torch.int8)}), EXPERT, "I8 is not supported"),
        (
            lambda w: w.pop("model.layers.1.mlp.moe_statics.e_score_correction_bias"),
            "e_score_correction_bias",
            "missing",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("worker", [0, 1])
def test_tensors(checkpoint: Path, edit: Callable[[Weights], object], tensor: str, said: str, worker: int) -> None:
    """Every worker refuses, the one that holds the expert and the one that does not."""
    change(checkpoint, edit)
    with pytest.raises(WeightsError, match=said) as refused:
        load(checkpoint, Placement(Layout(2, 1, 2), worker))
    assert tensor in str(refused.value.tensor)
    assert str(checkpoint) in refused.value.path


def test_whole_tensors_in_memory_are_checked_alike(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights[EXPERT]
    with pytest.raises(WeightsError, match="missing"):
        next(take_parameters(weights, expand(read_model_description(checkpoint)), torch.float32, checkpoint))


def test_a_config_that_contradicts_the_tensors(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "moe_num_experts": 16}))
    with pytest.raises(WeightsError, match=r"experts\.8\."):
        load(checkpoint)


@pytest.mark.parametrize("cut_bytes", [1, 5000])
def test_a_truncated_shard(checkpoint: Path, cut_bytes: int) -> None:
    file = checkpoint / "model.safetensors"
    os.truncate(file, file.stat().st_size - cut_bytes)
    with pytest.raises(WeightsError, match="truncated") as refused:
        load(checkpoint)
    assert refused.value.path == str(file)
    assert refused.value.tensor


def test_a_shard_that_shrinks_while_it_is_read(checkpoint: Path) -> None:
    table = expand(read_model_description(checkpoint))
    file = checkpoint / "model.safetensors"

    def cut(done: int, _total: int) -> None:
        if done > 0:
            os.truncate(file, 20_000)

    with pytest.raises(WeightsError, match="truncated while"):
        list(load_parameters(checkpoint, table, torch.float32, cut))


def header_of(file: Path) -> tuple[bytes, bytes]:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return data[8 : 8 + length], data[8 + length :]


def write(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_a_key_stored_twice_in_one_file(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    header, data = header_of(file)
    entry = json.dumps(json.loads(header)[EXPERT]).encode()
    write(file, header.rstrip().removesuffix(b"}") + b', "' + EXPERT.encode() + b'": ' + entry + b"}", data)
    with pytest.raises(WeightsError, match="stored twice") as refused:
        load(checkpoint)
    assert refused.value.tensor == EXPERT


def test_tensors_that_share_bytes(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    header, data = header_of(file)
    entries = json.loads(header)
    entries[EXPERT]["data_offsets"] = entries[EXPERT.replace("up", "gate")]["data_offsets"]
    write(file, json.dumps(entries).encode(), data)
    with pytest.raises(WeightsError, match="another tensor"):
        load(checkpoint)


def shard(directory: Path) -> tuple[dict[str, str], list[str]]:
    """The checkpoint as two files and an index."""
    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    index: dict[str, str] = {}
    for file, half in zip(files, halves, strict=True):
        save_file({name: weights[name] for name in half}, directory / file)
        index |= dict.fromkeys(half, file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index, files


def test_shards_load_and_a_missing_one_is_named(checkpoint: Path) -> None:
    _, files = shard(checkpoint)
    load(checkpoint)
    (checkpoint / files[1]).unlink()
    with pytest.raises(WeightsError, match="no such file") as refused:
        load(checkpoint)
    assert refused.value.path.endswith(files[1])


def test_a_key_stored_in_two_shards(checkpoint: Path) -> None:
    _, files = shard(checkpoint)
    first, second = (load_file(checkpoint / file) for file in files)
    name = next(iter(first))
    save_file({**second, name: first[name]}, checkpoint / files[1])
    with pytest.raises(WeightsError, match="also stored in") as refused:
        load(checkpoint)
    assert refused.value.tensor == name


def test_an_index_that_puts_a_tensor_where_it_is_not(checkpoint: Path) -> None:
    index, files = shard(checkpoint)
    name = next(name for name, file in index.items() if file == files[0])
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**index, name: files[1]}}))
    with pytest.raises(WeightsError, match=f"it is in {files[0]}") as refused:
        load(checkpoint)
    assert (refused.value.tensor, refused.value.path) == (name, str(checkpoint / files[1]))


def test_a_key_listed_twice_in_the_index(checkpoint: Path) -> None:
    index, files = shard(checkpoint)
    name = next(iter(index))
    text = json.dumps({"weight_map": index}).removesuffix("}}") + f', "{name}": "{files[1]}"}}}}'
    (checkpoint / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="listed twice") as refused:
        load(checkpoint)
    assert refused.value.tensor == name


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "relu"), ("scoring_func", "sigmoid"), ("moe_gate_act", "sigmoid")]
)
def test_an_unsupported_activation_or_scoring(checkpoint: Path, key: str, value: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelConfigError, match=value) as refused:
        load(checkpoint)
    assert refused.value.key == key


def test_experts_that_cannot_be_given_out_evenly(checkpoint: Path) -> None:
    with pytest.raises(PlanError, match="nearest valid: 2, 4"):
        expand(read_model_description(checkpoint), Placement(Layout(1, 3, 3), 0))


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_this_user_may_not_read_is_named(file: str) -> None:
    """A volume written by root and served by a container's user."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(shutil.copytree(tiny("ernie4_5_moe"), Path(folder) / "model"))
        Path(folder).chmod(0o755)
        (model / file).touch()
        (model / file).chmod(0)
        with as_another_user(), pytest.raises(WeightsError, match="cannot be read: Permission denied") as refused:
            list_tensors(model)
        assert refused.value.path.endswith(file)


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root may read everything, so a test that runs as root steps down."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# --- float8, which is refused: what is wrong with its scales is said by name


def declare(directory: Path, quantization: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


MIXED = {"quantization": "mix_quant", "is_quantized": True}
"""As ERNIE's converted checkpoints write it."""


def scales_of(directory: Path, expert_scale: float = 0.01) -> Weights:
    parts = expand(read_model_description(directory)).parts
    return {name: torch.full((1,), expert_scale) for name, part in parts.items() if part.scale is not None}


def refusal(directory: Path) -> StartUpError:
    with pytest.raises(StartUpError) as refused:
        open_rank(EngineConfig(model=str(directory), num_kv_blocks=8), lambda _progress: None)
    return refused.value


@pytest.mark.parametrize(
    "missing",
    ["self_attn.qkv_proj", "self_attn.s_matmul", "mlp.shared_experts.down_proj", "mlp.experts.5.down_proj"],
)
def test_a_missing_activation_scale_of_a_quantised_checkpoint(checkpoint: Path, missing: str) -> None:
    declare(checkpoint, MIXED)
    name = f"ernie.layers.2.{missing}.activation_scale"
    scales = scales_of(checkpoint)
    change(checkpoint, lambda weights: weights.update({key: value for key, value in scales.items() if key != name}))
    error = refusal(checkpoint)
    assert (error.reason, error.tensor, error.path) == (FailureReason.MODEL_BROKEN, name, str(checkpoint))
    with pytest.raises(WeightsError, match="missing"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("weight", "dtype", "scale"),
    [
        (EXPERT, torch.float8_e4m3fn, f"{EXPERT}_scale"),
        (EXPERT.replace(".weight", ".quant_weight"), torch.int8, EXPERT.replace(".weight", ".weight_scale")),
    ],
)
def test_a_missing_scale_of_a_quantised_weight(checkpoint: Path, weight: str, dtype: torch.dtype, scale: str) -> None:
    def quantise(weights: Weights) -> None:
        weights[weight] = weights.pop(EXPERT).to(dtype)

    change(checkpoint, quantise)
    with pytest.raises(WeightsError, match=f"missing, though {weight}") as refused:
        load(checkpoint)
    assert refused.value.tensor == scale
    assert refused.value.path.endswith("model.safetensors")
    declare(checkpoint, {"quant_method": "fp8"})
    assert refusal(checkpoint).tensor == scale


def test_a_quantised_checkpoint_that_has_every_scale_is_unsupported_not_broken(checkpoint: Path) -> None:
    declare(checkpoint, MIXED)
    scales = scales_of(checkpoint)
    change(checkpoint, lambda weights: weights.update(scales))
    error = refusal(checkpoint)
    assert error.reason is FailureReason.MODEL_UNSUPPORTED
    assert "mix_quant" in error.message
    assert str(error.path).endswith("config.json")


@pytest.mark.parametrize("end", ["activation_scale", "weight_scale"])
def test_a_scale_that_the_configuration_does_not_announce(checkpoint: Path, end: str) -> None:
    name = EXPERT.replace("weight", end)
    change(checkpoint, lambda weights: weights.update({name: torch.ones(1)}))
    with pytest.raises(WeightsError, match="declares no quantisation") as refused:
        load(checkpoint)
    assert refused.value.tensor == name
