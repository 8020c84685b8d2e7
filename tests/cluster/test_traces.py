"""Before `up` and after `down` the machine is the same, however the cluster came to its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import launcher, removal, state, traces
from tests.cluster.api import wait_for
from tests.cluster.processes import MARK, Process, Supervisor, identify
from tests.machine import cache_folder

REPOSITORY = Path(__file__).parents[2]
LOOPBACK = f"{int.from_bytes(bytes([127, 0, 0, 1]), sys.byteorder):08X}"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="nodes need root")


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of state folders for one test. Short: it holds unix sockets."""
    folder = state.root_of_test()
    monkeypatch.setenv("HPU_CLUSTERS", str(folder))
    yield folder
    run("down", "--all")
    assert not folder.exists()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def popen(*arguments: str) -> subprocess.Popen[bytes]:
    # A shell's background job, which the tests may be, ignores SIGINT and hands that down.
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "tests.cluster", *arguments]
    return subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def youngest() -> Process:
    """A process that starts now."""
    with subprocess.Popen(["true"]) as child:
        process = identify(child.pid)
    assert process is not None
    return process


@needs_root
def test_cluster_with_a_node_leaves_no_trace(clusters: Path) -> None:
    before = traces.take(clusters / "t")
    done = run("up", "--nodes", "1", "--name", "t")
    assert done.returncode == 0, done.stderr
    during = traces.take(clusters / "t")
    # It does run, and even now nothing of it is in the host's network, mounts and settings.
    assert len(during.processes) >= 10
    assert (during.network, during.mounts, during.settings) == (before.network, before.mounts, before.settings)
    # The relay is all there is on the host: a socket on loopback.
    assert traces.listening(traces.members(clusters / "t")) == {LOOPBACK}
    spaces = traces.namespaces(traces.members(clusters / "t"))
    assert len(spaces) >= 6
    now = youngest()
    assert traces.held(spaces, now)
    assert run("down", "--name", "t").returncode == 0
    assert traces.take(clusters / "t") == before
    # init may take a moment to bury the last of them.
    wait_for("the end of its namespaces", lambda: not traces.held(spaces, now), timeout_seconds=60)


