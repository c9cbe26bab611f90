"""What every checkpoint store guarantees, checked for each with the same tests."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memory_storage import MemoryStorage
from object_stores import ObjectStore
from spottrain.checkpoint.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageMissing,
    StorageUnavailable,
    StoreUnfit,
)
from spottrain.checkpoint.store_trial import try_store
from spottrain.checkpoint.stores.file_storage import FileStorage
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import SCHEMES, open_storage

Open = Callable[[], CheckpointStorage]
ROUNDS = 20
WRITERS = 8


@pytest.fixture(params=["memory", "file", "s3", pytest.param("moto", marks=pytest.mark.nightly), "gs"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """A function that opens the same store again, as several processes would.

    The store is empty at first.
    """
    if request.param == "memory":
        memory = MemoryStorage()
        return lambda: memory
    if request.param == "file":
        return lambda: open_storage(f"file://{tmp_path}/store")
    if request.param != "gs":
        request.getfixturevalue("s3_credentials")
    store = request.getfixturevalue(f"{request.param}_store")
    uri = f"{'gs' if request.param == 'gs' else 's3'}://{store.new_bucket()}/some/prefix"
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


def test_list_pages_through_many_objects(storage: CheckpointStorage) -> None:
    keys = [f"many/{index:05d}" for index in range(1100)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: storage.put(key, b""), keys))
    assert [key for key, _ in storage.list("many/")] == keys
    storage.delete(keys)
    assert list(storage.list("many/")) == []


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


def test_a_folder_abandons_what_a_killed_writer_left(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    assert storage.abandon_uploads("", lambda key: True) == 0
    (tmp_path / ".unfinished").mkdir()
    for name in ("attempts%old.123", "attempts%new.456"):
        (tmp_path / ".unfinished" / name).write_bytes(b"half")
    assert list(storage.list("")) == []
    assert storage.abandon_uploads("attempts/", lambda key: key == "attempts/old") == 1
    assert [path.name for path in (tmp_path / ".unfinished").iterdir()] == ["attempts%new.456"]


@pytest.mark.parametrize("write", [FileStorage.upload, FileStorage.put])
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "fails"])
def test_a_writer_that_ends_within_a_write_leaves_the_old_object(
    is_killed: bool, write: Callable[[FileStorage, str, bytes], object], tmp_path: Path
) -> None:
    storage = FileStorage(tmp_path)
    storage.put("a/b", b"old")
    writer = os.fork()
    if writer == 0:
        try:
            # The kernel lets it write no more than half.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
            with contextlib.suppress(StorageUnavailable):
                write(storage, "a/b", bytes(1000))
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(writer, 0)[1]) == is_killed
    assert storage.get("a/b")[0] == b"old"
    assert storage.abandon_uploads("", lambda key: True) == is_killed


def test_a_folder_makes_a_write_durable_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is synced before readers see the object, and its folders after that.

    At each fsync, the test notes what is synced and whether readers see the object yet.
    """
    synced: list[tuple[Path | int, bool]] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path if path.is_dir() else path.stat().st_size, (tmp_path / "a" / "b").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    FileStorage(tmp_path).upload("a/b", bytes(1000))
    assert synced == [(1000, False), (tmp_path / "a", True), (tmp_path, True)]


@pytest.mark.timeout(30)
def test_a_process_that_is_forked_within_a_write_keeps_nobody_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a data worker is, while the rank commits in the background."""
    forked: list[int] = []

    def fsync(descriptor: int) -> None:
        if forked:
            return
        forked.append(os.fork())
        if forked == [0]:
            signal.pause()

    monkeypatch.setattr(os, "fsync", fsync)
    try:
        etag = FileStorage(tmp_path).put("HEAD", b"1", if_absent=True)
        assert forked
        FileStorage(tmp_path).put("HEAD", b"2", if_match=etag)
    finally:
        os.kill(forked[0], signal.SIGKILL)
        os.waitpid(forked[0], 0)
    assert FileStorage(tmp_path).get("HEAD")[0] == b"2"


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


def test_a_folder_that_is_a_file_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/store"):
        with pytest.raises(StorageDenied, match=r"checkpoint folder .*: a part of its path is a file"):
            open_storage(f"file://{tmp_path}/{folder}")


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../b", ".lock"])
def test_a_folder_refuses_keys_outside_of_it(tmp_path: Path, key: str) -> None:
    with pytest.raises(StorageDenied, match="is not a key"):
        FileStorage(tmp_path).put(key, b"")


def test_a_folder_that_is_gone_differs_from_an_empty_one(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/store")
    assert list(storage.list("a/")) == []
    (tmp_path / "store").rename(tmp_path / "gone")
    with pytest.raises(StorageMissing, match="it is gone"):
        list(storage.list("a/"))


@pytest.mark.parametrize("broken", [errno.ENOTCONN, errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_a_folder_whose_mount_is_broken_is_unavailable(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"file://{tmp_path}")
    storage.put("HEAD", b"1")

    def fail(path: object, *_: object, **__: object) -> None:
        raise OSError(broken, os.strerror(broken), str(path))

    for name in ("os.stat", "os.scandir", "os.mkdir", "io.open"):
        monkeypatch.setattr(name, fail)
    for use in (
        lambda: storage.get("HEAD"),
        lambda: storage.put("HEAD", b"2"),
        lambda: list(storage.list("")),
        lambda: storage.abandon_uploads("", lambda _: True),
        lambda: open_storage(f"file://{tmp_path}"),
    ):
        with pytest.raises(StorageUnavailable, match=os.strerror(broken)):
            use()


def test_a_mount_point_whose_mount_is_broken_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder above knows that it exists.

    To `is_dir` of Python 3.14 and later, it is no folder.
    """

    def fail(path: object, *_: object, **__: object) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))

    for name in ("os.stat", "os.scandir"):
        monkeypatch.setattr(name, fail)
    monkeypatch.setattr(Path, "is_dir", lambda path: os.path.isdir(path))
    with pytest.raises(StorageUnavailable, match=os.strerror(errno.ENOTCONN)):
        open_storage(f"file://{tmp_path}")


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


def test_a_folder_is_written_where_folders_can_not_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS and FUSE answer so."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    storage = FileStorage(tmp_path)
    storage.upload("a/b", b"1")
    assert storage.get("a/b")[0] == b"1"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL])
def test_a_folder_without_locks_is_refused_by_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreUnfit, match=r"refuses flock \(.*Mount it with locks \(NFS without `nolock`"):
        list(try_store(FileStorage(tmp_path)))
