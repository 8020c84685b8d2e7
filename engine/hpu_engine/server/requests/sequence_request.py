"""From a checked request to sequence requests: prompts in tokens, how long an answer may get, one seed a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hpu_engine.scheduling.sampling_params import MOST_LOGPROBS, SamplingParams
from hpu_engine.server.api.protocol import MAX_SEQUENCES, ChatCompletionRequest, CompletionRequest
from hpu_engine.server.errors import ApiError, bad_request
from hpu_engine.server.model_files import LoadedModel
from hpu_engine.text.detokenizer import TokenText
from hpu_engine.text.tokenizer import TextRefused, Tokenizer
from hpu_engine.wire.messages import Loaded

MAX_SCORES = 1 << 20
"""Log-probabilities in one answer, unless one whole context has more."""


@dataclass(frozen=True)
class SequenceRequest:
    """One prompt and its samples: `params` has one entry for each, and only the first may score the prompt.

    `continues`: the text goes on where the prompt's ends. `only_prompt`: no output is wanted. `shown_stop_ids` are the
    stop ids that the client gave, and is told about; `prompt_field` is the field that it gave the prompt in.
    """

    prompt: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    stops: tuple[str, ...]
    tokens: TokenText
    shown_stop_ids: frozenset[int]
    continues: bool
    prompt_field: str
    only_prompt: bool = False


def encode_prompt(
    text: str, tokenizer: Tokenizer, limits: Loaded, *, param: str, add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of a prompt. One that cannot fit by its length alone is refused before it costs any tokenizing."""
    if len(text) > limits.most_tokens * tokenizer.chars_per_token:
        raise prompt_too_long(param, f"{len(text)} characters, which no {limits.most_tokens} tokens stand for", limits)
    try:
        token_ids = tokenizer.encode_now(text, add_special_tokens=add_special_tokens)
    except TextRefused as error:
        raise bad_request(param, str(error)) from None
    if not token_ids:
        raise bad_request(param, f"{param} has no tokens")
    return token_ids


def output_limit(
    prompt_tokens: int, wanted: int | None, default: int | None, limits: Loaded, *, least: int, param: str
) -> int:
    """How many tokens may be generated: what was asked for, never past the end of the context or of the KV cache.

    With neither `wanted` nor `default` it is all the room there is. Raises `ApiError` 400 when there is none, or when
    `least` tokens are more than what is wanted.
    """
    room = limits.most_tokens - prompt_tokens
    if room < 1:
        raise prompt_too_long(param, f"{prompt_tokens} tokens and needs room for one more", limits)
    asked = default if wanted is None else wanted
    if asked is not None and least > asked:
        raise bad_request("min_tokens", f"min_tokens is {least}, and at most {asked} tokens are wanted")
    return room if asked is None else min(room, asked)


def prompt_too_long(param: str, size: str, limits: Loaded) -> ApiError:
    what = "this model" if limits.most_tokens == limits.max_model_len else "the KV cache of this server"
    return bad_request(
        param,
        f"the prompt has {size}; {what} takes {limits.most_tokens} tokens, prompt and output together",
        code="context_length_exceeded",
    )


def check_for_model(
    request: CompletionRequest | ChatCompletionRequest, prompts: int, model: LoadedModel, max_open: int
) -> None:
    """Raises `ApiError` 400 for an id outside the vocabulary, and for more sequences than one request may have.

    `max_open`: how many the server takes at all. More would have to wait for ever.
    """
    most = min(MAX_SEQUENCES, max_open)
    if prompts * request.n > most:
        raise bad_request(
            "prompt" if prompts > most else "n",
            f"{prompts} prompts times n of {request.n} are {prompts * request.n} sequences; this server takes at most "
            f"{most} in one request",
        )
    vocab = model.description.vocab
    for name, token_ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
        for token_id in token_ids:
            if token_id >= vocab:
                raise bad_request(name, f"{name} has {token_id}; the vocabulary ends at {vocab - 1}")


def check_scores(
    request: CompletionRequest | ChatCompletionRequest,
    prompts: Sequence[tuple[int, ...]],
    limits: Sequence[int],
    model_len: int,
) -> None:
    """Raises `ApiError` 400 for an answer with more scores than may be kept; `limits` are the output tokens."""
    of_prompt = sum(map(len, prompts)) * _scores_a_token(request.scored_prompt)
    of_output = sum(limits) * request.n * _scores_a_token(request.scored_output)
    most = max(MAX_SCORES, model_len * (MOST_LOGPROBS + 1))
    if of_prompt + of_output > most:
        is_prompts = request.prompt_logprobs is not None and of_prompt >= of_output
        raise bad_request(
            "prompt_logprobs" if is_prompts else "logprobs",
            f"the answer could have {of_prompt + of_output} log-probabilities, at most {most} are given: ask for fewer "
            "likely tokens, prompts or samples, or for a smaller max_tokens",
        )


def _scores_a_token(likely: int | None) -> int:
    return 0 if likely is None else likely + 1


def make_sequence_request(
    prompt: tuple[int, ...],
    request: CompletionRequest | ChatCompletionRequest,
    limit: int,
    model: LoadedModel,
    *,
    continues: bool,
    prompt_field: str,
) -> SequenceRequest:
    """`limit` is how many tokens may be generated; 0 for the prompt's scores alone."""
    return SequenceRequest(
        prompt=prompt,
        params=_samples(_params(request, model, limit), request.n),
        stops=request.stop,
        tokens=model.tokenizer.text_of_tokens(skip_special_tokens=request.skip_special_tokens),
        shown_stop_ids=frozenset(request.stop_token_ids),
        continues=continues,
        prompt_field=prompt_field,
        only_prompt=limit == 0,
    )


def _params(request: CompletionRequest | ChatCompletionRequest, model: LoadedModel, limit: int) -> SamplingParams:
    own = () if request.ignore_eos else model.eos_token_ids
    return SamplingParams(
        max_tokens=max(1, limit),  # the worker ends a request by a token
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        min_tokens=min(request.min_tokens, limit),
        logprobs=request.scored_output,
        prompt_logprobs=request.scored_prompt,
        seed=request.seed,
        stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *own))),
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt,
    )


def _samples(params: SamplingParams, n: int) -> tuple[SamplingParams, ...]:
    """Each with its own seed; the prompt is scored once."""
    others = (
        msgspec.structs.replace(params, seed=sample_seed(params.seed, number), prompt_logprobs=None)
        for number in range(1, n)
    )
    return (params, *others)


def sample_seed(seed: int | None, number: int) -> int | None:
    """The seed of one of `n` samples: the first has the request's own, so that it is the answer without `n`.

    A hash and no sum: the second sample of seed 7 must not be the first of seed 8.
    """
    if seed is None or number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
