"""Runs a command in a built image as a cluster would at its strictest: its own user, a read-only root, /tmp in memory.

No container engine: a mount and PID namespace, a chroot, no capabilities. What it proves is that the image's content
suffices.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.images.buildah import Buildah

_SCRIPT = """
set -eu
container=$($BUILDAH from --pull-never "$IMAGE")
trap '$BUILDAH rm "$container" >/dev/null' EXIT
root=$($BUILDAH mount "$container")
mount --bind "$root" "$root"
for folder in $BINDS; do mkdir -p "$root/${folder#*=}"; done
for folder in $BINDS; do mount --bind "${folder%%=*}" "$root/${folder#*=}"; done
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/dev"
for device in null zero random urandom; do
  touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm"; mount -t tmpfs tmpfs "$root/dev/shm"; chmod 1777 "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -o remount,ro,bind "$root"
ip link set lo up 2>/dev/null || true
chroot --userspec=65532:65532 --groups= "$root" /usr/bin/env -i "$@"
"""


def run(
    buildah: Buildah,
    image: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    read_only: Mapping[Path, str] | None = None,
    timeout_seconds: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """The finished command. `environment` is all that it gets; `read_only` are folders of the host -> path inside."""
    binds = " ".join(f"{host}={inside.lstrip('/')}" for host, inside in (read_only or {}).items())
    with buildah.room() as room:
        return subprocess.run(
            [
                *("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc", "--"),
                *("sh", "-c", _SCRIPT, "sandbox"),
                *(f"{name}={value}" for name, value in environment.items()),
                *command,
            ],
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                **room.environment,
                "BUILDAH": shlex.join(room.command),
                "IMAGE": image,
                "BINDS": binds,
            },
            pass_fds=(room.hold,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
