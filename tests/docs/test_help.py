"""`--help` in a terminal of 80 columns: no flag is cut, no bracket is eaten."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

PROGRAMS = {"hpu_engine.cli": "main", "hpu_operator.cli": "app"}


def commands() -> Iterator[tuple[str, tuple[str, ...], frozenset[str]]]:
    """Module of the program, words of the command, its flags."""
    for module, name in PROGRAMS.items():
        group: Any = typer.main.get_command(getattr(importlib.import_module(module), name))
        context = typer.Context(group)
        yield module, (), flags_of(group)
        for word in group.list_commands(context):
            yield module, (word,), flags_of(group.get_command(context, word))


def flags_of(command: Any) -> frozenset[str]:
    return frozenset(
        flag for option in command.params for flag in (*option.opts, *option.secondary_opts) if "-" in flag
    )


def shown_help(module: str, *words: str) -> str:
    program = f"from {module} import {PROGRAMS[module]} as program; program()"
    command = [sys.executable, "-c", program, *words, "--help"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.parametrize(("module", "words", "flags"), [*commands()])
def test_every_flag_is_whole_at_80_columns(module: str, words: tuple[str, ...], flags: frozenset[str]) -> None:
    shown = shown_help(module, *words)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert flags <= set(re.findall(r"(?<![\w-])--[\w-]+", shown))


def test_brackets_in_a_help_are_kept() -> None:
    assert "[[prompt, output], ...] in tokens" in " ".join(shown_help("hpu_engine.cli", "plan").split())
