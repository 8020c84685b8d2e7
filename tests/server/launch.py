"""`hpu-engine serve` with the scripted worker for the real one: `python -m tests.server.launch SCRIPT FLAGS`."""

from __future__ import annotations

import json
import sys

from hpu_engine.server.run import run
from hpu_engine.settings import load_settings

if __name__ == "__main__":
    script, flags = sys.argv[1:]
    sys.exit(
        run(
            load_settings(json.loads(flags)), (sys.executable, "-m", "tests.server.scripted_worker", "--script", script)
        )
    )
