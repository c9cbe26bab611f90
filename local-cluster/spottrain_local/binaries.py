"""The control plane's binaries: given, or obtained once and cached.

The binaries in `KUBEBUILDER_ASSETS` come first. Otherwise, each one is fetched from its release, or built from
source, when it is first needed, in the versions of go.mod in local-cluster/controlplane. A further release of
Kubernetes has a module of its own beside it.
`python -m spottrain_local.binaries` obtains them beforehand.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console

from spottrain_local.built_binaries import PACKAGES, build_binaries, fetch_sources
from spottrain_local.fetched_binaries import RELEASED, fetch_binaries
from spottrain_local.go_module import (
    CONTROL_PLANE_MODULE,
    DEFAULT_KUBERNETES,
    KARPENTER_MODULE,
    KUBERNETES,
    KUEUE_MODULE,
    RELEASE_MODULES,
    GoModule,
    KubernetesRelease,
)
from spottrain_local.layout import LocalClusterError, cache_root

# A control plane needs these.
CONTROL_PLANE = ("etcd", *KUBERNETES)
# Installs the operator. KUBEBUILDER_ASSETS need not have it if it is on the PATH.
HELM = "helm"
# Serves `kubectl exec`, `attach`, `cp` and `port-forward` on nodes. Without it, these don't work.
STREAMS = "kubelet-streams"
# Serves `kubectl top`. Without it, that doesn't work.
METRICS = "metrics-server"
# Only tests need them, each for its own. `make kueue` and `make karpenter` build them.
ADD_ONS = (KUEUE_MODULE, KARPENTER_MODULE)


class Fetch(Protocol):
    """Puts those of these binaries that a release has into a folder, and returns why some are missing."""

    def __call__(
        self, names: Collection[str], into: Path, console: Console, *, module: GoModule
    ) -> Collection[str]: ...


class Build(Protocol):
    """Puts these binaries into an empty folder."""

    def __call__(self, names: Collection[str], into: Path, console: Console, *, module: GoModule) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """Folders with binaries.

    Attributes:
        folder: The first one.
        others: Those that have what the first one lacks.
    """

    folder: Path
    others: tuple[Path, ...] = ()

    def find(self, name: str) -> Path | None:
        """Return the path of one binary, or None if no folder has it."""
        paths = (folder / name for folder in (self.folder, *self.others))
        return next((path for path in paths if path.is_file()), None)

    def path(self, name: str) -> Path:
        """Return the path of one binary.

        Raises:
            LocalClusterError: The folder does not have it.
        """
        path = self.find(name)
        if path is None:
            raise LocalClusterError(
                f"There is no {name} in {self.folder}. Run `python -m spottrain_local.binaries {name}`. If"
                " KUBEBUILDER_ASSETS is set, add it there or unset the variable. README.md says where to get each"
                " binary."
            )
        return path


def find_binaries(*needed: str, release: KubernetesRelease = DEFAULT_KUBERNETES) -> Binaries:
    """Return the folders of binaries to use, which may lack some.

    Raises:
        LocalClusterError: One of `needed` is not there, or `KUBEBUILDER_ASSETS` has another release of Kubernetes.
    """
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        if release != DEFAULT_KUBERNETES:
            raise LocalClusterError(
                f"KUBEBUILDER_ASSETS names the binaries of the control plane, so it can't be that of Kubernetes"
                f" {release}. Unset the variable, or run Kubernetes {DEFAULT_KUBERNETES}."
            )
        binaries = Binaries(folder=Path(assets))
    else:
        folder, *others = (module.cache_folder for module in RELEASE_MODULES[release])
        binaries = Binaries(folder=folder, others=tuple(others))
    for name in needed:
        binaries.path(name)
    return binaries


def obtain_binaries(
    names: Collection[str],
    console: Console,
    *,
    release: KubernetesRelease = DEFAULT_KUBERNETES,
    fetch: Fetch = fetch_binaries,
    build: Build = build_binaries,
) -> Binaries:
    """Return the folders of binaries, with these in them.

    Those that they lack are fetched or built. A folder that `KUBEBUILDER_ASSETS` names stays as it is, and has to
    have the control plane.

    Args:
        names: The binaries that are needed.
        console: Shows the progress. A build takes minutes.
        release: That of Kubernetes.
        fetch: Fetches binaries.
        build: Builds what could not be fetched.

    Raises:
        LocalClusterError: Some can neither be fetched nor built.
    """
    if os.environ.get("KUBEBUILDER_ASSETS"):
        return find_binaries(*CONTROL_PLANE, release=release)
    left = set(names)
    for module in RELEASE_MODULES[release]:
        _obtain(left & module.packages.keys(), module, console, fetch, build)
        left -= module.packages.keys()
    return find_binaries(release=release)


def _obtain(names: Collection[str], module: GoModule, console: Console, fetch: Fetch, build: Build) -> None:
    """Put these binaries of a module into its folder in the cache, if they are not there."""
    only = _only_way()
    binaries = Binaries(folder=module.cache_folder)
    if not _missing(binaries, names):
        return
    with _obtaining(binaries.folder, console) as work:
        missing = _missing(binaries, names)
        failures: Collection[str] = ()
        if only != "build" and RELEASED & set(missing):
            failures = fetch(missing, work / "fetched", console, module=module)
            _keep(work / "fetched", binaries.folder)
            missing = _missing(binaries, names)
        if missing and only == "fetch":
            raise LocalClusterError(
                f"SPOTTRAIN_BINARIES is fetch, and {', '.join(missing)} cannot be fetched:"
                f" {'; '.join(failures) or 'no release has it'}. Unset the variable to build what cannot be fetched."
            )
        if missing:
            reason = f" Not fetched: {'; '.join(failures)}." if failures else ""
            _announce(missing, module, console, reason)
            build(missing, work / "built", console, module=module)
            _keep(work / "built", binaries.folder)


def find_add_on(module: GoModule) -> Path:
    """Return the path of an add-on's binary. What it needs of the sources is in folders beside it.

    Raises:
        LocalClusterError: It was not built yet.
    """
    path = module.cache_folder / module.name
    if not path.is_file():
        raise LocalClusterError(
            f"There is no {path}. Run `make {module.name}`, which builds it in about {module.minutes}."
        )
    return path


def obtain_add_on(module: GoModule, console: Console) -> Path:
    """Return the path of an add-on's binary, which is built once.

    Raises:
        LocalClusterError: The build failed.
    """
    folder = module.cache_folder
    if not (folder / module.name).is_file():
        with _obtaining(folder, console) as work:
            if not (folder / module.name).is_file():
                _announce([module.name], module, console)
                build_binaries([module.name], work / "built", console, module=module)
                _keep(work / "built", folder)
    return find_add_on(module)


def find_crds(module: GoModule) -> Path:
    """Return the folder with an add-on's CRDs.

    Raises:
        LocalClusterError: They were not fetched yet.
    """
    path = module.cache_folder / "crds"
    if not path.is_dir():
        raise LocalClusterError(f"There is no {path}. Run `make {module.name}-crds`, which fetches it.")
    return path


def obtain_crds(module: GoModule, console: Console) -> Path:
    """Return the folder with an add-on's CRDs, which are fetched once, without a build.

    Raises:
        LocalClusterError: They can't be fetched.
    """
    folder = module.cache_folder
    if not (folder / "crds").is_dir():
        with _obtaining(folder, console) as work:
            fetch_sources(work / "fetched", console, module=module)
            _keep(work / "fetched", folder)
    return find_crds(module)


def _announce(names: Collection[str], module: GoModule, console: Console, reason: str = "") -> None:
    what = "All binaries take" if module is CONTROL_PLANE_MODULE else "That takes"
    console.print(
        f"Building {', '.join(names)} from source, once. {what} about {module.minutes} on two cores.{reason}",
        soft_wrap=True,
    )


def _only_way() -> str | None:
    """Return the way to obtain binaries that the user has chosen, if any."""
    way = os.environ.get("SPOTTRAIN_BINARIES") or None
    if way not in (None, "fetch", "build"):
        raise LocalClusterError(
            f"SPOTTRAIN_BINARIES is {way!r}. Set it to fetch or build, or unset it: binaries are then fetched, and"
            " built if that fails."
        )
    return way


def _missing(binaries: Binaries, names: Collection[str]) -> list[str]:
    return [name for name in sorted(names) if binaries.find(name) is None]


@contextlib.contextmanager
def _obtaining(folder: Path, console: Console) -> Iterator[Path]:
    """A folder in which binaries for `folder` become complete, while no other process obtains any."""
    cache_root().mkdir(parents=True, exist_ok=True)
    with _lock(cache_root(), console), _work_folder(folder) as work:
        yield work


@contextlib.contextmanager
def _lock(folder: Path, console: Console) -> Iterator[None]:
    """Let one process obtain binaries at a time.

    The lock ends with the process that holds it.
    """
    with (folder / "build.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Another process is fetching or building binaries; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Make a folder beside the cache's, in which binaries become complete.

    It also removes what killed processes have left.
    """
    for leftover in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*.partial-*"):
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        for name in ("fetched", "built"):
            (work / name).mkdir()
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


