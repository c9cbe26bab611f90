"""A data set in shards, to be passed as `dataset` to a session."""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from spottrain.checkpoint.errors import ObjectNotFound
from spottrain.data.items import places_by_part
from spottrain.data.shards.cache import ShardCache
from spottrain.data.shards.formats import Place, ShardFormat, format_of
from spottrain.data.shards.index import INDEX_KEY, DamagedIndex, InvalidIndex, ShardIndex
from spottrain.data.shards.mds_index import MDS_INDEX_KEY, index_of_mds
from spottrain.data.shards.shard_order import ShardOrder
from spottrain.data.shards.store import ShardPlace, again_if_damaged, through_outages
from spottrain.data.shards.undecodable import Undecodable, is_of_the_machine

logger = logging.getLogger(__name__)

Sleep = Callable[[float], None]

# Shards of which a process keeps where the samples are.
_NUM_OPEN = 64


class Shards:
    """Samples in the shards of a folder, which `spottrain data index` has indexed.

    The run reads them in one order at any world size, each rank from a few shards at a time. A node has them in a
    bounded cache, into which a process of its own fetches them ahead.
    """

    def __init__(
        self,
        uri: str,
        *,
        format: str | ShardFormat,
        cache: str | Path,
        cache_bytes: int,
        window: int = 1,
        lanes: int = 24,
        max_undecodable: int = 0,
        endpoint_url: str | None = None,
    ) -> None:
        """Read the index.

        Args:
            uri: The shards, such as `s3://bucket/corpus/*.tar`; also gs://, az://, file:// and https://.
            format: "tar" (WebDataset), "jsonl", "mds", "parquet", "arrow", or an object of
                `spottrain.data.shards.formats`, such as `Tokens(context=1024)`.
            cache: Folder for shards on this node, shared by its ranks and workers.
            cache_bytes: Bytes that the cache may hold.
            window: Shards in which samples are shuffled. A larger one shuffles better, and needs a larger cache.
            lanes: Parts of an epoch that are read side by side. Best a multiple of each number of nodes that is
                common, so that no two nodes read the same shards.
            max_undecodable: How many samples a node may leave out because they can't be decoded. In place of such a
                sample, all world sizes read the next one of its shard that can be, and after the last one the first.
            endpoint_url: Address of an S3- or GCS-compatible server, or of Azure's storage account. None:
                AWS_ENDPOINT_URL, AZURE_STORAGE_ACCOUNT, or the cloud's own.

        Raises:
            ValueError: The arguments or the index can't be used.
            StorageError: The index can't be read.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import numpy as np
            >>> from spottrain.data import Shards
            >>> from spottrain.data.shards.formats import Tokens
            >>> from spottrain.data.shards.make_index import make_index
            >>> from spottrain.data.shards.store import ShardPlace
            >>> folder = tempfile.TemporaryDirectory()
            >>> for number in range(3):
            ...     np.arange(9, dtype=np.uint16).tofile(f"{folder.name}/{number}.bin")
            >>> uri, tokens = f"file://{folder.name}/*.bin", Tokens(context=4)
            >>> _ = make_index(ShardPlace.of(uri), tokens)
            >>> data = Shards(uri, format=tokens, cache=f"{folder.name}/cache", cache_bytes=1 << 20)
            >>> len(data), data[5].tolist()
            (6, [4, 5, 6, 7, 8])
            >>> folder.cleanup()
        """
        if min(window, lanes) < 1 or max_undecodable < 0:
            raise ValueError("window and lanes of Shards have to be at least 1, and max_undecodable at least 0")
        self._format = format_of(format)
        self._window = window
        self._lanes = lanes
        self._max_undecodable = max_undecodable
        place = ShardPlace.of(uri, endpoint_url)
        self._uri = uri
        self.index = read_index(place, self._format)
        self.cache = ShardCache(Path(cache), cache_bytes, self.index, self._format, place.open, place=uri)
        self.undecodable = Undecodable(self.cache.folder / "undecodable")
        self._ends: list[int] = np.cumsum(self.index.samples).tolist()
        self._places: OrderedDict[int, Sequence[Place]] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Read a sample, and fetch its shard if it isn't here. Raises as `__getitems__`."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read samples, and fetch their shards if they aren't here. Each shard is opened once.

        Raises:
            IndexError: There is no such sample.
            ValueError: One can't be decoded, and max_undecodable is reached. The sentence names the shard and the
                place in it.
        """
        found: list[Any] = [None] * len(indices)
        for shard, places in places_by_part(indices, self._ends).items():
            begin = self._ends[shard - 1] if shard else 0
            file = self.cache.open(shard)
            try:
                for place in places:
                    found[place] = self._sample(shard, indices[place] - begin, file)
            finally:
                os.close(file)
        return found

    def name_of(self, index: int) -> str:
        """What messages call a sample."""
        shard = bisect_right(self._ends, index)
        return self._name_of(shard, index - self._ends[shard] + int(self.index.samples[shard]))

    def _name_of(self, shard: int, number: int) -> str:
        return f"sample {number} of the shard {self.index.names[shard]} of {self._uri}"

    def order(self, *, seed: int, shuffle: bool, global_batch: int) -> ShardOrder:
        """The order in which a run reads the samples."""
        return ShardOrder(
            self.index,
            seed=seed,
            shuffle=shuffle,
            global_batch=global_batch,
            window=self._window,
            lanes=self._lanes,
        )

    def _sample(self, shard: int, number: int, file: int) -> Any:
        """Read a sample of a shard, or the next one that can be decoded."""
        if (places := self._places.get(shard)) is None:
            places = self._read_places(shard, file)
        for each in chain(range(number, len(places)), range(number)):
            try:
                return self._format.sample(file, places[each])
            except Exception as error:
                if is_of_the_machine(error):
                    raise
                begin = self._ends[shard] - len(places)
                self._leave_out(shard, each, begin + each, error)
        raise ValueError(f"no sample of the shard {self.index.names[shard]} of {self._uri} can be decoded")

    def _leave_out(self, shard: int, number: int, index: int, error: Exception) -> None:
        sentence = f"{self._name_of(shard, number)} can't be decoded: {error!r}"
        if not self._max_undecodable:
            raise ValueError(sentence) from error
        with self.cache.writing():
            count = self.undecodable.add(index, self._max_undecodable)
        if count is None:
            raise ValueError(
                f"{sentence}. This node has left out {self._max_undecodable} samples already, which is "
                f"max_undecodable of Shards; raise it, or mend the shards or `decode` and delete "
                f"{self.undecodable.file}"
            ) from error
        if count:
            logger.warning(
                "The next sample stands in: %s. Left out: %d of %d.", sentence, count, self._max_undecodable
            )

    def _read_places(self, shard: int, file: int) -> Sequence[Place]:
        """Read where the samples of a shard are, and keep that of the newest shards."""
        with open(file, "rb", closefd=False) as content:
            places = self._format.places(content)
        if len(places) != self.index.samples[shard]:
            raise InvalidIndex(
                f"the shard {self.index.names[shard]} of {self._uri} has {len(places)} samples, and the index "
                f"says {self.index.samples[shard]}; make it again with `spottrain data index`"
            )
        self._places[shard] = places
        while len(self._places) > _NUM_OPEN:
            self._places.popitem(last=False)
        return places


def _found(place: ShardPlace, key: str, parse: Callable[[bytes], ShardIndex], sleep: Sleep) -> ShardIndex | None:
    """An index, if there is one. One that can't be parsed may have been damaged on the way here: it is read again."""

    def read() -> ShardIndex:
        content, _ = through_outages(lambda: place.open().get(key), sleep=sleep)
        return parse(content)

    try:
        return again_if_damaged(read, damage=DamagedIndex, sleep=sleep)
    except ObjectNotFound:
        return None


def read_index(place: ShardPlace, format: ShardFormat, *, sleep: Sleep = time.sleep) -> ShardIndex:
    """Read the index of shards.

    Args:
        place: The shards.
        format: Their format.
        sleep: Waits so many seconds, if the store does not answer.

    Raises:
        InvalidIndex: There is none, or one of other shards.
        StorageError: It can't be read.
    """
    where = f"{place.folder}/{INDEX_KEY}"
    index = _found(place, INDEX_KEY, lambda content: ShardIndex.from_json(content, where), sleep)
    if index is None and format.name == "mds":
        of_mds = f"{place.folder}/{MDS_INDEX_KEY}"
        index = _found(place, MDS_INDEX_KEY, lambda content: index_of_mds(content, of_mds, place.pattern), sleep)
    if index is None:
        raise InvalidIndex(
            f"there is no index {where}; make it once, with `spottrain data index {place.folder}/{place.pattern}`"
        )
    for what, asked, found in (("names", place.pattern, index.pattern), ("format", format.name, index.format)):
        if asked != found:
            raise InvalidIndex(
                f"the index {where} is of shards with the {what} {found!r}, and {asked!r} is asked for; correct it, "
                "or make the index again with `spottrain data index`"
            )
    return index
