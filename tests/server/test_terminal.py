"""Somebody at a terminal sees the start move; a log file gets lines and no bars."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

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
