"""Faults of a cloud's store: each becomes a sentence, or nobody notices it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import botocore.auth
import pytest

from faulty_proxy import DAWDLE_SECONDS, FaultyProxy, faulty_proxy
from object_stores import ObjectStore
from spottrain.checkpoint.errors import (
    StorageDenied,
    StorageError,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
    StoreUnfit,
)
from spottrain.checkpoint.store_trial import try_store
from spottrain.checkpoint.stores import azure_storage, gcs_storage
from spottrain.checkpoint.stores.azure_storage import AzureStorage
from spottrain.checkpoint.stores.gcs_storage import GcsStorage
from spottrain.checkpoint.stores.s3_storage import S3Storage
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS, CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage

Store = tuple[CheckpointStorage, FaultyProxy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    kind: str
    name: str
    proxy: FaultyProxy

    def open(self, *, patient: bool, answer_seconds: float = ANSWER_SECONDS) -> CheckpointStorage:
        """The store, which tries as often as it does by default, or only twice."""
        where = {"bucket": self.name, "prefix": "p", "endpoint_url": self.proxy.url}
        if self.kind == "s3":
            return S3Storage(**where, max_attempts=None if patient else 2, answer_seconds=answer_seconds)
        if self.kind == "az":
            return AzureStorage(**where, retries=5 if patient else 1, answer_seconds=answer_seconds)
        return GcsStorage(**where, retry_seconds=60.0 if patient else 1.5, answer_seconds=answer_seconds)


@pytest.fixture(params=["s3", "gs", pytest.param("az", marks=pytest.mark.nightly)])
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket behind a proxy."""
    request.getfixturevalue(f"{request.param}_credentials")
    server: ObjectStore = request.getfixturevalue(f"{request.param}_store")
    with faulty_proxy(server.endpoint_url) as proxy:
        yield Bucket(kind=request.param, name=server.new_bucket(), proxy=proxy)


@pytest.fixture
def store(bucket: Bucket) -> Store:
    """It gives up after a try or two instead of a minute."""
    storage = bucket.open(patient=False)
    storage.put("k", b"0123456789")
    return storage, bucket.proxy


OPERATIONS: dict[str, Callable[[CheckpointStorage], object]] = {
    "put": lambda storage: storage.put("k", b"new"),
    "conditional put": lambda storage: storage.put("k", b"new", if_absent=True),
    "upload": lambda storage: storage.upload("k", bytes(17 << 20)),
    "get": lambda storage: storage.get("k"),
    "read_into": lambda storage: storage.read_into("k", 2, memoryview(bytearray(3))),
    "list": lambda storage: list(storage.list("")),
    "delete": lambda storage: storage.delete(["k"]),
}
LASTING: dict[str, tuple[type[StorageError], str]] = {
    "denies": (StorageDenied, r"Access to .*://.* is denied.*: let the job's service account read, write"),
    "vanishes": (StorageMissing, r"The bucket .*://.* does not exist: create it, or correct checkpoint\.uri"),
    "full": (StorageFull, r"the store is full\. Free space, or lower checkpoint\.keep"),
    "throttles": (StorageUnavailable, "failed, after retries: "),
    "drops": (StorageUnavailable, "://"),
}


# The stores of Google and of Azure are never full.
@pytest.mark.parametrize(
    ("bucket", "fault"),
    [(store, fault) for fault in LASTING for store in ("s3", "gs", "az") if store == "s3" or fault != "full"],
    indirect=["bucket"],
)
def test_a_lasting_fault_becomes_a_sentence_whatever_was_asked(store: Store, fault: str) -> None:
    storage, proxy = store
    kind, sentence = LASTING[fault]
    retried = fault in ("throttles", "drops")
    for name in ("put", "get") if retried else OPERATIONS:
        proxy.play(fault)
        with pytest.raises(StorageError, match=sentence) as raised:
            OPERATIONS[name](storage)
        assert type(raised.value) is kind, (name, raised.value)
    proxy.play("")
    assert storage.get("k")[0] == b"0123456789"


@pytest.mark.parametrize("fault", ["throttles", "drops"])
def test_a_short_fault_is_not_noticed(bucket: Bucket, fault: str) -> None:
    storage, proxy = bucket.open(patient=True), bucket.proxy
    for operation in OPERATIONS.values():
        storage.delete(["k"])
        if operation is not OPERATIONS["conditional put"]:
            storage.put("k", b"0123456789")
        proxy.play(fault, times=1)
        operation(storage)


def test_a_connection_that_hangs_is_left_for_another_one(bucket: Bucket) -> None:
    storage = bucket.open(patient=True, answer_seconds=2.0)
    for name in ("put", "upload", "get", "read_into", "list"):
        bucket.proxy.play("hangs", times=1)
        OPERATIONS[name](storage)
    assert len(storage.get("k")[0]) == 17 << 20


@pytest.mark.parametrize("bucket", ["gs", "az"], indirect=True)
def test_an_upload_that_takes_long_but_never_stalls_succeeds(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gcs_storage, azure_storage):
        monkeypatch.setattr(module, "_CONNECT_SECONDS", DAWDLE_SECONDS / 2)
    bucket.proxy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    storage, data = bucket.open(patient=False), bytes(range(256)) * (1 << 18)
    bucket.proxy.play("dawdles")
    storage.upload("k", data)
    bucket.proxy.play("")
    assert storage.get("k")[0] == data


