"""Steps padded to the planned buckets: the same bits, and no shape that warm-up did not run."""

from __future__ import annotations

import random

import pytest

from hpu_engine.config import EngineConfig
from hpu_engine.device import cpu
from hpu_engine.rank import Rank
from tests.engine.direct import open_quietly
from tests.engine.trace import Schedule, first_difference, one_at_a_time, random_trace, replay
from tests.models.tiny import tiny

BLOCK = 16
VOCAB = 320
CASES = [("llama", "float32"), ("llama", "bfloat16"), ("ernie4_5_moe", "float32"), ("ernie4_5_moe", "bfloat16")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def ranks(request: pytest.FixtureRequest) -> tuple[Rank, Rank]:
    """One rank with exact shapes and one that is forced into buckets, computed in the type itself."""
    family, dtype = request.param
    config = EngineConfig(
        model=str(tiny(family, dtype=dtype)), dtype=dtype, block_size=BLOCK, num_kv_blocks=40, exact=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "multiplies_bfloat16", lambda: True)
        import msgspec

        return open_quietly(config), open_quietly(msgspec.structs.replace(config, force_buckets=True))


@pytest.mark.parametrize("seed", range(4))
def test_padding_changes_no_bit_of_any_logit(ranks: tuple[Rank, Rank], seed: int) -> None:
    exact, forced = ranks
    asked = random_trace(seed, VOCAB, BLOCK)
    expected = one_at_a_time(exact, asked, num_blocks=40)
    chance = random.Random(seed)
    longest = max(len(one.prompt) + one.params.max_tokens for one in asked)
    tight = -(-longest // BLOCK) + chance.randint(0, 2)
    for schedule in (
        Schedule(budget=BLOCK * 4, num_blocks=40, force_buckets=True),
        Schedule(budget=chance.choice([1, BLOCK - 1, BLOCK, BLOCK + 1]), num_blocks=tight, force_buckets=True),
        Schedule(budget=200, num_blocks=tight, max_num_seqs=chance.randint(1, 4), prefix_cache=False, force_buckets=True),
    ):
        found = replay(forced, asked, schedule)
        difference = first_difference(expected, found)
        assert difference is None, f"trace {seed}, {schedule}: {difference}"
        assert found.first_seen_shapes == 0
