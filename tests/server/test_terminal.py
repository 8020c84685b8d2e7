"""Somebody at a terminal sees the start move; a log file gets lines and no bars."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from hpu_engine.server.terminal import LINE_SECONDS
from tests.server.running import PATIENCE_SECONDS, ROOT, RunningServer, free_port, wait_until


def test_a_terminal_shows_loading_and_warm_up_moving(shell: Path, tmp_path: Path) -> None:
    """The worker stays where it is until the terminal has shown it."""
    ours, theirs = pty.openpty()
    script = {"hold": str(tmp_path)}
    shows = {
        "load": "Loading weights (rank 0)",
        "tokens=256": "Warming up (rank 0)",
        "tokens=128": "1/3 tokens=128",
        "tokens=64": "2/3 tokens=64",
    }
    for place in shows:
        (tmp_path / place).touch()
    flags = {"model": str(shell), "host": "127.0.0.1", "port": free_port(), "control_port": free_port()}
    worker = ["tests.server.scripted_worker", "--script", json.dumps(script)]
    command = [sys.executable, "-m", "tests.server.launch", json.dumps(worker), json.dumps(flags)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, cwd=ROOT, stderr=theirs, stdin=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    try:
        shown = b""
        for place, what in shows.items():
            shown = read_until(ours, shown, what)
            (tmp_path / place).unlink()
        read_until(ours, shown, "kv_blocks")
    finally:
        process.terminate()
        process.wait()
        os.close(ours)


def read_until(terminal: int, shown: bytes, what: str) -> bytes:
    """All that a terminal has shown, once `what` is in it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while what.encode() not in shown:
        assert time.monotonic() < end, f"{what} is not shown: {shown[-3000:]!r}"
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 65536)
    return shown


def test_a_log_file_gets_lines_without_bars_or_colours(echo: RunningServer) -> None:
    assert "phase phase=Loading rank=0" in echo.log
    assert "\x1b[" not in echo.log
    assert "Loading weights" not in echo.log


def test_a_log_file_tells_how_far_a_start_has_come_but_not_at_every_step(shell: Path) -> None:
    script = {"buckets": 1000, "bucket_seconds": 0.2}
    with RunningServer(shell, script, held=("compile", "load")) as server:
        for place, line in (("compile", "Starting compiling kernels rank=0"), ("load", "Loading 0/0 MB rank=0")):
            wait_until(lambda line=line: line in server.log, f"{line} is logged", server)
            server.release(place)
        wait_until(lambda: len(shapes(server.log)) >= 2, "two lines of warm-up are logged", server)
        log = server.log
    lines = [line for line in log.splitlines() if re.search(r"(?<!phase=)(Starting|Loading|WarmingUp) ", line)]
    assert sum("Starting compiling kernels rank=0" in line for line in lines) == 1, log
    assert shapes(log) == sorted(set(shapes(log)))
    moments = [
        sum(60**place * int(part) for place, part in enumerate(reversed(line.split()[0].split(":")))) for line in lines
    ]
    # One line may be late, and the next one in time.
    assert (moments[-1] - moments[0]) % 86400 >= (len(lines) - 2) * LINE_SECONDS, log


def shapes(log: str) -> list[int]:
    """How many shapes were done at each line of warm-up."""
    return [int(done) for done in re.findall(r"WarmingUp (\d+)/1000 tokens=\d+ rank=0", log)]
