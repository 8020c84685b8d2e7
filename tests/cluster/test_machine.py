"""What the machine lacks is said at once, all of it, with how to get it, before anything long starts."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import machine
from tests.cluster import state

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def bare_path(tmp_path: Path) -> str:
    """A PATH with what `make` itself needs, and nothing of what the tests do."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "make", "env", "date"):
        (tools / name).symlink_to(str(shutil.which(name)))
    return str(tools)


def test_make_stops_before_the_set_up_and_names_everything(bare_path: str, tmp_path: Path) -> None:
    """In a copy without an environment: its set-up is what must not begin."""
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests" / "machine.py", tmp_path / "tests")
    (tmp_path / "tests" / "__init__.py").touch()
    environment = {"PATH": bare_path, "HOME": str(tmp_path), "HPU_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [f"{bare_path}/make", "test", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "missing: Go 1.26 or newer (found: none)" in done.stderr
    assert "make system-packages" in done.stderr
    # /sbin and /usr/sbin count even where PATH does not name them.
    named = next(line for line in done.stderr.splitlines() if "C compiler" in line)
    assert {"buildah", "util-linux"} <= set(named.replace(",", " ").split())
    assert "set-up" not in done.stdout
    assert not (tmp_path / ".venv").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("target", ["test", "demo", "down", "clean", "system-packages", "lock"])
def test_make_says_that_there_is_no_python(bare_path: str, tmp_path: Path, target: str) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    environment = {"PATH": bare_path, "HOME": str(tmp_path)}
    done = subprocess.run(
        [f"{bare_path}/make", target], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "missing: Python 3.11 or 3.12 (python3 is not there)" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"Makefile", "tools"}


def test_make_does_not_take_the_python_of_its_own_environment(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    own = tmp_path / ".venv" / "bin"
    own.mkdir(parents=True)
    for name in ("python3.11", "python3"):
        (own / name).symlink_to(sys.executable)
    printed = subprocess.run(
        ["make", "--silent", "--eval", "which: ; @echo $(PYTHON)", "which"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{own}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert printed
    assert not printed.startswith(str(own))


def test_a_python_without_venv_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.missing_for_set_up() == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "venv" in machine.missing_for_set_up()[0].what


def test_an_older_python_is_named_by_itself() -> None:
    """What runs before the version is judged is older than what we ask for: no syntax and no call of newer ones."""
    tree = ast.parse((REPOSITORY / "tests" / "machine.py").read_text(), feature_version=(3, 8))
    imported = {
        name.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize("given", ["", "here"])
def test_where_the_caches_are_is_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("HPU_CACHE", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    expected = tmp_path / (given or ".cache/hpu-inference")
    assert machine.cache_folder() == expected
    printed = subprocess.run(
        ["make", "--silent", "--eval", "where: ; @echo $$HPU_CACHE $(UV)", "-f", REPOSITORY / "Makefile", "where"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert printed[0] == str(expected)
    assert printed[1].startswith(f"{expected}/uv-")


def said(node: bool) -> dict[str, str]:
    return {item.what: item.remedy for item in machine.missing(node=node)}


def test_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert said(node=False)["Python 3.11 or 3.12 (this is 3.13)"].startswith("set PYTHON=python3.11")


@pytest.mark.parametrize(("printed", "found"), [("go version go1.21.3 linux/amd64", "1.21"), ("what?", "none")])
def test_an_old_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, found: str) -> None:
    go = tmp_path / "go"
    go.write_text(f"#!/bin/sh\necho '{printed}'\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert f"Go 1.26 or newer (found: {found})" in said(node=False)


def test_a_small_disk_is_named_until_the_builds_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPU_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 1024**3))
    [(what, remedy)] = [(what, remedy) for what, remedy in said(node=True).items() if "disk" in what]
    # A control plane needs little, and what has been built already nothing more.
    assert not [what for what in said(node=False) if "disk" in what]
    assert "3 of 40 GiB free" in what
    assert "HPU_CACHE" in remedy
    (machine.cache_folder() / "bin").mkdir(parents=True)
    assert not [what for what in said(node=True) if "disk" in what]


def test_whoever_is_not_root_is_told_for_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert any(what.startswith("root") for what in said(node=True))
    assert not any(what.startswith("root") for what in said(node=False))


def test_the_packages_are_printed_for_apt() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.machine", "--packages"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"buildah", "libseccomp-dev", "containernetworking-plugins"} <= set(done.stdout.split())


def test_make_down_keeps_the_caches_and_clean_removes_them(tmp_path: Path) -> None:
    """In a copy with half an environment, as an interrupted set-up leaves it: what is to go is removed without."""
    for name in ("Makefile", "tests"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/usr/bin/false")
    cache, clusters = tmp_path / "cache", state.root_of_test()
    for folder in (cache / "bin", cache / "uv-1", cache / "thesis", clusters / "left" / "run"):
        folder.mkdir(parents=True)
    (cache / "thesis" / "chapter").write_text("HPU_CACHE may name a disk that holds other things")
    (clusters / "left" / "cluster.json").write_text("{}")
    environment = os.environ | {"HPU_CACHE": str(cache), "HPU_CLUSTERS": str(clusters)}

    def make(target: str) -> str:
        done = subprocess.run(
            ["make", target], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    try:
        assert "cluster left: removed" in make("down")
        assert not clusters.exists()
        assert (cache / "bin").exists()
        make("clean")
        assert [path.name for path in cache.iterdir()] == ["thesis"]
        assert not (tmp_path / ".venv").exists()
        make("down")
        shutil.rmtree(cache / "thesis")
        make("clean")
        assert not cache.exists()
    finally:
        shutil.rmtree(clusters, ignore_errors=True)
