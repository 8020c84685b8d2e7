"""A rank opened in the test's own process, and plain ways to run requests on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest

from hpu_engine.planning.cards import Processor
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.wire.messages import Submit
from hpu_engine.worker import start_up
from hpu_engine.worker.start_up import Rank, open_rank

NARROW = Processor(bfloat16=True)
"""A processor on which bfloat16 is computed as such."""


def open_quietly(config: EngineConfig, processor: Processor | None = None) -> Rank:
    """Loaded, not warmed: tests choose their own shapes. `processor`: settled as on that one."""
    with pytest.MonkeyPatch.context() as patch:
        if processor is not None:
            patch.setattr(start_up, "read_processor", lambda: processor)
        return open_rank(config, lambda _progress: None)


def run_together(
    rank: Rank, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """Output tokens of each prompt, all submitted before the first step; every step is checked for lost blocks."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        refused = rank.loop.submit(Submit(request_id=str(index), prompt_token_ids=tuple(prompt), params=own))
        assert refused is None, refused
    outputs: Mapping[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    while rank.loop.has_work:
        result = rank.loop.step()
        assert not result.rejected
        rank.loop.scheduler.check_integrity()
        for row in result.outputs:
            outputs[row.request_id].extend(row.token_ids)
    return list(outputs.values())


def run_alone(rank: Rank, prompts: Iterable[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """The same, one request at a time."""
    return [run_together(rank, [prompt], params)[0] for prompt in prompts]
