"""The `hpu-operator` command."""

from __future__ import annotations

from hpu_operator.cli import app


def main() -> None:
    app()
