"""`hpu-engine serve` with another worker: `python -m tests.server.launch COMMAND FLAGS`, a JSON list and an object."""

from __future__ import annotations

import json
import sys

from hpu_engine.server.run import run
from hpu_engine.settings import load_settings

if __name__ == "__main__":
    command, flags = map(json.loads, sys.argv[1:])
    sys.exit(run(load_settings(flags), (sys.executable, "-m", *command)))
