"""What is in the images, run as a cluster runs them: as nobody, on a read-only file system."""

from __future__ import annotations

import json
from pathlib import Path

from hpu_engine.device.cpu.native import build
from tests.images import kernels
from tests.images.build import Image
from tests.images.buildah import Buildah
from tests.images.layout import Layout
from tests.images.sandbox import run
from tests.images.store import Store

ENGINE_BYTES = 3.5e9
OPERATOR_BYTES = 500e6
CODE_BYTES = 4e6

# What the engine uses of torch, on the CPU: oneDNN in bf16, batched products, attention, safetensors, gloo.
TORCH = """
import os, sys, torch, torch.distributed as distributed
from safetensors.torch import load_file, save_file
a = torch.randn(64, 64, dtype=torch.bfloat16)
assert torch.backends.mkldnn.is_available() and not torch.cuda.is_available()
want = (a.float() @ a.float())
assert torch.allclose((a @ a).float(), want, atol=0.5, rtol=0.05)
assert torch.allclose(torch.nn.functional.linear(a, a.T.contiguous()).float(), want, atol=0.5, rtol=0.05)
assert torch.allclose(torch.bmm(a[None], a[None])[0].float(), want, atol=0.5, rtol=0.05)
q = torch.randn(1, 4, 32, 64)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
save_file({"a": a}, "/tmp/a.safetensors")
assert torch.equal(load_file("/tmp/a.safetensors")["a"], a)
distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
one = torch.ones(3); distributed.all_reduce(one); assert one.tolist() == [1, 1, 1]
import hpu_engine
print(os.getuid(), sys.flags.dont_write_bytecode, hpu_engine.__file__)
"""
READ_ONLY = """
import errno
for path in ("/opt/app/x", "/opt/venv/x", "/x"):
    try:
        open(path, "w")
    except OSError as error:
        assert error.errno == errno.EROFS, error
    else:
        raise SystemExit(f"{path} can be written")
"""
# Modules whose bytecode is missing or would be thrown away: they would be compiled at every start.
STALE = """
import importlib.util, pathlib, sys
roots = [pathlib.Path("/opt/app")] + [pathlib.Path(p) for p in sys.path if p.startswith("/opt/venv/")]
bad = 0
for root in roots:
    for source in root.rglob("*.py"):
        cached = pathlib.Path(importlib.util.cache_from_source(str(source)))
        # Bit 0 of the flags: by hash; bit 1: check the source. PEP 552.
        if not cached.exists() or cached.read_bytes()[4:8] != b"\\x01\\x00\\x00\\x00":
            bad += 1
print(bad)
"""


def python(buildah: Buildah, image: Image, script: str) -> str:
    done = run(
        buildah, image.reference, ["/opt/venv/bin/python", "-c", script], environment=environment(buildah, image)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def configuration(buildah: Buildah, image: Image) -> dict[str, object]:
    found = json.loads(buildah.run("inspect", "inspect", "--type", "image", image.reference))["OCIv1"]["config"]
    assert isinstance(found, dict)
    return found


def environment(buildah: Buildah, image: Image) -> dict[str, str]:
    entries = configuration(buildah, image)["Env"]
    assert isinstance(entries, list)
    return dict(entry.split("=", 1) for entry in entries)


def unpacked_bytes(buildah: Buildah, image: Image) -> int:
    done = run(buildah, image.reference, ["du", "-sxb", "/"], environment={"PATH": "/usr/bin:/bin"})
    return int(done.stdout.split()[0])


def test_the_cpu_image_computes_with_torch_as_nobody_on_a_read_only_root(
    buildah: Buildah, images: dict[str, Image]
) -> None:
    assert python(buildah, images["engine-cpu"], TORCH) == "65532 0 /opt/app/hpu_engine/__init__.py"
    python(buildah, images["engine-cpu"], READ_ONLY)


def test_the_cpu_image_is_small_although_the_index_has_only_a_cuda_build(
    buildah: Buildah, images: dict[str, Image]
) -> None:
    size = unpacked_bytes(buildah, images["engine-cpu"])
    print(f"engine-cpu: {size / 1e9:.2f} GB unpacked")
    assert size <= ENGINE_BYTES


def test_the_operator_image_has_no_torch(buildah: Buildah, images: dict[str, Image]) -> None:
    size = unpacked_bytes(buildah, images["operator"])
    print(f"operator: {size / 1e6:.0f} MB unpacked")
    assert size <= OPERATOR_BYTES
    script = (
        "import importlib.util as u, kopf, kubernetes, hpu_operator; print(u.find_spec('torch'), u.find_spec('numpy'))"
    )
    assert python(buildah, images["operator"], script) == "None None"
    python(buildah, images["operator"], READ_ONLY)


def test_the_entry_points_are_the_two_programs(buildah: Buildah, images: dict[str, Image]) -> None:
    for target, program in (("operator", "hpu-operator"), ("engine-cpu", "hpu-engine")):
        found = configuration(buildah, images[target])
        assert found["User"] == "65532:65532"
        assert found["Entrypoint"] == [f"/opt/app/bin/{program}"]
        done = run(
            buildah,
            images[target].reference,
            [f"/opt/app/bin/{program}", "--help"],
            environment=environment(buildah, images[target]),
        )
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout or "usage" in done.stdout


def test_nothing_is_compiled_at_start(buildah: Buildah, images: dict[str, Image]) -> None:
    assert python(buildah, images["operator"], STALE) == "0"
    # torch ships a few templates and tests that no Python compiles.
    assert int(python(buildah, images["engine-cpu"], STALE)) < 20


def test_code_is_a_small_layer_of_its_own(store: Store, images: dict[str, Image]) -> None:
    layout = Layout(store.layout)
    for target, count in (("operator", 3), ("engine-cpu", 4)):
        layers = json.loads(layout.blob(images[target].digest).read_text())["layers"]
        assert len(layers) == count, "base, dependencies, for the CPU the kernels, code"
        assert layers[-1]["size"] < CODE_BYTES


def test_the_cpu_image_has_the_kernels_of_its_own_sources_and_the_operator_image_has_none(
    store: Store, snapshot: Path, buildah: Buildah, images: dict[str, Image]
) -> None:
    library = kernels.library(store, snapshot)
    script = (
        "import pathlib; from hpu_engine.device.cpu.native import build;"
        "found = [path.name for path in pathlib.Path('/opt').rglob('kernels-*')];"
        "print(found, found in ([], [build.ahead_path().name]), build.load_ahead(print) is not None)"
    )
    names = [] if library is None else [library.name]
    fits = library is not None and not build.AHEAD_NEEDS - build.instruction_sets()
    assert python(buildah, images["engine-cpu"], script) == f"{names} True {fits}"
    none = "import pathlib; print([*pathlib.Path('/opt').rglob('kernels-*')])"
    assert python(buildah, images["operator"], none) == "[]"


def test_nothing_of_this_machine_is_in_the_images(buildah: Buildah, images: dict[str, Image]) -> None:
    for image in images.values():
        script = "ls /run/secrets /etc/apt/sources.list /etc/pip.conf /var/cache/uv ~root/.cache 2>/dev/null; true"
        done = run(buildah, image.reference, ["sh", "-c", script], environment={"PATH": "/usr/bin:/bin"})
        assert done.stdout == "", done.stdout
        history = json.dumps(
            json.loads(buildah.run("inspect", "inspect", "--type", "image", image.reference))["History"]
        )
        assert str(Path.home()) + "/" not in history
