"""The paths of the checkout, the built binaries and each cluster's state."""

import os
from dataclasses import dataclass
from pathlib import Path


class LocalClusterError(Exception):
    """A mistake or a fault that the user can correct.

    The text is a sentence that says how.
    """


def checkout_root() -> Path:
    """Return the checkout from which this editable installation runs.

    It has the chart, the CRDs and go.mod.

    Raises:
        LocalClusterError: The package was installed without them.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "local-cluster" / "controlplane" / "go.mod").is_file():
        raise LocalClusterError(
            "The local cluster needs a checkout of spottrain (for its chart, CRDs and control plane), but this"
            f" installation is in {root}. Install it from a checkout with `pip install -e '.[local]'`."
        )
    return root


def cache_root() -> Path:
    """Return the folder of built binaries, which all clusters of this user share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "spottrain"


def clusters_root() -> Path:
    """Return the folder that has a folder of state for each local cluster."""
    home = os.environ.get("SPOTTRAIN_LOCAL_HOME")
    return Path(home).expanduser().absolute() if home else _home() / ".local" / "state" / "spottrain"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise LocalClusterError(
            "This user has no home folder. Set HOME, or SPOTTRAIN_LOCAL_HOME and XDG_CACHE_HOME."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayout:
    """The files in the state folder of one cluster."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def lock(self) -> Path:
        """Lock that the supervisor holds (flock) as long as it lives.

        It contains its process id.
        """
        return self.root / "supervisor.lock"

    @property
    def socket(self) -> Path:
        """Unix socket of the supervisor's control API."""
        return self.root / "control.sock"

    @property
    def spec(self) -> Path:
        """The nodes that the user requested (`ClusterSpec` as JSON)."""
        return self.root / "cluster.json"

    @property
    def address(self) -> Path:
        """The network and ports of the last start.

        The next one takes them again if they are free.
        """
        return self.root / "address.json"

    @property
    def instances(self) -> Path:
        """State of the cloud: which instances run, are being taken back, or are gone."""
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
        """Return the state folder of one node. A fresh instance starts with an empty one."""
        return self.root / "nodes" / name


def cluster_layout(name: str) -> ClusterLayout:
    """Return the state folder of the cluster with this name."""
    return ClusterLayout(root=clusters_root() / name)


def unreadable_state(layout: ClusterLayout, error: Exception) -> LocalClusterError:
    """Return what to say about a file whose content is not what was written."""
    return LocalClusterError(
        f"The state in {layout.root} cannot be read. Delete it with `spottrain local down --delete`, and start "
        f"again. {error}"
    )


def write_atomically(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file so that a reader sees either the old or the new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)
