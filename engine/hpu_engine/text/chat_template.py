"""A conversation to the prompt text its model was trained on: the checkpoint's own template, in jinja2's sandbox.

The template comes with the weights, from somewhere: the sandbox gives it immutable values, bounded ranges and no
attributes that begin with an underscore, so that it can write a prompt and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefused(Exception):
    """The template cannot be used at all, or does not accept this conversation."""


class ChatTemplate:
    """A compiled template. `special_tokens` (`bos_token`, `eos_token`, ...) are what templates expect by name."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateRefused(f"the chat template does not compile: line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises `TemplateRefused` with the template's own words when it does not take the messages."""
        context = {**self._special_tokens, **(variables or {})}
        context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt, "tools": None}
        try:
            return self._template.render(context)
        except TemplateRefused:
            raise
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise TemplateRefused(f"the model's chat template does not accept these messages: {error}") from None


def _refuse(message: object) -> NoReturn:
    raise TemplateRefused(str(message))


def _strftime_now(form: str) -> str:
    """Local time, as the templates that ask for it (Llama 3.1 and later) were trained with a date in words."""
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Without jinja's HTML escapes: this is a prompt, not a page."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
