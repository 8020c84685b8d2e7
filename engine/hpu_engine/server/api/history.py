"""The turns of a chat request: every shape that OpenAI's schema allows in a history, and turned into text. Pure.

Roles are the chat template's business; fields that it may look at (`name`, `tool_call_id`, `reasoning_content`, ...)
are passed on. The two roles and fields that OpenAI has replaced (`function`, `function_call`) become their successors.
What is no text (an image, a sound, a file) is refused by its name.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from hpu_engine.server.errors import bad_request

MAX_FIELDS = 64
"""Of a message."""
ASSISTANT, TOOL, FUNCTION = "assistant", "tool", "function"
_TEXT_FIELDS = {"text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the field that has it. Only an assistant refuses."""


class ChatMessage(BaseModel):
    """A turn. `for_template` checks all but the role's and the content's kind: only it knows where the turn stands."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: Any = None
    """A text, a list of parts, or nothing."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"at most {MAX_FIELDS} fields are allowed, not {len(value)}")
        return value

    @field_validator("content")
    @classmethod
    def _text_or_parts(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str | list):
            raise ValueError("has to be a string or a list of text parts")
        return value

    def for_template(self, path: str) -> dict[str, Any]:
        """`path` is where the message stands in the request. Raises `ApiError` 400 for what is no text."""
        turn: dict[str, Any] = {**(self.model_extra or {}), "role": self.role}
        if self.role == ASSISTANT:
            _take_calls(turn, path)
        elif self.role == FUNCTION:
            turn["role"] = TOOL
        content = self._text(path)
        if content is None and isinstance(turn.get("refusal"), str):
            content = turn["refusal"]
        if content is None and not turn.get("tool_calls"):
            problem = "has to be a string or a list of text parts"
            if self.role == ASSISTANT:
                problem = "is missing, and so are tool_calls"
            elif "content" not in self.model_fields_set:
                problem = "is missing"
            raise bad_request(f"{path}.content", f"{path}.content: {problem}")
        return {**turn, "content": content}

    def _text(self, path: str) -> str | None:
        if not isinstance(self.content, list):
            text: str | None = self.content
            return text
        is_assistant = self.role == ASSISTANT
        return "".join(
            _text_of(part, f"{path}.content[{place}]", is_assistant) for place, part in enumerate(self.content)
        )


def _text_of(part: object, path: str, is_assistant: bool) -> str:
    """Of one part of a message's content: an image is refused by its type.

    Written out because there may be very many: the validator would not let other threads run meanwhile.
    """
    if not isinstance(part, dict):
        raise bad_request(path, f"{path}: has to be an object")
    kind = part.get("type")
    name = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if name is None or (name == "refusal" and not is_assistant):
        if "type" not in part:
            raise bad_request(f"{path}.type", f"{path}.type: is missing")
        shown = f", not {kind[:40]!r}" if isinstance(kind, str) else ""
        raise bad_request(f"{path}.type", f"{path}.type: has to be 'text'{shown}")
    text = part.get(name)
    if isinstance(text, str):
        return text
    problem = "has to be a string" if name in part else "is missing"
    raise bad_request(f"{path}.{name}", f"{path}.{name}: {problem}")


def _take_calls(turn: dict[str, Any], path: str) -> None:
    """Check an assistant's calls of tools; its one call of a function, the former form, becomes one of a tool."""
    if turn.get("audio") is not None:
        raise bad_request(
            f"{path}.audio", f"{path}.audio: this model has no sound; send the text of the turn as content"
        )
    former = turn.pop("function_call", None)
    calls = turn.pop("tool_calls", None)
    if calls is None and former is not None:
        calls = [{"type": "function", "function": _function(former, f"{path}.function_call")}]
    elif calls is not None:
        if not isinstance(calls, list):
            raise bad_request(f"{path}.tool_calls", f"{path}.tool_calls: has to be a list")
        for place, call in enumerate(calls):
            _check_call(call, f"{path}.tool_calls[{place}]")
    if calls:  # an empty list calls nothing, and templates only ask whether there is one
        turn["tool_calls"] = calls


def _check_call(call: object, path: str) -> None:
    if not isinstance(call, dict):
        raise bad_request(path, f"{path}: has to be an object")
    if call.get("type", FUNCTION) != FUNCTION:
        raise bad_request(f"{path}.type", f"{path}.type: has to be 'function'")
    _function(call.get("function"), f"{path}.function")


def _function(function: object, path: str) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise bad_request(path, f"{path}: " + ("is missing" if function is None else "has to be an object"))
    if not isinstance(function.get("name"), str):
        problem = "has to be a string" if "name" in function else "is missing"
        raise bad_request(f"{path}.name", f"{path}.name: {problem}")
    if not isinstance(function.get("arguments", ""), str | dict):
        raise bad_request(f"{path}.arguments", f"{path}.arguments: has to be a JSON object as a string")
    return function
