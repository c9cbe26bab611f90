"""Formats of shards: what is a sample, and shards that are unpacked into the cache."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spottrain.data import Shards
from spottrain.data.shards import store
from spottrain.data.shards.cache import CacheUnusable
from spottrain.data.shards.formats import JsonLines, Mds, format_of
from spottrain.data.shards.make_index import make_index
from spottrain.data.shards.store import ShardDamaged, ShardPlace
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


def test_a_shard_that_can_no_longer_be_unpacked_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PAUSES_OF_DAMAGE", (0,))
    (tmp_path / "0.jsonl.gz").write_bytes(gzip.compress(b"1\n"))
    data = indexed(tmp_path, "jsonl")
    (tmp_path / "0.jsonl.gz").write_bytes(broken := gzip.compress(b"1\n")[:-1] + b"x")
    index = data.index
    index.checksums[0] = zlib.crc32(broken)
    with pytest.raises(ShardDamaged, match=r"0\.jsonl\.gz of .* can't be used: it can't be read as gzip"):
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


def mosaic(folder: Path) -> str:
    """Three samples in two shards, written by mosaicml-streaming 0.13.0: `plain`, and compressed by `zstd`."""
    for name, content in json.loads((Path(__file__).parents[1] / "mds_corpus.json").read_text()).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(base64.b64decode(content))
    return f"file://{folder}"


@pytest.mark.parametrize("name", ["plain/*.mds", "zstd/*.mds.zstd"])
@pytest.mark.parametrize("own_index", [False, True])
def test_shards_of_mosaicml_are_read_with_its_index_and_with_ours(tmp_path: Path, name: str, own_index: bool) -> None:
    uri = f"{mosaic(tmp_path)}/{name}"
    if own_index:
        make_index(ShardPlace.of(uri), Mds())
    data = Shards(uri, format="mds", cache=tmp_path / "cache", cache_bytes=2000)
    assert data.index.samples.tolist() == [2, 1]
    for number in range(3):
        found = data[number]
        arrays = {key: found.pop(key) for key in "abc"}
        assert found == {
            "j": {"k": [number]},
            "n": -number,
            "raw": bytes([number]),
            "text": f"é{number}",
            "u": number,
        }
        assert arrays["a"].tolist() == list(range(number + 1))
        assert arrays["b"].tolist() == [[0, 1], [2, 3]]
        assert arrays["c"].tolist() == [number, number]
        assert [arrays[key].dtype.name for key in "abc"] == ["int64", "int32", "float32"]


def mds_shard(encoding: str, samples: list[bytes]) -> bytes:
    """A shard with one column of open size, `x`."""
    sizes: list[int | None] = [None]
    columns = json.dumps({"column_names": ["x"], "column_encodings": [encoding], "column_sizes": sizes}).encode()
    whole = [len(each).to_bytes(4, "little") + each for each in samples]
    begin = 4 + 4 * (len(samples) + 1) + len(columns)
    ends = np.cumsum([begin, *map(len, whole)]).astype("<u4")
    return len(samples).to_bytes(4, "little") + ends.tobytes() + columns + b"".join(whole)


@pytest.mark.parametrize(
    ("encoding", "content", "value"),
    [("str_float", b"1.5", 1.5), ("str_decimal", b"1.10", Decimal("1.10")), ("png", b"\x89", b"\x89")],
)
def test_columns_of_mds_have_their_types(tmp_path: Path, encoding: str, content: bytes, value: Any) -> None:
    shard = tmp_path / "0.mds"
    shard.write_bytes(mds_shard(encoding, [b"", content]))
    with shard.open("rb") as file:
        assert Mds().sample(file.fileno(), Mds().places(file)[1]) == {"x": value}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (mds_shard("pkl", [b"x"]), "column 'x' has the encoding 'pkl', which spottrain does not read; write"),
        (mds_shard("str", [b"x"])[:-1], "its table of samples is not that of an MDS shard"),
        (b"", "its table of samples"),
        (b"\x00\x00\x00\x00\x08\x00\x00\x00", "its columns can't be read: Invalid JSON"),
    ],
    ids=["pickle", "cut", "empty", "no columns"],
)
def test_what_is_no_mds_shard_gets_no_index(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "0.mds").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        indexed(tmp_path, "mds")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 1}, "can't be read: version: Input should be 2"),
        ({"shards": []}, "index.json names no shards"),
    ],
    ids=["version", "empty"],
)
def test_an_index_of_mosaicml_streaming_that_can_not_be_used_is_named(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    uri = f"{mosaic(tmp_path)}/plain"
    index = tmp_path / "plain" / "index.json"
    with pytest.raises(ValueError, match=r"names the shard shard.00000.mds, and '\*.zstd'"):
        Shards(f"{uri}/*.zstd", format="mds", cache=tmp_path / "cache", cache_bytes=2000)
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Shards(f"{uri}/*.mds", format="mds", cache=tmp_path / "cache", cache_bytes=2000)
    index.unlink()
    with pytest.raises(ValueError, match="there is no index"):
        Shards(f"{uri}/*.mds", format="mds", cache=tmp_path / "cache", cache_bytes=2000)


def test_shards_that_brotli_has_compressed_are_refused(tmp_path: Path) -> None:
    uri = mosaic(tmp_path)
    index = tmp_path / "zstd" / "index.json"
    index.write_text(index.read_text().replace('"zstd:3"', '"br:11"'))
    with pytest.raises(ValueError, match="are compressed by br:11; use gz or zstd"):
        Shards(f"{uri}/zstd/*.zstd", format="mds", cache=tmp_path / "cache", cache_bytes=2000)
