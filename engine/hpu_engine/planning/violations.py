"""What a refusal looks like everywhere in planning: the rule, the value that broke it, what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Violation:
    """`field` is the setting's name as a user writes it; `nearest` are valid values, the closest ones first."""

    field: str
    rule: str
    value: int | str
    message: str
    nearest: tuple[int, ...] = ()

    def __str__(self) -> str:
        remedy = f"; nearest valid: {', '.join(map(str, self.nearest))}" if self.nearest else ""
        return f"{self.field}={self.value}: {self.message}{remedy}"


_FLAGS = {
    "chunkedPrefill.maxBatchedTokens": "--max-num-batched-tokens",
    "maxModelLen": "--max-model-len",
    "maxNumSeqs": "--max-num-seqs",
    "blockSize": "--block-size",
    "the block size": "--block-size",
    "numKvBlocks": "--num-kv-blocks",
    "kvCacheMemory": "--kv-cache-memory",
    "kvCache": "--kv-cache",
    "forceBuckets": "--force-buckets",
    "cardsPerPod": "--cards-per-pod",
}
_FLAGS_OF_FIELDS = {
    **{name: f"--{name}-parallel-size" for name in ("tensor", "data", "expert")},
    **{name: f"--{name}" for name in ("dtype", "exact", "kernels", "compile")},
}


def in_flags(violations: Iterable[Violation]) -> str:
    """The violations in the words of the engine's command line."""
    sentences = []
    for violation in violations:
        text = str(replace(violation, field=_FLAGS_OF_FIELDS.get(violation.field, violation.field)))
        for name, flag in _FLAGS.items():
            text = text.replace(name, flag)
        sentences.append(text)
    return "; ".join(sentences)


class PlanError(ValueError):
    """A plan was asked for that contradicts itself. Carries every violation found, not only the first."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(map(str, self.violations)))


def nearest_valid(value: int, valid: Callable[[int], bool], *, least: int = 1, most: int) -> tuple[int, ...]:
    """The closest value below and above `value` within `least..most` for which `valid` holds, the closer one first."""
    below = next((n for n in range(min(value - 1, most), least - 1, -1) if valid(n)), None)
    above = next((n for n in range(max(value + 1, least), most + 1) if valid(n)), None)
    found = [n for n in (below, above) if n is not None]
    return tuple(sorted(found, key=lambda n: abs(n - value)))
