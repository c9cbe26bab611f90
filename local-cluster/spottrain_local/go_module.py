"""The Go modules in local-cluster, which pin what is fetched or built from source."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from spottrain_local.layout import LocalClusterError, cache_root, checkout_root

# The releases of Kubernetes that a local cluster can run.
KubernetesRelease = Literal["1.36", "1.37"]
DEFAULT_KUBERNETES: Final[KubernetesRelease] = "1.36"
KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoModule:
    """A Go module, and the binaries that are built from it.

    Attributes:
        name: Of its folder in local-cluster.
        packages: The main package of each binary.
        minutes: How long a build of all of them takes on two cores, in words.
        folders: What is kept of the sources beside the binaries: for each name, a dependency and a folder of it.
    """

    name: str
    packages: Mapping[str, str]
    minutes: str
    folders: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder with go.mod."""
        return checkout_root() / "local-cluster" / self.name

    @property
    def cache_folder(self) -> Path:
        """The folder of its binaries, which is another one after any change of the module."""
        digest = hashlib.sha256()
        for path in (self.folder / "go.mod", self.folder / "go.sum", *sorted(self.folder.glob("*/*.go"))):
            digest.update(path.read_bytes())
        digest.update(repr(sorted({**self.packages, **self.folders}.items())).encode())
        return cache_root() / f"{self.name}-{digest.hexdigest()[:12]}"

    def pinned_version(self, dependency: str) -> str:
        """Return the version of a module in go.mod, with its `v`.

        Raises:
            LocalClusterError: It is not there.
        """
        text = (self.folder / "go.mod").read_text()
        match = re.search(rf"^\s*{re.escape(dependency)} (v\S+)", text, re.MULTILINE)
        if not match:
            raise LocalClusterError(f"local-cluster/{self.name}/go.mod does not require {dependency}: restore it.")
        return match.group(1)


CONTROL_PLANE_MODULE = GoModule(
    name="controlplane",
    packages={
        "etcd": "go.etcd.io/etcd/server/v3",
        "etcdctl": "go.etcd.io/etcd/etcdctl/v3",
        "etcdutl": "go.etcd.io/etcd/etcdutl/v3",
        "helm": "helm.sh/helm/v4/cmd/helm",
        **{name: f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES},
        "kubelet-streams": "spottrain.dev/local-cluster/controlplane/kubelet-streams",
        "metrics-server": "sigs.k8s.io/metrics-server/cmd/metrics-server",
    },
    minutes="six minutes",
)
# The next release of Kubernetes. What it lacks is the control plane module's.
NEXT_KUBERNETES_MODULE = GoModule(
    name="kubernetes-1.37",
    packages={name: f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES},
    minutes="five minutes",
)
# The modules whose binaries make a cluster of each release. The first one that has a binary counts.
RELEASE_MODULES: Mapping[KubernetesRelease, tuple[GoModule, ...]] = {
    "1.36": (CONTROL_PLANE_MODULE,),
    "1.37": (NEXT_KUBERNETES_MODULE, CONTROL_PLANE_MODULE),
}
# Only tests of queues need it. An add-on's module has the name of its binary.
KUEUE_MODULE = GoModule(
    name="kueue",
    packages={"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
    minutes="four minutes",
    folders={
        "crds": ("sigs.k8s.io/kueue", "config/components/crd/bases"),
        "webhooks": ("sigs.k8s.io/kueue", "config/components/webhook"),
    },
)
# Only tests of node pools need it. Its kwok provider makes nodes that run nothing.
KARPENTER_MODULE = GoModule(
    name="karpenter",
    packages={"karpenter": "sigs.k8s.io/karpenter/kwok"},
    minutes="three minutes",
    folders={
        "crds": ("sigs.k8s.io/karpenter", "pkg/apis/crds"),
        "kwok-crds": ("sigs.k8s.io/karpenter", "kwok/apis/crds"),
    },
)


def pinned_version(dependency: str) -> str:
    """Return the version of a dependency of the control plane, with its `v`.

    Raises:
        LocalClusterError: It is not there.
    """
    return CONTROL_PLANE_MODULE.pinned_version(dependency)
