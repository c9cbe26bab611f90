"""Shards in the object stores: their index is made there, and they are read through a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from object_stores import ObjectStore
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.data import Shards
from spottrain.data.shards.formats import JsonLines
from spottrain.data.shards.make_index import make_index, verify
from spottrain.data.shards.store import ShardPlace


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
