"""`spottrain data pack`: files of a folder, and rows of Parquet files, into shards of a size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from spottrain.data import Shards
from spottrain.data.shards.pack import Packed, cut, pack_files
from spottrain_cli.main import main

MIB = 1 << 20


def pack(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["data", "pack", *map(str, arguments)])


def shards_of(folder: Path, format: str) -> Shards:
    return Shards(f"file://{folder}/*.{format}", format=format, cache=folder / "cache", cache_bytes=100 * MIB)


def sizes_of(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.iterdir()) if path.name[0] == "0"]


def write_images(folder: Path) -> None:
    for number in range(40):
        image = folder / f"class {number // 20}" / f"{'é' * 60}{number:03d}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(bytes([number]) * 100_000)
        image.with_suffix(".txt").write_text(f"caption {number}")
    (folder / ".DS_Store").write_text("hidden")


def test_a_folder_is_packed_into_tar_files_of_at_most_a_size(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    done = pack(tmp_path / "images", f"file://{tmp_path}/packed", "--size", "1.1MiB")
    assert done.exit_code == 0, done.output
    sizes = sizes_of(tmp_path / "packed")
    assert done.output == (
        f"Wrote file://{tmp_path}/packed/spottrain-index.json: {len(sizes)} shards, 40 samples, {sum(sizes)} bytes.\n"
    )
    assert max(sizes) <= 1.1 * MIB
    assert len(sizes) == 4
    data = shards_of(tmp_path / "packed", "tar")
    assert [data[each]["txt"] for each in range(40)] == [f"caption {each}" for each in range(40)]
    assert data[39]["jpg"] == bytes([39]) * 100_000


def test_files_are_packed_in_a_random_order_that_depends_on_the_seed_alone(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    contents = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert pack(tmp_path / "images", f"file://{tmp_path}/{folder}", "--shuffle", seed).exit_code == 0
        contents.append((tmp_path / folder / "000000.tar").read_bytes())
    assert contents[0] == contents[1] != contents[2]
    data = shards_of(tmp_path / "a", "tar")
    captions = [data[each]["txt"] for each in range(40)]
    assert sorted(captions) == sorted(f"caption {each}" for each in range(40)) != captions


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_rows_are_packed_into_parquet_files_of_about_a_size(tmp_path: Path, ending: str) -> None:
    rows, expected = tmp_path / "rows", []
    rows.mkdir()
    for number in range(3):
        texts = [
            f"{number}/{row} " + "".join(chr(97 + row * place % 26) for place in range(400)) for row in range(5000)
        ]
        table = pa.table({"text": texts, "kind": pa.array(["a", "b"] * 2500).dictionary_encode()})
        if ending == "parquet":
            pq.write_table(table, rows / f"{number}.parquet", row_group_size=700)
        else:
            with pa.ipc.new_stream(rows / f"{number}.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=700)
        expected += texts
    done = pack(f"file://{rows}/*.{ending}", f"file://{tmp_path}/packed", "--size", "1MiB")
    assert done.exit_code == 0, done.output
    sizes = sizes_of(tmp_path / "packed")
    assert all(0.8 * MIB < size < 1.1 * MIB for size in sizes[:-1])
    data = shards_of(tmp_path / "packed", "parquet")
    assert len(data) == len(expected)
    assert [data[each]["text"] for each in range(0, 15000, 37)] == expected[::37]


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_parts_are_full_and_hold_everything_once(sizes: list[int], most: int) -> None:
    parts = list(cut(sizes, most))
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    for part, following in pairwise(parts):
        assert sum(sizes[part.start : part.stop]) + sizes[following.start] > most
    assert all(len(part) == 1 or sum(sizes[part.start : part.stop]) <= most for part in parts)


def test_what_can_not_be_packed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "000000.tar").write_bytes(b"")
    for name, columns in (("a", {"x": [1]}), ("b", {"y": [1]})):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    target = f"file://{tmp_path}/target"

    def refused(*arguments: object) -> str:
        done = pack(*arguments)
        assert done.exit_code != 0
        assert "Traceback" not in done.output
        return str(done.output)

    assert "empty is no folder with files; correct the path" in refused(tmp_path / "empty", target)
    assert "has shards already, such as 000000.tar; name an" in refused(tmp_path / "full", f"file://{tmp_path}/full")
    assert "b.parquet has other columns than the files before it" in refused(f"file://{tmp_path}/*.parquet", target)
    assert "has no rows in files with names like *.x" in refused(f"file://{tmp_path}/*.x", target)
    assert "--shuffle is for the files of a folder" in refused(f"file://{tmp_path}/*.parquet", target, "--shuffle", 1)
    assert "is not a size" in refused(tmp_path, target, "--size", "large")


def test_a_file_that_goes_while_it_is_packed_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")

    class Racing(Packed):
        @contextmanager
        def next_shard(self) -> Iterator[BinaryIO]:
            (tmp_path / "a.txt").unlink()
            with super().next_shard() as file:
                yield file

    with pytest.raises(ValueError, match=r"a\.txt can't be read: No such file"):
        pack_files(tmp_path, Racing(f"file://{tmp_path}/target", "tar", None, print), MIB)
    assert list((tmp_path / "target").iterdir()) == []
