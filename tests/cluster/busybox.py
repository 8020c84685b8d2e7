"""An image out of Debian's static busybox: what holds a pod's namespaces, and a shell for tests. No registry is asked.

Written as the archive of `docker save` (manifest.json, one layer): `ctr images import` reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path

from tests.cluster.errors import MissingRequirement

_PT_INTERP = 3
IMAGE = "hpu.local/busybox:1"


def archive(name: str = IMAGE) -> bytes:
    """The image as an archive, to be imported under a name. MissingRequirement without a static busybox."""
    program = shutil.which("busybox")
    if program is None or not is_static(Path(program).read_bytes()):
        raise MissingRequirement("no statically linked busybox on PATH", "as root: make system-packages")
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    layer = _tar(
        {
            "bin/busybox": Path(program).read_bytes(),
            "etc/passwd": b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
            "etc/group": b"root:x:0:\nnobody:x:65534:\n",
        },
        links={f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"},
        folders=("tmp", "var", "proc", "dev", "sys"),
    )
    config = {
        "architecture": "amd64",
        "os": "linux",
        # The sandbox's main process does nothing; a test names its own command.
        "config": {"Env": ["PATH=/bin"], "Entrypoint": ["/bin/sleep", "2147483647"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    return _tar(
        {
            "manifest.json": json.dumps(manifest).encode(),
            "config.json": json.dumps(config).encode(),
            "layer.tar": layer,
        }
    )


def is_static(program: bytes) -> bool:
    """Whether a 64-bit ELF program asks for no interpreter (no PT_INTERP segment): it runs in an empty root."""
    if program[:5] != b"\x7fELF\x02":
        return False
    (table,) = struct.unpack_from("<Q", program, 0x20)
    size, count = struct.unpack_from("<HH", program, 0x36)
    return all(struct.unpack_from("<I", program, table + size * index)[0] != _PT_INTERP for index in range(count))


def _tar(files: dict[str, bytes], links: dict[str, str] | None = None, folders: tuple[str, ...] = ()) -> bytes:
    """A tar archive that is the same every time: no times, no owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if name.startswith("bin/") else 0o644
            tar.addfile(entry, io.BytesIO(content))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return buffer.getvalue()
