"""The process that compiles and renders chat templates: `python -m hpu_engine.text.template_process`.

A template comes with the weights, from somewhere, and is a program. Its process may take `MEMORY_BYTES` of addresses
and `CPU_SECONDS` for one conversation, and may write no file; its parent (`chat_template`) bounds the time on the clock
and ends it. One JSON object a line comes in on stdin and goes out on stdout: first `source` and `special_tokens`, then
one conversation after the other. It ends when stdin does, so it does not outlive its parent.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from hpu_engine.text.template_environment import OwnWords, TooLong, compile_template, write
from hpu_engine.text.turns import Turn, as_sent, as_templates_expect

MEMORY_BYTES = 256 * 1024 * 1024
CPU_SECONDS = 6
"""For one conversation. The parent has ended the process before, unless the parent itself has ended."""
MOST_CHARS = 32 * 1024 * 1024
"""Of a rendered prompt: twice what a request's body has."""
SHOWN_CHARS = 300
"""Of an error's text."""

Reply = dict[str, str]
"""One of `text`, `own_words` (the template refuses), `limit` (it goes past one), `problem` (it fails), `ready`."""


def main() -> None:
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    sys.stdout.buffer.write(b"\n")  # it is up: from here on the parent counts the time
    sys.stdout.buffer.flush()
    renderer: Renderer | None = None
    for line in sys.stdin.buffer:
        _grant_time()
        try:
            order = json.loads(line)
            if renderer is None:
                renderer, reply = Renderer.open(order)
            else:
                reply = renderer.render(order)
            data = json.dumps(reply, ensure_ascii=False).encode()
        except MemoryError:
            data = json.dumps(_no_memory()).encode()
        except (ValueError, RecursionError) as error:  # numbers of countless digits, lone surrogates
            data = json.dumps({"problem": _in_words(error)}).encode()
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()


class Renderer:
    """A compiled template with the special tokens that templates expect by name."""

    def __init__(self, template: Template, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source

    @classmethod
    def open(cls, order: Mapping[str, Any]) -> tuple[Renderer | None, Reply]:
        try:
            template = compile_template(order["source"])
        except TemplateSyntaxError as error:
            return None, {"problem": f"line {error.lineno}: {_in_words(error)}"}
        except MemoryError:
            return None, _no_memory()
        except Exception as error:  # Python's own compiler sees what jinja made of it
            return None, {"problem": _in_words(error)}
        return cls(template, order["source"], order["special_tokens"]), {"ready": ""}

    def render(self, order: Mapping[str, Any]) -> Reply:
        """The prompt, with the turns in the form that transformers gives them, or as they were sent if that fails."""
        first = self._attempt(order, as_templates_expect)
        if "problem" not in first:
            return first
        second = self._attempt(order, as_sent)
        return first if "problem" in second else second

    def _attempt(self, order: Mapping[str, Any], form: Callable[..., list[Turn]]) -> Reply:
        turns = form(order["messages"], knows_developer=self._knows_developer)
        variables = {
            **self._special_tokens,
            **order["variables"],
            "messages": turns,
            "add_generation_prompt": order["add_generation_prompt"],
            "tools": None,
            "documents": order["documents"],
        }
        try:
            return {"text": write(self._template, variables, MOST_CHARS)}
        except OwnWords as error:
            return {"own_words": str(error)[:SHOWN_CHARS]}
        except TooLong:
            return {"limit": f"it writes more than {MOST_CHARS} characters"}
        except MemoryError:
            return _no_memory()
        except Exception as error:  # a template may fail in any way that an expression can
            return {"problem": _in_words(error)}


def _no_memory() -> Reply:
    return {"limit": f"it needs more than {MEMORY_BYTES // 2**20} MiB of memory"}


def _in_words(error: Exception) -> str:
    text = str(error)[:SHOWN_CHARS].encode(errors="replace").decode()
    return text or type(error).__name__


def _limit(kind: int, most: int) -> None:
    """No more than `most`, and no more than the limit there is."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _grant_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    until = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (until if hard == resource.RLIM_INFINITY else min(until, hard), hard))


if __name__ == "__main__":
    main()
