"""Memory is that of the whole process tree, counted once; a started server is timed and ended with its tree."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpu_engine.bench.client import BenchError
from hpu_engine.bench.memory import listener_of, tree_pss_bytes
from hpu_engine.bench.server_process import running
from tests.cluster import ports

MEGABYTE = 1_000_000
PARENT = """
import os, sys
block = bytearray(os.urandom(1)) * 80_000_000
if os.fork() == 0:
    own = bytearray(b"x") * 40_000_000
    sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.read(); os._exit(0)
sys.stdin.read()
"""
SERVER = """
import asyncio, sys
from tests.bench.scripted_server import ScriptedServer, scripted
async def main():
    await asyncio.sleep(float(sys.argv[2]))
    from aiohttp import web
    server = ScriptedServer(0.0, 0.0)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1])).start()
    import subprocess
    subprocess.Popen(["sleep", "300"])
    await asyncio.sleep(300)
asyncio.run(main())
"""


def test_a_page_shared_by_parent_and_child_counts_once() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        size = tree_pss_bytes(process.pid)
        resident = sum(p.memory_info().rss for p in _tree(process.pid))
        process.stdin.close()
    assert size is not None
    assert 120 * MEGABYTE < size < 160 * MEGABYTE
    assert resident > 200 * MEGABYTE


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def test_a_process_that_is_gone_has_no_memory() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert tree_pss_bytes(process.pid) is None


def test_the_listener_of_a_port_is_found() -> None:
    (port,) = ports.choose(1)
    with socket.create_server(("127.0.0.1", port)):
        assert listener_of(port) == psutil.Process().pid
    assert listener_of(port) is None


async def test_a_started_server_is_timed_and_ended_with_its_children(tmp_path: Path) -> None:
    (port,) = ports.choose(1)
    command = [sys.executable, "-c", SERVER, str(port), "0.7"]
    async with running(command, f"http://127.0.0.1:{port}", log=tmp_path / "log", limit_seconds=60) as started:
        assert 0.7 < started.start_up_seconds < 60
        family = _tree(started.pid)
        assert [process.name() for process in family[1:]] == ["sleep"]
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


async def test_a_server_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(BenchError, match=r"(?s)exited with 1.*no such model"):
        async with running(command, "http://127.0.0.1:9", log=tmp_path / "log", limit_seconds=60):
            pass


async def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('hanging', flush=True); time.sleep(300)"]
    (port,) = ports.choose(1)
    with pytest.raises(BenchError, match=r"(?s)not ready in time.*hanging"):
        async with running(command, f"http://127.0.0.1:{port}", log=tmp_path / "log", limit_seconds=6):
            pass
