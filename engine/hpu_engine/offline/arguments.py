"""What callers hand to `LLM`, in every form that is unmistakable. Anything else is a TypeError that shows a right call.

A text is one prompt and never a list of characters, a list of ints is one prompt and never many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_type_hints

import msgspec

from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

GENERATE = 'a text, a list of token ids, or a list of these: generate("Hi"), generate([1, 2]), generate(["Hi", "Ho"])'
CHAT = 'a conversation or a list of them: chat([{"role": "user", "content": "Hi"}])'
PARAMS = "a SamplingParams or a list with one per prompt: SamplingParams(temperature=0.0, max_tokens=16)"
STOP = 'a text or a list of texts: stop="END"'

S = TypeVar("S", bound=msgspec.Struct)


def engine_config(model: str | Path, settings: Mapping[str, Any]) -> EngineConfig:
    """Raises TypeError for a setting that is unknown, with the nearest known one, or of a wrong type, and ValueError
    for more than one worker.
    """
    known = [name for name in EngineConfig.__struct_fields__ if name != "model"]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
            raise TypeError(f"LLM has no setting {name}; {hint}")
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be the path of a checkpoint, a str or a Path; got {_shown(model)}")
    config = checked(EngineConfig, {"model": str(model), **settings})
    for name in ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size"):
        if getattr(config, name) != 1:
            raise ValueError(
                f"{name} must be 1, got {getattr(config, name)}: LLM runs one worker; use `hpu-engine serve`"
            )
    return config


def checked(kind: type[S], values: Mapping[str, Any]) -> S:
    """A struct of these fields. Raises TypeError that names the first field that is not of its type."""
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError:
        types = get_type_hints(kind)
        for name, value in values.items():
            try:
                msgspec.convert(value, types[name])
            except msgspec.ValidationError:
                wanted = types[name].__name__ if isinstance(types[name], type) else str(types[name])
                raise TypeError(f"{name} must be {wanted}; got {_shown(value)}") from None
        raise


def prompts_of(given: object) -> list[Prompt]:
    """One prompt or many, as a list; token ids as plain ints."""
    if isinstance(given, str):
        return [given]
    if not _is_list(given):
        raise TypeError(f"prompts must be {GENERATE}; got {_shown(given)}")
    if given and all(map(_is_token, given)):
        return [tuple(map(int, given))]
    prompts: list[Prompt] = []
    for index, prompt in enumerate(given):
        if isinstance(prompt, str):
            prompts.append(prompt)
        elif _is_list(prompt) and all(map(_is_token, prompt)):
            prompts.append(tuple(map(int, prompt)))
        else:
            raise TypeError(f"prompts[{index}] must be {GENERATE}; got {_shown(prompt)}")
    return prompts


def conversations_of(given: object) -> list[list[dict[str, Any]]]:
    """One conversation or many, as a list of lists of turns."""
    if not _is_list(given):
        raise TypeError(f"conversations must be {CHAT}; got {_shown(given)}")
    if given and isinstance(given[0], Mapping):
        return [_turns(given, "conversations")]
    for index, one in enumerate(given):
        if not _is_list(one):
            raise TypeError(f"conversations[{index}] must be {CHAT}; got {_shown(one)}")
    return [_turns(one, f"conversations[{index}]") for index, one in enumerate(given)]


def _turns(conversation: Sequence[Any], where: str) -> list[dict[str, Any]]:
    for index, turn in enumerate(conversation):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise TypeError(f"{where}[{index}] must be {CHAT}; got {_shown(turn)}")
    return [dict(turn) for turn in conversation]


def params_of(given: object, count: int) -> list[SamplingParams]:
    """One per prompt. Raises ValueError when there are more or fewer."""
    if given is None or isinstance(given, SamplingParams):
        given = [given or SamplingParams()] * count
    if not _is_list(given) or not all(isinstance(one, SamplingParams) for one in given):
        raise TypeError(f"sampling_params must be {PARAMS}; got {_shown(given)}")
    if len(given) != count:
        raise ValueError(f"{count} prompts, but {len(given)} sampling parameters")
    return [checked(SamplingParams, msgspec.structs.asdict(one)) for one in given]


def stops_of(given: object) -> tuple[str, ...]:
    """Stop strings. Raises ValueError for an empty one, which every text ends with."""
    stops = (given,) if isinstance(given, str) else given
    if not _is_list(stops) or not all(isinstance(stop, str) for stop in stops):
        raise TypeError(f"stop must be {STOP}; got {_shown(given)}")
    if "" in stops:
        raise ValueError("stop: a stop string has at least one character")
    return tuple(stops)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_token(value: object) -> bool:
    """numpy's integers are ids, too; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
