"""What is wrong with a checkpoint is named before serving: file, tensor, what is there and what would be right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpu_engine.contract import FailureReason
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.worker.start_up import StartUpError, open_rank
from tests.models.tiny import tiny

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A writable copy of a good checkpoint."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def refusal(checkpoint: Path, **settings: Any) -> StartUpError:
    with pytest.raises(StartUpError) as caught:
        open_rank(EngineConfig(model=str(checkpoint), **{"num_kv_blocks": 4, **settings}), lambda _progress: None)
    return caught.value


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def configure(checkpoint: Path, **changes: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_missing_tensor_is_named_with_the_nearest_name(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q.replace("q_proj", "qproj"): tensors.pop(Q)}))
    error = refusal(checkpoint)
    assert (error.reason, error.tensor) == (FailureReason.MODEL_BROKEN, Q)
    assert "missing" in error.message
    assert Q.replace("q_proj", "qproj") in error.message


def test_an_unknown_tensor_is_named_with_the_nearest_name(checkpoint: Path) -> None:
    extra = "model.layers.1.self_attn.q_proj.wieght"
    rewrite(checkpoint, lambda tensors: tensors.update({extra: torch.zeros(1)}))
    error = refusal(checkpoint)
    assert (error.reason, error.tensor) == (FailureReason.MODEL_BROKEN, extra)
    assert Q in error.message


def test_a_wrong_shape_names_both(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q: torch.zeros(64, 32)}))
    error = refusal(checkpoint)
    assert (error.reason, error.tensor) == (FailureReason.MODEL_BROKEN, Q)
    assert "[64, 32]" in error.message
    assert "[64, 64]" in error.message


def test_a_type_we_do_not_compute_in_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q: torch.zeros(64, 64, dtype=torch.int8)}))
    error = refusal(checkpoint)
    assert (error.reason, error.tensor) == (FailureReason.MODEL_UNSUPPORTED, Q)
    assert "I8" in error.message


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_a_truncated_file_is_named(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    error = refusal(checkpoint)
    assert (error.reason, error.path) == (FailureReason.MODEL_BROKEN, str(file))
    assert "truncated" in error.message


@pytest.mark.parametrize(
    "header", [b"[1]", b"nonsense", b'{"a": {}}', b'{"a": {"dtype": "F32", "shape": 3}}', b"{" * 5000]
)
def test_a_header_that_is_not_one_is_named(checkpoint: Path, header: bytes) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    error = refusal(checkpoint)
    assert (error.reason, error.path) == (FailureReason.MODEL_BROKEN, str(file))


def test_a_header_whose_offsets_disagree_with_its_shapes_is_named(checkpoint: Path) -> None:
    header = json.dumps({Q: {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 16]}}).encode()
    file = checkpoint / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert refusal(checkpoint).tensor == Q


def test_no_weights_at_all_is_said(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    error = refusal(checkpoint)
    assert error.reason is FailureReason.MODEL_NOT_FOUND
    assert "model.safetensors" in error.message


def test_a_pickle_is_never_opened(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    error = refusal(checkpoint)
    assert error.reason is FailureReason.MODEL_UNSUPPORTED
    assert "pickle" in error.message
    assert error.path is not None
    assert error.path.endswith("pytorch_model.bin")


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {Q: "model-1-of-2.safetensors"}}, FailureReason.MODEL_NOT_FOUND),
        ({"weight_map": {Q: "../outside.safetensors"}}, FailureReason.MODEL_BROKEN),
        ({"weight_map": {}}, FailureReason.MODEL_BROKEN),
        ({"weight_map": ["a"]}, FailureReason.MODEL_BROKEN),
        ([], FailureReason.MODEL_BROKEN),
    ],
)
def test_a_bad_index_is_named(checkpoint: Path, index: object, reason: FailureReason) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(checkpoint).reason is reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"dtype": "int4"}, "int4"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_what_is_not_supported_is_named(checkpoint: Path, changes: dict[str, object], word: str) -> None:
    configure(checkpoint, **changes)
    error = refusal(checkpoint)
    assert error.reason is FailureReason.MODEL_UNSUPPORTED
    assert word in error.message
    assert error.path == str(checkpoint / "config.json")


def test_a_config_that_is_no_json_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    error = refusal(checkpoint)
    assert (error.reason, error.path) == (FailureReason.MODEL_BROKEN, str(checkpoint / "config.json"))


def test_too_little_memory_is_said_with_both_numbers(checkpoint: Path) -> None:
    error = refusal(checkpoint, num_kv_blocks=10**9)
    assert error.reason is FailureReason.INSUFFICIENT_MEMORY
    numbers = [int(word) for word in error.message.replace(",", " ").replace("(", " ").split() if word.isdigit()]
    assert max(numbers) > 10**12


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "int8"}, "int8"),
        ({"device": "abacus"}, "abacus"),
        ({"max_model_len": 100_000}, "100000"),
        ({"num_kv_blocks": 0}, "0"),
        ({"num_kv_blocks": None, "kv_cache_memory_bytes": 1000}, "1000"),
    ],
)
def test_settings_that_do_not_fit_the_model_or_device_are_named(
    checkpoint: Path, settings: dict[str, Any], word: str
) -> None:
    error = refusal(checkpoint, **settings)
    assert error.reason in (FailureReason.USAGE, FailureReason.INSUFFICIENT_MEMORY)
    assert word in error.message


def test_a_tied_checkpoint_may_repeat_its_embedding(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny("llama", tie_word_embeddings=True), tmp_path / "tied"))
    rewrite(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    open_rank(EngineConfig(model=str(checkpoint), num_kv_blocks=4), lambda _progress: None)


def test_a_sharded_checkpoint_loads(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{1 + index % 2}-of-2.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    seen: list[tuple[int, int]] = []
    open_rank(
        EngineConfig(model=str(checkpoint), num_kv_blocks=4),
        lambda progress: seen.append((progress.done, progress.total)),
    )
    assert seen[-1][0] == seen[-1][1] == sum(t.numel() * t.itemsize for t in tensors.values())
