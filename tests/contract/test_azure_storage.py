"""What only Azure's Blob Storage does: accounts, identities, leases, blocks without an object."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from azure.storage.blob import RetentionPolicy, generate_container_sas
from benchmarks.ports import free_ports

from azurite_server import ACCOUNT, ACCOUNTS, KEY, azurite_command
from faulty_proxy import faulty_proxy
from object_stores import ObjectStore, server, wait_until_it_works
from spottrain.checkpoint.errors import (
    CredentialsMissing,
    PreconditionFailed,
    StorageDenied,
    StorageUnavailable,
)
from spottrain.checkpoint.store_trial import try_store
from spottrain.checkpoint.stores.azure_account import AzureAccount
from spottrain.checkpoint.stores.azure_storage import AzureStorage
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage
from spottrain_local.pki import KeyPair, open_authority

CONNECTION = f"DefaultEndpointsProtocol=https;AccountName=mine;AccountKey={KEY};EndpointSuffix=core.windows.net"


@pytest.fixture
def bucket(az_store: ObjectStore) -> str:
    return az_store.new_bucket()


@pytest.fixture
def storage(az_store: ObjectStore, az_credentials: None, bucket: str) -> CheckpointStorage:
    return AzureStorage(bucket=bucket, prefix="p", endpoint_url=az_store.endpoint_url, retries=0)


@pytest.mark.parametrize(
    ("endpoint", "environment", "url", "name", "key"),
    [
        ("https://mine.blob.core.windows.net/", {}, "https://mine.blob.core.windows.net", "mine", None),
        (None, {"AZURE_STORAGE_ACCOUNT": "mine"}, "https://mine.blob.core.windows.net", "mine", None),
        (None, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "https://mine.blob.core.windows.net", "mine", KEY),
        (
            None,
            {"AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint=http://127.0.0.1:1/a;AccountName=a"},
            "http://127.0.0.1:1/a",
            "a",
            None,
        ),
        (
            "https://emulator:1/other",
            {"AZURE_STORAGE_ACCOUNT": "other", "AZURE_STORAGE_CONNECTION_STRING": CONNECTION},
            "https://emulator:1/other",
            "other",
            KEY,
        ),
    ],
    ids=["address", "account", "connection string", "its address", "each by itself"],
)
def test_address_and_key_are_found(
    endpoint: str | None, environment: dict[str, str], url: str, name: str, key: str | None
) -> None:
    assert AzureAccount.of("b", endpoint, environment) == AzureAccount(url=url, name=name, key=key, signature=None)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, r"Nothing names the storage account of the bucket az://b: set checkpoint\.endpointURL"),
        ({"AZURE_STORAGE_CONNECTION_STRING": "mine"}, "AZURE_STORAGE_CONNECTION_STRING is not a connection string"),
        ({"AZURE_STORAGE_ACCOUNT": "mine", "AZURE_STORAGE_KEY": "no key\n"}, "is not the key of a storage account"),
    ],
    ids=["no account", "no connection string", "no key"],
)
def test_wrong_settings_get_sentences(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(StorageDenied, match=sentence):
        AzureAccount.of("b", None, environment)


def test_a_connection_string_is_enough(az_store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"BlobEndpoint={az_store.endpoint_url};AccountName={ACCOUNT};AccountKey={KEY}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert len(list(try_store(open_storage(f"az://{bucket}/p")))) == 6


def test_a_signature_that_only_reads_is_denied_with_the_words_of_the_store(
    az_store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    signature = generate_container_sas(ACCOUNT, bucket, KEY, permission="rl", expiry=until)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"?{signature}")
    storage = open_storage(f"az://{bucket}/p", endpoint_url=az_store.endpoint_url)
    assert list(storage.list("")) == []
    with pytest.raises(
        StorageDenied, match=r"is denied \(AuthorizationPermissionMismatch: .*: let the job's service"
    ):
        storage.put("k", b"1")


def test_a_key_of_another_account_is_denied(
    az_store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_KEY", "b3RoZXI=")
    storage = open_storage(f"az://{bucket}/p", endpoint_url=az_store.endpoint_url)
    with pytest.raises(StorageDenied, match=r"is denied \(Auth\w+: Server failed to authenticate"):
        storage.get("k")


def test_a_lease_is_not_taken_for_another_writer(
    az_store: ObjectStore, storage: CheckpointStorage, bucket: str
) -> None:
    etag = storage.put("HEAD", b"1")
    az_store.client.get_blob_client(bucket, "p/HEAD").acquire_lease()
    for write in (
        lambda: storage.put("HEAD", b"2"),
        lambda: storage.put("HEAD", b"2", if_match=etag),
        lambda: storage.delete(["HEAD"]),
    ):
        with pytest.raises(
            StorageDenied, match=r"LeaseIdMissing: .*: somebody holds a lease on it\. Break the lease"
        ):
            write()
    with pytest.raises(PreconditionFailed):
        storage.put("HEAD", b"2", if_absent=True)


@pytest.mark.usefixtures("az_credentials")
def test_a_retention_policy_is_named(az_store: ObjectStore, bucket: str) -> None:
    with faulty_proxy(az_store.endpoint_url) as proxy:
        storage = AzureStorage(bucket=bucket, endpoint_url=proxy.url, retries=0)
        proxy.play("retains")
        with pytest.raises(StorageDenied, match=r"BlobImmutableDueToPolicy: .*: a time-based retention policy keeps"):
            storage.put("HEAD", b"1")


@pytest.mark.usefixtures("az_credentials")
def test_another_server_is_not_taken_for_an_empty_bucket(gs_store: ObjectStore) -> None:
    storage = AzureStorage(bucket="b", endpoint_url=gs_store.endpoint_url, retries=0)
    with pytest.raises(StorageUnavailable, match=r"No bucket answers at az://b/HEAD at http.*: check checkpoint"):
        storage.get("HEAD")


def test_soft_delete_is_named(az_store: ObjectStore, storage: CheckpointStorage) -> None:
    az_store.client.set_service_properties(delete_retention_policy=RetentionPolicy(enabled=True, days=7))
    try:
        *_, last = try_store(storage)
    finally:
        az_store.client.set_service_properties(delete_retention_policy=RetentionPolicy(enabled=False))
    assert last.warning is not None
    assert "soft delete keeps deleted objects for 7 days" in last.warning
    *_, last = try_store(storage)
    assert last.warning is None


def test_of_two_uploads_at_once_one_wins_as_a_whole(reopened: Callable[[], CheckpointStorage]) -> None:
    contents = [bytes([number]) * (17 << 20) for number in range(2)]
    stores = [reopened() for _ in contents]

    def upload(number: int) -> bool:
        try:
            stores[number].upload("k", contents[number])
        except StorageUnavailable:
            return False
        return True

    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            assert any(pool.map(upload, range(2)))
        is_whole = stores[0].get("k")[0] in contents
        assert is_whole


@pytest.fixture
def reopened(az_store: ObjectStore, az_credentials: None, bucket: str) -> Callable[[], CheckpointStorage]:
    return lambda: AzureStorage(bucket=bucket, endpoint_url=az_store.endpoint_url, retries=0)


def test_only_the_uploads_that_are_over_are_abandoned(
    az_store: ObjectStore, storage: CheckpointStorage, bucket: str
) -> None:
    container = az_store.client.get_container_client(bucket)
    for key in ("attempts/old", "attempts/new", "attempts/whole"):
        container.get_blob_client(f"p/{key}").stage_block("block", b"1")
    storage.put("attempts/whole", b"2")
    assert storage.abandon_uploads("attempts/", lambda key: not key.endswith("new")) == 1
    left = [blob.name for blob in container.list_blobs(include=["uncommittedblobs"])]
    assert left == ["p/attempts/new", "p/attempts/whole"]
    assert storage.get("attempts/whole")[0] == b"2"


class Entra(BaseHTTPRequestHandler):
    """Gives a token of Azure's for the service account's, as Microsoft Entra does."""

    assertions: list[str]

    def do_POST(self) -> None:
        self.assertions.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        now = int(time.time())
        claims = {"aud": "https://storage.azure.com", "iss": "https://sts.windows.net/tenant/"}
        token = jwt.encode(claims | {"iat": now, "nbf": now - 60, "exp": now + 3600}, "k" * 32)
        answer = {"token_type": "Bearer", "expires_in": 3600, "access_token": token}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyPair:
    """Of servers on loopback. Clients trust it."""
    authority = open_authority(tmp_path, "ca")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.certificate_file))
    return authority.issue(tmp_path / "server", "server", addresses=["127.0.0.1"])


@pytest.fixture
def entra(certificate: KeyPair) -> Iterator[str]:
    """Address of a server that gives tokens."""
    Entra.assertions = []
    with HTTPServer(("127.0.0.1", 0), Entra) as web:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        web.socket = context.wrap_socket(web.socket, server_side=True)
        threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
        yield f"https://127.0.0.1:{web.server_port}"
        web.shutdown()


def test_a_pod_with_workload_identity_needs_no_key(
    entra: str, certificate: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("of-the-service-account")
    for name, value in {
        "AZURE_AUTHORITY_HOST": entra,
        "AZURE_TENANT_ID": "tenant",
        "AZURE_CLIENT_ID": "client",
        "AZURE_FEDERATED_TOKEN_FILE": str(token),
    }.items():
        monkeypatch.setenv(name, value)
    (port,) = free_ports(1)
    tls = ("--oauth", "basic", "--cert", str(certificate.certificate), "--key", str(certificate.key))
    with server(azurite_command(port, *tls), tmp_path / "log", ACCOUNTS):
        storage = open_storage("az://bucket/p", endpoint_url=f"https://127.0.0.1:{port}/{ACCOUNT}")
        assert isinstance(storage, AzureStorage)
        wait_until_it_works(lambda: storage._container.exists() or storage._container.create_container())
        assert len(list(try_store(storage))) == 6
    assert len(Entra.assertions) == 1
    assert "client_assertion=of-the-service-account" in Entra.assertions[0]


def test_a_pod_without_an_identity_gets_a_sentence(certificate: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a pod without the label azure.workload.identity/use.
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "WorkloadIdentityCredential")
    storage = AzureStorage(bucket="b", endpoint_url="https://127.0.0.1:9/account", retries=0)
    with pytest.raises(
        CredentialsMissing, match=r"No credentials for az://b/k at .*: give the job's service account"
    ):
        storage.get("k")
