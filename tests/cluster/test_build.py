"""Building: once per checksum, whole or not at all, one builder at a time. With a program of two lines, to be quick."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import build, modules
from tests.cluster.errors import BuildFailed
from tests.cluster.modules import Module, Program
from tests.machine import cache_folder

REPOSITORY = Path(__file__).parents[2]
HELLO = Program("greet", "example.test/hello")


@pytest.fixture
def hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    folder = tmp_path / "hello"
    folder.mkdir()
    (folder / "go.mod").write_text("module example.test/hello\n\ngo 1.26\n")
    (folder / "go.sum").touch()
    (folder / "main.go").write_text('package main\n\nfunc main() { println("hello") }\n')
    monkeypatch.setenv("HPU_CACHE", str(tmp_path / "cache"))
    return Module("hello", folder, ("-trimpath",), {"CGO_ENABLED": "0"})


def says(program: Path) -> str:
    return subprocess.run([program], capture_output=True, text=True, check=True).stderr.strip()


def test_builds_once_and_under_our_name(hello: Module) -> None:
    lines: list[str] = []
    folder = build.build(hello, [HELLO], lines.append)
    assert says(folder / "greet") == "hello"
    assert lines
    lines.clear()
    assert build.build(hello, [HELLO], lines.append) == folder
    assert lines == []


def test_everything_that_decides_a_program_is_in_its_checksum(hello: Module) -> None:
    before = build.checksum(hello, "go1")
    assert build.checksum(hello, "go2") != before
    assert build.checksum(replace(hello, flags=("-race",)), "go1") != before
    assert build.checksum(replace(hello, env={}), "go1") != before
    for name in ("go.mod", "go.sum", "main.go"):
        sum_before = build.checksum(hello, "go1")
        (hello.folder / name).write_text((hello.folder / name).read_text() + "// changed\n")
        assert build.checksum(hello, "go1") != sum_before


def test_half_built_cache_is_completed(hello: Module) -> None:
    target = cache_folder() / "bin" / build.checksum(hello, build.go_version())
    (target / ".aside").mkdir(parents=True)
    (target / ".aside" / "hello").write_bytes(b"\x7fELF half")
    (target / ".lock").touch()
    assert says(build.build(hello, [HELLO]) / "greet") == "hello"
    assert not (target / ".aside").exists()


def test_killed_builder_leaves_nothing_that_counts_as_built(hello: Module) -> None:
    # A package that takes the compiler seconds, and that Go has not seen: the builder is killed in the middle.
    table = ", ".join(f'"{number:08d}": {number}' for number in range(60000))
    source = "package main\n\nvar t = map[string]int{" + table + '}\n\nfunc main() { println(t["00000007"]) }\n'
    (hello.folder / "main.go").write_text(f"{source}\n// {time.time_ns()}\n")
    script = f"""
from pathlib import Path
from tests.cluster import build
from tests.cluster.modules import Module, Program
from tests.machine import cache_folder
hello = Module("hello", Path({str(hello.folder)!r}), ("-trimpath",), {{"CGO_ENABLED": "0"}})
build.build(hello, [Program("greet", "example.test/hello")])
"""
    builder = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, start_new_session=True, stderr=subprocess.DEVNULL
    )
    target = cache_folder() / "bin" / build.checksum(hello, build.go_version())
    while not compiles(builder.pid):
        assert builder.poll() is None
        time.sleep(0.01)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    assert not (target / "greet").exists()
    assert says(build.build(hello, [HELLO]) / "greet") == "7"


def compiles(session: int) -> bool:
    """Whether Go's compiler is at work in a session."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            name, _, rest = (entry / "stat").read_text().partition(" (")[2].rpartition(")")
            if name in ("compile", "link") and int(rest.split()[3]) == session:
                return True
    return False


def test_two_builders_at_once_build_once(hello: Module) -> None:
    said: list[str] = []
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(build.build(hello, [HELLO], said.append))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 3
    assert sum("done after" in line for line in said) == 1


