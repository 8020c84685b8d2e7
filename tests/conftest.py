"""Fixtures of every room, by plugin, so that no test has to know where one lives."""

from __future__ import annotations

pytest_plugins = ["tests.side_by_side", "tests.cluster.fixtures", "tests.models.fixtures"]
