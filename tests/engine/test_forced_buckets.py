"""Steps padded to the planned buckets: the same bits, nothing real touched by padding, no shape that was not warm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpu_engine.contract import Phase
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.model.moe import router
from hpu_engine.model.moe.routing import Routing
from hpu_engine.model.transformer import Transformer
from hpu_engine.planning.shapes.buckets import UncoveredShape
from hpu_engine.planning.shapes.limits import Kind
from hpu_engine.planning.shapes.warm_up_plan import warm_up_order
from hpu_engine.scheduling.kv_blocks import SCRATCH_BLOCK, BlockPool
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, Scheduler
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.step.loop import StepLoop, StepResult, _Scoring
from hpu_engine.step.sampler import sample
from hpu_engine.step.shapes import ShapeMap
from hpu_engine.wire.messages import Progress, Submit
from hpu_engine.worker import warm_up as warm_up_module
from hpu_engine.worker.start_up import Rank
from hpu_engine.worker.warm_up import run_buckets
from tests.engine.direct import NARROW, open_quietly, run_together
from tests.engine.trace import (
    Asked,
    RecordingLoop,
    Schedule,
    first_difference,
    one_at_a_time,
    random_trace,
    replay,
    shape_map,
)
from tests.models.tiny import VOCAB_SIZE, tiny

BLOCK, BLOCKS = 16, 40
DENSE = [("llama", "float32"), ("llama", "bfloat16")]
SPARSE = [("ernie4_5_moe", "float32"), ("ernie4_5_moe", "bfloat16")]


def opened(family: str, dtype: str = "float32", **settings: object) -> Rank:
    """Computed in the type itself even where the device would widen it."""
    config = EngineConfig(model=str(tiny(family, dtype=dtype)), dtype=dtype, block_size=BLOCK, num_kv_blocks=BLOCKS)
    return open_quietly(msgspec.structs.replace(config, **settings), NARROW)


@pytest.fixture(scope="module", params=[*DENSE, *SPARSE], ids="-".join)
def ranks(request: pytest.FixtureRequest) -> tuple[Rank, Rank]:
    """The same model with exact shapes and forced into buckets."""
    return opened(*request.param, exact=True), opened(*request.param, exact=True, force_buckets=True)


@pytest.mark.parametrize("seed", range(2))
def test_padding_changes_no_bit(ranks: tuple[Rank, Rank], seed: int) -> None:
    """Of logits, tokens, log-probabilities and prompt scores; against one request at a time, and against the same
    schedule without padding. The caches end up alike too, but for scratch: padding writes nowhere else.
    """
    exact, forced = ranks
    asked = random_trace(seed, VOCAB_SIZE, BLOCK)
    expected = one_at_a_time(exact, asked, num_blocks=BLOCKS)
    chance = random.Random(seed)
    longest = max(len(one.prompt) + one.params.max_tokens for one in asked)
    tight = -(-longest // BLOCK) + chance.randint(0, 2)
    for schedule in (
        Schedule(budget=BLOCK * 4, num_blocks=BLOCKS, force_buckets=True),
        Schedule(budget=chance.choice([1, BLOCK - 1, BLOCK, BLOCK + 1]), num_blocks=tight, force_buckets=True),
        Schedule(200, tight, max_num_seqs=chance.randint(1, 4), prefix_cache=False, force_buckets=True),
    ):
        found = replay(forced, asked, schedule)
        difference = first_difference(expected, found)
        assert difference is None, f"trace {seed}, {schedule}: {difference}"
        unpadded = replay(exact, asked, replace(schedule, force_buckets=False))
        assert unpadded.tokens == found.tokens
        assert unpadded.logprobs == found.logprobs
        assert unpadded.prompt_logprobs == found.prompt_logprobs
        for left, right in zip(exact.runner.caches, forced.runner.caches, strict=True):
            assert isinstance(left, LayerPages)
            assert isinstance(right, LayerPages)
            for own, padded in ((left.keys, right.keys), (left.values, right.values)):
                assert torch.equal(own[1 : BLOCKS + 1], padded[1 : BLOCKS + 1])
                assert not padded[SCRATCH_BLOCK].any()
                assert not padded[BLOCKS + 1 :].any()


def test_padding_changes_no_bit_of_compiled_kernels() -> None:
    exact, forced = (opened("llama", exact=True, compile=True, force_buckets=force) for force in (False, True))
    asked = random_trace(2, VOCAB_SIZE, BLOCK)
    expected = one_at_a_time(exact, asked, num_blocks=BLOCKS)
    found = replay(forced, asked, Schedule(50, BLOCKS, force_buckets=True))
    assert first_difference(expected, found) is None


def test_the_traces_hold_what_could_go_wrong() -> None:
    """Prompt scores, log-probabilities, penalties, shared prompts, preemption, prefix hits: all somewhere in them."""
    rank = opened("llama", exact=True)
    asked = [one for seed in range(3) for one in random_trace(seed, VOCAB_SIZE, BLOCK)]
    assert any(one.shares_prompt_with for one in asked)
    assert any(one.params.prompt_logprobs is not None for one in asked)
    assert any(one.params.logprobs is not None for one in asked)
    assert any(one.params.repetition_penalty != 1.0 for one in asked)
    tight = [replay(rank, random_trace(seed, VOCAB_SIZE, BLOCK), Schedule(64, 7)) for seed in range(3)]
    assert sum(one.preemptions for one in tight) > 0
    assert sum(one.prefix_hits for one in tight) > 0


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation with the shapes of its tensors and its other arguments: what a graph is compiled from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(f"{func} {_shapes(args)} {_shapes(kwargs)}")
        return func(*args, **(kwargs or {}))


def _shapes(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return f"{value.dtype}{list(value.shape)}"
        case list() | tuple():
            return [_shapes(item) for item in value]
        case dict():
            return {name: _shapes(item) for name, item in value.items()}
    return value


def on_host(recorder: Recorder, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` is a function of the host, which may be given any shape: what it does is not recorded."""

    def unrecorded(*arguments: Any) -> Any:
        recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return call(*arguments)
        finally:
            recorder.__enter__()  # type: ignore[no-untyped-call]

    return unrecorded


