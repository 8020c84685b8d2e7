"""One node: namespaces, folders, containerd, kube-proxy, kubelet.

A node sees the standard paths. Its own folders are mounted over /run, /var/lib and /var/log inside its mount namespace:
sockets, images, volumes, CNI leases and pod logs are the node's own, nodes do not meet, and the host keeps nothing.
Programs and configuration are at /run/hpu.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import busybox, cgroups, network
from tests.cluster.api import wait_for
from tests.cluster.control_plane import check_alive
from tests.cluster.errors import ComponentFailed
from tests.cluster.network import Room
from tests.cluster.processes import Supervisor
from tests.cluster.state import Cluster

CNI_PLUGINS = Path("/usr/lib/cni")
BIN = "/run/hpu/bin"
ETC = "/run/hpu/etc"
_CONTAINERD = "/run/containerd/containerd.sock"

# What a kubelet sets for the whole machine at its start (to panic on an oops, for one). Ours writes to these instead.
_MACHINE_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


@dataclass(frozen=True)
class Node:
    """A node of a cluster, by its index; its components are NAME (the namespaces), NAME-containerd and so on."""

    cluster: Cluster
    index: int
    supervisor: Supervisor

    @property
    def name(self) -> str:
        return f"node-{self.index}"

    @property
    def address(self) -> str:
        return network.node_address(self.index)

    @property
    def folder(self) -> Path:
        return self.cluster.folder / self.name

    @property
    def room(self) -> Room:
        return network.find_room(self.supervisor, self.name)

    @property
    def components(self) -> list[str]:
        return [self.component(part) for part in ("containerd", "proxy", "kubelet")]

    def component(self, part: str) -> str:
        return f"{self.name}-{part}"

    def start(self, part: str, argv: Sequence[str]) -> None:
        """Start a process of the node inside its namespaces, with the cluster's programs on PATH."""
        environment = {
            "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "TMPDIR": "/run/hpu/tmp",
        }
        self.supervisor.start(self.component(part), [*self.room.enter, *argv], env=environment, entered=True)


def open_node(cluster: Cluster, index: int, supervisor: Supervisor, control_plane: Room) -> Node:
    """Namespaces, links, folders and cgroups of a node, up to a containerd that has the sandbox image."""
    node = Node(cluster, index, supervisor)
    network.open_room(supervisor, node.name)
    network.connect(control_plane, node.room, index, cluster.nodes)
    _furnish(node)
    _place_images(node)
    root = cgroups.create(cluster.uid, node.name)
    _configure(node, root)
    node.start("containerd", [f"{BIN}/containerd", "--config", f"{ETC}/containerd.toml"])
    wait_until_runtime_serves(node)
    import_image(node, busybox.archive())
    return node


def wait_until_runtime_serves(node: Node, timeout_seconds: float = 120.0) -> float:
    """Wait until containerd answers for its CRI plugin; seconds it took."""
    argv = [*node.room.enter, f"{BIN}/ctr", "--connect-timeout", "1s", "plugins", "ls", "id==cri"]
    return wait_for(
        f"{node.name}: containerd",
        lambda: _succeeds(argv),
        timeout_seconds=timeout_seconds,
        check=lambda: check_alive(node.supervisor, [node.component("containerd")]),
    )


