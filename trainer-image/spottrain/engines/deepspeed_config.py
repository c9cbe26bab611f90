"""The configuration for DeepSpeed.

It merges the job's settings with the user's own DeepSpeed JSON. Keys are those of
https://www.deepspeed.ai/docs/config-json/. As in Hugging Face's integration, the value "auto" means that the job
decides. A value that contradicts the job is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spottrain.engines.engine import EngineConfig

AUTO = "auto"
DEFAULT_ZERO_STAGE = 2
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Parts of DeepSpeed whose state checkpoints do not hold, or that would decide what the job decides.
_REFUSED = {
    "optimizer": "the script makes the optimizer; pass it to session.prepare(optimizer=...)",
    "scheduler": "the script makes the schedule; pass it to session.prepare(scheduler=...)",
    "amp": "apex is not supported; use precision bf16",
    "elasticity": "spottrain changes the world size itself",
    "pipeline": "models are spread by ZeRO alone",
    "tensor_parallel": "models are spread by ZeRO alone",
    "sequence_parallel_size": "models are spread by ZeRO alone",
    "autotuning": "it starts training runs of its own",
    "compression_training": "its state is not in the checkpoints",
    "zenflow": "its state is not in the checkpoints",
    "data_efficiency": "the order of the samples is the job's",
    "curriculum_learning": "its state is not in the checkpoints",
    "progressive_layer_drop": "its state is not in the checkpoints",
    "torch_autocast": "the job's precision decides the type of the computation; use precision bf16",
}
# Sections that this module reads.
_SECTIONS = ("zero_optimization", "bf16", "fp16")


def merged_config(config: EngineConfig) -> dict[str, Any]:
    """The whole configuration for `deepspeed.initialize`.

    Raises:
        ValueError: The JSON of the job (`deepspeed.config`) or of the script contradicts the job, or they contradict
            each other.
    """
    user = _of_user(config)
    _refuse_unsupported(user)
    _check_batch(user, config)
    _check_precision(user, config)
    merged = _merge(_of_job(config, user), user, "the DeepSpeed JSON")
    _check_zero(merged["zero_optimization"], config)
    return _with_batch(merged, config)


def named_stage(config: EngineConfig) -> int | None:
    """The ZeRO stage that the job or a JSON names, if any.

    Raises ValueError as `merged_config`.
    """
    stage: int | None = _of_user(config).get("zero_optimization", {}).get("stage")
    return config.deepspeed.zero_stage if stage is None else stage


def named_size(config: EngineConfig, key: str) -> int | None:
    """A number of elements in zero_optimization of a JSON, if there is one.

    Raises ValueError as `merged_config`.
    """
    size = _of_user(config).get("zero_optimization", {}).get(key)
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int | float) or size < 0:
        raise ValueError(f"the DeepSpeed JSON has {key} {json.dumps(size)}; write a number of elements, such as 5e8")
    return int(size)


def _of_user(config: EngineConfig) -> dict[str, Any]:
    """The JSON of the job, merged with the script's."""
    script = _read(config.deepspeed_config)
    user = _without_auto(_merge(config.deepspeed.config, script, "the script's DeepSpeed JSON"))
    for name in _SECTIONS:
        section = user.get(name, {})
        if not isinstance(section, Mapping):
            raise ValueError(
                f"the DeepSpeed JSON has {name} {json.dumps(section)}, which is not an object; write {{...}} there, "
                "as in DeepSpeed's documentation"
            )
    return user


def _of_job(config: EngineConfig, user: dict[str, Any]) -> dict[str, Any]:
    """The job's settings, and defaults for what neither it nor the user's JSON sets."""
    settings = config.deepspeed
    zero: dict[str, Any] = {}
    if settings.zero_stage is not None:
        zero["stage"] = settings.zero_stage
    elif "stage" not in user.get("zero_optimization", {}):
        zero["stage"] = DEFAULT_ZERO_STAGE
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    job: dict[str, Any] = {"zero_optimization": zero}
    if config.clip_grad_norm is not None:
        job["gradient_clipping"] = config.clip_grad_norm
    defaults = {
        # Sums of many small numbers lose too much precision in bf16.
        "communication_data_type": "fp32",
        # The script chooses the optimizer, also on the CPU.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        # By default DeepSpeed clips to 1, which no other strategy does.
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }
    return {key: value for key, value in defaults.items() if key not in user} | job


