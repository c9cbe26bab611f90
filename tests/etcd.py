"""The etcd of a local cluster: a backup, and a restore.

The commands are those of docs/how-to/restore-etcd.md.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster_fixtures import Kubectl, processes_of, wait_for
from spottrain_local.binaries import find_binaries
from spottrain_local.cluster import Cluster

# Kubernetes asks to restart the controllers, too, because they have caches.
CONTROL_PLANE = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Etcd:
    """The etcd of a cluster that runs."""

    cluster: Cluster

    def ctl(self, *args: str) -> None:
        """Run etcdctl with the credentials of etcd itself."""
        flags = _flags(self._process("etcd"))
        _run(
            "etcdctl",
            f"--endpoints={flags['advertise-client-urls']}",
            f"--cacert={flags['trusted-ca-file']}",
            f"--cert={flags['cert-file']}",
            f"--key={flags['key-file']}",
            *args,
        )

    def save(self, backup: Path) -> None:
        self.ctl("snapshot", "save", str(backup))

    def restore(self, backup: Path, *, bump: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Put the cluster's state back to a backup.

        The nodes and their pods run on. `meanwhile` is called while the API server does not answer. The supervisor
        starts the control plane again. `bump` has to make the versions newer than all before.
        """
        processes = [self._process(name) for name in CONTROL_PLANE]
        flags = _flags(processes[-1])
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        shutil.rmtree(flags["data-dir"])
        _run(
            "etcdutl",
            "snapshot",
            "restore",
            str(backup),
            *(f"--{name}={flags[name]}" for name in ("data-dir", "name", "initial-cluster")),
            f"--initial-advertise-peer-urls={flags['initial-advertise-peer-urls']}",
            f"--bump-revision={bump}",
            "--mark-compacted",
        )
        if meanwhile is not None:
            meanwhile()
        for process in processes:
            process.kill()
        kubectl = Kubectl(kubeconfig=self.cluster.kubeconfig)
        wait_for(lambda: kubectl.run("get", "--raw=/readyz").returncode == 0, "the API server is ready again")

    def _process(self, name: str) -> psutil.Process:
        [process] = [each for each in processes_of(self.cluster.layout.root) if each.info["name"] == name]
        return process


def _flags(process: psutil.Process) -> dict[str, str]:
    flags = (flag.removeprefix("--").partition("=") for flag in process.cmdline()[1:])
    return {name: value for name, _, value in flags}


def _run(name: str, *args: str) -> None:
    done = subprocess.run([find_binaries().path(name), *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name} {' '.join(args)}: {done.stderr}"
