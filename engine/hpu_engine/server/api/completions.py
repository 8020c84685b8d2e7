"""`POST /v1/completions`: raw prompts, as text or token ids, one or many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from aiohttp import web
from msgspec import UNSET, UnsetType

from hpu_engine.server.api.answering import Head, new_head, respond
from hpu_engine.server.api.echo import Echo, echo_of
from hpu_engine.server.api.logprobs import Spell, completion_logprobs, prompt_logprobs
from hpu_engine.server.api.parsing import parse_object
from hpu_engine.server.api.prompts import Prompt, read_prompts
from hpu_engine.server.api.protocol import CompletionRequest, read_completion
from hpu_engine.server.api.responses import Completion, CompletionChoice, PromptLogprobs, Usage, encode
from hpu_engine.server.model_files import LoadedModel
from hpu_engine.server.requests.response_stream import ResponseStream
from hpu_engine.server.requests.sequence import Delta
from hpu_engine.server.requests.sequence_request import (
    SequenceRequest,
    check_for_model,
    check_scores,
    encode_prompt,
    make_sequence_request,
    output_limit,
)
from hpu_engine.server.requests.serving_model import SERVING, ServingModel, prepare, read_body

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    model = serving.model()
    body = await read_body(request)
    parsed, wanted, echoes = await prepare(body, _read, body, serving, model)
    head = new_head("cmpl", serving.name, include_usage=parsed.include_usage)
    async with serving.admission.open(wanted) as answer:
        form = _Form(head, parsed, answer, model.tokenizer.spell, echoes)
        return await respond(request, answer, form, stream=parsed.stream, include_usage=parsed.include_usage)


def _read(
    data: bytes, serving: ServingModel, model: LoadedModel
) -> tuple[CompletionRequest, Sequence[SequenceRequest], Sequence[Echo] | None]:
    """All that a body asks for. Raises `ApiError`."""
    body = parse_object(data)
    parsed = read_completion(body)
    serving.check_model_name(parsed.model)
    given = read_prompts(body.get("prompt"), model.description.vocab)
    check_for_model(parsed, len(given), model, serving.admission.max_open)
    prompts = [_token_ids(prompt, parsed, model, serving) for prompt in given]
    limits = [
        output_limit(
            len(prompt),
            parsed.max_tokens,
            DEFAULT_MAX_TOKENS,
            serving.admission.limits,
            least=parsed.min_tokens,
            param="prompt",
        )
        for prompt in prompts
    ]
    check_scores(parsed, prompts, limits, serving.admission.limits.max_model_len)
    echoes = None
    if parsed.echo:
        each = zip(given, prompts, strict=True)
        echoes = [echo_of(prompt, token_ids, parsed, model.tokenizer) for prompt, token_ids in each]
    wanted = [
        make_sequence_request(prompt, parsed, limit, model, continues=True, prompt_field="prompt")
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    return parsed, wanted, echoes


def _token_ids(given: Prompt, request: CompletionRequest, model: LoadedModel, serving: ServingModel) -> tuple[int, ...]:
    if not isinstance(given, str):
        return given
    special = request.add_special_tokens
    return encode_prompt(given, model.tokenizer, serving.admission.limits, param="prompt", add_special_tokens=special)


@dataclass
class _Form:
    """A completion's bodies. `echoes` has one for each prompt, where the text begins with it."""

    head: Head
    request: CompletionRequest
    answer: ResponseStream
    spell: Spell
    echoes: Sequence[Echo] | None
    begun: set[int] = field(default_factory=set)

    def whole(self, sequences: Sequence[Delta], usage: Usage) -> bytes:
        return self._body(tuple(map(self._choice, sequences)), usage)

    def opening(self) -> Iterable[bytes]:
        return ()

    def has_prompt(self, delta: Delta) -> bool:
        return self.echoes is not None and delta.index not in self.begun

    def chunk(self, delta: Delta) -> bytes:
        return self._body((self._choice(delta),), self.head.no_usage)

    def last(self, usage: Usage) -> bytes:
        return self._body((), usage)

    def _body(self, choices: tuple[CompletionChoice, ...], usage: Usage | UnsetType | None) -> bytes:
        head = self.head
        return encode(Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage))

    def _choice(self, delta: Delta) -> CompletionChoice:
        text, tokens = delta.text, delta.tokens
        if self.echoes is not None:
            echo = self.echoes[delta.index // self.request.n]
            tokens = tuple(replace(token, offset=token.offset + len(echo.text)) for token in tokens)
            if self.has_prompt(delta):
                self.begun.add(delta.index)
                text = echo.text + text
                if self.request.logprobs is not None:
                    tokens = (*echo.scored(self.answer.prompt_scores(delta.index)), *tokens)
        count = self.request.logprobs
        return CompletionChoice(
            index=delta.index,
            text=text,
            logprobs=None if count is None else completion_logprobs(tokens, count, self.spell),
            finish_reason=delta.finish,
            stop_reason=delta.stop_reason,
            prompt_logprobs=self._prompt_logprobs(delta.index),
        )

    def _prompt_logprobs(self, index: int) -> PromptLogprobs | UnsetType:
        count = self.request.prompt_logprobs
        return UNSET if count is None else prompt_logprobs(self.answer.prompt_scores(index), count, self.spell)
