"""The Go modules that pin what is built from source, in local-cluster: controlplane, kueue and karpenter."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spottrain_local.layout import LocalClusterError, cache_root, checkout_root


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
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kubelet-streams": "spottrain.dev/local-cluster/controlplane/kubelet-streams",
        "metrics-server": "sigs.k8s.io/metrics-server/cmd/metrics-server",
    },
    minutes="six minutes",
)
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
