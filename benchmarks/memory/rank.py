"""One rank that builds, shards and trains a case's model, and measures its peaks.

It trains for a few steps.

On the CPU, torch's MemTracker counts every storage. On a GPU, the figure is the allocator's own peak, and the model
is built on the CPU, as scripts do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.memory.cases import Case, Gpt
from spottrain.data.batch import BatchPlan
from spottrain.engines.auto import facts_of
from spottrain.engines.blocks import find_blocks, prepare_blocks
from spottrain.engines.choice import choose_engine
from spottrain.engines.engine import EngineConfig, SpreadingEngine
from spottrain_api.settings.training import DeepSpeedConfig
from spottrain_planner.memory_estimate import Estimate, ModelFacts, Workload, estimates

if TYPE_CHECKING:
    from torch.distributed._tools.mem_tracker import MemTracker

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Bytes while the model is built and sharded, and in a step.

    The runtime's own memory isn't in them.
    """

    start: int
    step: int

    @property
    def total(self) -> int:
        return max(self.start, self.step)


def estimated(case: Case, world_size: int, device_type: str) -> Peaks:
    facts = dataclasses.replace(_facts(case), built_bytes=None)
    workload = Workload(
        model=facts,
        micro_batch=case.shape.micro_batch,
        world_size=world_size,
        precision=case.precision,
        sequence_length=case.shape.context,
        activation_checkpointing=case.checkpointed,
        built_in_place=device_type == "cpu",
    )
    found = next(e for e in estimates(workload) if _is_of(e, case))
    return Peaks(start=found.start, step=found.step)


def _facts(case: Case) -> ModelFacts:
    with torch.device("meta"):
        return facts_of(Gpt(case.shape))


def _is_of(estimate: Estimate, case: Case) -> bool:
    if estimate.offload_optimizer:
        return False
    return case.strategy in (estimate.strategy, str(estimate.zero_stage))


def measured(case: Case, device: torch.device) -> Peaks:
    """Peaks of this rank, at the start and in its second step.

    A collective of the default process group.
    """
    from torch.distributed._tools.mem_tracker import MemTracker  # loads torch's compiler

    torch.manual_seed(0)
    tracker = MemTracker()
    with _counting(tracker, device):
        model = Gpt(case.shape)
        prepare_blocks(model, find_blocks(model), compiled=False, checkpointed=case.checkpointed)
        engine = _engine(case, device)
        spread, _ = engine.wrap(model, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, foreach=True))
    start = _peak(tracker, device)
    for _ in range(2):  # the optimizer creates its state in the first step
        with _counting(tracker, device):  # starts with what exists now
            _step(engine, spread, case, device)
    return Peaks(start=start, step=_peak(tracker, device))


def _peak(tracker: MemTracker, device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(tracker.get_tracker_snapshot("peak")[device]["Total"])


@contextlib.contextmanager
def _counting(tracker: MemTracker, device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield
    else:
        tracker.reset_mod_stats()
        with tracker:
            yield


def _engine(case: Case, device: torch.device) -> SpreadingEngine:
    shape = case.shape
    world_size = dist.get_world_size()
    plan = BatchPlan(
        global_batch=shape.micro_batch * world_size, micro_batch=shape.micro_batch, world_size=world_size
    )
    stage = int(case.strategy) if case.strategy.isdigit() else None
    config = EngineConfig(
        device=device, plan=plan, precision=_DTYPES[case.precision], deepspeed=DeepSpeedConfig(zero_stage=stage)
    )
    return choose_engine("deepspeed" if stage is not None else case.strategy, config)


def _step(engine: SpreadingEngine, model: Any, case: Case, device: torch.device) -> None:
    shape = case.shape
    ids = torch.randint(0, shape.vocabulary, (shape.micro_batch, shape.context), device=device)
    engine.begin_micro_batch(is_last=True)
    loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    engine.backward(loss)
    del loss
    engine.update()


def join(rank: int, world_size: int, port: int) -> None:
    """Create the default process group."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
