"""Tiny checkpoints are real ones: loadable, reproducible, random throughout, and any text goes through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.tiny import FAMILIES, VOCAB_SIZE, tiny, write_tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_random_and_nothing_is_missing(family: str) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(tiny(family), output_loading_info=True)
    assert not {kind: found for kind, found in info.items() if found}
    for name, value in model.state_dict().items():
        assert value.float().std() > 0.01, name
    with torch.inference_mode():
        logits = model(torch.arange(4, 36)[None]).logits[0]
    assert 0.5 < logits.std() < 20
    assert len(set(logits.argmax(-1).tolist())) > 8


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        write_tiny(tmp_path / name, "llama", seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_any_text_goes_through_the_tokenizer_and_comes_back(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    text = "rows 12\t3.5\n\n żluťoučký 你好 ☃ 👩‍🔬🙂"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB_SIZE
    assert len(ids) < len(text.encode())
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "<bos>", "<eos>"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<role>user\nhi<eos>\n<role>assistant\n"
