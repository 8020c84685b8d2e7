"""What a request may change about one row of logits before a token is chosen, in the order in which it is done.

1. `logit_bias` is added. 2. Stop tokens cannot be chosen before `min_tokens` tokens were. 3. `repetition_penalty`
(Keskar et al. 2019, over prompt and output), then `presence_penalty` and `frequency_penalty` (OpenAI's, over the
output).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpu_engine.device.base import HOST
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.token_counts import TokenCounts


def adjust_logits(
    logits: Tensor, params: SamplingParams, tokens: Sequence[int], prompt_len: int, counts: TokenCounts
) -> None:
    """Changes `logits` [vocab] in place; `tokens` are all before the one to choose, the prompt first.

    `counts` are of the same tokens, as far as they were needed yet.
    """
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias.items(), strict=True)
        logits[torch.tensor(ids, device=HOST)] += torch.tensor(biases, dtype=logits.dtype, device=HOST)
    if len(tokens) - prompt_len < params.min_tokens and params.stop_token_ids:
        logits[torch.tensor(params.stop_token_ids, device=HOST)] = float("-inf")
    if params.repetition_penalty == 1.0 and not (params.presence_penalty or params.frequency_penalty):
        return
    counts.count(tokens, prompt_len)
    # Copies: an array cannot grow while something looks into it.
    seen = torch.from_numpy(np.array(counts.ids))
    values = logits[seen]
    if params.repetition_penalty != 1.0:
        values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        times = torch.from_numpy(np.array(counts.times)).to(logits.dtype)
        values -= torch.where(times > 0, params.presence_penalty + params.frequency_penalty * times, 0.0)
    logits[seen] = values
