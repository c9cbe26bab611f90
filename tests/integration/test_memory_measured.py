"""The estimate of memory beside the storages that a training keeps at the same time. `make bench-memory` has more."""

from __future__ import annotations

import pytest
from benchmarks.memory.cases import Case, Shape

from integration.gpu_ranks import in_a_world_of_one, peak_and_estimate

SHAPE = Shape(layers=6, width=256, context=128, micro_batch=2, vocabulary=5000)


@pytest.mark.parametrize(("strategy", "checkpointed"), [("ddp", False), ("fsdp", True)])
def test_the_estimate_is_near_the_measured_peak(strategy: str, checkpointed: bool) -> None:
    case = Case(shape=SHAPE, strategy=strategy, checkpointed=checkpointed)
    measured, estimated = in_a_world_of_one("cpu", peak_and_estimate, "cpu", case)
    assert 0.75 < estimated / measured < 1.5, (estimated, measured)
