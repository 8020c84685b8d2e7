"""The real worker, in which choosing the third token raises for one seed: the trouble of a single row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hpu_engine.server.requests.sequence_request import sample_seed
from hpu_engine.worker import main as worker
from hpu_engine.worker.threads import apply_thread_policy

SEED = 666
BAD_SEED = sample_seed(SEED, 1)
"""The second sample's of a request with `SEED`."""


def break_the_sampler() -> None:
    """To be called once torch may be imported."""
    from hpu_engine.step import loop, sampler

    def sample_or_raise(logits: Any, draws: Sequence[Any]) -> Any:
        if any(draw.seed == BAD_SEED and len(draw.tokens) - draw.prompt_len == 2 for draw in draws):
            raise ZeroDivisionError("an own mistake")
        return sampler.sample(logits, draws)

    setattr(loop, "sample", sample_or_raise)  # noqa: B010  # the loop's own name for it


def apply_policy_and_break_the_sampler(pod_workers: int) -> bool:
    in_time = apply_thread_policy(pod_workers)
    break_the_sampler()
    return in_time


if __name__ == "__main__":
    setattr(worker, "apply_thread_policy", apply_policy_and_break_the_sampler)  # noqa: B010  # see above
    sys.exit(worker.main())
