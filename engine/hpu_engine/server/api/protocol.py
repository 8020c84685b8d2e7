"""What clients send: the bodies of the two generating routes, checked. Pure.

A field nobody knows is ignored, as OpenAI's own servers do: clients send what their other server understands. A field
that is known and would change the answer, but is not done here, is refused by name: an answer that silently is not
what was asked for is worse than none.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from hpu_engine.scheduling.sampling_params import LEAST_REPETITION_PENALTY, MOST_LOGPROBS, MOST_REPETITION_PENALTY
from hpu_engine.server.api.history import ChatMessage
from hpu_engine.server.api.wording import words_for
from hpu_engine.server.errors import ApiError, bad_request

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_SAMPLES = 128
MAX_SEQUENCES = 256
"""Prompts times samples of one request."""
MAX_BIASED_TOKENS = 1024
MAX_MESSAGES = 4096
MAX_DOCUMENTS = 4096
MAX_VARIABLES = 1024
"""In `chat_template_kwargs`, and in each document."""
INT64 = 2**63


def _number_not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("has to be a number, not true or false")
    return value


Int = Annotated[int, BeforeValidator(_number_not_bool)]
Float = Annotated[float, BeforeValidator(_number_not_bool), Field(allow_inf_nan=False)]


def _bias(value: object) -> dict[int, float]:
    """Written out because the ids are an object's keys: no field's path could name one of them."""
    if not isinstance(value, dict):
        raise ValueError("has to be an object of token ids and numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"at most {MAX_BIASED_TOKENS} tokens, not {len(value)}")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError("has a key that is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 100:
            raise ValueError(f"the bias of token {int(key)} has to be a number between -100 and 100")
    return {int(key): float(bias) for key, bias in value.items()}


def _few_variables(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_VARIABLES:
        raise ValueError(f"at most {MAX_VARIABLES} variables are allowed, not {len(value)}")
    return value


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_embeds": (),
    "chat_template": (),
    "modalities": (["text"],),
    "audio": (),
}
"""Fields that change an answer and are not done here, each with the values that ask for nothing (null always does)."""
_NEUTRAL_IN_CHATS = {**_NEUTRAL, "echo": (False,), "best_of": (1,)}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool = False


class _Generation(BaseModel):
    """What both routes have in common."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    model: str | None = None
    max_tokens: Annotated[Int, Field(ge=1, lt=INT64)] | None = None
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=INT64)] | None = None
    seed: Annotated[Int, Field(gt=-INT64, lt=INT64)] | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_SAMPLES)] = 1
    min_p: Annotated[Float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Float, Field(ge=LEAST_REPETITION_PENALTY, le=MOST_REPETITION_PENALTY)] = 1.0
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias)] = {}
    min_tokens: Annotated[Int, Field(ge=0, lt=INT64)] = 0
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    stop: Annotated[tuple[str, ...], FailFast()] = ()
    stop_token_ids: Annotated[tuple[Annotated[Int, Field(ge=0)], ...], FailFast()] = Field(
        default=(), max_length=MAX_STOP_TOKEN_IDS
    )
    ignore_eos: bool = False
    cache_salt: str = Field("", max_length=256)
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, body: Any) -> Any:
        """Unknown fields are left out here: the validator would not let other threads run while it looks at many."""
        return {name: body[name] for name in cls.model_fields if body.get(name) is not None}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise ValueError("has to be a string or a list of strings")
        return value

    @field_validator("stop")
    @classmethod
    def _stops_are_few_short_and_not_empty(cls, stops: tuple[str, ...]) -> tuple[str, ...]:
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, not {len(stops)}")
        if any(not stop or len(stop) > MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        return stops

    @model_validator(mode="after")
    def _what_goes_with_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "stream_options needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


_Request = TypeVar("_Request", bound=_Generation)


class CompletionRequest(_Generation):
    """`POST /v1/completions`. `prompt` is read apart (`read_prompts`): its four forms need errors of their own.

    `max_tokens` may be 0 with `echo`: the prompt's log-probabilities are all that is wanted.
    """

    max_tokens: Annotated[Int, Field(ge=0, lt=INT64)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Int | None = None
    add_special_tokens: bool = True

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_asks_for_none(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens", "max_tokens: has to be at least 1, except with echo")
        if self.best_of not in (None, self.n):
            raise bad_request("best_of", "`best_of` other than n is not supported by this server; leave it out")
        return self

    @property
    def scored_output(self) -> int | None:
        """How many likely tokens are wanted at each token of the output; None for no scores at all."""
        return self.logprobs

    @property
    def scored_prompt(self) -> int | None:
        """The same for each token of the prompt."""
        echoed = self.logprobs if self.echo else None
        wanted = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return max(wanted, default=None)


class ChatCompletionRequest(_Generation):
    """`POST /v1/chat/completions`. `max_completion_tokens` is the current name of `max_tokens` and wins."""

    messages: Annotated[tuple[ChatMessage, ...], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    max_completion_tokens: Annotated[Int, Field(ge=1, lt=INT64)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_few_variables)] = {}
    documents: Annotated[tuple[Annotated[dict[str, Any], BeforeValidator(_few_variables)], ...], FailFast()] = Field(
        default=(), max_length=MAX_DOCUMENTS
    )

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
        return self

    @property
    def scored_output(self) -> int | None:
        """How many likely tokens are wanted at each token of the output; None for no scores at all."""
        return self.top_logprobs if self.logprobs else None

    @property
    def scored_prompt(self) -> int | None:
        """The same for each token of the prompt."""
        return self.prompt_logprobs

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    """Raises `ApiError` 400 with the parameter at fault."""
    return _read(CompletionRequest, body, _NEUTRAL)


def read_chat(body: dict[str, Any]) -> ChatCompletionRequest:
    """Raises `ApiError` 400 with the parameter at fault."""
    request = _read(ChatCompletionRequest, body, _NEUTRAL_IN_CHATS)
    if request.continue_final_message:
        raise bad_request("continue_final_message", "continue_final_message is not supported")
    return request


def _read(kind: type[_Request], body: dict[str, Any], neutrals: dict[str, tuple[object, ...]]) -> _Request:
    for name, neutral in neutrals.items():
        value = body.get(name)
        if value is not None and not any(_same(value, good) for good in neutral):
            raise bad_request(name, f"`{name}` is not supported by this server; leave it out")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None


def _same(value: object, neutral: object) -> bool:
    """Equality, but a truth value is no number: `logprobs: 0` asks for something, `logprobs: false` does not."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return value == neutral


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False)[0]
    param = _path(problem["loc"])
    message = words_for(param, problem["type"], problem["msg"], problem.get("ctx", {}))
    return bad_request(param or "body", f"{param}: {message}")


def _path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
