"""The kernels that engine-cpu gets, as an image with nothing else in it: the Dockerfile's stage `kernels`, made here.

They are those that `make setup` built beside the sources; where it did not, they are built in the same way into the
store. The stage's own base, an image with a compiler, would have to come from a registry.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
from pathlib import Path
from types import ModuleType

from tests.images.buildah import Buildah
from tests.images.errors import MissingProgram, StepFailed
from tests.images.pruning import note_use
from tests.images.scratch import scratch
from tests.images.store import Store, checksum, step

NAME = "localhost/hpu-inference/kernels"
SOURCES = Path("engine", "hpu_engine", "device", "cpu", "native")


def library(store: Store, root: Path) -> Path | None:
    """The library of these sources; None on machines that none is built for."""
    builder = _builder(root)
    beside_sources: Path = builder.ahead_path()
    if beside_sources.exists():
        return beside_sources
    if platform.machine() != "x86_64":
        return None
    kept = store.folder / "kernels"
    if not (kept / beside_sources.name).exists():
        if not shutil.which(builder.COMPILER):
            raise MissingProgram(
                f"{builder.COMPILER} is not installed", "make system-packages (Debian), then try again"
            )
        with step("kernels for processors with AMX"):
            try:
                builder.build_ahead(kept)
            except builder.NativeBuildFailed as error:
                raise StepFailed(f"the kernels are not built: {error}", f"see {SOURCES}") from error
    return kept / beside_sources.name


def ensure(store: Store, buildah: Buildah, kernels: Path | None) -> str:
    """The image with the library, or with an empty folder. Returns its reference, which names the content."""
    reference = f"{NAME}:{checksum(parts(kernels))[:12]}"
    if not buildah.has(reference):
        with scratch(store.scratch) as context:
            folder = context.folder / "kernels"
            folder.mkdir()
            folder.chmod(0o755)  # whatever the umask: the image's user is another
            if kernels is not None:
                shutil.copyfile(kernels, folder / kernels.name)
                (folder / kernels.name).chmod(0o644)
            (context.folder / "Dockerfile").write_text("FROM scratch\nCOPY kernels /kernels\n")
            buildah.run("the image of the kernels", "build", "--tag", reference, context.folder)
    note_use(store, reference)
    return reference


def parts(kernels: Path | None) -> list[tuple[str, bytes]]:
    """What they add to the checksum of an image."""
    return [] if kernels is None else [(kernels.name, kernels.read_bytes())]


def _builder(root: Path) -> ModuleType:
    """build.py of that checkout; the engine that is installed may be another's."""
    spec = importlib.util.spec_from_file_location("native_build", root / SOURCES / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
