"""Formats of shards: what is a sample, and shards that are unpacked into the cache."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spottrain.data import Shards
from spottrain.data.shards.cache import CacheUnusable, ShardDamaged
from spottrain.data.shards.formats import JsonLines, format_of
from spottrain.data.shards.make_index import make_index
from spottrain.data.shards.store import ShardPlace
from spottrain_cli.data import data as data_command

ROWS = [
    {"text": f"row {number}", "ids": list(range(number % 5)), "image": {"bytes": bytes([number % 256]), "path": None}}
    for number in range(700)
]


def table() -> pa.Table:
    ids = pa.array([row["ids"] for row in ROWS], pa.list_(pa.int32()))
    kind = pa.array([f"kind {number % 3}" for number in range(len(ROWS))]).dictionary_encode()
    columns = {"text": [row["text"] for row in ROWS], "ids": ids, "image": [row["image"] for row in ROWS]}
    return pa.table(columns | {"kind": kind})


def write_parquet(path: Path) -> None:
    pq.write_table(table(), path, row_group_size=300, compression="zstd")


def write_arrow_stream(path: Path) -> None:
    """As `save_to_disk` of Hugging Face's data sets does."""
    with pa.ipc.new_stream(path, table().schema) as writer:
        writer.write_table(table(), max_chunksize=300)


def write_arrow_file(path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(path, table().schema, options=options) as writer:
        writer.write_table(table(), max_chunksize=300)


def indexed(folder: Path, format: str, **how: Any) -> Shards:
    uri = f"file://{folder}/*.{format}*"
    make_index(ShardPlace.of(uri), format_of(format))
    return Shards(uri, **{"format": format, "cache": folder / "cache", "cache_bytes": 1 << 20, **how})


@pytest.mark.parametrize(
    ("format", "write"),
    [("parquet", write_parquet), ("arrow", write_arrow_stream), ("arrow", write_arrow_file)],
    ids=["parquet", "arrow stream", "arrow file"],
)
def test_a_row_is_a_sample_wherever_it_is(tmp_path: Path, format: str, write: Callable[[Path], None]) -> None:
    for shard in range(2):
        write(tmp_path / f"train-{shard:05d}-of-00002.{format}")
    data = indexed(tmp_path, format)
    assert data.index.samples.tolist() == [700, 700]
    for index in (0, 299, 300, 699, 700, 1399):
        row = ROWS[index % 700]
        found = data[index]
        assert (found["text"], found["image"], found["kind"]) == (
            row["text"],
            row["image"],
            f"kind {index % 700 % 3}",
        )
        assert found["ids"].dtype == torch.int32
        assert found["ids"].tolist() == row["ids"]
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "cache").rglob("*.shard")}
    assert sizes == {str(shard): int(data.index.unpacked[shard]) for shard in range(2)}


def test_a_list_with_a_null_is_named_with_its_place(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1], [1, None]]}), tmp_path / "0.parquet")
    data = indexed(tmp_path, "parquet")
    assert data[0]["ids"].tolist() == [1]
    with pytest.raises(ValueError, match=r"sample 1 of the shard 0\.parquet of .* 'ids' has a null"):
        data[1]


def compressed_by_zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


@pytest.mark.parametrize(
    ("ending", "compress"), [("gz", gzip.compress), ("zst", compressed_by_zstd)], ids=["gzip", "zstd"]
)
def test_compressed_shards_take_their_whole_room_in_the_cache(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    lines = [b"".join(b"%d\n" % (100 * shard + line) for line in range(50)) for shard in range(4)]
    for shard, content in enumerate(lines):
        (tmp_path / f"{shard}.jsonl.{ending}").write_bytes(compress(content))
    needed = max(map(len, lines)) + max(path.stat().st_size for path in tmp_path.iterdir())
    with pytest.raises(CacheUnusable, match=f"needs {needed} bytes"):
        indexed(tmp_path, "jsonl", cache_bytes=needed - 1)
    data = indexed(tmp_path, "jsonl", cache_bytes=needed)
    assert data.index.unpacked.tolist() == list(map(len, lines))
    for shard in range(4):
        assert [data[50 * shard + line] for line in range(50)] == [100 * shard + line for line in range(50)]
        assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.shard")) <= needed
    assert list((tmp_path / "cache").rglob("*.unfinished")) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("0.parquet", "Parquet"),
        ("0.arrow", "Arrow"),
        ("0.jsonl.gz", "gzip"),
        ("0.jsonl.zst", "zstd"),
        ("0.tar.gz", "gzip"),
    ],
)
def test_a_shard_that_can_not_be_unpacked_gets_no_index(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"no such shard, of whatever kind")
    with pytest.raises(ValueError, match=rf"shard .*{re.escape(name)} has another format .* as {kind}: [^\n]+$"):
        indexed(tmp_path, name.split(".")[1])


def test_a_shard_that_can_no_longer_be_unpacked_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl.gz").write_bytes(gzip.compress(b"1\n"))
    data = indexed(tmp_path, "jsonl")
    (tmp_path / "0.jsonl.gz").write_bytes(broken := gzip.compress(b"1\n")[:-1] + b"x")
    index = data.index
    index.checksums[0] = zlib.crc32(broken)
    with pytest.raises(ShardDamaged, match=r"0\.jsonl\.gz of .* can't be unpacked: it can't be read as gzip"):
        data[0]
    assert list((tmp_path / "cache").rglob("*.unfinished")) == []


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_without_pyarrow_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="with its extra 'arrow'"):
        format_of(format)
    with pytest.raises(ValueError, match="with its extra 'arrow'"):
        JsonLines().unpack("0.jsonl.zst")


def test_the_command_line_knows_every_format() -> None:
    with pytest.raises(ValueError, match="use one of") as caught:
        format_of("x")
    [option] = [each for each in data_command.commands["index"].params if each.name == "name"]
    assert isinstance(option.type, click.Choice)
    named = re.findall(r"use one of (.*), or Tokens", str(caught.value))[0].split(", ")
    assert [*option.type.choices] == [*named, "tokens"]
    assert [format_of(each).name for each in named] == named
