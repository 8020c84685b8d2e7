"""Chat templates in the manner of ten well-known families, each with what is peculiar to its family.

They are written for these tests and short. What they take from the families is markers and ways of writing: namespaces,
macros, slices and filters, roles that have to alternate, tool calls as JSON or as joined text, dates, training tags.
"""

from __future__ import annotations

from typing import Any

LLAMA = r"""
{{- bos_token }}
{%- if date is not defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}
{%- macro turn(role, text) %}<|start_header_id|>{{ role }}<|end_header_id|>

{{ text }}<|eot_id|>{% endmacro %}
{%- if messages[0].role == 'system' %}{% set first, messages = messages[0].content | trim, messages[1:] %}
{%- else %}{% set first = '' %}{% endif %}
{{- turn('system', 'Today: ' ~ date ~ '\n\n' ~ first) }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- turn('assistant', '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}') }}
    {%- elif message.role in ('tool', 'ipython') %}{{ turn('ipython', message.content | tojson) }}
    {%- else %}{{ turn(message['role'], message['content'] | trim) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}
"""

QWEN = r"""
{%- set seen = namespace(asking=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if seen.asking and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set seen.asking = false %}{% set seen.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content is string and loop.index0 > seen.last %}
        {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- content.split('</think>')[-1].lstrip('\n') }}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function or call %}
        {{- '\n<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' }}
        {{- function.arguments if function.arguments is string else function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

MISTRAL = r"""
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\n') %}
{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- set count = namespace(value=0) %}
{%- for turn in turns if turn.role != 'tool' and (turn.tool_calls is not defined or turn.tool_calls is none) %}
    {%- if (turn['role'] == 'user') != (count.value % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set count.value = count.value + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn.role == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if loop.last and system else '') + turn.content + '[/INST]' }}
    {%- elif turn.tool_calls is defined and turn.tool_calls is not none %}[TOOL_CALLS] [
        {%- for call in turn.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('a call id has 9 characters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}{{ eos_token }}
    {%- elif turn.role == 'tool' %}[TOOL_RESULTS] {"content": {{ turn.content | string }}, "call_id": "
        {{- turn.tool_call_id }}"}[/TOOL_RESULTS]
    {%- else %}{{ ' ' + turn.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

MIXTRAL = r"""
{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{% elif m['role'] == 'assistant' %}{% generation %}{{ ' ' + m['content'] + ' ' }}{{ eos_token }}{% endgeneration %}
{% elif m['role'] == 'system' %}{{ m['content'] + '\n' }}
{% else %}{{ raise_exception('Only user, assistant and system roles are supported!') }}{% endif %}
{% endfor %}
"""

GEMMA = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set prefix = messages[0]['content'] + '\n\n' %}
{%- else %}{% set prefix = '' %}{% endif %}
{%- for message in (messages[1:] if prefix else messages) %}
    {{- '<start_of_turn>' ~ ({'assistant': 'model'}.get(message.role, message.role)) ~ '\n' }}
    {{- prefix if loop.first }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- if loop.index0 > 3 %}{% break %}{% endif %}
        {{- '\n```tool_code\n' ~ call.function.name ~ '(' }}
        {%- for name, value in call.function.arguments | dictsort %}
            {{- name ~ '=' ~ value | tojson(sort_keys=True) ~ (', ' if not loop.last else '') }}
        {%- endfor %}{{ ')\n```' }}
    {%- endfor %}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}
"""

PHI = r"""
{%- for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') }}
{%- if m.tool_calls %}<|tool_call|>{{ m.tool_calls | tojson(ensure_ascii=True, separators=(',', ':')) }}<|/tool_call|>
{%- endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}
"""

DEEPSEEK = r"""
{%- set state = namespace(system='') %}
{%- for m in messages if m['role'] == 'system' %}{% set state.system = state.system + m['content'] %}{% endfor %}
{{- bos_token + state.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}
    {%- if m['role'] == 'assistant' and m['content'] is none %}<｜Assistant｜><｜tool▁calls▁begin｜>
        {%- for call in m['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] }}
            {{- '\n```json\n' + call['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}<｜tool▁calls▁end｜>
    {%- elif m['role'] == 'assistant' %}
        {%- set answer = m['content'] %}
        {{- '<｜Assistant｜>' + answer.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}
"""

HERMES = r"""
{%- macro python_type(spec) %}
    {%- if spec.type == 'array' %}{{ 'list[' + python_type(spec['items']) + ']' }}
    {%- else %}{{ {'string': 'str', 'integer': 'int'}.get(spec.type, 'Any') }}{% endif %}
{%- endmacro %}
{{- '<|im_start|>system\n' + python_type({'type': 'array', 'items': {'type': 'integer'}}) + '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>tool\n' }}{% endif %}
        {{- '<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>' }}{% endif %}
    {%- elif message.role == 'assistant' and message.tool_calls is defined %}
        {{- '<|im_start|>' + message.role }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' ~ call.arguments | tojson ~ '}' }}
        {%- endfor %}{{ '<|im_end|>\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

ERNIE = r"""
{%- if cls_token is not defined %}{% set cls_token = '<|begin_of_sentence|>' %}{% endif %}
{%- if sep_token is not defined %}{% set sep_token = '<|end_of_sentence|>' %}{% endif %}
{{- cls_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ 'User: ' + message.content + '\n' }}
    {%- elif message.role == 'assistant' %}{{ 'Assistant: ' + (message.content or '') + sep_token }}
    {%- elif message.role == 'system' %}{{ message.content + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}
"""

GRANITE = r"""
{%- set controls = dict(length='', place=none) %}
{%- for document in documents or [] %}
    {{- 'Document ' ~ loop.index ~ ' ' ~ document['title'] | upper ~ '\n' ~ document.text | wordwrap(40) ~ '\n' }}
{%- endfor %}
{%- for message in messages %}
    {%- set role = 'tool_response' if message.role == 'tool' else message.role %}
    {{- '<|start_of_role|>' + role + '<|end_of_role|>' + message['content'] | default('', true) }}
    {%- if message.tool_calls %}
        {{- '<|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson(indent=2) }}
    {%- endif %}<|end_of_text|>
{% endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant {{ controls | tojson }}<|end_of_role|>{% endif %}
"""

TEMPLATES = {
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "gemma": GEMMA,
    "phi": PHI,
    "deepseek": DEEPSEEK,
    "hermes": HERMES,
    "ernie": ERNIE,
    "granite": GRANITE,
}

_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {
        "name": "weather",
        "arguments": '{"city": "Příbram <é>", "days": [1, 2], "deep": {"b": 1, "a": null}}',
    },
}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"role": "system", "content": "Be <brief> & 'kind'."},
        {"role": "user", "content": "  Count: 1234\t你好 🙂\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok"},
        {"role": "user", "content": "go on"},
    ],
    "a call with null content": [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"degrees": 3}'},
    ],
    "a call without content": [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "tool_calls": [_CALL], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "3 degrees"},
        {"role": "assistant", "content": "Three degrees."},
        {"role": "user", "content": "Thanks", "name": "Ann"},
    ],
    "two calls": [
        {"role": "user", "content": "And there?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [_CALL, _CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"},
    ],
    "reasoning": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because.", "reasoning": "\nLet me think\n"},
    ],
    "a role out of turn": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "again"}],
}
