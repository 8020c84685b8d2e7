"""The library that is built ahead for processors with AMX: what computes by default, where it fits."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpu_engine.contract import FailureReason
from hpu_engine.device.cpu.native import build
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.settings.serve import load_settings
from hpu_engine.worker.start_up import StartUpError
from tests.engine.direct import open_quietly
from tests.models.tiny import tiny

BUILDER = Path(build.__file__)

NAMED_ONLY = {
    *("AES", "CLDEMOTE", "CLFLUSHOPT", "CLWB", "CRC32", "ENQCMD", "FSGSBASE", "MOVDIR64B", "MOVDIRI", "PCONFIG", "PKU"),
    *("PRFCHW", "PTWRITE", "RDPID", "RDRND", "RDSEED", "SERIALIZE", "SGX", "SHA", "TSXLDTRK", "UINTR", "VAES"),
    *("WAITPKG", "WBNOINVD", "XSAVE", "XSAVEC", "XSAVEOPT", "XSAVES"),
    "AVX512VP2INTERSECT",  # g++ 12 counts it among the processor's, which has none
    *("EVEX256", "EVEX512"),  # widths of the others
}
"""Instruction sets that a compiler uses only where a source names them, as g++ calls them."""
OTHERWISE = {"bmi": "bmi1", "lzcnt": "abm", "sse3": "pni", "pclmul": "pclmulqdq", "lahfsahf": "lahflm"}
"""What g++ and /proc/cpuinfo call by different names."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of the sources as they are."""
    if build.AHEAD_NEEDS - build.instruction_sets():
        pytest.skip("this processor has no AMX, or a part of what comes with it is hidden")
    if build.ahead_path().exists():
        return build.ahead_path()
    return build.build_ahead(tmp_path_factory.mktemp("ahead"))


@pytest.fixture
def at_hand(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ahead_path", lambda: library)


def kernels(**settings: object) -> str:
    config = {"num_kv_blocks": 8, "block_size": 32, **settings}
    path = str(tiny("llama", dtype="bfloat16", head_dim=32))
    return open_quietly(EngineConfig(model=path, **config)).loaded.kernels  # type: ignore[arg-type]


@pytest.mark.usefixtures("at_hand")
def test_a_bfloat16_model_is_computed_on_tiles_by_default() -> None:
    assert kernels() == "tiles"


@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize(
    "asked", [{"kernels": "torch"}, {"dtype": "float32"}, {"exact": True}, {"force_buckets": True}, {"block_size": 24}]
)
def test_torch_computes_what_is_asked_of_it_and_what_tiles_are_not_made_for(asked: dict[str, object]) -> None:
    assert kernels(**asked) == "torch"


def test_a_library_of_other_sources_is_not_used_and_that_is_said(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (*BUILDER.parent.glob("*.cpp"), *BUILDER.parent.glob("*.h"), library):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(build, "_HERE", tmp_path)
    assert kernels() == "tiles"
    assert "built ahead" not in capsys.readouterr().err
    (tmp_path / "linear.cpp").write_text("int changed;")
    assert kernels() == "torch"
    assert f"{library.name} was built ahead of other sources" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", ["amx_tile", "amx_bf16", "avx512_fp16", "avx512_vnni", "fma", "bmi2"])
def test_nothing_is_loaded_on_a_processor_that_lacks_an_instruction_set(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it is loaded")

    (tmp_path / "kernels.so").touch()
    monkeypatch.setattr(build, "ahead_path", lambda: tmp_path / "kernels.so")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(build, "instruction_sets", lambda: build.AHEAD_NEEDS - {lacking})
    assert build.load_ahead(pytest.fail) is None
    monkeypatch.setattr(build, "instruction_sets", lambda: build.AHEAD_NEEDS)
    with pytest.raises(AssertionError, match="it is loaded"):
        build.load_ahead(pytest.fail)


def test_every_instruction_set_that_a_compiler_may_use_is_asked_for() -> None:
    def defined(architecture: str) -> set[str]:
        said = subprocess.run(
            ["g++", architecture, "-dM", "-E", "-xc++", "-"], input="", capture_output=True, text=True, check=True
        ).stdout
        return set(re.findall(r"^#define __([A-Z0-9_]+)__ 1$", said, re.MULTILINE))

    (architecture,) = (flag for flag in build.AHEAD_FLAGS if flag.startswith("-march="))
    may_use = {name.replace("_", "").lower() for name in defined(architecture) - defined("-march=x86-64") - NAMED_ONLY}
    asked = {name.replace("_", "") for name in build.AHEAD_NEEDS}
    assert {OTHERWISE.get(name, name) for name in may_use} - asked == set()


def test_a_file_that_cannot_be_loaded_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.so").write_bytes(b"half of a library")
    monkeypatch.setattr(build, "ahead_path", lambda: tmp_path / "kernels.so")
    monkeypatch.setattr(build, "instruction_sets", lambda: build.AHEAD_NEEDS)
    said: list[str] = []
    assert build.load_ahead(said.append) is None
    assert len(said) == 1
    assert "cannot be loaded, torch's are used" in said[0]


def test_compile_and_torch_s_kernels_exclude_each_other() -> None:
    with pytest.raises(StartUpError, match=r"--compile=true: builds .*, and kernels torch forbids them") as refused:
        kernels(compile=True, kernels="torch")
    assert refused.value.reason is FailureReason.USAGE


def test_the_setting_reaches_the_workers() -> None:
    given: list[dict[str, str]] = [{}, {"kernels": "torch"}]
    reached = [load_settings({"model": "m", **more}).engine_config().kernels for more in given]
    assert reached == ["auto", "torch"]


def run_builder(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    """With the standard library alone, as in an image that has nothing else."""
    return subprocess.run(
        [sys.executable, "-S", str(BUILDER), str(folder)],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_says_that_there_is_no_compiler(tmp_path: Path) -> None:
    done = run_builder(tmp_path / "here", str(tmp_path))
    assert done.returncode == 1
    assert "g++ is not in PATH" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "here").iterdir()) == []


def test_the_command_leaves_the_library_of_its_sources_and_no_older_one(tmp_path: Path) -> None:
    current = tmp_path / build.ahead_path().name
    for path in (current, tmp_path / "kernels-older.so", tmp_path / "linear.cpp"):
        path.write_text("content")
    # What is there need not be built.
    assert run_builder(tmp_path, "").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([current.name, "linear.cpp"])
