"""How a generation comes to its checkpoints: the store is tried, older generations are shut out, and the newest
commit is found."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spottrain.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
    Commit,
    Retention,
    StorageUnavailable,
    open_storage,
    read_head,
)
from spottrain.checkpoint.collectives import Collectives
from spottrain.checkpoint.saving.writer import started_writer
from spottrain.engines import AUTO
from spottrain.recovery.reports import report_failure
from spottrain.recovery.store_retries import patiently
from spottrain.world.failures import start_error
from spottrain.world.launch import Groups, Launch, identify_run
from spottrain.world.progress import ProgressReporter
from spottrain_api.contract import CommitRef, TrainerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCheckpoints:
    """Of one rank; without a checkpointer nothing is saved."""

    config: TrainerConfig
    """With the generation, which without an operator follows from HEAD."""
    checkpointer: Checkpointer | None = None
    newest: Commit | None = None
    newest_extra: dict[str, Any] = field(default_factory=dict)
    """What the newest commit that can be read says beside its tensors; only for `strategy: auto`, which has to know
    it before there is a model to load."""


def open_checkpoints(
    config: TrainerConfig,
    launch: Launch,
    groups: Groups,
    reporter: ProgressReporter,
    sleep: Callable[[float], None] = time.sleep,
) -> OpenedCheckpoints:
    """A collective; raises UserError. Where the job has a commit, or a step in members' memory, a store that doesn't
    answer is waited for with `sleep`: a generation that fails for it is followed at once by the next, and the third
    would end the job."""
    replicas = config.replicas
    resumes = config.resume is not None or (replicas is not None and replicas.resume is not None)

    def waits(error: CheckpointError) -> None:
        report_failure(reporter, error)
        logger.warning("%s The store is tried again.", error)

    try:
        return patiently(
            lambda: _open(config, launch, groups, reporter),
            may_pass=lambda error: resumes and isinstance(error, StorageUnavailable),
            failed=waits,
            sleep=sleep,
        )
    except CheckpointError as error:
        report_failure(reporter, error)
        raise start_error(error, resumes=resumes) from error


def retention_of(config: TrainerConfig) -> Retention:
    return Retention(last=config.checkpoint.keep, every=config.checkpoint.keep_every)


def _open(config: TrainerConfig, launch: Launch, groups: Groups, reporter: ProgressReporter) -> OpenedCheckpoints:
    settings, uri = config.checkpoint, config.checkpoint.uri
    if uri is None:
        return OpenedCheckpoints(config=config)
    collectives = Collectives(groups.checkpoint, launch.rank)
    # A folder that has commits is there, or it isn't mounted: another in its place would hold none of them.
    storage = collectives.together(
        lambda: open_storage(uri, endpoint_url=settings.endpoint_url, create_folder=config.resume is None)
    )
    if config.generation == 0:
        head = collectives.from_rank_0(lambda: read_head(storage))
        generation, attempt_id = identify_run(head.fence + 1 if head is not None else 1)
        config = config.model_copy(update={"generation": generation, "attempt_id": attempt_id})
        reporter.update(generation=generation)
    writer = started_writer()
    if writer is not None:
        writer.connect(uri, settings.endpoint_url)
    checkpointer = Checkpointer(
        storage,
        generation=config.generation,
        attempt_id=config.attempt_id,
        rank=launch.rank,
        world_size=launch.world_size,
        process_group=groups.checkpoint,
        retention=retention_of(config),
        writer=writer,
    )
    newest = checkpointer.latest()
    _refuse_older(newest, config.resume, uri)
    extra = checkpointer.newest_extra() if config.strategy == AUTO else {}
    return OpenedCheckpoints(config=config, checkpointer=checkpointer, newest=newest, newest_extra=extra)


def _refuse_older(newest: Commit | None, known: CommitRef | None, uri: str) -> None:
    # A newer generation commits lower steps where it had to pass over a damaged commit.
    if known is not None and (newest is None or (newest.generation, newest.step) < (known.generation, known.step)):
        found = f"its newest commit is step {newest.step}" if newest is not None else "it has no commit"
        raise CheckpointMismatch(
            f"The job has committed step {known.step} to {uri}, but now {found}. "
            "Restore the bucket's objects, or make a new job with another checkpoint.uri."
        )
