"""Free ports on loopback, below the range of outgoing connections, so that none of those takes one by chance.

A chosen port is held until this process ends (or has chosen many others): by a socket that is bound and does not
listen. Who binds the port as servers do gets it all the same; who looks for a free one, in whichever process, does not.
"""

from __future__ import annotations

import random
import socket
from collections import deque

from tests.cluster.errors import MissingRequirement

_RANGE = range(20000, 30000)
_held: deque[socket.socket] = deque(maxlen=256)


def choose(count: int) -> list[int]:
    """`count` different ports that nobody has now; they are held from here on."""
    found: list[int] = []
    for port in random.sample(_RANGE, len(_RANGE)):
        if _hold(port):
            found.append(port)
            if len(found) == count:
                return found
    raise MissingRequirement(
        f"no {count} free ports between {_RANGE.start} and {_RANGE.stop} on 127.0.0.1", "end what listens there"
    )


def _hold(port: int) -> bool:
    """Bind a port that nobody else has bound, and let servers bind it too."""
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", port))
    except OSError:
        holder.close()
        return False
    # Only now: with it, the binding itself would have shared a port that another process holds.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(holder)
    return True
