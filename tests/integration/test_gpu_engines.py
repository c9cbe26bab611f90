"""What only a GPU can show: that the estimate of memory holds there, and that fp16 trains and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.memory.cases import Case, Shape

from integration.gpu_ranks import in_a_world_of_one, peaks_and_estimates, train_in_fp16

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHAPE = Shape(layers=24, width=1024, context=1024, micro_batch=4, vocabulary=50_257)


@pytest.mark.parametrize(
    ("strategy", "precision", "checkpointed"),
    [
        ("ddp", "fp32", False),
        ("ddp", "bf16", False),
        ("fsdp", "bf16", False),
        ("fsdp", "bf16", True),
        ("2", "bf16", False),
        ("3", "bf16", True),
    ],
)
def test_the_estimate_is_near_the_allocators_peak(strategy: str, precision: str, checkpointed: bool) -> None:
    case = Case(shape=SHAPE, strategy=strategy, precision=precision, checkpointed=checkpointed)
    ((measured, estimated),) = in_a_world_of_one("cuda", peaks_and_estimates, "cuda", [case])
    assert 0.75 < estimated / measured < 1.5, (estimated, measured)


def test_fp16_trains_and_its_loss_scaler_is_resumed(tmp_path: Path) -> None:
    whole, parts, scale = in_a_world_of_one("cuda", train_in_fp16, f"file://{tmp_path}")
    assert whole == parts
    assert len(set(whole)) > 1
    assert 1 < scale < 2**24
