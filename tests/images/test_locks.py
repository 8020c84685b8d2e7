"""The locks that images and environments are made from have what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.images.build import ROOT

EXTRAS = ("operator", "engine", "cpu", "dev")


def asked(extra: str) -> list[Requirement]:
    """What an extra names itself, and by the other extras that it is made of."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = []
    for requirement in map(Requirement, project["optional-dependencies"][extra]):
        if requirement.name == project["name"]:
            found += [one for other in sorted(requirement.extras) for one in asked(other)]
        else:
            found.append(requirement)
    return [*found, *map(Requirement, project["dependencies"])]


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_lock_has_what_its_extra_asks_for(extra: str) -> None:
    """A change of pyproject.toml without `make lock` is seen here, before an environment lacks something."""
    text = (ROOT / "requirements" / f"{extra}.txt").read_text()
    locked = {
        name: Version(version) for name, version in re.findall(r"^([a-z0-9-]+)==([^ ;\\\n]+)", text, re.MULTILINE)
    }
    wrong = [
        str(requirement)
        for requirement in asked(extra)
        if (version := locked.get(requirement.name)) is None or version not in requirement.specifier
    ]
    assert wrong == [], "make lock"


def test_locks_have_hashes_and_no_addresses() -> None:
    for extra in EXTRAS:
        text = (ROOT / "requirements" / f"{extra}.txt").read_text()
        assert "://" not in text
        assert len(re.findall(r"^\S+==", text, re.MULTILINE)) <= text.count("--hash=sha256:")
