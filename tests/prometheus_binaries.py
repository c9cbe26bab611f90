"""The real Prometheus, for tests: its server and promtool.

They are on the PATH, or come from Debian's or Ubuntu's archive into the cache, once and without root. `make test`
runs this file, so that no test needs the network.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from spottrain_local.layout import cache_root

PACKAGE = "prometheus"
HELP = (
    "Prometheus is not here, and could not be fetched with apt-get: {reason}. Put `prometheus` and `promtool` of any "
    "release from 2.42 on on the PATH (https://prometheus.io/download), and run `make test` again."
)


class NoPrometheusError(Exception):
    """A sentence that says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """Paths of the binaries."""

    server: Path
    promtool: Path


def find_prometheus() -> Prometheus | None:
    """The binaries on the PATH or in the cache; None if they are in neither."""
    for folder in (None, _cache()):
        path = None if folder is None else str(folder)
        server, promtool = (shutil.which(name, path=path) for name in ("prometheus", "promtool"))
        if server and promtool:
            return Prometheus(server=Path(server), promtool=Path(promtool))
    return None


def ensure_prometheus() -> Prometheus:
    """The binaries, fetched first if needed: a download of 20 MB.

    Raises:
        NoPrometheusError: They can't be fetched.
    """
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / "prometheus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = find_prometheus()
        if found is None:
            _fetch()
            found = find_prometheus()
    if found is None:
        raise NoPrometheusError(HELP.format(reason=f"the package {PACKAGE} does not have them"))
    return found


def _cache() -> Path:
    return cache_root() / "prometheus"


def _fetch() -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise NoPrometheusError(HELP.format(reason="there is no apt-get and dpkg-deb"))
    with tempfile.TemporaryDirectory(dir=cache_root()) as name:
        folder = Path(name)
        _download(folder)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder / "files"], check=True)
        binaries = folder / "files" / "usr" / "bin"
        if binaries.is_dir():
            shutil.rmtree(_cache(), ignore_errors=True)
            binaries.rename(_cache())


def _download(folder: Path) -> None:
    """Download the package with apt-get.

    If the system's package lists are empty, it uses lists of our own.
    """
    (folder / "lists" / "partial").mkdir(parents=True)
    own = ["-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"]
    own += ["-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=true"]
    for commands in ([["download"]], [[*own, "update"], [*own, "download"]]):
        for command in commands:
            package = [PACKAGE] if command[-1] == "download" else []
            done = subprocess.run(
                ["apt-get", "-qq", *command, *package], cwd=folder, capture_output=True, text=True, check=False
            )
        if done.returncode == 0:
            return
    raise NoPrometheusError(HELP.format(reason=" ".join(done.stderr.split())))


if __name__ == "__main__":
    try:
        print(f"Prometheus: {ensure_prometheus().server}")
    except NoPrometheusError as error:
        sys.exit(str(error))
