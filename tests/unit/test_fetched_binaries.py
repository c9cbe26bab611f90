"""Binaries are fetched from their releases, or it is said why not."""

import io
import os
import re
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from release_server import Fault, ReleaseServer, archive, hangs, is_a_login_page, is_cut, release_server, stalls
from spottrain_local.fetched_binaries import (
    ETCD,
    HELM,
    RELEASED,
    Addresses,
    Patience,
    fetch_binaries,
    mirrors,
)
from spottrain_local.go_module import KUBERNETES, NEXT_KUBERNETES_MODULE, pinned_version
from spottrain_local.layout import LocalClusterError

ARCH = "amd64"
# More than a client reads at once.
CONTENT = {name: name.encode() + os.urandom(3_000_000 if name in KUBERNETES else 10_000) for name in RELEASED}
# Seconds in which a server on loopback that hangs is given up.
SHORT = 0.3
QUIET = Console(quiet=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReleaseServer]:
    """All releases for x86_64."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with release_server() as server:
        server.publish_all(CONTENT, ARCH)
        yield server


def fetch(
    server: ReleaseServer, into: Path, *names: str, machine: str = "x86_64", patience: Patience | None = None
) -> list[str]:
    return fetch_binaries(
        names or RELEASED, into, QUIET, addresses=server.addresses, machine=machine, patience=patience
    )


def test_what_is_released_is_fetched_and_can_be_run(server: ReleaseServer, tmp_path: Path) -> None:
    assert fetch(server, tmp_path, *RELEASED, "kubelet-streams", "metrics-server") == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == CONTENT
    assert all(os.access(path, os.X_OK) for path in tmp_path.iterdir())


def test_only_what_is_asked_for_is_fetched(server: ReleaseServer, tmp_path: Path) -> None:
    assert fetch(server, tmp_path, "etcdctl", "kube-scheduler") == []
    assert {path.name for path in tmp_path.iterdir()} == {"etcdctl", "kube-scheduler"}
    assert not [path for path in server.asked if "helm" in path or "apiserver" in path]


def test_etcds_programs_have_one_version() -> None:
    """They come in one archive."""
    modules = ("server", "etcdctl", "etcdutl")
    assert len({pinned_version(f"go.etcd.io/etcd/{module}/v3") for module in modules}) == 1


def test_the_next_kubernetes_is_fetched_from_its_own_release(server: ReleaseServer, tmp_path: Path) -> None:
    path = ReleaseServer.kubernetes("kube-scheduler", ARCH, NEXT_KUBERNETES_MODULE)
    assert "/v1.37." in path
    server.publish(path, b"newer")
    fetched = fetch_binaries(
        ["kube-scheduler"],
        tmp_path,
        QUIET,
        module=NEXT_KUBERNETES_MODULE,
        addresses=server.addresses,
        machine="x86_64",
    )
    assert (fetched, (tmp_path / "kube-scheduler").read_bytes()) == ([], b"newer")


def test_another_architecture_has_files_of_its_own(tmp_path: Path) -> None:
    with release_server() as server:
        server.publish_all(CONTENT, "arm64")
        assert fetch(server, tmp_path, machine="aarch64") == []
        assert {path.name for path in tmp_path.iterdir()} == RELEASED
        assert all("arm64" in path or path.endswith("SHA256SUMS") for path in server.asked)


def test_an_architecture_without_a_release_is_named(server: ReleaseServer, tmp_path: Path) -> None:
    assert fetch(server, tmp_path, machine="riscv64") == ["Kubernetes releases no control plane for riscv64"]
    assert server.asked == []


BINARY = ReleaseServer.kubernetes("kube-controller-manager", ARCH)
SUM = f"{BINARY}.sha256"
FAULTS = {
    "a body is cut": (BINARY, is_cut, r"http\S+/kube-controller-manager stopped: .*more expected.*"),
    "a body is not the file": (
        BINARY,
        is_a_login_page,
        r"the SHA-256 of http\S+/kube-controller-manager is \w{64}, but http\S+\.sha256 says \w{64}",
    ),
    "a sum is cut": (SUM, is_cut, r"127\.0\.0\.1:\d+ cannot be reached: .*more expected.*"),
    "a sum is a page": (SUM, is_a_login_page, r"http\S+\.sha256 has no SHA-256 of kube-controller-manager"),
}


@pytest.mark.parametrize(("path", "fault", "sentence"), FAULTS.values(), ids=FAULTS.keys())
def test_what_is_not_whole_and_right_is_left_out(
    path: str, fault: Fault, sentence: str, server: ReleaseServer, tmp_path: Path
) -> None:
    server.faults[path] = fault
    [failure] = fetch(server, tmp_path)
    assert re.fullmatch(sentence, failure)
    # The rest of Kubernetes is not tried: it could cost the same seconds once more.
    assert {path.name for path in tmp_path.iterdir()} == {"kube-apiserver", *ETCD, *HELM}
    assert ReleaseServer.kubernetes("kube-scheduler", ARCH) not in server.asked


NO_ANSWER = r"127\.0\.0\.1:\d+ (does not answer|cannot be reached: timed out)"
HANGS = {
    "instead of a sum": (SUM, hangs, Patience(answer=SHORT), NO_ANSWER),
    "instead of a file": (BINARY, hangs, Patience(answer=SHORT), NO_ANSWER),
    "in a file": (BINARY, stalls, Patience(stall=SHORT), r"http\S+/kube-controller-manager stopped: timed out"),
}


@pytest.mark.parametrize(("path", "fault", "patience", "sentence"), HANGS.values(), ids=HANGS.keys())
def test_a_server_that_hangs_is_given_up(
    path: str, fault: Fault, patience: Patience, sentence: str, server: ReleaseServer, tmp_path: Path
) -> None:
    """It would hang until the end of this test."""
    server.faults[path] = fault
    [failure] = fetch(server, tmp_path, "kube-controller-manager", "kube-scheduler", patience=patience)
    assert re.fullmatch(sentence, failure)
    assert list(tmp_path.iterdir()) == []
    assert ReleaseServer.kubernetes("kube-scheduler", ARCH) not in server.asked


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (f"{ReleaseServer.kubernetes('kube-apiserver', ARCH)}.sha256", KUBERNETES),
        (ReleaseServer.etcd(ARCH), ETCD),
        (f"{ReleaseServer.helm(ARCH)}.sha256sum", HELM),
    ],
)
def test_a_file_that_is_not_there_is_named(
    path: str, names: tuple[str, ...], server: ReleaseServer, tmp_path: Path
) -> None:
    del server.files[path]
    assert fetch(server, tmp_path) == [f"{server.url}{path} answers 404 Not Found"]
    assert {path.name for path in tmp_path.iterdir()} == RELEASED - set(names)


def test_a_sum_of_another_file_does_not_count(server: ReleaseServer, tmp_path: Path) -> None:
    path = ReleaseServer.helm(ARCH)
    server.publish(path, server.files[path], f"{path}.sha256sum", "{digest}  {name}.asc\n")
    server.files[f"{path}.sha256sum"] = server.files[f"{path}.sha256sum"].splitlines()[-1]
    [failure] = fetch(server, tmp_path, "helm")
    assert failure.endswith(f"has no SHA-256 of {path.rpartition('/')[2]}")


def links() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        entry = tarfile.TarInfo(f"linux-{ARCH}/helm")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/bin/sh"
        tar.addfile(entry)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        archive({"helm": b"elsewhere"}),
        archive({f"../linux-{ARCH}/helm": b"outside", f"linux-{ARCH}/helm/x": b"below"}),
        links(),
        archive({f"linux-{ARCH}/helm": os.urandom(100_000)})[:50_000],
        b"no archive",
    ],
    ids=["elsewhere", "outside", "a link", "cut", "none"],
)
def test_an_archive_has_to_have_the_binary_at_its_place(
    content: bytes, server: ReleaseServer, tmp_path: Path
) -> None:
    """Whatever else it has is not written."""
    path = ReleaseServer.helm(ARCH)
    del server.files[f"{path}.sha256sum"]
    server.publish(path, content, "{path}.sha256sum", "{digest}  {name}\n")
    into = tmp_path / "a" / "b"
    into.mkdir(parents=True)
    [failure] = fetch(server, into, "helm")
    assert failure.startswith(f"{server.url}{path} is not a whole archive with helm: ")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    here, nowhere = f"http://127.0.0.1:{port}", "http://releases.invalid"
    addresses = Addresses(kubernetes=here, etcd=here, helm=nowhere)
    failures = fetch_binaries(RELEASED, tmp_path, QUIET, addresses=addresses, machine="x86_64")
    refused = f"127.0.0.1:{port} cannot be reached: Connection refused"
    assert failures[:2] == [refused, refused]
    # How soon the search for an address ends is a matter of the machine.
    assert re.match(r"releases\.invalid (does not answer|cannot be reached: )", failures[2])
    assert list(tmp_path.iterdir()) == []


def test_the_environments_proxy_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with release_server() as server:
        server.publish_all(CONTENT, ARCH)
        monkeypatch.setenv("http_proxy", server.url)
        addresses = Addresses(helm="http://releases.invalid/helm")
        assert fetch_binaries(HELM, tmp_path, QUIET, addresses=addresses, machine="x86_64") == []
    assert (tmp_path / "helm").read_bytes() == CONTENT["helm"]


def test_the_environment_names_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES", "ETCD", "HELM"):
        monkeypatch.delenv(f"SPOTTRAIN_{name}_MIRROR", raising=False)
    assert mirrors() == Addresses()
    monkeypatch.setenv("SPOTTRAIN_ETCD_MIRROR", "https://mirror.example/etcd/")
    assert mirrors() == Addresses(etcd="https://mirror.example/etcd")
    monkeypatch.setenv("SPOTTRAIN_HELM_MIRROR", "mirror.example")
    with pytest.raises(LocalClusterError, match=r"SPOTTRAIN_HELM_MIRROR is 'mirror.example', which is not an HTTP"):
        mirrors()
