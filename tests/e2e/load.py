"""A client that streams one answer after another until it is told to stop: `load.py URL MODEL MODE FILE`.

MODE `kept` keeps its connection, `fresh` makes a new one for every request. Each request becomes a line of FILE: how it
ended, and what was wrong if anything was. Nothing is tried again: an error here is an error of a user.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import aiohttp

QUESTION = "Name three rivers."
MAX_TOKENS = 16


async def one(session: aiohttp.ClientSession, url: str, model: str) -> str:
    """Stream one answer; what was wrong with it, or an empty string."""
    body = {
        "model": model,
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    text, finished, done = "", None, False
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return f"HTTP {response.status}: {(await response.text())[:300]}"
        async for raw in response.content:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"error event: {event['error']}"
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    finished = choice.get("finish_reason") or finished
    if not (text and finished and done):
        return f"cut short: text {text!r}, finish_reason {finished!r}, [DONE] {done}"
    return ""


async def run(url: str, model: str, mode: str, file: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    kept = {"force_close": False, "keepalive_timeout": 600}
    connector = aiohttp.TCPConnector(limit=1, **(kept if mode == "kept" else {"force_close": True}))
    timeout = aiohttp.ClientTimeout(total=180, connect=30)
    with file.open("w", buffering=1) as lines:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
            while not stop.is_set():
                began = time.monotonic()
                try:
                    wrong = await one(session, url, model)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    wrong = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(0.2)
                lines.write(json.dumps({"at": time.time(), "seconds": time.monotonic() - began, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
