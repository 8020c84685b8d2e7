"""A server as its users have it: a process, two ports and a log. For the double and for the real worker alike."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpu_engine.contract import ControlState, Phase, TerminationMessage
from tests.cluster import ports

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 200.0
"""For a machine with many neighbours; no test waits this long when it passes."""


def free_port() -> int:
    return ports.choose(1)[0]


class RunningServer:
    """`script` starts the scripted worker, which stays at the places in `held` until they are released; `worker` starts
    another module, neither of them the real worker as users start it. `flags` are settings by field name.
    """

    def __init__(
        self,
        model: Path,
        script: dict[str, Any] | None = None,
        *,
        held: Iterable[str] = (),
        worker: str | None = None,
        **flags: Any,
    ) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="hpu-server-")
        self.port, self.control_port = free_port(), free_port()
        self.termination_log = Path(self.directory.name) / "termination"
        self._log = Path(self.directory.name) / "log"
        self._hold = Path(self.directory.name) / "hold"
        self._hold.mkdir()
        for place in held:
            (self._hold / place).touch()
        settings: dict[str, Any] = {
            "model": str(model),
            "served_model_name": "tiny",
            "host": "127.0.0.1",
            "port": self.port,
            "control_port": self.control_port,
            "termination_log": str(self.termination_log),
            **flags,
        }
        if script is not None or worker is not None:
            script = {**(script or {}), "hold": str(self._hold)}
            other = [worker] if worker else ["tests.server.scripted_worker", "--script", json.dumps(script)]
            command = [sys.executable, "-m", "tests.server.launch", json.dumps(other), json.dumps(settings)]
        else:
            flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
            words = [
                word for flag, value in flags.items() for word in ([flag] if value is True else [flag, str(value)])
            ]
            command = [sys.executable, "-m", "hpu_engine.cli", "serve", *words]
        self.started = time.monotonic()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log)
        if self.process.poll() is None:
            workers = self._children()
            self.process.kill()
            for worker in workers:  # a stopped one cannot notice that its server is gone
                kill(worker, signal.SIGCONT)
        self.process.wait()
        self.directory.cleanup()

    # --- looking

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.control_port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def state(self) -> ControlState:
        return ControlState.model_validate_json(get(f"{self.control_url}/state")[1])

    def _children(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def worker_pid(self) -> int:
        (worker,) = self._children()
        return worker

    def worker_pids(self) -> dict[tuple[int, int], int]:
        """Processes of a pod with several workers, by rank and worker."""
        started = [line for line in self.log.splitlines() if "worker started" in line]
        facts = [dict(re.findall(r"(\w+)=(\d+)", line)) for line in started]
        return {(int(fact["rank"]), int(fact["worker"])): int(fact["pid"]) for fact in facts}

    def termination(self) -> TerminationMessage:
        text = self.termination_log.read_text()
        assert len(text.encode()) <= 4096
        message = TerminationMessage.parse(text)
        assert message is not None, text
        return message

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series; 0 where there is none yet."""
        for line in get(f"{self.control_url}/metrics")[1].decode().splitlines():
            series, _, value = line.rpartition(" ")
            wanted = [f'{key}="{text}"' for key, text in labels.items()]
            if series.partition("{")[0] == name and all(label in series for label in wanted):
                return float(value)
        return 0.0

    # --- waiting

    def wait_until_listening(self) -> Self:
        wait_until(lambda: reachable(self.control_port), "the control port answers", self)
        return self

    def wait_until_ready(self) -> Self:
        self.wait_until_listening()
        wait_until(lambda: get(f"{self.control_url}/readyz")[0] == 200, "the server is ready", self)
        return self

    def wait_for_phase(self, phase: Phase) -> None:
        wait_until(lambda: self.state().phase is phase, f"the phase is {phase}", self)

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    # --- acting

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def release(self, place: str) -> None:
        """Let the scripted worker go on."""
        (self._hold / place).unlink()


def reachable(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 10.0):
            return True
    except OSError:
        return False


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def post(url: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
    """Status and parsed JSON of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def wait_until(condition: Any, what: str, server: RunningServer | None = None) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_SECONDS:g} s"
        if server is not None and server.process.poll() is not None:
            raise AssertionError(f"the server ended with {server.process.returncode} before {what}:\n{server.log}")
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
