"""`strategy: auto`: the strategy of the commits, or what fits into the memory."""

from __future__ import annotations

from torch import nn

from spottrain.engines.auto import Machine, choose_automatically, least_of_all
from spottrain.engines.engine import EngineConfig
from spottrain.recovery.open_store import OpenedStore
from spottrain.recovery.training_state import STRATEGY
from spottrain.world.launch import Groups, Launch
from spottrain_api.contract.reports import StrategyChoice
from spottrain_api.settings.choices import Strategy


def choose_strategy(
    model: nn.Module,
    config: EngineConfig,
    store: OpenedStore,
    *,
    launch: Launch,
    groups: Groups,
    tokens_per_sample: int | None,
) -> StrategyChoice | None:
    """Choose for `strategy: auto`; a collective.

    If the job has commits, the strategy of these stays, so that the run stays the same.
    """
    job = store.config
    if job.strategy != Strategy.AUTO:
        return None
    recorded = store.newest_extra.get(STRATEGY)
    if recorded is not None:
        return StrategyChoice.model_validate(recorded)
    return choose_automatically(
        model,
        config,
        least_of_all(Machine.of(launch.device, launch.local_world_size), groups.agreement),
        min_world_size=job.min_world_size or launch.world_size,
        tokens_per_sample=tokens_per_sample,
        activation_checkpointing=job.activation_checkpointing,
    )
