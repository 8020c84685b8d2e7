"""The turns of a conversation in the forms that chat templates expect. Pure.

Clients send OpenAI's form: absent values as null, the arguments of a tool call as a JSON text. Templates are written
for what transformers hands them: no nulls, arguments as objects, reasoning under `reasoning_content` (and `thinking`).
Some templates were written for the other form (DeepSeek's join the arguments to a text, and ask whether the content is
none), so that is the second thing to try.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a turn's reasoning, in transformers' order."""


def as_templates_expect(turns: Sequence[Mapping[str, Any]], *, knows_developer: bool) -> list[Turn]:
    return [_expected(turn, knows_developer) for turn in turns]


def as_sent(turns: Sequence[Mapping[str, Any]], *, knows_developer: bool) -> list[Turn]:
    """With `content` in every turn, null where there is none."""
    return [{"content": None, **_named(turn, knows_developer)} for turn in turns]


def _expected(turn: Mapping[str, Any], knows_developer: bool) -> Turn:
    expected = {name: value for name, value in _named(turn, knows_developer).items() if value is not None}
    reasoning = next((expected[name] for name in _REASONING if name in expected), None)
    if reasoning is not None:
        expected = {"thinking": reasoning, **expected, "reasoning_content": reasoning}
    if isinstance(calls := expected.get("tool_calls"), list):
        expected["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return expected


def _named(turn: Mapping[str, Any], knows_developer: bool) -> Turn:
    """`developer` is OpenAI's newer name of `system`; a template that does not know it would leave the turn out."""
    renamed = turn.get("role") == "developer" and not knows_developer
    return {**turn, "role": "system"} if renamed else dict(turn)


def _with_parsed_arguments(call: Any) -> Any:
    """A model may have written arguments that are no JSON object: those stay a text."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call
