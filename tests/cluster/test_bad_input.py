"""What stands in the way is named, with what to do about it, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
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
from tests.cluster.errors import ClusterError, ComponentFailed, MissingRequirement, NotRunning, StateConflict
from tests.machine import cache_folder

REPOSITORY = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to set the scene")


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = state.root_of_test()
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
    for name in ("sh", "setsid"):
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
    # Outgoing connections take theirs from here on, unless the machine's owner has moved that.
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(chosen) < max(first, 30000)
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
@pytest.mark.parametrize("room", ["24m", "4k"])
def test_full_disk_is_named_and_nothing_is_left(clusters: Path, room: str) -> None:
    # A small disk that only this launcher and its children see, and one with no byte free.
    clusters.mkdir(parents=True)
    fill = f"mount -t tmpfs -o size={room} tmpfs {clusters}; " + (
        "head -c 4096 /dev/zero >{}/x; " if room == "4k" else ""
    )
    mount = fill.format(clusters) + 'exec "$@"'
    code, complaint = run(
        "up", "--control-plane", "--name", "t", prefix=("unshare", "--mount", "sh", "-ec", mount, "sh")
    )
    assert code == 1
    assert "full" in complaint
    assert "HPU_CLUSTERS" in complaint
    assert traces.members(clusters / "t") == []
    clusters.rmdir()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in (("up", "--control-plane"), ("down",), ("status",)):
        code, complaint = run(*command, environment={"HPU_CLUSTERS": str(tmp_path / "file" / "clusters")})
        assert "Traceback" not in complaint
        assert (code, str(tmp_path) in complaint) == ((1, True) if command[0] == "up" else (0, False))


@pytest.mark.parametrize(("number", "said"), [("ENOSPC", "free some room"), ("EROFS", "write to"), ("EIO", "run down")])
def test_what_the_system_refuses_has_its_own_remedy(
    clusters: Path, monkeypatch: pytest.MonkeyPatch, number: str, said: str
) -> None:
    def refuse(_: state.Cluster) -> NoReturn:
        raise OSError(getattr(errno, number), "refused")

    monkeypatch.setattr(state, "save", refuse)
    with pytest.raises(ClusterError, match=rf"refused\n  -> .*{said}"):
        launcher.up(launcher.Request("t", nodes=0))
    assert not clusters.exists()


@needs_root
def test_folder_of_another_user_is_not_used(clusters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(tmp_path, 65534, 65534)
    monkeypatch.setattr(state, "of_user", lambda: tmp_path)
    monkeypatch.delenv("HPU_CLUSTERS")
    with pytest.raises(StateConflict, match=r"another user's(.|\n)*HPU_CLUSTERS"):
        launcher.up(launcher.Request("t", nodes=0))


def test_proxies_of_the_caller_are_not_the_clusters(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "http_proxy", "no_proxy"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    folder = clusters / "t"
    (folder / "run").mkdir(parents=True)
    shown = processes.spawn(["env"], folder=folder, log=folder / "env.log")
    wait_for("env", lambda: not shown.alive(), timeout_seconds=60)
    assert "proxy" not in (folder / "env.log").read_text().lower()
    assert f"{processes.MARK}={folder}" in (folder / "env.log").read_text()


def test_namespaces_of_a_recycled_pid_are_not_entered(clusters: Path) -> None:
    (clusters / "t" / "run").mkdir(parents=True)
    record = {"process": {"pid": os.getpid(), "started_at": 1}, "argv": [], "env": {}, "entered": True}
    (clusters / "t" / "run" / "node-0.json").write_text(json.dumps(record))
    with pytest.raises(NotRunning, match="node-0 does not run"):
        network.find_room(processes.Supervisor(clusters / "t"), "node-0")


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


def test_of_two_at_once_one_brings_it_up_and_the_other_says_so(clusters: Path) -> None:
    argv = [sys.executable, "-m", "tests.cluster", "up", "--control-plane", "--name", "t"]
    both = [subprocess.Popen(argv, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = {one.communicate(timeout=250)[1]: one.returncode for one in both}
    ready = [text for text in said if "cluster t: ready after" in text]
    assert len(ready) == 1, said
    assert said.pop(ready[0]) == 0
    # Told at once, or after it had waited for the other's build.
    [(text, code)] = said.items()
    assert (code, "another launcher (pid" in text) == (1, True) or (code, "is up already" in text) == (0, True)
    assert run("status") == (0, "")


def test_up_leaves_a_cluster_of_which_a_part_has_died(clusters: Path) -> None:
    assert run("up", "--control-plane", "--name", "t")[0] == 0
    supervisor = processes.Supervisor(clusters / "t")
    supervisor.kill("scheduler")
    code, complaint = run("up", "--control-plane", "--name", "t")
    assert code == 1
    assert "not running in it: scheduler" in complaint
    assert "down --name t" in complaint
    assert supervisor.alive("etcd")
    # When nothing of it runs any more, it is only what a killed run left.
    for name in ("controllers", "apiserver", "etcd"):
        supervisor.kill(name)
    assert "ready after" in run("up", "--control-plane", "--name", "t")[1]


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
    # It holds the lock until it is told to go on.
    first.send_signal(signal.SIGSTOP)
    try:
        code, complaint = run("up", "--control-plane", "--name", "t")
    finally:
        first.send_signal(signal.SIGCONT)
    assert code == 1
    assert f"another launcher (pid {first.pid})" in complaint
    assert "-> wait for it" in complaint
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
