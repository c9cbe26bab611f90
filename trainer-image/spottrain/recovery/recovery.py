"""Assembles the parts that save and restore a run on one rank, by the job's settings."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.recovery.interval import CommitInterval
from spottrain.recovery.open_store import OpenedStore, retention_of
from spottrain.recovery.reports import CheckpointReports
from spottrain.recovery.restorer import StateRestorer
from spottrain.recovery.saver import StateSaver
from spottrain.recovery.schedule import CheckpointSchedule
from spottrain.world.launch import Groups, Launch
from spottrain.world.progress import ProgressReporter
from spottrain_api.settings.choices import OnNotice


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The parts that save and restore the state of a run on one rank."""

    schedule: CheckpointSchedule
    reports: CheckpointReports
    saver: StateSaver
    restorer: StateRestorer

    @classmethod
    def build(
        cls,
        opened: OpenedStore,
        interval: CommitInterval,
        *,
        launch: Launch,
        groups: Groups,
        reporter: ProgressReporter,
    ) -> Recovery:
        """From the job's settings and its store, as this rank has opened it."""
        settings = opened.config.checkpoint
        replicas = _replicas(opened, launch, groups)
        schedule = CheckpointSchedule(
            interval=interval, waits_for_last_safe_moment=settings.on_notice == OnNotice.LAST_SAFE
        )
        reports = CheckpointReports(reporter=reporter, schedule=schedule, replicas=replicas, uri=settings.uri)
        saver = StateSaver(
            checkpointer=opened.checkpointer,
            schedule=schedule,
            reports=reports,
            retention=retention_of(opened.config),
            replicas=replicas,
        )
        restorer = StateRestorer(
            checkpointer=opened.checkpointer, newest=opened.newest, saver=saver, reports=reports, replicas=replicas
        )
        return cls(schedule=schedule, reports=reports, saver=saver, restorer=restorer)


def _replicas(opened: OpenedStore, launch: Launch, groups: Groups) -> Replicas | None:
    """Replicas in peers' memory, if the job asks for them."""
    settings = opened.config.replicas
    if opened.checkpointer is None or settings is None:
        return None
    return Replicas(
        settings,
        generation=opened.config.generation,
        rank=launch.rank,
        world_size=launch.world_size,
        ranks_per_node=launch.local_world_size,
        group=groups.checkpoint,
    )
