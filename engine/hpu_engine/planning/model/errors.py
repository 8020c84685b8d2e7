"""The error that every refusal of a model's configuration is raised as."""

from __future__ import annotations

from enum import StrEnum


class ModelConfigErrorKind(StrEnum):
    NOT_FOUND = "not-found"
    BROKEN = "broken"
    UNSUPPORTED = "unsupported"


class ModelConfigError(Exception):
    """A model's configuration cannot be used. Names the file, the key if one is at fault, and what is right."""

    def __init__(self, kind: ModelConfigErrorKind, message: str, *, path: str, key: str | None = None) -> None:
        self.kind = kind
        self.path = path
        self.key = key
        self.reason = message
        where = f"{path}: {key}" if key else path
        super().__init__(f"{where}: {message}")
