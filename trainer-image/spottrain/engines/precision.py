"""Computing in bf16 with a model whose callers expect fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors

from spottrain_api.settings.choices import Precision

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
NAMES = {dtype: precision.value for precision, dtype in DTYPES.items()}


# Ampere: the first GPUs that compute in bf16, and in TF32, several times as fast as in fp32.
_FIRST_WITH_BF16 = (8, 0)


def slower_than_needed(precision: torch.dtype, device: torch.device) -> str | None:
    """A sentence if the model computes in plain fp32 on a GPU that has something faster."""
    if precision is not torch.float32 or device.type != "cuda" or torch.version.hip:
        return None
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return None
    if torch.cuda.get_device_capability(device) < _FIRST_WITH_BF16:
        return None
    return (
        f"The model computes in fp32 without TF32, and {torch.cuda.get_device_name(device)} is several times as fast "
        "in either of two ways: set the job's `precision: bf16`, or call "
        'torch.set_float32_matmul_precision("high") in the script.'
    )


def weights_in_fp32(model: nn.Module) -> None:
    """Convert the trained parameters of `model` to fp32. A lower precision applies only to the computation."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.float()


def autocast_forward(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Make `model` compute in `dtype` where that is safe, and return fp32. Parameters stay as they are."""
    model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)
    model.register_forward_hook(_output_to_fp32)


def cast_around(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `model` convert its inputs to `dtype`, and return fp32. Its parameters are in `dtype`."""

    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        changed: tuple[tuple[Any, ...], dict[str, Any]] = _cast((args, kwargs), dtype)
        return changed

    model.register_forward_pre_hook(cast, with_kwargs=True)
    model.register_forward_hook(_output_to_fp32)


def _output_to_fp32(module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, torch.float32)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Convert the tensors of a dict, a dataclass or the like, as FSDP2 does."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, values)
