"""The cgroup folders of a node, on trees that look like the kernel's (the real version 1 is in test_nodes.py).

Version 2 was not run on a kernel: only its files' layout is imitated here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import cgroups
from tests.cluster.errors import ClusterError, MissingRequirement


@pytest.fixture(autouse=True)
def passed_on(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "PASSED_ON", tmp_path_factory.mktemp("run") / "controllers")


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    for controller in cgroups.REQUIRED_V1:
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "cgroup.procs").touch()
    (tmp_path / "cpuset/cpuset.cpus").write_text("0-1\n")
    (tmp_path / "cpuset/cpuset.mems").write_text("0\n")
    # Where two controllers share a hierarchy, names are links to it.
    (tmp_path / "cpu,cpuacct").symlink_to("cpu")
    return tmp_path


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.procs").touch()
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    return tmp_path


def test_version_1_has_a_folder_per_hierarchy_and_filled_cpusets(version_1: Path) -> None:
    assert cgroups.create("a1", "node-0", version_1) == "/hpu-a1-node-0"
    folders = list(version_1.glob("*/hpu-a1-node-0"))
    assert len({folder.resolve() for folder in folders}) == len(cgroups.REQUIRED_V1)
    assert (version_1 / "cpuset/hpu-a1-node-0/cpuset.cpus").read_text() == "0-1\n"
    assert (version_1 / "cpuset/hpu-a1-node-0/cpuset.mems").read_text() == "0\n"


def test_version_2_passes_controllers_on_and_takes_them_back_with_the_last_node(version_2: Path) -> None:
    control = version_2 / "cgroup.subtree_control"
    assert cgroups.create("a1", "node-0", version_2) == "/hpu-a1-node-0"
    assert (version_2 / "hpu-a1-node-0").is_dir()
    assert control.read_text() == "+cpuset +memory +pids"
    # As the kernel shows it afterwards; another cluster finds nothing to ask for.
    control.write_text("cpuset cpu memory pids\n")
    cgroups.create("b2", "node-0", version_2)
    cgroups.remove("a1", mount=version_2)
    assert control.read_text() == "cpuset cpu memory pids\n"
    written: list[str] = []

    class Control(type(control)):  # type: ignore[misc]  # what is written is seen one by one
        def write_text(self, data: str, *_: object) -> int:
            written.append(data)
            return len(data)

    cgroups.remove("b2", mount=Control(version_2))
    assert written == ["-cpuset", "-memory", "-pids"]
    assert not cgroups.PASSED_ON.exists()


def test_version_2_that_cannot_pass_controllers_on_is_a_requirement(version_2: Path) -> None:
    (version_2 / "cgroup.subtree_control").unlink()
    with pytest.raises(MissingRequirement, match="root of its hierarchy"):
        cgroups.create("a1", "node-0", version_2)


def test_removal_takes_a_clusters_folders_and_no_others(version_2: Path) -> None:
    cgroups.create("a1", "node-0", version_2)
    cgroups.create("a1", "node-1", version_2)
    cgroups.create("b2", "node-0", version_2)
    (version_2 / "hpu-a1-node-0/kubepods/besteffort").mkdir(parents=True)
    cgroups.remove("a1", mount=version_2)
    assert [path.name for path in version_2.glob("hpu-*")] == ["hpu-b2-node-0"]


def test_busy_folder_is_named(version_2: Path) -> None:
    cgroups.create("a1", "node-0", version_2)
    # A plain file keeps a folder as a process would.
    (version_2 / "hpu-a1-node-0/busy").touch()
    with pytest.raises(ClusterError, match="hpu-a1-node-0"):
        cgroups.remove("a1", mount=version_2, timeout_seconds=0.2)
