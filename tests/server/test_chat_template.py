"""The prompt is the one transformers renders; a hostile template or conversation gets an error, in time."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpu_engine.text import chat_template
from hpu_engine.text.chat_template import ChatTemplate, TemplateRefused
from hpu_engine.text.detokenizer import Detokenizer
from hpu_engine.text.template_environment import compile_template
from hpu_engine.text.template_process import MEMORY_BYTES
from hpu_engine.text.tokenizer import load_tokenizer
from tests.server.families import HISTORIES, TEMPLATES
from tests.server.running import wait_until

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


@pytest.fixture(scope="module")
def families() -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(source, SPECIAL) for name, source in TEMPLATES.items()}


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def of_transformers(source: str, history: list[dict[str, Any]], **variables: Any) -> str | None:
    """Its prompt, with the arguments of calls as the objects it wants, or else as they are; None where it refuses."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

    parsed = json.loads(json.dumps(history))
    for turn in parsed:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    for form in (_normalize_chat_messages(parsed), [{"content": None, **turn} for turn in history]):
        try:
            ((prompt,), _) = render_jinja_template([form], chat_template=source, **SPECIAL, **variables)
            return str(prompt)
        except (TemplateError, TypeError):
            continue
    return None


@pytest.mark.parametrize("prompted", [True, False], ids=["prompted", "not"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_familys_prompt_is_the_one_of_transformers(
    families: dict[str, ChatTemplate], family: str, history: str, prompted: bool
) -> None:
    variables = {"enable_thinking": False}
    documents = [{"title": "t", "text": "word " * 20}]
    expected = of_transformers(
        TEMPLATES[family], HISTORIES[history], add_generation_prompt=prompted, documents=documents, **variables
    )
    try:
        prompt: str | None = families[family].render(
            HISTORIES[history], add_generation_prompt=prompted, variables=variables, documents=documents
        )
    except TemplateRefused:
        prompt = None
    assert prompt == expected
    if history == "plain" or (history.startswith("a call") and family not in ("mixtral",)):
        assert prompt, "every family takes these"


def test_the_environment_has_all_that_transformers_has() -> None:
    """Names alone: what they do is compared by what they write."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    ours, theirs = compile_template("x").environment, _compile_jinja_template("x").environment
    for names in ("filters", "globals", "tests"):
        assert set(getattr(theirs, names)) <= set(getattr(ours, names))
    tags = [{tag for one in environment.extensions.values() for tag in one.tags} for environment in (ours, theirs)]
    assert tags[0] == tags[1]
    assert (ours.trim_blocks, ours.lstrip_blocks) == (theirs.trim_blocks, theirs.lstrip_blocks)


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = namespace(_a=1) %}",
        "{% set x = namespace() %}{% set x.__class__ = 1 %}{{ x }}",
        "{{ dict.__class__ }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_what_transformers_keeps_from_templates_is_kept_from_them(source: str) -> None:
    assert of_transformers(source, []) in (None, "")
    with suppress(TemplateRefused):
        assert ChatTemplate(source, {}).render([]) == ""


def test_arguments_of_a_call_are_objects_or_a_text_as_the_template_needs_them(
    families: dict[str, ChatTemplate],
) -> None:
    history = HISTORIES["a call with null content"]
    assert '"arguments": {"city": "Příbram <é>"' in families["hermes"].render(history)
    assert '```json\n{"city": "Příbram <é>"' in families["deepseek"].render(history)
    broken = json.loads(json.dumps(history))
    broken[1]["tool_calls"][0]["function"]["arguments"] = '{"city": '
    assert '"arguments": "{\\"city\\": "' in families["hermes"].render(broken)
    broken[1]["tool_calls"][0]["function"]["arguments"] = ""
    assert '"arguments": {}' in families["hermes"].render(broken)


def test_a_developer_is_a_system_where_the_template_knows_no_developer() -> None:
    turns = [{"role": "developer", "content": "a"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(turns) == "system"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}", {}).render(turns) == "developer"


@pytest.mark.parametrize(
    "options",
    ["", "indent=2", "ensure_ascii=True", "separators=(',', ':')", "sort_keys=True", "indent=1, sort_keys=True"],
)
def test_json_in_a_template_is_that_of_transformers(options: str) -> None:
    turns = [{"role": "user", "content": "<é'>", "b": 1, "a": [1.5, None, True, 10**30]}]
    source = f"{{{{ messages | tojson({options}) }}}}"
    assert ChatTemplate(source, {}).render(turns) == of_transformers(source, turns)
    assert json.loads(ChatTemplate(source, {}).render(turns)) == turns


def test_the_tag_for_training_marks_and_changes_nothing() -> None:
    body = "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.content }}{% endgeneration %}{% endfor %}"
    turns = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ChatTemplate(body, {}).render(turns) == of_transformers(body, turns) == "1a2b"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{% generation %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if x"]
)
def test_a_template_that_does_not_compile_says_so_each_time(source: str) -> None:
    template = ChatTemplate(source, {})
    problem = template.check()
    assert problem is not None
    assert "does not compile" in problem
    with pytest.raises(TemplateRefused, match="use /v1/completions"):
        template.render([])


BOMBS = {
    "string": ("{{ 'x' * 10**10 }}", "256 MiB"),
    "format": ("{{ '%10000000000d' % 1 }}", "256 MiB"),
    "list": ("{{ (([0] * 10**8) | list) | length }}", "256 MiB"),
    "output": ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "33554432 characters"),
    "loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 s and was stopped"),
    "power": ("{{ (messages | length + 2) ** (3 ** 17) }}", "1 s and was stopped"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_within_two_seconds(bomb: str) -> None:
    source, problem = BOMBS[bomb]
    template = ChatTemplate("{% if messages %}" + source + "{% else %}ok{% endif %}", {})
    template.check()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(TemplateRefused, match=problem):
        template.render([{"role": "user", "content": "a"}])
    assert time.monotonic() - began < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
    assert template.render([]) == "ok", "the next conversation has a process that works"


def test_a_template_that_compiles_for_ever_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "COMPILE_SECONDS", 0.5)
    template = ChatTemplate("{{ 3 ** (3 ** 17) }}", {})
    problem = template.check()
    assert problem is not None
    assert "took longer than 0.5 s" in problem
    began = time.monotonic()
    with pytest.raises(TemplateRefused):
        template.render([])
    assert time.monotonic() - began < 0.2


PARENT = """
import time
from hpu_engine.text.chat_template import ChatTemplate
template = ChatTemplate("{{ messages[0].content }}", {})
template.check()
print(template._process.popen.pid, flush=True)
time.sleep(600)
"""


def test_the_process_is_bounded_and_does_not_outlive_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = Path(f"/proc/{int(parent.stdout.readline())}")
        rows = (process / "limits").read_text().splitlines()
        limits = {line[:26].strip(): line[26:].split()[0] for line in rows}
        assert (limits["Max address space"], limits["Max file size"]) == (str(MEMORY_BYTES), "0")
        assert "torch" not in (process / "maps").read_text()
        parent.kill()
        wait_until(lambda: not process.exists(), "the process ends with its parent")


def test_a_process_that_was_ended_from_outside_is_replaced() -> None:
    template = ChatTemplate("ok", {})
    assert template.render([]) == "ok"
    assert template._process is not None
    os.kill(template._process.popen.pid, signal.SIGKILL)
    template._process.popen.wait()
    assert template.render([]) == "ok"


def test_long_texts_are_tokenized_like_short_ones(shell: Path) -> None:
    tokenizer = load_tokenizer(shell)
    text = "A request is a list of tokens. " * 200
    ids = tokenizer.encode_now(text, add_special_tokens=True)
    detokenizer = Detokenizer(tokenizer.text_of_tokens(skip_special_tokens=True))
    assert "".join(detokenizer.push(token_id).text for token_id in ids) == text
    assert len(text) <= len(ids) * tokenizer.chars_per_token
