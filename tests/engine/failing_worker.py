"""The real worker, in which choosing the third token raises for one seed: the trouble of a single row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hpu_engine import worker
from hpu_engine.server.jobs import sample_seed

SEED = 666
BAD_SEED = sample_seed(SEED, 1)
"""The second sample's of a request with `SEED`."""


def apply_policy_and_break_the_sampler() -> bool:
    """torch may be imported only behind the policy, and the sampler imports it."""
    in_time = apply_thread_policy()
    from hpu_engine.core import loop

    sample = loop.sample

    def sample_or_raise(logits: Any, draws: Sequence[Any]) -> Any:
        if any(draw.seed == BAD_SEED and len(draw.tokens) - draw.prompt_len == 2 for draw in draws):
            raise ZeroDivisionError("an own mistake")
        return sample(logits, draws)

    loop.sample = sample_or_raise  # type: ignore[assignment]
    return in_time


apply_thread_policy = worker.apply_thread_policy
worker.apply_thread_policy = apply_policy_and_break_the_sampler

if __name__ == "__main__":
    sys.exit(worker.main())
