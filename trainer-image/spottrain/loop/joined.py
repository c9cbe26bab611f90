"""How one rank joins the world, opens the checkpoints, and leaves again."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from spottrain.data import random_state
from spottrain.recovery.interval import CommitInterval
from spottrain.recovery.open_store import OpenedStore, open_store
from spottrain.world.drain import DrainFlag
from spottrain.world.failures import Drained
from spottrain.world.launch import Groups, Launch, barrier, join_world, process_started_at
from spottrain.world.listener import rounds_of
from spottrain.world.progress import ProgressReporter
from spottrain.world.rank_context import RankContext
from spottrain.world.stop_agreement import StopAgreement
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.reports import OutcomeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One rank in the world of its generation.

    Attributes:
        launch: Its place there.
        groups: The process groups.
        store: The checkpoints, as this rank has opened them.
        interval: How often to commit.
        context: The rank's ways to reach the other ranks and the agent.
    """

    launch: Launch
    groups: Groups
    store: OpenedStore
    interval: CommitInterval
    context: RankContext

    @classmethod
    def join(cls, launch: Launch, config: TrainerConfig, reporter: ProgressReporter) -> Joined:
        """Join the world. Raises UserError if the configuration or the checkpoint store is unusable, or Drained."""
        drain = DrainFlag(launch.run_dir, on_seen=lambda at: reporter.update(drain_seen_at=at))
        drain.catch_sigterm()
        interval = CommitInterval.of(config.checkpoint.interval, config.interruptions)
        reporter.milestone("python_started", process_started_at())
        reporter.milestone("session_started")
        groups = join_world(launch)
        reporter.milestone("process_group")
        random_state.seed_everything(config.seed)
        context = RankContext(
            rank=launch.rank,
            device=launch.device,
            agreement=StopAgreement(groups.agreement),
            drain=drain,
            rounds=rounds_of(launch.rank, launch.world_size),
            reporter=reporter,
        )
        try:
            store = open_store(config, launch, groups, reporter, sleep=context.sleep)
        except Drained:
            _leave(groups, reporter, OutcomeKind.DRAINED)
            raise
        reporter.milestone("checkpoint_store")
        return cls(launch=launch, groups=groups, store=store, interval=interval, context=context)

    def leave(self, kind: OutcomeKind) -> None:
        """Leave the world together with the other ranks. Nothing has failed."""
        _leave(self.groups, self.context.reporter, kind)


def _leave(groups: Groups, reporter: ProgressReporter, kind: OutcomeKind) -> None:
    """Write the outcome when all ranks are done, because the agent treats that of a drain as the process's end."""
    barrier(groups)
    reporter.finish(kind)
    dist.destroy_process_group()
