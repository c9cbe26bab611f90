"""`spottrain checkpoints`: list, verify and export the commits in a bucket.

No cluster is needed.

A command imports torch and the store's client when it runs, so that the rest of the command line works without them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from spottrain_runtime.wording import counted, printable

if TYPE_CHECKING:
    from spottrain.checkpoint.format.commits import Commit, Head
    from spottrain.checkpoint.format.manifest import Manifest, Tensor
    from spottrain.checkpoint.stores.storage import CheckpointStorage

_LARGEST = 5
_LONGEST = 1000
# Columns of a table. On a narrower terminal its lines break, and nothing is cut.
_WIDE = 200
_DROPPED = "dropped by the job in the meantime"

uri_argument = click.argument("uri")
endpoint_option = click.option(
    "--endpoint-url",
    help="Address of an S3- or GCS-compatible server, or of Azure's storage account. Default: the cloud's own.",
)
step_option = click.option("--step", type=int, help="Step of the commit. Default: the newest one.")


@click.group()
def checkpoints() -> None:
    """List, show, verify and export the commits of a job, and try its store.

    Commits are at a URI that starts with file://, s3://, gs:// or az://.
    """


@checkpoints.command("ls")
@uri_argument
@endpoint_option
def ls(uri: str, endpoint_url: str | None) -> None:
    """List the commits at URI, newest first.

    The column Shared is the size of the weights that a commit takes from older ones: those that are not trained
    are stored once.
    """
    with _sentences():
        storage, head = _open(uri, endpoint_url)
        table = Table("Step", "Generation", "Committed", "World", "Size", "Shared", "", box=None)
        for commit in head.commits:
            table.add_row(*_row(storage, commit), "newest" if commit is head.newest else "")
        Console(width=_WIDE).print(table)
        unfinished = _unfinished(storage, head)
    if unfinished:
        _say(f"{counted(unfinished, 'attempt')} under way or given up; the job cleans up after itself.")


@checkpoints.command("show")
@uri_argument
@step_option
@endpoint_option
def show(uri: str, step: int | None, endpoint_url: str | None) -> None:
    """Show the contents of a commit at URI."""
    with _sentences():
        from spottrain.checkpoint.format import codec
        from spottrain.checkpoint.format.manifest import read_manifest

        storage, head = _open(uri, endpoint_url)
        commit = _choose(head, step)
        with _kept(storage, commit):
            manifest = read_manifest(storage, commit)
        extra = codec.decode(manifest.extra)
    _say(f"Step {commit.step} of generation {commit.generation}, committed {commit.committed_at}")
    own, shared = manifest.size(commit.attempt)
    _say(f"Written by {counted(manifest.world_size, 'rank')}, {decimal(own)}, under {commit.attempt}")
    if shared:
        _say(f"Refers to {decimal(shared)} of weights that are not trained, under {', '.join(commit.needs)}")
    for part, tensors in _parts(manifest).items():
        kinds = ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))
        numbers = counted(sum(map(_elements, tensors.values())), "number")
        _say(f"{part}: {counted(len(tensors), 'tensor')}, {numbers} ({kinds}), {layout(tensors.values())}")
        for fqn in sorted(tensors, key=lambda fqn: -_elements(tensors[fqn]))[:_LARGEST]:
            _say(f"  {fqn} {list(tensors[fqn].shape)}")
    for name in _of_each_rank(manifest):
        _say(f"{name}: one of each of {counted(manifest.world_size, 'rank')}")
    for name, value in (extra if isinstance(extra, dict) else {}).items():
        _say(f"{name}: {shorten(str(value), _LONGEST, placeholder=' ...')}")


@checkpoints.command("verify")
@uri_argument
@click.option("--step", type=int, help="Step of the only commit to read. Default: all commits.")
@endpoint_option
def verify(uri: str, step: int | None, endpoint_url: str | None) -> None:
    """Read every byte of the commits at URI, and compare the checksums."""
    damaged = 0
    with _sentences():
        storage, head = _open(uri, endpoint_url)
        chosen = head.commits if step is None else (_choose(head, step),)
        for commit in chosen:
            found = "whole"
            if damage := _damage(storage, commit):
                found = f"damaged. {damage}" if (kept := _is_kept(storage, commit)) else _DROPPED
                damaged += kept
            _say(f"step {commit.step}: {found}")
    if damaged:
        raise click.ClickException(
            f"Damaged: {damaged} of {counted(len(chosen), 'commit')}. A job resumes from the newest whole one."
        )
    if head.rebuilt:
        raise click.ClickException(
            "HEAD is missing or damaged. The next job at this URI rebuilds it from these commits."
        )


@checkpoints.command("doctor")
@uri_argument
@endpoint_option
@click.option("--encryption", help="The job's checkpoint.encryption: AES256, or a KMS key.")
def doctor(uri: str, endpoint_url: str | None, encryption: str | None) -> None:
    """Try whether a store does what checkpoints need.

    It writes a few objects of its own below URI, and deletes them again. Run it with the job's credentials and
    environment, before a long run.
    """
    with _sentences():
        from spottrain.checkpoint.store_trial import try_store
        from spottrain.checkpoint.stores.uri import open_storage

        storage = open_storage(uri, endpoint_url=endpoint_url, encryption=encryption)
        for finding in try_store(storage):
            _say(f"works: {finding.works}")
            if finding.warning is not None:
                _say(finding.warning)
    _say(f"{uri} can hold checkpoints.")


@checkpoints.command("export")
@uri_argument
@click.argument("output", type=click.Path(path_type=Path))
@step_option
@endpoint_option
def export_model(uri: str, output: Path, step: int | None, endpoint_url: str | None) -> None:
    """Write the model of a commit at URI to OUTPUT.

    OUTPUT is one file if its name ends in .safetensors. Otherwise it is a folder for Hugging Face's from_pretrained,
    or for PEFT's if the model has adapters.
    """
    with _sentences():
        from spottrain.checkpoint.loading.export import export

        storage, head = _open(uri, endpoint_url)
        commit = _choose(head, step)
        with _kept(storage, commit):
            written = export(storage, commit, output)
    for path in written:
        _say(f"Wrote {path} ({decimal(path.stat().st_size)}).")


def _say(sentence: str) -> None:
    """Print a sentence. Names in it may come from the bucket."""
    click.echo(printable(sentence))


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        from spottrain.checkpoint.errors import CheckpointError

        try:
            yield
        except CheckpointError as error:
            raise click.ClickException(printable(str(error))) from error
    except ImportError as error:
        raise click.ClickException(
            f"Reading checkpoints needs {error.name}, which isn't installed. "
            "Install spottrain with its extra 'trainer'."
        ) from error


def _open(uri: str, endpoint_url: str | None) -> tuple[CheckpointStorage, Head]:
    from spottrain.checkpoint.errors import StorageMissing
    from spottrain.checkpoint.format.head import read_head
    from spottrain.checkpoint.stores.uri import open_storage

    try:
        storage = open_storage(uri, endpoint_url=endpoint_url, create_folder=False)
    except StorageMissing as error:
        raise click.ClickException(f"There is no folder {uri}.") from error
    head = read_head(storage)
    if head is None or head.newest is None:
        raise click.ClickException(f"There is no commit at {uri}. Is it the job's checkpoint.uri?")
    return storage, head


@contextmanager
def _kept(storage: CheckpointStorage, commit: Commit) -> Iterator[None]:
    """Distinguish a commit that a running job has dropped from a damaged one.

    The job may drop it while the block reads it.
    """
    from spottrain.checkpoint.errors import CorruptCheckpoint

    try:
        yield
    except CorruptCheckpoint as error:
        if _is_kept(storage, commit):
            raise
        raise click.ClickException(
            f"The job has dropped step {commit.step} in the meantime, as it keeps newer ones. Try again, or "
            "raise checkpoint.keep."
        ) from error


def _is_kept(storage: CheckpointStorage, commit: Commit) -> bool:
    from spottrain.checkpoint.format.head import read_head

    head = read_head(storage)
    return head is not None and any(kept.attempt == commit.attempt for kept in head.commits)


def _choose(head: Head, step: int | None) -> Commit:
    for commit in head.commits:
        if step in (None, commit.step):
            return commit
    kept = ", ".join(str(commit.step) for commit in head.commits)
    raise click.ClickException(f"There is no commit of step {step}. Choose one of these steps: {kept}.")


def _row(storage: CheckpointStorage, commit: Commit) -> tuple[str, ...]:
    from spottrain.checkpoint.errors import CorruptCheckpoint
    from spottrain.checkpoint.format.manifest import read_manifest

    committed = f"{datetime.fromisoformat(commit.committed_at):%Y-%m-%dT%H:%M:%SZ}"
    known = (str(commit.step), str(commit.generation), committed)
    try:
        manifest = read_manifest(storage, commit)
    except CorruptCheckpoint:
        return *known, "?", "damaged" if _is_kept(storage, commit) else _DROPPED, ""
    own, shared = manifest.size(commit.attempt)
    return *known, str(manifest.world_size), decimal(own), decimal(shared) if shared else ""


def _unfinished(storage: CheckpointStorage, head: Head) -> int:
    """Count the attempts that HEAD does not name."""
    from spottrain.checkpoint.format.attempt import ATTEMPTS, Attempt

    attempts = {attempt.prefix for key, _ in storage.list(ATTEMPTS) if (attempt := Attempt.of_key(key))}
    return len(attempts - head.held())


def _damage(storage: CheckpointStorage, commit: Commit) -> str | None:
    from spottrain.checkpoint.errors import CorruptCheckpoint
    from spottrain.checkpoint.format.manifest import read_manifest
    from spottrain.checkpoint.format.part_reader import PartReader

    try:
        manifest = read_manifest(storage, commit)
        parts = PartReader(storage, commit.attempt, manifest)
        for number in range(manifest.num_files):
            parts.verify(number)
    except CorruptCheckpoint as error:
        return str(error)
    return None


def _parts(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Group the tensors that are no rank's own by part of the state: model, optimizer, …"""
    from spottrain.checkpoint.format.codec import OF_A_RANK

    parts: dict[str, dict[str, Any]] = {}
    for fqn, tensor in manifest.tensors.items():
        if (part := fqn.partition(".")[0]) != OF_A_RANK:
            parts.setdefault(part, {})[fqn] = tensor
    return parts


def layout(tensors: Collection[Tensor]) -> str:
    """How the ranks had a part of the state: a tensor of several chunks was in shards."""
    num_sharded = sum(len(tensor.chunks) > 1 for tensor in tensors)
    if num_sharded == 0:
        return "the same on all ranks"
    return "in shards" if num_sharded == len(tensors) else f"{num_sharded} of them in shards"


def _of_each_rank(manifest: Manifest) -> list[str]:
    """Names of the script's parts of which each rank has one of its own."""
    first = manifest.rank_states[0]
    return sorted(first.get("parts", {})) if isinstance(first, dict) else []


def _elements(tensor: Any) -> int:
    elements = 1
    for length in tensor.shape:
        elements *= length
    return elements
