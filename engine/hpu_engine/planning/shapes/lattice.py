"""The sizes that buckets are chosen from: dense where sizes are small, a fixed number for each doubling above.

Invariant: a lattice starts at the smallest size, ends exactly at the largest, and is strictly increasing.
"""

from __future__ import annotations

from hpu_engine.planning.shapes.limits import Kind, StepLimits

FLAT_STEPS, SAMPLER_STEPS = 16, 8
QUERY_STEPS, CONTEXT_STEPS = 4, 2
ROW_STEPS, BLOCK_STEPS = 2, 4


def doubling_lattice(most: int, *, steps: int, least: int = 1) -> tuple[int, ...]:
    """`least`, ..., `most` with `steps` values for each doubling; every whole number where that is finer than 1."""
    values: list[int] = []
    value = min(least, most)
    while value < most:
        values.append(value)
        value += max(1, (1 << (value.bit_length() - 1)) // steps)
    return (*values, most)


def lattices(kind: Kind, limits: StepLimits, recipes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The candidate values of both sizes of `kind`: finer where `recipes` are many, or they could not be spent."""
    finer = 1 if recipes <= 300 else 2 if recipes <= 1000 else 4
    first, second = limits.largest(kind)
    match kind:
        case Kind.FLAT:
            return doubling_lattice(first, steps=FLAT_STEPS * finer), (0,)
        case Kind.SAMPLER:
            return doubling_lattice(first, steps=SAMPLER_STEPS), (0,)
        case Kind.PREFILL:
            context = (0, *doubling_lattice(second, steps=CONTEXT_STEPS * finer)) if second else (0,)
            return doubling_lattice(first, steps=QUERY_STEPS * finer, least=16), context
        case Kind.DECODE:
            return doubling_lattice(first, steps=ROW_STEPS), doubling_lattice(second, steps=BLOCK_STEPS * finer)
