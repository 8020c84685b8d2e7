"""The worked examples of the documentation are what the planner prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpu_engine.cli.plan import app
from tests.planning.facts import published_configs

DOCUMENT = Path(__file__).parents[2] / "docs" / "planning.md"
EXAMPLES = re.findall(r"<!-- example: (\S+) (.*?) -->\n```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.parametrize(("model", "arguments", "shown"), EXAMPLES)
def test_every_line_of_an_example_is_printed(model: str, arguments: str, shown: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(published_configs()[model]))
    printed = CliRunner().invoke(app, ["--config", str(config), *arguments.split()]).output.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3
