"""Calls at the same time do not see each other's temporary files, and those of a killed one do not stay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.images.build import ROOT
from tests.images.buildah import Buildah
from tests.images.errors import StepFailed
from tests.images.scratch import scratch
from tests.images.store import Store

# Takes a folder, starts a child that has it too if asked to, says so, and waits to be killed or told to end.
HOLDER = """
import subprocess, sys
from pathlib import Path
from tests.images.scratch import scratch
with scratch(Path(sys.argv[1])) as own:
    (own.folder / "file").write_text("x")
    child = subprocess.Popen(["sleep", "60"], pass_fds=(own.hold,)) if sys.argv[2] == "with a child" else None
    print(own.folder, child.pid if child else 0, flush=True)
    sys.stdin.read()
"""


class Holder:
    """Another process that uses a folder."""

    def __init__(self, rooms: Path, how: str = "alone") -> None:
        argv = [sys.executable, "-c", HOLDER, str(rooms), how]
        self.process = subprocess.Popen(argv, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout
        folder, child = self.process.stdout.readline().rsplit(maxsplit=1)
        self.folder, self.child = Path(folder), int(child)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.process.communicate(timeout=60)


def test_a_folder_goes_with_its_call(tmp_path: Path) -> None:
    with scratch(tmp_path) as own:
        assert list(own.folder.iterdir()) == []
        (own.folder / "deep" / "er").mkdir(parents=True)
    assert not own.folder.exists()


def test_two_processes_have_a_folder_each(tmp_path: Path) -> None:
    other = Holder(tmp_path)
    with scratch(tmp_path) as own:
        assert own.folder != other.folder
        assert (other.folder / "file").exists()
    assert (other.folder / "file").exists()
    other.end()
    assert not other.folder.exists()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = Holder(tmp_path)
    killed.kill()
    assert (killed.folder / "file").exists()
    with scratch(tmp_path):
        assert not killed.folder.exists()


def test_the_child_of_a_killed_process_keeps_the_folder_as_long_as_it_lives(tmp_path: Path) -> None:
    killed = Holder(tmp_path, "with a child")
    killed.kill()
    try:
        with scratch(tmp_path):
            assert (killed.folder / "file").exists()
    finally:
        os.kill(killed.child, 9)
    deadline = time.monotonic() + 60
    while killed.folder.exists() and time.monotonic() < deadline:  # init buries it
        with scratch(tmp_path):
            time.sleep(0.05)
    assert not killed.folder.exists()


def test_a_listing_that_met_an_image_on_its_way_out_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = 'Error: locating item named "manifest" for image with ID "65ba" (consider removing it): no such file'
    said: list[str | StepFailed] = [StepFailed(f"listing images failed (exit 125):\n    {gone}", "see the log")] * 2
    monkeypatch.setattr(Buildah, "run", lambda *_: answer(said.pop(0)))
    monkeypatch.setattr("tests.images.buildah.LISTING_PAUSE_SECONDS", 0)
    said.append("localhost/one:1")
    assert Buildah(Store(tmp_path), tmp_path).has("localhost/one:1")
    said.append(StepFailed("listing images failed (exit 125):\n    Error: no space left on device", "see the log"))
    with pytest.raises(StepFailed, match="no space left"):
        Buildah(Store(tmp_path), tmp_path).images()


def answer(what: str | StepFailed) -> str:
    if isinstance(what, StepFailed):
        raise what
    return what


@pytest.mark.skipif(os.geteuid() != 0, reason="building images needs root: it makes mounts")
def test_a_build_goes_on_while_others_call_buildah(tmp_path: Path) -> None:
    """Images of one program in a store of their own, built by two processes while this one lists what there is."""
    busybox = shutil.which("busybox")
    assert busybox
    store = Store(tmp_path / "store")
    builders = []
    for name in ("one", "two"):
        context = tmp_path / name
        context.mkdir()
        shutil.copy(busybox, context / "busybox")
        # A step that runs for a while has its files in the call's folder, and its container's mount counted there.
        script = "FROM scratch\nCOPY busybox /busybox\n" + f'RUN ["/busybox", "sleep", "1"]\nLABEL name={name}\n' * 2
        (context / "Dockerfile").write_text(script)
        program = (
            "import sys; from pathlib import Path; from tests.images.buildah import Buildah;"
            "from tests.images.store import Store;"
            "Buildah.on(Store(Path(sys.argv[1]))).run('x', 'build', '--layers', '--tag', sys.argv[2], sys.argv[3])"
        )
        argv = [sys.executable, "-c", program, str(store.folder), f"localhost/{name}:1", str(context)]
        builders.append(subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    buildah = Buildah.on(store)
    calls = 0
    while any(builder.poll() is None for builder in builders):
        buildah.images()
        calls += 1
    said = [builder.communicate()[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], said
    assert calls > 1
    assert buildah.has("localhost/one:1")
    assert buildah.has("localhost/two:1")
    assert [path.name for path in store.scratch.iterdir()] == [".lock"]
