"""Shards in the object stores: their index is made there, and they are read through a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faulty_proxy import faulty_proxy
from object_stores import ObjectStore
from spottrain.checkpoint.errors import CheckpointError, StorageDenied, StorageError, StorageUnavailable
from spottrain.checkpoint.stores.gcs_storage import GcsStorage
from spottrain.checkpoint.stores.s3_storage import S3Storage
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.data import Shards
from spottrain.data.shards import read_shard, store
from spottrain.data.shards.cache import ShardCache
from spottrain.data.shards.formats import JsonLines
from spottrain.data.shards.make_index import make_index, verify
from spottrain.data.shards.store import ShardDamaged, ShardPlace


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.nightly)])
def test_shards_in_a_bucket_are_indexed_verified_and_read(
    scheme: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: ObjectStore = request.getfixturevalue(f"{scheme}_store")
    folder = f"{scheme}://{server.new_bucket()}/corpus"
    storage = open_storage(folder, endpoint_url=server.endpoint_url)
    for shard in range(3):
        storage.put(f"{shard}.jsonl", "".join(f"{10 * shard + line}\n" for line in range(5)).encode())
    storage.put("read.me", b"no shard")
    place = ShardPlace.of(f"{folder}/*.jsonl", server.endpoint_url)
    make_index(place, JsonLines())
    assert list(verify(place, JsonLines())) == []
    data = Shards(
        f"{folder}/*.jsonl", format="jsonl", cache=tmp_path, cache_bytes=30, endpoint_url=server.endpoint_url
    )
    assert [data[index] for index in range(15)] == [10 * shard + line for shard in range(3) for line in range(5)]


# Faults that last, and the end of each. Those that pass are in tests/unit/test_shard_faults.py.
FAULTS: dict[str, tuple[type[CheckpointError], str]] = {
    "throttles": (StorageUnavailable, "0.jsonl.* failed, after retries: .*Mend the store, or wait for it"),
    "limits": (StorageUnavailable, "0.jsonl.* failed, after retries: "),
    "cuts": (StorageUnavailable, "0.jsonl.*Mend the store"),
    "hangs": (StorageUnavailable, r"0.jsonl.*timed? ?out.*Mend the store"),
    "halves": (ShardDamaged, "the shard 0.jsonl of corpus has 50 bytes, and the index says 100"),
    "alters": (ShardDamaged, "the shard 0.jsonl of corpus has changed"),
    "turns around": (StorageError, r"0.jsonl.*(AWS_REGION|redirects)"),
    "ignores ranges": (StorageDenied, "0.jsonl"),  # S3's signature does not fit then
}


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.nightly)])
def test_a_bucket_with_faults_gives_the_right_bytes_or_a_sentence(
    scheme: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAUSES", (0,))
    monkeypatch.setattr(store, "_PAUSES_OF_DAMAGE", (0,))
    monkeypatch.setattr(read_shard, "_PART_BYTES", 60)
    server: ObjectStore = request.getfixturevalue(f"{scheme}_store")
    bucket = server.new_bucket()
    shard = b'{"a": 1}\n' * 11 + b"\n"
    with faulty_proxy(server.endpoint_url) as proxy:
        folder = f"{scheme}://{bucket}/corpus"
        open_storage(folder, endpoint_url=proxy.url).put("0.jsonl", shard)
        where: dict[str, Any] = {"bucket": bucket, "prefix": "corpus", "endpoint_url": proxy.url}

        def opened() -> S3Storage | GcsStorage:
            where["answer_seconds"] = 0.3 if proxy.fault == "hangs" else ANSWER_SECONDS
            return S3Storage(**where, max_attempts=1) if scheme == "s3" else GcsStorage(**where, retry_seconds=0.5)

        proxy.play("halves", times=1, within="0.jsonl")
        index = make_index(ShardPlace.of(f"{folder}/*.jsonl", proxy.url), JsonLines())
        for fault, (kind, sentence) in FAULTS.items():
            proxy.play(fault, within="0.jsonl")
            cache = ShardCache(tmp_path / fault, 300, index, JsonLines(), opened, place="corpus")
            with pytest.raises(kind, match=sentence):
                cache.fetch(0)
            assert not cache.holds(0)
            proxy.play("")
            after = ShardCache(tmp_path / fault, 300, index, JsonLines(), opened, place="corpus")
            with open(after.open(0), "rb") as file:
                assert file.read() == shard
