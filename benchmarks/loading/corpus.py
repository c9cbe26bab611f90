"""The same samples as shards of each format: `python -m benchmarks.loading.corpus FOLDER`.

It needs the packages of the peers. A sample has 1,025 tokens of type uint16.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

CONTEXT = 1024
SAMPLES_PER_SHARD = 1000


def tokens(number: int) -> np.ndarray:
    """The tokens of a sample."""
    return np.random.default_rng(number).integers(0, 50_000, CONTEXT + 1, dtype=np.uint16)


def write_bin(folder: Path, num_shards: int) -> None:
    folder.mkdir()
    for shard, numbers in _shards(num_shards):
        # Each sample of a file ends with the first token of the next one.
        row = [tokens(number)[:CONTEXT] for number in numbers]
        np.concatenate([*row, tokens(numbers.stop)[:1]]).tofile(folder / f"{shard:05d}.bin")


def write_tar(folder: Path, num_shards: int) -> None:
    import webdataset as wds

    folder.mkdir()
    for shard, numbers in _shards(num_shards):
        with wds.TarWriter(str(folder / f"{shard:05d}.tar")) as tar:
            for number in numbers:
                tar.write({"__key__": f"{number:08d}", "npy": _npy(tokens(number))})


def write_mds(folder: Path, num_shards: int) -> None:
    from streaming import MDSWriter

    size = SAMPLES_PER_SHARD * 2 * (CONTEXT + 1)
    with MDSWriter(out=str(folder), columns={"x": f"ndarray:uint16:{CONTEXT + 1}"}, size_limit=size) as writer:
        for number in range(num_shards * SAMPLES_PER_SHARD):
            writer.write({"x": tokens(number)})


def write_chunks(folder: Path, num_shards: int) -> None:
    from litdata import optimize

    optimize(
        fn=_sample,
        inputs=list(range(num_shards * SAMPLES_PER_SHARD)),
        output_dir=str(folder),
        chunk_size=SAMPLES_PER_SHARD,
        num_workers=1,
        verbose=False,
    )


def write_parquet(folder: Path, num_shards: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for shard, numbers in _shards(num_shards):
        rows = [tokens(number) for number in numbers]
        pq.write_table(pa.table({"x": pa.array(rows)}), folder / f"{shard:05d}.parquet")


def make_indices(folder: Path) -> None:
    """Make spottrain's indices of what is there, which needs spottrain alone. MDS is read with MosaicML's own."""
    from spottrain.data.shards.formats import Parquet, ShardFormat, Tar, Tokens
    from spottrain.data.shards.make_index import make_index
    from spottrain.data.shards.store import ShardPlace

    formats: dict[str, ShardFormat] = {"bin": Tokens(context=CONTEXT), "tar": Tar(), "parquet": Parquet()}
    for name, kind in formats.items():
        if (folder / name).exists():
            make_index(ShardPlace.of(f"file://{folder}/{name}/*.{name}"), kind)


FORMATS: dict[str, Callable[[Path, int], None]] = {
    "bin": write_bin,
    "tar": write_tar,
    "mds": write_mds,
    "parquet": write_parquet,
    "chunks": write_chunks,
}


def _sample(number: int) -> dict[str, np.ndarray]:
    return {"x": tokens(number)}


def _shards(num_shards: int) -> Iterator[tuple[int, range]]:
    for shard in range(num_shards):
        yield shard, range(shard * SAMPLES_PER_SHARD, (shard + 1) * SAMPLES_PER_SHARD)


def _npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, required=True)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    for name, write in FORMATS.items():
        write(arguments.folder / name, arguments.shards)
