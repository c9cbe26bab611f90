"""Shards: formats, index, and the cache of a node."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cluster_fixtures import wait_for
from shard_folders import shards_in, web_server, write_lines
from spottrain.checkpoint.errors import StorageError
from spottrain.checkpoint.stores.file_storage import FileStorage
from spottrain.data import Shards
from spottrain.data.shards import cache, fetch_ahead, store
from spottrain.data.shards.cache import CacheUnusable, ShardCache
from spottrain.data.shards.dataset import read_index
from spottrain.data.shards.fetch_ahead import FetchAhead, check_room, wanted
from spottrain.data.shards.formats import JsonLines, ShardFormat, Tar, Tokens
from spottrain.data.shards.index import INDEX_KEY, UNKNOWN, ShardIndex
from spottrain.data.shards.make_index import make_index
from spottrain.data.shards.store import ShardPlace
from spottrain_cli.main import main


def write_tar(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, files in samples.items():
            for ending, content in files.items():
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def used(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.shard"))


def test_raw_tokens_are_cut_into_contexts_that_share_a_token(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(100, 109, dtype=np.uint16).tofile(tmp_path / "b.bin")
    place, tokens = ShardPlace.of(f"file://{tmp_path}/*.bin"), Tokens(context=4)
    assert make_index(place, tokens).samples.tolist() == [2, 2]
    data = Shards(f"file://{tmp_path}/*.bin", format=tokens, cache=tmp_path / "cache", cache_bytes=100)
    assert [data[index].tolist() for index in range(4)] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [100, 101, 102, 103, 104],
        [104, 105, 106, 107, 108],
    ]


def test_tokens_of_an_array_have_its_type(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([70_000, 1, 2, 3, 4], np.uint32))
    make_index(ShardPlace.of(f"file://{tmp_path}/*.npy"), Tokens(context=2))
    data = Shards(f"file://{tmp_path}/*.npy", format=Tokens(context=2), cache=tmp_path / "cache", cache_bytes=1000)
    assert [each.tolist() for each in (data[0], data[1])] == [[70_000, 1, 2], [2, 3, 4]]


def test_files_of_one_name_are_a_sample_of_a_tar(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3))
    write_tar(tmp_path / "0.tar", {"a/1": {"jpg": b"\xff\xd8", "cls": b"7"}, "a/2": {"jpg": b"\xff", "cls": b"8"}})
    write_tar(tmp_path / "1.tar", {"b": {"seg.npy": array.getvalue(), "txt": "é".encode(), "json": b'{"x": [1]}'}})
    uri = f"file://{tmp_path}/*.tar"
    assert make_index(ShardPlace.of(uri), Tar()).samples.tolist() == [2, 1]
    data = Shards(uri, format="tar", cache=tmp_path / "cache", cache_bytes=1 << 20)
    assert data[1] == {"__key__": "a/2", "jpg": b"\xff", "cls": 8}
    assert data[2]["seg.npy"].tolist() == [0, 1, 2]
    assert (data[2]["txt"], data[2]["json"]) == ("é", {"x": [1]})
    decoded = Shards(
        uri, format=Tar(decode=lambda files: files["cls"]), cache=tmp_path / "cache", cache_bytes=1 << 20
    )
    assert decoded[0] == 7


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.float32(2),
        np.empty((0, 3)),
        np.array(["é"]),
    ],
    ids=["C", "Fortran", "scalar", "empty", "text"],
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_an_array_of_a_tar_is_what_numpy_loads(tmp_path: Path, array: Any, version: tuple[int, int]) -> None:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.asanyarray(array), version)
    write_tar(tmp_path / "0.tar", {"0": {"npy": content.getvalue()}, "1": {"npy": content.getvalue()[:-1]}})
    uri = f"file://{tmp_path}/*.tar"
    make_index(ShardPlace.of(uri), Tar())
    found = Shards(uri, format="tar", cache=tmp_path / "cache", cache_bytes=1 << 20)
    own, loaded = found[0]["npy"], np.load(io.BytesIO(content.getvalue()))
    assert (own.dtype, own.shape, own.flags.writeable) == (loaded.dtype, loaded.shape, True)
    assert np.array_equal(own, loaded)
    with pytest.raises(ValueError, match=r"sample 1 of the shard 0\.tar of .* can't be decoded"):
        found[1]


def test_a_line_is_a_sample_also_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"x": 1}\n\n[2]\n"three"')
    uri = f"file://{tmp_path}/*.jsonl"
    make_index(ShardPlace.of(uri), JsonLines())
    data = Shards(uri, format="jsonl", cache=tmp_path / "cache", cache_bytes=1000)
    assert [data[index] for index in range(3)] == [{"x": 1}, [2], "three"]
    with pytest.raises(IndexError):
        data[3]


def test_every_sample_is_read_through_a_cache_that_keeps_its_bound(tmp_path: Path) -> None:
    data = shards_in(tmp_path)
    for index in np.random.default_rng(1).permutation(30).tolist():
        assert data[index] == {"value": 100 * (index // 5) + index % 5}
        assert used(tmp_path) <= 300


def test_what_is_needed_last_goes_first(tmp_path: Path) -> None:
    cache = shards_in(tmp_path).cache
    for shard in (0, 1, 2):
        cache.fetch(shard)
    cache.plan([2, 3, 0, 1])
    cache.fetch(3)
    assert [shard for shard in range(6) if cache.holds(shard)] == [0, 2, 3]
    cache.plan([3, 4])
    cache.fetch(4)
    assert [shard for shard in range(6) if cache.holds(shard)] == [2, 3, 4]


def test_a_node_wants_what_comes_next_as_far_as_it_fits(tmp_path: Path) -> None:
    assert wanted(shards_in(tmp_path), iter([4, 4, 1, 4, 5, 2])) == [4, 1, 5]


def test_a_process_fetches_what_comes_next_and_the_ranks_go_on_without_it(tmp_path: Path) -> None:
    data = shards_in(tmp_path, window=1, lanes=1)
    positions = data.order(seed=1, shuffle=True, global_batch=5)
    order = [int(index) // 5 for index in positions.samples(range(30))]
    ahead = FetchAhead(data, lambda step: positions.upcoming(5 * step, range(5), by_epoch=True), 0)
    try:
        wait_for(lambda: all(map(data.cache.holds, order[:15])), "the first shards are here")
        ahead.at(3)
        wait_for(lambda: all(map(data.cache.holds, order[15:])), "the next shards are here")
        os.kill(ahead.process.pid or 0, signal.SIGKILL)
        assert data[5 * order[0]] == {"value": 100 * order[0]}
    finally:
        ahead.close()
    assert used(tmp_path) <= 300


def fetch_and_hang(cache: ShardCache, began: Any) -> None:
    class Store(FileStorage):
        def read_into(self, key: str, offset: int, memory: memoryview) -> int:
            began.set()
            signal.pause()
            return 0

    cache._store = os.getpid(), Store(cache._place.removeprefix("file://").rpartition("/")[0])
    cache._opened_store = lambda: cache._store[1]  # type: ignore[method-assign, index]
    cache.fetch(0)


def test_a_fetch_that_is_killed_leaves_neither_half_a_shard_nor_its_room(tmp_path: Path) -> None:
    data = shards_in(tmp_path, cache_bytes=100)
    forking = multiprocessing.get_context("fork")
    began = forking.Event()
    process = forking.Process(target=fetch_and_hang, args=(data.cache, began), daemon=True)
    process.start()
    try:
        assert began.wait(timeout=60)
        assert len(list((tmp_path / "cache").rglob("*.unfinished"))) == 1
    finally:
        process.kill()
        process.join()
    assert not data.cache.holds(0)
    assert data[7] == {"value": 102}  # of another shard, which needs the room
    assert data[0] == {"value": 0}
    assert list((tmp_path / "cache").rglob("*.unfinished")) == []


def test_a_cache_that_can_no_longer_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = shards_in(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(CacheUnusable, match="No space left on device; give its disk more room"):
            data.cache.fetch(0)
    assert list((tmp_path / "cache").rglob("*.unfinished")) == []
    shutil.rmtree(data.cache.folder)
    for write in (lambda: data[0], lambda: data.cache.plan([1])):
        with pytest.raises(CacheUnusable, match=r"can't be written: No such file or directory; .* right to write"):
            write()


def test_shards_from_before_a_restart_of_the_node_are_fetched_again(tmp_path: Path) -> None:
    data = shards_in(tmp_path)
    assert data[0] == {"value": 0}
    (data.cache.folder / "0.shard").write_bytes((b'{"value": 9}'.ljust(19) + b"\n") * 5)
    assert shards_in(tmp_path)[0] == {"value": 9}  # it is still the same start
    (data.cache.folder / "boot").write_text("another start")
    assert shards_in(tmp_path)[0] == {"value": 0}


def test_a_shard_of_the_cache_that_others_may_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shards_in(tmp_path)

    def denied(*_: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(CacheUnusable, match=r"1.jsonl in the cache .* can't be read: Permission denied; give the"):
        data.cache.open(1)


def test_a_full_disk_that_takes_no_record_of_a_bad_sample_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shards_in(tmp_path, max_undecodable=3)
    data.index.checksums[0] = UNKNOWN
    (tmp_path / "corpus" / "0.jsonl").write_text(("{".ljust(19) + "\n") * 5)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(data.undecodable, "add", full)
    with pytest.raises(CacheUnusable, match=r"No space left on device; give its disk more room"):
        data[0]


def test_a_shard_that_another_process_finishes_meanwhile_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shards_in(tmp_path)
    (data.cache.folder / "3.77.0.unfinished").symlink_to("renamed")  # it is listed, and not there
    monkeypatch.setattr(cache, "_is_left", lambda path: False)
    data.cache.fetch(0)
    assert data.cache.holds(0)


def test_a_process_that_cannot_write_its_plan_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = shards_in(tmp_path)
    monkeypatch.setattr(fetch_ahead, "_POLL_SECONDS", 0.001)
    plan, failed = data.cache.plan, list[int]()

    def refused_once(upcoming: Sequence[int]) -> None:
        if not failed:
            failed.append(1)
            raise CacheUnusable("the cache can't be written")
        plan(upcoming)

    monkeypatch.setattr(data.cache, "plan", refused_once)
    with closing(FetchAhead(data, lambda step: iter([4]), 0)):
        wait_for(lambda: data.cache.holds(4), "the shard is here")


def refused(tmp_path: Path, **how: Any) -> str:
    given: dict[str, Any] = {"format": "jsonl", "cache": tmp_path / "cache", "cache_bytes": 300, **how}
    with pytest.raises(ValueError, match=r".") as caught:
        Shards(given.pop("uri", f"file://{tmp_path}/corpus/*.jsonl"), **given)
    return str(caught.value)


def test_what_can_not_be_used_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write_lines(tmp_path / "corpus")
    assert "there is no index" in refused(tmp_path)
    shards_in(tmp_path)
    assert "names no shards" in refused(tmp_path, uri="corpus/*.tar")
    assert "* or ? in the name of a folder" in refused(tmp_path, uri="s3://bucket/*/0.tar")
    assert "the format of shards is 'csv'; use one of tar, jsonl, mds, parquet, arrow" in refused(
        tmp_path, format="csv"
    )
    assert "is of shards with the format 'jsonl', and 'tar' is asked for" in refused(tmp_path, format="tar")
    assert "is of shards with the names '*.jsonl', and '*.tar'" in refused(
        tmp_path, uri=f"file://{tmp_path}/corpus/*.tar"
    )
    assert "0.jsonl needs 100 bytes, and the cache" in refused(tmp_path, cache_bytes=99)
    assert "can't be written" in refused(tmp_path, cache=tmp_path / "corpus" / "0.jsonl")
    assert "can't be written" in refused(tmp_path, cache="/proc/cache")  # read-only for everybody
    assert "is not a folder of this node" in refused(tmp_path, cache="s3://bucket/cache")
    assert "window and lanes" in refused(tmp_path, window=0)
    index = tmp_path / "corpus" / INDEX_KEY
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"version": 2}))
    assert "can't be read: version: Input should be 1. This version reads indices of version 1" in refused(tmp_path)
    index.write_text(json.dumps(content | {"sizes": [1]}))
    assert "its lists have different lengths" in refused(tmp_path)


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("file://corpus/*.bin", "the URI of the shards 'file://corpus' is not an absolute path of a folder; write"),
        ("file://{folder}/none/*.bin", "in the folder of the shards {folder}/none: it is gone"),
        ("ftp://host/corpus/*.bin", "the URI of the shards 'ftp://host/corpus' has an unknown scheme"),
        ("s3://No_Bucket!/x/*.bin", "first and last. Correct the URI of the shards."),
    ],
    ids=["relative", "missing", "scheme", "bucket"],
)
def test_a_place_that_no_store_has_is_named_as_that_of_shards(tmp_path: Path, uri: str, sentence: str) -> None:
    place = ShardPlace.of(uri.format(folder=tmp_path))
    for use in (read_index, make_index):
        with pytest.raises(StorageError) as caught:
            use(place, Tokens(context=2))
        assert sentence.format(folder=tmp_path) in str(caught.value)
        assert "checkpoint" not in str(caught.value)


def test_windows_that_do_not_fit_into_the_cache_are_refused(tmp_path: Path) -> None:
    data = shards_in(tmp_path, window=1, lanes=2)
    order = data.order(seed=1, shuffle=True, global_batch=4)
    check_room(data, order, range(2))
    with pytest.raises(CacheUnusable, match=r"holds 300 bytes, and this node reads shards of 400 bytes side by side"):
        check_room(data, order, range(4))


@pytest.mark.parametrize(
    ("format", "content", "sentence"),
    [
        (Tar(), b"no tar", "the shard file://{folder}/0.x has another format than tar"),
        (Tokens(context=2), b"\x93NUMPY\x01\x00\xff", "its header can't be read"),
        (JsonLines(), b"\n", "have no samples"),
    ],
    ids=["tar", "tokens", "jsonl"],
)
def test_shards_of_another_format_get_no_index(
    tmp_path: Path, format: ShardFormat, content: bytes, sentence: str
) -> None:
    (tmp_path / "0.x").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(sentence.format(folder=tmp_path))):
        make_index(ShardPlace.of(f"file://{tmp_path}/*.x"), format)
    with pytest.raises(ValueError, match="has no objects with names like"):
        make_index(ShardPlace.of(f"file://{tmp_path}/*.y"), format)


def test_a_sample_that_can_not_be_decoded_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("1\n{2\n")
    make_index(ShardPlace.of(f"file://{tmp_path}/*.jsonl"), JsonLines())
    data = Shards(f"file://{tmp_path}/*.jsonl", format="jsonl", cache=tmp_path / "cache", cache_bytes=300)
    with pytest.raises(ValueError, match=r"sample 1 of the shard 0\.jsonl of .* can't be decoded: JSONDecodeError"):
        data[1]


def test_shards_are_read_from_a_web_server(tmp_path: Path) -> None:
    shards_in(tmp_path)
    with web_server(tmp_path) as address:
        data = Shards(f"{address}/corpus/*.jsonl", format="jsonl", cache=tmp_path / "other", cache_bytes=300)
        assert [data[index]["value"] for index in (0, 29)] == [0, 504]
        with pytest.raises(ValueError, match="there is no index"):
            Shards(f"{address}/*.jsonl", format="jsonl", cache=tmp_path / "other", cache_bytes=300)


def test_an_index_survives_its_json(tmp_path: Path) -> None:
    index = shards_in(tmp_path).index
    again = ShardIndex.from_json(index.to_json(), "here")
    assert again.fingerprint == index.fingerprint
    assert again.names == tuple(f"{shard}.jsonl" for shard in range(6))


def command(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["data", *arguments])


def test_the_command_line_makes_an_index_and_finds_a_changed_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PAUSES_OF_DAMAGE", (0,))
    uri = write_lines(tmp_path / "corpus")
    made = command("index", uri, "--format", "jsonl")
    assert made.exit_code == 0
    assert made.output == f"Wrote file://{tmp_path}/corpus/{INDEX_KEY}: 6 shards, 30 samples, 600 bytes.\n"
    assert command("verify", uri, "--format", "jsonl").output == "All shards are as the index says.\n"
    (tmp_path / "corpus" / "2.jsonl").unlink()
    (tmp_path / "corpus" / "3.jsonl").write_text("x" * 100)
    (tmp_path / "corpus" / "9.jsonl").write_text("1")
    verified = command("verify", uri, "--format", "jsonl")
    assert verified.exit_code == 1
    assert verified.output.splitlines() == [
        "2.jsonl is in the index, and missing.",
        "9.jsonl is not in the index.",
        "3.jsonl has another checksum than in the index: its content has changed.",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("index", "corpus", "--format", "tar"), "names no shards"),
        (("index", "s3:///x/*.bin", "--format", "tokens"), "--format tokens needs --context"),
        (
            ("verify", "https://127.0.0.1/x/*.tar", "--format", "tar"),
            "is on a web server, which can't list its files",
        ),
        (("index", "file:///nowhere/x/*.tar", "--format", "tar"), "/nowhere/x"),
    ],
    ids=str,
)
def test_the_command_line_says_what_is_wrong(arguments: tuple[str, ...], sentence: str) -> None:
    result = command(*arguments)
    assert result.exit_code != 0
    assert sentence in result.output
    assert "Traceback" not in result.output
