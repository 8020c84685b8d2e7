"""Memory of a server: the proportional set size (PSS) of a process and all its descendants, read from /proc.

PSS counts a page that n processes share 1/n times in each, so the sum over the tree counts it once; resident sizes
would count it n times. Reading it needs the right to trace the process (the same user is enough).
"""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_LISTEN = "0A"


def tree_pss_bytes(pid: int) -> int | None:
    """PSS of `pid` and its descendants; None where it cannot be read (gone, another user's)."""
    parents = _parents()
    tree = {pid}
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in tree} - tree
        tree |= more
        grown = bool(more)
    sizes = [_pss_bytes(member) for member in tree]
    root = _pss_bytes(pid)
    return None if root is None else sum(size for size in sizes if size is not None)


def listener_of(port: int) -> int | None:
    """The process of this machine that listens on TCP `port`; the oldest where several do. None: not found."""
    inodes = _listening_inodes(port)
    owners = [int(process.name) for process in _PROC.iterdir() if process.name.isdigit() and _sockets(process) & inodes]
    return min(owners, key=_started, default=None)


def _parents() -> dict[int, int]:
    parents = {}
    for process in _PROC.iterdir():
        if process.name.isdigit():
            fields = _stat(int(process.name))
            if fields is not None:
                parents[int(process.name)] = int(fields[1])
    return parents


def _stat(pid: int) -> list[str] | None:
    """Fields of `stat` behind the command, whose name may hold anything: state, parent, ..."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _started(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if fields is not None else 1 << 62


def _pss_bytes(pid: int) -> int | None:
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes


def _sockets(process: Path) -> set[str]:
    found = set()
    try:
        for descriptor in (process / "fd").iterdir():
            try:
                found.add(str(descriptor.readlink()))
            except OSError:
                continue
    except OSError:
        return set()
    return found
