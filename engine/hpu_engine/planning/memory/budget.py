"""Which settings of a step make sense together: `chunkedPrefill.maxBatchedTokens` and what it is measured against.

Rules: a budget below the block size cuts prompts inside blocks all the time; below the number of sequences it starves
decoding rows; above what all sequences can hold it only makes buckets larger. A model length beyond the model's
positions gives wrong rotary angles; beyond the cache it can never be served.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpu_engine.planning.memory.plan import MemoryPlan
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.shapes.limits import StepLimits
from hpu_engine.planning.violations import Violation

BUDGET = "chunkedPrefill.maxBatchedTokens"
MODEL_LENGTH = "maxModelLen"
SEQUENCES = "maxNumSeqs"
BLOCK_SIZE = "blockSize"
KV_BLOCKS = "numKvBlocks"
KV_MEMORY = "kvCacheMemory"
WEIGHTS = "weights"
MOST_SEQUENCES = 4096
MOST_BUDGET = 1 << 20


def limit_violations(model: ModelDescription, limits: StepLimits) -> tuple[Violation, ...]:
    """Rules that the settings break by themselves, before any memory is counted."""
    return tuple(_limits(model, limits))


def budget_violations(limits: StepLimits) -> tuple[Violation, ...]:
    """Rules of the budget against the other settings alone; every size of `limits` is positive."""
    return tuple(_budget(limits))


def memory_violations(limits: StepLimits, memory: MemoryPlan) -> tuple[Violation, ...]:
    """Rules that the settings break on this card."""
    return tuple(_memory(limits, memory))


def _limits(model: ModelDescription, limits: StepLimits) -> Iterator[Violation]:
    sizes = (
        (BLOCK_SIZE, limits.block_size, 1, 1024),
        (SEQUENCES, limits.max_num_seqs, 1, MOST_SEQUENCES),
        # A prompt of one token and its answer.
        (MODEL_LENGTH, limits.max_model_len, 2, model.max_positions),
        (BUDGET, limits.max_batched_tokens, 1, MOST_BUDGET),
    )
    outside = False
    for field, value, least, most in sizes:
        if not least <= value <= most:
            outside = True
            message = f"must lie between {least} and {most}"
            yield Violation(field, "range", value, message, (min(max(value, least), most),))
    if outside:
        return
    yield from _budget(limits)


def _budget(limits: StepLimits) -> Iterator[Violation]:
    budget, size = limits.max_batched_tokens, limits.block_size
    least = max(size, limits.max_num_seqs)
    most = limits.max_num_seqs * limits.max_model_len
    if budget < size:
        yield Violation(BUDGET, "block-size", budget, f"below the block size {size}", (_up(least, size),))
    if budget < limits.max_num_seqs:
        message = f"below {SEQUENCES} {limits.max_num_seqs}: running requests would wait for each other's tokens"
        yield Violation(BUDGET, "sequences", budget, message, (_up(least, size),))
    if budget > most >= least:
        message = f"above what all sequences hold, {SEQUENCES} x {MODEL_LENGTH} = {most}"
        yield Violation(BUDGET, "usable", budget, message, (most // size * size or most,))
    elif budget >= least and budget % size and budget != most:
        message = f"not a multiple of the block size {size}: every chunk but the last would be cut shorter"
        below, above = budget // size * size, _up(budget, size)
        nearest = tuple(value for value in (below, above) if least <= value <= most)
        yield Violation(BUDGET, "block-multiple", budget, message, nearest or (least,))


def _memory(limits: StepLimits, memory: MemoryPlan) -> Iterator[Violation]:
    if memory.fits:
        return
    if limits.kv_blocks is not None and memory.free_bytes < 0:
        missing = -(memory.free_bytes // memory.kv_block_bytes)
        nearest = limits.kv_blocks - missing
        valid = (nearest,) if nearest >= memory.blocks_needed else ()
        yield Violation(KV_BLOCKS, "memory", limits.kv_blocks, "more blocks than the card holds", valid)
        return
    if memory.kv_blocks:
        message = f"one request needs {memory.blocks_needed} KV blocks, there is room for {memory.kv_blocks}"
        yield Violation(MODEL_LENGTH, "memory", limits.max_model_len, message, (memory.kv_tokens,))
        return
    visible = memory.visible_bytes or 0
    without_cache = visible - memory.reserve_bytes - memory.weight_bytes
    if without_cache > memory.kv_block_bytes and memory.activations.bytes > without_cache // 2:
        message = f"the largest step needs {memory.activations.bytes} bytes, weights leave {without_cache}"
        smaller = limits.max_batched_tokens // 2 // limits.block_size * limits.block_size
        least = max(limits.block_size, limits.max_num_seqs)
        valid = (smaller,) if smaller >= least else ()
        yield Violation(BUDGET, "memory", limits.max_batched_tokens, message, valid)
        return
    room = visible - memory.reserve_bytes - memory.activations.bytes
    message = f"weights need {memory.weight_bytes} bytes of a card, reserve and largest step leave {room}"
    yield Violation(WEIGHTS, "memory", memory.weight_bytes, message)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
