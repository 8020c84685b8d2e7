"""Old versions of programs go, those that somebody runs or used lately stay."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import build, modules, pruning
from tests.cluster.modules import Module, Program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def version(folder: Path, name: str, used: float, *programs: str) -> Path:
    place = folder / name
    place.mkdir()
    for program in programs:
        shutil.copy("/bin/sleep", place / program)
    os.utime(place, (used, used))
    return place


def test_of_each_set_of_programs_the_folders_used_last_stay(folder: Path) -> None:
    for number in range(5):
        version(folder, f"a{number}", 1000 + number, "etcd", "kubectl")
        version(folder, f"set-{number}", 1000 + number, "etcd", "kubectl")
    version(folder, "b", 10, "helm")
    pruning.note_use(folder / "a0")
    said: list[str] = []
    pruning.prune(folder, said.append, keep=2)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"a0", "a4", "b", "set-3", "set-4"}
    assert len(said) == 1
    assert "removed 6 old versions" in said[0]
    assert "a1" in said[0]
    assert pruning.prune(folder, said.append, keep=2) == []
    assert len(said) == 1


def test_what_a_process_runs_stays_under_all_its_names(folder: Path) -> None:
    old = version(folder, "old", 1, "etcd")
    linked = folder / "set-old"
    linked.mkdir()
    os.link(old / "etcd", linked / "etcd")
    os.utime(linked, (1, 1))
    version(folder, "new", 2, "etcd")
    version(folder, "set-new", 2, "etcd")
    running = subprocess.Popen([linked / "etcd", "60"])
    try:
        assert pruning.prune(folder, print, keep=1) == []
    finally:
        running.kill()
        running.wait()
    assert {path.name for path in pruning.prune(folder, print, keep=1)} == {"old", "set-old"}


def test_what_is_being_built_or_looked_at_stays(folder: Path) -> None:
    old = version(folder, "old", 1, "etcd")
    version(folder, "new", 2, "etcd")
    with (old / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(old, (1, 1))
        assert pruning.prune(folder, print, keep=1) == []
    other = "import sys; from pathlib import Path; from tests.cluster import pruning\n"
    other += "with pruning.using(Path(sys.argv[1])): print('looking', flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", other, str(folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as looking:
        assert looking.stdout
        assert looking.stdout.readline() == b"looking\n"
        assert pruning.prune(folder, print, keep=1) == []
        looking.communicate()
    assert pruning.prune(folder, print, keep=1) == [old]


def test_a_new_set_of_programs_makes_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HPU_CACHE", str(tmp_path))
    source = tmp_path / "hello"
    source.mkdir()
    (source / "go.mod").write_text("module example.test/hello\n\ngo 1.26\n")
    (source / "go.sum").touch()
    (source / "main.go").write_text("package main\n\nfunc main() {}\n")
    program = Program("greet", "example.test/hello")
    said: list[str] = []
    for number in range(pruning.KEPT_VERSIONS + 2):
        module = Module("hello", source, ("-ldflags", f"-X main.version={number}"), {"CGO_ENABLED": "0"})
        monkeypatch.setattr(modules, "needed", lambda *, module=module, **_: [(module, (program,))])
        newest = build.cluster_binaries(nodes=False, listener=said.append)
        assert (newest / "greet").exists()
    left = [path.name for path in folder.iterdir() if path.is_dir()]
    assert len(left) == 2 * pruning.KEPT_VERSIONS
    assert newest.name in left
    assert any("removed" in line for line in said)
    before = list(said)
    assert build.cluster_binaries(nodes=False, listener=said.append) == newest
    assert said == before
