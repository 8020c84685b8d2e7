"""Random pauses, so that retries that began together do not stay together."""

from __future__ import annotations

import random


def jittered(seconds: float) -> float:
    """`seconds` and up to a fifth more."""
    return seconds * (1 + 0.2 * random.random())  # noqa: S311 - keeps no secret
