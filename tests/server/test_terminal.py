"""Somebody at a terminal sees the start move; a log file gets lines and no bars."""

from __future__ import annotations

import itertools
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
from tests.server.running import ROOT, RunningServer, free_port


def test_a_terminal_shows_loading_and_warm_up_moving(shell: Path) -> None:
    ours, theirs = pty.openpty()
    script = {"load_seconds": 1.5, "bucket_seconds": 1.0}
    flags = {"model": str(shell), "host": "127.0.0.1", "port": free_port(), "control_port": free_port()}
    worker = ["tests.server.scripted_worker", "--script", json.dumps(script)]
    command = [sys.executable, "-m", "tests.server.launch", json.dumps(worker), json.dumps(flags)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, cwd=ROOT, stderr=theirs, stdin=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    shown = b""
    end = time.monotonic() + 100
    try:
        while b"kv_blocks" not in shown and time.monotonic() < end:
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 65536)
    finally:
        process.terminate()
        process.wait()
        os.close(ours)
    text = shown.decode(errors="replace")
    for what in ("Loading weights (rank 0)", "Warming up (rank 0)", "1/3 tokens=128", "2/3 tokens=64"):
        assert what in text, text[-3000:]


def test_a_log_file_gets_lines_without_bars_or_colours(echo: RunningServer) -> None:
    assert "phase phase=Loading rank=0" in echo.log
    assert "\x1b[" not in echo.log
    assert "Loading weights" not in echo.log


def test_a_log_file_tells_how_far_a_start_has_come_but_not_at_every_step(shell: Path) -> None:
    script = {"compile_seconds": 4.5, "load_seconds": 4.0, "buckets": 40, "bucket_seconds": 0.2}
    with RunningServer(shell, script) as server:
        log = server.wait_until_ready().log
    lines = [line for line in log.splitlines() if re.search(r"(?<!phase=)(Starting|Loading|WarmingUp) ", line)]
    assert sum("Starting compiling kernels rank=0" in line for line in lines) == 1, log
    assert any(re.search(r"Loading 0/0 MB rank=0", line) for line in lines), log
    steps = [int(found[1]) for line in lines if (found := re.search(r"WarmingUp (\d+)/40 tokens=\d+ rank=0", line))]
    assert len(steps) >= 2, log
    assert steps == sorted(set(steps))
    moments = [
        sum(60**place * int(part) for place, part in enumerate(reversed(line.split()[0].split(":")))) for line in lines
    ]
    gaps = [(later - earlier) % 86400 for earlier, later in itertools.pairwise(moments)]
    assert min(gaps) >= int(LINE_SECONDS) - 1, "whole seconds are shown"
