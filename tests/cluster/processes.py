"""Processes of a cluster: start, find, stop, signal. Owns `run/NAME.json` and `log/NAME.log` in the state folder.

A process is known by its pid and its start time, so a recycled pid is never taken for ours. Every process also carries
`HPU_CLUSTER_FOLDER` in its environment: a launcher that is killed between a start and its record loses nothing, because
`marked()` finds everything that belongs to a folder, children included.
Processes are started through a shell that ends at once, so they belong to init and never become zombies of a test run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.errors import ComponentFailed, NotRunning

MARK = "HPU_CLUSTER_FOLDER"

# A background process of a shell without job control leads no group: setsid(1) need not fork, and `$!` is the pid.
_DETACH = 'log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 & echo $!'


@dataclass(frozen=True)
class Process:
    """One running process: `started_at` in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started_at: int

    def alive(self) -> bool:
        state = _stat(self.pid)
        if state is None or state[1] != self.started_at:
            return False
        # A zombie whose other threads are still ending keeps its sockets: it counts until they have gone.
        return state[0] not in "ZX" or _threads(self.pid) > 1

    def send(self, signum: signal.Signals) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a pid, or None when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def _threads(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0


def identify(pid: int) -> Process | None:
    state = _stat(pid)
    return None if state is None else Process(pid, state[1])


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def parent(pid: int) -> Process | None:
    """The parent of a process, or None when either has gone."""
    try:
        found = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
    return identify(found)


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """The cluster's programs talk to each other alone, at addresses that no proxy of the caller's can reach."""
    return {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}


def spawn(argv: Sequence[str], *, folder: Path, log: Path, env: Mapping[str, str] | None = None) -> Process:
    """Start a detached process in a session of its own, marked as belonging to `folder`. ComponentFailed."""
    environment = {**without_proxies(os.environ), **(env or {}), MARK: str(folder)}
    shell = subprocess.run(
        ["sh", "-c", _DETACH, "sh", str(log), *argv],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if shell.returncode:
        raise ComponentFailed(f"{argv[0]} cannot be started: {shell.stderr.strip()}", "may this user start processes?")
    pid = int(shell.stdout)
    # A process that ended already still gets an identity: one that never counts as alive.
    return identify(pid) or Process(pid, -1)


@dataclass(frozen=True)
class _Record:
    """What is written down about a component: enough to find it and to start it again."""

    process: Process
    argv: list[str]
    env: dict[str, str]
    entered: bool


class Supervisor:
    """The named processes of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.logs = folder / "log"

    def start(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, entered: bool = False
    ) -> None:
        """Start `name`, unless it runs. `entered`: argv is an nsenter(1) that forks; the process meant is its child."""
        if self.alive(name):
            return
        process = spawn(argv, folder=self.folder, log=self.log(name), env=env)
        if entered:
            process = _only_child(process)
        record = _Record(process, list(argv), dict(env or {}), entered)
        path = self.run / f"{name}.json"
        path.with_suffix(".new").write_text(json.dumps(asdict(record)))
        path.with_suffix(".new").replace(path)

    def restart(self, name: str) -> None:
        """Start a known component again with the arguments it had; ends it first when it still runs."""
        record = self._record(name)
        self.kill(name)
        self.start(name, record.argv, env=record.env, entered=record.entered)

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL, timeout_seconds: float = 60.0) -> None:
        """Send a signal that ends the process, and wait until it has gone."""
        process = self.process(name)
        process.send(signum)
        deadline = time.monotonic() + timeout_seconds
        while process.alive():
            if time.monotonic() > deadline:
                raise ComponentFailed(
                    f"{name} (pid {process.pid}) survived {signum.name}", "python -m tests.cluster down"
                )
            time.sleep(0.01)

    def signal(self, name: str, signum: signal.Signals) -> None:
        if not self.alive(name):
            raise NotRunning(f"{name} does not run", f"see {self.log(name)}")
        self.process(name).send(signum)

    def process(self, name: str) -> Process:
        return self._record(name).process

    def alive(self, name: str) -> bool:
        try:
            return self.process(name).alive()
        except NotRunning:
            return False

    def names(self) -> list[str]:
        try:
            return sorted(path.stem for path in self.run.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return []

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def tail(self, name: str, lines: int = 12) -> str:
        """The end of a component's log, for an error message."""
        try:
            text = self.log(name).read_text(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(f"  | {line[:300]}" for line in text.splitlines()[-lines:]) or "(the log is empty)"

    def _record(self, name: str) -> _Record:
        try:
            fields = json.loads((self.run / f"{name}.json").read_text())
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none"
            raise NotRunning(
                f"there is no component called {name} in {self.folder}", f"its components are: {known}"
            ) from None
        return _Record(**{**fields, "process": Process(**fields["process"])})


def _only_child(parent: Process, timeout_seconds: float = 60.0) -> Process:
    """The process that nsenter(1) forked into a namespace: nsenter itself only waits for it and passes on its exit."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and parent.alive():
        for child in children(parent.pid):
            if found := identify(child):
                return found
        time.sleep(0.005)
    return Process(parent.pid, -1)


def marked(folder: Path) -> list[Process]:
    """Every process of this folder that this user may see, except the caller and its ancestors."""
    return [process for process, of in _marks() if of == folder]


def marked_folders() -> set[Path]:
    """Every state folder that has a process, also when the folder itself is no longer there."""
    return {folder for _, folder in _marks()}


def memory_bytes(folder: Path) -> int:
    """What the processes of a folder take of the machine's memory; shared pages are divided among their users (PSS)."""
    total = 0
    for process in marked(folder):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def _marks() -> Iterator[tuple[Process, Path]]:
    spared = _ancestry()
    prefix = f"{MARK}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            if variable.startswith(prefix) and (process := identify(int(entry.name))) and process.alive():
                yield process, Path(os.fsdecode(variable.removeprefix(prefix)))


def _ancestry() -> set[int]:
    spared = {os.getpid()}
    above = parent(os.getpid())
    while above is not None and above.pid not in spared:
        spared.add(above.pid)
        above = parent(above.pid)
    return spared


def end_all(folder: Path, timeout_seconds: float = 60.0) -> list[Process]:
    """Kill everything that belongs to a folder, again and again until nothing is left; returns what survived.

    KILL at once: the cluster's data is thrown away with it, and the API server would take its time over open watches.
    """
    deadline = time.monotonic() + timeout_seconds
    while (left := marked(folder)) and time.monotonic() < deadline:
        for process in left:
            process.send(signal.SIGKILL)
        time.sleep(0.05)
    return left
