"""Where things are: the checkout, the cache of built binaries, and the state of each local cluster."""

import os
from dataclasses import dataclass
from pathlib import Path


class LocalClusterError(Exception):
    """Something a person can put right; the message is a sentence that says what and how."""


def checkout_root() -> Path:
    """The checkout that this (editable) installation runs from: it has the chart, the CRDs and go.mod.

    Raises LocalClusterError where the package was installed without them.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "local-cluster" / "controlplane" / "go.mod").is_file():
        raise LocalClusterError(
            "The local cluster needs a checkout of spottrain (for its chart, CRDs and control plane), but this"
            f" installation is in {root}. Install it from a checkout with `pip install -e '.[local]'`."
        )
    return root


def cache_root() -> Path:
    """Folder of built binaries, shared by all clusters of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spottrain"


def clusters_root() -> Path:
    """Folder with one folder of state per local cluster."""
    home = os.environ.get("SPOTTRAIN_LOCAL_HOME")
    return Path(home).expanduser() if home else Path.home() / ".local" / "state" / "spottrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayout:
    """The files in the state folder of one cluster."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def lock(self) -> Path:
        """Held (flock) by the supervisor as long as it lives; contains its process id."""
        return self.root / "supervisor.lock"

    @property
    def socket(self) -> Path:
        """Unix socket of the supervisor's control API."""
        return self.root / "control.sock"

    @property
    def spec(self) -> Path:
        """What the user asked for (`ClusterSpec` as JSON)."""
        return self.root / "cluster.json"

    @property
    def address(self) -> Path:
        """The network and ports of the last start, taken again by the next one where they are free."""
        return self.root / "address.json"

    @property
    def instances(self) -> Path:
        """The cloud's record: which instances run, are being taken back, or are gone."""
        return self.root / "instances.json"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def hosts(self) -> Path:
        """Names of Services and the addresses of their pods, in the format of /etc/hosts."""
        return self.root / "hosts"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def etcd(self) -> Path:
        return self.root / "etcd"

    @property
    def object_store(self) -> Path:
        return self.root / "objectstore"

    def node(self, name: str) -> Path:
        """State folder of one node; emptied when the node is replaced by a fresh instance."""
        return self.root / "nodes" / name


def cluster_layout(name: str) -> ClusterLayout:
    """State folder of the cluster with this name."""
    return ClusterLayout(root=clusters_root() / name)


def write_atomically(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file so that a reader sees the old or the new text, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
