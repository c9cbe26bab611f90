"""What a job's fields and a DeepSpeed JSON say about ZeRO together.

Keys are those of https://www.deepspeed.ai/docs/config-json/. As in Hugging Face's integration, the value "auto" means
that the job decides. A value that contradicts the job is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from spottrain_api.settings.training import DeepSpeedConfig

AUTO = "auto"
DEFAULT_ZERO_STAGE = 2
BUCKET, LIVE = "reduce_bucket_size", "stage3_max_live_parameters"
OFFLOAD_OPTIMIZER, OFFLOAD_PARAMETERS = "offload_optimizer", "offload_param"
_ZERO = "zero_optimization"
# Sections that spottrain reads.
_SECTIONS = (_ZERO, "bf16", "fp16")


def user_json(job: Mapping[str, Any], script: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON of the job, merged with the script's, without values "auto".

    Raises:
        ValueError: They contradict each other, a section is not an object, or a size is not a number.
    """
    user = _without_auto(merge(job, script or {}, "the script's DeepSpeed JSON"))
    for name, section in _sections(user):
        if not isinstance(section, Mapping):
            raise ValueError(
                f"the DeepSpeed JSON has {name} {json.dumps(section)}, which is not an object; write {{...}} there, "
                "as in DeepSpeed's documentation"
            )
    for key in (BUCKET, LIVE):
        named_size(user, key)
    return user


def named_stage(settings: DeepSpeedConfig, user: Mapping[str, Any]) -> int | None:
    """The ZeRO stage that the JSON or the job names, if any."""
    stage: int | None = user.get(_ZERO, {}).get("stage")
    return settings.zero_stage if stage is None else stage


def named_size(user: Mapping[str, Any], key: str) -> int | None:
    """A number of elements in zero_optimization of the JSON, if there is one.

    Raises:
        ValueError: It is not a number.
    """
    size = user.get(_ZERO, {}).get(key)
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
        raise ValueError(f"the DeepSpeed JSON has {key} {json.dumps(size)}; write a number of elements, such as 5e8")
    return int(size)


def zero_optimization(settings: DeepSpeedConfig, user: Mapping[str, Any]) -> dict[str, Any]:
    """That section for DeepSpeed: what the job and the JSON say of it.

    The stage is DEFAULT_ZERO_STAGE if neither names one.

    Raises:
        ValueError: They contradict each other, or the stage does not allow what they offload.
    """
    own: dict[str, Any] = {} if settings.zero_stage is None else {"stage": settings.zero_stage}
    if settings.offload_optimizer:
        own[OFFLOAD_OPTIMIZER] = {"device": "cpu"}
    if settings.offload_parameters:
        own[OFFLOAD_PARAMETERS] = {"device": "cpu"}
    zero = {"stage": DEFAULT_ZERO_STAGE} | merge(own, user.get(_ZERO, {}), "the DeepSpeed JSON", f"{_ZERO}.")
    _check(zero)
    return zero


def offloads(zero: Mapping[str, Any], part: str) -> bool:
    """Whether the section keeps a part off the accelerator.

    The part is OFFLOAD_OPTIMIZER or OFFLOAD_PARAMETERS.
    """
    device: str = (zero.get(part) or {}).get("device", "none")
    return device != "none"


def merge(base: Mapping[str, Any], other: Mapping[str, Any], source: str, path: str = "") -> dict[str, Any]:
    """Merge both, nested objects included.

    Raises:
        ValueError: A key has different values. The text names `source`, where `other` is from.
    """
    merged = dict(base)
    for key, value in other.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(known, value, source, f"{path}{key}.")
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


def _sections(user: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parts of the JSON that have to be objects, with their names."""
    yield from ((name, user.get(name, {})) for name in _SECTIONS)
    zero = user.get(_ZERO, {})
    yield from ((part, zero.get(part) or {}) for part in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAMETERS))


def _check(zero: Mapping[str, Any]) -> None:
    stage = zero["stage"]
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed.zeroStage is {stage!r}; use 0, 1, 2 or 3")
    for part, lowest in ((OFFLOAD_OPTIMIZER, 1), (OFFLOAD_PARAMETERS, 3)):
        if not offloads(zero, part):
            continue
        device, ratio = zero[part]["device"], zero[part].get("ratio", 1.0)
        if device != "cpu" or ratio != 1.0:
            raise ValueError(
                f'the DeepSpeed JSON offloads {part} to {device!r}; checkpoints know "cpu" (ratio 1) alone'
            )
        if stage < lowest:
            raise ValueError(f"{part} to the CPU needs ZeRO stage {lowest} or higher, not {stage}; raise zeroStage")
