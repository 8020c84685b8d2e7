"""What one HTTP request reads: the text of its sequences as it comes, or each in one piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from hpu_engine.server.api.responses import Usage, usage_of
from hpu_engine.server.errors import ApiError
from hpu_engine.server.requests.sequence import Delta, ServedSequence, Sink
from hpu_engine.wire.messages import TokenLogprobs


class ResponseStream:
    """The sequences of one HTTP request, `samples` of each prompt after the other.

    Leaving the `async with` aborts those that still run, whatever the reason.
    """

    def __init__(
        self,
        sequences: Sequence[ServedSequence],
        samples: int,
        sink: Sink,
        release: Callable[[Sequence[ServedSequence]], None],
    ) -> None:
        self._generations = sequences
        self._samples = samples
        self._sink = sink
        self._release = release

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self._generations)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every sequence's text as it comes, until all have finished. Raises `ApiError` when one is broken."""
        unfinished = len(self._generations)
        while unfinished:
            item = await self._sink.get()
            if isinstance(item, ApiError):
                raise item
            unfinished -= item.finish is not None
            yield item

    async def whole(self) -> tuple[Delta, ...]:
        """Every sequence in one piece, in their order. Raises `ApiError` when one is broken."""
        pieces: list[list[Delta]] = [[] for _ in self._generations]
        async for delta in self.deltas():
            pieces[delta.index].append(delta)
        return tuple(
            replace(
                own[-1],
                text="".join(delta.text for delta in own),
                tokens=tuple(token for delta in own for token in delta.tokens),
            )
            for own in pieces
        )

    def prompt_scores(self, index: int) -> Sequence[TokenLogprobs]:
        """Those of the prompt of sequence `index`: its first sample has them for all. Once that sequence has begun."""
        return self._generations[index - index % self._samples].prompt_scores

    @property
    def num_prompt_scores(self) -> int:
        return sum(len(sequence.prompt_scores) for sequence in self._generations)

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many samples it has."""
        prompt_tokens = sum(sequence.prompt_tokens for sequence in self._generations[:: self._samples])
        return usage_of(prompt_tokens, sum(sequence.output_tokens for sequence in self._generations))
