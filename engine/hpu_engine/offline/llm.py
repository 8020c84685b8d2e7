"""`LLM`: one rank in this process, without a server, for offline use.

from hpu_engine import LLM, SamplingParams

llm = LLM("path/of/a/checkpoint")
for completion in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16, temperature=0.0)):
    print(completion.text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpu_engine.contract import Phase
from hpu_engine.offline.arguments import (
    Conversation,
    Prompt,
    conversations_of,
    engine_config,
    params_of,
    prompts_of,
    stops_of,
)
from hpu_engine.planning import read_model_description
from hpu_engine.scheduling.sampling_params import SamplingParams, check_sampling_params
from hpu_engine.text.detokenizer import Detokenizer, Piece
from hpu_engine.text.tokenizer import end_of_sequence, load_tokenizer
from hpu_engine.wire import messages
from hpu_engine.worker.threads import apply_thread_policy


class RequestFailed(Exception):
    """A request that was refused, or failed by itself; `index` is its place in the list of prompts."""

    def __init__(self, index: int, message: str) -> None:
        self.index = index
        super().__init__(f"prompt {index}: {message}")


@dataclass(frozen=True, slots=True)
class Completion:
    """`finish_reason` is `stop` (`stop_reason` says at which string or token id) or `length`.

    `logprobs` has one entry per output token, `prompt_logprobs` one per prompt token but the first, where asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[messages.TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[messages.TokenLogprobs, ...] | None = None


class LLM:
    """Loads and warms up the model in `model`; `settings` are the other fields of `EngineConfig`.

    Raises TypeError for a setting that is unknown or of a wrong type, `hpu_engine.worker.start_up.StartUpError` for a
    model that cannot be loaded.
    """

    def __init__(self, model: str | Path, *, progress_bar: bool = True, **settings: Any) -> None:
        config = engine_config(model, settings)
        apply_thread_policy()
        # Only now: whatever imports torch must come after the policy.
        from hpu_engine.worker.start_up import open_rank

        self._progress_bar = progress_bar
        with _StartUpBar(progress_bar) as bar:
            self._rank = open_rank(config, bar.show)
            self._rank.warm_up(bar.show)
        self._tokenizer = load_tokenizer(Path(model))
        self._eos_token_ids = end_of_sequence(read_model_description(model), self._tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> list[Completion]:
        """One completion per prompt, in their order. `stop` strings are not part of the text.

        A prompt is a text, or a list of token ids; one prompt alone need not be put into a list, and gives a list of
        one completion. Raises TypeError (an argument of another form), ValueError (a parameter out of range) and
        RequestFailed; nothing of the call is left running then.
        """
        encoded = [self._encode(prompt) for prompt in prompts_of(prompts)]
        return self._complete(encoded, sampling_params, stop, continues=True)

    def _complete(
        self,
        encoded: Sequence[tuple[int, ...]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        *,
        continues: bool,
    ) -> list[Completion]:
        """`continues`: the text stands behind the prompt's, and is no text of its own."""
        each, stops = params_of(sampling_params, len(encoded)), stops_of(stop)
        runs = {
            str(index): _Run(index, prompt, self._completed(params), self._detokenizer(stops, params, continues))
            for index, (prompt, params) in enumerate(zip(encoded, each, strict=True))
        }
        try:
            self._run(runs)
        finally:
            self._rank.loop.abort(runs)
        return [run.completion() for run in runs.values()]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> list[Completion]:
        """`generate` on conversations (lists of turns), rendered with the checkpoint's chat template.

        One conversation alone need not be put into a list. Raises ValueError where the checkpoint has no template.
        """
        given = conversations_of(conversations)
        template = self._tokenizer.chat_template
        if template is None:
            raise ValueError("this checkpoint has no chat template; use generate with prompts of its own form")
        rendered = [template.render(conversation) for conversation in given]
        prompts = [self._tokenizer.encode_now(text, add_special_tokens=False) for text in rendered]
        return self._complete(prompts, sampling_params, stop, continues=False)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._tokenizer.encode_now(prompt, add_special_tokens=True)
        return tuple(prompt)

    def _completed(self, params: SamplingParams) -> SamplingParams:
        check_sampling_params(params, vocab=self._rank.runner.vocab)
        if params.ignore_eos:
            return params
        return msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *self._eos_token_ids))

    def _detokenizer(self, stop: Sequence[str], params: SamplingParams, continues: bool) -> Detokenizer:
        tokens = self._tokenizer.text_of_tokens(skip_special_tokens=True)
        return Detokenizer(tokens, stop, stops_after=params.min_tokens, continues=continues)

    def _run(self, runs: dict[str, _Run]) -> None:
        loop = self._rank.loop
        for name, run in runs.items():
            submit = messages.Submit(request_id=name, prompt_token_ids=run.prompt, params=run.params)
            _raise_if_rejected(loop.submit(submit))
        with _bar(self._progress_bar) as progress:
            task = progress.add_task("generating", total=len(runs))
            while loop.has_work:
                result = loop.step()
                for rejected in result.rejected:
                    _raise_if_rejected(rejected)
                for row in result.outputs:
                    if runs[row.request_id].take(row):
                        loop.abort([row.request_id])
                    if runs[row.request_id].finish is not None:
                        progress.advance(task)


@dataclass(slots=True)
class _Run:
    """One prompt on its way to a completion."""

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[messages.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[messages.TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None

    def take(self, row: messages.RowOutput) -> bool:
        """Take a step's tokens; True when a stop string ended the text, and the request with it."""
        self.logprobs.extend(row.logprobs or ())
        self.prompt_logprobs.extend(row.prompt_logprobs or ())
        for token in row.token_ids:
            self.token_ids.append(token)
            if token == row.stop_token_id:
                continue
            if self._say(self.detokenizer.push(token)):
                return True
        if row.finish is None:
            return False
        if not self._say(self.detokenizer.flush()):
            self.finish, self.stop_reason = row.finish, row.stop_token_id
        return False

    def _say(self, piece: Piece) -> bool:
        self.text.append(piece.text)
        if piece.stop is not None:
            self.finish, self.stop_reason = "stop", piece.stop
        return piece.stop is not None

    def completion(self) -> Completion:
        assert self.finish is not None, "the loop is idle, so every request has ended"
        return Completion(
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.token_ids),
            text="".join(self.text),
            finish_reason=self.finish,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )


def _raise_if_rejected(rejected: messages.Rejected | None) -> None:
    if rejected is not None:
        raise RequestFailed(int(rejected.request_id), rejected.message)


def _bar(enabled: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not enabled, transient=True)


class _StartUpBar:
    """Loading in bytes, then warm-up in shapes, as one line on the terminal."""

    def __init__(self, enabled: bool) -> None:
        self._bar = _bar(enabled)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> _StartUpBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: messages.Progress) -> None:
        words = {Phase.LOADING: "loading", Phase.WARMING_UP: f"warming up {progress.current or ''}"}
        self._bar.update(
            self._task,
            description=words.get(progress.phase, progress.current or "starting"),
            completed=progress.done,
            total=progress.total or None,
        )
