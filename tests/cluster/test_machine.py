"""What the machine lacks is said at once, all of it, with how to get it, before anything long starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import machine

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def bare_path(tmp_path: Path) -> str:
    """A PATH with what `make` itself needs, and nothing of what the tests do."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "make", "env"):
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
    assert {"git", "openssl", "buildah", "util-linux"} <= set(named.replace(",", " ").split())
    assert "set-up" not in done.stdout
    assert not (tmp_path / ".venv").exists()
    assert not (tmp_path / "cache").exists()


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
    [(what, remedy)] = [(what, remedy) for what, remedy in said(node=False).items() if "disk" in what]
    assert "3 of 40 GiB free" in what
    assert "HPU_CACHE" in remedy
    (machine.cache_folder() / "bin").mkdir(parents=True)
    assert not [what for what in said(node=False) if "disk" in what]


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
    """In a copy, with an environment that is a script: what is to go is removed by this checkout's own launcher."""
    for name in ("Makefile", "tests"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cache, clusters = tmp_path / "cache", Path(f"/tmp/hpu-make-{os.getpid()}")
    for folder in (cache / "bin", cache / "uv", clusters / "left" / "run"):
        folder.mkdir(parents=True)
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
        assert not cache.exists()
        assert not (tmp_path / ".venv").exists()
        assert "nothing is set up here" in make("down"), "and once more"
    finally:
        shutil.rmtree(clusters, ignore_errors=True)
