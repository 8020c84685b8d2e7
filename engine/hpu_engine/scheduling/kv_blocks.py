"""The pool of KV blocks of one rank: who holds which block, and which full blocks can be shared. Torch-free.

Owns: reference counts, the free blocks, the prefix cache. Blocks are numbered 1..num_blocks; block 0 is scratch, is
never handed out, and is where padding writes.

Prefix cache. A block is registered once every slot of it has been written. Its digest chains its tokens to the digest
of the block before it, seeded per model and salt; on a hit the token ids and the parent's digest are compared, so a
colliding digest is a miss and never a wrong answer. A registered block whose last holder leaves stays in an LRU of
reusable blocks. A table is given back from its end, so that a chain loses its leaves before its root.

Policy for a new block: never-registered ones first, lowest number first (which keeps the blocks in use dense), then the
least recently used registered one, which is forgotten.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

SCRATCH_BLOCK = 0
_DIGEST_BYTES = 16


def root_digest(seed: str, salt: str) -> bytes:
    """Where the chains of one model and one salt begin."""
    return hashlib.blake2b(f"{len(seed)}:{seed}{salt}".encode(), digest_size=_DIGEST_BYTES).digest()


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of one full block that follows the chain `parent`."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


class BlockPool:
    """`allocate`, `share`, `release`; `register` and `match` for the prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._references = [0] * (num_blocks + 1)
        self._fresh = list(range(1, num_blocks + 1))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._entries: dict[int, _Entry] = {}
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._fresh) + len(self._reusable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each. The caller has looked at `num_free` first."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        blocks = []
        for _ in range(count):
            if self._fresh:
                block = heapq.heappop(self._fresh)
            else:
                block, _ = self._reusable.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks`, which `match` has just returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._reusable[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a table, last block first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is given back twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._entries:
                    self._reusable[block] = None
                else:
                    heapq.heappush(self._fresh, block)

    def register(self, block: int, digest: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """`block` is completely written with `tokens`. A digest that is already known keeps its first block."""
        if not self.prefix_cache or digest in self._by_digest:
            return
        assert len(tokens) == self.block_size, "only a full block can be shared"
        self._by_digest[digest] = block
        self._entries[block] = _Entry(digest, parent, tuple(tokens))

    def match(self, root: bytes, digests: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """Blocks that already hold the longest known chain of leading full blocks of `tokens`."""
        found: list[int] = []
        parent = root
        for index, digest in enumerate(digests):
            block = self._by_digest.get(digest)
            if block is None:
                break
            entry = self._entries[block]
            start = index * self.block_size
            if entry.parent != parent or entry.tokens != tuple(tokens[start : start + self.block_size]):
                break
            found.append(block)
            parent = digest
        return found

    def num_reusable(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds: sharing them takes that many from `num_free`."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def is_shareable(self, block: int) -> bool:
        return block in self._entries

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Recount every block against the tables of all live requests. Raises AssertionError."""
        held: dict[int, int] = {}
        for table in tables:
            assert len(set(table)) == len(table), "a table holds one block twice"
            for block in table:
                held[block] = held.get(block, 0) + 1
        assert SCRATCH_BLOCK not in held, "scratch is in a table"
        assert all(self._references[block] == held.get(block, 0) for block in range(1, self.num_blocks + 1))
        assert all(count == 1 or block in self._entries for block, count in held.items()), (
            "an unfinished block is shared"
        )
        free = set(self._fresh) | set(self._reusable)
        assert len(free) == self.num_free, "a block is free twice"
        assert not free & set(held), "a held block is free"
        assert len(free) + len(held) == self.num_blocks, "a block is lost"
        assert set(self._reusable) <= set(self._entries)
        assert not set(self._fresh) & set(self._entries)
        assert {entry.digest: block for block, entry in self._entries.items()} == self._by_digest

    def _forget(self, block: int) -> None:
        entry = self._entries.pop(block)
        del self._by_digest[entry.digest]
