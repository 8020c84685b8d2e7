"""The stand-ins for CUDA's libraries: the loader takes them for the real ones, and a call says what is wrong."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.images.build import ROOT


def load(name: str) -> ModuleType:
    """A module of the build scripts, which are no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "images" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


elf = load("elf")
without_cuda = load("without_cuda")

LOCK = """\
# by hand
nvidia-cublas==13.4 ; sys_platform == 'linux' \\
    --hash=sha256:aa
nvidia-cuda-runtime==13.2 \\
    --hash=sha256:bb \\
    --hash=sha256:cc
torch==2.15.0 \\
    --hash=sha256:dd
triton==3.9.0 \\
    --hash=sha256:ee
yarl==1.25.1 \\
    --hash=sha256:ff
"""


def test_the_lock_loses_what_only_cuda_needs_with_its_hashes() -> None:
    assert without_cuda.without_cuda_packages(LOCK) == (
        "# by hand\nnvidia-cuda-runtime==13.2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
        "torch==2.15.0 \\\n    --hash=sha256:dd\nyarl==1.25.1 \\\n    --hash=sha256:ff\n"
    )


def test_the_real_lock_keeps_torch_and_loses_gigabytes() -> None:
    lock = (ROOT / "requirements" / "cpu.txt").read_text()
    names = {line.split("==")[0] for line in without_cuda.without_cuda_packages(lock).splitlines() if "==" in line}
    assert {"torch", "numpy", "safetensors", "nvidia-cuda-runtime"} <= names
    assert not names & {"triton", "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-nccl-cu13"}


def test_a_lock_without_cuda_stays_as_it_is() -> None:
    lock = (ROOT / "requirements" / "operator.txt").read_text()
    assert without_cuda.without_cuda_packages(lock) == lock


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program linked against libvendor.so.1: one symbol with a version, one without; the library is then removed."""
    (tmp_path / "vendor.c").write_text("int versioned(void){return 1;} int plain(void){return 2;}")
    (tmp_path / "map").write_text("VENDOR_1 { global: versioned; };")
    (tmp_path / "main.c").write_text(
        "int versioned(void); int main(int n, char **v){ return n > 1 ? versioned() : 0; }\n"
        "int (*address)(void) = versioned;"
    )
    shared = ["cc", "-shared", "-fPIC", "-Wl,-soname,libvendor.so.1", "-Wl,--version-script=map"]
    for command in (
        [*shared, "vendor.c", "-o", "libvendor.so.1"],
        ["cc", "main.c", "-fPIE", "-pie", "./libvendor.so.1", "-Wl,-rpath,$ORIGIN", "-o", "program"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "libvendor.so.1").unlink()
    return tmp_path / "program"


def test_a_program_starts_on_a_stand_in_and_a_call_ends_it_with_a_sentence(program: Path) -> None:
    library = elf.Library.read(program)
    missing = without_cuda.stand_ins(
        {"program": library}, {"libc.so.6": elf.Library(frozenset(), frozenset(), frozenset())}
    )
    assert list(missing) == ["libvendor.so.1"]
    (program.parent / "libvendor.so.1").write_bytes(missing["libvendor.so.1"])
    started = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (started.returncode, started.stderr) == (0, ""), "no word about versions from the loader"
    called = subprocess.run([program, "call"], capture_output=True, text=True, check=False)
    assert called.returncode == 127
    assert called.stderr.startswith("libvendor.so.1 was called, but this environment is made for CPUs")


def test_a_stand_in_has_every_symbol_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "libmany.so.3"
    names = {f"function_{index}" for index in range(500)}
    path.write_bytes(elf.stand_in("libmany.so.3", {}, names))
    library = ctypes.CDLL(str(path))
    assert all(getattr(library, name) for name in names)
    with pytest.raises(AttributeError):
        getattr(library, "function_500")  # noqa: B009 - looked up for its error


def test_stand_ins_are_known_again_and_nothing_else_is(tmp_path: Path) -> None:
    made, other = tmp_path / "libmade.so.1", tmp_path / "libother.so.1"
    made.write_bytes(elf.stand_in("libmade.so.1", {"MADE_1": {"symbol"}}, {"plain"}))
    other.write_bytes(Path(sys.executable).resolve().read_bytes()[:4096])
    assert (elf.is_stand_in(made), elf.is_stand_in(other)) == (True, False)


def test_an_environment_is_given_its_stand_ins_anew(program: Path) -> None:
    library = program.parent / "torch" / "lib"
    library.mkdir(parents=True)
    program.rename(library / "libneeds.so")
    for _ in range(2):
        assert [path.name for path in without_cuda.write_stand_ins(program.parent)] == ["libvendor.so.1"]


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "libscript.so").write_text("INPUT(-lc)")
    with pytest.raises(elf.NotAnElfLibrary, match=r"libscript\.so"):
        elf.Library.read(tmp_path / "libscript.so")
