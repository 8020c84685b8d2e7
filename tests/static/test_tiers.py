"""`make test` runs every test there is, and no two workers at once start the cluster of nodes."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.side_by_side import COMPUTING, WITH_NODES, next_unit, strays, unit

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_of_tests_is_run() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {str(file.parent.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    assert folders - set(settings["testpaths"]) == set()


def test_a_file_is_a_unit_and_so_is_everything_with_nodes() -> None:
    assert unit("tests/core/test_scheduler.py::test_x[a::b]") == "tests/core/test_scheduler.py"
    assert unit("tests/cluster/test_traces.py::test_x") == "tests/cluster/test_traces.py"
    with_nodes = {unit(f"{file}::test_x") for file in ("tests/e2e/test_story.py", "tests/cluster/test_nodes.py")}
    assert len(with_nodes) == 1


def test_a_file_that_asks_for_nodes_unannounced_is_named() -> None:
    announced = ("tests/recordings/test_ending.py::test_x", ["two_node_cluster"])
    assert strays([announced, ("tests/core/test_y.py::test_y", ["tmp_path"])]) == []
    assert strays([announced, ("tests/core/test_y.py::test_y", ["two_node_cluster"])]) == ["tests/core/test_y.py"]


def test_one_worker_begins_with_what_computes_and_helps_when_that_is_done() -> None:
    waiting, computing = ["with nodes", "tests/server/test_a.py"], ["tests/core/test_b.py", "tests/engine/test_c.py"]
    queue = [waiting[0], computing[0], waiting[1], computing[1]]
    assert [next_unit(queue, worker) for worker in (0, 1, 2)] == [waiting[0], computing[0], waiting[0]]
    assert next_unit(waiting, 1) == waiting[0]
    assert next_unit(computing, 0) == computing[0]


def test_what_is_named_there_exists() -> None:
    assert [path for path in (*WITH_NODES, *COMPUTING) if not (ROOT / path).exists()] == []