def _succeeds(argv: Sequence[str]) -> bool:
    """Whether a command that asks something does so in time; who does not answer will be asked again."""
    try:
        return subprocess.run(argv, capture_output=True, check=False, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def join(node: Node) -> None:
    """Start kube-proxy and the kubelet; the API server must answer."""
    node.start(
        "proxy",
        [
            f"{BIN}/kube-proxy",
            f"--kubeconfig={ETC}/kube-proxy.kubeconfig",
            "--proxy-mode=nftables",
            f"--hostname-override={node.name}",
            f"--cluster-cidr={network.POD_RANGE}",
            # The table of connections has one size for the whole machine: left alone.
            "--conntrack-max-per-core=0",
            "--conntrack-min=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ],
    )
    node.start(
        "kubelet",
        [
            f"{BIN}/kubelet",
            f"--config={ETC}/kubelet.json",
            f"--kubeconfig={ETC}/kubelet.kubeconfig",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
        ],
    )


def import_image(node: Node, image: bytes | Path) -> None:
    """Import an archive (of an OCI layout or of `docker save`) under the names it carries. ComponentFailed."""
    archive = subprocess.PIPE if isinstance(image, bytes) else image.open("rb")
    snapshotter = _snapshotter(node)
    # containerd's own import unpacks for overlayfs alone; ctr does it for any other.
    how = ["--snapshotter", snapshotter, *(["--local"] if snapshotter != "overlayfs" else [])]
    argv = [*node.room.enter, f"{BIN}/ctr", "--namespace", "k8s.io", "images", "import", *how, "-"]
    with subprocess.Popen(argv, stdin=archive, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        output, _ = process.communicate(image if isinstance(image, bytes) else None)
    if not isinstance(archive, int):
        archive.close()
    if process.returncode:
        raise ComponentFailed(
            f"{node.name}: ctr images import: {output.decode(errors='replace').strip()[-600:]}",
            f"is it an image archive? containerd's log: {node.supervisor.log(node.component('containerd'))}",
        )


def _furnish(node: Node) -> None:
    """Mount the node's folders over the standard paths. /run is fresh at every boot, as on a machine; disks stay."""
    shutil.rmtree(node.folder / "run", ignore_errors=True)
    for place in ("run/hpu/bin", "run/hpu/etc", "run/hpu/tmp", "run/hpu/sys", "var-lib", "var-log"):
        (node.folder / place).mkdir(parents=True, exist_ok=True)
    lines = [
        f"cd {shlex.quote(str(node.folder))}",
        f"mount --bind {shlex.quote(str(node.cluster.binaries))} run/hpu/bin",
        "mount --rbind run /run",
        "mount --bind var-lib /var/lib",
        "mount --bind var-log /var/log",
    ]
    for setting, value in _MACHINE_SETTINGS.items():
        if not Path("/proc/sys", setting).exists():
            continue
        substitute = node.folder / "run/hpu/sys" / setting.replace("/", ".")
        substitute.write_text(value)
        lines.append(f"mount --bind run/hpu/sys/{substitute.name} /proc/sys/{setting}")
    node.room.run(["sh", "-ec", "\n".join(lines)])


def _place_images(node: Node) -> None:
    """Let a new node begin with the project's images, if they have been built and unpacked."""
    from tests.images import nodes as images

    if _snapshotter(node) == "overlayfs":
        images.place(node.folder)


def _configure(node: Node, cgroup_root: str) -> None:
    etc = node.folder / "run/hpu/etc"
    (etc / "containerd.toml").write_text(_containerd_config(_snapshotter(node)))
    (etc / "kubelet.json").write_text(json.dumps(_kubelet_config(cgroup_root)))
    (etc / "cni").mkdir()
    (etc / "cni/10-pods.conflist").write_text(json.dumps(_cni_config(node.index)))
    shutil.copy(node.cluster.folder / f"{node.name}.kubeconfig", etc / "kubelet.kubeconfig")
    shutil.copy(node.cluster.folder / "kube-proxy.kubeconfig", etc)
    shutil.copy(node.cluster.pki / "ca.crt", etc)


def _containerd_config(snapshotter: str) -> str:
    # restrict_oom_score_adj: a container's root may not lower its OOM score; without it no sandbox starts.
    # NRI is off: nothing here uses it. The folder for optional programs would be /opt/containerd, on the host.
    return f"""version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{_CONTAINERD}"
[plugins.'io.containerd.nri.v1.nri']
  disable = true
[plugins.'io.containerd.internal.v1.opt']
  path = "/run/hpu/opt"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "{snapshotter}"
  pinned_images = {{sandbox = "{busybox.IMAGE}"}}
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  cni = {{bin_dirs = ["{CNI_PLUGINS}"], conf_dir = "{ETC}/cni"}}
  containerd.runtimes.runc.runtime_type = "io.containerd.runc.v2"
  containerd.runtimes.runc.options = {{BinaryName = "{BIN}/runc", SystemdCgroup = false}}
"""


def _kubelet_config(cgroup_root: str) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{_CONTAINERD}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup_root,
        "failCgroupV1": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        # The disk is the host's: its filling up is the host's affair, and must not evict what a test runs.
        "evictionHard": {},
        "imageGCHighThresholdPercent": 100,
        "clusterDomain": "cluster.local",
        "clusterDNS": [network.CONTROL_PLANE_ADDRESS],
        # Pods must not learn the host's name servers: no packet of theirs leaves the cluster.
        "resolvConf": "",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{ETC}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
    }


def _cni_config(index: int) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "pods0",
        "isGateway": True,
        # A pod that reaches its own Service comes back through the port it left by.
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": network.pod_subnet(index)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, portmap]}


def _snapshotter(node: Node) -> str:
    """overlayfs, or plain copies where the state folder's file system cannot carry an overlay (an overlay itself)."""
    marker = node.folder / "snapshotter"
    if not marker.exists():
        marker.write_text("overlayfs" if overlay_works(node.folder) else "native")
    return marker.read_text()


def overlay_works(folder: Path) -> bool:
    """Try an overlay mount below a folder, in a mount namespace that goes with the attempt."""
    probe = folder / f"overlay-{os.getpid()}-{time.monotonic_ns()}"
    for part in ("lower", "upper", "work", "merged"):
        (probe / part).mkdir(parents=True)
    options = "lowerdir=lower,upperdir=upper,workdir=work"
    script = f"cd {shlex.quote(str(probe))}; mount -t overlay overlay -o {options} merged"
    done = subprocess.run(["unshare", "--mount", "sh", "-ec", script], capture_output=True, check=False)
    shutil.rmtree(probe, ignore_errors=True)
    return done.returncode == 0
