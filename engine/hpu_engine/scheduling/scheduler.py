"""Which requests share the next step, and how many tokens of each. Pure and torch-free.

Policy:

- A step carries at most `max_batched_tokens` tokens of at most `max_num_seqs` running requests.
- Running requests come first, in order of arrival; then waiting ones, in order of arrival. A request that is behind
  gets as many tokens as the budget allows, but leaves one for every decoding request after it.
- Every row needs KV slots for its new tokens. When the pool has none left, the youngest running request is preempted:
  it gives back all its blocks, keeps its tokens, and waits first in line to be computed anew. Nobody is admitted in a
  step that preempted. The oldest request is never preempted by another, so some request always comes closer to its end.
- A waiting request is admitted when the pool could hold all its present tokens beside what is running, so that an
  admission does not lead straight to a preemption. Leading full blocks found in the prefix cache count as computed;
  the last token never does, because its answer is needed.
- A request that shares its prompt with an earlier one waits until that one has computed it.
- A request is refused only when its prompt and one more token can never fit; one whose `max_tokens` reaches too far is
  cut short and ends with `length`.

Invariant: running followed by waiting is in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpu_engine.scheduling.kv_blocks import BlockPool, chain_digest, root_digest
from hpu_engine.scheduling.request import Request, Status
from hpu_engine.wire.messages import RowOutput, TokenLogprobs


class RequestRefused(Exception):
    """A request that can never run here. `param` names the field of the request that is to blame."""

    def __init__(self, message: str, param: str = "prompt") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Limits:
    """`chunk_multiple`: a chunk that does not finish its prompt is rounded down to it, unless shorter (speed only)."""

    max_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    chunk_multiple: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step. `emits`: the row reaches the last token, so its answer is the next one.

    `scores`: the answers of so many of its tokens are wanted from `score_from` (a position) on, to score the prompt.
    """

    request: Request
    context_len: int
    new_len: int
    emits: bool
    score_from: int = 0
    scores: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.new_len for row in self.rows)


