"""The configuration for DeepSpeed: the job and the user's JSON.

They are merged, or refused with a sentence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spottrain.data.batch import BatchPlan
from spottrain.engines.choice import choose_engine
from spottrain.engines.deepspeed_config import merged_config
from spottrain.engines.engine import EngineConfig
from spottrain_api.settings.training import DeepSpeedConfig


def config(
    script: Any = None,
    *,
    precision: torch.dtype = torch.float32,
    clip_grad_norm: float | None = None,
    plan: BatchPlan | None = None,
    **job: Any,
) -> EngineConfig:
    return EngineConfig(
        device=torch.device("cpu"),
        plan=plan or BatchPlan(global_batch=32, micro_batch=4, world_size=2),
        precision=precision,
        clip_grad_norm=clip_grad_norm,
        deepspeed=DeepSpeedConfig(**job),
        deepspeed_config=script,
    )


def test_without_a_json_the_job_says_it_all() -> None:
    merged = merged_config(config(precision=torch.bfloat16, clip_grad_norm=1.0))
    assert merged["zero_optimization"] == {"stage": 2}
    assert merged["bf16"] == {"enabled": True}
    assert merged["data_types"] == {"grad_accum_dtype": "fp32"}
    assert merged["gradient_clipping"] == 1.0
    assert merged["zero_force_ds_cpu_optimizer"] is False
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [merged[key] for key in batch] == [4, 4, 32]


def test_gradients_are_clipped_only_where_somebody_asks_for_it() -> None:
    assert merged_config(config())["gradient_clipping"] == 0
    assert merged_config(config({"gradient_clipping": 2.0}))["gradient_clipping"] == 2.0
    assert merged_config(config({"gradient_clipping": "auto"}, clip_grad_norm=3.0))["gradient_clipping"] == 3.0


@pytest.mark.parametrize("world_size", range(1, 7))
def test_deepspeeds_sum_of_the_batch_fits_any_world_size(world_size: int) -> None:
    plan = BatchPlan(global_batch=10, micro_batch=3, world_size=world_size)
    merged = merged_config(config(plan=plan))
    assert merged["gradient_accumulation_steps"] == plan.num_micro_batches
    assert merged["train_batch_size"] == 3 * plan.num_micro_batches * world_size


def test_the_users_json_is_merged_and_auto_is_the_jobs(tmp_path: Path) -> None:
    given = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "communication_data_type": "bf16",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 10},
    }
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(given))
    for script in (given, path, str(path)):
        merged = merged_config(config(script, zero_stage=3, offload_parameters=True))
        assert merged["zero_optimization"] == {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "stage3_param_persistence_threshold": 10,
        }
        assert merged["communication_data_type"] == "bf16"
        assert "bf16" not in merged
    assert merged_config(config(config=given))["zero_optimization"]["stage"] == 3


def test_at_stage_0_bf16_is_autocast_and_not_deepspeeds() -> None:
    assert "bf16" not in merged_config(config({"bf16": {"enabled": True}}, precision=torch.bfloat16, zero_stage=0))


def test_fp16_keeps_the_users_settings_of_the_loss_scaler() -> None:
    scaler = {"initial_scale_power": 8, "hysteresis": 1}
    merged = merged_config(config({"fp16": scaler, "bf16": {"enabled": False}}, precision=torch.float16))
    assert merged["fp16"] == {**scaler, "enabled": True}
    assert "bf16" not in merged
    assert "fp16" not in merged_config(config({"fp16": scaler}, precision=torch.bfloat16))


REFUSED: dict[str, tuple[EngineConfig, str]] = {
    "train batch": (config({"train_batch_size": 64}), "train_batch_size that is not the job's batch.global 32"),
    "micro batch": (config({"train_micro_batch_size_per_gpu": 1}), "that is not the job's batch.micro 4"),
    "accumulation": (config({"gradient_accumulation_steps": 4}), "which follows from batch.global, batch.micro and"),
    "bf16": (config({"bf16": {"enabled": True}}), "bf16.enabled true, and the job's precision is fp32"),
    "not bf16": (config({"bf16": {"enabled": False}}, precision=torch.bfloat16), "enabled false.* is bf16"),
    "fp16": (config({"fp16": {"enabled": True}}), "fp16.enabled true, and the job's precision is fp32"),
    "fp16 at 0": (config(precision=torch.float16, zero_stage=0), "fp16 needs ZeRO stage 1, 2 or 3"),
    "optimizer": (config({"optimizer": {"type": "Adam"}}), "has 'optimizer': the script makes the optimizer"),
    "scheduler": (config({"scheduler": {"type": "WarmupLR"}}), "has 'scheduler'"),
    "stage": (
        config({"zero_optimization": {"stage": 1}}, zero_stage=3),
        "zero_optimization.stage 1, and the job has 3",
    ),
    "clipping": (
        config({"gradient_clipping": 2.0}, clip_grad_norm=1.0),
        "gradient_clipping 2.0, and the job has 1.0",
    ),
    "two JSONs": (config({"prescale_gradients": True}, config={"prescale_gradients": False}), "the script's"),
    "no such stage": (config({"zero_optimization": {"stage": 4}}), "zeroStage is 4; use 0, 1, 2 or 3"),
    "offload at 0": (config(zero_stage=0, offload_optimizer=True), "offload_optimizer .* needs ZeRO stage 1"),
    "offload at 2": (config(offload_parameters=True), "offload_param .* needs ZeRO stage 3 or higher, not 2"),
    "nvme": (config({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}), "to 'nvme'; checkpoints know"),
    "no section": (config({"zero_optimization": True}), "true, which is not an object; write {...}"),
    "no section of a precision": (config({"bf16": True}), "bf16 true, which is not an object"),
    "autocast": (config({"torch_autocast": {"enabled": True}}), "'torch_autocast': the job's precision decides"),
    "curriculum": (config({"curriculum_learning": {"enabled": True}}), "its state is not in the checkpoints"),
    "no file": (config("/nowhere/deepspeed.json"), "can't be read .*correct its path"),
}


@pytest.mark.parametrize(("given", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_contradicts_the_job_is_refused_with_a_sentence(given: EngineConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        merged_config(given)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_file_that_is_no_json_object_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"the DeepSpeed JSON .*deepspeed\.json is not"):
        merged_config(config(path))


def test_an_image_without_deepspeed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # what Python itself takes for "can't be imported"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match=r"needs the package deepspeed, .*install spottrain\[deepspeed\]"):
        choose_engine("deepspeed", config())
