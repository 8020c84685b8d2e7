"""The scheduler under anything: random arrivals, aborts, tiny pools and budgets, never a token that differs."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, RequestRefused, Scheduler
from tests.core.simulated_model import VOCAB, SimulatedModel, expected_output

SALTS = ("", "tenant")


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 5),
        blocks=st.integers(1, 9),
        budget_over_block=st.integers(-4, 9),
        seqs=st.integers(1, 5),
        length=st.integers(2, 40),
        prefix_cache=st.booleans(),
        multiple=st.integers(1, 4),
    )
    def start(
        self,
        block_size: int,
        blocks: int,
        budget_over_block: int,
        seqs: int,
        length: int,
        prefix_cache: bool,
        multiple: int,
    ) -> None:
        self.limits = Limits(max(1, block_size + budget_over_block), seqs, length, chunk_multiple=multiple)
        self.pool = BlockPool(blocks, block_size, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(self.limits, self.pool)
        self.model = SimulatedModel(block_size)
        self.longest = min(length, blocks * block_size)
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.unscored: dict[str, int] = {}
        self.steps_owed = 0
        self.arrivals = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        max_tokens=st.integers(1, 12),
        stops=st.booleans(),
        salt=st.sampled_from(SALTS),
        samples=st.integers(1, 3),
        scored=st.booleans(),
    )
    def submit(self, prompt: list[int], max_tokens: int, stops: bool, salt: str, samples: int, scored: bool) -> None:
        stop = (VOCAB - 1,) if stops else ()
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, cache_salt=salt)
        first = self.submit_one(prompt, structs.replace(params, prompt_logprobs=0) if scored else params, None)
        for _ in range(samples - 1):
            self.submit_one(prompt, params, first)

    def submit_one(self, prompt: list[int], params: SamplingParams, first: str | None) -> str:
        self.arrivals += 1
        name = f"r{self.arrivals}"
        request = Request(name, list(prompt), params, seed=0, shares_prompt_with=first)
        try:
            self.scheduler.add(request)
        except RequestRefused:
            assert len(prompt) + 1 > self.longest
            return name
        assert len(prompt) + 1 <= self.longest
        self.requests[name] = request
        limit = min(params.max_tokens, self.longest - len(prompt))
        self.expected[name] = expected_output(prompt, limit, params.stop_token_ids)
        self.outputs[name] = []
        self.steps_owed += self.longest
        self.unscored[name] = len(prompt) - 1 if params.prompt_logprobs is not None else 0
        return name

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        used = self.pool.num_used
        held_alone = len(self.requests[name].blocks)
        self.scheduler.abort([name])
        assert used - held_alone <= self.pool.num_used <= used
        del self.requests[name]

    @rule()
    def step(self) -> None:
        live = self.scheduler.live_requests
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert bool(step.rows) == bool(live)
        if not live:
            return
        self.steps_owed -= 1
        assert self.steps_owed >= 0, "more steps than every request alone would need, one token at a time"
        # The oldest always moves: this is what bounds the number of steps.
        assert step.rows[0].request is live[0]
        assert step.num_tokens <= self.limits.max_batched_tokens
        assert self.scheduler.num_running <= self.limits.max_num_seqs
        assert len({id(row.request) for row in step.rows}) == len(step.rows)
        for row in step.rows:
            self.unscored[row.request.request_id] -= row.scores
        for output in self.scheduler.commit(step, self.model.run(step)):
            assert output.request_id not in self.finished, "a token after the end"
            for name in (output.request_id, self.requests[output.request_id].shares_prompt_with):
                assert name not in self.requests or self.unscored[name] == 0, "a token before its prompt's scores"
            self.outputs[output.request_id] += output.token_ids
            assert (
                self.outputs[output.request_id]
                == self.expected[output.request_id][: len(self.outputs[output.request_id])]
            )
            if output.finish is not None:
                self.finished[output.request_id] = output.finish
                assert self.outputs[output.request_id] == self.expected[output.request_id]
                del self.requests[output.request_id]

    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        assert {request.request_id for request in self.scheduler.live_requests} == set(self.requests)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.requests:
            self.step()
        assert self.pool.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
