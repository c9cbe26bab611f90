"""Jobs on a GPU, under each engine, drained and resumed in new processes.

They are the same, bit for bit, as jobs without a break.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from integration.gpu_training import STEPS, Case, run_jobs
from spottrain_api.settings.training import DeepSpeedConfig, FsdpConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

# Each is a context on the GPU and a core.
AT_ONCE = 6
ON_ONE_GPU = [
    Case(name="ddp", strategy="ddp"),
    Case(name="ddp bf16, fused", strategy="ddp", precision="bf16", fused=True, with_torchrun=False),
    Case(name="fsdp", strategy="fsdp"),
    Case(name="fsdp bf16, fused", strategy="fsdp", precision="bf16", fused=True),
    Case(name="fsdp bf16, on the CPU", strategy="fsdp", precision="bf16", fsdp=FsdpConfig(offload=True)),
    Case(name="zero 0 bf16", strategy="deepspeed", precision="bf16", deepspeed=DeepSpeedConfig(zero_stage=0)),
    Case(
        name="zero 1 bf16, without torchrun",
        strategy="deepspeed",
        precision="bf16",
        deepspeed=DeepSpeedConfig(zero_stage=1),
        with_torchrun=False,
    ),
    Case(
        name="zero 2, optimizer on the CPU",
        strategy="deepspeed",
        deepspeed=DeepSpeedConfig(zero_stage=2, offload_optimizer=True),
    ),
    Case(name="zero 2 fp16", strategy="deepspeed", precision="fp16", deepspeed=DeepSpeedConfig(zero_stage=2)),
    Case(name="zero 3 bf16", strategy="deepspeed", precision="bf16", deepspeed=DeepSpeedConfig(zero_stage=3)),
    Case(
        name="zero 3 bf16, on the CPU",
        strategy="deepspeed",
        precision="bf16",
        deepspeed=DeepSpeedConfig(zero_stage=3, offload_optimizer=True, offload_parameters=True),
    ),
]
# Where there are two.
ON_TWO_GPUS = [
    Case(name="ddp, two ranks", strategy="ddp", world_size=2),
    Case(name="fsdp bf16, two ranks", strategy="fsdp", precision="bf16", world_size=2),
    Case(
        name="zero 3 bf16, two ranks",
        strategy="deepspeed",
        precision="bf16",
        deepspeed=DeepSpeedConfig(zero_stage=3),
        world_size=2,
    ),
]
CASES = ON_ONE_GPU + (ON_TWO_GPUS if torch.cuda.device_count() > 1 else [])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_jobs(CASES, tmp_path_factory.mktemp("jobs"), at_once=AT_ONCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_resume_on_a_gpu_changes_no_bit(case: Case, results: dict[str, Any]) -> None:
    result = results[case.name]
    if isinstance(result, Exception):
        raise result
    steady, drained, resumed = result["steady"], result["drained"], result["resumed"]
    for generation in (steady, drained, resumed):
        assert generation.device == "cuda"
        assert "nccl" in generation.backends
        assert generation.writer_lives
    assert 3 <= max(drained.losses) < STEPS, "it was to be drained on its way"
    assert drained.losses | resumed.losses == steady.losses
    assert len(set(steady.losses.values())) == STEPS
    assert resumed.random_state == steady.random_state
    # From a GPU a loss is copied in the background, so that it is shown one step later.
    shown = {step: loss for step, loss in steady.shown.items() if not math.isnan(loss)}
    assert shown.keys() == {4, 5, 6}
    if case.world_size == 1:
        assert shown == pytest.approx({step: steady.losses[step - 3] for step in shown}, rel=1e-5)
    (wanted_step, wanted), (found_step, found) = result["wanted"], result["found"]
    assert wanted_step == found_step == STEPS
    assert wanted.keys() == found.keys()
    different = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    assert not different
