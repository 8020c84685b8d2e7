"""Which tests run in the same worker when two share them out, as in `make test` (`pytest -n 2`).

A file is the unit: its tests run in their order in one worker, with what they share made once; the order of the files
is that of `testpaths`. Files that need the cluster of two nodes are one unit together: there is one such cluster in a
run, and its nodes are broken on purpose. Everything else that a machine has once (images, checkpoints, ports, state
folders) is named after its process or locked.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

WITH_NODES = ("tests/images/test_nodes.py", "tests/cluster/test_nodes.py", "tests/recordings/", "tests/e2e/")
"""The files, and the folders, whose tests need the cluster of two nodes."""


def unit(test: str) -> str:
    """The unit of a test, from its node id."""
    file = test.partition("::")[0]
    return "with nodes" if file.startswith(WITH_NODES) else file


def strays(tests: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """The files not named above that ask for the nodes all the same, from node ids and names of fixtures."""
    found = {unit(test) for test, fixtures in tests if "two_node_cluster" in fixtures}
    return sorted(found - {"with nodes"})


class Sharing(LoadScopeScheduling):  # type: ignore[misc]  # the plugin is not typed
    """Hands out the units one by one, to whoever is nearly done with the last."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        # The order is ours, and not by the number of tests: one with nodes takes longer than a hundred without.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)  # pytest runs without the plugin as well, in one process
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Sharing:
    return Sharing(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if found := strays((item.nodeid, getattr(item, "fixturenames", ())) for item in items):
        raise pytest.UsageError(f"{', '.join(found)}: needs nodes, so name it in WITH_NODES of {__name__}")