def test_a_store_that_hangs_for_good_becomes_a_sentence(bucket: Bucket) -> None:
    storage = bucket.open(patient=False, answer_seconds=0.5)
    bucket.proxy.play("hangs")
    for name in ("put", "upload", "get"):
        with pytest.raises(
            StorageUnavailable,
            match=f"{bucket.kind}://.* can't be reached: check checkpoint.endpointURL.*timed? ?out",
        ):
            OPERATIONS[name](storage)


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
@pytest.mark.parametrize("jump", [timedelta(minutes=20), timedelta(hours=-5)], ids=["forward", "back"])
def test_a_clock_by_which_s3_takes_no_signature_is_reported(
    store: Store, jump: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, _ = store
    right = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: right() + jump)
    for operation in OPERATIONS.values():
        with pytest.raises(
            StorageUnavailable, match=r"this node's clock is wrong: it says .* GMT, the store's .* GMT"
        ):
            operation(storage)
    monkeypatch.undo()
    assert storage.get("k")[0] == b"0123456789"


def test_an_answer_that_breaks_off_is_not_taken_for_a_short_object(store: Store) -> None:
    storage, proxy = store
    data = bytes(range(256)) * 4096
    storage.upload("k", data)
    memory = memoryview(bytearray(len(data)))
    proxy.play("cuts", times=1)
    assert storage.get("k")[0] == data
    proxy.play("cuts", times=1)
    assert storage.read_into("k", 0, memory) == len(data)
    assert memory == data


@pytest.fixture
def partial_server(moto_store: ObjectStore, s3_credentials: None) -> Iterator[Bucket]:
    """A bucket of a server that speaks S3 in part. It checks no signatures, so that the proxy may drop headers."""
    with faulty_proxy(moto_store.endpoint_url) as proxy:
        yield Bucket(kind="s3", name=moto_store.new_bucket(), proxy=proxy)


@pytest.mark.parametrize(
    ("way", "kind", "sentence"),
    [
        ("ignores conditions", StoreUnfit, r"overwrote an object by a write that should only create it"),
        (
            "knows no conditions",
            StorageDenied,
            r"NotImplemented.*a trial of a write that only creates",
        ),
        ("refuses checksums", StorageDenied, r"Set AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the job's env"),
        ("asks for encryption", StorageDenied, r"with an explicit deny\).*checkpoint\.encryption"),
    ],
)
def test_a_trial_names_what_a_server_lacks(
    partial_server: Bucket, way: str, kind: type[StorageError], sentence: str
) -> None:
    partial_server.proxy.play(way)
    with pytest.raises(StorageDenied, match=rf"{sentence}.*docs/how-to/bucket\.md") as raised:
        list(try_store(partial_server.open(patient=False)))
    assert isinstance(raised.value, kind)


def test_a_server_that_knows_no_ranges_gives_no_other_bytes(partial_server: Bucket) -> None:
    storage = partial_server.open(patient=False)
    storage.put("k", b"0123456789")
    partial_server.proxy.play("ignores ranges")
    with pytest.raises(StorageDenied, match=r"://.*/k.*: the server sends the whole object for a part of it"):
        storage.read_into("k", 2, memoryview(bytearray(3)))


@pytest.mark.parametrize("way", ["deletes by MD5", "refuses checksums"])
def test_a_server_that_refuses_to_delete_many_at_once_is_asked_for_each(
    partial_server: Bucket, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    storage = partial_server.open(patient=False)
    partial_server.proxy.play(way)
    keys = [f"k{number}" for number in range(5)]
    for key in keys:
        storage.put(key, b"1")
    storage.delete([*keys[:4], "never was"])
    assert [key for key, _ in storage.list("")] == keys[4:]


def test_bodies_carry_md5_if_checksums_are_only_sent_when_required(
    partial_server: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    partial_server.proxy.play("refuses checksums")
    assert len(list(try_store(partial_server.open(patient=False)))) == 6
    assert "content-md5" in partial_server.proxy.headers_of_bodies


@pytest.mark.parametrize(
    ("encryption", "sent"), [("AES256", "AES256"), ("arn:aws:kms:eu-west-1:123456789012:key/k", "aws:kms")]
)
def test_writes_ask_for_encryption_if_the_bucket_demands_it(
    partial_server: Bucket, moto_store: ObjectStore, encryption: str, sent: str
) -> None:
    partial_server.proxy.play("asks for encryption")
    storage = open_storage(
        f"s3://{partial_server.name}/p", endpoint_url=partial_server.proxy.url, encryption=encryption
    )
    assert len(list(try_store(storage))) == 6
    storage.put("k", b"1")
    storage.upload("large", bytes(9 << 20))
    for key in ("p/k", "p/large"):
        described = moto_store.client.head_object(Bucket=partial_server.name, Key=key)
        assert described["ServerSideEncryption"] == sent
        assert described.get("SSEKMSKeyId") == (encryption if sent == "aws:kms" else None)
