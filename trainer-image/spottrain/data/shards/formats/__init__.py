"""Formats of shards: where the samples of a shard are, and what one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spottrain.data.shards.formats.columns import Arrow, Parquet
from spottrain.data.shards.formats.json_lines import JsonLines
from spottrain.data.shards.formats.mds import Mds
from spottrain.data.shards.formats.shard_format import InvalidShard, Place, ShardFormat
from spottrain.data.shards.formats.tar import Tar
from spottrain.data.shards.formats.tokens import Tokens

__all__ = [
    "Arrow",
    "InvalidShard",
    "JsonLines",
    "Mds",
    "Parquet",
    "Place",
    "ShardFormat",
    "Tar",
    "Tokens",
    "format_of",
]

_BY_NAME: Mapping[str, Callable[[], ShardFormat]] = {
    "tar": Tar,
    "jsonl": JsonLines,
    "mds": Mds,
    "parquet": Parquet,
    "arrow": Arrow,
}


def format_of(given: str | ShardFormat) -> ShardFormat:
    """The format that a script names. Raises ValueError for an unknown one."""
    if not isinstance(given, str):
        return given
    if given not in _BY_NAME:
        raise ValueError(
            f"the format of shards is {given!r}; use one of {', '.join(_BY_NAME)}, or Tokens(context=...) of "
            "spottrain.data.shards.formats"
        )
    return _BY_NAME[given]()
