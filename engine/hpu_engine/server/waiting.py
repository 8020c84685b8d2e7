"""Waiting for the first of several things, or for one thing within a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Until one of these is done; the others are cancelled. Raises the error of one that is done."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` was done in time; it is cancelled otherwise."""
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def background(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """These run while the block does, and are cancelled with it."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
