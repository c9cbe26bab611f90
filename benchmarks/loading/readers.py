"""The ways to read: each yields batches of tokens, of shape `(batch, 1025)`, and resumes as its library does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.loading.corpus import CONTEXT, SAMPLES_PER_SHARD

SEED = 1
# What a node may hold of the shards, in all ways that bound it.
CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a way reads.

    Attributes:
        folder: Has the shards, in a folder for each format.
        bucket: URI of a bucket with the same, to read from there; empty for the files.
        cache: An empty folder, for ways that copy shards to the node.
        batch: Samples of a batch.
        workers: Processes that read ahead.
        delay: Seconds that each sample takes in addition.
    """

    folder: Path
    cache: Path
    batch: int
    workers: int
    bucket: str = ""
    delay: float = 0.0

    def place(self, format: str) -> str:
        """Where the shards of a format are: a folder, or a URI."""
        return f"{self.bucket or self.folder}/{format}"

    def decode(self, sample: Any) -> torch.Tensor:
        if self.delay:
            time.sleep(self.delay)
        return torch.from_numpy(np.asarray(sample).astype(np.int64))


@dataclass(slots=True)
class Batches:
    """An epoch, or the rest of one.

    Attributes:
        batches: The batches.
        state: What a resume needs after so many batches.
        close: Ends what reads.
    """

    batches: Iterator[Any]
    state: Callable[[int], Any] = field(default=lambda count: count)
    close: Callable[[], None] = field(default=lambda: None)


def ours(format: str, reading: Reading, state: Any) -> Batches:
    """spottrain's Shards, by the same path as in a session."""
    from spottrain.data import Shards
    from spottrain.data.batch import BatchPlan
    from spottrain.data.loader import Data
    from spottrain.data.rank_data import RankData
    from spottrain.data.shards.formats import Mds, Parquet, ShardFormat, Tar, Tokens

    formats: dict[str, ShardFormat] = {
        "bin": Tokens(context=CONTEXT),
        "tar": Tar(decode=lambda sample: reading.decode(sample["npy"])),
        "mds": Mds(decode=lambda sample: reading.decode(sample["x"])),
        "parquet": Parquet(decode=lambda sample: reading.decode(sample["x"])),
    }
    uri = f"{'' if reading.bucket else 'file://'}{reading.place(format)}/*.{format}"
    data = Shards(uri, format=formats[format], cache=reading.cache, cache_bytes=CACHE_BYTES)
    rank = RankData(
        data=Data(data, num_workers=reading.workers),
        order=data.order(seed=SEED, shuffle=True, global_batch=reading.batch),
        plan=BatchPlan(global_batch=reading.batch, micro_batch=reading.batch, world_size=1),
        rank=0,
        generation=1,
        attempt="bench",
    )
    rank.begin(1, by_epoch=True)
    found = rank.load(first_step=state or 0, device=torch.device("cpu"))
    return Batches((batch.data for batch in found), close=found.close)


def mosaic(format: str, reading: Reading, state: Any) -> Batches:
    from streaming import StreamingDataLoader, StreamingDataset

    class Tokens(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return reading.decode(super().__getitem__(at)["x"])

    data = Tokens(
        remote=reading.place(format),
        local=str(reading.cache),
        batch_size=reading.batch,
        shuffle=True,
        shuffle_seed=SEED,
        cache_limit=CACHE_BYTES,
    )
    loader = StreamingDataLoader(data, batch_size=reading.batch, num_workers=reading.workers)
    if state is not None:
        loader.load_state_dict(state)
    return Batches(iter(loader), lambda count: loader.state_dict())


def litdata(format: str, reading: Reading, state: Any) -> Batches:
    """Its client of S3 needs TLS, which the local store does not have: files alone."""
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(
        str(reading.folder / format),
        shuffle=True,
        seed=SEED,
        max_cache_size=CACHE_BYTES,
        transform=lambda sample: reading.decode(sample["x"]),
    )
    loader = StreamingDataLoader(data, batch_size=reading.batch, num_workers=reading.workers)
    if state is not None:
        loader.load_state_dict(state)
    return Batches(iter(loader), lambda count: loader.state_dict())


def webdataset(format: str, reading: Reading, state: Any) -> Batches:
    """Its order has no position: a resume reads and drops the batches before."""
    import webdataset as wds

    shards = sorted(map(str, (reading.folder / format).glob("*.tar")))
    data = (
        wds.WebDataset(shards, shardshuffle=len(shards), seed=SEED, empty_check=False)
        .shuffle(4 * SAMPLES_PER_SHARD, initial=SAMPLES_PER_SHARD)
        .decode()
        .map(lambda sample: reading.decode(sample["npy"]))
    )
    loader = wds.WebLoader(data, batch_size=reading.batch, num_workers=reading.workers)
    return Batches(islice(iter(loader), state or 0, None))


class _Mapped:
    """A data set by index on memory-mapped files."""

    def __init__(self, reading: Reading, format: str) -> None:
        self._decode = reading.decode
        self._files = [np.memmap(path, np.uint16) for path in sorted((reading.folder / format).glob("*.bin"))]

    def __len__(self) -> int:
        return len(self._files) * SAMPLES_PER_SHARD

    def __getitem__(self, index: int) -> torch.Tensor:
        file, number = divmod(index, SAMPLES_PER_SHARD)
        return self._decode(self._files[file][number * CONTEXT : (number + 1) * CONTEXT + 1])


def plain(format: str, reading: Reading, state: Any) -> Batches:
    """torch's DataLoader, which has no state: a resume reads and drops the batches before."""
    loader: Any = torch.utils.data.DataLoader(
        _Mapped(reading, format),  # type: ignore[arg-type]
        batch_size=reading.batch,
        shuffle=True,
        num_workers=reading.workers,
        generator=torch.Generator().manual_seed(SEED),
    )
    return Batches(islice(iter(loader), state or 0, None))


def stateful(format: str, reading: Reading, state: Any) -> Batches:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader: Any = StatefulDataLoader(
        _Mapped(reading, format),
        batch_size=reading.batch,
        shuffle=True,
        num_workers=reading.workers,
        generator=torch.Generator().manual_seed(SEED),
    )
    if state is not None:
        loader.load_state_dict(state)
    return Batches(iter(loader), lambda count: loader.state_dict())


Read = Callable[[str, Reading, Any], Batches]


@dataclass(frozen=True, slots=True)
class Way:
    """A way that is measured.

    Attributes:
        read: How it reads.
        format: Of the shards.
        imports: Modules that a script has imported before it reads.
        reads_bucket: Whether it is measured with a bucket, too.
    """

    read: Read
    format: str
    imports: tuple[str, ...]
    reads_bucket: bool = False


_OURS = ("spottrain.data.rank_data", "spottrain.data.shards.formats")
WAYS: dict[str, Way] = {
    "spottrain, MDS": Way(ours, "mds", _OURS, reads_bucket=True),
    "MosaicML Streaming, MDS": Way(mosaic, "mds", ("streaming",), reads_bucket=True),
    "LitData, its chunks": Way(litdata, "chunks", ("litdata",)),
    "spottrain, tar": Way(ours, "tar", _OURS, reads_bucket=True),
    "WebDataset, tar": Way(webdataset, "tar", ("webdataset",)),
    "spottrain, Parquet": Way(ours, "parquet", _OURS, reads_bucket=True),
    "spottrain, tokens": Way(ours, "bin", _OURS, reads_bucket=True),
    "StatefulDataLoader, mapped tokens": Way(stateful, "bin", ("torchdata.stateful_dataloader",)),
    "torch DataLoader, mapped tokens": Way(plain, "bin", ()),
}