def test_program_that_does_not_compile_is_shown(hello: Module) -> None:
    (hello.folder / "main.go").write_text("package main\n\nfunc main() { undefined() }\n")
    with pytest.raises(BuildFailed, match=r"undefined: undefined(.|\n)*->"):
        build.build(hello, [HELLO])
    assert not list((cache_folder() / "bin").glob("*/greet"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a small disk")
def test_full_disk_is_named(hello: Module) -> None:
    cache_folder().mkdir()
    script = f"""
from pathlib import Path
from tests.cluster import build, errors
from tests.cluster.modules import Module, Program
from tests.machine import cache_folder
try:
    build.build(Module("hello", Path({str(hello.folder)!r}), (), {{}}), [Program("greet", "example.test/hello")])
except errors.BuildFailed as error:
    print(error)
"""
    mount = f'mount -t tmpfs -o size=256k tmpfs {cache_folder()} && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", mount, "sh", sys.executable, "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no space left on device" in done.stdout
    assert "HPU_CACHE" in done.stdout


def test_progress_is_told_from_what_go_says() -> None:
    progress = build.Progress("hello", total=7, started=time.monotonic() - 65)
    for line in ("go: downloading golang.org/x/sys v0.1.0", "golang.org/x/sys/unix", "fmt", "", "# example.test/hello"):
        progress.read(line)
    assert progress.report() == "build hello: 1:05, 2 of at most 7 packages, fmt"
    assert progress.report().endswith("linking, or reading Go's build cache")
    assert progress.errors == ["# example.test/hello"]


def test_only_what_a_size_needs_is_built() -> None:
    names = {program.name for _, programs in modules.needed(nodes=False) for program in programs}
    assert names == {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"}
    more = {program.name for _, programs in modules.needed(nodes=True) for program in programs}
    assert more > names
    assert {"kubelet", "kube-proxy", "containerd", "runc", "coredns"} <= more


@pytest.mark.parametrize("version", ["", "1.37", "v1.37.2", "1.37.2; rm", "2.0.0"])
def test_what_is_not_a_kubernetes_version_is_refused(version: str) -> None:
    with pytest.raises(BuildFailed, match="not a Kubernetes version"):
        modules.kubernetes(version)


@pytest.mark.parametrize(("module", "programs"), [*modules.needed(nodes=True), (modules.helm, modules.HELM)])
def test_every_program_is_named_in_its_module(module: Module, programs: tuple[Program, ...]) -> None:
    """So that another package means another go.mod, and with it another checksum."""
    text = (module.folder / "go.mod").read_text()
    own = re.search(r"^module (\S+)$", text, re.MULTILINE)
    tools = re.search(r"^tool (?:\((.*?)\)|(\S+)$)", text, re.MULTILINE | re.DOTALL)
    named = {own[1] if own else "", *(" ".join(filter(None, tools.groups())).split() if tools else ())}
    assert {program.package for program in programs} <= named


def test_the_module_of_another_version_is_derived_as_ours_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For our own version the derived go.mod replaces and names the same as the one that is checked in."""
    own = modules.kubernetes().folder / "go.mod"
    release = tmp_path / "release.mod"
    staged = re.findall(r"^\t?(k8s\.io/\S+) => ", own.read_text(), re.MULTILINE)
    etcd = re.search(r"go\.etcd\.io/etcd/client/v3 (v\S+)", own.read_text())
    assert etcd
    # What a release's own go.mod says of its staging modules: they are folders of its tree.
    release.write_text(f"require {etcd[0]}\n" + "".join(f"\t{name} => ./staging/src/{name}\n" for name in staged))
    asked: list[list[str]] = []

    def go(arguments: list[str], folder: Path) -> str:
        asked.append(arguments)
        if arguments[:2] == ["mod", "tidy"]:
            (folder / "go.sum").touch()
        return json.dumps({"GoMod": str(release)})

    monkeypatch.setenv("HPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(modules, "_go", go)
    monkeypatch.setattr(modules, "KUBERNETES_VERSION", "1.0.0")
    version = build_version(own)
    derived = modules.kubernetes(version)
    assert derived.folder != own.parent
    assert asked == [["mod", "download", "-json", f"k8s.io/kubernetes@v{version}"], ["mod", "tidy"]]
    for pattern in (r"^\t?(k8s\.io/\S+ => .*)$", r"^\t(\S+/cmd/\S+)$", r"^godebug .*$"):
        lines = [set(re.findall(pattern, file.read_text(), re.MULTILINE)) for file in (own, derived.folder / "go.mod")]
        assert lines[0] == lines[1] != set()
    # Once: the second time it is there.
    assert modules.kubernetes(version) == derived
    assert len(asked) == 2


def build_version(go_mod: Path) -> str:
    found = re.search(r"^\tk8s\.io/kubernetes v(\S+)", go_mod.read_text(), re.MULTILINE)
    assert found
    return found[1]
