"""The configuration for DeepSpeed.

It merges the job's settings with the user's own DeepSpeed JSON, by the rules of `spottrain_planner.deepspeed_json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spottrain.engines.engine import EngineConfig
from spottrain.engines.precision import NAMES
from spottrain_planner.deepspeed_json import merge, user_json, zero_optimization

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


def merged_config(config: EngineConfig) -> dict[str, Any]:
    """The whole configuration for `deepspeed.initialize`.

    Raises:
        ValueError: The JSON of the job (`deepspeed.config`) or of the script contradicts the job, or they contradict
            each other.
    """
    user = user_settings(config)
    _refuse_unsupported(user)
    _check_batch(user, config)
    _check_precision(user, config)
    zero = zero_optimization(config.deepspeed, user)
    if zero["stage"] == 0 and config.precision is torch.float16:
        raise ValueError("precision fp16 needs ZeRO stage 1, 2 or 3, not 0; raise zeroStage, or use bf16")
    merged = merge(_of_job(config, user), user, "the DeepSpeed JSON") | {"zero_optimization": zero}
    return _with_batch(merged, config)


def user_settings(config: EngineConfig) -> dict[str, Any]:
    """The user's JSON: that of the job, merged with the script's. Raises ValueError as `merged_config`."""
    return user_json(config.deepspeed.config, _read(config.deepspeed_config))


def _of_job(config: EngineConfig, user: dict[str, Any]) -> dict[str, Any]:
    """What the job sets apart from ZeRO, and defaults.

    The defaults are for what neither it nor the user's JSON sets.
    """
    job = {} if config.clip_grad_norm is None else {"gradient_clipping": config.clip_grad_norm}
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
    name = NAMES[config.precision] if merged["zero_optimization"]["stage"] > 0 else "fp32"
    for section in {"bf16", "fp16"} - {name}:
        merged.pop(section, None)
    if name != "fp32":
        merged[name] = {**merged.get(name, {}), "enabled": True}
        merged.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    return merged


def _read(given: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Read a DeepSpeed JSON. The script passes it to session.prepare as content or path."""
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
    name = NAMES[config.precision]
    for section in ("bf16", "fp16"):
        enabled = user.get(section, {}).get("enabled", name == section)
        if enabled != (name == section):
            says = f"{section}.enabled {'true' if enabled else 'false'}"
            raise ValueError(f"the DeepSpeed JSON has {says}, and the job's precision is {name}; change one")
