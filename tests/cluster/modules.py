"""What is built: the cluster's Go modules, their programs and flags, and the module of another Kubernetes version."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.errors import BuildFailed
from tests.machine import cache_folder

KUBERNETES_VERSION = "1.37.2"
_GO = Path(__file__).parent / "go"
_VERSION = re.compile(r"1\.(\d{1,2})\.\d{1,2}\Z")


@dataclass(frozen=True)
class Program:
    """One binary: the package it is built from, and its name with us."""

    name: str
    package: str

    @property
    def built_as(self) -> str:
        """The name that `go build` gives: the last path element that is not a major version."""
        parts = [part for part in self.package.split("/") if not re.fullmatch(r"v\d+", part)]
        return parts[-1]


@dataclass(frozen=True)
class Module:
    """A folder with go.mod and go.sum, and how to build in it."""

    name: str
    folder: Path
    flags: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


CONTROL_PLANE = (
    Program("etcd", "go.etcd.io/etcd/server/v3"),
    Program("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    Program("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    Program("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    Program("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
)
NODE = (
    Program("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    Program("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"),
)
CONTAINERD = (
    Program("containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
    Program("containerd-shim-runc-v2", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"),
    Program("ctr", "github.com/containerd/containerd/v2/cmd/ctr"),
)
RUNC = (Program("runc", "github.com/opencontainers/runc"),)
# CoreDNS with the plugins that dns.py configures: see go/coredns/main.go.
COREDNS = (Program("coredns", "hpu.dev/tests/cluster/go/coredns"),)
DEVICE_PLUGIN = (Program("deviceplugin", "hpu.dev/tests/cluster/go/deviceplugin"),)
REGISTRY = (Program("registry", "hpu.dev/tests/cluster/go/registry"),)
HELM = (Program("helm", "helm.sh/helm/v4/cmd/helm"),)

_STRIP = ("-trimpath", "-ldflags", "-s -w")
_STATIC = {"CGO_ENABLED": "0"}
containerd = Module("containerd", _GO / "containerd", (*_STRIP, "-tags", "no_btrfs,no_zfs,no_devmapper"), _STATIC)
# runc's seccomp needs libseccomp, so this one is built with a C compiler.
runc = Module("runc", _GO / "runc", (*_STRIP, "-tags", "seccomp"), {"CGO_ENABLED": "1"})
coredns = Module("coredns", _GO / "coredns", _STRIP, _STATIC)
deviceplugin = Module("deviceplugin", _GO / "deviceplugin", _STRIP, _STATIC)
registry = Module("registry", _GO / "registry", _STRIP, _STATIC)
helm = Module("helm", _GO / "helm", _STRIP, _STATIC)


def kubernetes(version: str = KUBERNETES_VERSION) -> Module:
    """The module of one Kubernetes version: the checked-in one, or one derived in the cache."""
    if not (match := _VERSION.match(version)):
        raise BuildFailed(f"{version!r} is not a Kubernetes version", f"write it like {KUBERNETES_VERSION}")
    stamp = " ".join(
        f"-X k8s.io/component-base/version.{key}={value}"
        for key, value in (("gitVersion", f"v{version}"), ("gitMajor", "1"), ("gitMinor", match[1]))
    )
    folder = _GO / "kubernetes" if version == KUBERNETES_VERSION else _derive(version)
    return Module("kubernetes", folder, ("-trimpath", "-ldflags", f"-s -w {stamp}"), _STATIC)


def needed(*, nodes: bool, version: str = KUBERNETES_VERSION) -> list[tuple[Module, tuple[Program, ...]]]:
    """The modules and programs of a cluster of this size."""
    if not nodes:
        return [(kubernetes(version), CONTROL_PLANE)]
    return [
        (kubernetes(version), CONTROL_PLANE + NODE),
        (containerd, CONTAINERD),
        (runc, RUNC),
        (coredns, COREDNS),
        (deviceplugin, DEVICE_PLUGIN),
    ]


def _derive(version: str) -> Path:
    """A module of another version, made once: the staging modules replaced by the releases that belong to it.

    k8s.io/kubernetes replaces its staging modules by folders of its own tree, which a dependency does not inherit.
    """
    folder = cache_folder() / "modules" / f"kubernetes-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "go.sum").exists():
            return folder
        _write_derived(folder, version)
    return folder


def _write_derived(folder: Path, version: str) -> None:
    own = json.loads(_go(["mod", "download", "-json", f"k8s.io/kubernetes@v{version}"], Path("/")))
    text = Path(own["GoMod"]).read_text()
    release = f"v0.{version.removeprefix('1.')}"
    staging = re.findall(r"^\s*(k8s\.io/\S+) => \./staging/", text, re.MULTILINE)
    etcd = re.search(r"go\.etcd\.io/etcd/client/v3 (v\S+)", text)
    if not staging or etcd is None:
        raise BuildFailed(f"go.mod of k8s.io/kubernetes v{version} is not as expected", "choose another version")
    lines = ["module hpu.dev/tests/cluster/go/kubernetes", "", "go 1.26.0", "", "godebug default=go1.26", ""]
    lines += ["tool (", *(f"\t{program.package}" for program in CONTROL_PLANE + NODE), ")", ""]
    lines += [f"require k8s.io/kubernetes v{version}", f"require go.etcd.io/etcd/server/v3 {etcd[1]}", ""]
    lines += ["replace (", *(f"\t{module} => {module} {release}" for module in staging), ")", ""]
    # go.sum is the sign of completeness: it is put in place last.
    aside = folder / ".aside"
    aside.mkdir(exist_ok=True)
    (aside / "go.mod").write_text("\n".join(lines))
    _go(["mod", "tidy"], aside)
    for name in ("go.mod", "go.sum"):
        (aside / name).replace(folder / name)


def _go(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(["go", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(
            f"go {' '.join(arguments)}: {done.stderr.strip()[-600:]}", "check the version and `go env GOPROXY`"
        )
    return done.stdout
