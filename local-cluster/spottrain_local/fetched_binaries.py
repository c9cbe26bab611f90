"""Fetches the control plane's binaries from their releases.

Each file is checked against the SHA-256 that is published beside it. The versions are those of go.mod in
local-cluster/controlplane, and for a further release of Kubernetes, those of that release's folder beside it.
"""

import hashlib
import os
import platform
import re
import shutil
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import requests
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from spottrain_local.go_module import CONTROL_PLANE_MODULE, KUBERNETES, GoModule, pinned_version
from spottrain_local.layout import LocalClusterError

T = TypeVar("T")

ETCD = ("etcd", "etcdctl", "etcdutl")
HELM = ("helm",)
# What the releases have. Nobody releases the other binaries.
RELEASED = frozenset([*KUBERNETES, *ETCD, *HELM])
# The architectures for which Kubernetes releases its control plane: the kernel's names, and Go's.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
# Bytes that are read at a time. A file of checksums is shorter.
PIECE = 2**20
SHA256 = re.compile(r"[0-9a-f]{64}")


class FetchError(Exception):
    """A file cannot be fetched; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the releases are.

    The defaults are the official addresses. Mirrors are laid out like them.
    """

    kubernetes: str = "https://dl.k8s.io"
    etcd: str = "https://github.com/etcd-io/etcd/releases/download"
    helm: str = "https://get.helm.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How many seconds a server may take.

    - `answer`: until the head of its answer has come, with the time to find and to reach it.
    - `stall`: without a byte in the middle of a file.
    """

    answer: float = 5.0
    stall: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFile:
    """A file of a release: a binary, or an archive with binaries.

    - `release`: what it belongs to.
    - `sums`: address of a text with its SHA-256.
    - `members`: path of each binary in the archive. The path is empty if the file is the binary itself.
    """

    release: str
    url: str
    sums: str
    members: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def mirrors() -> Addresses:
    """Return the addresses that the environment names, or the official ones.

    Raises:
        LocalClusterError: One is not an HTTP address.
    """
    variables = {
        "SPOTTRAIN_KUBERNETES_MIRROR": os.environ.get("SPOTTRAIN_KUBERNETES_MIRROR"),
        "SPOTTRAIN_ETCD_MIRROR": os.environ.get("SPOTTRAIN_ETCD_MIRROR"),
        "SPOTTRAIN_HELM_MIRROR": os.environ.get("SPOTTRAIN_HELM_MIRROR"),
    }
    for variable, address in variables.items():
        if address and not re.match(r"https?://[^/]", address):
            raise LocalClusterError(
                f"{variable} is {address!r}, which is not an HTTP address. Write it like https://mirror.example/path."
            )
    official = Addresses()
    kubernetes, etcd, helm = ((address or "").rstrip("/") for address in variables.values())
    return Addresses(
        kubernetes=kubernetes or official.kubernetes, etcd=etcd or official.etcd, helm=helm or official.helm
    )


def release_files(addresses: Addresses, machine: str, module: GoModule = CONTROL_PLANE_MODULE) -> list[ReleaseFile]:
    """Return the files of the pinned releases for an architecture.

    `machine` is the kernel's name of it. `module` pins Kubernetes.

    Raises:
        FetchError: There are none for it.
    """
    arch = ARCHITECTURES.get(machine)
    if arch is None:
        raise FetchError(f"Kubernetes releases no control plane for {machine}")
    kubernetes = f"{addresses.kubernetes}/release/{module.pinned_version('k8s.io/kubernetes')}/bin/linux/{arch}"
    version = pinned_version("go.etcd.io/etcd/server/v3")
    etcd, folder = f"{addresses.etcd}/{version}", f"etcd-{version}-linux-{arch}"
    helm = f"{addresses.helm}/helm-{pinned_version('helm.sh/helm/v4')}-linux-{arch}.tar.gz"
    return [
        *(
            ReleaseFile(
                release="Kubernetes",
                url=f"{kubernetes}/{name}",
                sums=f"{kubernetes}/{name}.sha256",
                members={name: ""},
            )
            for name in KUBERNETES
        ),
        ReleaseFile(
            release="etcd",
            url=f"{etcd}/{folder}.tar.gz",
            sums=f"{etcd}/SHA256SUMS",
            members={name: f"{folder}/{name}" for name in ETCD},
        ),
        ReleaseFile(
            release="Helm",
            url=helm,
            sums=f"{helm}.sha256sum",
            members={name: f"linux-{arch}/{name}" for name in HELM},
        ),
    ]


def fetch_binaries(
    names: Collection[str],
    into: Path,
    console: Console,
    *,
    module: GoModule = CONTROL_PLANE_MODULE,
    addresses: Addresses | None = None,
    machine: str | None = None,
    patience: Patience | None = None,
) -> list[str]:
    """Fetch those of these binaries that are released into a folder.

    A binary is in the folder only if it is complete and its checksum is right.

    Args:
        names: The binaries to fetch.
        into: The folder.
        console: Shows the progress.
        module: Pins the release of Kubernetes.
        addresses: Where the releases are. Default: what `mirrors` returns.
        machine: The architecture, as the kernel names it. Default: that of this machine.
        patience: How long servers may take. Default: `Patience()`.

    Returns:
        Why a release could not be fetched, once for each such release.

    Raises:
        LocalClusterError: The address of a mirror is not valid.
    """
    addresses, patience = addresses or mirrors(), patience or Patience()
    try:
        every = release_files(addresses, machine or platform.machine(), module)
    except FetchError as error:
        return [str(error)]
    files = [file for file in every if file.members.keys() & set(names)]
    started = time.monotonic()
    sums = {file.url: _ask(partial(_published_sum, file, patience.answer)) for file in files}
    failures: dict[str, str] = {}
    with _display(console) as progress:
        for file in files:
            # What has failed may have cost seconds, and would cost them again.
            if file.release in failures:
                continue
            try:
                left = patience.answer - (time.monotonic() - started)
                expected = _answer(sums[file.url], file.sums, left)
                _fetch(file, expected, set(names), into, patience, progress)
            except FetchError as error:
                failures[file.release] = str(error)
    fetched = sorted(path.name for path in into.iterdir())
    if fetched:
        console.print(f"Fetched {', '.join(fetched)} in {time.monotonic() - started:.0f} s.", soft_wrap=True)
    return list(failures.values())


def _fetch(
    file: ReleaseFile, expected: str, names: set[str], into: Path, patience: Patience, progress: Progress
) -> None:
    """Fetch one file, check it, and put its binaries into the folder.

    Raises:
        FetchError: It did not come, or is not what was published.
    """
    part = into / f"{file.name}.part"
    answer = _answer(_ask(partial(_get, file.url, patience.answer, patience.stall)), file.url, patience.answer)
    try:
        with answer:
            actual = _save(answer, part, file.name, progress)
        if actual != expected:
            raise FetchError(f"the SHA-256 of {file.url} is {actual}, but {file.sums} says {expected}")
        for name in sorted(names & file.members.keys()):
            member = file.members[name]
            complete = _extract(part, member, into / f"{name}.part") if member else part
            complete.chmod(0o755)
            complete.replace(into / name)
    except (tarfile.TarError, zlib.error, EOFError, KeyError) as error:
        raise FetchError(f"{file.url} is not a whole archive with {', '.join(file.members)}: {error}") from error
    except OSError as error:
        raise FetchError(f"{file.url} stopped: {_reason(error)}") from error
    finally:
        for leftover in into.glob("*.part"):
            leftover.unlink()


def _save(answer: requests.Response, path: Path, name: str, progress: Progress) -> str:
    """Write what a server sends into a file, and return its SHA-256."""
    digest = hashlib.sha256()
    length = answer.headers.get("Content-Length", "")
    task = progress.add_task(name, total=int(length) if length.isdecimal() else None)
    with path.open("wb") as file:
        for piece in _pieces(answer):
            file.write(piece)
            digest.update(piece)
            progress.update(task, advance=len(piece))
    return digest.hexdigest()


def _extract(archive: Path, member: str, target: Path) -> Path:
    """Copy one member out of an archive.

    What the archive says about other members, paths, owners and links has no effect.

    Raises:
        KeyError: The archive has no such member, or it is not a file.
    """
    with tarfile.open(archive, "r:gz") as tar:
        source = tar.extractfile(member) if tar.getmember(member).isfile() else None
        if source is None:
            raise KeyError(f"{member} is not a file")
        with source, target.open("wb") as file:
            shutil.copyfileobj(source, file, PIECE)
    return target


def _published_sum(file: ReleaseFile, seconds: float) -> str:
    """Return the SHA-256 that is published for a file.

    It stands alone, or in a line with the file's name.

    Raises:
        FetchError: There is none.
    """
    with _get(file.sums, seconds, seconds) as answer:
        text = next(_pieces(answer), b"").decode("utf-8", "replace")
    for line in text.splitlines():
        digest, _, name = line.strip().partition(" ")
        if SHA256.fullmatch(digest) and name.strip() in ("", file.name):
            return digest
    raise FetchError(f"{file.sums} has no SHA-256 of {file.name}")


def _get(url: str, connect_seconds: float, read_seconds: float) -> requests.Response:
    """Request a file.

    Proxies (`HTTPS_PROXY`, `NO_PROXY`) and trusted authorities (`REQUESTS_CA_BUNDLE`) are those of the environment.

    Raises:
        FetchError: The server does not have it.
        requests.RequestException: The server cannot be reached.
    """
    headers = {"Accept-Encoding": "identity"}  # The checksum is that of the file, not of its transport.
    answer = requests.get(url, stream=True, timeout=(connect_seconds, read_seconds), headers=headers)
    if answer.status_code != 200:
        answer.close()
        raise FetchError(f"{url} answers {answer.status_code} {answer.reason}")
    return answer


def _pieces(answer: requests.Response) -> Iterator[bytes]:
    pieces: Iterator[bytes] = answer.iter_content(PIECE)
    return pieces


def _ask(question: Callable[[], T]) -> "Future[T]":
    """Start a request in a thread that nobody waits for.

    No timeout ends the search for an address, and a machine without a network may take long for it. Python waits for
    the threads of an executor when it exits.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def _answer(future: "Future[T]", url: str, seconds: float) -> T:
    """Wait for what `_ask` has started.

    Raises:
        FetchError: It failed, or took too long.
    """
    try:
        return future.result(max(0.0, seconds))
    except TimeoutError:
        raise FetchError(f"{urlsplit(url).netloc} does not answer") from None
    except requests.RequestException as error:
        raise FetchError(f"{urlsplit(url).netloc} cannot be reached: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return what the system says of an error, or the first error behind it."""
    chain = [error]
    while behind := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(behind)
    said = (each.strerror for each in reversed(chain) if isinstance(each, OSError) and each.strerror)
    return next(said, str(chain[-1]))


def _display(console: Console) -> Progress:
    return Progress(
        TextColumn("fetching {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