@pytest.mark.parametrize(
    ("family", "exact"), [("llama", False), ("llama", True), ("mixtral", False)], ids=["dense", "exact", "sparse"]
)
def test_no_operation_of_a_step_runs_in_a_shape_that_was_not_warm(
    family: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the whole of `loop.step`, operation by operation, whatever is sampled, scored, shared or preempted; but for
    the choice of tokens from finished logits, which is plain code of the host. The counter says the same.
    """
    rank = opened(family, exact=exact, force_buckets=True)
    asked = random_trace(1, VOCAB_SIZE, BLOCK, count=8)
    tight = -(-max(len(one.prompt) + one.params.max_tokens for one in asked) // BLOCK)
    recorder = Recorder()
    warm: set[str] = set()
    step = StepLoop.step

    def recorded(loop: StepLoop) -> StepResult:
        with recorder:
            return step(loop)

    monkeypatch.setattr(StepLoop, "step", recorded)
    monkeypatch.setattr(RecordingLoop, "_sample", on_host(recorder, RecordingLoop._sample))
    monkeypatch.setattr(_Scoring, "take", on_host(recorder, _Scoring.take))
    monkeypatch.setattr(warm_up_module, "sample", on_host(recorder, sample))

    def warm_up(loop: RecordingLoop) -> None:
        assert loop.runner.shapes.buckets is not None
        recorder.seen.clear()
        with recorder:
            run_buckets(loop.runner, loop.runner.shapes.buckets, lambda _progress: None)
        warm.clear()
        warm.update(recorder.seen)

    for schedule in (Schedule(BLOCK + 1, tight, force_buckets=True), Schedule(70, BLOCKS, force_buckets=True)):
        found = replay(rank, asked, schedule, warm_up)
        assert found.first_seen_shapes == 0
        assert sorted(recorder.seen - warm) == []
        assert len(warm) > 100
    unpadded = replay(rank, asked, Schedule(70, BLOCKS))
    assert unpadded.first_seen_shapes > 0
    assert recorder.seen - warm, "without padding there is no new shape either, so nothing was tested"


def test_padding_rows_meet_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = opened("ernie4_5_moe", force_buckets=True)
    loads: list[int] = []
    rows: list[int] = []
    select = router.select

    def counted(*arguments: object) -> Routing:
        routing = select(*arguments)  # type: ignore[arg-type]
        loads.append(int(routing.load(8).sum()))
        rows.append(routing.ids.shape[0])
        return routing

    monkeypatch.setattr(router, "select", counted)
    moe = rank.runner.transformer.description.moe
    assert moe is not None
    refused = rank.loop.submit(Submit(request_id="a", prompt_token_ids=(5,) * 77, params=SamplingParams(max_tokens=2)))
    assert refused is None
    assert rank.loop.step().num_tokens == 77
    assert set(loads) == {77 * moe.top_k}
    buckets = rank.runner.shapes.buckets
    assert buckets is not None
    assert set(rows) == {buckets.find(Kind.FLAT, 77).size[0]}
    assert rows[0] > 77, "nothing was padded, so nothing was tested"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_without_exact_greedy_tokens_are_the_same_up_to_ties(family: str) -> None:
    """The first token that differs, if any, was chosen among two logits closer than rounding (1e-4 of some units)."""
    plain, forced = opened(family), opened(family, force_buckets=True)
    for seed in range(2):
        asked = [
            replace(one, params=msgspec.structs.replace(one.params, temperature=0.0), aborted_at_step=None)
            for one in random_trace(seed, VOCAB_SIZE, BLOCK)
        ]
        expected = replay(plain, asked, Schedule(64, BLOCKS))
        found = replay(forced, asked, Schedule(64, BLOCKS, force_buckets=True))
        for one in asked:
            for number, (left, right) in enumerate(zip(expected.tokens[one.name], found.tokens[one.name], strict=True)):
                ours, theirs = found.logits[one.name, number], expected.logits[one.name, number]
                assert torch.allclose(ours, theirs, atol=1e-4), f"{one.name}, token {number}"
                if left != right:
                    best = theirs.topk(2).values
                    assert float(best[0] - best[1]) < 1e-4, f"{one.name}, token {number}: {left} instead of {right}"
                    break


def test_every_bucket_of_the_plan_is_run_once_largest_first_and_told() -> None:
    rank = opened("llama", force_buckets=True)
    told: list[Progress] = []
    rank.warm_up(told.append)
    buckets = rank.runner.shapes.buckets
    assert buckets is not None
    order = [str(bucket) for bucket in warm_up_order(buckets)]
    assert len(set(order)) == len(order)
    assert [progress.current for progress in told] == [*order, "first token"]
    assert [progress.done for progress in told] == list(range(len(order) + 1))
    assert {(progress.phase, progress.total) for progress in told} == {(Phase.WARMING_UP, len(order))}
    costs = [bucket.seconds for bucket in warm_up_order(buckets)]
    assert costs == sorted(costs, reverse=True)
    run_together(rank, [[3] * 100, [4] * 5, [5]], SamplingParams(max_tokens=9, temperature=0.7, logprobs=2))
    beat = rank.loop.heartbeat()
    assert beat.first_seen_shapes == 0
    assert beat.bucket is not None
    assert set(beat.bucket.split("; ")) <= set(order), "the heartbeat names buckets"


def test_shapes_that_warm_up_left_out_are_counted_once_each() -> None:
    """Nothing was warm here, so the counter has to see every bucket that is used."""
    rank = opened("llama", force_buckets=True)
    rank.runner.first_seen.end_warm_up()
    run_together(rank, [[3] * 20], SamplingParams(max_tokens=1, temperature=0.0))
    assert rank.loop.heartbeat().first_seen_shapes == 3, "flat, prefill attention, sampler"
    run_together(rank, [[4] * 20], SamplingParams(max_tokens=1, temperature=0.0))
    assert rank.loop.heartbeat().first_seen_shapes == 3
    run_together(rank, [[5] * 20], SamplingParams(max_tokens=1, temperature=1.0))
    assert rank.loop.heartbeat().first_seen_shapes == 3, "how a token is chosen is the host's business"


def test_without_the_flag_own_shapes_are_counted() -> None:
    rank = opened("llama")
    rank.warm_up(lambda _progress: None)
    run_together(rank, [[3] * 201, [4] * 7], SamplingParams(max_tokens=3, temperature=0.0))
    counted = rank.loop.heartbeat().first_seen_shapes
    # Step 1: flat 208, prefill 201 and 7. Steps 2 and 3: decode 2 rows over 13 + 1 blocks; the rest was warm.
    assert counted == 4
    run_together(rank, [[5] * 201, [6] * 7], SamplingParams(max_tokens=3, temperature=0.0))
    assert rank.loop.heartbeat().first_seen_shapes == counted


def test_a_step_beyond_the_limits_of_the_buckets_names_its_shape() -> None:
    """No scheduler makes such a step; one with another budget than the buckets stands for a mistake of ours."""
    rank = opened("llama", force_buckets=True)
    wide = Scheduler(Limits(512, 8, 600), BlockPool(BLOCKS, BLOCK))
    loop = StepLoop(wide, rank.runner)
    assert loop.submit(Submit(request_id="a", prompt_token_ids=(3,) * 300, params=SamplingParams())) is None
    with pytest.raises(UncoveredShape, match=r"no flat bucket covers \(300, 0\)"):
        loop.step()


def test_nothing_to_do_is_a_step_that_does_nothing() -> None:
    rank = opened("llama", force_buckets=True)
    result = rank.loop.step()
    assert (result.outputs, result.num_tokens, rank.loop.steps) == ((), 0, 0)


def test_the_shape_that_fails_is_known_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = opened("llama", force_buckets=True)

    def broken(*_: object) -> None:
        raise RuntimeError("the device failed")

    monkeypatch.setattr(Transformer, "hidden", broken)
    assert rank.loop.submit(Submit(request_id="a", prompt_token_ids=(3,) * 30, params=SamplingParams())) is None
    with pytest.raises(RuntimeError):
        rank.loop.step()
    buckets = rank.runner.shapes.buckets
    assert buckets is not None
    assert rank.loop.shape is not None
    assert rank.loop.shape.startswith(f"{buckets.find(Kind.FLAT, 30)}; {buckets.find(Kind.PREFILL, 30)}; ")


def test_a_map_of_any_limits_can_be_made() -> None:
    """Budgets below, equal to and just above the block size, more requests than tokens, a pool of one block."""
    rank = opened("llama")
    for budget in (1, BLOCK - 1, BLOCK, BLOCK + 1):
        for rows in (1, 64):
            for blocks in (1, 3):
                found = shape_map(rank, Limits(budget, rows, 2048), BlockPool(blocks, BLOCK))
                assert isinstance(found, ShapeMap)
                assert found.buckets is not None


def test_a_request_alone_is_padded_too() -> None:
    exact, forced = opened("llama", exact=True), opened("llama", exact=True, force_buckets=True)
    one = Asked("a", tuple(range(3, 60)), SamplingParams(max_tokens=20, temperature=0.0))
    expected = one_at_a_time(exact, [one], num_blocks=BLOCKS)
    found = replay(forced, [one], Schedule(BLOCK, BLOCKS, force_buckets=True))
    assert first_difference(expected, found) is None
