"""The prompt is the one transformers renders; a hostile template or conversation stays in the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpu_engine.text.chat_template import ChatTemplate, TemplateRefused
from hpu_engine.text.detokenizer import Detokenizer
from hpu_engine.text.tokenizer import load_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  Count: 1234\t你好 🙂\n"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "go on"},
]


@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:]], ids=["with a system turn", "without"])
@pytest.mark.parametrize("prompted", [True, False])
def test_prompt_and_tokens_equal_transformers(smollm2: Path, messages: list[dict[str, Any]], prompted: bool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2)
    ours = load_tokenizer(smollm2)
    assert ours.chat_template is not None
    text = ours.chat_template.render(messages, add_generation_prompt=prompted)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False)
    assert list(ours.encode_now(text, add_special_tokens=False)) == list(expected)


def test_special_tokens_and_variables_are_there_by_name() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ mood }}", {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "a"}], variables={"mood": "!"}) == "<s>a!"


def test_a_template_may_refuse_a_conversation_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        template.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].role.format.__globals__.keys() }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_a_hostile_template_gets_no_further_than_an_error(source: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


def test_json_in_a_template_is_not_escaped_for_html() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}", {})
    assert json.loads(template.render([{"content": "<é'>"}])) == {"content": "<é'>"}
    assert "<é'>" in template.render([{"content": "<é'>"}])


def test_long_texts_are_tokenized_like_short_ones(shell: Path) -> None:
    tokenizer = load_tokenizer(shell)
    text = "A request is a list of tokens. " * 200
    ids = tokenizer.encode_now(text, add_special_tokens=True)
    detokenizer = Detokenizer(tokenizer.text_of_tokens(skip_special_tokens=True))
    assert "".join(detokenizer.push(token_id).text for token_id in ids) == text
    assert len(text) <= len(ids) * tokenizer.chars_per_token