def _with_batch(merged: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """Add the batch and the precision.

    DeepSpeed requires that the batch sizes multiply. If the global batch does not divide, the product includes empty
    micro-batches; only DeepSpeed's logging depends on it, as losses are weighted already.
    """
    plan = config.plan
    merged["train_micro_batch_size_per_gpu"] = plan.micro_batch
    merged["gradient_accumulation_steps"] = plan.num_micro_batches
    merged["train_batch_size"] = plan.micro_batch * plan.num_micro_batches * plan.world_size
    # At stage 0, parameters stay in fp32, as under DDP, and autocast chooses what to compute in bf16.
    name = _PRECISIONS[config.precision] if merged["zero_optimization"]["stage"] > 0 else "fp32"
    for section in {"bf16", "fp16"} - {name}:
        merged.pop(section, None)
    if name != "fp32":
        merged[name] = {**merged.get(name, {}), "enabled": True}
        merged.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    return merged


def _read(given: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Read a DeepSpeed JSON.

    The script passes it to session.prepare as content or path.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    try:
        content = json.loads(Path(given).read_text())
    except OSError as error:
        raise ValueError(f"the DeepSpeed JSON {given} can't be read ({error.strerror}); correct its path") from error
    except ValueError as error:
        raise ValueError(f"the DeepSpeed JSON {given} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"the DeepSpeed JSON {given} is not an object; write {{...}} as in DeepSpeed's documentation"
        )
    return content


def _merge(base: Mapping[str, Any], other: Mapping[str, Any], source: str, path: str = "") -> dict[str, Any]:
    """Merge both, nested objects included. Refuses a key that has different values."""
    merged = dict(base)
    for key, value in other.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(known, value, source, f"{path}{key}.")
        elif key in merged and AUTO not in (known, value) and known != value:
            raise ValueError(
                f"{source} has {path}{key} {json.dumps(value)}, and the job has {json.dumps(known)}; "
                "remove one of them or make them the same"
            )
        elif key not in merged or known == AUTO:
            merged[key] = value
    return merged


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != AUTO
    }


def _refuse_unsupported(user: dict[str, Any]) -> None:
    for key, why in _REFUSED.items():
        section = user.get(key)
        switched_off = isinstance(section, Mapping) and section.get("enabled") is False
        if section and not switched_off:
            raise ValueError(f"the DeepSpeed JSON has {key!r}: {why}, and remove it there")


def _check_batch(user: dict[str, Any], config: EngineConfig) -> None:
    wanted = {
        "train_batch_size": ("batch.global", config.plan.global_batch),
        "train_micro_batch_size_per_gpu": ("batch.micro", config.plan.micro_batch),
    }
    for key, (field, value) in wanted.items():
        if user.pop(key, value) != value:
            raise ValueError(f"the DeepSpeed JSON has a {key} that is not the job's {field} {value}; remove it there")
    if "gradient_accumulation_steps" in user:
        raise ValueError(
            "the DeepSpeed JSON has gradient_accumulation_steps, which follows from batch.global, batch.micro and "
            "the number of ranks, and changes with it; remove it there"
        )


def _check_precision(user: dict[str, Any], config: EngineConfig) -> None:
    name = _PRECISIONS[config.precision]
    for section in ("bf16", "fp16"):
        enabled = user.get(section, {}).get("enabled", name == section)
        if enabled != (name == section):
            says = f"{section}.enabled {'true' if enabled else 'false'}"
            raise ValueError(f"the DeepSpeed JSON has {says}, and the job's precision is {name}; change one")


def _check_zero(zero: dict[str, Any], config: EngineConfig) -> None:
    stage = zero["stage"]
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed.zeroStage is {stage!r}; use 0, 1, 2 or 3")
    if stage == 0 and config.precision is torch.float16:
        raise ValueError("precision fp16 needs ZeRO stage 1, 2 or 3, not 0; raise zeroStage, or use bf16")
    least = {"offload_optimizer": 1, "offload_param": 3}
    for key, lowest in least.items():
        section = zero.get(key) or {}
        device = section.get("device", "none")
        if device == "none":
            continue
        if device != "cpu" or section.get("ratio", 1.0) != 1.0:
            raise ValueError(
                f'the DeepSpeed JSON offloads {key} to {device!r}; checkpoints know "cpu" (ratio 1) alone'
            )
        if stage < lowest:
            raise ValueError(f"{key} to the CPU needs ZeRO stage {lowest} or higher, not {stage}; raise zeroStage")
