"""`make test` runs every test there is."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_of_tests_is_run() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {str(file.parent.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    assert folders - set(settings["testpaths"]) == set()