def test_control_plane_leaves_no_trace(clusters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPU_CACHE", str(cache_folder()))
    monkeypatch.setenv("HOME", str(tmp_path))
    before = traces.take(clusters / "t")
    assert run("up", "--control-plane", "--name", "t").returncode == 0
    assert "default" in run("kubectl", "--name", "t", "--", "get", "namespaces").stdout
    assert len(traces.take(clusters / "t").processes) == 4
    assert traces.listening(traces.members(clusters / "t")) == {LOOPBACK}
    assert run("down", "--name", "t").returncode == 0
    assert traces.take(clusters / "t") == before
    assert not (tmp_path / ".kube").exists(), "kubectl keeps what it learns with the cluster"


@needs_root
@pytest.mark.parametrize("started", ["control-plane", "etcd", "node-0", "node-0-containerd", "node-0-kubelet"])
def test_launcher_killed_half_way_leaves_no_trace_after_down(clusters: Path, started: str) -> None:
    before = traces.take(clusters / "t")
    starting = popen("up", "--nodes", "1", "--name", "t")
    mark = clusters / "t" / "run" / f"{started}.json"
    wait_for(f"{started} to start", mark.exists, timeout_seconds=90, interval_seconds=0.01)
    starting.kill()
    starting.wait()
    assert traces.members(clusters / "t")
    assert run("down", "--name", "t").returncode == 0
    assert traces.take(clusters / "t") == before


@needs_root
def test_killed_processes_leave_no_trace_after_down(clusters: Path) -> None:
    before = traces.take(clusters / "t")
    assert run("up", "--nodes", "1", "--name", "t").returncode == 0
    spaces = traces.namespaces(traces.members(clusters / "t"))
    supervisor = Supervisor(clusters / "t")
    for name in ("node-0-containerd", "relay", "node-0-kubelet", "control-plane"):
        supervisor.kill(name)
    status = run("status")
    assert status.returncode == 1
    assert "node-0-kubelet" in status.stdout
    now = youngest()
    assert run("down", "--name", "t").returncode == 0
    assert traces.take(clusters / "t") == before
    # init may take a moment to bury the last of them.
    wait_for("the end of its namespaces", lambda: not traces.held(spaces, now), timeout_seconds=60)


def test_what_a_killed_launcher_left_is_removed_by_the_next_up(clusters: Path) -> None:
    starting = popen("up", "--control-plane", "--name", "t")
    wait_for("etcd", (clusters / "t/run/etcd.json").exists, timeout_seconds=90, interval_seconds=0.01)
    starting.kill()
    starting.wait()
    left = {process.pid for process in traces.members(clusters / "t")}
    assert left
    done = run("up", "--control-plane", "--name", "t")
    assert done.returncode == 0, done.stderr
    assert "removing what a killed run left" in done.stderr
    assert not left & {process.pid for process in traces.members(clusters / "t")}


def test_cluster_of_a_killed_test_run_is_removed_by_the_next(clusters: Path) -> None:
    script = """
import os
from tests.cluster import launcher, state
launcher.up(launcher.Request("t", nodes=0, owner=state.this_process()))
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert traces.members(clusters / "t")
    assert "t" in launcher.remove_orphans()
    assert traces.members(clusters / "t") == []
    assert not clusters.exists()


OUTLIVED = """
import os, sys
from pathlib import Path
from tests.cluster import launcher, processes, state
folder = Path(sys.argv[2] or state.root_of_test()) / "t"
(folder / "run").mkdir(parents=True)
if sys.argv[1] != "no record":
    chosen = dict(api_port=1, etcd_port=1, peer_port=1, controllers_port=1, scheduler_port=1)
    checkout = Path("/nowhere") if sys.argv[1] == "no checkout" else Path.cwd()
    owner = state.this_process() if sys.argv[1] == "no owner" else None
    state.save(state.Cluster("t", folder, 0, 0, "1", folder, **chosen, owner=owner, checkout=checkout))
print(folder, processes.spawn(["sleep", "600"], folder=folder, log=folder / "log").pid)
"""


@pytest.mark.parametrize("outlived", ["no record", "no owner", "no checkout"])
def test_what_nobody_is_left_to_remove_goes_with_any_down(clusters: Path, outlived: str) -> None:
    """A cluster in another folder of this user: of a killed test, of a killed test run, of a checkout that has gone."""
    other = "" if outlived == "no record" else str(state.root_of_test())
    argv = [sys.executable, "-c", OUTLIVED, outlived, other]
    made = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    folder, stray = Path(made[0]), identify(int(made[1]))
    assert stray is not None
    assert stray.alive()
    assert run("down", "--all").returncode == 0
    assert not stray.alive()
    assert not folder.parent.exists()


def test_clusters_of_another_checkout_are_left_alone(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("up", "--control-plane", "--name", "t").returncode == 0
    # The same user and another checkout: another folder, the same names.
    monkeypatch.setenv("HPU_CLUSTERS", str(state.root_of_test()))
    assert "there is none" in run("down", "--name", "t").stderr
    assert run("down", "--all").returncode == 0
    assert run("status").stdout.startswith("no clusters")
    monkeypatch.setenv("HPU_CLUSTERS", str(clusters))
    assert run("status").returncode == 0


def test_each_checkout_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPU_CLUSTERS", raising=False)
    here = state.root()
    monkeypatch.setattr(state, "_CHECKOUT", Path("/elsewhere"))
    assert state.root() != here
    assert state.root().parent == here.parent == state.of_user()


def test_down_goes_on_after_what_it_cannot_remove(clusters: Path) -> None:
    (clusters / "a").mkdir(parents=True)
    (clusters / "a" / "thesis.txt").write_text("years of work")
    (clusters / "b" / "run").mkdir(parents=True)
    done = run("down", "--all")
    assert done.returncode == 1
    assert "not a cluster's" in done.stderr
    assert [path.name for path in clusters.iterdir() if path.is_dir()] == ["a"]
    shutil.rmtree(clusters)
    assert removal.known() == []


@pytest.mark.parametrize(
    ("size", "started", "signum"),
    [
        (("--control-plane",), "etcd", signal.SIGTERM),
        pytest.param(("--nodes", "1"), "node-0-containerd", signal.SIGINT, marks=needs_root),
    ],
)
def test_interrupted_up_removes_what_it_made(
    clusters: Path, size: tuple[str, ...], started: str, signum: signal.Signals
) -> None:
    starting = popen("up", *size, "--name", "t")
    mark = clusters / f"t/run/{started}.json"
    wait_for(started, mark.exists, timeout_seconds=90, interval_seconds=0.01)
    starting.send_signal(signum)
    assert starting.wait(timeout=90) != 0
    assert traces.members(clusters / "t") == []
    assert not clusters.exists()


def test_processes_are_ended_though_their_folder_was_removed(clusters: Path) -> None:
    assert run("up", "--control-plane", "--name", "t").returncode == 0
    shutil.rmtree(clusters)
    assert traces.members(clusters / "t")
    assert run("down", "--all").returncode == 0
    assert traces.members(clusters / "t") == []


def test_traces_see_a_process_that_belongs_to_a_cluster(clusters: Path) -> None:
    """The comparison above can fail: a process with the mark of the state folder is a difference."""
    before = traces.take(clusters / "t")
    stray = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: str(clusters / "t")})
    try:
        wait_for("the stray process", lambda: traces.take(clusters / "t") != before, timeout_seconds=60)
    finally:
        stray.kill()
        stray.wait()
    assert traces.take(clusters / "t") == before