@dataclass(slots=True)
class Counters:
    """Since start. Prefix numbers are tokens: asked for and found, at each admission."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Emitted(Protocol):
    """A sampled token, and its log-probabilities where the request wants them."""

    @property
    def token(self) -> int: ...

    @property
    def logprobs(self) -> TokenLogprobs | None: ...


PromptScores = tuple[TokenLogprobs, ...]


class Scheduler:
    """`add`, `abort`, then `schedule` and `commit` in turns."""

    def __init__(self, limits: Limits, pool: BlockPool, *, cache_seed: str = "") -> None:
        self._limits = limits
        self.pool = pool
        self._cache_seed = cache_seed
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self.counters = Counters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def live_requests(self) -> tuple[Request, ...]:
        """Running, then waiting: in order of arrival."""
        return (*self._running, *self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestRefused`."""
        if request.request_id in self._requests:
            raise RequestRefused(f"a request with the id {request.request_id!r} is already here", "request_id")
        if not request.prompt_len:
            raise RequestRefused("the prompt is empty; at least one token is needed")
        if request.params.max_tokens < 1:
            raise RequestRefused(f"max_tokens is {request.params.max_tokens}; at least 1 is needed", "max_tokens")
        pool_tokens = self.pool.num_blocks * self.pool.block_size
        longest = min(self._limits.max_model_len, pool_tokens)
        if request.prompt_len + 1 > longest:
            what = "the model length" if longest == self._limits.max_model_len else "the KV cache"
            raise RequestRefused(
                f"the prompt has {request.prompt_len} tokens and needs room for one more, {what} is {longest} tokens"
            )
        request.token_limit = min(request.token_limit, longest)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and free their blocks at once. Unknown ids are ignored: they may just have finished."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._retire(request)

    def schedule(self) -> Step:
        """The rows of the next step, their blocks allocated. Empty when there is nothing to do."""
        rows: list[Row] = []
        budget, preempted = self._schedule_running(rows)
        if not preempted:
            self._admit_waiting(rows, budget)
        return Step(tuple(rows))

    def commit(
        self, step: Step, sampled: Sequence[Emitted | None], scored: Sequence[PromptScores] | None = None
    ) -> list[RowOutput]:
        """Record that `step` ran. `sampled[i]` is what row i emits, None where it emits nothing or was given up;
        `scored[i]` are the log-probabilities of the prompt that row i was to score.
        """
        outputs = []
        scores = scored or [()] * len(step.rows)
        for row, token, scores_of_row in zip(step.rows, sampled, scores, strict=True):
            request = row.request
            if request.status is not Status.RUNNING:
                continue
            request.has_run = True
            request.num_computed = row.context_len + row.new_len
            self._register_full_blocks(request)
            request.num_scored = max(request.num_scored, row.score_from + row.scores)
            if row.emits and token is not None:
                outputs.append(self._accept(request, token, scores_of_row))
            elif scores_of_row:
                outputs.append(RowOutput(request_id=request.request_id, token_ids=(), prompt_logprobs=scores_of_row))
        return outputs

    def check_integrity(self) -> None:
        """Recount everything. Raises AssertionError. For tests, and for an idle moment."""
        self.pool.check_integrity([request.blocks for request in self._running])
        assert all(not request.blocks for request in self._waiting)
        assert set(map(id, self.live_requests)) == set(map(id, self._requests.values()))
        assert list(self._requests.values()) == list(self.live_requests), "first come, first served was broken"
        for request in self._running:
            assert len(request.blocks) * self.pool.block_size >= request.num_computed

    def _schedule_running(self, rows: list[Row]) -> tuple[int, bool]:
        """Returns what is left of the budget and whether somebody was preempted."""
        budget = self._limits.max_batched_tokens
        decoding_behind = sum(1 for request in self._running if request.num_missing == 1)
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            if request.num_missing == 1:
                decoding_behind -= 1
            new_len = self._chunk(request, max(1, budget - decoding_behind))
            while not self._grow(request, request.num_computed + new_len):
                victim = self._running[-1]
                if victim is not request and victim.num_missing == 1:
                    decoding_behind -= 1
                self._preempt(victim)
                preempted = True
                if victim is request:
                    return budget, True
            rows.append(_row(request, new_len))
            budget -= new_len
            index += 1
        return budget, preempted

    def _admit_waiting(self, rows: list[Row], budget: int) -> None:
        while budget > 0 and self._waiting and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            if self._waits_for_prompt(request):
                return
            known = self._known_prefix(request)
            missing_blocks = self._blocks_for(request.num_tokens) - len(known)
            if missing_blocks > self.pool.num_free - self.pool.num_reusable(known):
                # Alone it always fits: nobody is refused by an empty pool.
                assert self._running, "an admitted request does not fit into an empty pool"
                return
            self._waiting.popleft()
            self.pool.share(known)
            request.blocks = known
            request.num_computed = len(known) * self.pool.block_size
            request.num_registered = len(known)
            request.status = Status.RUNNING
            self._running.append(request)
            self.counters.prefix_queries += request.num_tokens
            self.counters.prefix_hits += request.num_computed
            new_len = self._chunk(request, budget)
            grown = self._grow(request, request.num_computed + new_len)
            assert grown
            rows.append(_row(request, new_len))
            budget -= new_len

    def _waits_for_prompt(self, request: Request) -> bool:
        first = self._requests.get(request.shares_prompt_with or "")
        return self.pool.prefix_cache and first is not None and first.num_computed < first.prompt_len

    def _chunk(self, request: Request, room: int) -> int:
        missing = request.num_missing
        if missing <= room:
            return missing
        multiple = self._limits.chunk_multiple
        return room // multiple * multiple or room

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give `request` slots for `num_tokens` tokens; False, and nothing changed, when the pool cannot."""
        missing = self._blocks_for(num_tokens) - len(request.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.blocks.extend(self.pool.allocate(missing))
        return True

    def _preempt(self, request: Request) -> None:
        assert self._running.pop() is request, "only the youngest is preempted"
        self._give_back(request)
        request.status = Status.WAITING
        self._waiting.appendleft(request)
        self.counters.preemptions += 1

    def _retire(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._give_back(request)
        request.status = Status.FINISHED
        del self._requests[request.request_id]

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.num_registered = 0

    def _accept(self, request: Request, emitted: Emitted, scores: PromptScores) -> RowOutput:
        token, logprobs = emitted.token, emitted.logprobs
        request.tokens.append(token)
        finish = request.finish_reason()
        if finish is not None:
            self._retire(request)
        return RowOutput(
            request_id=request.request_id,
            token_ids=(token,),
            finish=finish,
            stop_token_id=token if finish == "stop" else None,
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=scores or None,
        )

    def _known_prefix(self, request: Request) -> list[int]:
        if not self.pool.prefix_cache:
            return []
        # One token less than there are: a full hit still computes the last one. And no further than was scored.
        most = request.num_tokens - 1
        if request.num_scored < request.num_to_score:
            most = request.num_scored
        digests = self._digests(request, most // self.pool.block_size)
        return self.pool.match(self._root(request), digests, request.tokens)

    def _register_full_blocks(self, request: Request) -> None:
        full = request.num_computed // self.pool.block_size
        if not self.pool.prefix_cache or full <= request.num_registered:
            return
        size = self.pool.block_size
        digests = self._digests(request, full)
        for index in range(request.num_registered, full):
            parent = digests[index - 1] if index else self._root(request)
            tokens = request.tokens[index * size : (index + 1) * size]
            self.pool.register(request.blocks[index], digests[index], parent, tokens)
        request.num_registered = full

    def _digests(self, request: Request, count: int) -> list[bytes]:
        size = self.pool.block_size
        digests = request.digests
        while len(digests) < count:
            parent = digests[-1] if digests else self._root(request)
            start = len(digests) * size
            digests.append(chain_digest(parent, request.tokens[start : start + size]))
        return digests[:count]

    def _root(self, request: Request) -> bytes:
        return root_digest(self._cache_seed, request.params.cache_salt)


def _row(request: Request, new_len: int) -> Row:
    context_len = request.num_computed
    end = context_len + new_len
    score_from = max(context_len, request.num_scored)
    scores = max(0, min(end, request.num_to_score) - score_from)
    return Row(request, context_len, new_len, emits=end == request.num_tokens, score_from=score_from, scores=scores)
