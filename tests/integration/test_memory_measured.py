"""The estimate of memory, compared with the storages that a training keeps.

The storages are those that exist at the same time. `make bench-memory` has more cases.
"""

from __future__ import annotations

import pytest
from benchmarks.memory.cases import Case, Shape

from integration.gpu_ranks import in_a_world_of_one, moved_as_a_whole, peaks_and_estimates

pytestmark = pytest.mark.nightly

SHAPE = Shape(layers=6, width=256, context=128, micro_batch=2, vocabulary=5000)
# Next to no activations.
WIDE = Shape(layers=2, width=512, context=16, micro_batch=1, vocabulary=1000)


def test_the_estimate_is_near_the_measured_peak() -> None:
    cases = [Case(shape=SHAPE, strategy="ddp"), Case(shape=SHAPE, strategy="fsdp", checkpointed=True)]
    for case, (measured, estimated) in zip(
        cases, in_a_world_of_one("cpu", peaks_and_estimates, "cpu", cases), strict=True
    ):
        assert 0.75 < estimated.step / measured.step < 1.5, (case, estimated, measured)
        assert 0.85 < estimated.start / measured.start < 1.25, (case, estimated, measured)


def test_both_buckets_of_zero_3_are_counted() -> None:
    case = Case(shape=WIDE, strategy="3", precision="bf16")
    ((measured, estimated),) = in_a_world_of_one("cpu", peaks_and_estimates, "cpu", [case])
    assert 0.9 < estimated.step / measured.step < 1.35, (estimated, measured)
    assert measured.start < 1.05 * estimated.total, (estimated, measured)


@pytest.mark.parametrize(("stage", "num_parameters"), [(2, 272), (3, 0)])
def test_zero_3_moves_no_model_as_a_whole(stage: int, num_parameters: int) -> None:
    assert in_a_world_of_one("cpu", moved_as_a_whole, stage) == num_parameters
