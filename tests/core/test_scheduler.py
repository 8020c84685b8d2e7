"""The scheduler's policy, case by case. Its behaviour under anything at all is in `test_scheduler_machine`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, RequestRefused, Scheduler
from hpu_engine.wire.messages import RowOutput
from tests.core.simulated_model import SimulatedModel, Token, expected_output


def scheduler(
    *, blocks: int = 64, block_size: int = 4, budget: int = 16, seqs: int = 8, length: int = 200
) -> Scheduler:
    return Scheduler(Limits(budget, seqs, length), BlockPool(blocks, block_size))


def request(name: str, prompt: Sequence[int], max_tokens: int = 4, stop: tuple[int, ...] = ()) -> Request:
    return Request(name, list(prompt), SamplingParams(max_tokens=max_tokens, stop_token_ids=stop), seed=0)


def shares(target: Scheduler) -> list[tuple[str, int, int]]:
    """Schedule one step and commit it: (request, context, new) of each row."""
    step = target.schedule()
    target.commit(step, [Token(0) if row.emits else None for row in step.rows])
    target.check_integrity()
    return [(row.request.request_id, row.context_len, row.new_len) for row in step.rows]


def run_to_end(target: Scheduler, block_size: int = 4) -> list[RowOutput]:
    model = SimulatedModel(block_size)
    outputs: list[RowOutput] = []
    for _ in range(10_000):
        if not target.has_work:
            return outputs
        step = target.schedule()
        outputs += target.commit(step, model.run(step))
        target.check_integrity()
    raise AssertionError("no end")


def tokens_of(outputs: list[RowOutput], name: str) -> list[int]:
    return [token for row in outputs if row.request_id == name for token in row.token_ids]


def test_a_long_prompt_is_chunked_by_the_budget_and_mixed_with_decoding() -> None:
    target = scheduler(budget=10)
    target.add(request("a", [1] * 4))
    assert shares(target) == [("a", 0, 4)]
    target.add(request("b", [2] * 25))
    assert shares(target) == [("a", 4, 1), ("b", 0, 9)]
    assert shares(target) == [("a", 5, 1), ("b", 9, 9)]
    assert shares(target) == [("a", 6, 1), ("b", 18, 7)]
    assert shares(target) == [("b", 25, 1)]


def test_an_older_prompt_leaves_one_token_for_every_decoding_request_behind_it() -> None:
    target = Scheduler(Limits(8, 8, 200, chunk_multiple=3), BlockPool(64, 4))
    for name, prompt in (("long", [1] * 14), ("a", [2]), ("b", [3])):
        target.add(request(name, prompt))
    assert shares(target) == [("long", 0, 6), ("a", 0, 1), ("b", 0, 1)]
    # The 8 tokens that "long" still needs are the whole budget.
    assert shares(target) == [("long", 6, 6), ("a", 1, 1), ("b", 1, 1)]


def test_a_chunk_is_rounded_down_to_the_multiple_unless_it_ends_the_prompt() -> None:
    target = Scheduler(Limits(11, 8, 200, chunk_multiple=4), BlockPool(64, 4))
    target.add(request("a", [1] * 19))
    assert [new for _, _, new in (shares(target)[0], shares(target)[0], shares(target)[0])] == [8, 11, 1]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    target = scheduler(seqs=2)
    for name in "abc":
        target.add(request(name, [1, 2]))
    assert [name for name, _, _ in shares(target)] == ["a", "b"]
    assert (target.num_running, target.num_waiting) == (2, 1)


def test_the_youngest_is_preempted_and_finishes_with_the_same_tokens() -> None:
    target = scheduler(blocks=5, block_size=4, budget=16)
    asked = {"a": [1, 2, 3, 4, 5, 6], "b": [3, 3, 3]}
    for name, prompt in asked.items():
        target.add(request(name, prompt, max_tokens=11))
    outputs = run_to_end(target)
    assert target.counters.preemptions > 0
    for name, prompt in asked.items():
        assert tokens_of(outputs, name) == expected_output(prompt, 11)
        assert [row.finish for row in outputs if row.request_id == name][-1] == "length"


def test_a_request_is_refused_only_when_the_prompt_and_one_more_token_never_fit() -> None:
    target = scheduler(blocks=3, block_size=4, length=200)
    with pytest.raises(RequestRefused, match=r"12 tokens.*KV cache is 12 tokens"):
        target.add(request("a", [1] * 12))
    target.add(request("b", [1] * 11, max_tokens=50))
    assert [row.finish for row in run_to_end(target)] == ["length"]


def test_the_refusal_names_the_model_length_where_that_is_the_shorter() -> None:
    target = scheduler(length=10)
    with pytest.raises(RequestRefused, match=r"10 tokens.*model length is 10 tokens"):
        target.add(request("a", [1] * 10))


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("a", []), "prompt"),
        (request("a", [1], max_tokens=0), "max_tokens"),
        (request("twin", [1]), "request_id"),
    ],
)
def test_what_cannot_be_a_request_is_refused_by_name(bad: Request, param: str) -> None:
    target = scheduler()
    target.add(request("twin", [1]))
    with pytest.raises(RequestRefused) as refused:
        target.add(bad)
    assert refused.value.param == param


def test_a_stop_token_ends_the_request_and_is_named() -> None:
    target = scheduler()
    prompt = [1, 2, 3]
    first = expected_output(prompt, 1)[0]
    target.add(request("a", prompt, max_tokens=9, stop=(first,)))
    (output,) = run_to_end(target)
    assert (output.token_ids, output.finish, output.stop_token_id) == ((first,), "stop", first)


def test_an_abort_frees_at_once_whether_running_or_waiting() -> None:
    target = scheduler(seqs=1)
    target.add(request("a", [1] * 9))
    target.add(request("b", [2] * 9))
    target.schedule()
    target.abort(["a", "b", "never heard of"])
    assert not target.has_work
    assert target.pool.num_used == 0
    target.check_integrity()


def test_a_request_aborted_during_its_step_gets_no_token() -> None:
    target = scheduler()
    target.add(request("a", [1, 2]))
    step = target.schedule()
    target.abort(["a"])
    assert target.commit(step, [Token(3)]) == []


def test_a_known_prefix_is_not_computed_again_except_its_last_token() -> None:
    target = scheduler(block_size=4, budget=64)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    target.add(request("a", prompt, max_tokens=1))
    assert shares(target) == [("a", 0, 8)]
    target.add(request("same", prompt, max_tokens=1))
    target.add(request("longer", [*prompt, 4], max_tokens=1))
    target.add(request("other", [2, *prompt], max_tokens=1))
    assert shares(target) == [("same", 4, 4), ("longer", 8, 1), ("other", 0, 9)]
    assert (target.counters.prefix_queries, target.counters.prefix_hits) == (8 + 8 + 9 + 9, 4 + 8)


def test_another_salt_shares_nothing() -> None:
    target = scheduler(block_size=4)
    for name, salt in (("a", ""), ("b", "tenant")):
        params = SamplingParams(max_tokens=1, cache_salt=salt)
        target.add(Request(name, [1, 2, 3, 4, 1], params, seed=0))
        assert shares(target) == [(name, 0, 5)]


def test_an_empty_step_is_legal() -> None:
    target = scheduler()
    step = target.schedule()
    assert step.rows == ()
    assert target.commit(step, []) == []


def test_requests_of_one_prompt_share_its_full_blocks() -> None:
    target = scheduler(block_size=4, budget=64)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    target.add(request("a", prompt))
    for name in "bc":
        twin = request(name, prompt)
        twin.shares_prompt_with = "a"
        target.add(twin)
    assert shares(target) == [("a", 0, 9)]
    assert shares(target) == [("a", 9, 1), ("b", 8, 1), ("c", 8, 1)]
    assert target.pool.num_used == 2 + 3


def test_a_request_does_not_wait_for_one_that_is_gone() -> None:
    target = scheduler()
    twin = request("b", [1, 2])
    twin.shares_prompt_with = "never here"
    target.add(twin)
    assert shares(target) == [("b", 0, 2)]


def test_a_prompt_is_scored_once_and_completely_whatever_is_cached_or_preempted() -> None:
    target = scheduler(block_size=4, budget=6, blocks=8)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4, 4]
    target.add(request("cached", prompt, max_tokens=1))
    run_to_end(target)
    target.add(request("older", [2] * 9, max_tokens=20))
    params = SamplingParams(max_tokens=12, prompt_logprobs=0)
    target.add(Request("scored", list(prompt), params, seed=0))
    scored: list[int] = []
    while target.has_work:
        step = target.schedule()
        scored += [row.score_from + number for row in step.rows for number in range(row.scores)]
        target.commit(step, [Token(0) if row.emits else None for row in step.rows])
    assert target.counters.preemptions > 0
    assert scored == list(range(len(prompt) - 1))
