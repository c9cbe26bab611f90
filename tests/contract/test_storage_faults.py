"""What the faults of a cloud become: a sentence, or nothing that anybody notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from faulty_proxy import FaultyProxy, faulty_proxy
from object_stores import ObjectStore
from spottrain.checkpoint import (
    CheckpointStorage,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
)
from spottrain.checkpoint.gcs_storage import GcsStorage
from spottrain.checkpoint.s3_storage import S3Storage

Store = tuple[CheckpointStorage, FaultyProxy]


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store behind a proxy, that gives up after a try or two instead of a minute."""
    server: ObjectStore = request.getfixturevalue(f"{request.param}_store")
    bucket = server.new_bucket()
    with faulty_proxy(server.endpoint_url) as proxy:
        storage: CheckpointStorage
        if request.param == "s3":
            request.getfixturevalue("s3_credentials")
            storage = S3Storage(bucket=bucket, prefix="p", endpoint_url=proxy.url, max_attempts=2)
        else:
            storage = GcsStorage(bucket=bucket, prefix="p", endpoint_url=proxy.url, retry_seconds=1.5)
        storage.put("k", b"0123456789")
        yield storage, proxy


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
    "vanishes": (StorageMissing, r"The bucket of .*://.* does not exist: create it, or correct checkpoint\.uri"),
    "full": (StorageFull, r"the store is full\. Free space or lower checkpoint\.keep"),
    "throttles": (StorageUnavailable, "failed, after retries: "),
    "drops": (StorageUnavailable, "://"),
}


# Google's store is never full.
@pytest.mark.parametrize(
    ("store", "fault"),
    [(store, fault) for fault in LASTING for store in ("s3", "gs") if (store, fault) != ("gs", "full")],
    indirect=["store"],
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
def test_a_short_fault_is_not_noticed(store: Store, fault: str) -> None:
    storage, proxy = store
    for operation in OPERATIONS.values():
        storage.delete(["k"])
        if operation is not OPERATIONS["conditional put"]:
            storage.put("k", b"0123456789")
        proxy.play(fault, times=1)
        operation(storage)


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
