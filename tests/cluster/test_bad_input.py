"""What stands in the way is named, with what to do about it, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.cluster import (
    cgroups,
    control_plane,
    launcher,
    modules,
    network,
    node,
    ports,
    preflight,
    processes,
    state,
    traces,
)
from tests.cluster.api import wait_for
from tests.cluster.errors import ComponentFailed, MissingRequirement, StateConflict
from tests.machine import cache_folder

REPOSITORY = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to set the scene")


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(f"/tmp/hpu-bad-{os.getpid()}-{time.monotonic_ns() % 10**6}")
    monkeypatch.setenv("HPU_CLUSTERS", str(folder))
    yield folder
    for name in state.names():
        launcher.down(name)
    assert traces.members(folder / "t") == []
    assert not folder.exists()


def run(*arguments: str, environment: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and complaint of the launcher."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.cluster", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_no_go_is_named_before_anything_is_made(clusters: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "setsid", "cc", "git", "openssl"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    code, complaint = run("up", "--control-plane", environment={"PATH": str(tools)})
    assert code == 1
    assert "Go 1.26" in complaint
    assert "go.dev" in complaint
    assert not clusters.exists()


@needs_root
def test_no_root_is_named_for_nodes(monkeypatch: pytest.MonkeyPatch, clusters: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(MissingRequirement, match=r"root(.|\n)*-> run as root"):
        launcher.up(launcher.Request("t", nodes=1))
    assert not clusters.exists()


def test_taken_port_is_named_and_the_next_try_chooses_another(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = ports.choose
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        taken = occupied.getsockname()[1]
        # As if another program had taken it between the choice and the start.
        monkeypatch.setattr(ports, "choose", lambda count: [taken, *choose(count - 1)])
        with pytest.raises(ComponentFailed, match=r"apiserver ended: another program took(.|\n)*-> run up again"):
            launcher.up(launcher.Request("t", nodes=0))
        assert not clusters.exists()
        assert traces.members(clusters / "t") == []


def test_chosen_ports_are_free_and_nobody_elses_until_a_server_takes_them() -> None:
    chosen = ports.choose(2000)
    assert len(set(chosen)) == 2000
    # Outgoing connections take theirs from here on.
    assert max(chosen) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ours = ports.choose(100)
    other = "from tests.cluster import ports; print(*ports.choose(3000))"
    argv = [sys.executable, "-c", other]
    theirs = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert not set(ours) & {int(port) for port in theirs.split()}
    with socket.create_server(("127.0.0.1", ours[0])) as server:
        socket.create_connection(("127.0.0.1", ours[0])).close()
        again = ports.choose(5000)
        assert server.getsockname()[1] not in again


@needs_root
def test_full_disk_is_named_and_nothing_is_left(clusters: Path) -> None:
    # A small disk that only this launcher and its children see.
    clusters.mkdir()
    mount = f'mount -t tmpfs -o size=24m tmpfs {clusters} && exec "$@"'
    code, complaint = run(
        "up", "--control-plane", "--name", "t", prefix=("unshare", "--mount", "sh", "-ec", mount, "sh")
    )
    assert code == 1
    assert "full" in complaint
    assert "HPU_CLUSTERS" in complaint
    assert traces.members(clusters / "t") == []
    clusters.rmdir()


def test_files_of_others_are_not_taken_for_a_cluster(clusters: Path) -> None:
    (clusters / "t").mkdir(parents=True)
    (clusters / "t" / "thesis.txt").write_text("years of work")
    with pytest.raises(StateConflict, match="not a cluster's"):
        launcher.up(launcher.Request("t", nodes=0))
    with pytest.raises(StateConflict, match="not a cluster's"):
        launcher.down("t")
    assert (clusters / "t" / "thesis.txt").read_text() == "years of work"
    shutil.rmtree(clusters)


@pytest.mark.parametrize("name", ["", "../etc", "Upper", "a" * 33, "-x", "a/b"])
def test_names_that_would_lead_elsewhere_are_refused(clusters: Path, name: str) -> None:
    with pytest.raises(StateConflict, match="not a cluster name"):
        launcher.up(launcher.Request(name, nodes=0))
    with pytest.raises(StateConflict, match="not a cluster name"):
        launcher.down(name)


def test_damaged_state_does_not_stop_down(clusters: Path) -> None:
    folder = clusters / "t"
    (folder / "run").mkdir(parents=True)
    (folder / "cluster.json").write_text('{"name": "t", "fol')
    code, _ = run("status")
    assert code == 1
    # What it had outside of its folder is found all the same.
    stray = processes.spawn(["sleep", "60"], folder=folder, log=folder / "stray.log")
    if os.geteuid() == 0:
        cgroups.create(state.uid_of(folder), "node-0")
    assert launcher.down("t")
    assert not clusters.exists()
    assert not stray.alive()
    assert not cgroups.folders(state.uid_of(folder))


def test_second_up_of_the_same_name_is_told_of_the_first(clusters: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster", "up", "--control-plane", "--name", "t"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(
        "the first launcher's state", (clusters / "t/cluster.json").exists, timeout_seconds=60, interval_seconds=0.01
    )
    code, complaint = run("up", "--control-plane", "--name", "t")
    assert code == 1
    assert f"another launcher (pid {first.pid})" in complaint
    assert "--name" in complaint
    assert first.wait(timeout=120) == 0
    # Now it runs: the same again is no error, another size is one.
    assert run("up", "--control-plane", "--name", "t")[0] == 0
    if os.geteuid() == 0:
        code, complaint = run("up", "--nodes", "1", "--name", "t")
        assert (code, "runs already: 0 nodes" in complaint) == (1, True)
    # So is another version, before anything is built for it.
    code, complaint = run("up", "--control-plane", "--name", "t", "--kubernetes-version", "1.36.3")
    assert (code, f"Kubernetes {modules.KUBERNETES_VERSION}" in complaint, "--name" in complaint) == (1, True, True)


def test_component_that_dies_at_the_start_is_named_with_its_last_words(
    clusters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = control_plane.apiserver
    monkeypatch.setattr(control_plane, "apiserver", lambda *given: [*arguments(*given), "--no-such-flag"])
    with pytest.raises(ComponentFailed, match=r"apiserver ended(.|\n)*unknown flag: --no-such-flag"):
        launcher.up(launcher.Request("flagged", nodes=0))
    assert not clusters.exists()
    assert "no-such-flag" in (cache_folder() / "logs" / "flagged" / "apiserver.log").read_text()


@needs_root
@pytest.mark.parametrize(
    ("tool", "refuses", "said"),
    [
        ("ip", "type bridge", "CONFIG_BRIDGE"),
        ("ip", "type veth", "CONFIG_VETH"),
        ("nft", "numgen", "nftables"),
        ("unshare", "--pid", "CAP_SYS_ADMIN"),
    ],
)
def test_missing_kernel_feature_is_named(
    clusters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, refuses: str, said: str
) -> None:
    refusal = f'case "$*" in *"{refuses}"*) echo "Operation not supported" >&2; exit 2;; esac'
    fake = tmp_path / tool
    fake.write_text(f'#!/bin/sh\n{refusal}\nexec {shutil.which(tool)} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(MissingRequirement, match="\n  -> "):
        launcher.up(launcher.Request("t", nodes=1))
    assert not clusters.exists()
    assert [said in item.what + item.remedy for item in preflight.kernel_features()] == [True]


@needs_root
def test_disk_that_carries_no_overlay_is_noticed(tmp_path: Path) -> None:
    assert node.overlay_works(tmp_path)
    # An overlay cannot be the upper layer of another.
    for part in ("lower", "upper", "work", "merged"):
        (tmp_path / part).mkdir()
    mount = 'cd "$1"; shift; mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged; exec "$@"'
    probe = (
        "import sys; from pathlib import Path; from tests.cluster import node;"
        " print(node.overlay_works(Path(sys.argv[1])))"
    )
    python = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-c", probe, str(tmp_path / "merged")]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", mount, "sh", str(tmp_path), *python],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "False", done.stderr


def test_control_plane_with_nodes_is_refused(clusters: Path) -> None:
    code, complaint = run("up", "--control-plane", "--nodes", "2")
    assert code == 2
    assert "no nodes" in complaint
    assert not clusters.exists()


@needs_root
def test_this_machine_has_what_a_node_needs() -> None:
    assert preflight.kernel_features() == []


@needs_root
def test_missing_cgroup_controllers_are_named(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    assert [item.what for item in preflight.kernel_features(tmp_path)] == [
        f"no cgroup controllers cpuset, pids in {tmp_path}"
    ]


@needs_root
def test_cgroup_version_2_is_said_to_be_untested(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> NoReturn:
        raise ComponentFailed("far enough", "")

    monkeypatch.setattr(cgroups, "unified", lambda *_: True)
    monkeypatch.setattr(preflight, "check", lambda **_: None)
    monkeypatch.setattr(network, "open_room", stop)
    said: list[str] = []
    with pytest.raises(ComponentFailed, match="far enough"):
        launcher.up(launcher.Request("t", nodes=1), said.append)
    assert any("cgroup version 2" in line and "were on version 1" in line for line in said)
    assert not clusters.exists()
