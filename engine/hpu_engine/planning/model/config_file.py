"""Reading a model's JSON files: bounded, and every refusal a ModelConfigError that names the file and the key.

Invariant: nothing read here is trusted. Size, depth, number range and type are checked before a value is handed on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpu_engine.planning.model.errors import ModelConfigError, ModelConfigErrorKind

CONFIG_LIMIT_BYTES = 4 * 1024 * 1024
"""Published config files are 0.5 to 20 KB; those with long quantisation tables stay below 1 MiB."""


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, at most `CONFIG_LIMIT_BYTES` long. Raises ModelConfigError."""
    try:
        with file.open("rb") as stream:
            data = stream.read(CONFIG_LIMIT_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelConfigError(
            ModelConfigErrorKind.NOT_FOUND,
            "no such file; expected the config.json of a Hugging Face checkpoint or the directory that holds it",
            path=str(file),
        ) from None
    except OSError as error:
        raise ModelConfigError(
            ModelConfigErrorKind.NOT_FOUND, f"cannot be read: {error.strerror}", path=str(file)
        ) from error
    if len(data) > CONFIG_LIMIT_BYTES:
        raise ModelConfigError(
            ModelConfigErrorKind.BROKEN,
            f"larger than {CONFIG_LIMIT_BYTES} bytes; a config.json has a few kilobytes",
            path=str(file),
        )
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(ModelConfigErrorKind.BROKEN, f"not JSON: {error}", path=str(file)) from error
    if not isinstance(parsed, dict):
        raise ModelConfigError(
            ModelConfigErrorKind.BROKEN, f"a JSON object is needed, found {type(parsed).__name__}", path=str(file)
        )
    return parsed


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """The object in `generation_config.json`, or None where the checkpoint has none."""
    file = directory / "generation_config.json"
    return read_json_object(file) if file.is_file() else None


class ConfigReader:
    """Typed, range-checked access to one JSON object. Absent and null mean the same unless asked with `in`."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def error(
        self, key: str | None, message: str, kind: ModelConfigErrorKind = ModelConfigErrorKind.BROKEN
    ) -> ModelConfigError:
        name = f"{self._prefix}{key}" if key else (self._prefix.rstrip(".") or None)
        return ModelConfigError(kind, message, path=self._source, key=name)

    def __contains__(self, key: str) -> bool:
        """Whether the file mentions `key` at all, be it as null."""
        return key in self._values

    def first_of(self, *keys: str) -> str:
        """The first of several names of one value that the file uses; the first name where it uses none."""
        return next((key for key in keys if self.has(key)), keys[0])

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def integer(self, key: str, *, most: int, least: int = 1, default: int | None = None) -> int:
        """The whole number at `key`, within `least..most`; `default` where absent, an error where there is none."""
        value = self._present(key, default, "a whole number")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"a whole number is needed, found {_shown(value)}")
        if not least <= value <= most:
            raise self.error(key, f"must lie between {least} and {most}, found {_shown(value)}")
        return value

    def number(self, key: str, *, most: float = 1e18, above: float = 0.0, default: float | None = None) -> float:
        """The finite number at `key`, in `(above, most]`."""
        value = self._present(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"a number is needed, found {_shown(value)}")
        if not above < value <= most or not math.isfinite(value):
            raise self.error(key, f"must lie above {above:g} and at most {most:g}, found {_shown(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"true or false is needed, found {_shown(value)}")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._present(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, f"a string is needed, found {_shown(value)}")
        return value

    def integers(self, key: str, *, least: int, most: int) -> tuple[int, ...]:
        """A whole number or a list of them, as a tuple; empty where absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not least <= item <= most:
                raise self.error(key, f"whole numbers between {least} and {most} are needed, found {_shown(item)}")
        return tuple(items)

    def section(self, key: str) -> ConfigReader | None:
        """The object at `key`, None where absent or empty."""
        value = self._values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"an object is needed, found {_shown(value)}")
        return ConfigReader(value, self._source, f"{self._prefix}{key}.")

    def _present(self, key: str, default: object, expected: str) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, f"missing; {expected} is needed")
        return default


def _shown(value: object) -> str:
    """A value for a message, never longer than a line: input may be a megabyte of digits."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number beyond 10^18"
    shown = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return shown if len(shown) <= 60 else shown[:57] + "..."
