"""The `prompt` of a completion: its four forms, checked, turned into token ids, and echoed. The checking is pure."""

from __future__ import annotations

from hpu_engine.server.errors import bad_request

MAX_PROMPTS = 256

Prompt = str | tuple[int, ...]


def read_prompts(value: object, vocab: int) -> tuple[Prompt, ...]:
    """The prompts of a completion: a string, strings, token ids or lists of them, in their order.

    Raises `ApiError` 400 for anything empty, mixed, or outside the vocabulary of `vocab` ids.
    """
    if isinstance(value, str):
        return (_text(value, "prompt"),)
    if not isinstance(value, list):
        raise bad_request("prompt", "prompt has to be a string, a list of strings, or a list of token ids")
    if not value:
        raise bad_request("prompt", "prompt is empty")
    if _is_id(value[0]):
        return (_ids(value, "prompt", vocab),)
    if len(value) > MAX_PROMPTS:
        raise bad_request("prompt", f"at most {MAX_PROMPTS} prompts in one request, not {len(value)}")
    if isinstance(value[0], str):
        return tuple(_text(item, f"prompt[{i}]") for i, item in enumerate(value))
    return tuple(_ids(item, f"prompt[{i}]", vocab) for i, item in enumerate(value))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request("prompt", f"{where} has to be a string like the first prompt")
    if not value:
        raise bad_request("prompt", f"{where} is empty")
    return value


def _ids(value: object, where: str, vocab: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise bad_request("prompt", f"{where} has to be a list of token ids")
    if not value:
        raise bad_request("prompt", f"{where} is empty")
    for position, item in enumerate(value):
        if not _is_id(item):
            raise bad_request("prompt", f"{where}[{position}] has to be a token id")
        if not 0 <= item < vocab:
            raise bad_request("prompt", f"token id at {where}[{position}] is outside 0 to {vocab - 1}")
    return tuple(value)
