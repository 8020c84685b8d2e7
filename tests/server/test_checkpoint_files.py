"""A fact of a checkpoint that several files may hold is read from all of them: ends of sequence, tokens, templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpu_engine.server.model_files import load_model
from tests.server.running import RunningServer, post


def checkpoint(shell: Path, folder: Path, **changes: dict[str, Any]) -> Path:
    """The shell with other keys in its files; a null takes a key away. File names without their `.json`."""
    shutil.copytree(shell, folder)
    for name, keys in changes.items():
        file = folder / f"{name}.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**known, **keys}))
    return folder


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": None}}, (5,)),
        ({"config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": "<role>"}}, (5, 3)),
        ({"config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": {"content": "<role>"}}}, (5, 3)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 9]}}, (7, 9, 5, 2)),
        ({"config": {"eos_token_id": None}, "special_tokens_map": {"eos_token": "<role>"}}, (2, 3)),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "<no such token>"}}, ()),
    ],
    ids=str,
)
def test_the_end_of_a_sequence_is_what_any_file_says(
    shell: Path, tmp_path: Path, files: dict[str, dict[str, Any]], ids: tuple[int, ...]
) -> None:
    assert load_model(checkpoint(shell, tmp_path / "model", **files)).eos_token_ids == ids


def test_an_answer_ends_at_the_tokenizers_end_of_sequence(shell: Path, tmp_path: Path) -> None:
    model = checkpoint(shell, tmp_path / "model", config={"eos_token_id": 5}, tokenizer_config={"eos_token": "<role>"})
    with RunningServer(model, {}) as server:
        server.wait_until_ready()
        body = {"prompt": [70, 71, 3, 72], "max_tokens": 8}
        (choice,) = post(f"{server.url}/v1/completions", body)[1]["choices"]
        assert (choice["finish_reason"], len(choice["text"])) == ("stop", 2)


@pytest.mark.parametrize("with_decoder", [True, False])
def test_a_special_token_is_the_one_that_transformers_takes(shell: Path, tmp_path: Path, with_decoder: bool) -> None:
    from transformers import AutoTokenizer

    added = {"2": {"content": "<eos>", "special": True}} if with_decoder else None
    model = checkpoint(
        shell,
        tmp_path / "model",
        tokenizer_config={
            "bos_token": "<role>",
            "chat_template": "{{ bos_token }}",
            **({"added_tokens_decoder": added} if added else {}),
        },
        special_tokens_map={"bos_token": "<pad>"},
    )
    ours = load_model(model).tokenizer.chat_template
    assert ours is not None
    assert ours.render([]) == AutoTokenizer.from_pretrained(model).bos_token


@pytest.mark.parametrize("places", [("jinja", "config", "json"), ("config", "json"), ("json",), ()], ids=str)
def test_a_chat_template_is_the_first_of_its_places(shell: Path, tmp_path: Path, places: tuple[str, ...]) -> None:
    template = "config" if "config" in places else None
    model = checkpoint(shell, tmp_path / "model", tokenizer_config={"chat_template": template})
    if "jinja" in places:
        (model / "chat_template.jinja").write_text("jinja")
    if "json" in places:
        (model / "chat_template.json").write_text('{"chat_template": "json"}')
    found = load_model(model).tokenizer.chat_template
    assert (None if found is None else found.render([])) == (places[0] if places else None)


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_tokenizers_endless_pattern_is_a_refusal_of_the_text(shell: Path, tmp_path: Path, place: str) -> None:
    """Patterns come with the weights, too; the library ends them after a bounded number of tries, by a panic."""
    model = checkpoint(shell, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    endless = {"pattern": {"Regex": "(a+)+$"}}
    split = {"type": "Split", "behavior": "Isolated", "invert": False, **endless}
    tokenizer[place] = split if place == "pre_tokenizer" else {"type": "Replace", "content": "a", **endless}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with RunningServer(model, {}) as server:
        server.wait_until_ready()
        status, answer = post(f"{server.url}/v1/completions", {"prompt": "a" * 40 + "b", "max_tokens": 1})
        assert (status, answer["error"]["param"]) == (400, "prompt"), answer
        assert "tokenizer fails on this text" in answer["error"]["message"]
        assert post(f"{server.url}/v1/completions", {"prompt": "b", "max_tokens": 1})[0] == 200
