"""Makes a CUDA build of torch run where there is no CUDA. Runs while the CPU image is built and while the development
environment is set up, so that both hold the same; standard library only.

The common index serves torch for Linux only as a CUDA build. Its libraries are linked against 4 GB of NVIDIA's, and the
loader wants every one of them present although a CPU calls none; loaded, they cost each process 260 MB. So those
packages are left out, and in the place of each missing library comes one of a few kilobytes that has the same name and
symbols. A call into one ends the process with a sentence that says so: no wrong answer is possible.

  without_cuda.py lock FILE       the lock without the packages that only CUDA needs, to standard output
  without_cuda.py libraries SITE  stand-ins for the missing libraries that torch in SITE is linked against

With an index that serves a CPU build nothing is left out and nothing is missing, so both do nothing. Stand-ins are
machine code for x86_64; on other processors everything stays as the lock has it.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from elf import Library, is_stand_in, stand_in

# Loaded in earnest: the CUDA runtime registers torch's kernels while it is loaded and then says that there is no
# device; torch's profiler is linked against CUPTI.
KEPT = frozenset({"nvidia-cuda-runtime", "nvidia-cuda-cupti"})
_CUDA_ONLY = re.compile(r"(nvidia|cuda)-[a-z0-9-]+\Z|triton\Z")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)==")
# The driver's own library is missing wherever there is no card: that is how CUDA learns it.
_DRIVER = frozenset({"libcuda.so.1"})
_HAS_STAND_INS = platform.machine() == "x86_64"
_SYSTEM_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/local/lib")


def without_cuda_packages(lock: str) -> str:
    """The text of a hashed lock without the requirements (each with its hash lines) that only CUDA needs."""
    if not _HAS_STAND_INS:
        return lock
    kept: list[str] = []
    leaving_out = False
    for line in lock.splitlines():
        if requirement := _REQUIREMENT.match(line):
            name = requirement[1].lower()
            leaving_out = bool(_CUDA_ONLY.match(name)) and name not in KEPT
        if not leaving_out:
            kept.append(line)
    return "\n".join(kept) + "\n"


def stand_ins(libraries: dict[str, Library], system: dict[str, Library]) -> dict[str, bytes]:
    """The missing libraries by file name, given those of the environment and those of the system.

    A versioned symbol belongs to the library that its version names. A symbol without version may come from any of
    the missing ones; the first has them all, because the loader looks in all anyway.
    """
    present = libraries | system
    missing = sorted({name for library in libraries.values() for name in library.needed} - present.keys() - _DRIVER)
    if not missing:
        return {}
    defined = {symbol for library in present.values() for symbol in library.defined}
    versioned: dict[str, dict[str, set[str]]] = {name: {} for name in missing}
    plain: set[str] = set()
    for library in libraries.values():
        for symbol in library.undefined:
            if symbol.file in versioned:
                versioned[symbol.file].setdefault(symbol.version, set()).add(symbol.name)
            elif not symbol.file and symbol.name not in defined:
                plain.add(symbol.name)
    return {name: stand_in(name, versioned[name], plain if index == 0 else set()) for index, name in enumerate(missing)}


def _read(folders: list[Path], names: set[str] | None = None) -> dict[str, Library]:
    found: dict[str, Library] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.so*")):
            if path.is_file() and (names is None or path.name in names):
                found.setdefault(path.name, Library.read(path))
    return found


def write_stand_ins(site: Path) -> list[Path]:
    """Writes what torch in `site` misses into its library folder, anew if it was done before; returns the files."""
    target = site / "torch" / "lib"
    for path in target.glob("*.so*"):
        if is_stand_in(path):
            path.unlink()
    libraries = _read([target, *sorted(site.glob("nvidia/*/lib"))])
    wanted = {name for library in libraries.values() for name in library.needed}
    system = _read([Path(folder) for folder in _SYSTEM_FOLDERS], wanted)
    written = []
    for name, content in stand_ins(libraries, system).items():
        path = target / name
        path.write_bytes(content)
        path.chmod(0o755)
        written.append(path)
    return written


def main(arguments: list[str]) -> int:
    match arguments:
        case ["lock", file]:
            sys.stdout.write(without_cuda_packages(Path(file).read_text()))
        case ["libraries", site]:
            for path in write_stand_ins(Path(site)) if _HAS_STAND_INS else ():
                sys.stdout.write(f"stand-in for {path.name}\n")
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
