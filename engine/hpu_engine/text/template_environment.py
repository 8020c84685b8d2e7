"""The environment that chat templates are written for: jinja2's sandbox with what transformers adds to it.

The measure is transformers 5 (`utils/chat_template_utils.py`): loop controls, the `generation` tag, `tojson` with
json's options, `raise_exception`, `strftime_now`, and a `dict` and a `namespace` without a way to Python's internals.
The sandbox gives a template immutable values, bounded ranges and no attributes that begin with an underscore. It bounds
neither time nor memory: only the template process renders (`template_process`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class OwnWords(TemplateError):
    """What a template says itself of a conversation that it does not take."""


class TooLong(Exception):
    """A template wrote more than a prompt may have."""


def compile_template(source: str) -> Template:
    """Raises TemplateSyntaxError, and whatever Python's compiler raises for code that it does not take."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def write(template: Template, variables: Mapping[str, Any], most_chars: int) -> str:
    """What the template writes. Raises `TooLong` as soon as it is more than `most_chars`."""
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > most_chars:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant has said, for training. Here it is as if the tag was not there."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


class _Dict:
    """A callable in place of the class, whose methods lead further than a template may go."""

    def __call__(self, *args: Any, **kw: Any) -> dict[Any, Any]:
        return dict(*args, **kw)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's, but a template cannot store what it could not read."""

    def __init__(*args: Any, **kw: Any) -> None:
        self, *rest = args  # `namespace(self=...)` is a variable of that name
        values = dict(*rest, **kw)
        for name in values:
            _check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no variable {name[:100]!r}: names that begin with _ are reserved")


def _refuse(message: object = "") -> NoReturn:
    raise OwnWords(str(message))


def _strftime_now(form: str) -> str:
    """Local time, as the templates that ask for it (Llama 3.1 and later) were trained with a date in words."""
    return datetime.now().strftime(form)  # noqa: DTZ005 - as in transformers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja's HTML escapes: this is a prompt, not a page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
