"""Fixtures of every room, by plugin, so that no test has to know where one lives."""

from __future__ import annotations

pytest_plugins = ["tests.cluster.fixtures", "tests.models.fixtures"]
