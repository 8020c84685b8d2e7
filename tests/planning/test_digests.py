"""The shape digest changes with what recipes depend on and nothing else, the content digest with the files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hpu_engine.model.weights.model_digests import read_digests, read_weights_files
from hpu_engine.planning import ModelDescription, read_model_description
from hpu_engine.planning.model.digests import TensorHeader, WeightsFile, content_digest, shape_digest
from tests.models.tiny import tiny
from tests.planning.facts import ERNIE_21B, published

TENSORS = tuple(TensorHeader(f"t{number}", "BF16", (number + 1, 8), 100 * number) for number in range(6))
FILE = WeightsFile("model.safetensors", 4096, 1_700_000_000_000_000_000, TENSORS)


@given(cut=st.integers(0, 6), order=st.permutations(TENSORS))
def test_the_shape_digest_does_not_depend_on_how_a_checkpoint_is_cut_into_files(
    cut: int, order: list[TensorHeader]
) -> None:
    model = published(ERNIE_21B)
    files = (WeightsFile("a", 1, 2, tuple(order[:cut])), WeightsFile("b", 3, 4, tuple(order[cut:])))
    assert shape_digest(model, files) == shape_digest(model, [FILE])


CHANGES: dict[str, object] = {
    "hidden": 4096,
    "rms_norm_eps": 1e-3,
    "dtype": "float32",
    "tied_embeddings": False,
    "quantization": "fp8",
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_shape_digest_changes_with_what_changes_arithmetic(field: str) -> None:
    model = published(ERNIE_21B)
    other = model.model_copy(update={field: CHANGES[field]})
    assert shape_digest(model, [FILE]) != shape_digest(other, [FILE])


def test_the_shape_digest_changes_with_a_tensor_and_with_a_compiled_scale() -> None:
    model = published(ERNIE_21B)
    wider = replace(FILE, tensors=(replace(TENSORS[0], shape=(2, 8)), *TENSORS[1:]))
    found = {
        shape_digest(model, [FILE]),
        shape_digest(model, [wider]),
        shape_digest(model, [FILE], {"q": 0.5}),
        shape_digest(model, [FILE], {"q": 0.25}),
    }
    assert len(found) == 4


def test_ids_that_end_an_answer_change_no_recipe() -> None:
    model = published(ERNIE_21B)
    other = model.model_copy(update={"eos_token_ids": (5,), "bos_token_id": 6})
    assert shape_digest(model, [FILE]) == shape_digest(other, [FILE])


def test_the_content_digest_is_the_commit_s_or_changes_with_every_attribute_of_a_file() -> None:
    others = [
        FILE,
        replace(FILE, name="other.safetensors"),
        replace(FILE, size_bytes=4097),
        replace(FILE, modified_ns=FILE.modified_ns + 1),
        replace(FILE, tensors=(replace(TENSORS[0], offset=8), *TENSORS[1:])),
    ]
    assert len({content_digest([file]) for file in others}) == len(others)
    assert len({content_digest([file], "c" * 40) for file in others}) == 1


def described(directory: Path) -> ModelDescription:
    return read_model_description(directory)


def test_a_checkpoint_that_is_written_anew_has_other_content_and_the_same_shapes(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    before = read_digests(directory, described(directory))
    assert before == read_digests(directory, described(directory))
    file = directory / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    os.utime(file, ns=(1, 1))
    after = read_digests(directory, described(directory))
    assert before.shape == after.shape
    assert before.content != after.content
    assert [f.name for f in read_weights_files(directory)] == ["model.safetensors"]


def test_a_snapshot_of_the_hub_is_known_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    directories = [tmp_path / name / "snapshots" / commit for name in ("a", "b")]
    for number, directory in enumerate(directories):
        shutil.copytree(tiny("llama"), directory)
        os.utime(directory / "model.safetensors", ns=(number, number))
    first, second = (read_digests(directory, described(directory)) for directory in directories)
    assert first == second


def test_digests_are_read_without_torch() -> None:
    probe = "import sys, hpu_engine.model.weights.model_digests; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True)
