"""What is put into a cluster before the object: the operator by Helm, a model on a volume. Safe to do again."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.state import Cluster
from tests.demo.kube import CommandFailed, Kube
from tests.images import nodes
from tests.images.build import Image
from tests.machine import cache_folder

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "hpu-operator"
EXAMPLE = ROOT / "examples" / "smollm2-cpu.yaml"

RELEASE = "hpu-operator"
NAMESPACE = "hpu-system"
CLAIM = "models"

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class NoModel(Exception):
    """The checkpoint could not be put into its folder."""


@dataclass(frozen=True)
class References:
    """Images that the cluster's nodes hold."""

    operator: str
    engine: str


def prepare_images() -> dict[str, Image]:
    """Build what has changed, and unpack it once for all nodes. Before the cluster starts: its nodes begin with it."""
    return nodes.prepare()


def provide_images(cluster: Cluster, images: dict[str, Image]) -> References:
    """See that every node has them, also one that was started with older ones."""
    nodes.provide(cluster, images)
    return References(operator=images["operator"].reference, engine=images["engine-cpu"].reference)


def model_folder() -> Path:
    """A folder with the model `smollm2` in it, as a volume would have it."""
    folder = cache_folder() / "demo" / "models"
    if (folder / "smollm2").exists():  # written aside and renamed: there is no half of it
        return folder
    from tests.models.__main__ import main as write_checkpoint  # torch: seconds that nobody should wait for twice

    if write_checkpoint(["smollm2", str(folder / "smollm2")]):
        raise NoModel(f"{folder / 'smollm2'} could not be written: remove it and run this again")
    return folder


def install_operator(kube: Kube, images: References, *, replicas: int = 1) -> None:
    """`helm upgrade --install`, in a namespace that admits restricted pods only."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}}
    kube.apply(namespace)
    clear_interrupted(kube)
    values = [f"replicas={replicas}", *_image("image", images.operator), *_image("engine.images.cpu", images.engine)]
    settings = [argument for value in values for argument in ("--set-string" if "image" in value else "--set", value)]
    try:
        wait = ("--wait", "--timeout", "120s")
        kube.helm("upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, *settings, *wait)
    except CommandFailed as error:
        with contextlib.suppress(CommandFailed):
            log = kube.kubectl("-n", NAMESPACE, "logs", f"deployment/{RELEASE}", "--tail=5")
            raise CommandFailed(f"{error}\nThe operator's last words:\n{log}") from None
        raise


def clear_interrupted(kube: Kube) -> None:
    """A Helm that was killed leaves its release "pending", and the next one refuses to touch it."""
    releases = json.loads(kube.helm("list", "--namespace", NAMESPACE, "--output", "json") or "[]")
    status = next((item["status"] for item in releases if item["name"] == RELEASE), "")
    if status in {"pending-install", "uninstalling", "failed"}:
        with contextlib.suppress(CommandFailed):
            kube.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "60s")
    elif status.startswith("pending"):
        kube.helm("rollback", RELEASE, "--namespace", NAMESPACE, "--timeout", "60s")


def _image(value: str, reference: str) -> list[str]:
    repository, _, tag = reference.rpartition(":")
    return [f"{value}.repository={repository}", f"{value}.tag={tag}"]


def provide_models(kube: Kube, folder: Path, *, namespace: str = "default") -> None:
    """The folder as a ReadOnlyMany volume with a claim called "models". Every node of a local cluster sees it."""
    volume = f"{namespace}-{CLAIM}"
    size = {"storage": "10Gi"}
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": CLAIM},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM, "namespace": namespace},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
    )


def runs_older_engine(kube: Kube, name: str, images: References) -> bool:
    """Whether the object is there from before a change of the engine's code. Its revision has kept that image."""
    item = kube.get("hpui", name)
    return item is not None and item.get("status", {}).get("image", images.engine) != images.engine
