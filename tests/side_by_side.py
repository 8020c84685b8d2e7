"""Which tests run in the same worker when two share them out, and who takes what, as in `make test` (`pytest -n 2`).

A file is the unit: its tests run in their order in one worker, with what they share made once. Files that need the
cluster of two nodes are one unit together: there is one such cluster in a run, and its nodes are broken on purpose.
What else a machine has once (images, checkpoints, ports, state folders) is locked or named after its process.

One worker begins with the tests that compute and the other with those that wait for other processes, each in the order
of `testpaths`; who has none of his kind left takes the other's. So two cores are seldom wanted by three, and a test
with a time limit mostly has a core to itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

WITH_NODES = ("tests/images/test_nodes.py", "tests/cluster/test_nodes.py", "tests/recordings/", "tests/e2e/")
"""The files, and the folders, whose tests need the cluster of two nodes."""


COMPUTING = (
    *("tests/static/", "tests/docs/", "tests/planning/", "tests/core/", "tests/operator/", "tests/moe/"),
    *("tests/weights/", "tests/models/", "tests/engine/", "tests/families/", "tests/bench/"),
)
"""The folders whose tests compute."""


def unit(test: str) -> str:
    """The unit of a test, from its node id."""
    file = test.partition("::")[0]
    return "with nodes" if file.startswith(WITH_NODES) else file


def strays(tests: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """The files not named above that ask for the nodes all the same, from node ids and names of fixtures."""
    found = {unit(test) for test, fixtures in tests if "two_node_cluster" in fixtures}
    return sorted(found - {"with nodes"})


def next_unit(queue: Iterable[str], worker: int) -> str:
    """What a worker takes next: workers with odd numbers begin with what computes."""
    units = list(queue)
    own = [unit for unit in units if unit.startswith(COMPUTING) == bool(worker % 2)]
    return (own or units)[0]


class Sharing(LoadScopeScheduling):  # type: ignore[misc]  # the plugin is not typed
    """Hands out the units one by one to whoever is nearly done with the last."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        # The order is ours, and not by the number of tests: one with nodes takes longer than a hundred without.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(next_unit(self.workqueue, self.nodes.index(node)), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)  # pytest runs without the plugin as well, in one process
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Sharing:
    return Sharing(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if found := strays((item.nodeid, getattr(item, "fixturenames", ())) for item in items):
        raise pytest.UsageError(f"{', '.join(found)}: needs nodes, so name it in WITH_NODES of {__name__}")
