"""The formatter, the linter and the strict type checker are tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import cache_folder

ROOT = Path(__file__).resolve().parents[2]
FILE_LIMIT_LINES = 450
# All packages in one run, and what is known of the libraries kept for the next checkout: reading those takes longest.
TYPED = ["-p", "hpu_engine", "-p", "hpu_operator", "-p", "tests", "--cache-dir", str(cache_folder() / "mypy")]


@pytest.mark.parametrize(
    "check",
    [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy", *TYPED]],
    ids=["format", "lint", "types"],
)
@pytest.mark.timeout(600)
def test_the_source_passes(check: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", *check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_a_file_is_a_room_of_at_most_450_lines() -> None:
    long = {
        str(file.relative_to(ROOT)): lines
        for folder in ("engine", "operator", "tests")
        for file in (ROOT / folder).rglob("*.py")
        if (lines := len(file.read_text().splitlines())) > FILE_LIMIT_LINES
    }
    assert long == {}


def test_locks_have_hashes_and_no_addresses() -> None:
    for lock in sorted((ROOT / "requirements").glob("*.txt")):
        text = lock.read_text()
        assert "--hash=sha256:" in text, lock
        assert "://" not in text, f"{lock.name} records a download address"
