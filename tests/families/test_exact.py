"""With `exact`, no schedule changes a bit of a mixture of experts either: not a score, not a choice, not a sum."""

from __future__ import annotations

import pytest

from hpu_engine.settings.engine import EngineConfig
from hpu_engine.worker.start_up import Rank
from tests.engine.direct import NARROW, open_quietly
from tests.engine.trace import Schedule, first_difference, one_at_a_time, random_trace, replay
from tests.models.tiny import VOCAB_SIZE, tiny

BLOCK = 16
CASES = [("mixtral", "float32"), ("qwen3_moe", "float32"), ("ernie4_5_moe", "float32"), ("ernie4_5_moe", "bfloat16")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def rank(request: pytest.FixtureRequest) -> Rank:
    """Computed in the type itself even where the device would widen it."""
    family, dtype = request.param
    directory = tiny(family, dtype=dtype)
    config = EngineConfig(model=str(directory), dtype=dtype, block_size=BLOCK, num_kv_blocks=40, exact=True)
    return open_quietly(config, NARROW)


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_bit_of_any_logit(rank: Rank, seed: int) -> None:
    asked = random_trace(seed, VOCAB_SIZE, BLOCK)
    expected = one_at_a_time(rank, asked, num_blocks=40)
    longest = max(len(one.prompt) + one.params.max_tokens for one in asked)
    tight = -(-longest // BLOCK) + 1
    for schedule in (
        Schedule(budget=BLOCK * 4, num_blocks=40),
        Schedule(budget=BLOCK + 1, num_blocks=tight),
        Schedule(budget=200, num_blocks=tight, max_num_seqs=3, prefix_cache=False),
    ):
        difference = first_difference(expected, replay(rank, asked, schedule))
        assert difference is None, f"trace {seed}, {schedule}: {difference}"