# What comes of another Go module than the control plane's.
OBTAINED: Mapping[str, Callable[[Console], Path]] = {
    **{module.name: partial(obtain_add_on, module) for module in ADD_ONS},
    **{f"{module.name}-crds": partial(obtain_crds, module) for module in ADD_ONS},
}


def _keep(complete: Path, folder: Path) -> None:
    for path in sorted(complete.iterdir(), key=Path.is_file):  # a binary that is there has its folders
        folder.mkdir(exist_ok=True)
        if not (folder / path.name).is_dir():  # the same sources: the name of the folder is a hash of their version
            path.replace(folder / path.name)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice([*sorted(PACKAGES), *OBTAINED]))
@click.option("--all", "all_of_them", is_flag=True, help="Obtain all binaries, also those that only tests need.")
@click.option(
    "--kubernetes",
    "release",
    type=click.Choice(list(RELEASE_MODULES)),
    default=DEFAULT_KUBERNETES,
    show_default=True,
    help="The release of Kubernetes.",
)
def main(names: tuple[str, ...], all_of_them: bool, release: KubernetesRelease) -> None:
    """Fetch or build binaries into the user's cache, and print the path of each NAME.

    Default: the control plane and Helm. What is already there stays.
    """
    wanted = names or (sorted(PACKAGES) if all_of_them else (*CONTROL_PLANE, HELM))
    try:
        console = Console(stderr=True)
        binaries = obtain_binaries([name for name in wanted if name not in OBTAINED], console, release=release)
        paths = [OBTAINED[name](console) if name in OBTAINED else binaries.path(name) for name in names]
    except LocalClusterError as error:
        raise click.ClickException(str(error)) from error
    for path in paths:
        click.echo(path)
    if not names:
        click.echo(f"Control plane binaries: {binaries.folder}")


if __name__ == "__main__":
    main()
