"""The in-process `LLM`: text in, text out, and nothing left running after an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpu_engine import LLM, SamplingParams
from hpu_engine.offline.llm import RequestFailed
from hpu_engine.scheduling.sampling_params import InvalidParameter
from tests.models.smollm2 import smollm2
from tests.models.tiny import tiny

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(smollm2(), num_kv_blocks=16, max_num_seqs=4, progress_bar=False)


@pytest.fixture(scope="module")
def small() -> LLM:
    return LLM(tiny("llama"), num_kv_blocks=16, progress_bar=False)


def test_a_real_model_answers_in_chat_and_stops_by_itself(llm: LLM) -> None:
    question = [{"role": "user", "content": "Please tell me the capital of France."}]
    (answer,) = llm.chat([question], SamplingParams(max_tokens=32, temperature=0.0))
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert isinstance(answer.stop_reason, int)


def test_a_stop_string_ends_the_text_before_it_and_the_others_go_on(llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    free = llm.generate(prompts, GREEDY)
    word = free[0].text.split()[-1]
    stopped = llm.generate(prompts, GREEDY, stop=[word])
    assert stopped[0].text == free[0].text[: free[0].text.index(word)]
    assert (stopped[0].finish_reason, stopped[0].stop_reason) == ("stop", word)
    if word not in free[1].text:
        assert stopped[1].text == free[1].text


def test_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    (from_text,) = llm.generate(["Water boils at"], GREEDY)
    (from_ids,) = llm.generate([from_text.prompt_token_ids], GREEDY)
    assert from_ids == from_text


def test_one_prompt_alone_needs_no_list(llm: LLM) -> None:
    (wrapped,) = llm.generate(["Hi there"], GREEDY)
    assert llm.generate("Hi there", GREEDY) == [wrapped]
    assert llm.generate(list(wrapped.prompt_token_ids), GREEDY) == [wrapped]
    assert llm.generate(list(np.array(wrapped.prompt_token_ids)), GREEDY) == [wrapped]
    assert llm.generate([], GREEDY) == []


def test_one_conversation_alone_needs_no_list(llm: LLM) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    (alone,) = llm.chat(turns, GREEDY)
    assert llm.chat([turns, turns], GREEDY) == [alone, alone]


def test_one_stop_string_is_not_its_letters(llm: LLM) -> None:
    (free,) = llm.generate("The capital of France is", GREEDY)
    word = free.text.split()[-1]
    assert llm.generate("The capital of France is", GREEDY, stop=word)[0].stop_reason == word


WORDS = {"temperature": 0.0}
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("call", "name", "given", "right"),
    [
        (lambda one: one.generate(5), "prompts", "5 (int)", 'generate("Hi")'),
        (lambda one: one.generate({"prompt": "Hi"}), "prompts", "{'prompt': 'Hi'} (dict)", 'generate("Hi")'),
        (lambda one: one.generate([1, "Hi"]), "prompts[0]", "1 (int)", "generate([1, 2])"),
        (lambda one: one.generate([1.5, 2.5]), "prompts[0]", "1.5 (float)", "generate([1, 2])"),
        (lambda one: one.generate([True, False]), "prompts[0]", "True (bool)", "generate([1, 2])"),
        (lambda one: one.generate(["Hi", [1, "a"]]), "prompts[1]", "[1, 'a'] (list)", "generate([1, 2])"),
        (lambda one: one.generate([HI]), "prompts[0]", "[{'role'", "generate([1, 2])"),
        (lambda one: one.generate(b"Hi"), "prompts", "b'Hi' (bytes)", 'generate("Hi")'),
        (lambda one: one.generate(["Hi"], WORDS), "sampling_params", "{'temperature': 0.0} (dict)", "SamplingParams("),
        (lambda one: one.generate(["Hi"], [WORDS]), "sampling_params", "[{'temperature'", "SamplingParams("),
        (lambda one: one.generate("Hi", SamplingParams(seed="7")), "seed", "'7' (str)", "int | None"),  # type: ignore[arg-type]
        (lambda one: one.generate("Hi", stop=5), "stop", "5 (int)", 'stop="END"'),
        (lambda one: one.generate("Hi", stop=["a", 5]), "stop", "['a', 5] (list)", 'stop="END"'),
        (lambda one: one.chat("Hi"), "conversations", "'Hi' (str)", 'chat([{"role": "user", "content": "Hi"}])'),
        (lambda one: one.chat(["Hi"]), "conversations[0]", "'Hi' (str)", 'chat([{"role"'),
        (lambda one: one.chat(HI[0]), "conversations", "{'role'", 'chat([{"role"'),
        (lambda one: one.chat([*HI, HI]), "conversations[1]", "[{'role'", 'chat([{"role"'),
        (lambda one: one.chat([HI, HI[0]]), "conversations[1]", "{'role'", 'chat([{"role"'),
        (lambda one: one.chat([[{"content": "Hi"}]]), "conversations[0][0]", "{'content'", 'chat([{"role"'),
    ],
)
def test_an_argument_of_another_form_is_told_the_right_one(
    llm: LLM, call: Callable[[Any], object], name: str, given: str, right: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call(llm)
    told, _, got = str(caught.value).partition("; got ")
    assert told.startswith(f"{name} must be ")
    assert right in told
    assert got.startswith(given)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"exakt": True}, "LLM has no setting exakt; did you mean exact?"),
        ({"kv_cache_memory": 1}, "LLM has no setting kv_cache_memory; did you mean kv_cache_memory_bytes?"),
        ({"foo": 1}, "LLM has no setting foo; the settings are device, dtype, max_model_len, "),
        ({"max_model_len": "100"}, "max_model_len must be int | None; got '100' (str)"),
        ({"exact": 1}, "exact must be bool; got 1 (int)"),
        ({"block_size": None}, "block_size must be int; got None (NoneType)"),
    ],
)
def test_a_setting_that_is_none_or_of_a_wrong_type_is_named(settings: dict[str, object], told: str) -> None:
    with pytest.raises(TypeError) as caught:
        LLM("nowhere", progress_bar=False, **settings)
    assert str(caught.value).startswith(told)


def test_a_model_that_is_no_path_is_refused_as_such() -> None:
    with pytest.raises(
        TypeError, match=r"model must be the path of a checkpoint, a str or a Path; got None \(NoneType\)"
    ):
        LLM(None, progress_bar=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["tensor_parallel_size", "data_parallel_size", "expert_parallel_size"])
def test_more_than_one_worker_is_refused_at_once(size: str) -> None:
    with pytest.raises(ValueError, match=f"{size} must be 1, got 2: LLM runs one worker; use `hpu-engine serve`"):
        LLM("nowhere", progress_bar=False, **{size: 2})


def test_an_empty_stop_string_is_refused(small: LLM) -> None:
    with pytest.raises(ValueError, match="at least one character"):
        small.generate([[5]], GREEDY, stop=["a", ""])


def test_a_stop_token_id_ends_the_request_and_is_no_text(small: LLM) -> None:
    (free,) = small.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    stop_id = free.token_ids[3]
    first = free.token_ids.index(stop_id)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(stop_id,))
    (stopped,) = small.generate([[5, 6, 7]], params)
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_id)


def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside_it(small: LLM) -> None:
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(5)]
    prompts = [[5, 6, 7]] * 5
    together = [completion.token_ids for completion in small.generate(prompts, params)]
    alone = [small.generate([prompt], own)[0].token_ids for prompt, own in zip(prompts, params, strict=True)]
    assert together == alone
    assert len(set(together)) > 1


def test_a_refused_prompt_is_named_and_leaves_nothing_running(small: LLM) -> None:
    with pytest.raises(RequestFailed, match="prompt 1: the prompt is empty"):
        small.generate([[5], []], GREEDY)
    assert len(small.generate([[5]], GREEDY)) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", 1 << 70),
        ("stop_token_ids", (10**9,)),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e30),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.inf),
        ("logit_bias", {10**9: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_a_parameter_out_of_range_is_named(small: LLM, field: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as caught:
        small.generate([[5]], SamplingParams(**{field: value}))  # type: ignore[arg-type]
    assert caught.value.param == field


def test_scores_are_given_where_they_are_asked_for_and_beside_others(small: LLM) -> None:
    params = [SamplingParams(max_tokens=3, logprobs=2, seed=1), SamplingParams(max_tokens=3, prompt_logprobs=0, seed=1)]
    scored, prompt_scored = small.generate([[5, 6, 7], [5, 6, 7]], params)
    assert scored.prompt_logprobs is None
    assert scored.logprobs is not None
    assert [one.token_id for one in scored.logprobs] == list(scored.token_ids)
    assert [len(one.top) for one in scored.logprobs] == [2] * len(scored.token_ids)
    assert prompt_scored.logprobs is None
    assert [one.token_id for one in prompt_scored.prompt_logprobs or ()] == [6, 7]
    assert prompt_scored.token_ids == scored.token_ids


def test_logprobs_of_prompt_and_output_are_those_of_transformers() -> None:
    """With chunks smaller than the prompt, and the prompt already cached by an earlier request."""
    import torch
    from transformers import AutoModelForCausalLM

    model = LLM(
        tiny("llama"), num_kv_blocks=16, block_size=16, max_num_batched_tokens=32, max_num_seqs=32, progress_bar=False
    )
    prompt = [3 + (7 * i) % 300 for i in range(50)]
    model.generate([prompt], GREEDY)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (found,) = model.generate([prompt], params)
    reference = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([[*prompt, *found.token_ids]])).logits[0].log_softmax(-1)
    assert found.prompt_logprobs is not None
    assert found.logprobs is not None
    assert len(found.prompt_logprobs) == 49
    assert len(found.logprobs) == 5
    tokens = [*prompt, *found.token_ids]
    for position, one in enumerate((*found.prompt_logprobs, *found.logprobs)):
        assert one.token_id == tokens[position + 1]
        assert one.logprob == pytest.approx(float(expected[position, one.token_id]), abs=1e-3)
        assert one.top[0][1] == pytest.approx(float(expected[position].max()), abs=1e-3)
