"""The block pool: references, order of reuse, and a prefix cache that a colliding digest cannot fool."""

from __future__ import annotations

import pytest

from hpu_engine.scheduling.kv_blocks import BlockPool, chain_digest, root_digest

ROOT = root_digest("model", "")


def register_chain(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks written with `tokens` (full blocks only) and registered."""
    size = pool.block_size
    blocks, parent = pool.allocate(len(tokens) // size), ROOT
    for index, block in enumerate(blocks):
        part = tokens[index * size : (index + 1) * size]
        digest = chain_digest(parent, part)
        pool.register(block, digest, parent, part)
        parent = digest
    return blocks


def match(pool: BlockPool, tokens: list[int]) -> list[int]:
    size, parent, digests = pool.block_size, ROOT, []
    for index in range(len(tokens) // size):
        parent = chain_digest(parent, tokens[index * size : (index + 1) * size])
        digests.append(parent)
    return pool.match(ROOT, digests, tokens)


def test_scratch_is_never_handed_out_and_low_numbers_come_first() -> None:
    pool = BlockPool(4, 2)
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.release([3, 2])
    assert pool.allocate(1) == [2]


def test_a_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(4, 2)
    blocks = register_chain(pool, [1, 2, 3, 4])
    pool.share(match(pool, [1, 2, 3, 4]))
    pool.release(blocks)
    pool.check_integrity([blocks])
    assert pool.num_used == 2
    pool.release(blocks)
    assert pool.num_used == 0
    with pytest.raises(AssertionError, match="given back twice"):
        pool.release(blocks)


def test_the_least_recently_used_leaf_is_forgotten_first() -> None:
    pool = BlockPool(4, 2)
    old, new = register_chain(pool, [1, 2, 3, 4]), register_chain(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert match(pool, [1, 2, 3, 4]) == old[:1]
    pool.allocate(1)
    assert match(pool, [1, 2, 3, 4]) == []
    assert match(pool, [5, 6, 7, 8]) == new


def test_a_match_makes_a_block_recent_again() -> None:
    pool = BlockPool(2, 2)
    first, second = register_chain(pool, [1, 2]), register_chain(pool, [3, 4])
    pool.release(first)
    pool.release(second)
    again = match(pool, [1, 2])
    pool.share(again)
    pool.release(again)
    pool.allocate(1)
    assert match(pool, [3, 4]) == []
    assert match(pool, [1, 2]) == first


def test_a_colliding_digest_is_a_miss() -> None:
    """Digests are forced to be equal: the tokens, and the parent, still tell the blocks apart."""
    pool = BlockPool(4, 2)
    block, child = pool.allocate(2)
    pool.register(block, b"same", ROOT, [1, 2])
    assert pool.match(ROOT, [b"same"], [1, 2]) == [block]
    assert pool.match(ROOT, [b"same"], [9, 9]) == []
    pool.register(child, b"child", b"same", [3, 4])
    assert pool.match(b"another root", [b"child"], [3, 4]) == []


def test_only_a_full_block_can_be_registered() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="full block"):
        pool.register(block, b"x", ROOT, [1, 2])


def test_roots_differ_by_model_and_by_salt() -> None:
    roots = {
        root_digest("a", ""),
        root_digest("b", ""),
        root_digest("a", "b"),
        root_digest("ab", ""),
        root_digest("", "ab"),
    }
    assert len(roots) == 5
