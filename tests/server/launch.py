"""`hpu-engine serve` with another worker: `python -m tests.server.launch COMMAND FLAGS`, a JSON list and an object.

Beside the settings, `failed_linger_seconds` gives a test more time to look at a server that has failed; `ranks` and
`tensor` make a pod of several workers.
"""

from __future__ import annotations

import json
import sys

from hpu_engine.server import run
from hpu_engine.settings.serve import load_settings

if __name__ == "__main__":
    command, flags = map(json.loads, sys.argv[1:])
    run.FAILED_LINGER_SECONDS = flags.pop("failed_linger_seconds", run.FAILED_LINGER_SECONDS)
    layout = run.PodLayout(flags.pop("ranks", 1), flags.pop("tensor", 1), (sys.executable, "-m", *command))
    sys.exit(run.run(load_settings(flags), layout))
