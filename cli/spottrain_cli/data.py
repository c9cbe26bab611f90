"""`spottrain data`: make shards and their index, and check shards against it. No cluster is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spottrain_cli import model_facts
from spottrain_runtime.wording import counted, printable

if TYPE_CHECKING:
    from spottrain.data.shards.formats import ShardFormat
    from spottrain.data.shards.store import ShardPlace

uri_argument = click.argument("uri")
format_option = click.option(
    "--format",
    "name",
    type=click.Choice(["tar", "jsonl", "mds", "parquet", "arrow", "tokens"]),
    required=True,
    help="Format of the shards.",
)
context_option = click.option("--context", type=click.IntRange(min=1), help="Of tokens: inputs of a sample.")
dtype_option = click.option(
    "--dtype", default="uint16", show_default=True, help="Of tokens in raw files: their type."
)
endpoint_option = click.option(
    "--endpoint-url",
    help="Address of an S3- or GCS-compatible server, or of Azure's storage account. Default: the cloud's own.",
)


@click.group()
def data() -> None:
    """Pack, index and verify the shards of a data set.

    Shards are objects in one folder, such as `s3://bucket/corpus/*.tar`, `gs://…` or `file:///folder/*.bin`. Put the
    URI into quotes, so that the shell leaves its * alone.
    """


@data.command("index")
@uri_argument
@format_option
@context_option
@dtype_option
@endpoint_option
def index(uri: str, name: str, context: int | None, dtype: str, endpoint_url: str | None) -> None:
    """Read the shards at URI once, and write their index beside them."""
    with _sentences():
        from spottrain.data.shards.store import ShardPlace

        _make_index(ShardPlace.of(uri, endpoint_url), _format_of(name, context, dtype))


@data.command("verify")
@uri_argument
@format_option
@context_option
@dtype_option
@endpoint_option
def verify(uri: str, name: str, context: int | None, dtype: str, endpoint_url: str | None) -> None:
    """Read the shards at URI, and say which are not as their index says. Exit code 1 if there are any."""
    with _sentences():
        from spottrain.data.shards import make_index
        from spottrain.data.shards.store import ShardPlace

        found = 0
        for problem in make_index.verify(ShardPlace.of(uri, endpoint_url), _format_of(name, context, dtype)):
            found += 1
            _say(problem)
    if found:
        raise click.exceptions.Exit(1)
    _say("All shards are as the index says.")


@data.command("pack")
@click.argument("source")
@click.argument("target")
@click.option("--size", default="100MB", show_default=True, help="Largest size of a shard, such as 100MB.")
@click.option("--shuffle", type=int, metavar="SEED", help="Of a folder's files: put the samples into a random order.")
@endpoint_option
def pack(source: str, target: str, size: str, shuffle: int | None, endpoint_url: str | None) -> None:
    """Pack SOURCE into shards in the folder TARGET, and write their index.

    A local folder is packed into tar files: files that differ in their endings alone are one sample. The rows of
    Parquet or Arrow files, such as `s3://bucket/hf/train-*.parquet`, are packed into Parquet.
    """
    with _sentences():
        from spottrain.data.shards.formats import format_of
        from spottrain.data.shards.pack import Packed, pack_files, pack_rows
        from spottrain.data.shards.store import ShardPlace

        num_bytes, has_rows = model_facts.size(size), "://" in source
        if has_rows and shuffle is not None:
            raise click.UsageError("--shuffle is for the files of a folder; rows keep their order.")
        kind = "parquet" if has_rows else "tar"
        packed = Packed(target, kind, endpoint_url, _shown())
        if has_rows:
            rows = format_of("arrow" if source.endswith(".arrow") else "parquet")
            pack_rows(ShardPlace.of(source, endpoint_url), rows, packed, num_bytes)
        else:
            pack_files(Path(source), packed, num_bytes, seed=shuffle)
        _make_index(packed.place, format_of(kind))


def _make_index(place: ShardPlace, format: ShardFormat) -> None:
    from spottrain.data.shards.index import INDEX_KEY
    from spottrain.data.shards.make_index import make_index

    made = make_index(place, format, on_shard=_shown())
    shards, samples = counted(len(made.names), "shard"), counted(made.num_samples, "sample")
    _say(f"Wrote {place.folder}/{INDEX_KEY}: {shards}, {samples}, {int(made.sizes.sum())} bytes.")


def _shown() -> Callable[[str], None]:
    """Says on stderr how far a command is, now and then."""
    count = itertools.count(1)

    def show(shard: str) -> None:
        if (number := next(count)) % 100 == 0:
            _say(f"{number} shards, up to {shard}", err=True)

    return show


def _format_of(name: str, context: int | None, dtype: str) -> ShardFormat:
    from spottrain.data.shards.formats import Tokens, format_of

    if name != "tokens":
        return format_of(name)
    if context is None:
        raise click.UsageError("--format tokens needs --context: how many tokens a sample has as inputs.")
    return Tokens(context=context, dtype=dtype)


def _say(sentence: str, *, err: bool = False) -> None:
    """Print a sentence. Names in it may come from the bucket."""
    click.echo(printable(sentence), err=err)


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        from spottrain.checkpoint.errors import CheckpointError

        try:
            yield
        except (CheckpointError, ValueError) as error:
            raise click.ClickException(printable(str(error))) from error
    except ImportError as error:
        raise click.ClickException(
            f"Reading shards needs {error.name}, which isn't installed. Install spottrain with its extra 'trainer'."
        ) from error
