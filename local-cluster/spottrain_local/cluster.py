"""The handle of a local cluster: `up`, `down`, and requests to its supervisor."""

import fcntl
import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spottrain_local.address import port_block
from spottrain_local.binaries import CONTROL_PLANE, find_binaries
from spottrain_local.go_module import KubernetesRelease
from spottrain_local.layout import (
    ClusterLayout,
    LocalClusterError,
    cluster_layout,
    unreadable_state,
    write_atomically,
)
from spottrain_local.objectstore import remove_sockets
from spottrain_local.podman import check_podman, remove_dead_clusters
from spottrain_local.spec import DEFAULT_SPEC, ClusterSpec, Runtime

DEFAULT_NAME = "default"
# What `up` waits for, in this order.
PARTS = ("control plane", "object store", "nodes")
UP_SECONDS = 120.0
DOWN_SECONDS = 40.0
POLL_SECONDS = 0.1
# Seconds that the supervisor may take to answer. Only requests that wait for machines take long.
STATUS_SECONDS, REQUEST_SECONDS = 5.0, 60.0

Status = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Handle of one local cluster, running or not."""

    layout: ClusterLayout

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    def spec(self) -> ClusterSpec:
        """Read the nodes that the user requested.

        Raises:
            LocalClusterError: They cannot be read.
        """
        try:
            return ClusterSpec.model_validate_json(self.layout.spec.read_bytes())
        except ValueError as error:
            raise unreadable_state(self.layout, error) from error

    def unused_ip(self) -> str:
        """Return an address of the cluster's network that no node and no pod has."""
        return f"127.{self._network()}.255.254"

    def up(
        self,
        spec: ClusterSpec | None = None,
        progress: Callable[[Sequence[str]], None] | None = None,
        install: Callable[[], None] | None = None,
        check: Callable[[ClusterSpec], None] | None = None,
    ) -> Status:
        """Start the cluster if needed, wait until it is ready, and return its status.

        If that fails halfway, what runs stays up to be looked at. The next `up` continues with it.

        Args:
            spec: The nodes. Default: those of the last time, otherwise `DEFAULT_SPEC`.
            progress: Called with what `up` still waits for.
            install: Called as soon as the control plane is ready, while nodes join.
            check: Called before anything starts, to refuse what `install` would.

        Raises:
            LocalClusterError: The cluster did not become ready, or runs with different nodes.
        """
        running = self.status()
        if running is None:
            wanted = spec or self._last_spec()
            self._check_release(wanted)
            self._check_runtime(wanted)
            if check:
                check(wanted)
            try:
                self._write_spec(spec)
            except OSError as error:
                raise LocalClusterError(
                    f"The cluster's state cannot be written: {error}. SPOTTRAIN_LOCAL_HOME names the folder for it."
                ) from error
            supervisor = self._start_supervisor()
        else:
            if spec and spec != self.spec():
                raise LocalClusterError(
                    f"The cluster {self.layout.name} runs with different nodes, or a different runtime or release of "
                    f"Kubernetes. Run {self.command('down')} first."
                )
            supervisor = None
        deadline = time.monotonic() + UP_SECONDS
        try:
            if install:
                self._wait_for(PARTS[:1], supervisor, progress, deadline)
                install()
            return self._wait_for(PARTS, supervisor, progress, deadline)
        except LocalClusterError as error:
            if self.status() is None:
                raise
            raise LocalClusterError(
                f"{error}\nThe cluster {self.layout.name} runs, as far as it came. {self.command('up')} continues, "
                f"and {self.command('down')} stops it."
            ) from error

    def down(self, *, delete: bool = False) -> bool:
        """Stop the cluster, and return whether it was running.

        With `delete`, its state is deleted too.
        """
        pid = self._supervisor_pid()
        if pid is not None:
            self._end_supervisor(pid)
        if self.layout.address.exists():
            try:
                network, runtime = self._network(), self._last_spec().runtime
            except LocalClusterError:
                if not delete:
                    raise
            else:
                # A supervisor that was killed leaves them, too.
                remove_sockets(port_block(network))
                if runtime == "podman":
                    _remove_containers()
        if delete:
            shutil.rmtree(self.layout.root, ignore_errors=True)
        return pid is not None

    def status(self) -> Status | None:
        """Return the supervisor's status, or None if the cluster does not run."""
        try:
            return self.request("GET", "/v1/status", patience=STATUS_SECONDS)
        except OSError:
            return None

    def preempt(self, nodes: Sequence[str], *, notice_seconds: float, **more: str) -> Status:
        """Announce that nodes go, and take them at the deadline."""
        return self._ask("preempt", nodes, noticeSeconds=notice_seconds, **more)

    def cancel(self, nodes: Sequence[str]) -> Status:
        """Take a notice back."""
        return self._ask("cancel", nodes)

    def kill(self, nodes: Sequence[str]) -> Status:
        """Take nodes away now, without a notice."""
        return self._ask("kill", nodes)

    def restore(self, nodes: Sequence[str]) -> Status:
        """Bring fresh instances for nodes that are gone.

        Raises:
            LocalClusterError: Some nodes are not gone. Those that are gone were restored.
        """
        return self._ask("restore", nodes)

    def running_status(self) -> Status:
        """Return the status.

        Raises:
            LocalClusterError: The cluster does not run.
        """
        status = self.status()
        if status is None:
            raise LocalClusterError(
                f"The cluster {self.layout.name} is not running. Start it with {self.command('up')}."
            )
        return status

    def command(self, verb: str) -> str:
        """Return the command for this cluster, as a sentence quotes it."""
        name = self.layout.name
        return f"`spottrain local {verb}{'' if name == DEFAULT_NAME else f' --name {name}'}`"

    def _ask(self, verb: str, nodes: Sequence[str], **more: object) -> Status:
        self.running_status()
        try:
            return self.request("POST", f"/v1/nodes/{verb}", {"nodes": list(nodes), **more})
        except OSError as error:
            raise LocalClusterError(
                f"The cluster {self.layout.name} did not answer ({error}): see `spottrain local status`, and the"
                f" logs in {self.layout.logs}."
            ) from error

    def request(
        self, method: str, path: str, body: dict[str, object] | None = None, patience: float = REQUEST_SECONDS
    ) -> Status:
        """Send one request to the supervisor.

        Raises:
            OSError: It does not run.
            LocalClusterError: It refused the request, or did not answer in time.
        """
        connection = _UnixConnection(self.layout.socket, patience)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            answer: Status = json.loads(response.read())
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise LocalClusterError(answer["error"])
        return answer

    def _network(self) -> int:
        try:
            number: int = json.loads(self.layout.address.read_text())["network"]
        except ValueError as error:
            raise unreadable_state(self.layout, error) from error
        return number

    def _supervisor_pid(self) -> int | None:
        """Return the id of the supervisor process that holds the lock, if there is one."""
        try:
            with self.layout.lock.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(lock.read() or 0) or None
        except FileNotFoundError:
            pass
        return None

    def _end_supervisor(self, pid: int) -> None:
        """Let the supervisor stop the cluster.

        If it cannot, kill it: what it started dies with it.
        """
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            self.request("POST", "/v1/stop", patience=STATUS_SECONDS)
            ended, _, _ = select.select([process], [], [], DOWN_SECONDS)
        except OSError:  # It hangs, or it is just starting or ending.
            ended = []
        try:
            if not ended:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [], DOWN_SECONDS)
        except ProcessLookupError:
            return
        finally:
            os.close(process)

    def _last_spec(self) -> ClusterSpec:
        return self.spec() if self.layout.spec.exists() else DEFAULT_SPEC

    def with_choices(
        self, spec: ClusterSpec | None, *, runtime: Runtime | None = None, kubernetes: KubernetesRelease | None = None
    ) -> ClusterSpec | None:
        """Return the spec, or that of the last time, with this runtime and this release of Kubernetes.

        Without either, `spec` is returned unchanged.
        """
        given = {"runtime": runtime, "kubernetes": kubernetes}
        choices = {name: choice for name, choice in given.items() if choice}
        return (spec or self._last_spec()).model_copy(update=choices) if choices else spec

    def release_of(self, spec: ClusterSpec | None) -> KubernetesRelease:
        """Return the release of Kubernetes with which the cluster would start."""
        return (spec or self._last_spec()).kubernetes

    def _check_release(self, spec: ClusterSpec) -> None:
        """Refuse an older release of Kubernetes than that of the last time, which may not read the objects."""
        last = self._last_spec().kubernetes
        if spec.kubernetes < last:
            raise LocalClusterError(
                f"The cluster {self.layout.name} has run Kubernetes {last}, whose objects {spec.kubernetes} may not "
                f"read. Choose --kubernetes {last}, or delete them with {self.command('down --delete')} first."
            )

    def _check_runtime(self, spec: ClusterSpec) -> None:
        if spec.runtime == "podman":
            probe = find_binaries().path("etcd")
            self.layout.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_podman(probe, self.layout.root)

    def _write_spec(self, spec: ClusterSpec | None) -> None:
        self.layout.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if spec or not self.layout.spec.exists():
            write_atomically(self.layout.spec, (spec or DEFAULT_SPEC).model_dump_json(by_alias=True, indent=1))

    def _start_supervisor(self) -> subprocess.Popen[bytes]:
        find_binaries(*CONTROL_PLANE, release=self.spec().kubernetes)
        with (self.layout.root / "supervisor.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "spottrain_local.supervisor", "--state", self.layout.root],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_for(
        self,
        parts: Sequence[str],
        supervisor: subprocess.Popen[bytes] | None,
        progress: Callable[[Sequence[str]], None] | None,
        deadline: float,
    ) -> Status:
        """Wait until all of `parts` are ready."""
        while True:
            # The supervisor also ends if a different `up` was faster. Then wait for that cluster.
            if supervisor and supervisor.poll() is not None and self._supervisor_pid() is None:
                log = (self.layout.root / "supervisor.log").read_text().strip().splitlines()
                reason = " ".join(log[-1:]) or _full(self.layout.root)
                raise LocalClusterError(
                    f"The cluster {self.layout.name} did not start. {reason} (More in {self.layout.root}.)"
                )
            status = self.status()
            waiting_for = status["waitingFor"] if status else ["supervisor"]
            if status and not set(parts) & set(waiting_for):
                return status
            if progress:
                progress(waiting_for)
            if time.monotonic() > deadline:
                raise LocalClusterError(
                    f"The cluster {self.layout.name} was not ready after {UP_SECONDS:.0f} s; it still waits for"
                    f" {', '.join(waiting_for)}. See the logs in {self.layout.logs}."
                )
            time.sleep(POLL_SECONDS)


def _full(folder: Path) -> str:
    """Say that nothing can be written into a folder, if so."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        return f"{folder} can't be written: {error.strerror}."
    return ""


def _remove_containers() -> None:
    try:
        remove_dead_clusters()
    except OSError as error:
        raise LocalClusterError(f"Containers of the cluster may be left: {error}") from error


def open_cluster(name: str = DEFAULT_NAME) -> Cluster:
    """Return the handle of the cluster with this name, whether it exists or not."""
    return Cluster(layout=cluster_layout(name))


def list_clusters(root: Path) -> list[str]:
    """List the names of the clusters with state in a folder."""
    return sorted(path.parent.name for path in root.glob("*/cluster.json"))


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket whose path may exceed the kernel's 107 bytes."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)
