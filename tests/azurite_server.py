"""Azurite, which plays Azure's Blob Storage, for tests.

It comes from npm into the cache, once: the packages of tests/azurite/package-lock.json, with the hashes there. `make
test` runs this file, so that no test needs the network.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spottrain_local.layout import cache_root

PACKAGES = Path(__file__).with_name("azurite")
ACCOUNT = "account"
KEY = "YWNjb3VudC1rZXk="
# In the environment of the server.
ACCOUNTS = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
HELP = (
    "Azurite is not here, and could not be installed with npm: {reason}. Put Node.js 20 or newer with npm on the "
    "PATH, and run `make azurite` again."
)


class NoAzuriteError(Exception):
    """A sentence that says how to get it."""


def ensure_azurite() -> Path:
    """The script of its blob server, installed first if needed: a download of 15 MB.

    Raises:
        NoAzuriteError: It can't be installed.
    """
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / "azurite.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _script().exists():
            _install()
    return _script()


def azurite_command(port: int, *more: str) -> list[str]:
    """Starts it on loopback, with what it holds in memory. Its environment has to have `ACCOUNTS`."""
    node = shutil.which("node")
    if node is None:
        raise NoAzuriteError(HELP.format(reason="there is no node"))
    return [
        *(node, str(ensure_azurite()), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"),
        *("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--disableProductStyleUrl", *more),
    ]


def _script() -> Path:
    return _folder() / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


def _folder() -> Path:
    """Where these packages are kept. Others have another folder."""
    locked = hashlib.sha256((PACKAGES / "package-lock.json").read_bytes()).hexdigest()
    return cache_root() / f"azurite-{locked[:12]}"


def _install() -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NoAzuriteError(HELP.format(reason="there is no npm"))
    with _new_folder() as folder:
        shutil.copytree(PACKAGES, folder, dirs_exist_ok=True)
        command = [npm, "ci", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoAzuriteError(HELP.format(reason=" ".join(done.stderr.split())))
        shutil.rmtree(_folder(), ignore_errors=True)
        folder.rename(_folder())


@contextmanager
def _new_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=cache_root()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    try:
        print(f"Azurite: {ensure_azurite()}")
    except NoAzuriteError as error:
        sys.exit(str(error))
