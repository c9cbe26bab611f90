"""Opening the checkpoint store at the start of a generation.

It checks the store, fences off older generations, and finds the newest commit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.collectives import Collectives
from spottrain.checkpoint.errors import CheckpointError, CheckpointMismatch, StorageUnavailable
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.saving.writer import started_writer
from spottrain.checkpoint.store_trial import try_store
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.recovery.reports import report_failure
from spottrain.recovery.store_retries import retry
from spottrain.world.failures import start_error
from spottrain.world.launch import Groups, Launch, identify_run
from spottrain.world.progress import ProgressReporter
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.reports import CommitRef
from spottrain_api.settings.choices import Strategy
from spottrain_runtime import host_memory

logger = logging.getLogger(__name__)

# A store takes a second or two to open. One that never answers fails after minutes, with all its retries.
SLOW_SECONDS = 20.0
# How much of a node's free memory its ranks may stage checkpoints in. The rest is for what the script takes later.
FREE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStore:
    """The job's checkpoint store, as one rank has opened it. Without a checkpointer nothing is saved.

    Attributes:
        config: The job's settings. Without an operator, their generation follows from HEAD.
        newest_extra: What the newest readable commit holds besides tensors. Only for `strategy: auto`, which needs it
            before there is a model to load.
    """

    config: TrainerConfig
    checkpointer: Checkpointer | None = None
    newest: Commit | None = None
    newest_extra: dict[str, Any] = field(default_factory=dict)


def open_store(
    config: TrainerConfig,
    launch: Launch,
    groups: Groups,
    reporter: ProgressReporter,
    sleep: Callable[[float], None] = time.sleep,
) -> OpenedStore:
    """Open the store that the job names. A collective.

    If the job has a commit, or a step in members' memory, a store that does not answer is retried: otherwise the next
    generation would fail at once as well, and the third failure would end the job.

    Args:
        config: The job's settings.
        launch: This rank's place in the world.
        groups: The process groups of the world.
        reporter: Where failures are reported.
        sleep: Waits so many seconds between two tries.

    Returns:
        The store, with the newest commit.

    Raises:
        UserError: The store cannot be used, or its commits are not the job's.
    """
    replicas = config.replicas
    resumes = config.resume is not None or (replicas is not None and replicas.resume is not None)

    def report(error: CheckpointError) -> None:
        report_failure(reporter, error)
        logger.warning("%s Retrying the store.", error)

    def opened() -> OpenedStore:
        with _reported_if_slow(config.checkpoint.uri, reporter):
            return _open(config, launch, groups, reporter)

    try:
        return retry(
            opened,
            when=lambda error: resumes and isinstance(error, StorageUnavailable),
            on_error=report,
            sleep=sleep,
        )
    except CheckpointError as error:
        report_failure(reporter, error)
        raise start_error(error, resumes=resumes) from error


def retention_of(config: TrainerConfig) -> Retention:
    """Which commits the job keeps."""
    return Retention(last=config.checkpoint.keep, every=config.checkpoint.keep_every)


@contextlib.contextmanager
def _reported_if_slow(uri: str | None, reporter: ProgressReporter) -> Iterator[None]:
    """Report the store while the block takes long, until it has succeeded."""

    def report() -> None:
        error = StorageUnavailable(
            f"Opening {uri} takes more than {SLOW_SECONDS:.0f} s: the store, or a rank's connection to it, is slow "
            "or hangs. Check checkpoint.endpointURL and the network. Without an answer, the ranks fail after minutes."
        )
        report_failure(reporter, error)
        logger.warning("%s", error)

    watch = threading.Timer(SLOW_SECONDS, report)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()
    if reporter.progress.checkpoint_failure is not None:
        reporter.update(checkpoint_failure=None)


def _open(config: TrainerConfig, launch: Launch, groups: Groups, reporter: ProgressReporter) -> OpenedStore:
    settings, uri = config.checkpoint, config.checkpoint.uri
    if uri is None:
        return OpenedStore(config=config)
    collectives = Collectives(groups.checkpoint, launch.rank)
    # If the folder of a job with commits is missing, it is not mounted. A new one in its place would hold no commits.
    storage = collectives.together(
        lambda: open_storage(
            uri,
            endpoint_url=settings.endpoint_url,
            encryption=settings.encryption,
            create_folder=config.resume is None,
        )
    )
    if config.generation == 0:
        fence = collectives.from_rank_0(lambda: _newest_fence(storage), TypeAdapter(int))
        generation, attempt_id = identify_run(fence + 1)
        config = config.model_copy(update={"generation": generation, "attempt_id": attempt_id})
        reporter.update(generation=generation)
    writer = started_writer()
    if writer is not None:
        writer.connect(uri, settings.endpoint_url, settings.encryption)
    checkpointer = Checkpointer(
        storage,
        generation=config.generation,
        attempt_id=config.attempt_id,
        rank=launch.rank,
        world_size=launch.world_size,
        process_group=groups.checkpoint,
        retention=retention_of(config),
        writer=writer,
        free_bytes=lambda: FREE_SHARE * host_memory.free_bytes() / launch.local_world_size,
    )
    newest = checkpointer.latest(before_first=lambda: _try(storage, reporter))
    _refuse_older(newest, config.resume, uri)
    extra = checkpointer.newest_extra() if config.strategy == Strategy.AUTO else {}
    return OpenedStore(config=config, checkpointer=checkpointer, newest=newest, newest_extra=extra)


def _try(storage: CheckpointStorage, reporter: ProgressReporter) -> None:
    for finding in try_store(storage):
        if finding.warning is not None:
            logger.warning("%s", finding.warning)
            reporter.update(message=finding.warning)


def _newest_fence(storage: CheckpointStorage) -> int:
    head = read_head(storage)
    return head.fence if head is not None else 0


def _refuse_older(newest: Commit | None, known: CommitRef | None, uri: str) -> None:
    # A newer generation commits lower steps if it had to skip a damaged commit.
    if known is not None and (newest is None or (newest.generation, newest.step) < (known.generation, known.step)):
        found = f"its newest commit is step {newest.step}" if newest is not None else "it has no commit"
        raise CheckpointMismatch(
            f"The job has committed step {known.step} to {uri}, but now {found}. "
            "Restore the bucket's objects, or create a new job with a different checkpoint.uri."
        )
