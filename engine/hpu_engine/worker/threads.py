"""How many threads compute and how they wait for each other: environment variables that count before torch is imported.

A thread that spins at the end of every operation waits for one that has no core as soon as a neighbour (our own
server, a client on the same machine) takes one; sleeping at once costs a wake-up per operation.
"""

from __future__ import annotations

import os
import sys

POLICY = {"OMP_WAIT_POLICY": "passive"}


def apply_thread_policy(pod_workers: int = 1) -> bool:
    """Set what the environment leaves open: an equal share of the processors for each of the pod's workers.

    Returns False, having done nothing, where torch is already imported.
    """
    if "torch" in sys.modules:
        return False
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // pod_workers)))
    for name, value in POLICY.items():
        os.environ.setdefault(name, value)
    return True
