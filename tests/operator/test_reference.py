"""The generated pages of the reference are checked in and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpu_operator.api.crd import crd_yaml, structural_schema
from hpu_operator.api.inference import Spec
from hpu_operator.api.reasons import Reason
from hpu_operator.api.reference import field_reference, reason_catalogue
from hpu_operator.cli import app
from tests.operator.test_crd import properties

PAGES = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize(("page", "text"), [("fields", field_reference()), ("reasons", reason_catalogue())])
def test_the_checked_in_page_is_the_generated_one(page: str, text: str) -> None:
    assert (PAGES / f"{page}.md").read_text() == text, f"run: hpu-operator reference {page} > docs/reference/{page}.md"


def test_every_field_has_a_line() -> None:
    text = field_reference()
    for path, node in properties(structural_schema(Spec), "spec"):
        if not path.endswith("[]"):
            assert re.search(re.escape(path.replace("[]", "@")).replace("@", r"(\[\]|\{\})"), text), path
            assert node["description"].replace("|", "\\|") in text, path


def test_every_reason_has_a_line() -> None:
    for reason in Reason:
        assert f"| `{reason.value}` |" in reason_catalogue()


def test_the_command_prints_what_is_checked_in() -> None:
    run = CliRunner()
    assert run.invoke(app, ["crd"]).output == crd_yaml()
    assert run.invoke(app, ["reference", "fields"]).output == field_reference()
    assert run.invoke(app, ["reference", "reasons"]).output == reason_catalogue()
