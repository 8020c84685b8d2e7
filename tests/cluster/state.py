"""The state folder of a cluster: where it is, what it says, who may change it.

`cluster.json` is written before anything is made, so that whatever a killed launcher leaves can be found and removed.
A file lock beside the folder serialises launchers; the kernel drops it with the process, so a lock is never stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from tests.cluster.errors import NotRunning, StateConflict
from tests.cluster.processes import Process, identify
from tests.machine import cache_folder

# A name is part of a path, and unix socket paths end at 107 bytes.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
_CHECKOUT = Path(__file__).resolve().parents[2]
_TEST_ROOT = re.compile(r"t-(\d+)-(\d+)-\d+\Z")
_number = count()


@dataclass(frozen=True)
class Cluster:
    """What was asked for and what was chosen for it. `nodes == 0` is the control plane alone, without root.

    `owner` is the test run that made it: when it has gone, or the `checkout`, anyone may remove the cluster.
    `api_port` is the port on the host's loopback in both sizes.
    """

    name: str
    folder: Path
    nodes: int
    cards: int
    version: str
    binaries: Path
    api_port: int
    etcd_port: int
    peer_port: int
    controllers_port: int
    scheduler_port: int
    ready: bool = False
    owner: Process | None = None
    checkout: Path = _CHECKOUT

    @property
    def uid(self) -> str:
        return uid_of(self.folder)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.api_port}"

    def kubectl_environment(self) -> dict[str, str]:
        """What kubectl is told: the cluster, and a place for what it learns of it that is not ~/.kube."""
        return {"KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(self.folder / "kubectl")}

    def node_names(self) -> list[str]:
        return [f"node-{index}" for index in range(self.nodes)]


def of_user() -> Path:
    """Where every checkout of this user has the folder of its clusters, and every test that wants one of its own."""
    return Path(f"/tmp/hpu-clusters-{os.getuid()}")


def root() -> Path:
    """Where the state folders of this checkout are: names, `down --all` and `status` are about these alone."""
    if given := os.environ.get("HPU_CLUSTERS"):
        return Path(given).absolute()
    return of_user() / hashlib.sha256(str(_CHECKOUT).encode()).hexdigest()[:8]


def root_of_test() -> Path:
    """A new value of HPU_CLUSTERS for one test; once this process has gone, anyone may remove what is in it."""
    process = this_process()
    return of_user() / f"t-{process.pid}-{process.started_at}-{next(_number)}"


def kept_logs(name: str) -> Path:
    """Where the logs of a start that failed are kept: the state folder goes."""
    return cache_folder() / "logs" / name


def folder_of(name: str) -> Path:
    if not _NAME.match(name):
        raise StateConflict(
            f"{name!r} is not a cluster name",
            "use up to 32 lower-case letters, digits and dashes, not starting with a dash",
        )
    return root() / name


def uid_of(folder: Path) -> str:
    """What names the things of a cluster that lie outside its folder. Found again without reading the folder."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:8]


def save(cluster: Cluster) -> None:
    path = cluster.folder / "cluster.json"
    text = json.dumps(asdict(cluster), default=str, indent=1)
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def mark_ready(cluster: Cluster) -> Cluster:
    ready = replace(cluster, ready=True)
    save(ready)
    return ready


def load(name: str) -> Cluster:
    """Read a cluster's record; NotRunning when there is none, StateConflict when the folder is not one of ours."""
    return read(folder_of(name))


def read(folder: Path) -> Cluster:
    """Like `load`, for a folder that may be another checkout's."""
    name, path = folder.name, folder / "cluster.json"
    try:
        fields = json.loads(path.read_text())
        owner = fields.pop("owner")
        fields |= {key: Path(fields[key]) for key in ("folder", "binaries", "checkout")}
        return Cluster(**fields, owner=Process(**owner) if owner else None)
    except (FileNotFoundError, NotADirectoryError):
        raise NotRunning(
            f"no cluster called {name} in {folder.parent}", f"python -m tests.cluster up --name {name}"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise StateConflict(f"{path} cannot be read: {error}", f"python -m tests.cluster down --name {name}") from None


def names() -> list[str]:
    """Every state folder, readable or not."""
    return sorted(path.name for path in _entries(root()) if path.is_dir() and _NAME.match(path.name))


def folders_of_user() -> list[Path]:
    """Every state folder of every checkout and test of this user."""
    return [folder for one in _entries(of_user()) for folder in _entries(one) if folder.is_dir()]


def _entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing when somebody has removed it."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_orphan(folder: Path) -> bool:
    """Whether a state folder's test run has gone without removing it, or the checkout that it belonged to."""
    test = _TEST_ROOT.match(folder.parent.name)
    if test and not Process(int(test[1]), int(test[2])).alive():
        return True
    try:
        cluster = read(folder)
    except (NotRunning, StateConflict):
        return False
    return bool(cluster.owner and not cluster.owner.alive()) or not cluster.checkout.exists()


def _make_root(folder: Path) -> None:
    """Make the folder of state folders; StateConflict when somebody else has put theirs where this user's should be."""
    if folder.parent == of_user():
        of_user().mkdir(mode=0o700, exist_ok=True)
        found = of_user().lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise StateConflict(f"{of_user()} is another user's", "remove it, or set HPU_CLUSTERS to a folder of yours")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait_seconds: float) -> Iterator[None]:
    """Hold the right to change a cluster; StateConflict when another launcher keeps it longer than `wait_seconds`."""
    path = folder.with_suffix(".lock")
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            _make_root(folder.parent)
            handle = path.open("a+")
        except FileNotFoundError:
            continue  # whoever removed the last other cluster removed the empty root just now
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            handle.close()
            if time.monotonic() > deadline:
                raise StateConflict(
                    f"another launcher (pid {holder}) is at work on cluster {folder.name}",
                    f"wait for it, and if it never ends: kill {holder}",
                ) from None
            time.sleep(0.1)
            continue
        # The holder before us may have removed the file: only a lock on the file that has the name counts.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle.fileno()).st_ino == path.stat().st_ino:
                break
        handle.close()
    try:
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield
    finally:
        if not folder.exists():
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
                if folder.parent.parent == of_user():
                    of_user().rmdir()
        handle.close()


def this_process() -> Process:
    process = identify(os.getpid())
    assert process is not None
    return process
