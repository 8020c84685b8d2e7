"""What is wrong with a field of a request, in the words of the API: clients send JSON, and no Python types. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NUMBER = "has to be a number"
_WHOLE = "has to be a whole number"
_SWITCH = "has to be true or false"
_LIST = "has to be a list"
_OBJECT = "has to be an object"
_TEXT = "has to be a string"

_WORDS = {
    "missing": "is missing",
    "too_short": "at least {min_length} {items} needed",
    "too_long": "at most {max_length} {items} allowed, not {actual_length}",
    "string_too_long": "has to have at most {max_length} characters",
    "string_type": _TEXT,
    "string_unicode": "has to be valid Unicode",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": "is too large",
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "has to be a finite number",
    "bool_type": _SWITCH,
    "bool_parsing": _SWITCH,
    "tuple_type": _LIST,
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "greater_than": "has to be greater than {gt}",
    "greater_than_equal": "has to be at least {ge}",
    "less_than": "has to be less than {lt}",
    "less_than_equal": "has to be at most {le}",
}
"""By the validator's kind of error."""
_ITEMS = {"messages": "message"}


def words_for(param: str, kind: str, message: str, facts: Mapping[str, Any]) -> str:
    """A clause to stand behind `param`. `message` is the validator's own, for the errors that are written here."""
    words = _WORDS.get(kind)
    if words is None:
        return message.removeprefix("Value error, ")
    if kind in ("too_short", "too_long"):
        item = _ITEMS.get(param, "item")
        is_one = facts["min_length" if kind == "too_short" else "max_length"] == 1
        if kind == "too_short" and is_one:
            return f"at least one {item} is needed"
        return words.format(**facts, items=f"{item} is" if is_one else f"{item}s are")
    return words.format(**facts)
