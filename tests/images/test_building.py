"""How the images are built: once per content, code apart from dependencies, the index known to the build alone."""

from __future__ import annotations

import http.server
import json
import re
import tarfile
import threading
from pathlib import Path

import pytest

from tests.images import base
from tests.images.build import ROOT, Bases, Image, build, recorded, sources, tag
from tests.images.buildah import Buildah
from tests.images.errors import StepFailed, UnknownImage
from tests.images.layout import Layout
from tests.images.pruning import note_use
from tests.images.sandbox import run
from tests.images.store import Store

STAND_IN_TORCH = "__version__ = '2.11.0+stand.in'\n"


def layers(store: Store, image: Image) -> list[str]:
    return [layer["digest"] for layer in json.loads(Layout(store.layout).blob(image.digest).read_text())["layers"]]


def test_a_second_build_does_nothing(
    store: Store, snapshot: Path, images: dict[str, Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("buildah was called")

    monkeypatch.setattr(Buildah, "run", refuse)
    assert build(store=store, root=snapshot) == images


def test_an_image_whose_layer_was_lost_is_built_again(own: Store, snapshot: Path) -> None:
    built = build(["operator"], root=snapshot, store=own)["operator"]
    Layout(own.layout).blob(layers(own, built)[-1]).unlink()
    again = build(["operator"], root=snapshot, store=own)["operator"]
    assert Layout(own.layout).is_whole(again.digest)
    assert recorded(own)["operator"].digest == again.digest


def test_a_change_of_code_makes_one_small_layer(own: Store, checkout: Path) -> None:
    before = build(["operator"], root=checkout, store=own)["operator"]
    layers_before = layers(own, before)
    with (checkout / "operator/hpu_operator/__init__.py").open("a") as file:
        file.write("# changed\n")
    after = build(["operator"], root=checkout, store=own)["operator"]
    assert after.reference != before.reference
    assert layers(own, after)[:-1] == layers_before[:-1]
    assert layers(own, after)[-1] != layers_before[-1]
    # Whoever asked for the one before may still read it.
    assert Layout(own.layout).is_whole(before.digest)


def test_kernels_that_were_built_ahead_are_in_the_name_of_the_cpu_image_alone(tmp_path: Path) -> None:
    def names(target: str) -> set[str]:
        return {
            tag(ROOT, target, Bases(), library) for library in (None, tmp_path / "kernels-1.so", tmp_path / "other")
        }

    (tmp_path / "kernels-1.so").write_text("one")
    (tmp_path / "other").write_text("another")
    assert (len(names("engine-cpu")), len(names("operator"))) == (3, 1)
    assert not [path for path in sources(ROOT, "operator") if path.suffix == ".so"]


class _EmptyIndex(http.server.BaseHTTPRequestHandler):
    """A package index that has nothing; its server remembers who asked."""

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        self.server.asked.append((self.headers["User-Agent"].split("/")[0], self.path))
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the library calls it
        pass


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EmptyIndex)
        self.asked: list[tuple[str, str]] = []


def test_the_package_index_is_told_to_the_build_and_kept_nowhere(
    own: Store, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    marker = "private-index-of-this-machine"
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"http://127.0.0.1:{server.server_port}/{marker}/")
    # Another content, so that no layer comes from the cache; and one package, for the time that all would take.
    requirements = checkout / "requirements"
    with (requirements / "build.txt").open("a") as file:
        file.write(f"# {server.server_port}\n")
    wanted = re.search(r"^idna==(?:.*\\\n)+.*\n", (requirements / "operator.txt").read_text(), re.MULTILINE)
    assert wanted
    (requirements / "operator.txt").write_text(wanted[0])
    try:
        image = build(["operator"], root=checkout, store=own)["operator"]
    finally:
        server.shutdown()
        server.server_close()
    assert {tool for tool, path in server.asked if marker in path} == {"pip", "uv"}, "both were told of the index"
    layout = Layout(own.layout)
    for digest in layout.referenced(image.digest):
        blob = layout.blob(digest)
        if blob.stat().st_size < 100_000:
            assert marker.encode() not in blob.read_bytes()
    for digest in layers(own, image)[1:]:
        with tarfile.open(layout.blob(digest)) as tar:
            for entry in tar:
                file_object = tar.extractfile(entry) if entry.isfile() else None
                assert file_object is None or marker.encode() not in file_object.read(), entry.name


def test_the_gaudi_image_leaves_the_torch_of_its_base_alone(
    own: Store, buildah: Buildah, snapshot: Path, tmp_path: Path
) -> None:
    """On a stand-in: our base with a torch and a Gaudi bridge of its own. Intel's image was not run."""
    site = "usr/lib/python3/dist-packages"
    for name, content in (("torch/__init__.py", STAND_IN_TORCH), ("habana_frameworks/__init__.py", "")):
        path = tmp_path / "rootfs" / site / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(f"FROM {base.REFERENCE}\nCOPY rootfs /\nENV PATH=/usr/bin:/bin GC_KERNEL_PATH=/usr/lib/tpc\n")
    reference = "localhost/hpu-inference/gaudi-stand-in:test"
    said = buildah.run("the stand-in", "build", "--layers", "--pull=false", "--tag", reference, tmp_path)
    note_use(own, reference, said)  # so that its steps stay in the cache

    image = build(["engine-gaudi"], root=snapshot, store=own, bases=Bases(gaudi=reference))["engine-gaudi"]
    before = json.loads(buildah.run("inspect", "inspect", "--type", "image", reference))["OCIv1"]["rootfs"]["diff_ids"]
    found = json.loads(buildah.run("inspect", "inspect", "--type", "image", image.reference))["OCIv1"]
    assert found["rootfs"]["diff_ids"][: len(before)] == before, "the base's layers come first, as they are"
    assert "GC_KERNEL_PATH=/usr/lib/tpc" in found["config"]["Env"]
    script = (
        "import torch, habana_frameworks, safetensors, tokenizers, hpu_engine, pathlib;"
        "print(torch.__version__, torch.__file__, hpu_engine.__file__);"
        "print([p.name for p in pathlib.Path('/opt/venv').rglob('torch')])"
    )
    done = run(buildah, image.reference, ["/opt/venv/bin/python", "-c", script], environment={"PATH": "/usr/bin:/bin"})
    assert done.stdout.splitlines() == [
        f"2.11.0+stand.in /{site}/torch/__init__.py /opt/app/hpu_engine/__init__.py",
        # safetensors has an adapter of that name; the package is not there.
        "[]",
    ], done.stderr


def test_an_unknown_target_is_refused_with_those_that_exist(store: Store) -> None:
    with pytest.raises(UnknownImage, match="operator, engine-cpu, engine-gaudi"):
        build(["engine-tpu"], store=store)


def test_the_gaudi_image_without_a_base_says_what_to_give(store: Store) -> None:
    with pytest.raises(UnknownImage, match="--gaudi-base"):
        build(["engine-gaudi"], store=store)


def test_a_failing_step_shows_the_end_of_its_output(own: Store, checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text("this is not TOML")
    with pytest.raises(StepFailed, match=r"(?si)exit .*toml"):
        build(["operator"], root=checkout, store=own)
