"""What every checkpoint store guarantees, checked for each with the same tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memory_storage import MemoryStorage
from object_stores import ObjectStore
from spottrain.checkpoint.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageUnavailable,
)
from spottrain.checkpoint.store_trial import try_store
from spottrain.checkpoint.stores import azure_storage, gcs_storage, s3_storage
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import SCHEMES, open_storage

Open = Callable[[], CheckpointStorage]
ROUNDS = 20
WRITERS = 8


@pytest.fixture(params=["memory", "file", "s3", pytest.param("moto", marks=pytest.mark.nightly), "gs", "az"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """A function that opens the same store again, as several processes would.

    The store is empty at first.
    """
    if request.param == "memory":
        memory = MemoryStorage()
        return lambda: memory
    if request.param == "file":
        return lambda: open_storage(f"file://{tmp_path}/store")
    scheme = "s3" if request.param == "moto" else request.param
    request.getfixturevalue(f"{scheme}_credentials")
    store = request.getfixturevalue(f"{request.param}_store")
    uri = f"{scheme}://{store.new_bucket()}/some/prefix"
    return lambda: open_storage(uri, endpoint_url=store.endpoint_url)


@pytest.fixture
def storage(reopen: Open) -> CheckpointStorage:
    return reopen()


def test_get_returns_what_was_put(storage: CheckpointStorage) -> None:
    etag = storage.put("a/b", b"one")
    assert storage.get("a/b") == (b"one", etag)
    assert storage.put("a/b", memoryview(b"two")) != etag
    assert storage.get("a/b")[0] == b"two"


def test_a_missing_object_is_named(storage: CheckpointStorage) -> None:
    with pytest.raises(ObjectNotFound, match="'a/nothing'"):
        storage.get("a/nothing")
    with pytest.raises(ObjectNotFound, match="'a/nothing'"):
        storage.read_into("a/nothing", 0, memoryview(bytearray(1)))


def test_put_if_absent_only_creates(storage: CheckpointStorage) -> None:
    etag = storage.put("head", b"1", if_absent=True)
    with pytest.raises(PreconditionFailed):
        storage.put("head", b"2", if_absent=True)
    assert storage.get("head") == (b"1", etag)


def test_put_if_match_only_replaces_that_version(storage: CheckpointStorage) -> None:
    first = storage.put("head", b"1")
    second = storage.put("head", b"2", if_match=first)
    with pytest.raises(PreconditionFailed):
        storage.put("head", b"3", if_match=first)
    assert storage.get("head") == (b"2", second)


def test_put_if_match_does_not_create(storage: CheckpointStorage) -> None:
    etag = storage.put("head", b"1")
    storage.delete(["head"])
    with pytest.raises(PreconditionFailed):
        storage.put("head", b"2", if_match=etag)
    assert list(storage.list("")) == []


def test_of_many_conditional_writers_exactly_one_wins(reopen: Open) -> None:
    writers = [reopen() for _ in range(WRITERS)]
    etag: str | None = None
    with ThreadPoolExecutor(WRITERS) as pool:
        for round_number in range(ROUNDS):

            def write(
                index: int, expected: str | None = etag, number: int = round_number
            ) -> tuple[str, bytes] | None:
                data = f"{number} by {index}".encode()
                try:
                    return writers[index].put("head", data, if_match=expected, if_absent=expected is None), data
                except PreconditionFailed:
                    return None

            won = [outcome for outcome in pool.map(write, range(WRITERS)) if outcome is not None]
            assert len(won) == 1
            etag, data = won[0]
            assert writers[0].get("head") == (data, etag)


@pytest.mark.parametrize(
    "size",
    [0, 1, 8 << 20, (20 << 20) + 3, (36 << 20) + 3],
    ids=["empty", "byte", "one part", "parts", "larger parts"],
)
def test_upload_stores_every_byte(storage: CheckpointStorage, size: int) -> None:
    data = os.urandom(size)
    storage.upload("big", memoryview(data))
    assert storage.get("big")[0] == data
    assert list(storage.list("big")) == [("big", size)]


class OverwrittenPieces:
    """Pieces in the same memory. Implements Pieces."""

    def __init__(self, data: bytes, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[memoryview]:
        memory = bytearray(self.piece_bytes)
        for begin in range(0, len(self), self.piece_bytes):
            piece = self._data[begin : begin + self.piece_bytes]
            memory[: len(piece)] = piece
            yield memoryview(memory)[: len(piece)]
            memory[:] = bytes(len(memory))


@pytest.mark.parametrize(("size", "piece"), [((5 << 20) + 3, 4 << 20), ((41 << 20) + 3, 8 << 20)])
def test_upload_takes_pieces_that_share_their_memory(
    storage: CheckpointStorage, size: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_storage, "_MOST_COMPOSED", 2)
    data = os.urandom(size)
    storage.upload("big", OverwrittenPieces(data, piece))
    assert storage.get("big")[0] == data
    assert list(storage.list("big")) == [("big", size)]


@pytest.mark.parametrize(("offset", "length", "expected"), [(2, 3, b"234"), (8, 5, b"89"), (10, 5, b"")])
def test_read_into_ends_with_the_object(
    storage: CheckpointStorage, offset: int, length: int, expected: bytes
) -> None:
    storage.put("k", b"0123456789")
    memory = bytearray(length)
    assert storage.read_into("k", offset, memoryview(memory)) == len(expected)
    assert memory == expected.ljust(length, b"\0")


def test_read_into_fills_large_memory(storage: CheckpointStorage) -> None:
    data = os.urandom(9 << 20)
    storage.upload("big", data)
    memory = bytearray(len(data) - 5)
    assert storage.read_into("big", 5, memoryview(memory)) == len(memory)
    assert memory == data[5:]


def test_list_is_sorted_and_by_prefix_of_the_key(storage: CheckpointStorage) -> None:
    for key in ("attempts/g2/b", "attempts/g1/a", "attempts/g10/c", "HEAD"):
        storage.put(key, b"12")
    assert list(storage.list("attempts/g1")) == [("attempts/g1/a", 2), ("attempts/g10/c", 2)]
    assert [key for key, _ in storage.list("")] == ["HEAD", "attempts/g1/a", "attempts/g10/c", "attempts/g2/b"]
    assert list(storage.list("nothing/")) == []


def test_list_and_delete_go_on_after_their_first_page(
    storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (s3_storage, gcs_storage, azure_storage):
        monkeypatch.setattr(module, "_PAGE_OBJECTS", 2)
    keys = list("abcde")
    for key in keys:
        storage.put(key, b"1")
    assert list(storage.list("")) == [(key, 1) for key in keys]
    storage.delete(keys)
    assert list(storage.list("")) == []


def test_delete_forgives_what_is_gone(storage: CheckpointStorage) -> None:
    storage.put("a/b", b"1")
    storage.put("a/c", b"1")
    storage.delete(["a/b", "a/never"])
    storage.delete(["a/b"])
    storage.delete([])
    assert list(storage.list("")) == [("a/c", 1)]


def test_another_opener_sees_every_finished_write(reopen: Open) -> None:
    one, other = reopen(), reopen()
    for number in range(20):
        etag = one.put("k", str(number).encode())
        assert other.get("k") == (str(number).encode(), etag)


def test_a_reader_sees_all_of_a_write_or_nothing_of_it(reopen: Open) -> None:
    values = [bytes([number]) * (9 << 20) for number in range(2)]  # two parts, where a store has them
    writer, reader = reopen(), reopen()

    def write() -> None:
        for value in values:
            writer.upload("k", value)

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        while not written.done():
            with contextlib.suppress(ObjectNotFound):
                is_whole = reader.get("k")[0] in values
                assert is_whole
        written.result()


def test_there_is_nothing_to_abandon_after_whole_uploads(storage: CheckpointStorage) -> None:
    storage.upload("attempts/x", bytes(20 << 20))
    assert storage.abandon_uploads("attempts/", lambda key: True) == 0
    assert [key for key, _ in storage.list("")] == ["attempts/x"]


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("server", ["s3_store", "moto_store"])
def test_s3_abandons_only_the_uploads_that_are_over(server: str, request: pytest.FixtureRequest) -> None:
    store: ObjectStore = request.getfixturevalue(server)
    bucket = store.new_bucket()
    storage = open_storage(f"s3://{bucket}/p", endpoint_url=store.endpoint_url)
    for key in ("p/attempts/old", "p/attempts/new"):
        store.client.create_multipart_upload(Bucket=bucket, Key=key)
    assert storage.abandon_uploads("attempts/", lambda key: key == "attempts/old") == 1
    left = store.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    assert [upload["Key"] for upload in left] == ["p/attempts/new"]


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("server", ["s3_store", "moto_store"])
def test_s3_passes_over_an_upload_that_somebody_else_abandons(server: str, request: pytest.FixtureRequest) -> None:
    store: ObjectStore = request.getfixturevalue(server)
    bucket = store.new_bucket()
    storage = open_storage(f"s3://{bucket}/p", endpoint_url=store.endpoint_url)
    uploads = {
        key: store.client.create_multipart_upload(Bucket=bucket, Key=f"p/{key}")["UploadId"]
        for key in ("attempts/one", "attempts/two")
    }

    def abandoned_meanwhile(key: str) -> bool:
        if key == "attempts/one":
            store.client.abort_multipart_upload(Bucket=bucket, Key=f"p/{key}", UploadId=uploads[key])
        return True

    storage.abandon_uploads("attempts/", abandoned_meanwhile)
    assert store.client.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("ftp://host/x", "unknown scheme; use one of " + ", ".join(f"{scheme}://" for scheme in SCHEMES)),
        ("/just/a/path", "unknown scheme"),
        ("s3://bucket/run?lr=1", r"contains \? or #, which can't be part of a folder's name"),
        ("file:///folder/run#1", r"contains \? or #, which can't be part of a folder's name"),
        ("file://relative/folder", "not an absolute path of a folder"),
        ("s3:///prefix", "names no bucket"),
        ("s3://[bucket/run", r"is not a valid URI: Invalid IPv6 URL\."),
        ("s3://No_Bucket!/x", "'No_Bucket!' can't be the name of a bucket, .* Correct checkpoint.uri."),
        ("gs://bucket-/x", "'bucket-' can't be the name of a bucket"),
        ("gs://arn:aws:s3:region:1:accesspoint:x/y", "can't be the name of a bucket"),
        (
            "s3://arn:aws:s3:eu-west-1:12:accesspoint/x/y",
            "is not the ARN of an access point, which reads arn:aws:s3:REGION",
        ),
        ("s3://arn:aws:s3:::bucket/y", "is not the ARN of an access point"),
    ],
)
def test_a_wrong_uri_gets_a_sentence(uri: str, sentence: str) -> None:
    with pytest.raises(StorageDenied, match=sentence):
        open_storage(uri)


ARN = "arn:aws:s3:eu-west-1:123456789012:accesspoint"


@pytest.mark.parametrize("bucket", ["b", "Old_Bucket.1", f"{ARN}:name", f"{ARN}/name"])
def test_any_name_that_some_server_takes_is_taken(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr("spottrain.checkpoint.stores.s3_storage.S3Storage", lambda **where: opened.append(where))
    open_storage(f"s3://{bucket}/p/q")
    assert opened == [{"bucket": bucket, "prefix": "p/q", "endpoint_url": None, "encryption": None}]


@pytest.mark.usefixtures("s3_credentials")
def test_a_bucket_that_does_not_exist_gets_a_sentence(s3_store: ObjectStore) -> None:
    storage = open_storage("s3://no-such-bucket/p", endpoint_url=s3_store.endpoint_url)
    for use in (lambda: storage.put("k", b""), lambda: storage.get("k"), lambda: list(storage.list(""))):
        with pytest.raises(StorageDenied, match=r"bucket s3://no-such-bucket at http.* does not exist: create it"):
            use()


@pytest.mark.parametrize(
    ("user", "remedy"),
    [("reader", "let the job's service account"), ("nobody", "the store does not know the access key")],
)
def test_a_bucket_that_denies_access_gets_a_sentence(
    s3_store: ObjectStore, user: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", user)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{user}-secret")
    storage = open_storage(f"s3://{s3_store.new_bucket()}/p", endpoint_url=s3_store.endpoint_url)
    with pytest.raises(StorageDenied, match=rf"Access to s3://.* is denied .*: {remedy}"):
        storage.put("k", b"")


@pytest.mark.usefixtures("s3_credentials")
def test_an_endpoint_that_is_not_there_gets_a_sentence() -> None:
    storage = open_storage("s3://bucket/p", endpoint_url="http://127.0.0.1:9")
    with pytest.raises(
        StorageUnavailable, match=r"can't be reached: check checkpoint\.endpointURL \(of a command, --endpoint-url\)"
    ):
        storage.get("k")


@pytest.mark.usefixtures("s3_credentials")
def test_a_store_without_https_gets_a_sentence(s3_store: ObjectStore) -> None:
    storage = open_storage(
        f"s3://{s3_store.new_bucket()}/p", endpoint_url=s3_store.endpoint_url.replace("http", "https")
    )
    with pytest.raises(StorageUnavailable, match=r"doesn't speak https: check checkpoint\.endpointURL"):
        storage.get("k")


def test_each_store_passes_the_trial(storage: CheckpointStorage) -> None:
    findings = list(try_store(storage))
    assert len(findings) == 6
    assert not any(finding.warning for finding in findings)
    assert list(storage.list("")) == []


def test_a_bucket_that_keeps_versions_is_named(s3_store: ObjectStore, s3_credentials: None, tmp_path: Path) -> None:
    bucket = s3_store.new_bucket()
    s3_store.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    *_, last = try_store(open_storage(f"s3://{bucket}/p", endpoint_url=s3_store.endpoint_url))
    assert last.warning is not None
    assert "the bucket keeps versions of deleted objects" in last.warning
