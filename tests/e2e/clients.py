"""Clients at work inside the cluster's network while something is done to the servers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.fleet import Fleet

SCRIPT = Path(__file__).with_name("load.py")


@dataclass(frozen=True)
class Client:
    """One running client; its file grows by a line per request."""

    mode: str
    process: subprocess.Popen[bytes]
    file: Path

    def finished(self) -> list[dict[str, object]]:
        """Every request that has ended, in order."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [json.loads(line) for line in lines]

    def wrong(self) -> list[str]:
        return [str(request["wrong"]) for request in self.finished() if request["wrong"]]

    def wait_for(self, more: int, timeout_seconds: float = 300.0) -> None:
        """Until so many more requests have ended."""
        wanted = len(self.finished()) + more

        def arrived() -> bool:
            assert self.process.poll() is None, self.file.with_suffix(".log").read_text()
            return len(self.finished()) >= wanted

        wait_for(f"{more} more answers to {self.mode}", arrived, timeout_seconds)


def wait_for(what: str, so: Callable[[], object], timeout_seconds: float, every_seconds: float = 0.25) -> float:
    """Until `so()` is true; the seconds it took. Fails the test by name otherwise."""
    began = time.monotonic()
    while not so():
        waited = time.monotonic() - began
        assert waited < timeout_seconds, f"{what}: not after {timeout_seconds:.0f} s"
        time.sleep(every_seconds)
    return time.monotonic() - began


@contextlib.contextmanager
def at_work(fleet: Fleet, url: str, model: str, folder: Path) -> Iterator[dict[str, Client]]:
    """A client that keeps its connection and one that makes a new one each time, on different nodes."""
    clients = {}
    for mode, node in zip(("kept", "fresh"), (fleet.nodes[0], fleet.nodes[-1]), strict=True):
        prefix, environment = fleet.command_in_cluster(node)
        file = folder / f"{mode}.jsonl"
        log = (folder / f"{mode}.log").open("wb")
        command = [*prefix, sys.executable, str(SCRIPT), url, model, mode, str(file)]
        clients[mode] = Client(mode, subprocess.Popen(command, env=environment, stdout=log, stderr=log), file)
        log.close()
    try:
        yield clients
    finally:
        for client in clients.values():
            client.process.terminate()
        for client in clients.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.process.wait(timeout=60)
            client.process.kill()
