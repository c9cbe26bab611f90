"""Putting a session's Training together."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from spottrain.data.audit import AuditHeader, AuditWriter
from spottrain.data.batch import BatchPlan
from spottrain.data.loader import Data
from spottrain.data.order import DataOrder
from spottrain.data.own_data import OwnData
from spottrain.data.rank_data import RankData
from spottrain.data.streams.marks import StreamMarks
from spottrain.engines.blocks import find_blocks, prepare_blocks
from spottrain.engines.engine import Engine, EngineConfig
from spottrain.engines.precision import DTYPES
from spottrain.loop.build import Built
from spottrain.loop.joined import Joined
from spottrain.loop.stability import StabilityGuard
from spottrain.loop.training import Training
from spottrain.recovery.by_rank import RankPart
from spottrain.recovery.recovery import Recovery
from spottrain.recovery.script_parts import Stateful
from spottrain.recovery.training_state import ORDER, STABILITY, STREAMS, TrainingState
from spottrain.world.failures import as_user_errors
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.names import ENV_AUDIT_DIR
from spottrain_planner.batch_sizes import sizes_that_differ
from spottrain_runtime.logs import say

logger = logging.getLogger(__name__)
Each = TypeVar("Each")


def numbered(name: str, parts: Each | Sequence[Each] | None) -> dict[str, Each]:
    """Names of one part, or of several, in commits: the first has no number."""
    every: Sequence[Any] = parts if isinstance(parts, Sequence) else [parts] if parts is not None else []
    return {f"{name}_{number}" if number else name: each for number, each in enumerate(every)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What a session knows when it makes its Training.

    Attributes:
        config: The job's settings.
        joined: This rank in the world of its generation.
        built: The model that `Session.build` made; None if the script made its own.
    """

    config: TrainerConfig
    joined: Joined
    built: Built | None

    @property
    def batch_plan(self) -> BatchPlan:
        """How the ranks of this generation share the global batch.

        Raises:
            UserError: The batch and the number of ranks do not go together.
        """
        with as_user_errors():
            return BatchPlan(
                global_batch=self.config.batch.global_,
                micro_batch=self.config.batch.micro,
                world_size=self.joined.launch.world_size,
                multiple_of=self.config.batch.multiple_of,
            )

    def engine_config(self, **how: Any) -> EngineConfig:
        """The job's settings for an engine. `how` are further fields of EngineConfig."""
        return EngineConfig(
            device=self.joined.launch.device,
            plan=self.batch_plan,
            local_world_size=self.joined.launch.local_world_size,
            precision=DTYPES[self.config.precision],
            fsdp=self.config.fsdp,
            deepspeed=self.config.deepspeed,
            **how,
        )

    def prepare_blocks(self, model: nn.Module, wrap: Collection[type[nn.Module]] | None) -> None:
        """Compile and recompute the blocks of a model, as the job says."""
        prepare_blocks(
            model,
            find_blocks(model, wrap),
            compiled=self.config.compile,
            checkpointed=self.config.activation_checkpointing,
        )

    def training_with_data(
        self,
        engine: Engine,
        spread: nn.Module,
        data: Data,
        order: DataOrder,
        *,
        plan: BatchPlan | None = None,
        tokens_per_sample: int | None,
        scheduler_interval: str = "step",
        stateful: Mapping[str, Stateful] | None = None,
        **state: Any,
    ) -> Training:
        """Make a Training that reads the library's data. `state` are further fields of TrainingState.

        `plan` is how ranks share a batch, if not as the job says.
        """
        plan = plan or self.batch_plan
        self._say_sizes(plan)
        return self.training(
            engine,
            spread,
            self.rank_data(
                data,
                order,
                plan,
                tokens_per_sample=tokens_per_sample,
                schedule_interval=scheduler_interval,
            ),
            stateful=stateful or {},
            **state,
        )

    def rank_data(self, data: Data, order: DataOrder, plan: BatchPlan, **how: Any) -> RankData:
        """This rank's share of the library's data. `how` are further fields of RankData."""
        return RankData(
            data=data,
            order=order,
            plan=plan,
            rank=self.joined.launch.rank,
            generation=self.config.generation,
            attempt=self.config.attempt_id,
            local_world_size=self.joined.launch.local_world_size,
            open_audit=self._open_audit if os.environ.get(ENV_AUDIT_DIR) else None,
            **how,
        )

    def training(
        self,
        engine: Engine,
        spread: nn.Module,
        data: RankData | OwnData,
        *,
        stateful: Mapping[str, Stateful],
        by_rank: Mapping[str, RankPart] | None = None,
        **state: Any,
    ) -> Training:
        """Make a Training. `state` are further fields of TrainingState."""
        guard = StabilityGuard(self.config.stability) if self.config.stability is not None else None
        own = {STABILITY: guard, ORDER: data.place}
        parts = {**stateful, **{name: part for name, part in own.items() if part is not None}}
        training = Training(
            model=spread,
            engine=engine,
            state=TrainingState(
                models=engine,
                stateful=parts,
                by_rank={**(by_rank or {}), **self._stream_marks(data.marks)},
                build=self.built.record if self.built is not None else None,
                blank=self.built.blank if self.built is not None else frozenset(),
                **state,
            ),
            data=data,
            context=self.joined.context,
            recovery=Recovery.build(
                self.joined.store,
                self.joined.interval,
                launch=self.joined.launch,
                groups=self.joined.groups,
                reporter=self.joined.context.reporter,
            ),
            guard=guard,
        )
        self.joined.context.reporter.milestone("prepared")
        return training

    def world_sizes(self) -> tuple[int, int]:
        """The smallest and the largest number of ranks that the job may have."""
        return (
            self.config.min_world_size or self.joined.launch.world_size,
            self.config.max_world_size or self.joined.launch.world_size,
        )

    def _stream_marks(self, marks: StreamMarks | None) -> dict[str, RankPart]:
        if marks is None:
            return {}
        part = RankPart(
            part=marks,
            rank=self.joined.launch.rank,
            world_size=self.joined.launch.world_size,
            at_another_size=marks.merged,
            is_dealt=True,
        )
        return {STREAMS: part}

    def _say_sizes(self, plan: BatchPlan) -> None:
        """Say at the start of a run, on rank 0, how the size of a micro-batch depends on the number of ranks."""
        if self.joined.launch.rank != 0 or self.joined.store.newest is not None or plan.multiple_of > 1:
            return
        least, most = self.world_sizes()
        worlds = range(least, most + 1, self.joined.launch.local_world_size)
        sentence = sizes_that_differ(plan.global_batch, plan.micro_batch, worlds)
        if sentence is not None:
            say(logger, sentence)

    def _open_audit(self, header: AuditHeader) -> AuditWriter:
        folder = Path(os.environ[ENV_AUDIT_DIR])
        return AuditWriter(folder, header, generation=self.config.generation, rank=self.joined.launch.rank)
