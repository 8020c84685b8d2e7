"""The JSON object in a body, read so that nobody waits for it. Pure.

A thread that reads JSON holds the interpreter until the last element is made, about a microsecond for each. So a body
of many elements is read by the standard library's scanner in Python, which is slower and lets other threads have their
turns. Long strings cost neither of them much. Meanwhile there is no search for cyclic garbage: it would go through all
that is made, several times, and JSON has no cycles.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from json.decoder import scanstring  # type: ignore[attr-defined]
from threading import Lock
from typing import Any

import pydantic_core

from hpu_engine.server.errors import bad_request

MAX_COMMAS = 1 << 18
"""Of a body, which bounds its elements: millions of tiny ones would take seconds and a gigabyte."""
READ_AT_ONCE = 1 << 12
"""Members, lists and objects: some milliseconds. Numbers in a list cost a tenth of these."""
MAX_MEMBERS = 1 << 13
"""Of one object."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(data: bytes) -> dict[str, Any]:
    """NaN and infinities pass, so that the field that holds one is named later. Raises `ApiError` 400."""
    if data.count(b",") > MAX_COMMAS:
        raise bad_request("body", f"the body has too many elements: more than {MAX_COMMAS} commas")
    is_large = data.count(b":") + data.count(b"[") + data.count(b"{") > READ_AT_ONCE
    try:
        if is_large:
            with _no_garbage.awaited():
                body = _SharingDecoder(strict_text=_SURROGATE.search(data) is not None).decode(data.decode())
        else:
            body = pydantic_core.from_json(data, allow_inf_nan=True, cache_strings="none")
    except (ValueError, RecursionError) as error:
        raise bad_request("body", f"the body cannot be read as JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("body", "the body has to be a JSON object")
    return body


class _SharingDecoder(json.JSONDecoder):
    """`strict_text`: halves of characters are refused, which the standard library lets pass."""

    def __init__(self, *, strict_text: bool) -> None:
        super().__init__(object_pairs_hook=_small_object)
        if strict_text:
            self.parse_string = _whole_characters
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _whole_characters(text: str, start: int, strict: bool = True) -> tuple[str, int]:
    value, end = scanstring(text, start, strict)
    value.encode()
    return value, end


def _small_object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"an object with {len(members)} members, at most {MAX_MEMBERS} are read")
    return dict(members)


class _NoGarbage:
    """Stops the collector of cyclic garbage while any thread makes what cannot be any."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads = 0

    @contextmanager
    def awaited(self) -> Iterator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            self._threads += by
            (gc.disable if self._threads else gc.enable)()


_no_garbage = _NoGarbage()
